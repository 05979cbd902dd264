"""Converts the tensors of a module to a layer: gates in the order of model.toml, matrices with inputs as rows, one bias."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from service.importers.draft import Array, ImportQuestion, ImportRefused, Part
from service.importers.ends import Table
from service.importers.pytorch.modules import ModuleTensors
from service.modeling.layers import GATED, KINDS
from service.modeling.layers.kind import PYTORCH

DIRECTIONS = (("forward", ""), ("backward", "_reverse"))
ATTENTION = {"query", "weight", "bias", "weight_g", "weight_v"}


def recurrent(table: Table, found: Sequence[ModuleTensors]) -> Part:
    """torch.nn.RNN, GRU or LSTM, or a cell. Gate orders are as in model.toml, and a GRU keeps the recurrent bias of its new gate."""
    module = _only(table, found)
    suffixes = _levels(module)
    bidirectional = "_l0_reverse" in suffixes
    if (bidirectional, module.kind) != (table.get("bidirectional", bidirectional), table["kind"]):
        raise ImportRefused(
            f"{module.name} is a {module.kind}{' in both directions' * bidirectional}, and the recipe says otherwise"
        )
    first = "" if suffixes == [""] else "_l0"
    names = {leaf.removesuffix(first) for leaf in module.tensors if leaf.endswith(first)}
    whole = {name + suffix for name in names for suffix in suffixes} == module.tensors.keys()
    if not whole or len(suffixes) % (1 + bidirectional) or len(names & {"bias_ih", "bias_hh"}) == 1:
        raise ImportRefused(
            f"{module.name or 'the model'} lacks tensors: each level has the same in each direction, two biases or none, "
            f"and it has {list(module.tensors)}"
        )
    arrays: dict[str, Array] = {}
    depth = len(suffixes) // (1 + bidirectional)
    for level in range(depth):
        for direction, suffix in DIRECTIONS[: 1 + bidirectional]:
            ours = direction if bidirectional else table.get("direction", "forward")
            suffix = "" if suffixes == [""] else f"_l{level}{suffix}"
            arrays |= {f"{level}.{ours}.{name}": array for name, array in _one_direction(module, suffix).items()}
    sizes = GATED[module.kind].options(_one_direction(module, first))
    return Part({**table, **sizes, "depth": depth, "bidirectional": bidirectional}, arrays)


def _levels(module: ModuleTensors) -> list[str]:
    return [leaf.removeprefix("weight_hh") for leaf in module.tensors if leaf.startswith("weight_hh")]


def _one_direction(module: ModuleTensors, suffix: str) -> dict[str, Array]:
    found = {ours: module.tensors[name + suffix] for ours, name in PYTORCH.items() if name + suffix in module.tensors}
    zeros = np.zeros(len(found["input"]), np.float32)
    biases = (found.get(name, zeros) for name in ("bias", "recurrent_bias"))
    matrices = found["input"].T, found["recurrent"].T
    arrays = GATED[module.kind].tensors("torch", *matrices, *biases, keeps_last=module.kind == "gru")
    return arrays | ({"projection": found["projection"].T} if "projection" in found else {})


def embedding(table: Table, found: Sequence[ModuleTensors]) -> Part:
    weight = _only(table, found).weight
    return Part({**table, "width": weight.shape[1]}, {"weight": weight})


def dense(table: Table, found: Sequence[ModuleTensors]) -> Part:
    """torch.nn.Linear."""
    module = _only(table, found)
    if module.kind != "matrix":
        raise ImportRefused(f"{module.name} is no linear layer, and the recipe says otherwise")
    weight = module.weight.T
    return Part({**table, "width": weight.shape[1]}, {"weight": weight, "bias": module.bias(weight.shape[1])})


def attention(found: Sequence[ModuleTensors]) -> dict[str, Array]:
    """The attention of a head: a `query` or a linear layer with one output, and a linear layer with tanh before it if there is one."""
    queries = [module.tensors["query"] for module in found if "query" in module.tensors]
    linear = [module for module in found if module.tensors.keys() - {"query"}]
    if not queries and linear and linear[-1].kind == "matrix" and len(linear[-1].weight) == 1:
        queries.append(linear.pop().weight)  # its bias adds the same number to the score of every step
    if len(queries) != 1 or len(linear) > 1 or any(not module.tensors.keys() <= ATTENTION for module in linear):
        raise ImportQuestion(
            f"{', '.join(module.name for module in found)} make no attention pool, which has a `query` or a linear layer with one "
            "output, and at most one linear layer before it: name its modules with attention_from"
        )
    arrays = {"attention.query": queries[0].ravel()}
    if linear:
        weight = linear[0].weight.T
        arrays |= {"attention.weight": weight, "attention.bias": linear[0].bias(weight.shape[1])}
    return arrays


def _convolution(module: ModuleTensors, *, weight_norm: bool) -> dict[str, Array]:
    """Return the filters and the bias. weight_norm: keep the weight norm, which is computed otherwise."""
    filters = module.filters
    bias = module.bias(filters.shape[2])
    if not weight_norm:
        return {"filters": filters, "bias": bias}
    direction = module.tensors["weight_v"].transpose(2, 1, 0)
    return {"direction": direction, "magnitude": module.tensors["weight_g"].ravel(), "bias": bias}


def conv(table: Table, found: Sequence[ModuleTensors]) -> Part:
    """torch.nn.Conv1d, and the batch norm that the recipe names after it."""
    module, *norms = found
    filters = module.filters
    arrays = _convolution(module, weight_norm=bool(table.get("weight_norm")))
    gated = table.get("activation") in ("glu", "gated_tanh")
    sizes: Table = {"filters": filters.shape[2] // (2 if gated else 1), "width": len(filters)}
    if norms:
        sizes["batch_norm"] = True
        arrays["norm"] = _statistics(norms[0])
    return Part({**table, **sizes}, arrays)


def text_cnn(table: Table, found: Sequence[ModuleTensors]) -> Part:
    """Convolutions of several widths over the same steps."""
    arrays: dict[str, Array] = {}
    for module in found:
        filters = module.filters
        if f"{len(filters)}.filters" in arrays:
            raise ImportRefused(f"two convolutions have the width {len(filters)}: a text_cnn has one of each width")
        arrays |= {f"{len(filters)}.filters": filters, f"{len(filters)}.bias": module.bias(filters.shape[2])}
    widths = [len(module.filters) for module in found]
    counts = {module.filters.shape[2] for module in found}
    if len(counts) != 1:
        raise ImportRefused(f"the convolutions have {sorted(counts)} filters: a text_cnn has as many of each width")
    return Part({**table, "widths": widths, "filters": counts.pop()}, arrays)


def tcn(table: Table, found: Sequence[ModuleTensors]) -> Part:
    """Levels of two causal convolutions, with a convolution of width 1 around them where the width changes (Bai et al. 2018)."""
    arrays: dict[str, Array] = {}
    remaining, level = list(found), 0
    while remaining:
        if len(remaining) < 2:
            raise ImportRefused(f"{remaining[0].name} stands alone: a level of a tcn has two convolutions")
        pair = [remaining.pop(0), remaining.pop(0)]
        for position, module in enumerate(pair):
            tensors = _convolution(module, weight_norm=bool(table.get("weight_norm")))
            arrays |= {f"{level}.{position}.{name}": array for name, array in tensors.items()}
        width, inputs, filters = pair[0].filters.shape
        if remaining and len(remaining[0].filters) == 1 and (width > 1 or inputs != filters):
            projection = remaining.pop(0)
            arrays[f"{level}.projection.filters"] = projection.filters
            arrays[f"{level}.projection.bias"] = projection.bias(projection.filters.shape[2])
        level += 1
    return Part({**table, "levels": level, "filters": filters, "width": width}, arrays)


def batch_norm(table: Table, found: Sequence[ModuleTensors]) -> Part:
    return Part(dict(table), {"norm": _statistics(_only(table, found))})


def layer_norm(table: Table, found: Sequence[ModuleTensors]) -> Part:
    module = _only(table, found)
    return Part(dict(table), {"norm": np.stack((module.weight, module.bias(len(module.weight))))})


def sru(table: Table, found: Sequence[ModuleTensors]) -> Part:
    """The `sru` and `pytorch-sru` packages."""
    cells = [module for module in found if module.kind == "sru"]
    norms = {module.name.rpartition(".")[0]: module for module in found if module.kind == "layer_norm"}
    if len(cells) + len(norms) != len(found):
        other = next(module for module in found if module.kind not in ("sru", "layer_norm"))
        raise ImportRefused(f"{other.name} is a module of its own within the SRU: import it as a layer before it")
    if not table.keys() >= {"bidirectional", "activation"}:
        raise ImportQuestion('add "bidirectional" and "activation" to the sru layer of the recipe: its shapes tell neither')
    bidirectional = bool(table["bidirectional"])
    hidden = len(cells[0].tensors["bias"]) // 2 // (1 + bidirectional)
    arrays: dict[str, Array] = {}
    scales, projections = set(), set()
    for level, cell in enumerate(cells):
        cell.tensors.setdefault("weight_c", np.zeros_like(cell.tensors["bias"]))
        cell.tensors.setdefault("scale_x", np.ones(1, np.float32))
        directions = _directions(table, bidirectional)
        of_level = KINDS["sru"].from_package(cell.tensors, directions, hidden)
        if "weight_proj" in cell.tensors:
            of_level |= {f"{direction}.projection": cell.tensors["weight_proj"] for direction in directions}
        arrays |= {f"{level}.{name}": array for name, array in of_level.items()}
        if not table.get("cell_gates", True):  # as in version 1 of the package
            if cell.tensors["weight_c"].any():
                raise ImportRefused(f"{cell.name}.weight_c is not zero, and cell_gates is false in the recipe: remove it")
            arrays = {name: array for name, array in arrays.items() if not name.endswith(".cell")}
        blocks = cell.tensors["weight"].shape[1] // (hidden * (1 + bidirectional))
        scales |= {cell.tensors["scale_x"].ravel()[0]} if blocks == 3 else set()
        projections |= {cell.tensors["weight_proj"].shape[1]} if "weight_proj" in cell.tensors else set()
        norm = norms.get(cell.name)
        if norm is not None:
            arrays[f"{level}.norm"] = np.stack((norm.tensors["weight"], norm.tensors["bias"]))
    if len(scales) > 1 or len(projections) > 1:
        raise ImportRefused(
            "the levels of the SRU have different scales or projections: import each level as a layer of its own"
        )
    keys: Table = {"hidden": hidden, "depth": len(cells), "bidirectional": bidirectional}
    scale = min(scales, default=np.float32(table.get("scale", 1.0)))
    keys |= {} if scale == np.float32(table.get("scale", 1.0)) else {"scale": float(scale)}
    keys |= {"projection": projections.pop()} if projections else {}
    keys |= {"layer_norm": table.get("layer_norm", "before")} if norms else {}
    return Part({**table, **keys}, arrays)


def _directions(table: Table, bidirectional: bool) -> tuple[str, ...]:
    """Return the directions of a module in model.toml. The file does not tell whether a single direction reads reversed steps."""
    return ("forward", "backward") if bidirectional else (table.get("direction", "forward"),)


def qrnn(table: Table, found: Sequence[ModuleTensors]) -> Part:
    """The QRNN of Salesforce and fastai."""
    arrays: dict[str, Array] = {}
    sizes: Table = {}
    inputs = 0
    for level, module in enumerate(found):
        weight, pooling = module.weight, table.get("pooling", "fo")
        blocks = {"f": 2, "fo": 3}.get(pooling, 0)
        if not blocks:
            raise ImportRefused(f'pooling is {pooling!r}: the package has "f" (without output gate) and "fo"')
        hidden = len(weight) // blocks
        window = weight.shape[1] // inputs if level else int(table.get("window", 1))
        tensors = {"weight": weight.reshape(len(weight), window, -1), "bias": module.bias(len(weight))}
        of_level = KINDS["qrnn"].from_package(tensors, _directions(table, False), hidden)
        arrays |= {f"{level}.{name}": array for name, array in of_level.items()}
        inputs = hidden
        if level and window != sizes["window"]:
            raise ImportRefused("the levels of the QRNN have different windows: import each level as a layer of its own")
        sizes = {"hidden": hidden, "window": window, "pooling": pooling, "depth": level + 1}
    return Part({**table, **sizes}, arrays)


def mingru(table: Table, found: Sequence[ModuleTensors]) -> Part:
    """Levels of minGRU-pytorch. Its gate is the gate of the new value, the opposite of the forget gate here: its sign changes."""
    arrays: dict[str, Array] = {}
    for level, module in enumerate(found):
        if module.kind != "mingru":
            raise ImportRefused(f"{module.name} is no minGRU, and the recipe says otherwise: import it as a layer of its own")
        wide, hidden = module.weight.T.copy(), len(module.weight) // 2
        bias = module.bias(2 * hidden).copy()
        wide[:, hidden:], bias[hidden:] = -wide[:, hidden:], -bias[hidden:]
        place = f"{level}.{_directions(table, False)[0]}"
        arrays |= {f"{place}.input": wide, f"{place}.bias": bias}
    return Part({**table, "hidden": hidden, "depth": len(found)}, arrays)


def _statistics(module: ModuleTensors) -> Array:
    size = len(module.tensors["running_mean"])
    gain, offset = module.tensors.get("weight", np.ones(size, np.float32)), module.bias(size)
    return np.stack((gain, offset, module.tensors["running_mean"], module.tensors["running_var"]))


def _only(table: Table, found: Sequence[ModuleTensors]) -> ModuleTensors:
    if len(found) != 1:
        names = ", ".join(module.name for module in found)
        raise ImportQuestion(f"the {table['kind']} layer needs one module, and its name fits {names}: make `from` longer")
    return found[0]


CONVERTERS: dict[str, Callable[[Table, Sequence[ModuleTensors]], Part]] = {
    "rnn": recurrent,
    "gru": recurrent,
    "lstm": recurrent,
    "embedding": embedding,
    "dense": dense,
    "conv": conv,
    "text_cnn": text_cnn,
    "tcn": tcn,
    "batch_norm": batch_norm,
    "layer_norm": layer_norm,
    "sru": sru,
    "qrnn": qrnn,
    "mingru": mingru,
}
"""The function for each kind of layer that has tensors."""
