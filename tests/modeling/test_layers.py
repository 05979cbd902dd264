"""Every layer: a batch equals its rows alone, chunks equal the whole row, and folded tables equal an embedding.

The equations are compared with torch, and with the packages that have a layer, in test_model_words, tests/importers and tests/exporters.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.ragged import Encoded, Outputs, Ragged
from service.modeling.convolution import ConvStack
from service.modeling.recurrent import RecurrentStack
from service.modeling.runnable_layer import device_bytes
from service.modeling.spec.layers import RecurrentLayer
from tests.kernels import inputs
from tests.kernels.inputs import EVERYTHING, assert_close, assert_states_close, rounding
from tests.modeling.random_models import (
    CONVOLUTIONS,
    EVERY_LAYER,
    FEATURES,
    RECURRENT,
    TCNS,
    VOCABULARY,
    WIDTH,
    Form,
    random_ids,
    random_rows,
)

LENGTHS = [9, 1, 14, 3, 0]
LONGEST = max(LENGTHS)
CAUSAL = [form for form in CONVOLUTIONS if form.options.get("padding") == "causal" and "stride" not in form.options]
FOLDING = [form for form in EVERY_LAYER if form.kind != "tcn"]
every_streaming_layer = pytest.mark.parametrize("form", [*RECURRENT, *CAUSAL, *TCNS], ids=str)


def features(width: int = FEATURES, lengths: list[int] = LENGTHS) -> Ragged:
    return inputs.joined(random_rows(lengths, width))


def ids() -> Ragged:
    return random_ids(LENGTHS)


def table(width: int = WIDTH, storage: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(VOCABULARY, width, generator=torch.Generator().manual_seed(3)).to(storage)


@pytest.mark.parametrize("form", EVERY_LAYER, ids=str)
def test_row_is_encoded_alike_alone_and_in_a_batch(form: Form) -> None:
    """A row without steps has zeros. The skip of an SRU that is as wide as its input is among the columns of its direction."""
    want = Outputs(max=True) if form.kind == "text_cnn" else EVERYTHING
    for width in {FEATURES, form.spec.outputs if form.kind == "sru" else FEATURES}:
        runnable, x = form.built(width), features(width)
        together = runnable(x, want)
        rows = inputs.steps_by_row(together, x) if together.steps is not None else [None] * len(LENGTHS)
        for row, (data, ours) in enumerate(zip(inputs.rows(x), rows, strict=True)):
            alone = runnable(inputs.joined([data]), want)
            if ours is not None and alone.steps is not None:
                assert_close(ours, alone.steps, steps=len(data))
            for name in ("last", "mean", "max"):
                if getattr(together, name) is not None:
                    expected = getattr(alone, name)[0] if len(data) else torch.zeros(form.spec.outputs)
                    assert_close(getattr(together, name)[row], expected, steps=len(data))


def piece(x: Ragged, begin: int, end: int) -> Ragged:
    return inputs.joined([row[begin:end] for row in inputs.rows(x)])


def in_chunks(runnable: RecurrentStack | ConvStack, x: Ragged, cuts: list[int]) -> tuple[Tensor, list[Any]]:
    """Return all steps of all rows, and the states after the last chunk."""
    written: list[list[Tensor]] = [[] for _ in range(x.rows)]
    states: list[Any] | None = None
    for begin, end in pairwise(cuts):
        chunk = piece(x, begin, end)
        encoded, states = runnable.run_chunk(chunk, EVERYTHING, states)
        for row, steps in zip(written, inputs.steps_by_row(encoded, chunk), strict=True):
            row.append(steps)
    assert states is not None
    return torch.cat([steps for row in written for steps in row]), states


@every_streaming_layer
def test_chunks_give_the_same_steps_and_states_as_the_whole_row(form: Form) -> None:
    form = form.also(depth=2) if isinstance(form.spec, RecurrentLayer) else form
    runnable, x = form.built(), features()
    assert isinstance(runnable, RecurrentStack | ConvStack)
    whole, after = runnable.run_chunk(x, EVERYTHING, None)
    assert whole.steps is not None
    for cuts in ([0, 7, 14], [0, 1, 2, 3, 14], [0, 0, 13, 14]):
        steps, states = in_chunks(runnable, x, cuts)
        assert_close(steps, whole.steps, steps=LONGEST)
        for state, expected in zip(states, after, strict=True):
            assert_states_close(state, expected, steps=LONGEST)
    _, states = runnable.run_chunk(x, Outputs(last=True), None)
    for state, expected in zip(states, after, strict=True):
        assert_states_close(state, expected, steps=0)


def assert_gives_alike(ours: Encoded, theirs: Encoded, tolerance: float) -> None:
    """Compare every output and the offsets. A folded convolution keeps no state."""
    for name in inputs.OUTPUTS:
        one, other = getattr(ours, name), getattr(theirs, name)
        assert (one is None) == (other is None), name
        if one is not None:
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    assert (ours.offsets is None) == (theirs.offsets is None)
    if ours.offsets is not None and theirs.offsets is not None:
        assert ours.offsets.tolist() == theirs.offsets.tolist()


@pytest.mark.parametrize("form", EVERY_LAYER, ids=str)
def test_embedded_ids_are_encoded_like_their_vectors(form: Form) -> None:
    embedded, plain, vectors, x = form.built(WIDTH), form.built(WIDTH), table(), ids()
    bytes_before = device_bytes(embedded.tensors())
    embedded.embed(vectors)
    assert embedded.takes_ids == "embedding and product"
    assert device_bytes(embedded.tensors()) - bytes_before == 4 * vectors.numel(), "the embedding is held once"
    assert_gives_alike(embedded(x, EVERYTHING), plain(Ragged(vectors[x.data.long()], x.offsets), EVERYTHING), 0.0)


@pytest.mark.parametrize("form", FOLDING, ids=str)
def test_folded_tables_agree_with_the_embedding(form: Form) -> None:
    """An SRU has its skip connection in the columns of an embedding that is as wide as its output."""
    skips = form.kind == "sru" and form.spec.outputs != WIDTH
    for width, storage in ((WIDTH, torch.bfloat16), (form.spec.outputs if skips else 7, torch.float32)):
        folded, embedded, vectors, x = form.built(width, storage), form.built(width, storage), table(width, storage), ids()
        columns, without = folded.folded_columns, sum(tensor.numel() for tensor in folded.tensors())
        folded.fold(vectors)
        embedded.embed(vectors)
        assert folded.takes_ids == "folded table" and columns is not None
        kept = vectors.numel() if isinstance(folded, ConvStack) and folded.streams else 0  # for chunks
        added = sum(tensor.numel() for tensor in folded.tensors()) - without - kept
        assert added in (columns * len(vectors), columns * (len(vectors) + 1)), "the tables of a window have a row of zeros"
        # A table is rounded once for each tap of a window, so the error is that of a few steps.
        tolerance = rounding(torch.float32, LONGEST) if storage == torch.float32 else 8 * torch.finfo(storage).eps
        assert_gives_alike(folded(x, EVERYTHING), embedded(x, EVERYTHING), tolerance)


@every_streaming_layer
def test_chunks_of_ids_give_the_same_steps(form: Form) -> None:
    for mode in ("embed", "fold") if form.kind != "tcn" else ("embed",):
        runnable, x = form.built(WIDTH), ids()
        assert isinstance(runnable, RecurrentStack | ConvStack)
        getattr(runnable, mode)(table())
        whole, (carried, _) = runnable(x, EVERYTHING), in_chunks(runnable, x, [0, 1, 5, 14])
        assert whole.steps is not None
        assert_close(carried, whole.steps, steps=LONGEST)
