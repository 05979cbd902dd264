"""Every layer compared with the same layer in plain PyTorch: rows of a batch, chunks, and token ids with folded tables or an embedding."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.backend import AUTO
from kernels.gru.types import GRUState
from kernels.lstm.types import LSTMState
from kernels.ragged import Encoded, Outputs, Ragged
from service.modeling import layer_builder, recurrent
from service.modeling.convolution import ConvStack
from service.modeling.recurrent import RecurrentStack
from service.modeling.runnable_layer import RunnableLayer, device_bytes
from service.modeling.spec import QRNNLayer, RecurrentLayer, SRULayer
from tests.kernels import inputs
from tests.kernels.inputs import EVERYTHING, assert_close, assert_states_close, rounding
from tests.modeling import reference_layers
from tests.modeling.reference_layers import FEATURES, Form, ReferenceTorchRNN, fastest_on_cpu, last

CPU = torch.device("cpu")
LENGTHS = [9, 1, 14, 3, 0]
LONGEST = max(LENGTHS)
DEPTHS = [(1, True), (3, False), (2, True)]
CAUSAL = (
    *reference_layers.TCNS,
    Form("conv", padding="causal", activation="glu"),
    Form("conv", padding="causal", width=3, dilation=3, weight_norm=True, batch_norm=True),
    Form("conv", width=1, activation="gelu"),
)
STREAMING = [*reference_layers.RECURRENT, *CAUSAL]
FOLDING = [form for form in reference_layers.EVERY_LAYER if form.kind != "tcn"]
every_streaming_layer = pytest.mark.parametrize("form", STREAMING, ids=str)


def built(form: Form, width: int = FEATURES, storage: torch.dtype = torch.float32) -> RunnableLayer:
    arrays = {name: array.to(storage) for name, array in form.reference(width).arrays().items()}
    return layer_builder.build_layer(form.spec, width, arrays, CPU)


def features(width: int = FEATURES, lengths: list[int] = LENGTHS) -> Ragged:
    return inputs.ragged(reference_layers.made_up_rows(lengths, width=width), lengths)


def ids() -> Ragged:
    return inputs.ragged(reference_layers.made_up_rows(LENGTHS, embedded=True), LENGTHS)


def table(width: int = reference_layers.WIDTH, storage: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(reference_layers.VOCABULARY, width, generator=torch.Generator().manual_seed(3)).to(storage)


def assert_agrees(runnable: RunnableLayer, form: Form, x: Ragged) -> None:
    """Assert that every output of every row agrees with the reference, and that a row without steps has zeros."""
    encoded, reference = runnable(x, EVERYTHING), form.reference(x.data.shape[1])
    assert encoded.last is not None and encoded.mean is not None and encoded.max is not None
    for row, (data, ours) in enumerate(zip(inputs.rows(x), inputs.steps_by_row(encoded, x), strict=True)):
        steps = reference(data.double()) if len(data) else ours.new_zeros(0, form.spec.outputs)
        assert ours.shape == steps.shape
        assert_close(ours, steps, steps=len(data))
        zeros = torch.zeros(form.spec.outputs)
        pools = (last(steps, form.spec), steps.mean(0), steps.amax(0)) if len(steps) else (zeros, zeros, zeros)
        for pooled, expected in zip((encoded.last[row], encoded.mean[row], encoded.max[row]), pools, strict=True):
            assert_close(pooled, expected, steps=len(data))


@pytest.mark.parametrize("depth, bidirectional", DEPTHS)
@pytest.mark.parametrize("form", reference_layers.RECURRENT, ids=str)
def test_stack_agrees_with_torch_on_each_row(form: Form, depth: int, bidirectional: bool) -> None:
    form = form.also(depth=depth, bidirectional=bidirectional)
    assert_agrees(built(form), form, features())


@pytest.mark.parametrize("form", [*reference_layers.CONVOLUTIONS, *reference_layers.TCNS], ids=str)
def test_convolution_agrees_with_torch_on_each_row(form: Form) -> None:
    assert_agrees(built(form), form, features())


@pytest.mark.parametrize("form", [form for form in reference_layers.RECURRENT if form.kind == "sru"], ids=str)
def test_sru_skip_uses_the_columns_of_its_direction(form: Form) -> None:
    form = form.also(depth=2, bidirectional=True)
    assert_agrees(built(form, form.spec.outputs), form, features(form.spec.outputs))


@pytest.mark.parametrize("kind, layer", [("sru", SRULayer), ("qrnn", QRNNLayer)])
def test_both_directions_run_in_one_call(kind: str, layer: type[RecurrentLayer], monkeypatch: pytest.MonkeyPatch) -> None:
    family, calls = recurrent.FAMILIES[layer], []

    def both(x: Ragged, weights: Any, states: Any, *, want: Outputs, backend: str) -> Encoded:
        calls.append((len(weights), backend))
        return family.run_both(x, weights, states, want=want, backend=backend)

    def run(*_: Any, **__: Any) -> Encoded:
        pytest.fail("one direction was run alone")

    monkeypatch.setitem(recurrent.FAMILIES, layer, replace(family, run=run, run_both=both))
    form = Form(kind, depth=2, bidirectional=True)
    assert_agrees(built(form), form, features())
    assert calls == [(2, AUTO), (2, AUTO)]


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_states_are_those_of_torch(kind: str) -> None:
    """A stack returns them, and starts from them."""
    form = Form(kind, depth=2, bidirectional=True)
    stack, reference, x = built(form), form.reference(FEATURES), features(lengths=[6])
    assert isinstance(stack, RecurrentStack) and isinstance(reference, ReferenceTorchRNN)
    hidden, cell = torch.randn(2, 4, 1, reference_layers.HIDDEN)
    given = [LSTMState(*one) if kind == "lstm" else GRUState(one[0]) for one in zip(hidden, cell, strict=True)]
    encoded, states = stack.run_chunk(x, EVERYTHING, given)
    initial = (hidden[:, 0].double(), cell[:, 0].double())
    steps, after = reference.rnn(x.data.double(), initial if kind == "lstm" else initial[0])
    assert encoded.steps is not None
    assert_close(encoded.steps, steps, steps=6)
    for name, expected in zip(("hidden", "cell"), after if kind == "lstm" else [after], strict=False):
        assert_close(torch.stack([getattr(state, name)[0] for state in states]), expected, steps=6)


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
    runnable, x = built(form), features()
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


@pytest.mark.parametrize("form", CAUSAL, ids=str)
def test_states_of_convolutions_are_written_to_their_slots(form: Form) -> None:
    runnable, x = built(form), features()
    assert isinstance(runnable, ConvStack)
    _, begun = runnable.run_chunk(piece(x, 0, 5), EVERYTHING, None)
    expected, after = runnable.run_chunk(piece(x, 5, 14), EVERYTHING, begun)
    slots = torch.tensor([3, 0, 7, 5, 1])
    slabs = [inputs.put_in_slots(state, slots, places=8) for state in begun]
    encoded, carried = runnable.run_chunk(piece(x, 5, 14), EVERYTHING, slabs)
    assert encoded.steps is not None and expected.steps is not None
    assert torch.equal(encoded.steps, expected.steps)
    for one, slab, state in zip(carried, slabs, after, strict=True):
        assert one is slab
        assert torch.equal(slab.by_row().left, state.left)
        assert bool((slab.left[[2, 4, 6]] == 9).all())


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


@pytest.mark.parametrize("form", reference_layers.EVERY_LAYER, ids=str)
def test_embedded_ids_are_encoded_like_their_vectors(form: Form) -> None:
    embedded, plain, vectors, x = built(form, len(table()[0])), built(form, len(table()[0])), table(), ids()
    bytes_before = device_bytes(embedded.tensors())
    embedded.embed(vectors)
    assert embedded.takes_ids == "embedding and product"
    assert device_bytes(embedded.tensors()) - bytes_before == 4 * vectors.numel(), "the embedding is held once"
    assert_gives_alike(embedded(x, EVERYTHING), plain(Ragged(vectors[x.data.long()], x.offsets), EVERYTHING), 0.0)


@pytest.mark.parametrize("form", FOLDING, ids=str)
def test_folded_tables_agree_with_the_embedding(form: Form) -> None:
    """An SRU has its skip connection in the columns of an embedding that is as wide as its output."""
    skips = form.kind == "sru" and form.spec.outputs != reference_layers.WIDTH
    for width, storage in ((reference_layers.WIDTH, torch.bfloat16), (form.spec.outputs if skips else 7, torch.float32)):
        folded, embedded, vectors, x = built(form, width, storage), built(form, width, storage), table(width, storage), ids()
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


@pytest.mark.parametrize("kind", ["lstm", "sru", "qrnn", "conv", "text_cnn"])
def test_embed_after_fold_releases_the_tables(kind: str) -> None:
    both, embedded = (built(Form(kind), reference_layers.WIDTH) for _ in range(2))
    both.fold(table())
    for runnable in (both, embedded):
        runnable.embed(table())
    assert device_bytes(both.tensors()) == device_bytes(embedded.tensors())
    assert_gives_alike(both(ids(), EVERYTHING), embedded(ids(), EVERYTHING), 0.0)


@every_streaming_layer
def test_chunks_of_ids_give_the_same_steps(form: Form) -> None:
    for mode in ("embed", "fold") if form.kind != "tcn" else ("embed",):
        runnable, x = built(form, reference_layers.WIDTH), ids()
        assert isinstance(runnable, RecurrentStack | ConvStack)
        getattr(runnable, mode)(table())
        whole, (carried, _) = runnable(x, EVERYTHING), in_chunks(runnable, x, [0, 1, 5, 14])
        assert whole.steps is not None
        assert_close(carried, whole.steps, steps=LONGEST)


@pytest.mark.parametrize("form", reference_layers.EVERY_LAYER, ids=str)
def test_layer_holds_the_tensors_of_its_spec(form: Form) -> None:
    arrays = form.reference(reference_layers.WIDTH).arrays()
    assert {name: tuple(array.shape) for name, array in arrays.items()} == form.spec.tensors(reference_layers.WIDTH)
    runnable = built(form, reference_layers.WIDTH)
    in_filters = ("magnitude", "norm") if form.kind in ("conv", "tcn") else ()
    kept = [array for name, array in arrays.items() if not in_filters or not name.endswith(in_filters)]
    assert sum(one.numel() for one in runnable.tensors()) == sum(array.numel() for array in kept)
    assert runnable.backend() == fastest_on_cpu(form)
    assert runnable.takes_ids is None
    assert (runnable.folded_columns is None) == (form.kind == "tcn")
