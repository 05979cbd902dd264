"""Suggests layers for the modules of a state_dict, where a recipe does not name them.

A state_dict has names and shapes only. Other settings, such as activations and pools, are tried as most models have them. Each is a
question, which a recipe or a comparison with the source answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from service.importers.draft import ImportQuestion
from service.importers.ends import Table, chained
from service.importers.pytorch.modules import ModuleTensors
from service.importers.recipe import FROM

USUAL: dict[str, tuple[Table, str]] = {
    "embedding": ({}, "a dense layer without a bias fits too"),
    "dense": ({"activation": "none"}, "other activations fit too, and so does an embedding if it has no bias"),
    "conv": ({"stride": 1, "dilation": 1, "padding": "same", "activation": "relu"}, "others fit too, also transposed ones"),
    "text_cnn": ({"padding": 0}, "with relu and the maximum over time; others fit too, and so do convolutions in a row"),
    "tcn": ({}, "with relu, and dilations that double; others fit too"),
    "sru": ({"bidirectional": False, "activation": "identity", "skip": True}, 'true, "tanh", false, a norm "after" fit too'),
    "rnn": ({"activation": "tanh"}, "relu fits too"),
    "batch_norm": ({"epsilon": 1e-5}, "others fit too"),
    "layer_norm": ({"epsilon": 1e-5}, "RMSNorm, GroupNorm, InstanceNorm, PReLU, a batch norm without statistics fit too"),
}
"""The usual settings that tensors lack, and what else fits the tensors, by the kind of a layer."""
LOSS = re.compile(r"(^|\.)(criterion|loss\w*|\w+_loss)(\.|$)")
"""Names of modules that compute a loss."""
TCN = re.compile(r"(?P<stack>.*?)\.?\d+\.(conv1|conv2|downsample)")


@dataclass(slots=True)
class Step:
    """A table of model.toml and the modules that fill it."""

    table: Table
    modules: list[ModuleTensors] = field(default_factory=list)

    @property
    def entry(self) -> Table:
        """The table of a recipe."""
        names = [module.name for module in self.modules]
        return {**self.table, **({FROM: names if len(names) > 1 else names[0]} if names else {})}


@dataclass(slots=True)
class Plan:
    """Layers in order, the dense layers of the head, the head's attention and its linear layer if it has them; assumed: as in `Draft`."""

    layers: list[Step] = field(default_factory=list)
    dense: list[Step] = field(default_factory=list)
    attention: Step | None = None
    linear: Step | None = None
    assumed: list[str] = field(default_factory=list)

    @property
    def of_head(self) -> list[Step]:
        return [step for step in (*self.dense, self.attention, self.linear) if step is not None]

    def add(self, kind: str, modules: list[ModuleTensors]) -> None:
        """Add a layer, and the assumptions about it."""
        keys, others = USUAL.get(kind, ({}, ""))
        self.layers.append(Step({"kind": kind, **keys}, modules))
        tried = "".join(f", {key} = {json.dumps(value)}" for key, value in keys.items())
        self.assumed += [f"{modules[0].name}: {kind}{tried}; {others}"] * bool(others)


def usual_order(modules: Sequence[ModuleTensors]) -> list[ModuleTensors]:
    """Return modules in the order that most models have, where the order in the file means nothing: the embedding, the layers over time,
    and the linear layers, each with as many inputs as the linear layer before it has outputs."""
    after = {module.after_mingru for module in modules if module.kind == "mingru"}
    matrices = [module for module in modules if module.kind == "matrix" and module.name not in after]
    ordered = [module for module in matrices if "bias" not in module.tensors][:1]
    ordered += [module for module in modules if module.kind != "matrix"]
    return ordered + chained([module for module in matrices if module not in ordered], lambda module: module.weight.shape[::-1])


def suggest(modules: Sequence[ModuleTensors]) -> Plan:
    """Return the plan of modules in the order of the state_dict; raises ImportQuestion if a module has no known form."""
    of_loss = [one for one in modules if LOSS.search(one.name) and all(array.ndim < 2 for array in one.tensors.values())]
    numbers = [one for one in modules if one.kind == "unknown" and all(array.size == 1 for array in one.tensors.values())]
    plan, remaining = Plan(), [module for module in modules if module not in (*of_loss, *numbers)]
    plan.assumed += [f"{module.name}: weights of a loss, which no layer needs" for module in of_loss]
    plan.assumed += [f"{', '.join(one.names.values())}: numbers that no layer needs; factors fit too" for one in numbers]
    while remaining:
        module = remaining.pop(0)
        if module.kind == "unknown":
            shapes = ", ".join(
                f"{leaf} {array.shape}" + f" of {array.dtype}" * (array.dtype.kind != "f")
                for leaf, array in module.tensors.items()
            )
            whole = f"{module.name or 'the model'} has the tensors {shapes}, which no layer is known to have"
            raise ImportQuestion(f"{whole}: write a recipe with the [[layers]] that matter, and name it with --recipe")
        if module.kind == "matrix":
            _add_matrix(plan, module, remaining)
        elif module.kind == "conv":
            _add_convolutions(plan, module, remaining)
        elif module.kind == "sru":
            _add_sru(plan, module, remaining)
        elif module.kind == "mingru":
            _add_mingru(plan, module, remaining)
        else:
            plan.add(module.kind, [module])
    if not plan.layers:
        raise ImportQuestion(
            "the checkpoint has linear layers only, and none over a sequence: write its [[layers]], for --recipe"
        )
    names = [step.modules[0].name for step in (*plan.layers, *plan.of_head)]
    if len(names) > 1:
        plan.assumed.append(
            f"{' > '.join(names)}: layers in this order, each on the output of the previous layer; in another order, with branches, sums "
            "with an input (residual connections) or reversed steps, they have the same tensors"
        )
    return plan


def _add_matrix(plan: Plan, module: ModuleTensors, remaining: Sequence[ModuleTensors]) -> None:
    """An embedding comes first and has no bias. Other matrices after the last layer over time belong to the head."""
    if not plan.layers and "bias" not in module.tensors and any(other.kind != "matrix" for other in remaining):
        plan.add("embedding", [module])
    elif any(other.kind != "matrix" for other in remaining):
        plan.add("dense", [module])
    elif remaining:
        plan.dense.append(Step({"activation": "relu"}, [module]))
        plan.assumed.append(f"head.dense ({module.name}): relu; other activations fit too")
    else:
        plan.linear = Step({}, [module])


def _add_convolutions(plan: Plan, module: ModuleTensors, remaining: list[ModuleTensors]) -> None:
    """Add a TCN, convolutions side by side, or one convolution, with the modules that belong to it."""
    stack = TCN.fullmatch(module.name)
    if stack is not None:
        plan.add("tcn", [module, *_taken(remaining, lambda other: _is_within(other, stack["stack"]))])
        return
    width, inputs, _ = module.filters.shape
    beside = _taken(
        remaining, lambda other: other.kind == "conv" and other.filters.shape[1] == inputs and len(other.filters) != width
    )
    if beside:
        plan.add("text_cnn", [module, *beside])
        return
    norm = _taken(remaining, lambda other: other.kind == "batch_norm" and len(other.weight) == module.filters.shape[2])
    plan.add("conv", [module, *norm])


def _add_sru(plan: Plan, module: ModuleTensors, remaining: list[ModuleTensors]) -> None:
    within = f"{module.name.rpartition('.')[0]}."
    levels = _taken(remaining, lambda other: other.name.startswith(within) and other.kind in ("sru", "layer_norm"))
    plan.add("sru", [module, *levels])


def _add_mingru(plan: Plan, module: ModuleTensors, remaining: list[ModuleTensors]) -> None:
    """Add a minGRU and the linear layer after it, which the names tell apart from other modules."""
    plan.add("mingru", [module])
    for output in [other for other in remaining if other.name == module.after_mingru]:
        remaining.remove(output)
        plan.layers.append(Step({"kind": "dense"}, [output]))


def _is_within(module: ModuleTensors, stack: str) -> bool:
    match = TCN.fullmatch(module.name)
    return match is not None and match["stack"] == stack


def _taken(remaining: list[ModuleTensors], belongs: Callable[[ModuleTensors], bool]) -> list[ModuleTensors]:
    """Remove the leading modules that belong to a layer from `remaining`, and return them."""
    taken = []
    while remaining and belongs(remaining[0]):
        taken.append(remaining.pop(0))
    return taken
