"""Each head compared with a few lines of plain PyTorch, row by row and in float64."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from torch import Tensor

from kernels.ragged import Encoded, Outputs
from service.modeling.heads import HeadOutput, RunnableHead
from service.modeling.spec.heads import Head
from tests.kernels import inputs
from tests.kernels.inputs import assert_close

CPU = torch.device("cpu")
LENGTHS = [9, 1, 14, 3]
WIDTH, VOCABULARY = 7, 11
LABELS = ("near", "far", "unknown")
_HEAD: TypeAdapter[Head] = TypeAdapter(Head)
EVERY: list[dict[str, Any]] = [
    {"kind": "classify", "pool": "last", "labels": LABELS},
    {"kind": "classify", "pool": "mean", "labels": LABELS},
    {"kind": "regress", "pool": "max", "outputs": 2},
    {"kind": "regress", "pool": "mean"},
    {"kind": "embed", "pool": "last"},
    {"kind": "embed", "pool": "max", "normalize": True},
    {"kind": "tag", "labels": LABELS},
    {"kind": "span"},
    {"kind": "next", "top": 4},
    {"kind": "next", "top": VOCABULARY},
    {"kind": "sequence"},
]


def arrays(head: dict[str, Any], storage: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = _HEAD.validate_python(head).tensors(WIDTH, VOCABULARY)
    return {f"head.{name}": torch.randn(shape, generator=generator).to(storage) for name, shape in shapes.items()}


def built(head: dict[str, Any], storage: torch.dtype = torch.float32) -> RunnableHead:
    return RunnableHead(_HEAD.validate_python(head), arrays(head, storage), CPU)


def encoding() -> Encoded:
    """Return possible outputs of a last layer, without a state."""
    generator = torch.Generator().manual_seed(0)
    return inputs.encoding([torch.randn(steps, WIDTH, generator=generator) for steps in LENGTHS], None)


def run_head(runnable: RunnableHead, lengths: Sequence[int] = LENGTHS, encoded: Encoded | None = None) -> HeadOutput:
    """Return the output of a head that gets only the encoder outputs that it wants."""
    outputs = encoding() if encoded is None else encoded
    wanted = {name: getattr(outputs, name) for name in inputs.OUTPUTS if getattr(runnable.wants, name)}
    return runnable(Encoded(None, **wanted), inputs.ragged(torch.empty(sum(lengths)), lengths).offsets)


def expected(head: dict[str, Any]) -> HeadOutput:
    """Return the output of every head but span."""
    given, encoded = arrays(head), encoding()
    x: Tensor = getattr(encoded, "steps" if head["kind"] == "tag" else head.get("pool", "last"))
    if head["kind"] == "sequence":
        return HeadOutput()
    if head["kind"] == "embed":
        return HeadOutput(embedding=x / (x * x).sum(1, keepdim=True).sqrt() if head.get("normalize") else x)
    logits = x.double() @ given["head.weight"].double() + given["head.bias"].double()
    if head["kind"] == "regress":
        return HeadOutput(logits, embedding=x)
    if head["kind"] == "classify":
        return HeadOutput(logits.softmax(1), embedding=x)
    likely = logits.softmax(1).sort(descending=True)
    count = head.get("top", 1)
    return HeadOutput(likely.values[:, :count], likely.indices[:, :count], None if head["kind"] == "tag" else x)


@pytest.mark.parametrize("head", [head for head in EVERY if head["kind"] != "span"], ids=str)
def test_head_is_as_written_in_torch(head: dict[str, Any]) -> None:
    output, wanted = run_head(built(head)), expected(head)
    assert output.per_step == (head["kind"] == "tag")
    assert (output.picks is None) == (wanted.picks is None)
    if output.picks is not None and wanted.picks is not None:
        assert output.picks.dtype == torch.int32 and output.picks.tolist() == wanted.picks.tolist()
    for ours, theirs in ((output.scores, wanted.scores), (output.embedding, wanted.embedding)):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.dtype == torch.float32
            assert_close(ours, theirs, steps=0)


def test_normalizing_zeros_returns_zeros() -> None:
    zeros = inputs.encoding([torch.zeros(2, WIDTH)], None)
    output = run_head(built({"kind": "embed", "pool": "max", "normalize": True}), [2], zeros)
    assert output.embedding is not None and not output.embedding.any()


def span_over(scores: Sequence[Sequence[float]]) -> tuple[float, tuple[int, int], dict[tuple[int, int], float]]:
    """Return the head's output for start and end scores, and the probability of every span."""
    head = RunnableHead(
        _HEAD.validate_python({"kind": "span"}), {"head.weight": torch.eye(2), "head.bias": torch.zeros(2)}, CPU
    )
    steps = torch.tensor(scores)
    output = run_head(head, [len(steps)], inputs.encoding([steps], None))
    assert output.scores is not None and output.picks is not None
    assert output.scores.shape == (1, 1) and output.picks.shape == (1, 2)
    start, end = steps.double().softmax(0).unbind(1)
    every = {pair: float(start[pair[0]] * end[pair[1]]) for pair in combinations_with_replacement(range(len(steps)), 2)}
    return float(output.scores[0, 0]), (int(output.picks[0, 0]), int(output.picks[0, 1])), every


@settings(max_examples=60)
@given(st.lists(st.tuples(*[st.floats(-6, 6, width=32) | st.sampled_from([-1.0, 0.0, 2.0])] * 2), min_size=1, max_size=17))
def test_span_is_the_most_likely_valid_span(scores: list[tuple[float, float]]) -> None:
    score, pair, every = span_over(scores)
    assert pair in every
    assert every[pair] == pytest.approx(max(every.values()), rel=1e-5)
    assert score == pytest.approx(every[pair], rel=1e-5)


@pytest.mark.parametrize("scale", [1e4, 1e30])
def test_span_of_huge_scores_is_finite(scale: float) -> None:
    score, pair, _ = span_over([(0.0, 0.0), (scale, 0.0), (0.0, scale)])
    assert (score, pair) == (1.0, (1, 2))


def test_spans_of_a_batch_are_those_of_its_rows() -> None:
    runnable, encoded = built({"kind": "span"}), encoding()
    rows = inputs.steps_by_row(encoded, inputs.ragged(torch.empty(sum(LENGTHS)), LENGTHS))
    alone = [run_head(runnable, [len(row)], inputs.encoding([row], None)).picks for row in rows]
    together = run_head(runnable).picks
    assert together is not None and together.tolist() == [pick.tolist()[0] for pick in alone if pick is not None]


@pytest.mark.parametrize("head", [*EVERY, {"kind": "regress", "pool": "mean", "dense": [{"width": 5}]}], ids=str)
def test_head_wants_one_output_and_holds_its_weights(head: dict[str, Any]) -> None:
    runnable = built(head)
    wanted = {"tag": "steps", "span": "steps", "sequence": "steps", "next": "last"}.get(head["kind"]) or head["pool"]
    assert runnable.wants == Outputs(**{wanted: True})
    assert runnable.streams == (head["kind"] != "span"), "a later step may change the best span"
    assert sum(one.numel() for one in runnable.tensors()) == sum(one.numel() for one in arrays(head).values())
