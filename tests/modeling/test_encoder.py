"""A whole model: what it gives is what the same model gives in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import conv
from kernels.contract import STORAGE, Encoded, Outputs, Ragged
from service.modeling.encoder import Encoder, Encoding
from service.modeling.heads import Linear
from service.modeling.spec import ModelSpec
from tests.kernels import inputs
from tests.kernels.inputs import assert_close
from tests.modeling import baselines
from tests.modeling.baselines import Form
from tests.modeling.whole import LABELS, Peer, peer

CPU = torch.device("cpu")
LENGTHS = [9, 5, 14, 7]
AMPLE = 1 << 20
EMBEDDED, FOLDED = "embedding and product", "folded table"
GATED = [form for form in (*baselines.RECURRENT, *baselines.BOTH_WAYS) if form.kind in ("lstm", "gru")]

STACKS: list[tuple[Form, ...]] = [
    (Form("lstm"),),
    (Form("lstm", depth=2, bidirectional=True),),
    (Form("conv", padding="none", stride=2), Form("conv", padding="causal", dilation=2), Form("gru", bidirectional=True)),
    (Form("conv", stride=3), Form("sru", bidirectional=True, depth=2), Form("qrnn", window=3)),
    (Form("qrnn", window=2, pooling="ifo"), Form("conv", padding="causal", width=4, activation="gelu")),
    (Form("gru", depth=2), Form("lstm"), Form("sru", skip=False)),
    (Form("sru", bidirectional=True, layer_norm="before"), Form("sru", depth=2, layer_norm="after")),
    (Form("sru", hidden=7, scale=0.5), Form("conv", width=2, padding="none", activation="none")),
    (Form("tcn", levels=3), Form("conv", padding="causal", activation="glu"), Form("lstm")),
    (Form("conv", stride=2), Form("tcn", filters=4), Form("conv", width=2, padding="none", activation="gated_tanh")),
    (Form("gru"), Form("tcn"), Form("tcn", levels=1, width=3, filters=4)),
]
POOLED_BY_MAXIMUM: list[tuple[Form, ...]] = [
    (Form("text_cnn"),),
    (Form("text_cnn", widths=(2,)),),
    (Form("lstm", bidirectional=True), Form("text_cnn", padding=1)),
    (Form("conv", stride=2), Form("text_cnn", widths=(2, 1))),
    (Form("tcn"), Form("conv"), Form("text_cnn", widths=(3, 2))),
]
every_stack = pytest.mark.parametrize("forms", STACKS + POOLED_BY_MAXIMUM, ids=lambda forms: "+".join(map(str, forms)))
every_layer = pytest.mark.parametrize("form", baselines.EVERY_LAYER, ids=str)
every_layer_that_folds = pytest.mark.parametrize(
    "form", [form for form in baselines.EVERY_LAYER if form.kind != "tcn"], ids=str
)


def encoder(model: Peer, fold_limit_bytes: int = AMPLE) -> Encoder:
    return Encoder(model.spec(), model.arrays(), CPU, fold_limit_bytes)


def batch(model: Peer, lengths: list[int] = LENGTHS) -> Ragged:
    return inputs.ragged(baselines.made_up_rows(lengths, embedded=model.embedding is not None), lengths)


def scores(encoding: Encoding) -> Tensor:
    assert encoding.verdict.scores is not None
    return encoding.verdict.scores


def assert_is(model: Peer, encoder: Encoder) -> None:
    """Scores, embedding and steps of every row are the plain computation's."""
    x = batch(model)
    encoding = encoder(x, sequence=True)
    verdict = encoding.verdict
    assert verdict.embedding is not None and verdict.scores is not None
    assert (encoding.sequence is not None) == encoder.spec.has_steps
    ours = None if encoding.sequence is None else inputs.rows(Ragged(encoding.sequence, encoding.offsets))
    for row, data in enumerate(inputs.rows(x)):
        scores, pooled, steps = model(data)
        assert_close(verdict.scores[row], scores, steps=len(data))
        assert_close(verdict.embedding[row], pooled, steps=len(data))
        if ours is not None:
            assert ours[row].shape == steps.shape
            assert_close(ours[row], steps, steps=len(data))


def assert_scores(model: Peer, encoder: Encoder) -> None:
    x = batch(model)
    for data, ours in zip(inputs.rows(x), scores(encoder(x)), strict=True):
        assert_close(ours, model(data).scores, steps=len(data))


@pytest.mark.parametrize("pool", ["last", "mean", "max"])
@pytest.mark.parametrize("embedded", [False, True])
@pytest.mark.parametrize("forms", STACKS, ids=lambda forms: "+".join(map(str, forms)))
def test_a_model_gives_what_plain_torch_gives(forms: tuple[Form, ...], embedded: bool, pool: str) -> None:
    model = peer(*forms, embedded=embedded, pool=pool)
    assert_is(model, encoder(model))


@pytest.mark.parametrize("embedded", [False, True])
@pytest.mark.parametrize("forms", POOLED_BY_MAXIMUM, ids=lambda forms: "+".join(map(str, forms)))
def test_a_model_that_ends_in_a_text_cnn_gives_what_plain_torch_gives(forms: tuple[Form, ...], embedded: bool) -> None:
    model = peer(*forms, embedded=embedded)
    assert_is(model, encoder(model))


@every_stack
def test_a_row_is_encoded_the_same_alone_and_in_a_batch(forms: tuple[Form, ...]) -> None:
    model = peer(*forms)
    made, x = encoder(model), batch(model)
    together = made(x)
    for row, data in enumerate(inputs.rows(x)):
        alone = made(inputs.joined([data]))
        assert together.verdict.embedding is not None and alone.verdict.embedding is not None
        assert_close(scores(together)[row], scores(alone)[0], steps=len(data))
        assert_close(together.verdict.embedding[row], alone.verdict.embedding[0], steps=len(data))


@pytest.mark.parametrize("pool", ["last", "mean", "max"])
def test_scores_are_probabilities(pool: str) -> None:
    model = peer(pool=pool)
    given = scores(encoder(model)(batch(model)))
    assert given.dtype == torch.float32
    assert bool((given > 0).all())
    assert_close(given.sum(1), torch.ones(len(LENGTHS)), steps=0)


def test_the_steps_are_given_only_when_asked_for() -> None:
    model = peer(pool="last")
    assert encoder(model)(batch(model)).sequence is None


def measured_faster(monkeypatch: pytest.MonkeyPatch, faster: str) -> None:
    """Every trial with this way in takes a second, every other one two."""

    def trial(tried: Encoder, rows: int, steps: int) -> float:
        return 1.0 if tried.backends()["layers.0"] == faster else 2.0

    monkeypatch.setattr(Encoder, "trial", trial)


@pytest.mark.parametrize("faster", [EMBEDDED, FOLDED])
@every_layer_that_folds
def test_the_faster_way_in_is_taken_and_gives_the_same(monkeypatch: pytest.MonkeyPatch, faster: str, form: Form) -> None:
    measured_faster(monkeypatch, faster)
    model = peer(form)
    made = encoder(model)
    assert made.backends() == {"layers.0": faster, "layers.1": "framework"}
    assert_is(model, made)


@pytest.mark.parametrize("form", GATED, ids=str)
def test_a_table_over_the_limit_is_not_folded(monkeypatch: pytest.MonkeyPatch, form: Form) -> None:
    measured_faster(monkeypatch, FOLDED)
    model = peer(form)
    gates = {"lstm": 4, "gru": 3}[form.kind]
    directions = 1 + form.options.get("bidirectional", False)
    table_bytes = baselines.VOCABULARY * gates * baselines.HIDDEN * 4 * directions
    taken = {limit: encoder(model, limit).backends()["layers.0"] for limit in (0, table_bytes - 1, table_bytes)}
    assert taken == {0: EMBEDDED, table_bytes - 1: EMBEDDED, table_bytes: FOLDED}


@every_layer
def test_a_limit_of_no_bytes_folds_nothing(monkeypatch: pytest.MonkeyPatch, form: Form) -> None:
    measured_faster(monkeypatch, FOLDED)
    assert encoder(peer(form), fold_limit_bytes=0).backends()["layers.0"] == EMBEDDED


@every_stack
def test_a_model_over_features_has_no_way_in(forms: tuple[Form, ...]) -> None:
    backends = encoder(peer(*forms, embedded=False)).backends()
    assert backends == {f"layers.{index}": "framework" for index in range(len(forms))}


@pytest.mark.parametrize("embedded", [False, True])
def test_convolutions_that_follow_each_other_are_one_stack_of_which_leaves_what_the_head_wants(
    monkeypatch: pytest.MonkeyPatch, embedded: bool
) -> None:
    model = peer(
        Form("conv"), Form("tcn"), Form("gru"), Form("conv", padding="causal"), Form("conv"), embedded=embedded, pool="last"
    )
    made, calls, stack = encoder(model), [], conv.stack

    def counted(x: Ragged, blocks: Any, states: Any = None, *, want: Outputs) -> Encoded:
        calls.append((len(blocks), want))
        return stack(x, blocks, states, want=want)

    monkeypatch.setattr(conv, "stack", counted)
    assert_scores(model, made)
    assert calls == [(3, Outputs(steps=True)), (2, Outputs(last=True))]


@pytest.mark.parametrize("head", [{"kind": "classify", "labels": LABELS}, {"kind": "regress", "outputs": 3}], ids=str)
def test_a_linear_layer_over_a_text_cnn_is_the_text_cnn_s_to_compute(
    monkeypatch: pytest.MonkeyPatch, head: dict[str, Any]
) -> None:
    model = peer(Form("text_cnn"))
    spec = ModelSpec.model_validate({**model.spec().model_dump(), "head": {**head, "pool": "max"}})
    made, x = Encoder(spec, model.arrays(), CPU, AMPLE), batch(model)
    pooled = torch.stack([model(data).pooled for data in inputs.rows(x)])
    expected = model.linear(pooled)

    def by_the_head(linear: Linear, x: Tensor) -> Tensor:
        pytest.fail("the head did it again")

    monkeypatch.setattr(Linear, "__call__", by_the_head)
    verdict = made(x).verdict
    assert verdict.scores is not None and verdict.embedding is not None
    assert_close(verdict.scores, expected.softmax(1) if head["kind"] == "classify" else expected, steps=max(LENGTHS))
    assert_close(verdict.embedding, pooled, steps=max(LENGTHS))


def test_the_weight_bytes_are_those_of_all_parameters() -> None:
    model = peer(Form("lstm", depth=2, bidirectional=True))
    second_biases = 4 * 4 * baselines.HIDDEN
    parameters = sum(one.numel() for one in model.parameters()) - second_biases
    assert encoder(model, fold_limit_bytes=0).weight_bytes() == 4 * parameters


@pytest.mark.parametrize("embedded", [False, True])
@every_stack
def test_the_weight_bytes_are_those_of_the_tensors_in_the_folder(forms: tuple[Form, ...], embedded: bool) -> None:
    model = peer(*forms, embedded=embedded)
    held = sum(array.numel() * array.element_size() for array in model.arrays().values())
    assert encoder(model, fold_limit_bytes=0).weight_bytes() == held


@pytest.mark.parametrize("precision", list(STORAGE))
@every_layer
def test_a_model_in_any_precision_is_the_one_with_its_rounded_weights(form: Form, precision: str) -> None:
    model = peer(form)
    stored = {name: array.to(STORAGE[precision]) for name, array in model.arrays().items()}
    rounded = {name: array.float() for name, array in stored.items()}
    ours = Encoder(model.spec(precision), stored, CPU, 0)(batch(model))
    expected = Encoder(model.spec(), rounded, CPU, 0)(batch(model))
    assert ours.verdict.embedding is not None and expected.verdict.embedding is not None
    assert ours.verdict.embedding.dtype == scores(ours).dtype == torch.float32
    assert torch.equal(scores(ours), scores(expected))
    assert torch.equal(ours.verdict.embedding, expected.verdict.embedding)


@pytest.mark.parametrize("precision", list(STORAGE))
@every_layer_that_folds
def test_a_folded_model_in_any_precision_is_near_the_one_in_float32(
    monkeypatch: pytest.MonkeyPatch, form: Form, precision: str
) -> None:
    measured_faster(monkeypatch, FOLDED)
    model = peer(form)
    stored = {name: array.to(STORAGE[precision]) for name, array in model.arrays().items()}
    made = Encoder(model.spec(precision), stored, CPU, AMPLE)
    assert made.backends()["layers.0"] == FOLDED
    tolerance = 8 * torch.finfo(STORAGE[precision]).eps
    torch.testing.assert_close(scores(made(batch(model))), scores(encoder(model)(batch(model))), rtol=tolerance, atol=tolerance)


SHORTEST = [
    (4, (Form("conv", width=4, padding="none"),)),
    (7, (Form("conv", width=3, padding="none", dilation=3),)),
    (7, (Form("conv", width=3, padding="none", stride=2), Form("lstm"), Form("conv", width=3, padding="none"))),
    (9, (Form("conv", width=4, stride=4, padding="same"), Form("conv", width=2, padding="none", dilation=2), Form("gru"))),
    (1, (Form("conv", width=4, stride=4, padding="causal"),)),
    (4, (Form("text_cnn", widths=(3, 4, 1)),)),
    (2, (Form("text_cnn", widths=(3, 4, 1), padding=1),)),
    (1, (Form("text_cnn", widths=(3, 4, 1), padding=5),)),
    (7, (Form("conv", width=3, padding="none", stride=2), Form("text_cnn", widths=(3, 2)))),
    (1, (Form("qrnn", window=5), Form("sru", depth=2, bidirectional=True))),
]
every_shortest = pytest.mark.parametrize("min_steps, forms", SHORTEST)


@every_shortest
def test_the_fewest_steps_that_a_model_needs_follow_from_its_layers(min_steps: int, forms: tuple[Form, ...]) -> None:
    for embedded in (False, True):
        assert peer(*forms, embedded=embedded).spec().min_steps == min_steps


@pytest.mark.parametrize("min_steps, forms", [(least, forms) for least, forms in SHORTEST if forms[-1].kind != "text_cnn"])
def test_a_row_of_the_fewest_steps_has_one_step_to_judge_and_a_shorter_one_none(
    min_steps: int, forms: tuple[Form, ...]
) -> None:
    model = peer(*forms, embedded=False)
    made = encoder(model)
    sizes = [min_steps - 1, min_steps, min_steps + 1]
    encoding = made(batch(model, sizes), sequence=True)
    came_out = torch.diff(encoding.offsets).tolist()
    assert came_out[:2] == [0, 1] and came_out[2] >= 1
    assert_close(scores(encoding)[1], model(inputs.rows(batch(model, sizes))[1]).scores, steps=min_steps)


@every_shortest
def test_a_model_is_tried_out_with_the_steps_that_it_needs(min_steps: int, forms: tuple[Form, ...]) -> None:
    for embedded in (False, True):
        assert encoder(peer(*forms, embedded=embedded)).trial(rows=2, steps=1) > 0


def test_a_head_that_needs_a_step_is_tried_out_with_one() -> None:
    layers = peer(Form("conv", width=5, padding="none"))
    spec = ModelSpec.model_validate({**layers.spec().model_dump(), "head": {"kind": "span"}})
    arrays = {**layers.arrays(), "head.weight": torch.ones(baselines.HIDDEN, 2), "head.bias": torch.ones(2)}
    assert Encoder(spec, arrays, CPU, AMPLE).trial(rows=2, steps=1) > 0


def test_a_trial_takes_time_and_leaves_nothing_behind() -> None:
    model = peer(embedded=False)
    made = encoder(model)
    before = made(batch(model))
    assert made.trial(rows=3, steps=5) > 0
    assert torch.equal(scores(made(batch(model))), scores(before))


HEADS = [
    {"kind": "classify", "pool": "mean", "labels": LABELS},
    {"kind": "regress", "pool": "last", "outputs": 2},
    {"kind": "tag", "labels": LABELS},
    {"kind": "span"},
    {"kind": "next", "top": 3},
    {"kind": "embed", "pool": "max", "normalize": True},
    {"kind": "sequence"},
]


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("head", HEADS, ids=lambda head: head["kind"])
def test_every_head_has_its_lines_and_a_strided_model_as_many_steps_as_come_out(head: dict[str, object], asked: bool) -> None:
    layers = peer(Form("conv", stride=2), Form("gru", bidirectional=True))
    spec = ModelSpec.model_validate({**layers.spec().model_dump(), "head": head})
    kept = {name: array for name, array in layers.arrays().items() if not name.startswith("head.")}
    shapes = {name: shape for name, shape in spec.tensors().items() if name.startswith("head.")}
    made = Encoder(spec, kept | {name: torch.ones(shape) for name, shape in shapes.items()}, CPU, AMPLE)
    encoding = made(batch(layers), sequence=asked)
    steps = [-(-length // 2) for length in LENGTHS]
    assert torch.diff(encoding.offsets).tolist() == steps
    lines = sum(steps) if head["kind"] == "tag" else len(LENGTHS)
    assert encoding.verdict.scores is None or len(encoding.verdict.scores) == lines
    assert encoding.verdict.embedding is None or encoding.verdict.embedding.shape == (len(LENGTHS), 2 * baselines.HIDDEN)
    assert (encoding.sequence is not None) == asked
    assert encoding.sequence is None or encoding.sequence.shape == (sum(steps), 2 * baselines.HIDDEN)
