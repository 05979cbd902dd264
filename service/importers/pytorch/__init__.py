"""Imports a state_dict of PyTorch, also of the `sru` and QRNN packages, from .pt, .pth, .bin, .ckpt or .safetensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from service.importers.draft import Draft, ImportRefused, Part
from service.importers.pytorch.convert import CONVERTERS, attention
from service.importers.pytorch.files import SAFETENSORS, read_tensors
from service.importers.pytorch.modules import Module, modules
from service.importers.pytorch.plan import Plan, Step, suggest, usual_order
from service.importers.recipe import FROM, Recipe
from service.modeling.spec.layers import LAYER_KINDS


def read(file: Path, recipe: Recipe) -> Draft:
    """Return the model of a state_dict; raises ImportRefused for a checkpoint or a recipe that does not make one."""
    found = modules(read_tensors(file))
    ordered = list(found.values()) if file.suffix != SAFETENSORS else usual_order(list(found.values()))
    plan = _from_recipe(recipe, found) if recipe.layers else suggest(ordered)
    layers = [_converted(step) for step in plan.layers]
    head = _head(plan, recipe, layers)
    used = {name: _place(index, step) for index, step in enumerate(plan.layers) for name in _names(step)}
    of_head = [step for step in (*plan.dense, plan.attention) if step is not None]
    of_head += [] if plan.linear is None else [Step({}, [plan.linear])]
    used |= {name: "head" for step in of_head for name in _names(step)}
    unused = [name for module in found.values() for name in module.names.values() if name not in used]
    return Draft("PyTorch state_dict", _input(layers, recipe), layers, head, used, unused, plan.notes)


def _from_recipe(recipe: Recipe, found: dict[str, Module]) -> Plan:
    plan = Plan()
    for index, layer in enumerate(recipe.layers):
        table = dict(layer)
        prefix = table.pop(FROM, None)
        if table.get("kind") not in LAYER_KINDS:
            raise ImportRefused(
                f"layers.{index} of the recipe has the kind {table.get('kind')!r}: use one of {', '.join(LAYER_KINDS)}"
            )
        norm = table.pop("norm_from", None)
        names = [prefix, norm] if norm is not None else [prefix]
        plan.layers.append(Step(table, [module for name in names if name is not None for module in _within(found, name)]))
        if prefix is None and table["kind"] in CONVERTERS:
            raise ImportRefused(
                f"layers.{index} of the recipe needs `from`, the start of the names of its tensors: {_listed(found)}"
            )
    for dense in recipe.dense:
        plan.dense.append(
            Step({key: value for key, value in dense.items() if key != FROM}, _within(found, dense.get(FROM, "")))
        )
    if recipe.head_from is not None:
        [plan.linear] = _within(found, recipe.head_from)[:1]
    if recipe.attention_from is not None:
        plan.attention = Step({}, _within(found, recipe.attention_from))
    return plan


def _within(found: dict[str, Module], prefix: str) -> list[Module]:
    """Return the module of this name, or all modules with names that start with it."""
    if prefix in found:
        return [found[prefix]]
    inner = [module for name, module in found.items() if name.startswith(f"{prefix}.")]
    if not inner:
        raise ImportRefused(f"no tensor starts with {prefix!r}: the modules are {_listed(found)}")
    return inner


def _listed(found: dict[str, Module]) -> str:
    return ", ".join(name or "(top level)" for name in found)


def _converted(step: Step) -> Part:
    """Return a layer; raises ImportRefused for tensors that do not fit together."""
    convert = CONVERTERS.get(step.table["kind"])
    if convert is None:
        return Part(dict(step.table))
    try:
        return convert(step.table, step.modules)
    except (ValueError, LookupError) as error:
        shapes = {name: module.tensors[leaf].shape for module in step.modules for leaf, name in module.names.items()}
        raise ImportRefused(f"these tensors do not make a {step.table['kind']} layer ({error}): {shapes}") from error


def _input(layers: Sequence[Part], recipe: Recipe) -> dict[str, Any]:
    """Return the input that fits the first layer."""
    first, given = layers[0], recipe.tables.get("input", {})
    if "features" in given:
        return {"kind": "features"}
    if first.table["kind"] == "embedding":
        return {"kind": "ids", "vocabulary": len(first.arrays["weight"])}
    projected = first.table["kind"] == "sru" and not {"0.forward.projection", "0.backward.projection"}.isdisjoint(first.arrays)
    names = ("projection",) if projected else ("input", "filters", "direction", "weight")
    matrix = next((array for name, array in first.arrays.items() if name.endswith(names)), None)
    if matrix is None:
        raise ImportRefused("the first layer has no weights that tell the number of features: add input.features to the recipe")
    return {"kind": "features", "features": matrix.shape[-2] * first.table.get("groups", 1)}


def _head(plan: Plan, recipe: Recipe, layers: Sequence[Part]) -> Part:
    """Return the head: the pool and the kind that most models have, unless the recipe says otherwise."""
    given = recipe.head
    kind = given.get("kind") or ("embed" if plan.linear is None else "classify")
    table: dict[str, Any] = {"kind": kind}
    if kind in ("classify", "regress", "embed") and "pool" not in given:
        table["pool"] = "max" if layers[-1].table["kind"] == "text_cnn" else "last"
        if table["pool"] == "last":
            plan.notes.append(
                'the head pools the last output of each sequence, which the file does not say: see "pool" for others'
            )
    arrays: dict[str, Any] = {}
    if plan.linear is not None:
        weight = plan.linear.weight.T
        arrays |= {"weight": weight, "bias": plan.linear.bias(weight.shape[1])}
        table |= _outputs(kind, weight.shape[1], given)
    if plan.attention is not None:
        arrays |= attention(plan.attention.modules)
        table |= {"attention_width": len(arrays["attention.query"])} if "attention.weight" in arrays else {}
    for index, step in enumerate(plan.dense):
        weight = step.modules[0].weight.T
        arrays |= {f"dense.{index}.weight": weight, f"dense.{index}.bias": step.modules[0].bias(weight.shape[1])}
        table.setdefault("dense", []).append({"width": weight.shape[1], **step.table})
    return Part(table, arrays)


def _outputs(kind: str, outputs: int, given: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that follow from the number of outputs of the head's linear layer."""
    if kind in ("classify", "tag"):
        return {} if "labels" in given else {"labels": [str(number) for number in range(outputs)]}
    return {"outputs": outputs} if kind == "regress" else {}


def _place(index: int, step: Step) -> str:
    return f"layers.{index} ({step.table['kind']})"


def _names(step: Step) -> list[str]:
    return [name for module in step.modules for name in module.names.values()]
