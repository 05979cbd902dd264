"""Each head compared with a few lines of plain PyTorch, row by row and in float64."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from torch import Tensor

from kernels.ragged import Encoded, Outputs
from service.modeling import heads
from service.modeling.heads import HeadOutput, RunnableHead
from service.modeling.spec import Head
from tests.kernels import inputs
from tests.kernels.inputs import assert_close

CPU = torch.device("cpu")
LENGTHS = [9, 1, 14, 3]
WIDTH, VOCABULARY = 7, 11
LABELS = ("near", "far", "unknown")
_HEAD: TypeAdapter[Head] = TypeAdapter(Head)

POOLED: list[dict[str, Any]] = [
    {"kind": kind, "pool": pool, **options}
    for pool in ("last", "mean", "max")
    for kind, options in (("classify", {"labels": LABELS}), ("regress", {"outputs": 2}), ("embed", {"normalize": True}))
]
EVERY: list[dict[str, Any]] = [
    *POOLED,
    {"kind": "embed", "pool": "mean"},
    {"kind": "tag", "labels": LABELS},
    {"kind": "span"},
    {"kind": "next", "top": 4},
    {"kind": "sequence"},
]


def named(head: Any) -> str:
    return "-".join(str(head[key]) for key in ("kind", "pool") if key in head)


every_head = pytest.mark.parametrize("head", EVERY, ids=named)
every_pool = pytest.mark.parametrize("pool", ["last", "mean", "max"])


def arrays(head: dict[str, Any], storage: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = _HEAD.validate_python(head).tensors(WIDTH, VOCABULARY)
    return {f"head.{name}": torch.randn(shape, generator=generator).to(storage) for name, shape in shapes.items()}


def built(head: dict[str, Any], storage: torch.dtype = torch.float32) -> RunnableHead:
    return heads.build(_HEAD.validate_python(head), arrays(head, storage), CPU)


def encoding(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> Encoded:
    """Return possible outputs of a last layer, without a state."""
    generator = torch.Generator().manual_seed(seed)
    return inputs.encoding([torch.randn(steps, WIDTH, generator=generator) for steps in lengths], None)


def run_head(runnable: RunnableHead, lengths: Sequence[int] = LENGTHS, encoded: Encoded | None = None) -> HeadOutput:
    """Return the output of a head that gets only the encoder outputs that it wants."""
    outputs = encoding(lengths) if encoded is None else encoded
    wanted = {name: getattr(outputs, name) for name in inputs.OUTPUTS if getattr(runnable.wants, name)}
    return runnable(Encoded(None, **wanted), inputs.ragged(torch.empty(sum(lengths)), lengths).offsets)


def logits(head: dict[str, Any], x: Tensor) -> Tensor:
    given = arrays(head)
    return x.double() @ given["head.weight"].double() + given["head.bias"].double()


@every_pool
def test_classify_is_softmax_of_a_linear_layer(pool: str) -> None:
    head = {"kind": "classify", "pool": pool, "labels": LABELS}
    output = run_head(built(head))
    assert output.scores is not None and output.picks is None and not output.per_step
    assert_close(output.scores, logits(head, getattr(encoding(), pool)).softmax(1), steps=0)
    assert_close(output.scores.sum(1), torch.ones(len(LENGTHS)), steps=0)


@every_pool
@pytest.mark.parametrize("outputs", [1, 3])
def test_regress_is_a_linear_layer(pool: str, outputs: int) -> None:
    head = {"kind": "regress", "pool": pool, "outputs": outputs}
    output = run_head(built(head))
    assert output.scores is not None and output.scores.shape == (len(LENGTHS), outputs)
    assert output.picks is None and not output.per_step
    assert_close(output.scores, logits(head, getattr(encoding(), pool)), steps=0)


@pytest.mark.parametrize("head", [head for head in EVERY if head["kind"] in ("classify", "regress", "next")], ids=named)
def test_embedding_is_the_vector_that_the_head_works_on(head: dict[str, Any]) -> None:
    output = run_head(built(head))
    assert output.embedding is not None
    assert torch.equal(output.embedding, getattr(encoding(), head.get("pool", "last")))


def test_tag_returns_the_most_likely_label_of_each_step() -> None:
    head = {"kind": "tag", "labels": LABELS}
    output, steps = run_head(built(head)), encoding().steps
    assert steps is not None and output.scores is not None and output.picks is not None
    assert output.per_step and output.embedding is None
    likeliest = logits(head, steps).softmax(1).max(1)
    assert output.picks.shape == output.scores.shape == (sum(LENGTHS), 1)
    assert output.picks[:, 0].tolist() == likeliest.indices.tolist()
    assert_close(output.scores[:, 0], likeliest.values, steps=0)


def test_next_returns_the_most_likely_tokens_in_order() -> None:
    head = {"kind": "next", "top": 4}
    output, last = run_head(built(head)), encoding().last
    assert last is not None and output.scores is not None and output.picks is not None and not output.per_step
    likely = logits(head, last).softmax(1).sort(descending=True)
    assert output.picks.tolist() == likely.indices[:, :4].tolist()
    assert_close(output.scores, likely.values[:, :4], steps=0)


def test_next_can_return_the_whole_vocabulary() -> None:
    output = run_head(built({"kind": "next", "top": VOCABULARY}))
    assert output.scores is not None and output.picks is not None
    assert all(sorted(row) == list(range(VOCABULARY)) for row in output.picks.tolist())
    assert_close(output.scores.sum(1), torch.ones(len(LENGTHS)), steps=0)


@every_pool
def test_embed_returns_the_pooled_vector_only(pool: str) -> None:
    output = run_head(built({"kind": "embed", "pool": pool}))
    assert output.embedding is not None and output.scores is None and output.picks is None
    assert torch.equal(output.embedding, getattr(encoding(), pool))


@every_pool
def test_normalized_embedding_has_length_1(pool: str) -> None:
    output, pooled = run_head(built({"kind": "embed", "pool": pool, "normalize": True})), getattr(encoding(), pool).double()
    assert output.embedding is not None
    assert_close(output.embedding, pooled / (pooled * pooled).sum(1, keepdim=True).sqrt(), steps=0)
    assert_close(output.embedding.norm(dim=1), torch.ones(len(LENGTHS)), steps=0)


def test_normalizing_zeros_returns_zeros() -> None:
    zeros = inputs.encoding([torch.zeros(2, WIDTH)], None)
    output = run_head(built({"kind": "embed", "pool": "max", "normalize": True}), [2], zeros)
    assert output.embedding is not None and not output.embedding.any()


def test_sequence_head_wants_the_steps_and_has_no_output() -> None:
    runnable = built({"kind": "sequence"})
    assert runnable.wants == Outputs(steps=True)
    assert run_head(runnable) == HeadOutput()


def spans(steps: Tensor, head: RunnableHead) -> tuple[float, tuple[int, int]]:
    output = run_head(head, [len(steps)], inputs.encoding([steps], None))
    assert output.scores is not None and output.picks is not None
    assert output.scores.shape == (1, 1) and output.picks.shape == (1, 2)
    start, end = output.picks[0].tolist()
    return float(output.scores[0, 0]), (start, end)


def span_over(scores: Sequence[Sequence[float]]) -> tuple[float, tuple[int, int], dict[tuple[int, int], float]]:
    """Return the head's output for start and end scores, and the probability of every span."""
    head = heads.build(_HEAD.validate_python({"kind": "span"}), {"head.weight": torch.eye(2), "head.bias": torch.zeros(2)}, CPU)
    steps = torch.tensor(scores)
    start, end = steps.double().softmax(0).unbind(1)
    every = {pair: float(start[pair[0]] * end[pair[1]]) for pair in combinations_with_replacement(range(len(steps)), 2)}
    return *spans(steps, head), every


@given(st.lists(st.tuples(*[st.floats(-6, 6, width=32)] * 2), min_size=1, max_size=17))
def test_span_is_the_most_likely_valid_span(scores: list[tuple[float, float]]) -> None:
    score, pair, every = span_over(scores)
    assert pair in every
    assert every[pair] == pytest.approx(max(every.values()), rel=1e-5)
    assert score == pytest.approx(every[pair], rel=1e-5)


@given(st.lists(st.tuples(*[st.sampled_from([-1.0, 0.0, 2.0])] * 2), min_size=1, max_size=9))
def test_span_with_equal_scores_is_a_best_span(scores: list[tuple[float, float]]) -> None:
    score, pair, every = span_over(scores)
    assert every[pair] == pytest.approx(max(every.values()), rel=1e-5)
    assert score == pytest.approx(every[pair], rel=1e-5)


def test_span_never_ends_before_it_starts() -> None:
    _, pair, _ = span_over([(0.0, 9.0), (0.0, 1.0), (9.0, 0.0), (0.0, 2.0)])
    assert pair == (2, 3)


def test_span_stays_within_its_row() -> None:
    runnable = built({"kind": "span"})
    output = run_head(runnable)
    assert output.picks is not None and not output.per_step and output.embedding is None
    for (start, end), steps in zip(output.picks.tolist(), LENGTHS, strict=True):
        assert 0 <= start <= end < steps


@pytest.mark.parametrize("scale", [1e4, 1e30])
def test_span_of_huge_scores_is_finite(scale: float) -> None:
    score, pair, _ = span_over([(0.0, 0.0), (scale, 0.0), (0.0, scale)])
    assert (score, pair) == (1.0, (1, 2))


@every_head
def test_head_output_is_alike_alone_and_in_a_batch(head: dict[str, Any]) -> None:
    runnable, whole = built(head), encoding()
    together = run_head(runnable)
    rows = inputs.steps_by_row(whole, inputs.ragged(torch.empty(sum(LENGTHS)), LENGTHS))
    alone = [run_head(runnable, [len(row)], inputs.encoding([row], None)) for row in rows]
    for name in ("scores", "picks", "embedding"):
        mine = getattr(together, name)
        parts = [getattr(one, name) for one in alone]
        assert all((part is None) == (mine is None) for part in parts)
        if mine is not None:
            assert_close(mine, torch.cat(parts), steps=0)


@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16], ids=str)
@every_head
def test_16_bit_weights_are_the_rounded_weights(head: dict[str, Any], storage: torch.dtype) -> None:
    rounded = {name: array.float() for name, array in arrays(head, storage).items()}
    rounded_output = run_head(heads.build(_HEAD.validate_python(head), rounded, CPU))
    output = run_head(built(head, storage))
    for name in ("scores", "picks", "embedding"):
        actual, expected = getattr(output, name), getattr(rounded_output, name)
        assert (actual is None and expected is None) or torch.equal(actual, expected)


@every_head
def test_outputs_are_float32_and_picks_int32(head: dict[str, Any]) -> None:
    output = run_head(built(head))
    kinds = {"scores": torch.float32, "picks": torch.int32, "embedding": torch.float32}
    held = {name: getattr(output, name) for name in kinds}
    assert {name: array.dtype for name, array in held.items() if array is not None}.items() <= kinds.items()


@every_head
def test_head_wants_one_output_and_holds_its_weights(head: dict[str, Any]) -> None:
    runnable = built(head)
    wanted = [name for name in inputs.OUTPUTS if getattr(runnable.wants, name)]
    expected = {"tag": "steps", "span": "steps", "sequence": "steps", "next": "last"}.get(head["kind"]) or head["pool"]
    assert wanted == [expected]
    assert sum(one.numel() for one in runnable.tensors()) == sum(one.numel() for one in arrays(head).values())
