"""Changes a head to the kind that a recipe names, where the graph leaves it open: scores of every step may be tags or spans."""

from __future__ import annotations

from typing import Any

from service.importers.draft import Draft, ImportRefused, Part

OF_STEPS = ("tag", "span")


def answer_as(draft: Draft, kind: str | None) -> None:
    """Change the kind of the head of a draft, if the graph computes its numbers. The recipe completes the head.

    A product at every step may be the scores of tags or spans; a softmax after the last step, the next token; a dense layer above a
    pool, the last layer of an embedding.
    """
    found = draft.head.table["kind"]
    if kind in OF_STEPS and found == "sequence":
        _end_in_product(draft, kind)
    elif kind == "next" and found == "classify":
        if draft.head.table.get("pool") != "last" or draft.head.table.get("dense"):
            raise ImportRefused(
                'the recipe has a head of the kind "next", which works on the last output, and the graph does not'
            )
        draft.head = Part({"kind": kind}, draft.head.arrays)
    elif kind == "embed" and found in ("regress", "classify"):
        _end_in_dense(draft)


def _end_in_product(draft: Draft, kind: str) -> None:
    """Make the last layer the linear layer of the head."""
    last = draft.layers[-1].table
    if last["kind"] != "dense" or last["activation"] != "none":
        raise ImportRefused(
            f'the recipe has a head of the kind "{kind}", and the graph does not end in a product with its weights'
        )
    place = f"layers.{len(draft.layers) - 1} "
    arrays = draft.layers.pop().arrays
    labels = {"labels": [str(label) for label in range(last["width"])]} if kind == "tag" else {}
    draft.head = Part({"kind": kind, **labels}, arrays)
    draft.used = {name: f"head ({kind})" if became.startswith(place) else became for name, became in draft.used.items()}


def _end_in_dense(draft: Draft) -> None:
    """Make the linear layer of the head its last dense layer."""
    table, arrays = dict(draft.head.table), dict(draft.head.arrays)
    if table["kind"] == "classify" and not table.get("multi_label"):
        raise ImportRefused('the recipe has a head of the kind "embed", and the graph ends in a softmax')
    activation = "sigmoid" if table["kind"] == "classify" else table.get("activation", "none")
    dense: list[dict[str, Any]] = [*table.get("dense", ()), {"width": arrays["weight"].shape[1], "activation": activation}]
    for name in ("weight", "bias"):
        arrays[f"dense.{len(dense) - 1}.{name}"] = arrays.pop(name)
    pool: dict[str, Any] = {key: table[key] for key in ("pool", "attention_width") if key in table}
    draft.head = Part({"kind": "embed", **pool, "dense": dense}, arrays)
