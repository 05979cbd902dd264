"""The input and the head of a model whose source has tensors and no code: what most models have, unless a recipe says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from service.importers.draft import Array, ImportRefused, Part
from service.importers.recipe import Recipe
from service.modeling import store

T = TypeVar("T")
Table = dict[str, Any]


def model_input(layers: Sequence[Part], recipe: Recipe) -> Table:
    """Return the input that fits the first layer."""
    first = layers[0]
    if "features" in recipe.tables.get("input", {}):
        return {"kind": "features"}
    if first.table["kind"] == "embedding":
        return {"kind": "ids", "vocabulary": len(first.arrays["weight"])}
    projected = first.table["kind"] == "sru" and not {"0.forward.projection", "0.backward.projection"}.isdisjoint(first.arrays)
    names = ("projection",) if projected else ("input", "filters", "direction", "weight")
    matrix = next((array for name, array in first.arrays.items() if name.endswith(names)), None)
    if matrix is None:
        raise ImportRefused("the first layer has no weights that tell the number of features: add input.features to the recipe")
    return {"kind": "features", "features": matrix.shape[-2] * first.table.get("groups", 1)}


def chained(linear: Sequence[T], widths: Callable[[T], Sequence[int]]) -> list[T]:
    """Return linear layers in an order in which the outputs of each fit the next. widths: returns the inputs and outputs of one."""
    remaining, chain = list(linear), list[T]()
    while remaining:
        outputs = {widths(one)[1] for one in remaining}
        chain.append(next((one for one in remaining if widths(one)[0] not in outputs), remaining[0]))
        remaining.remove(chain[-1])
    return chain


def usual_head(
    recipe: Recipe, layers: Sequence[Part], dense: Sequence[Part], linear: Part | None, attention: Mapping[str, Array]
) -> tuple[Part, list[str]]:
    """Return the head and the assumptions about it. dense, linear: its layers; attention: the tensors of its attention, or none."""
    given, assumed = recipe.head, list[str]()
    outputs, is_text_cnn = 0 if linear is None else linear.table["width"], layers[-1].table["kind"] == "text_cnn"
    without_linear = "embed" if is_text_cnn or dense or attention else "sequence"
    kind = given.get("kind") or (("classify" if outputs > 1 else "regress") if outputs else without_linear)
    table: Table = {"kind": kind}
    if outputs and "kind" not in given:
        others = "classify with multi_label, regress, tag, span, next and embed"
        assumed.append(f'head.kind: "{kind}", for {outputs} outputs; {others} have such a layer too')
    if kind in ("classify", "regress", "embed") and "pool" not in given:
        table["pool"] = "max" if is_text_cnn else "attention" if attention else "last"
        if table["pool"] == "last":
            assumed.append('head.pool: "last"; first, last_step, mean, max and sum have the same tensors')
    if kind in ("classify", "tag") and outputs and "labels" not in given:
        table["labels"] = [str(number) for number in range(outputs)]
    table |= {"outputs": outputs} if kind == "regress" else {}
    table |= {"attention_width": len(attention["attention.query"])} if "attention.weight" in attention else {}
    arrays = {**({} if linear is None else linear.arrays), **attention}
    for index, part in enumerate(dense):
        arrays |= {f"dense.{index}.{name}": array for name, array in part.arrays.items()}
        table.setdefault("dense", []).append({key: value for key, value in part.table.items() if key != "kind"})
    return Part(table, arrays), assumed


def tried_recipe(recipe: Recipe, head: Part, layers: Sequence[Table], dense: Sequence[Table], names: Table) -> str:
    """Return the recipe that was tried. layers, dense: its tables; names: the keys of its head that name modules."""
    table = {key: head.table[key] for key in ("kind", "pool") if key in head.table} | recipe.head | names
    return store.toml({"layers": layers, "head": table | ({"dense": dense} if dense else {})})
