"""Groups the tensors of a state_dict into modules, by their names and shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from service.importers.draft import Array
from service.modeling.layers import GATED, KINDS
from service.modeling.layers.kind import PYTORCH

IGNORED = ("num_batches_tracked",)
PARAMETRIZED = re.compile(r"parametrizations\.(\w+)\.original([01])")
"""Names of torch.nn.utils.parametrizations.weight_norm: `<weight>_g` and `<weight>_v` of torch.nn.utils.weight_norm."""
RAW = "_raw"
"""The end of the name of a weight before the dropout of a weight drop, as fastai and AWD-LSTM have it."""
RECURRENT = re.compile(rf"(?:{'|'.join(PYTORCH.values())})(?:_l\d+(?:_reverse)?)?")
GATES = {len(kind.gates): name for name, kind in GATED.items()}
"""The kind of a recurrent layer by its number of gates."""
OF_SRU = {*(layout.name for layout in KINDS["sru"].package.values()), "scale_x", "weight_proj"}
MINGRU, OUTPUT = "to_hidden_and_gate", "to_out"
"""The linear layers of minGRU-pytorch: of candidate and gate, and after the layer in some models."""
OF_BATCH_NORM = {"weight", "bias", "running_mean", "running_var"}
OF_WEIGHT = {1: "layer_norm", 2: "matrix", 3: "conv", 4: "conv"}
"""The kind of a module by the axes of its weight."""


@dataclass(slots=True)
class ModuleTensors:
    """The tensors of one module, by the last part of their names. name: the module's; names: whole name of each tensor."""

    name: str
    tensors: dict[str, Array] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """rnn, gru, lstm, sru, mingru, conv, matrix (a linear layer or an embedding), batch_norm, layer_norm (any norm), or unknown.

        A module with a tensor that its kind does not have is unknown: it computes something else.
        """
        leaves = self.tensors.keys()
        if any(array.dtype.kind != "f" for array in self.tensors.values()):
            return "unknown"  # quantised: its scale may be elsewhere
        hidden = next((array for leaf, array in self.tensors.items() if leaf.startswith("weight_hh")), None)
        if hidden is not None:
            units = next((array for leaf, array in self.tensors.items() if leaf.startswith("weight_hr")), hidden).shape[-1]
            fits = hidden.ndim == 2 and all(map(RECURRENT.fullmatch, leaves))
            return GATES.get(len(hidden) // units, "unknown") if fits else "unknown"
        if "weight_c" in leaves or "running_mean" in leaves:
            return "sru" if leaves <= OF_SRU else "batch_norm" if leaves <= OF_BATCH_NORM else "unknown"
        weight = self.tensors.get("weight", self.tensors.get("weight_v"))
        if weight is None or not leaves <= {"weight", "bias", "weight_g", "weight_v"}:
            return "unknown"
        bias = self.tensors.get("bias", weight)
        is_linear = bias.size == len(weight) and "rnn_lst." not in self.name
        if weight.ndim == 2 and not is_linear and 2 * weight.shape[1] in (3 * bias.size, 4 * bias.size):
            return "sru"  # without weights of the cell in its gates, as in version 1
        fits = bias.shape[:1] == weight.shape[:1] and (weight.ndim != 4 or 1 in weight.shape[1::2])
        if fits and weight.ndim == 2 and self.name.endswith(MINGRU):
            return "mingru" if len(weight) % 2 == 0 else "unknown"
        return OF_WEIGHT.get(weight.ndim, "unknown") if fits else "unknown"

    @property
    def after_mingru(self) -> str:
        """The name of the linear layer after a minGRU."""
        return self.name.removesuffix(MINGRU) + OUTPUT

    @property
    def filters(self) -> Array:
        """The filters of a convolution, (width, inputs, maps). The filters of a Conv2d over whole vectors are (maps, 1, width, inputs)."""
        weight = self.weight
        if weight.ndim == 4:
            weight = weight[:, 0].transpose(0, 2, 1) if weight.shape[1] == 1 else weight[:, :, :, 0]
        return np.ascontiguousarray(weight.transpose(2, 1, 0))

    @property
    def weight(self) -> Array:
        """The weight, computed from direction and magnitude if it has a weight norm."""
        return self.tensors["weight"] if "weight_v" not in self.tensors else _normed(self.tensors, "weight")

    def bias(self, size: int) -> Array:
        """Return the bias, or zeros."""
        return self.tensors.get("bias", np.zeros(size, np.float32))


def _normed(tensors: Mapping[str, Array], name: str) -> Array:
    """Return a weight from its direction and its magnitude, which has one number for each length that is normed."""
    direction, magnitude = tensors[f"{name}_v"].astype(np.float64), tensors[f"{name}_g"]
    axes = tuple(axis for axis, size in enumerate(magnitude.shape) if size == 1) if magnitude.ndim else None
    length = np.sqrt(np.square(direction).sum(axis=axes, keepdims=True))
    whole: Array = (direction * magnitude / length).astype(np.float32)
    return whole


def modules(tensors: Mapping[str, Array]) -> dict[str, ModuleTensors]:
    """Return the modules by name, in the order of the state_dict. Tensors that inference does not need are left out."""
    found: dict[str, ModuleTensors] = {}
    for name in sorted(tensors, key=lambda name: name.endswith(RAW)):  # a weight before its dropout replaces a copy after it
        place, leaf = _split(name)
        if leaf.endswith(RAW) and RECURRENT.fullmatch(leaf.removesuffix(RAW)):
            leaf = leaf.removesuffix(RAW)
            place = f"{place}.module" if f"{place}.module" in found else place
        if leaf not in IGNORED:
            module = found.setdefault(place, ModuleTensors(place))
            module.tensors[leaf] = tensors[name]
            module.names[leaf] = name
    for module in found.values():
        for base in [leaf[:-2] for leaf in module.tensors if leaf.endswith("_v") and RECURRENT.fullmatch(leaf[:-2])]:
            if f"{base}_g" in module.tensors:
                module.tensors[base] = _normed(module.tensors, base)
                del module.tensors[f"{base}_g"], module.tensors[f"{base}_v"]
    return found


def _split(name: str) -> tuple[str, str]:
    """Return the name of a tensor's module, and the name within it."""
    match = PARAMETRIZED.search(name)
    if match is not None and match.end() == len(name):
        return name[: match.start()].rstrip("."), f"{match[1]}_{'gv'[int(match[2])]}"
    place, _, leaf = name.rpartition(".")
    return place, leaf


def without_copies(found: dict[str, ModuleTensors]) -> dict[str, ModuleTensors]:
    """Leave out modules that a state_dict has under a second name, such as modules of a block that are also in its Sequential."""
    kept: dict[str, ModuleTensors] = {}
    for name, module in found.items():
        if not any(_same(module, other) for other in kept.values()):
            kept[name] = module
    return kept


def _same(one: ModuleTensors, other: ModuleTensors) -> bool:
    """Return whether two modules share their memory, or are equal where it was not kept."""
    if one.tensors.keys() != other.tensors.keys() or one.kind not in ("conv", "unknown"):
        return False
    pairs = [(array, other.tensors[leaf]) for leaf, array in one.tensors.items()]
    return all(first.shape == second.shape and np.array_equal(first, second) for first, second in pairs)
