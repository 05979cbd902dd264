"""A whole model: its layers in sequence, folded embeddings, precisions, and the parts that need a whole sequence."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kernels.backend import AUTO, PINNED
from kernels.lstm import choice, levels
from kernels.ragged import STORAGE, Encoded, Outputs, Ragged
from service.modeling import folding, layer_builder
from service.modeling.encoder import Encoder
from service.modeling.layers import KINDS
from service.modeling.spec import ModelSpec
from tests.kernels import inputs
from tests.kernels.inputs import EVERYTHING, assert_close
from tests.modeling.random_models import (
    CPU,
    FEATURES,
    HIDDEN,
    LABELS,
    ONE_OF_A_KIND,
    VOCABULARY,
    WIDTH,
    Form,
    batch,
    classifier,
    encoder,
    random_arrays,
    scores,
)

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
every_stack = pytest.mark.parametrize("pool, forms", STACKS, ids=lambda each: "+".join(map(str, each)))
every_kind = pytest.mark.parametrize("form", ONE_OF_A_KIND, ids=str)


def with_head(spec: ModelSpec, head: dict[str, Any]) -> Encoder:
    return encoder(ModelSpec.model_validate({**spec.model_dump(), "head": head}))


def encoded_by_each(spec: ModelSpec, x: Ragged) -> Encoded:
    """Return the outputs of the last layer, with each layer run by itself."""
    arrays, width = random_arrays(spec), FEATURES
    encoded = Encoded(None)
    for index, layer in enumerate(spec.layers):
        own = {
            name.removeprefix(f"layers.{index}."): array
            for name, array in arrays.items()
            if name.startswith(f"layers.{index}.")
        }
        if layer.kind == "embedding":
            x, width = Ragged(own["weight"][x.data.long()], x.offsets), WIDTH
            continue
        encoded = layer_builder.build_layer(layer, width, own, CPU)(
            x, Outputs(max=True) if layer.kind == "text_cnn" else EVERYTHING
        )
        if encoded.steps is not None:
            x = Ragged(encoded.steps, x.offsets if encoded.offsets is None else encoded.offsets)
        width = layer.outputs
    return encoded


@pytest.mark.parametrize("embedded", [False, True])
@every_stack
def test_model_runs_its_layers_one_after_another(pool: str, forms: tuple[Form, ...], embedded: bool) -> None:
    spec = classifier(*forms, embedded=embedded, pool=pool)
    made, x = encoder(spec), batch(spec, LENGTHS)
    encoding, expected, arrays = made(x, sequence=True), encoded_by_each(spec, x), random_arrays(spec)
    pooled = getattr(expected, pool)
    output = encoding.head_output
    assert output.embedding is not None
    assert_close(output.embedding, pooled, steps=max(LENGTHS))
    logits = pooled.double() @ arrays["head.weight"].double() + arrays["head.bias"].double()
    assert_close(scores(encoding), logits.softmax(1), steps=max(LENGTHS))
    assert (encoding.sequence is not None) == spec.has_steps
    if encoding.sequence is not None and expected.steps is not None:
        assert_close(encoding.sequence, expected.steps, steps=max(LENGTHS))
        assert made(x).sequence is None, "only on request"
    for row, data in enumerate(inputs.rows(x)):
        assert_close(scores(made(inputs.joined([data])))[0], scores(encoding)[row], steps=len(data))
    assert encoder(spec, fold="never").weight_bytes() == sum(array.numel() * array.element_size() for array in arrays.values())
    if not embedded:
        assert made.backends() == {f"layers.{index}": form.fastest_on_cpu for index, form in enumerate(forms)}


def test_pinned_model_requests_a_pinned_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = list[str]()

    def run(*arguments: Any, backend: str, **options: Any) -> Encoded:
        requested.append(backend)
        return levels(*arguments, backend=backend, **options)

    family = cast(Any, SimpleNamespace(levels=run, choice=choice, runs_levels=True))
    monkeypatch.setitem(KINDS, "lstm", replace(KINDS["lstm"], family=family))
    for pinned in (False, True):
        spec = classifier(Form("lstm", depth=2), pin_backend=pinned)
        encoder(spec)(batch(spec, LENGTHS))
    assert requested == [AUTO, PINNED]


@every_kind
def test_embedding_is_folded_unless_the_table_is_too_large_or_the_model_says_never(
    monkeypatch: pytest.MonkeyPatch, form: Form
) -> None:
    spec = classifier(form)
    made = encoder(spec)
    assert made.backends() == {"layers.0": FOLDED, "layers.1": form.fastest_on_cpu}
    assert encoder(spec, fold="never").backends()["layers.0"] == EMBEDDED
    columns = made._layers[0].folded_columns
    assert columns is not None
    for limit, expected in ((VOCABULARY * columns - 1, EMBEDDED), (VOCABULARY * columns, FOLDED)):
        monkeypatch.setattr(folding, "MAX_TABLE_NUMBERS", limit)
        assert encoder(spec).backends()["layers.0"] == expected
    assert encoder(classifier(Form("tcn"))).backends()["layers.0"] == EMBEDDED


@pytest.mark.parametrize("precision", list(STORAGE))
@every_kind
def test_precision_only_rounds_the_weights(form: Form, precision: str) -> None:
    spec = classifier(form)
    x, arrays = batch(spec, LENGTHS), random_arrays(spec)
    stored = {name: array.to(STORAGE[precision]) for name, array in arrays.items()}
    rounded = {name: array.float() for name, array in stored.items()}
    low, unfolded = spec.model_copy(update={"precision": precision}), {"fold": "never"}
    actual = Encoder(low.model_copy(update=unfolded), stored, CPU)(x)
    expected = Encoder(spec.model_copy(update=unfolded), rounded, CPU)(x)
    assert scores(actual).dtype == torch.float32
    assert torch.equal(scores(actual), scores(expected))
    folded = Encoder(low, stored, CPU)
    assert folded.backends()["layers.0"] == FOLDED
    tolerance = 8 * torch.finfo(STORAGE[precision]).eps
    torch.testing.assert_close(scores(folded(x)), scores(encoder(spec)(x)), rtol=tolerance, atol=tolerance)


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
    spec = classifier(*forms, embedded=False)
    assert spec.min_steps == classifier(*forms).min_steps == min_steps
    made = encoder(spec)
    assert made.time_batch(rows=2, steps=1) > 0, "a timed batch has at least as many"
    if forms[-1].kind != "text_cnn":
        encoding = made(batch(spec, [min_steps - 1, min_steps, min_steps + 1]), sequence=True)
        came_out = torch.diff(encoding.offsets).tolist()
        assert came_out[:2] == [0, 1] and came_out[2] >= 1


def test_timed_batch_has_a_step_for_every_head_and_leaves_no_state() -> None:
    assert with_head(classifier(Form("conv", width=5, padding="none")), {"kind": "span"}).time_batch(rows=2, steps=1) > 0
    spec = classifier(Form("lstm"), embedded=False)
    made, x = encoder(spec), batch(spec, LENGTHS)
    before = made(x)
    assert made.time_batch(rows=3, steps=5) > 0
    assert torch.equal(scores(made(x)), scores(before))


@pytest.mark.parametrize(
    "forms, whole_only",
    [
        ((Form("lstm"), Form("tcn"), Form("conv", padding="causal")), ()),
        ((Form("lstm"), Form("sru", bidirectional=True)), ("layers.2 (sru)",)),
        ((Form("gru", direction="backward"),), ("layers.1 (gru)",)),
        ((Form("conv", padding="causal", stride=2), Form("text_cnn")), ("layers.1 (conv)", "layers.2 (text_cnn)")),
    ],
    ids=str,
)
def test_parts_that_need_a_whole_sequence_are_named(forms: tuple[Form, ...], whole_only: tuple[str, ...]) -> None:
    made = encoder(classifier(*forms))
    assert (made.whole_only, made.streams) == (whole_only, not whole_only)


@pytest.mark.parametrize("head", [{"kind": "tag", "labels": LABELS}, {"kind": "embed", "pool": "max"}], ids=str)
def test_head_works_on_a_strided_model(head: dict[str, Any]) -> None:
    spec = classifier(Form("conv", stride=2), Form("gru", bidirectional=True))
    steps, width = [-(-length // 2) for length in LENGTHS], 2 * HIDDEN
    for asked in (False, True):
        encoding = with_head(spec, head)(batch(spec, LENGTHS), sequence=asked)
        assert torch.diff(encoding.offsets).tolist() == steps
        output = encoding.head_output
        assert output.scores is None or len(output.scores) == (sum(steps) if head["kind"] == "tag" else len(LENGTHS))
        assert output.embedding is None or output.embedding.shape == (len(LENGTHS), width)
        assert (encoding.sequence is not None) == asked
        assert encoding.sequence is None or encoding.sequence.shape == (sum(steps), width)
