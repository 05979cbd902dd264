"""Recognises attention pools: the sum of every step times the softmax of its score."""

from __future__ import annotations

from service.importers.chain.nodes import Layer, Node, Pooled, Settled, StepWeights, Weighted, same
from service.importers.chain.settling import settled
from service.importers.chain.signal import Signal
from service.importers.draft import ImportRefused


def step_weights(x: Signal, label: str) -> Signal:
    """Return the softmax over the steps of one number for each step."""
    if x.columns.size != 1 or len(x.parts) != 1 or x.pads != (0, 0):
        raise ImportRefused("it has a softmax over steps, and only an attention pool with one score for each step has it")
    return x.map_parts(lambda part: StepWeights(part, label))


def weighted(first: Signal, second: Signal, operation: str, label: str) -> Signal | None:
    """Multiply every step by its weight."""
    if operation != "multiply":
        return None
    for weights, steps in ((first, second), (second, first)):
        node = weights.parts[0]
        if isinstance(node, StepWeights) and not any(isinstance(part, StepWeights | Weighted) for part in steps.parts):
            return steps.map_parts(lambda part, node=node: Weighted(part, node, label))  # type: ignore[misc]
    return None


def is_attended(node: Node, pool: str) -> bool:
    """Whether a pool of a node is an attention pool."""
    return isinstance(node, Weighted) and pool == "sum"


def attention_pool(node: Node) -> Pooled:
    """Return the pool of steps times their weights; raises ImportRefused for scores that a head does not compute."""
    assert isinstance(node, Weighted)
    below = settled(node.below)
    score = settled(node.weights.below)
    if not (_is_dense(score, "none") and isinstance(score, Layer)):
        raise ImportRefused(f"{node.weights.label} has a score for each step that is no product of the step with a query")
    query, origins = score.arrays["weight"][:, 0], score.origins
    if same(score.below, below):
        return Pooled(below, ("attention",), arrays={"attention.query": query}, origins=origins)
    hidden = score.below
    if isinstance(hidden, Layer) and _is_dense(hidden, "tanh") and same(hidden.below, below):
        arrays = {f"attention.{name}": hidden.arrays[name] for name in ("weight", "bias")}
        table = {"attention_width": hidden.width}
        return Pooled(below, ("attention",), table, {"attention.query": query, **arrays}, origins | hidden.origins)
    raise ImportRefused(
        f"{node.weights.label} weighs other steps than those from which it follows, or by another score than step @ query and "
        "tanh(step @ weight + bias) @ query"
    )


def _is_dense(node: Settled, activation: str) -> bool:
    return isinstance(node, Layer) and node.kind == "dense" and node.table["activation"] == activation
