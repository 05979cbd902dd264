"""A whole model compared with the same model in plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import conv
from kernels.backend import AUTO, PINNED
from kernels.lstm import levels
from kernels.ragged import STORAGE, Encoded, Outputs, Ragged
from service.modeling import folding, recurrent
from service.modeling.encoder import Encoder, Encoding
from service.modeling.heads import Linear
from service.modeling.spec import LSTMLayer, ModelSpec, RecurrentLayer
from tests.kernels import inputs
from tests.kernels.inputs import assert_close
from tests.modeling import reference_layers
from tests.modeling.reference_layers import Form, fastest_on_cpu
from tests.modeling.reference_model import LABELS, ReferenceModel, reference_model

CPU = torch.device("cpu")
LENGTHS = [9, 5, 14, 7]
EMBEDDED, FOLDED = "embedding and product", "folded table"
GATED = [form for form in (*reference_layers.RECURRENT, *reference_layers.BOTH_WAYS) if form.kind in ("lstm", "gru")]

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
every_layer = pytest.mark.parametrize("form", reference_layers.EVERY_LAYER, ids=str)
every_layer_that_folds = pytest.mark.parametrize(
    "form", [form for form in reference_layers.EVERY_LAYER if form.kind != "tcn"], ids=str
)


def encoder(model: ReferenceModel, fold: str = "auto") -> Encoder:
    return Encoder(model.spec().model_copy(update={"fold": fold}), model.arrays(), CPU)


@pytest.mark.parametrize("pinned", [False, True])
def test_pinned_model_requests_a_pinned_backend(pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    requested = []

    def run(*arguments: Any, backend: str, **options: Any) -> Encoded:
        requested.append(backend)
        return levels(*arguments, backend=backend, **options)

    kind: type[RecurrentLayer] = LSTMLayer
    monkeypatch.setitem(recurrent.FAMILIES, kind, replace(recurrent.FAMILIES[kind], run_levels=run))
    model = reference_model(Form("lstm", depth=2))
    spec = model.spec().model_copy(update={"pin_backend": pinned})
    Encoder(spec, model.arrays(), CPU)(batch(model))
    assert set(requested) == {PINNED if pinned else AUTO}


def batch(model: ReferenceModel, lengths: list[int] = LENGTHS) -> Ragged:
    return inputs.ragged(reference_layers.made_up_rows(lengths, embedded=model.embedding is not None), lengths)


def scores(encoding: Encoding) -> Tensor:
    assert encoding.head_output.scores is not None
    return encoding.head_output.scores


def assert_agrees(model: ReferenceModel, encoder: Encoder) -> None:
    """Assert that scores, embedding and steps of every row agree with the reference."""
    x = batch(model)
    encoding = encoder(x, sequence=True)
    output = encoding.head_output
    assert output.embedding is not None and output.scores is not None
    assert (encoding.sequence is not None) == encoder.spec.has_steps
    actual = None if encoding.sequence is None else inputs.rows(Ragged(encoding.sequence, encoding.offsets))
    for row, data in enumerate(inputs.rows(x)):
        scores, pooled, steps = model(data)
        assert_close(output.scores[row], scores, steps=len(data))
        assert_close(output.embedding[row], pooled, steps=len(data))
        if actual is not None:
            assert actual[row].shape == steps.shape
            assert_close(actual[row], steps, steps=len(data))


def assert_scores(model: ReferenceModel, encoder: Encoder) -> None:
    x = batch(model)
    for data, actual in zip(inputs.rows(x), scores(encoder(x)), strict=True):
        assert_close(actual, model(data).scores, steps=len(data))


@pytest.mark.parametrize("pool", ["last", "mean", "max"])
@pytest.mark.parametrize("embedded", [False, True])
@pytest.mark.parametrize("forms", STACKS, ids=lambda forms: "+".join(map(str, forms)))
def test_model_agrees_with_torch(forms: tuple[Form, ...], embedded: bool, pool: str) -> None:
    model = reference_model(*forms, embedded=embedded, pool=pool)
    assert_agrees(model, encoder(model))


@pytest.mark.parametrize("embedded", [False, True])
@pytest.mark.parametrize("forms", POOLED_BY_MAXIMUM, ids=lambda forms: "+".join(map(str, forms)))
def test_model_with_text_cnn_agrees_with_torch(forms: tuple[Form, ...], embedded: bool) -> None:
    model = reference_model(*forms, embedded=embedded)
    assert_agrees(model, encoder(model))


@every_stack
def test_row_is_encoded_alike_alone_and_in_a_batch(forms: tuple[Form, ...]) -> None:
    model = reference_model(*forms)
    made, x = encoder(model), batch(model)
    together = made(x)
    for row, data in enumerate(inputs.rows(x)):
        alone = made(inputs.joined([data]))
        assert together.head_output.embedding is not None and alone.head_output.embedding is not None
        assert_close(scores(together)[row], scores(alone)[0], steps=len(data))
        assert_close(together.head_output.embedding[row], alone.head_output.embedding[0], steps=len(data))


@pytest.mark.parametrize("pool", ["last", "mean", "max"])
def test_scores_are_probabilities(pool: str) -> None:
    model = reference_model(pool=pool)
    given = scores(encoder(model)(batch(model)))
    assert given.dtype == torch.float32
    assert bool((given > 0).all())
    assert_close(given.sum(1), torch.ones(len(LENGTHS)), steps=0)


def test_sequence_is_returned_only_on_request() -> None:
    model = reference_model(pool="last")
    assert encoder(model)(batch(model)).sequence is None


@every_layer_that_folds
def test_embedding_is_folded_unless_the_model_says_never(form: Form) -> None:
    model = reference_model(form)
    for fold, expected in (("auto", FOLDED), ("never", EMBEDDED)):
        made = encoder(model, fold)
        assert made.backends() == {"layers.0": expected, "layers.1": fastest_on_cpu(form)}
        assert_agrees(model, made)


@every_layer_that_folds
def test_table_over_the_limit_is_not_folded(monkeypatch: pytest.MonkeyPatch, form: Form) -> None:
    model = reference_model(form)
    columns = encoder(model)._layers[0].folded_columns
    assert columns is not None
    numbers = reference_layers.VOCABULARY * columns
    for limit, expected in ((numbers - 1, EMBEDDED), (numbers, FOLDED)):
        monkeypatch.setattr(folding, "MAX_TABLE_NUMBERS", limit)
        assert encoder(model).backends()["layers.0"] == expected


def test_layer_that_cannot_fold_is_embedded() -> None:
    model = reference_model(Form("tcn"))
    assert encoder(model).backends()["layers.0"] == EMBEDDED


@every_stack
def test_model_over_features_has_no_embedding_mode(forms: tuple[Form, ...]) -> None:
    backends = encoder(reference_model(*forms, embedded=False)).backends()
    assert backends == {f"layers.{index}": fastest_on_cpu(form) for index, form in enumerate(forms)}


@pytest.mark.parametrize("embedded", [False, True])
def test_consecutive_convolutions_run_as_one_stack(monkeypatch: pytest.MonkeyPatch, embedded: bool) -> None:
    model = reference_model(
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
def test_text_cnn_computes_the_scores_of_the_head(monkeypatch: pytest.MonkeyPatch, head: dict[str, Any]) -> None:
    model = reference_model(Form("text_cnn"))
    spec = ModelSpec.model_validate({**model.spec().model_dump(), "head": {**head, "pool": "max"}})
    made, x = Encoder(spec, model.arrays(), CPU), batch(model)
    pooled = torch.stack([model(data).pooled for data in inputs.rows(x)])
    expected = model.linear(pooled)

    def by_the_head(linear: Linear, x: Tensor) -> Tensor:
        pytest.fail("the head did it again")

    monkeypatch.setattr(Linear, "__call__", by_the_head)
    output = made(x).head_output
    assert output.scores is not None and output.embedding is not None
    assert_close(output.scores, expected.softmax(1) if head["kind"] == "classify" else expected, steps=max(LENGTHS))
    assert_close(output.embedding, pooled, steps=max(LENGTHS))


def test_weight_bytes_count_all_parameters() -> None:
    model = reference_model(Form("lstm", depth=2, bidirectional=True))
    second_biases = 4 * 4 * reference_layers.HIDDEN
    parameters = sum(one.numel() for one in model.parameters()) - second_biases
    assert encoder(model, "never").weight_bytes() == 4 * parameters


@pytest.mark.parametrize("embedded", [False, True])
@every_stack
def test_weight_bytes_equal_the_tensors_of_the_folder(forms: tuple[Form, ...], embedded: bool) -> None:
    model = reference_model(*forms, embedded=embedded)
    held = sum(array.numel() * array.element_size() for array in model.arrays().values())
    assert encoder(model, "never").weight_bytes() == held


@pytest.mark.parametrize("precision", list(STORAGE))
@every_layer
def test_precision_only_rounds_the_weights(form: Form, precision: str) -> None:
    model = reference_model(form)
    stored = {name: array.to(STORAGE[precision]) for name, array in model.arrays().items()}
    rounded = {name: array.float() for name, array in stored.items()}
    unfolded = {"fold": "never"}
    actual = Encoder(model.spec(precision).model_copy(update=unfolded), stored, CPU)(batch(model))
    expected = Encoder(model.spec().model_copy(update=unfolded), rounded, CPU)(batch(model))
    assert actual.head_output.embedding is not None and expected.head_output.embedding is not None
    assert actual.head_output.embedding.dtype == scores(actual).dtype == torch.float32
    assert torch.equal(scores(actual), scores(expected))
    assert torch.equal(actual.head_output.embedding, expected.head_output.embedding)


@pytest.mark.parametrize("precision", list(STORAGE))
@every_layer_that_folds
def test_folded_model_in_low_precision_is_close_to_float32(form: Form, precision: str) -> None:
    model = reference_model(form)
    stored = {name: array.to(STORAGE[precision]) for name, array in model.arrays().items()}
    made = Encoder(model.spec(precision), stored, CPU)
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
def test_min_steps_follow_from_the_layers(min_steps: int, forms: tuple[Form, ...]) -> None:
    for embedded in (False, True):
        assert reference_model(*forms, embedded=embedded).spec().min_steps == min_steps


@pytest.mark.parametrize("min_steps, forms", [(least, forms) for least, forms in SHORTEST if forms[-1].kind != "text_cnn"])
def test_row_of_min_steps_has_one_output_step(min_steps: int, forms: tuple[Form, ...]) -> None:
    model = reference_model(*forms, embedded=False)
    made = encoder(model)
    sizes = [min_steps - 1, min_steps, min_steps + 1]
    encoding = made(batch(model, sizes), sequence=True)
    came_out = torch.diff(encoding.offsets).tolist()
    assert came_out[:2] == [0, 1] and came_out[2] >= 1
    assert_close(scores(encoding)[1], model(inputs.rows(batch(model, sizes))[1]).scores, steps=min_steps)


@every_shortest
def test_timed_batch_has_at_least_min_steps(min_steps: int, forms: tuple[Form, ...]) -> None:
    for embedded in (False, True):
        assert encoder(reference_model(*forms, embedded=embedded)).time_batch(rows=2, steps=1) > 0


def test_timed_batch_has_a_step_for_every_head() -> None:
    layers = reference_model(Form("conv", width=5, padding="none"))
    spec = ModelSpec.model_validate({**layers.spec().model_dump(), "head": {"kind": "span"}})
    arrays = {**layers.arrays(), "head.weight": torch.ones(reference_layers.HIDDEN, 2), "head.bias": torch.ones(2)}
    assert Encoder(spec, arrays, CPU).time_batch(rows=2, steps=1) > 0


def test_timing_a_batch_leaves_no_state() -> None:
    model = reference_model(embedded=False)
    made = encoder(model)
    before = made(batch(model))
    assert made.time_batch(rows=3, steps=5) > 0
    assert torch.equal(scores(made(batch(model))), scores(before))


WHOLE_ONLY = [
    ((Form("lstm"), Form("tcn"), Form("conv", padding="causal")), ()),
    ((Form("lstm"), Form("sru", bidirectional=True)), ("layers.2 (sru)",)),
    ((Form("conv", padding="causal"), Form("conv"), Form("tcn")), ("layers.2 (conv)",)),
    ((Form("conv", padding="causal", stride=2), Form("text_cnn")), ("layers.1 (conv)", "layers.2 (text_cnn)")),
]


@pytest.mark.parametrize("forms, whole_only", WHOLE_ONLY, ids=str)
def test_parts_that_need_a_whole_sequence_are_named(forms: tuple[Form, ...], whole_only: tuple[str, ...]) -> None:
    made = encoder(reference_model(*forms))
    assert made.whole_only == whole_only
    assert made.streams == (not whole_only)


def test_head_that_needs_a_whole_sequence_is_named() -> None:
    layers = reference_model(Form("gru"))
    spec = ModelSpec.model_validate({**layers.spec().model_dump(), "head": {"kind": "span"}})
    arrays = {**layers.arrays(), "head.weight": torch.ones(reference_layers.HIDDEN, 2), "head.bias": torch.ones(2)}
    made = Encoder(spec, arrays, CPU)
    assert (made.whole_only, made.streams) == (("head (span)",), False)


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
def test_every_head_works_on_a_strided_model(head: dict[str, object], asked: bool) -> None:
    layers = reference_model(Form("conv", stride=2), Form("gru", bidirectional=True))
    spec = ModelSpec.model_validate({**layers.spec().model_dump(), "head": head})
    kept = {name: array for name, array in layers.arrays().items() if not name.startswith("head.")}
    shapes = {name: shape for name, shape in spec.tensors().items() if name.startswith("head.")}
    made = Encoder(spec, kept | {name: torch.ones(shape) for name, shape in shapes.items()}, CPU)
    encoding = made(batch(layers), sequence=asked)
    steps = [-(-length // 2) for length in LENGTHS]
    assert torch.diff(encoding.offsets).tolist() == steps
    lines = sum(steps) if head["kind"] == "tag" else len(LENGTHS)
    assert encoding.head_output.scores is None or len(encoding.head_output.scores) == lines
    assert encoding.head_output.embedding is None or encoding.head_output.embedding.shape == (
        len(LENGTHS),
        2 * reference_layers.HIDDEN,
    )
    assert (encoding.sequence is not None) == asked
    assert encoding.sequence is None or encoding.sequence.shape == (sum(steps), 2 * reference_layers.HIDDEN)
