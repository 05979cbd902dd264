"""Recipes for checkpoints with layers: labels, the use of the output, and the precision."""

from __future__ import annotations

from typing import Any

from service.modeling.spec import ClassifyHead, Head, ModelSpec, RegressHead


def recipe(spec: ModelSpec) -> dict[str, Any]:
    """Return the recipe with which `seqserve import` reads the same model: labels, and the use of the output."""
    tables = spec.model_dump(exclude_defaults=True)
    head = {name: value for name, value in tables["head"].items() if name != "dense"}
    head = _labels_of_probability(spec.head) if is_one_probability(spec.head) else head
    return {**common(spec), "input": {"max_steps": spec.input.max_steps}, **({"head": head} if head else {})}


def common(spec: ModelSpec) -> dict[str, Any]:
    """Return the keys of the top level. A model that is imported has no int8 weights: `seqserve compress` makes them."""
    tables = spec.model_dump(exclude_defaults=True, exclude={"name", "sha256", "input", "layers", "head"})
    return tables | ({"precision": "float32"} if spec.precision == "int8" else {})


def is_one_probability(head: Head) -> bool:
    """Whether the answer is one number from a logistic function. An import reads it as the probability of the second of two labels."""
    if isinstance(head, RegressHead):
        return head.outputs == 1 and head.activation.kind == "sigmoid"
    return isinstance(head, ClassifyHead) and len(head.labels) == 1


def _labels_of_probability(head: Head) -> dict[str, Any]:
    return {"labels": [f"not {head.labels[0]}", head.labels[0]]} if isinstance(head, ClassifyHead) else {}
