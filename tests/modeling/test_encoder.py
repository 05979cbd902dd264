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
STACKS: list[tuple[str, tuple[Form, ...]]] = [
    (
        "last",
        (Form("conv", padding="none", stride=2), Form("conv", padding="causal", dilation=2), Form("gru", bidirectional=True)),
    ),
    ("mean", (Form("conv", stride=3), Form("sru", bidirectional=True, depth=2), Form("qrnn", window=3))),
    ("max", (Form("qrnn", window=2, pooling="ifo"), Form("conv", padding="causal", width=4, activation="gelu"))),
    ("last", (Form("gru", depth=2), Form("lstm"), Form("sru", skip=False))),
    ("mean", (Form("sru", bidirectional=True, layer_norm="before"), Form("sru", depth=2, layer_norm="after"))),
    ("last", (Form("tcn", levels=3), Form("conv", padding="causal", activation="glu"), Form("lstm", bidirectional=True))),
    ("max", (Form("conv", stride=2), Form("tcn", filters=4), Form("conv", width=2, padding="none", activation="gated_tanh"))),
    ("max", (Form("lstm", bidirectional=True), Form("text_cnn", padding=1))),
    ("max", (Form("tcn"), Form("conv", stride=2), Form("text_cnn", widths=(3, 2)))),
]
ONE_OF_A_KIND = [Form(kind) for kind in ("lstm", "gru", "sru", "qrnn", "conv", "text_cnn")]
every_stack = pytest.mark.parametrize("pool, forms", STACKS, ids=lambda each: "+".join(map(str, each)))
every_kind = pytest.mark.parametrize("form", ONE_OF_A_KIND, ids=str)


def encoder(model: ReferenceModel, fold: str = "auto") -> Encoder:
    return Encoder(model.spec().model_copy(update={"fold": fold}), model.arrays(), CPU)


def batch(model: ReferenceModel, lengths: list[int] = LENGTHS) -> Ragged:
    return inputs.ragged(reference_layers.made_up_rows(lengths, embedded=model.embedding is not None), lengths)


def scores(encoding: Encoding) -> Tensor:
    assert encoding.head_output.scores is not None
    return encoding.head_output.scores


def with_head(model: ReferenceModel, head: dict[str, Any]) -> Encoder:
    """Return a model with another head, whose weights are ones."""
    spec = ModelSpec.model_validate({**model.spec().model_dump(), "head": head})
    kept = {name: array for name, array in model.arrays().items() if not name.startswith("head.")}
    ones = {name: torch.ones(shape) for name, shape in spec.tensors().items() if name.startswith("head.")}
    return Encoder(spec, kept | ones, CPU)


@pytest.mark.parametrize("embedded", [False, True])
@every_stack
def test_model_agrees_with_torch(pool: str, forms: tuple[Form, ...], embedded: bool) -> None:
    """Scores, embedding and steps of every row, and of a row alone."""
    model = reference_model(*forms, embedded=embedded, pool=pool)
    made, x = encoder(model), batch(model)
    encoding = made(x, sequence=True)
    assert (encoding.sequence is not None) == made.spec.has_steps
    actual = None if encoding.sequence is None else inputs.rows(Ragged(encoding.sequence, encoding.offsets))
    for row, data in enumerate(inputs.rows(x)):
        expected, pooled, steps = model(data)
        for one, at in ((encoding, row), (made(inputs.joined([data])), 0)):
            assert one.head_output.embedding is not None
            assert_close(scores(one)[at], expected, steps=len(data))
            assert_close(one.head_output.embedding[at], pooled, steps=len(data))
        if actual is not None:
            assert actual[row].shape == steps.shape
            assert_close(actual[row], steps, steps=len(data))
    held = sum(array.numel() * array.element_size() for array in model.arrays().values())
    assert encoder(model, "never").weight_bytes() == held
    if not embedded:
        assert made.backends() == {f"layers.{index}": fastest_on_cpu(form) for index, form in enumerate(forms)}


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


def test_sequence_is_returned_only_on_request() -> None:
    model = reference_model(pool="last")
    assert encoder(model)(batch(model)).sequence is None


@every_kind
def test_embedding_is_folded_unless_the_table_is_too_large_or_the_model_says_never(
    monkeypatch: pytest.MonkeyPatch, form: Form
) -> None:
    model = reference_model(form)
    made = encoder(model)
    assert made.backends() == {"layers.0": FOLDED, "layers.1": fastest_on_cpu(form)}
    assert encoder(model, "never").backends()["layers.0"] == EMBEDDED
    columns = made._layers[0].folded_columns
    assert columns is not None
    numbers = reference_layers.VOCABULARY * columns
    for limit, expected in ((numbers - 1, EMBEDDED), (numbers, FOLDED)):
        monkeypatch.setattr(folding, "MAX_TABLE_NUMBERS", limit)
        assert encoder(model).backends()["layers.0"] == expected
    assert encoder(reference_model(Form("tcn"))).backends()["layers.0"] == EMBEDDED


@pytest.mark.parametrize("embedded", [False, True])
def test_consecutive_convolutions_run_as_one_stack(monkeypatch: pytest.MonkeyPatch, embedded: bool) -> None:
    forms = Form("conv"), Form("tcn"), Form("gru"), Form("conv", padding="causal"), Form("conv")
    model = reference_model(*forms, embedded=embedded, pool="last")
    made, calls, stack = encoder(model), [], conv.stack

    def counted(x: Ragged, blocks: Any, states: Any = None, *, want: Outputs) -> Encoded:
        calls.append((len(blocks), want))
        return stack(x, blocks, states, want=want)

    monkeypatch.setattr(conv, "stack", counted)
    x = batch(model)
    for data, actual in zip(inputs.rows(x), scores(made(x)), strict=True):
        assert_close(actual, model(data).scores, steps=len(data))
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


@pytest.mark.parametrize("precision", list(STORAGE))
@every_kind
def test_precision_only_rounds_the_weights(form: Form, precision: str) -> None:
    model = reference_model(form)
    stored = {name: array.to(STORAGE[precision]) for name, array in model.arrays().items()}
    rounded = {name: array.float() for name, array in stored.items()}
    actual = Encoder(model.spec(precision).model_copy(update={"fold": "never"}), stored, CPU)(batch(model))
    expected = Encoder(model.spec().model_copy(update={"fold": "never"}), rounded, CPU)(batch(model))
    assert scores(actual).dtype == torch.float32
    assert torch.equal(scores(actual), scores(expected))
    folded = Encoder(model.spec(precision), stored, CPU)
    assert folded.backends()["layers.0"] == FOLDED
    tolerance = 8 * torch.finfo(STORAGE[precision]).eps
    torch.testing.assert_close(
        scores(folded(batch(model))), scores(encoder(model)(batch(model))), rtol=tolerance, atol=tolerance
    )


SHORTEST = [
    (4, (Form("conv", width=4, padding="none"),)),
    (7, (Form("conv", width=3, padding="none", dilation=3),)),
    (9, (Form("conv", width=4, stride=4, padding="same"), Form("conv", width=2, padding="none", dilation=2), Form("gru"))),
    (1, (Form("conv", width=4, stride=4, padding="causal"),)),
    (1, (Form("qrnn", window=5), Form("sru", depth=2, bidirectional=True))),
    (2, (Form("text_cnn", widths=(3, 4, 1), padding=1),)),
    (1, (Form("text_cnn", widths=(3, 4, 1), padding=5),)),
    (7, (Form("conv", width=3, padding="none", stride=2), Form("text_cnn", widths=(3, 2)))),
]


@pytest.mark.parametrize("min_steps, forms", SHORTEST)
def test_min_steps_are_the_fewest_with_an_output(min_steps: int, forms: tuple[Form, ...]) -> None:
    model = reference_model(*forms, embedded=False)
    assert model.spec().min_steps == reference_model(*forms).spec().min_steps == min_steps
    made, sizes = encoder(model), [min_steps - 1, min_steps, min_steps + 1]
    assert made.time_batch(rows=2, steps=1) > 0, "a timed batch has at least as many"
    if forms[-1].kind != "text_cnn":
        encoding = made(batch(model, sizes), sequence=True)
        came_out = torch.diff(encoding.offsets).tolist()
        assert came_out[:2] == [0, 1] and came_out[2] >= 1
        assert_close(scores(encoding)[1], model(inputs.rows(batch(model, sizes))[1]).scores, steps=min_steps)


def test_timed_batch_has_a_step_for_every_head_and_leaves_no_state() -> None:
    assert with_head(reference_model(Form("conv", width=5, padding="none")), {"kind": "span"}).time_batch(rows=2, steps=1) > 0
    model = reference_model(embedded=False)
    made = encoder(model)
    before = made(batch(model))
    assert made.time_batch(rows=3, steps=5) > 0
    assert torch.equal(scores(made(batch(model))), scores(before))


@pytest.mark.parametrize(
    "forms, whole_only",
    [
        ((Form("lstm"), Form("tcn"), Form("conv", padding="causal")), ()),
        ((Form("lstm"), Form("sru", bidirectional=True)), ("layers.2 (sru)",)),
        ((Form("conv", padding="causal", stride=2), Form("text_cnn")), ("layers.1 (conv)", "layers.2 (text_cnn)")),
    ],
    ids=str,
)
def test_parts_that_need_a_whole_sequence_are_named(forms: tuple[Form, ...], whole_only: tuple[str, ...]) -> None:
    made = encoder(reference_model(*forms))
    assert (made.whole_only, made.streams) == (whole_only, not whole_only)
    assert with_head(reference_model(Form("gru")), {"kind": "span"}).whole_only == ("head (span)",)


@pytest.mark.parametrize(
    "head",
    [
        {"kind": "classify", "pool": "mean", "labels": LABELS},
        {"kind": "regress", "pool": "last", "outputs": 2},
        {"kind": "tag", "labels": LABELS},
        {"kind": "span"},
        {"kind": "next", "top": 3},
        {"kind": "embed", "pool": "max", "normalize": True},
        {"kind": "sequence"},
    ],
    ids=lambda head: head["kind"],
)
def test_every_head_works_on_a_strided_model(head: dict[str, Any]) -> None:
    model = reference_model(Form("conv", stride=2), Form("gru", bidirectional=True))
    steps, width = [-(-length // 2) for length in LENGTHS], 2 * reference_layers.HIDDEN
    for asked in (False, True):
        encoding = with_head(model, head)(batch(model), sequence=asked)
        assert torch.diff(encoding.offsets).tolist() == steps
        output = encoding.head_output
        assert output.scores is None or len(output.scores) == (sum(steps) if head["kind"] == "tag" else len(LENGTHS))
        assert output.embedding is None or output.embedding.shape == (len(LENGTHS), width)
        assert (encoding.sequence is not None) == asked
        assert encoding.sequence is None or encoding.sequence.shape == (sum(steps), width)
