"""Imports a state_dict of PyTorch, also of the `sru` and QRNN packages, from .pt, .pth, .bin, .ckpt or .safetensors."""

from __future__ import annotations

from pathlib import Path

from service.importers.draft import UNFIT, Draft, ImportQuestion, ImportRefused, Part
from service.importers.ends import model_input, tried_recipe, usual_head
from service.importers.pytorch.convert import CONVERTERS, attention, dense
from service.importers.pytorch.files import SAFETENSORS, read_tensors
from service.importers.pytorch.modules import ModuleTensors, modules, without_copies
from service.importers.pytorch.plan import Plan, Step, suggest, usual_order
from service.importers.recipe import FROM, Recipe
from service.modeling.spec.layers import LAYER_KINDS


def read(file: Path, recipe: Recipe, weights: str | None = None) -> Draft:
    """Return the model of a state_dict; raises ImportRefused for a checkpoint or a recipe that does not make one.

    weights: the places of the state_dict within the checkpoint, or None for its only one.
    """
    everything = modules(read_tensors(file, weights))
    found = without_copies(everything)
    ordered = list(found.values()) if file.suffix != SAFETENSORS else usual_order(list(found.values()))
    plan = _from_recipe(recipe, found) if recipe.layers else suggest(ordered)
    if not recipe.layers:
        plan.assumed += [f"{name}: a second name of equal tensors" for name in everything if name not in found]
    layers = [_converted(step) for step in plan.layers]
    linear = None if plan.linear is None else dense({"kind": "dense"}, plan.linear.modules)
    pool = {} if plan.attention is None else attention(plan.attention.modules)
    below = [dense({"kind": "dense", **step.table}, step.modules) for step in plan.dense]
    head, assumed = usual_head(recipe, layers, below, linear, pool)
    places = [(f"layers.{index} ({step.table['kind']})", step) for index, step in enumerate(plan.layers)]
    places += [("head", step) for step in plan.of_head]
    used = {name: place for place, step in places for module in step.modules for name in module.names.values()}
    unused = [name for module in found.values() for name in module.names.values() if name not in used]
    of_linear = {} if plan.linear is None else plan.linear.entry
    tables, of_dense = ([step.entry for step in steps] for steps in (plan.layers, plan.dense))
    tried = "" if recipe.layers else tried_recipe(recipe, head, tables, of_dense, of_linear)
    assumed = plan.assumed + assumed
    return Draft("PyTorch state_dict", model_input(layers, recipe), layers, head, used, unused, assumed=assumed, tried=tried)


def _from_recipe(recipe: Recipe, found: dict[str, ModuleTensors]) -> Plan:
    plan = Plan()
    for index, layer in enumerate(recipe.layers):
        table = dict(layer)
        prefix = table.pop(FROM, None)
        if table.get("kind") not in LAYER_KINDS:
            raise ImportRefused(
                f"layers.{index} of the recipe has the kind {table.get('kind')!r}: use one of {', '.join(LAYER_KINDS)}"
            )
        norm = table.pop("norm_from", None)
        inner = [module for name in (prefix, norm) if name is not None for module in _within(found, name)]
        plan.layers.append(Step(table, inner))
        if prefix is None and table["kind"] in CONVERTERS:
            raise ImportRefused(
                f"layers.{index} of the recipe needs `from`, the start of the names of its tensors: {_listed(found)}"
            )
    for one in recipe.dense:
        plan.dense.append(Step({key: value for key, value in one.items() if key != FROM}, _within(found, one.get(FROM, ""))))
    if recipe.head_from is not None:
        plan.linear = Step({}, _within(found, recipe.head_from))
    if recipe.attention_from is not None:
        plan.attention = Step({}, _within(found, recipe.attention_from, with_inner=True))
    return plan


def _within(found: dict[str, ModuleTensors], prefix: str | list[str], *, with_inner: bool = False) -> list[ModuleTensors]:
    """Return the module of this name, or all modules with names that start with it; with_inner: both. prefix: one, or several."""
    if isinstance(prefix, list):
        return [module for name in prefix for module in _within(found, name, with_inner=with_inner)]
    exact = [found[prefix]] if prefix in found else []
    inner = [module for name, module in found.items() if name.startswith(f"{prefix}.")] if with_inner or not exact else []
    if not exact and not inner:
        raise ImportQuestion(f"no tensor starts with {prefix!r}: the modules are {_listed(found)}")
    return exact + inner


def _listed(found: dict[str, ModuleTensors]) -> str:
    return ", ".join(name or "(top level)" for name in found)


def _converted(step: Step) -> Part:
    """Return a layer; raises ImportRefused for tensors that do not fit together."""
    convert = CONVERTERS.get(step.table["kind"])
    if convert is None:
        return Part(dict(step.table))
    shapes = {f"{module.name}.{leaf}": array.shape for module in step.modules for leaf, array in module.tensors.items()}
    try:
        if any(module.kind == "unknown" for module in step.modules):
            raise ValueError("no layer is known to have all of them")
        return convert(step.table, step.modules)
    except UNFIT as error:
        raise ImportRefused(f"these tensors do not make a {step.table['kind']} layer ({error}): {shapes}") from error
