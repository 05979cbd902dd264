"""Every layer can be the first layer over tokens, with an embedding or with folded tables. Both give the same result."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.ragged import Encoded, Ragged
from service.modeling import layer_builder
from service.modeling.convolution import ConvStack
from service.modeling.recurrent import RecurrentStack
from service.modeling.runnable_layer import RunnableLayer, device_bytes
from tests.kernels import inputs
from tests.kernels.inputs import EVERYTHING, assert_close, rounding
from tests.modeling import reference_layers
from tests.modeling.reference_layers import Form

CPU = torch.device("cpu")
LENGTHS = [9, 1, 14, 3]
WIDE = [form for form in (*reference_layers.RECURRENT, *reference_layers.BOTH_WAYS) if form.kind == "sru"]
"""Widths of the embedding. If it is as wide as an SRU's output, its columns are the skip connection."""
FIRST = [(form, reference_layers.WIDTH) for form in reference_layers.EVERY_LAYER] + [(form, form.spec.outputs) for form in WIDE]
every_first_layer = pytest.mark.parametrize("form, width", FIRST, ids=str)
every_first_layer_that_folds = pytest.mark.parametrize(
    "form, width", [(form, width) for form, width in FIRST if form.kind != "tcn"], ids=str
)


def first(form: Form, width: int, storage: torch.dtype = torch.float32) -> RunnableLayer:
    """Return the layer with its weights rounded to `storage`."""
    arrays = {name: array.to(storage) for name, array in form.reference(width).arrays().items()}
    return layer_builder.build_layer(form.spec, width, arrays, CPU)


def embedding(width: int, storage: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(reference_layers.VOCABULARY, width, generator=torch.Generator().manual_seed(3)).to(storage)


def ids(lengths: list[int]) -> Ragged:
    return inputs.ragged(reference_layers.made_up_rows(lengths, embedded=True), lengths)


def numbers(runnable: RunnableLayer) -> int:
    return sum(tensor.numel() for tensor in runnable.tensors())


def nbytes(runnable: RunnableLayer) -> int:
    return device_bytes(runnable.tensors())


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


@pytest.mark.parametrize("storage", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@every_first_layer_that_folds
def test_folded_tables_agree_with_the_embedding(form: Form, width: int, storage: torch.dtype) -> None:
    folded, embedded, table = first(form, width, storage), first(form, width, storage), embedding(width, storage)
    folded.fold(table)
    embedded.embed(table)
    assert (folded.takes_ids, embedded.takes_ids) == ("folded table", "embedding and product")
    x = ids(LENGTHS)
    # A table is rounded once for each tap of a window, so the error is that of a few steps.
    tolerance = rounding(torch.float32, max(LENGTHS)) if storage == torch.float32 else 8 * torch.finfo(storage).eps
    assert_gives_alike(folded(x, EVERYTHING), embedded(x, EVERYTHING), tolerance)


@every_first_layer
def test_embedded_ids_are_encoded_like_their_vectors(form: Form, width: int) -> None:
    embedded, plain, table, x = first(form, width), first(form, width), embedding(width), ids(LENGTHS)
    embedded.embed(table)
    vectors = Ragged(table[x.data.long()], x.offsets)
    assert_gives_alike(embedded(x, EVERYTHING), plain(vectors, EVERYTHING), 0.0)


@pytest.mark.parametrize(
    "form, width, mode",
    [(*one, mode) for one in FIRST for mode in ("fold", "embed") if (one[0].kind, mode) != ("tcn", "fold")],
    ids=str,
)
def test_row_of_ids_is_encoded_alike_alone_and_in_a_batch(form: Form, width: int, mode: str) -> None:
    runnable, x = first(form, width), ids(LENGTHS)
    getattr(runnable, mode)(embedding(width))
    together = runnable(x, EVERYTHING)
    for row, data in enumerate(inputs.rows(x)):
        alone = runnable(inputs.joined([data]), EVERYTHING)
        for name in ("last", "mean", "max"):
            if getattr(together, name) is not None:
                assert_close(getattr(together, name)[row], getattr(alone, name)[0], steps=len(data))


@every_first_layer_that_folds
def test_folded_columns_predict_the_size_of_the_tables(form: Form, width: int) -> None:
    """The tables of a window have one more row, of zeros."""
    runnable, table = first(form, width), embedding(width)
    columns, without = runnable.folded_columns, numbers(runnable)
    assert columns is not None
    runnable.fold(table)
    kept = table.numel() if isinstance(runnable, ConvStack) and runnable.streams else 0  # for chunks
    assert numbers(runnable) - without - kept in (columns * len(table), columns * (len(table) + 1))


@every_first_layer
def test_embedding_is_held_once(form: Form, width: int) -> None:
    runnable, table = first(form, width), embedding(width)
    without = nbytes(runnable)
    runnable.embed(table)
    assert nbytes(runnable) - without == table.numel() * table.element_size()


@every_first_layer_that_folds
def test_embed_after_fold_releases_the_tables(form: Form, width: int) -> None:
    both, embedded, table, x = first(form, width), first(form, width), embedding(width), ids(LENGTHS)
    both.fold(table)
    both.embed(table)
    embedded.embed(table)
    assert both.takes_ids == "embedding and product"
    assert nbytes(both) == nbytes(embedded)
    assert_gives_alike(both(x, EVERYTHING), embedded(x, EVERYTHING), 0.0)


@pytest.mark.parametrize("mode", ["fold", "embed"])
@pytest.mark.parametrize("form", reference_layers.RECURRENT, ids=str)
def test_chunks_of_ids_give_the_same_steps_as_the_whole_row(form: Form, mode: str) -> None:
    runnable, x = first(form.also(depth=2), reference_layers.WIDTH), ids(LENGTHS)
    assert isinstance(runnable, RecurrentStack)
    getattr(runnable, mode)(embedding(reference_layers.WIDTH))
    whole, _ = runnable.run_chunk(x, EVERYTHING, None)
    pieces = [inputs.joined([row[begin:end] for row in inputs.rows(x)]) for begin, end in ((0, 5), (5, 7), (7, 14))]
    states, written = None, []
    for piece in pieces:
        encoded, states = runnable.run_chunk(piece, EVERYTHING, states)
        written.append(inputs.steps_by_row(encoded, piece))
    joined = [torch.cat(row) for row in zip(*written, strict=True)]
    assert whole.steps is not None
    assert_close(torch.cat(joined), whole.steps, steps=max(LENGTHS))


@pytest.mark.parametrize("form", reference_layers.TCNS, ids=str)
def test_layer_with_residual_cannot_fold(form: Form) -> None:
    assert first(form, reference_layers.WIDTH).folded_columns is None
