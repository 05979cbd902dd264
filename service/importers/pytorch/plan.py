"""Suggests layers for the modules of a state_dict, where a recipe does not name them.

A state_dict has names and shapes only. Other settings, such as activations and pools, are assumed as most models have them. Each assumption
is noted: a comparison with the source shows whether it holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from service.importers.draft import ImportRefused
from service.importers.pytorch.convert import Table
from service.importers.pytorch.modules import Module

TCN = re.compile(r"(?P<stack>.*?)\.?\d+\.(conv1|conv2|downsample)")


@dataclass(slots=True)
class Step:
    """A table of model.toml and the modules that fill it."""

    table: Table
    modules: list[Module] = field(default_factory=list)


@dataclass(slots=True)
class Plan:
    """Layers in order, the dense layers of the head, the head's attention and its linear layer if it has them, and the assumptions."""

    layers: list[Step] = field(default_factory=list)
    dense: list[Step] = field(default_factory=list)
    attention: Step | None = None
    linear: Module | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def kinds(self) -> list[str]:
        return [step.table["kind"] for step in self.layers]


def usual_order(modules: Sequence[Module]) -> list[Module]:
    """Return modules in the order that most models have, where the order in the file means nothing: the embedding, the layers over time,
    and the linear layers, each with as many inputs as the linear layer before it has outputs."""
    matrices = [module for module in modules if module.kind == "matrix"]
    ordered = [module for module in matrices if "bias" not in module.tensors][:1]
    ordered += [module for module in modules if module.kind != "matrix"]
    linear = [module for module in matrices if module not in ordered]
    while linear:
        outputs = {len(module.weight) for module in linear}
        first = next((module for module in linear if module.weight.shape[1] not in outputs), linear[0])
        linear.remove(first)
        ordered.append(first)
    return ordered


def suggest(modules: Sequence[Module]) -> Plan:
    """Return the plan of modules in the order of the state_dict; raises ImportRefused if a module has no known form."""
    plan, remaining = Plan(), list(modules)
    while remaining:
        module = remaining.pop(0)
        if module.kind == "unknown":
            raise ImportRefused(
                f"{module.name or 'the model'} has the tensors {', '.join(module.tensors)}, which no layer is known to have: "
                "write a recipe with the [[layers]] that matter"
            )
        if module.kind == "matrix":
            _add_matrix(plan, module, remaining)
        elif module.kind == "conv":
            _add_convolutions(plan, module, remaining)
        elif module.kind == "sru":
            _add_sru(plan, module, remaining)
        else:
            plan.layers.append(Step({"kind": module.kind}, [module]))
            _assume_recurrent(plan, module)
    if not plan.layers:
        raise ImportRefused(
            "the checkpoint has linear layers only, and no layer over a sequence: write a recipe with its [[layers]]"
        )
    return plan


def _add_matrix(plan: Plan, module: Module, remaining: Sequence[Module]) -> None:
    """An embedding comes first and has no bias. Other matrices after the last layer over time belong to the head."""
    if not plan.layers and "bias" not in module.tensors and any(other.kind != "matrix" for other in remaining):
        plan.layers.append(Step({"kind": "embedding"}, [module]))
    elif any(other.kind != "matrix" for other in remaining):
        plan.layers.append(Step({"kind": "dense"}, [module]))
        plan.notes.append(f"{module.name}: no activation was assumed, which the file does not say")
    elif remaining:
        plan.dense.append(Step({"activation": "relu"}, [module]))
        plan.notes.append(
            f"{module.name}: relu was assumed as the activation of this layer of the head, which the file does not say"
        )
    else:
        plan.linear = module


def _add_convolutions(plan: Plan, module: Module, remaining: list[Module]) -> None:
    """Add a TCN, convolutions side by side, or one convolution, with the modules that belong to it."""
    stack = TCN.fullmatch(module.name)
    if stack is not None:
        levels = [module, *_taken(remaining, lambda other: _is_within(other, stack["stack"]))]
        plan.layers.append(Step({"kind": "tcn"}, levels))
        plan.notes.append(f"{stack['stack']}: the dilation of each level was assumed to double, which the file does not say")
        return
    inputs = module.filters.shape[1]
    beside = _taken(
        remaining, lambda other: other.kind == "conv" and other.filters.shape[1] == inputs and _differs(other, module)
    )
    if beside:
        plan.layers.append(Step({"kind": "text_cnn"}, [module, *beside]))
        plan.notes.append(f"{module.name} and others: relu and the maximum over time were assumed, without padding")
        return
    norm = _taken(remaining, lambda other: other.kind == "batch_norm" and len(other.weight) == module.filters.shape[2])
    plan.layers.append(Step({"kind": "conv", "padding": "same"}, [module, *norm]))
    assumed = "stride 1, dilation 1, padding to the same length and relu" + " after the batch norm" * bool(norm)
    plan.notes.append(f"{module.name}: {assumed} were assumed, which the file does not say")


def _add_sru(plan: Plan, module: Module, remaining: list[Module]) -> None:
    place = module.name.rpartition(".")[0]
    levels = [
        module,
        *_taken(remaining, lambda other: other.name.startswith(f"{place}.") and other.kind in ("sru", "layer_norm")),
    ]
    plan.layers.append(Step({"kind": "sru"}, levels))
    plan.notes.append(f"{place}: one direction and no activation of the cell were assumed, which the file does not say")


def _assume_recurrent(plan: Plan, module: Module) -> None:
    if module.kind == "rnn":
        plan.notes.append(f"{module.name}: tanh was assumed, which the file does not say")


def _is_within(module: Module, stack: str) -> bool:
    match = TCN.fullmatch(module.name)
    return match is not None and match["stack"] == stack


def _differs(one: Module, other: Module) -> bool:
    return len(one.filters) != len(other.filters)


def _taken(remaining: list[Module], belongs: Callable[[Module], bool]) -> list[Module]:
    """Remove the leading modules that belong to a layer from `remaining`, and return them."""
    taken = []
    while remaining and belongs(remaining[0]):
        taken.append(remaining.pop(0))
    return taken
