"""Each head beside a few lines of plain PyTorch, row by row and in float64."""

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

from kernels.contract import Encoded, Outputs
from service.modeling import heads
from service.modeling.heads import Judge, Verdict
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


def built(head: dict[str, Any], storage: torch.dtype = torch.float32) -> Judge:
    return heads.build(_HEAD.validate_python(head), arrays(head, storage), CPU)


def encoding(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> Encoded:
    """What a top layer could give, its state aside."""
    generator = torch.Generator().manual_seed(seed)
    return inputs.encoding([torch.randn(steps, WIDTH, generator=generator) for steps in lengths], None)


def judged(judge: Judge, lengths: Sequence[int] = LENGTHS, encoded: Encoded | None = None) -> Verdict:
    """The verdict on a batch, when nothing is there but what the head asks for."""
    given = encoding(lengths) if encoded is None else encoded
    asked = {name: getattr(given, name) for name in inputs.OUTPUTS if getattr(judge.wants, name)}
    return judge(Encoded(None, **asked), inputs.ragged(torch.empty(sum(lengths)), lengths).offsets)


def logits(head: dict[str, Any], x: Tensor) -> Tensor:
    given = arrays(head)
    return x.double() @ given["head.weight"].double() + given["head.bias"].double()


@every_pool
def test_classify_gives_the_softmax_of_a_linear_layer_over_the_pooled_vector(pool: str) -> None:
    head = {"kind": "classify", "pool": pool, "labels": LABELS}
    verdict = judged(built(head))
    assert verdict.scores is not None and verdict.picks is None and not verdict.per_step
    assert_close(verdict.scores, logits(head, getattr(encoding(), pool)).softmax(1), steps=0)
    assert_close(verdict.scores.sum(1), torch.ones(len(LENGTHS)), steps=0)


@every_pool
@pytest.mark.parametrize("outputs", [1, 3])
def test_regress_gives_a_linear_layer_over_the_pooled_vector(pool: str, outputs: int) -> None:
    head = {"kind": "regress", "pool": pool, "outputs": outputs}
    verdict = judged(built(head))
    assert verdict.scores is not None and verdict.scores.shape == (len(LENGTHS), outputs)
    assert verdict.picks is None and not verdict.per_step
    assert_close(verdict.scores, logits(head, getattr(encoding(), pool)), steps=0)


@pytest.mark.parametrize("head", [head for head in EVERY if head["kind"] in ("classify", "regress", "next")], ids=named)
def test_the_embedding_is_the_vector_under_the_head(head: dict[str, Any]) -> None:
    verdict = judged(built(head))
    assert verdict.embedding is not None
    assert torch.equal(verdict.embedding, getattr(encoding(), head.get("pool", "last")))


def test_tag_gives_each_step_its_likeliest_label_and_the_probability() -> None:
    head = {"kind": "tag", "labels": LABELS}
    verdict, steps = judged(built(head)), encoding().steps
    assert steps is not None and verdict.scores is not None and verdict.picks is not None
    assert verdict.per_step and verdict.embedding is None
    likeliest = logits(head, steps).softmax(1).max(1)
    assert verdict.picks.shape == verdict.scores.shape == (sum(LENGTHS), 1)
    assert verdict.picks[:, 0].tolist() == likeliest.indices.tolist()
    assert_close(verdict.scores[:, 0], likeliest.values, steps=0)


def test_next_gives_the_likeliest_tokens_after_the_last_step_the_likeliest_first() -> None:
    head = {"kind": "next", "top": 4}
    verdict, last = judged(built(head)), encoding().last
    assert last is not None and verdict.scores is not None and verdict.picks is not None and not verdict.per_step
    likely = logits(head, last).softmax(1).sort(descending=True)
    assert verdict.picks.tolist() == likely.indices[:, :4].tolist()
    assert_close(verdict.scores, likely.values[:, :4], steps=0)


def test_next_may_give_the_whole_vocabulary() -> None:
    verdict = judged(built({"kind": "next", "top": VOCABULARY}))
    assert verdict.scores is not None and verdict.picks is not None
    assert all(sorted(row) == list(range(VOCABULARY)) for row in verdict.picks.tolist())
    assert_close(verdict.scores.sum(1), torch.ones(len(LENGTHS)), steps=0)


@every_pool
def test_embed_gives_the_pooled_vector_and_nothing_else(pool: str) -> None:
    verdict = judged(built({"kind": "embed", "pool": pool}))
    assert verdict.embedding is not None and verdict.scores is None and verdict.picks is None
    assert torch.equal(verdict.embedding, getattr(encoding(), pool))


@every_pool
def test_a_normalized_embedding_has_the_same_direction_and_length_1(pool: str) -> None:
    verdict, pooled = judged(built({"kind": "embed", "pool": pool, "normalize": True})), getattr(encoding(), pool).double()
    assert verdict.embedding is not None
    assert_close(verdict.embedding, pooled / (pooled * pooled).sum(1, keepdim=True).sqrt(), steps=0)
    assert_close(verdict.embedding.norm(dim=1), torch.ones(len(LENGTHS)), steps=0)


def test_an_embedding_of_zeros_stays_zeros_when_it_is_normalized() -> None:
    zeros = inputs.encoding([torch.zeros(2, WIDTH)], None)
    verdict = judged(built({"kind": "embed", "pool": "max", "normalize": True}), [2], zeros)
    assert verdict.embedding is not None and not verdict.embedding.any()


def test_sequence_has_nothing_of_its_own_and_wants_the_steps() -> None:
    judge = built({"kind": "sequence"})
    assert judge.wants == Outputs(steps=True)
    assert judged(judge) == Verdict()


def spans(steps: Tensor, head: Judge) -> tuple[float, tuple[int, int]]:
    verdict = judged(head, [len(steps)], inputs.encoding([steps], None))
    assert verdict.scores is not None and verdict.picks is not None
    assert verdict.scores.shape == (1, 1) and verdict.picks.shape == (1, 2)
    start, end = verdict.picks[0].tolist()
    return float(verdict.scores[0, 0]), (start, end)


def span_over(scores: Sequence[Sequence[float]]) -> tuple[float, tuple[int, int], dict[tuple[int, int], float]]:
    """What the head says of rows of start and end scores as they are; and the probability of every span."""
    head = heads.build(_HEAD.validate_python({"kind": "span"}), {"head.weight": torch.eye(2), "head.bias": torch.zeros(2)}, CPU)
    steps = torch.tensor(scores)
    start, end = steps.double().softmax(0).unbind(1)
    every = {pair: float(start[pair[0]] * end[pair[1]]) for pair in combinations_with_replacement(range(len(steps)), 2)}
    return *spans(steps, head), every


@given(st.lists(st.tuples(*[st.floats(-6, 6, width=32)] * 2), min_size=1, max_size=17))
@settings(deadline=None)
def test_span_gives_the_likeliest_of_all_spans_that_do_not_end_before_they_start(scores: list[tuple[float, float]]) -> None:
    score, pair, every = span_over(scores)
    assert pair in every
    assert every[pair] == pytest.approx(max(every.values()), rel=1e-5)
    assert score == pytest.approx(every[pair], rel=1e-5)


@given(st.lists(st.tuples(*[st.sampled_from([-1.0, 0.0, 2.0])] * 2), min_size=1, max_size=9))
@settings(deadline=None)
def test_span_is_a_best_one_among_equals(scores: list[tuple[float, float]]) -> None:
    score, pair, every = span_over(scores)
    assert every[pair] == pytest.approx(max(every.values()), rel=1e-5)
    assert score == pytest.approx(every[pair], rel=1e-5)


def test_a_span_does_not_end_before_it_starts_although_that_were_likelier() -> None:
    _, pair, _ = span_over([(0.0, 9.0), (0.0, 1.0), (9.0, 0.0), (0.0, 2.0)])
    assert pair == (2, 3)


def test_a_span_stays_within_its_row() -> None:
    judge = built({"kind": "span"})
    verdict = judged(judge)
    assert verdict.picks is not None and not verdict.per_step and verdict.embedding is None
    for (start, end), steps in zip(verdict.picks.tolist(), LENGTHS, strict=True):
        assert 0 <= start <= end < steps


@pytest.mark.parametrize("scale", [1e4, 1e30])
def test_a_span_of_huge_scores_is_finite(scale: float) -> None:
    score, pair, _ = span_over([(0.0, 0.0), (scale, 0.0), (0.0, scale)])
    assert (score, pair) == (1.0, (1, 2))


@every_head
def test_a_row_is_judged_the_same_alone_and_in_a_batch(head: dict[str, Any]) -> None:
    judge, whole = built(head), encoding()
    together = judged(judge)
    rows = inputs.steps_by_row(whole, inputs.ragged(torch.empty(sum(LENGTHS)), LENGTHS))
    alone = [judged(judge, [len(row)], inputs.encoding([row], None)) for row in rows]
    for name in ("scores", "picks", "embedding"):
        mine = getattr(together, name)
        parts = [getattr(one, name) for one in alone]
        assert all((part is None) == (mine is None) for part in parts)
        if mine is not None:
            assert_close(mine, torch.cat(parts), steps=0)


@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16], ids=str)
@every_head
def test_weights_in_half_the_bytes_are_the_rounded_weights(head: dict[str, Any], storage: torch.dtype) -> None:
    rounded = {name: array.float() for name, array in arrays(head, storage).items()}
    expected = judged(heads.build(_HEAD.validate_python(head), rounded, CPU))
    ours = judged(built(head, storage))
    for name in ("scores", "picks", "embedding"):
        mine, theirs = getattr(ours, name), getattr(expected, name)
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)


@every_head
def test_what_leaves_is_float32_and_picks_are_int32(head: dict[str, Any]) -> None:
    verdict = judged(built(head))
    kinds = {"scores": torch.float32, "picks": torch.int32, "embedding": torch.float32}
    held = {name: getattr(verdict, name) for name in kinds}
    assert {name: array.dtype for name, array in held.items() if array is not None}.items() <= kinds.items()


@every_head
def test_a_head_wants_one_output_only_and_holds_its_weights(head: dict[str, Any]) -> None:
    judge = built(head)
    wanted = [name for name in inputs.OUTPUTS if getattr(judge.wants, name)]
    expected = {"tag": "steps", "span": "steps", "sequence": "steps", "next": "last"}.get(head["kind"]) or head["pool"]
    assert wanted == [expected]
    assert sum(one.numel() for one in judge.tensors()) == sum(one.numel() for one in arrays(head).values())
