"""Every layer may be the first one over tokens: it embeds them, or gathers from folded tables, and both are the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.contract import Encoded, Ragged
from service.modeling import layers
from service.modeling.layer import Runs, held_bytes
from service.modeling.recurrent import Stack
from tests.kernels import inputs
from tests.kernels.inputs import EVERYTHING, assert_close, rounding
from tests.modeling import baselines
from tests.modeling.baselines import Form

CPU = torch.device("cpu")
LENGTHS = [9, 1, 14, 3]
WIDE = [form for form in (*baselines.RECURRENT, *baselines.BOTH_WAYS) if form.kind == "sru"]
"""An embedding as wide as an SRU's output makes its own columns the skip."""
FIRST = [(form, baselines.WIDTH) for form in baselines.EVERY_LAYER] + [(form, form.spec.outputs) for form in WIDE]
every_first_layer = pytest.mark.parametrize("form, width", FIRST, ids=str)
every_first_layer_that_folds = pytest.mark.parametrize(
    "form, width", [(form, width) for form, width in FIRST if form.kind != "tcn"], ids=str
)


def first(form: Form, width: int, storage: torch.dtype = torch.float32) -> Runs:
    """The layer, its weights rounded to `storage`."""
    arrays = {name: array.to(storage) for name, array in form.peer(width).arrays().items()}
    return layers.build(form.spec, width, arrays, CPU)


def embedding(width: int, storage: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(baselines.VOCABULARY, width, generator=torch.Generator().manual_seed(3)).to(storage)


def ids(lengths: list[int]) -> Ragged:
    return inputs.ragged(baselines.made_up_rows(lengths, embedded=True), lengths)


def nbytes(runs: Runs) -> int:
    return held_bytes(runs.tensors())


def assert_gives_alike(ours: Encoded, theirs: Encoded, tolerance: float) -> None:
    """Every output, and the offsets; of a convolution that folds, the state is not kept."""
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
def test_a_folded_and_a_plain_embedding_encode_alike(form: Form, width: int, storage: torch.dtype) -> None:
    folded, embedded, table = first(form, width, storage), first(form, width, storage), embedding(width, storage)
    folded.fold(table)
    embedded.embed(table)
    assert (folded.takes_ids, embedded.takes_ids) == ("folded table", "embedding and product")
    x = ids(LENGTHS)
    # A table is rounded once for each tap of a window; a few steps later that is all there is.
    tolerance = rounding(torch.float32, max(LENGTHS)) if storage == torch.float32 else 8 * torch.finfo(storage).eps
    assert_gives_alike(folded(x, EVERYTHING), embedded(x, EVERYTHING), tolerance)


@every_first_layer
def test_an_embedded_row_is_encoded_as_its_vectors_are(form: Form, width: int) -> None:
    embedded, plain, table, x = first(form, width), first(form, width), embedding(width), ids(LENGTHS)
    embedded.embed(table)
    vectors = Ragged(table[x.data.long()], x.offsets)
    assert_gives_alike(embedded(x, EVERYTHING), plain(vectors, EVERYTHING), 0.0)


@pytest.mark.parametrize(
    "form, width, way",
    [(*one, way) for one in FIRST for way in ("fold", "embed") if (one[0].kind, way) != ("tcn", "fold")],
    ids=str,
)
def test_a_row_of_ids_encodes_the_same_alone_and_in_a_batch(form: Form, width: int, way: str) -> None:
    runs, x = first(form, width), ids(LENGTHS)
    getattr(runs, way)(embedding(width))
    together = runs(x, EVERYTHING)
    for row, data in enumerate(inputs.rows(x)):
        alone = runs(inputs.joined([data]), EVERYTHING)
        for name in ("last", "mean", "max"):
            if getattr(together, name) is not None:
                assert_close(getattr(together, name)[row], getattr(alone, name)[0], steps=len(data))


@pytest.mark.parametrize("storage", [torch.float32, torch.float16], ids=str)
@every_first_layer_that_folds
def test_the_bytes_of_folded_tables_are_known_before_they_are_made(form: Form, width: int, storage: torch.dtype) -> None:
    runs, table = first(form, width, storage), embedding(width, storage)
    expected, without = runs.folded_bytes(table), nbytes(runs)
    runs.fold(table)
    assert nbytes(runs) - without == expected


@every_first_layer
def test_an_embedding_that_is_not_folded_is_held_once(form: Form, width: int) -> None:
    runs, table = first(form, width), embedding(width)
    without = nbytes(runs)
    runs.embed(table)
    assert nbytes(runs) - without == table.numel() * table.element_size()


@every_first_layer_that_folds
def test_who_folds_and_then_embeds_holds_no_table_any_more(form: Form, width: int) -> None:
    both, embedded, table, x = first(form, width), first(form, width), embedding(width), ids(LENGTHS)
    both.fold(table)
    both.embed(table)
    embedded.embed(table)
    assert both.takes_ids == "embedding and product"
    assert nbytes(both) == nbytes(embedded)
    assert_gives_alike(both(x, EVERYTHING), embedded(x, EVERYTHING), 0.0)


@pytest.mark.parametrize("way", ["fold", "embed"])
@pytest.mark.parametrize("form", baselines.RECURRENT, ids=str)
def test_ids_in_chunks_that_carry_the_states_give_the_whole(form: Form, way: str) -> None:
    runs, x = first(form.also(depth=2), baselines.WIDTH), ids(LENGTHS)
    assert isinstance(runs, Stack)
    getattr(runs, way)(embedding(baselines.WIDTH))
    whole, _ = runs.chunk(x, EVERYTHING, None)
    pieces = [inputs.joined([row[begin:end] for row in inputs.rows(x)]) for begin, end in ((0, 5), (5, 7), (7, 14))]
    states, written = None, []
    for piece in pieces:
        encoded, states = runs.chunk(piece, EVERYTHING, states)
        written.append(inputs.steps_by_row(encoded, piece))
    joined = [torch.cat(row) for row in zip(*written, strict=True)]
    assert whole.steps is not None
    assert_close(torch.cat(joined), whole.steps, steps=max(LENGTHS))


@pytest.mark.parametrize("form", baselines.TCNS, ids=str)
def test_a_layer_that_adds_its_input_to_what_it_gives_needs_vectors_and_folds_nothing(form: Form) -> None:
    assert first(form, baselines.WIDTH).folded_bytes(embedding(baselines.WIDTH)) is None
