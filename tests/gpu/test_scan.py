"""Tests of the CUDA kernels of the SRU and the QRNN against the float64 reference: sizes, ragged and divided rows, chunks, slots."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from operator import itemgetter
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import launching
from kernels.backend import explain
from kernels.directions import compose_directions
from kernels.ragged import Encoded, Outputs, Ragged
from kernels.scan.shape import PART, ScanShape, TileShape
from tests.gpu.inputs import (
    TOLERANCE,
    agree,
    close,
    gates,
    in_shape,
    joined,
    made,
    outputs,
    same,
    stored,
)
from tests.gpu.sanitizer import TOOLS, assert_no_findings
from tests.kernels import inputs
from tests.kernels.families import Form
from tests.kernels.inputs import (
    EVERYTHING,
    OUTPUTS,
    SCRAP_SLOT,
    ZERO_SLOT,
    Arguments,
    arrays,
    assert_reserved_slots_unchanged,
    assert_shared_slots_result,
    caches_with_zero_slot,
    in_chunks,
    map_arrays,
    put_in_slots,
    run_from_slot_to_slot,
    with_shared_slots,
)

pytestmark = pytest.mark.usefixtures("poisoned")

SRU_1 = Form("sru", version=1, skip="block")
SRU_2 = Form("sru", version=2, skip="block", tanh=True)
SRU_COLUMNS = Form("sru", version=1, skip="columns")
SRU_OF_IDS = Form("sru", version=1, skip="none", ids=True)
QRNN = Form("qrnn", pooling="fo", window=2)
QRNN_OF_IDS = Form("qrnn", pooling="ifo", window=2, ids=True)
LAYERS = [SRU_1, SRU_2, QRNN]
EXACT = [*LAYERS, SRU_OF_IDS, QRNN_OF_IDS]
"""Forms with bit-equal results in any batch; the first three only with gate inputs."""

RAGGED = [9, 0, 3, 17, 1, 5, 12, 12, 2, 30, 0]
LONG = [[4096], [1500, 0, 3, 2049, 64, 700], [63, 1, 65, 128, 0, 127]]
WITHOUT_POOLS = Outputs(steps=True, last=True)
LAST = Outputs(last=True)

every_layer = pytest.mark.parametrize("form", LAYERS, ids=str)
every_exact_form = pytest.mark.parametrize("form", EXACT, ids=str)
IN_TILES = [TileShape(8, 1), TileShape(16, 2), TileShape(32, 2), TileShape(32, 1)]
DIVIDED = [TileShape(16, 2, split=True), TileShape(32, 2, split=True)]
IN_STREAMS = [ScanShape(32, split=True), ScanShape(64, split=True)]
LINEAR = [
    SRU_1,
    SRU_COLUMNS,
    QRNN,
    Form("qrnn", pooling="fo", window=3),
    Form("qrnn", pooling="ifo", window=2),
    Form("qrnn", pooling="f", window=1),
]
GATHERED = [SRU_OF_IDS, Form("sru", version=1, skip="block", ids=True), Form("qrnn", pooling="ifo", window=1, ids=True)]
with_and_without_tiles = pytest.mark.parametrize(
    "form, shape, want",
    [
        *((form, ScanShape(32), WITHOUT_POOLS) for form in EXACT),
        *((form, shape, LAST) for form in (SRU_1, QRNN) for shape in (TileShape(32, 2), DIVIDED[0])),
        (SRU_OF_IDS, DIVIDED[1], LAST),
    ],
    ids=str,
)
every_index = pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)


def run(form: Form, arguments: Arguments, want: Outputs = EVERYTHING) -> Encoded:
    return form.run(*arguments, want=want, backend="fused")


def exactly(form: Form, lengths: Sequence[int], hidden: int, *, seed: int = 0) -> Arguments:
    """Return arguments without a library product, whose rounding depends on the batch."""
    return (made if form.takes_ids else gates)(form, lengths, hidden, seed=seed)


def begun_later(array: Tensor, places: int) -> Tensor:
    """Return the same values, `places` values after an aligned address."""
    return torch.cat([array.new_zeros(places), array.flatten()])[places:].view_as(array)


@every_layer
@pytest.mark.parametrize("hidden", [1, 33, 64, 200, 256, 300])
@pytest.mark.parametrize("storage", TOLERANCE, ids=str)
def test_outputs_and_state_match_the_reference(form: Form, hidden: int, storage: torch.dtype) -> None:
    arguments = made(form, RAGGED, hidden, storage=storage)
    agree(run(form, arguments), form.exact(arguments), TOLERANCE[storage])


@pytest.mark.parametrize("form", [SRU_2, SRU_COLUMNS, QRNN], ids=str)
@pytest.mark.parametrize("width", [5, 130, 1100])
def test_any_number_of_inputs(form: Form, width: int) -> None:
    arguments = made(form, RAGGED, 41, width)
    agree(run(form, arguments), form.exact(arguments), TOLERANCE[torch.float16])


@pytest.mark.parametrize("form", [SRU_2, SRU_COLUMNS, QRNN], ids=str)
def test_few_long_rows_of_a_wide_layer(form: Form) -> None:
    """A library product may precede the recurrence."""
    arguments = made(form, [700, 0, 500], 280)
    agree(run(form, arguments), form.exact(arguments), TOLERANCE[torch.float16])


@pytest.mark.parametrize("pooling, units", [*product(["f", "fo"], [32, 64]), ("ifo", 32)])
def test_blocks_may_have_any_number_of_units(pooling: str, units: int) -> None:
    form = Form("qrnn", pooling=pooling, window=1)
    arguments = made(form, [*RAGGED, 130, *[7] * 60], 100)
    with in_shape(ScanShape(units)):
        agree(run(form, arguments), form.exact(arguments), TOLERANCE[torch.float16])


@pytest.mark.parametrize(
    "form, shape", [*product(LAYERS, [ScanShape(64)]), *product([SRU_1, QRNN], [ScanShape(32, busy=True)])], ids=str
)
def test_launch_shape_does_not_change_a_bit(form: Form, shape: ScanShape) -> None:
    arguments = gates(form, [*RAGGED, 130, *[7] * 60], 104)
    with in_shape(ScanShape(32)):
        expected = run(form, arguments)
    with in_shape(shape):
        same(run(form, arguments), expected)


@every_layer
@pytest.mark.parametrize("data", [torch.float16, torch.float32, torch.bfloat16], ids=str)
def test_gate_inputs_may_have_any_dtype(form: Form, data: torch.dtype) -> None:
    arguments = stored(gates(form, RAGGED, 200), data)
    agree(run(form, arguments), form.exact(arguments), TOLERANCE[torch.float16])


@pytest.mark.parametrize("form", [SRU_1, QRNN], ids=str)
@pytest.mark.parametrize("places", [1, 4])
def test_gate_inputs_may_begin_at_any_address(form: Form, places: int) -> None:
    x, weights, state = gates(form, RAGGED, 64)
    shifted = Ragged(begun_later(x.data, places), x.offsets)
    assert shifted.data.data_ptr() % 16 == 2 * places
    same(run(form, Arguments(shifted, weights, state)), run(form, Arguments(x, weights, state)))


@pytest.mark.parametrize("places", [1, 4])
def test_tables_may_begin_at_any_address(places: int) -> None:
    x, weights, state = made(QRNN_OF_IDS, RAGGED, 64)
    shifted = replace(weights, tables=begun_later(weights.tables, places))
    same(run(QRNN_OF_IDS, Arguments(x, shifted, state)), run(QRNN_OF_IDS, Arguments(x, weights, state)))


@every_layer
@pytest.mark.parametrize("lengths", [[1], [64, 64], [63, 2, 63], [200, 0, 1, 130, 5]], ids=str)
def test_tiles_may_end_at_any_step(form: Form, lengths: list[int]) -> None:
    """Boxes of inputs reach beyond the rows of a block, and beyond the first and the last row of the batch."""
    alone, arguments = made(form, lengths, 72), bidirectional_arguments(form, made, lengths)
    agree(run(form, alone), form.exact(alone), TOLERANCE[torch.float16])
    agree(run_bidirectional(form, arguments), run_each(form, arguments), TOLERANCE[torch.float16])


@every_layer
def test_inputs_may_begin_at_any_address(form: Form) -> None:
    x, weights, state = made(form, RAGGED, 64)
    shifted = Ragged(begun_later(x.data, 1), x.offsets)
    same(run(form, Arguments(shifted, weights, state)), run(form, Arguments(x, weights, state)))


@pytest.mark.parametrize("form", [*LAYERS, QRNN_OF_IDS], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 256, 700, 4096])
def test_any_number_of_rows(form: Form, rows: int) -> None:
    chance = random.Random(rows)
    x, weights, state = made(form, [chance.randint(0, 4) for _ in range(rows)], 72)
    encoded = outputs(run(form, Arguments(x, weights, state)))
    some = sorted(chance.sample(range(rows), min(rows, 40)))
    each = inputs.rows(x)
    sampled = map_arrays(state, itemgetter(some))
    expected = outputs(form.exact(Arguments(joined([each[row] for row in some]), weights, sampled)))
    for name in encoded.keys() - {"steps"}:
        close(encoded[name][some], expected[name], TOLERANCE[torch.float16], name)


# Divided rows. Streams of whole rows divide them in the same way.


def undistorted(arguments: Arguments) -> Arguments:
    return arguments


def with_forget_bias(form: Form, arguments: Arguments, added: float) -> Arguments:
    """Return a layer whose forget gates are nearly open, so that a cell lasts many steps, or nearly closed."""
    bias, hidden = arguments.weights.bias.clone(), arguments.weights.hidden
    begin = 0 if form.family == "sru" else hidden  # an SRU's candidate has no bias
    bias[begin : begin + hidden] += added
    return arguments._replace(weights=replace(arguments.weights, bias=bias))


def with_large_values(arguments: Arguments) -> Arguments:
    """Return gate inputs near the float16 limit in every block."""
    drawn = torch.rand(arguments.x.data.shape, generator=torch.Generator().manual_seed(7)).cuda()
    arguments.x.data[drawn < 0.01] = 60000.0
    arguments.x.data[drawn > 0.99] = -60000.0
    return arguments


def run_in(shape: ScanShape | TileShape, form: Form, arguments: Arguments) -> Encoded:
    with in_shape(shape):
        return run(form, arguments, LAST)


def dividing(form: Form, lengths: Sequence[int]) -> list[ScanShape | TileShape]:
    """Return all shapes that divide these rows. Only a single row is divided between streams."""
    weights = form.arguments([1], 8, 8).weights
    blocks = weights.input.shape[-1] // weights.hidden
    return [*DIVIDED, *(shape for shape in IN_STREAMS if len(lengths) == 1 and shape.units * blocks <= 192)]


@pytest.mark.parametrize("form", [SRU_1, SRU_COLUMNS, QRNN, Form("qrnn", pooling="f", window=1)], ids=str)
@pytest.mark.parametrize("added", [0.0, 6.0, -6.0])
@pytest.mark.parametrize("lengths", [[4096], [700, 0, 1500]], ids=str)
def test_divided_rows_match_the_reference(form: Form, added: float, lengths: list[int]) -> None:
    """With open forget gates, an error made in one step stays in the cell."""
    arguments = with_forget_bias(form, made(form, lengths, 72), added)
    expected = form.exact(arguments)
    for shape in (ScanShape(32), *dividing(form, lengths)):
        agree(run_in(shape, form, arguments), expected, TOLERANCE[torch.float16])


@pytest.mark.parametrize("form", LINEAR, ids=str)
@pytest.mark.parametrize("inputs_width", [24, 700])
@pytest.mark.parametrize("lengths", [RAGGED, *LONG, [64, 64], [7] * 300], ids=str)
def test_tiles_give_the_same_bits_as_streams(form: Form, inputs_width: int, lengths: list[int]) -> None:
    arguments = made(form, lengths, 72, inputs_width)
    expected = run_in(ScanShape(32), form, arguments)
    for shape in (*IN_TILES, *DIVIDED):
        same(run_in(shape, form, arguments), expected)


@pytest.mark.parametrize("form", LINEAR, ids=str)
@pytest.mark.parametrize("steps", [1, PART, PART + 1, 1000, 4096])
def test_streams_of_parts_give_the_same_bits(form: Form, steps: int) -> None:
    arguments = made(form, [steps], 72)
    expected = run_in(ScanShape(32), form, arguments)
    for shape in dividing(form, [steps]):
        same(run_in(shape, form, arguments), expected)


@pytest.mark.parametrize("form", [SRU_1, QRNN, *GATHERED], ids=str)
@pytest.mark.parametrize("lengths", [RAGGED, *LONG], ids=str)
@pytest.mark.parametrize("distort", [undistorted, with_large_values])
def test_gates_in_tiles_give_the_same_bits_as_in_streams(
    form: Form, lengths: list[int], distort: Callable[[Arguments], Arguments]
) -> None:
    arguments = exactly(form, lengths, 72)
    if not form.takes_ids:
        arguments = distort(arguments)
    expected = run_in(ScanShape(32), form, arguments)
    assert all(bool(array.isfinite().all()) for array in outputs(expected).values())
    same(run_in(TileShape(32, 2), form, arguments), expected)
    same(run_in(TileShape(32, 2, split=True), form, arguments), expected)


@pytest.mark.parametrize("form", [SRU_1, QRNN], ids=str)
@pytest.mark.parametrize("shape", [ScanShape(32), TileShape(32, 2), TileShape(32, 2, split=True)], ids=str)
def test_nan_stays_in_its_row(form: Form, shape: ScanShape | TileShape) -> None:
    x, weights, state = gates(form, [1500, 700], 72)
    clean = run_in(shape, form, Arguments(x, weights, state))
    data = x.data.clone()
    data[777] = torch.nan
    encoded = run_in(shape, form, Arguments(Ragged(data, x.offsets), weights, state))
    assert encoded.last is not None and clean.last is not None
    assert encoded.last[0].isnan().all() and encoded.state.cell[0].isnan().all()
    assert torch.equal(encoded.last[1], clean.last[1])
    assert torch.equal(encoded.state.cell[1], clean.state.cell[1])


@pytest.mark.parametrize("form", [SRU_1, QRNN, SRU_OF_IDS, QRNN_OF_IDS], ids=str)
@pytest.mark.parametrize("steps", [70, 900])
def test_long_row_has_the_same_bits_alone_and_anywhere_in_a_batch(form: Form, steps: int) -> None:
    """Alone it is divided, or computed in tiles; in a batch it is a part of a stream."""
    x, weights, _ = exactly(form, [steps, 120], 72)
    row, others = x.data[:steps], x.data[steps:]
    alone = run(form, Arguments(joined([row]), weights, None), LAST)
    for place in (0, 7, 120):
        rows = [others[:place], row, *torch.split(others[place:], 2)]
        whole = run(form, Arguments(joined(rows), weights, None), LAST)
        assert alone.last is not None and whole.last is not None
        assert torch.equal(alone.last[0], whole.last[1])
        assert torch.equal(alone.state.cell[0], whole.state.cell[1])


@pytest.mark.parametrize("form", [SRU_1, QRNN], ids=str)
def test_unrequested_steps_do_not_change_a_divided_row(form: Form) -> None:
    arguments = exactly(form, [900], 72)
    divided, whole = run(form, arguments, LAST), run(form, arguments)
    assert divided.last is not None and whole.last is not None
    assert torch.equal(divided.last, whole.last)


@pytest.mark.parametrize("form", [SRU_1, QRNN, QRNN_OF_IDS], ids=str)
def test_chunks_of_a_long_row_agree_within_rounding(form: Form) -> None:
    """Parts are counted from the beginning of a chunk."""
    x, weights, state = exactly(form, [1000], 72)
    whole = run(form, Arguments(x, weights, state), LAST)
    for chunk in (joined([part]) for part in torch.split(x.data, 300)):
        encoded = run(form, Arguments(chunk, weights, state), LAST)
        state = encoded.state
    assert encoded.last is not None and whole.last is not None
    close(encoded.last, whole.last, TOLERANCE[torch.float32], "last")
    close(encoded.state.cell, whole.state.cell, TOLERANCE[torch.float32], "cell")


@every_exact_form
@pytest.mark.parametrize("hidden", [40, 130])
def test_row_is_bit_equal_alone_in_a_batch_and_in_chunks(form: Form, hidden: int) -> None:
    x, weights, state = exactly(form, [3, 41, 0, 8, 19, *[5] * 90], hidden)
    whole = outputs(run(form, Arguments(x, weights, state)))
    for row in (0, 1, 2, 4, 60):
        row_state = map_arrays(state, itemgetter(slice(row, row + 1)))
        alone = outputs(run(form, Arguments(joined([inputs.rows(x)[row]]), weights, row_state)))
        assert all(torch.equal(alone[name][0], whole[name][row]) for name in alone.keys() - {"steps"})
    cuts = [1, 7, 0, 4, 2, *[2] * 90]
    pieces = [(data[:cut], data[cut : 2 * cut], data[2 * cut :]) for data, cut in zip(inputs.rows(x), cuts, strict=True)]
    steps: list[list[Tensor]] = [[] for _ in pieces]
    for chunk in map(joined, zip(*pieces, strict=True)):
        encoded = run(form, Arguments(chunk, weights, state))
        state = encoded.state
        for row_steps, part in zip(steps, inputs.steps_by_row(encoded, chunk), strict=True):
            row_steps.append(part)
    assert torch.equal(torch.cat([part for row in steps for part in row]), whole["steps"])
    assert all(torch.equal(array, whole[name]) for name, array in arrays(state).items())


@pytest.mark.parametrize("form, make", [*((form, exactly) for form in EXACT), (QRNN, made)])
def test_nan_in_other_rows_does_not_reach_a_row(form: Form, make: Callable[..., Arguments]) -> None:
    x, weights, state = make(form, [4, 2, 0, 7, 7, 1, 3, 5, 6], 96)
    clean = outputs(run(form, Arguments(x, weights, state)))
    poisoned = map_arrays(state, torch.clone)
    poisoned.cell[1], poisoned.cell[3] = torch.inf, torch.nan
    data = x.data.clone()
    if not form.takes_ids:
        data[4:6], data[-3:] = torch.nan, torch.nan
    encoded = outputs(run(form, Arguments(Ragged(data, x.offsets), weights, poisoned)))
    for row in (0, 2, 4, 5, 6, 7):
        assert all(torch.equal(encoded[name][row], clean[name][row]) for name in clean.keys() - {"steps"})
    assert encoded["cell"][[3] if form.takes_ids else [3, 8]].isnan().all()


@every_exact_form
@pytest.mark.parametrize("requested", [(), ("steps",), ("last",), ("mean",), ("max",), ("steps", "max")], ids=str)
def test_unrequested_outputs_are_none_and_change_nothing(form: Form, requested: tuple[str, ...]) -> None:
    arguments = exactly(form, RAGGED, 48)
    encoded = run(form, arguments, Outputs(**dict.fromkeys(requested, True)))
    assert {name for name in OUTPUTS if getattr(encoded, name) is not None} == set(requested)
    same(encoded, run(form, arguments))


@with_and_without_tiles
@every_index
def test_state_in_slots_is_read_and_written_in_place(
    form: Form, shape: ScanShape | TileShape, want: Outputs, index: torch.dtype
) -> None:
    x, weights, state = made(form, LONG[2], 72)
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(1))[: x.rows].to("cuda", index)
    caches = put_in_slots(state, slots, places=40)
    with in_shape(shape):
        expected = run(form, Arguments(x, weights, state), want)
        encoded = run(form, Arguments(x, weights, caches), want)
    assert encoded.state is caches
    same_state(caches.by_row(), expected.state)
    assert encoded.last is not None and expected.last is not None
    assert torch.equal(encoded.last, expected.last)
    others = torch.ones(40, dtype=torch.bool, device="cuda").index_fill(0, slots.long(), False)
    assert all(bool((cache[others] == 9).all()) for name, cache in arrays(caches).items() if name != "slots")


def same_state(actual: Any, expected: Any) -> None:
    """Assert equal states. A state cache may have a wider dtype."""
    for name, array in arrays(expected).items():
        assert torch.equal(getattr(actual, name).to(array.dtype), array), name


@pytest.mark.parametrize("form", [SRU_1, SRU_2, QRNN, SRU_OF_IDS, QRNN_OF_IDS], ids=str)
def test_cuda_graph_serves_other_lengths_slots_and_values(form: Form) -> None:
    first, second = made(form, [5, 9, 0, 30], 160), made(form, [20, 1, 7, 6], 160, seed=1)
    x = Ragged(torch.zeros_like(first.x.data), first.x.offsets.clone())
    slots = torch.tensor([3, 1, 0, 2], dtype=torch.int32, device="cuda")
    caches, weights = put_in_slots(first.state, slots, places=4), first.weights
    run(form, Arguments(x, weights, caches))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        encoded = outputs(run(form, Arguments(x, weights, caches)))
    for arguments, order in ((first, [0, 1, 2, 3]), (second, [2, 0, 3, 1])):
        tokens = len(arguments.x.data)
        x.data[:tokens], slots[:] = arguments.x.data, torch.tensor(order, dtype=torch.int32)
        x.offsets.copy_(arguments.x.offsets)
        for name, array in arrays(arguments.state).items():
            getattr(caches, name)[order] = array
        graph.replay()
        expected = run(form, Arguments(arguments.x, weights, arguments.state))
        assert expected.steps is not None
        assert torch.equal(encoded["steps"][:tokens], expected.steps)
        assert all(torch.equal(encoded[name], getattr(expected, name)) for name in ("last", "mean", "max"))
        same_state(caches.by_row(), expected.state)


@every_exact_form
@every_index
def test_rows_share_a_first_slot_and_a_last_slot(form: Form, index: torch.dtype) -> None:
    x, weights, state = exactly(form, [*LONG[2], 41, *[5] * 40], 72)
    caches = caches_with_zero_slot(state)

    def go_on(chunk: Ragged, state: Any) -> Encoded:
        return run(form, Arguments(chunk, weights, state), WITHOUT_POOLS)

    whole = go_on(x, None)
    steps, after = run_from_slot_to_slot(go_on, in_chunks(x, chunks=4), caches, index)
    assert whole.steps is not None
    assert torch.equal(steps, whole.steps)
    same_state(after, whole.state)
    assert_reserved_slots_unchanged(caches)


@with_and_without_tiles
@every_index
@pytest.mark.parametrize("lengths", [RAGGED, LONG[2], [9, 0, 0, 0], [500, 0, 0, 0]], ids=str)
def test_rows_start_from_sources_and_write_to_slots(
    form: Form, shape: ScanShape | TileShape, want: Outputs, index: torch.dtype, lengths: list[int]
) -> None:
    x, weights, state = made(form, lengths, 72)
    caches = with_shared_slots(state, index)
    with in_shape(shape):
        expected = run(form, Arguments(x, weights, caches.by_row()), want)
        encoded = run(form, Arguments(x, weights, caches), want)
    assert encoded.last is not None and expected.last is not None
    assert torch.equal(encoded.last, expected.last)
    if want.steps:
        assert encoded.steps is not None and expected.steps is not None
        assert torch.equal(encoded.steps, expected.steps)
    assert_shared_slots_result(encoded.state, state, expected.state)


@pytest.mark.parametrize("form", [SRU_1, SRU_2, QRNN, SRU_OF_IDS, QRNN_OF_IDS], ids=str)
@every_index
def test_cuda_graph_serves_other_slots_and_sources(form: Form, index: torch.dtype) -> None:
    """First all rows start from one slot, then all rows write one slot."""
    first, second = made(form, [5, 9, 0, 30], 160), made(form, [20, 0, 18, 6], 160, seed=1)
    x, weights = Ragged(first.x.data.clone(), first.x.offsets.clone()), first.weights
    slots, sources = torch.tensor([[3, 4, 5, 6], [ZERO_SLOT] * 4], dtype=index, device="cuda")
    begun = caches_with_zero_slot(first.state)
    caches = replace(begun, slots=slots, sources=sources)
    run(form, Arguments(x, weights, caches))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        encoded = outputs(run(form, Arguments(x, weights, caches)))
    middle = [5, 3, 2, 7]
    state = map_arrays(first.state, torch.zeros_like)
    for arguments, origins, ends in ((first, [ZERO_SLOT] * 4, middle), (second, middle, [SCRAP_SLOT] * 4)):
        x.data.copy_(arguments.x.data)
        x.offsets.copy_(arguments.x.offsets)
        slots.copy_(torch.tensor(ends))
        sources.copy_(torch.tensor(origins))
        graph.replay()
        expected = run(form, Arguments(arguments.x, weights, state))
        assert all(torch.equal(encoded[name], getattr(expected, name)) for name in OUTPUTS)
        state = expected.state if ends == middle else state
        same_state(map_arrays(begun, itemgetter(middle)), state)
        assert_reserved_slots_unchanged(begun)


@every_exact_form
def test_early_launches_wait_for_earlier_kernels(form: Form) -> None:
    """Each launch continues from the last output of the previous launch, also in a graph with a fork."""
    x, weights, state = exactly(form, [PART], 200)
    whole = run(form, Arguments(x, weights, state), LAST).state
    chunks = [joined([part]) for part in torch.split(x.data, 8)]

    def go_on(state: Any, chunks: Sequence[Ragged]) -> Any:
        for chunk in chunks:
            state = run(form, Arguments(chunk, weights, state), LAST).state
        return state

    same_state(go_on(state, chunks), whole)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            begun = go_on(state, chunks[:-1])
        alone = go_on(state, chunks)
        torch.cuda.current_stream().wait_stream(side)
        joined_again = go_on(begun, chunks[-1:])
    graph.replay()
    same_state(alone, whole)
    same_state(joined_again, whole)


def bidirectional_arguments(form: Form, make: Callable[..., Arguments], lengths: Sequence[int]) -> Arguments:
    """Return rows, and the weights and states of both directions."""
    forward, backward = (make(form, lengths, 72, seed=seed) for seed in (0, 1))
    return Arguments(forward.x, (forward.weights, backward.weights), (forward.state, backward.state))


def run_bidirectional(form: Form, arguments: Arguments, want: Outputs = EVERYTHING) -> Encoded:
    return form.bidirectional(*arguments, want=want, backend="fused")


def run_each(form: Form, arguments: Arguments, want: Outputs = EVERYTHING) -> Encoded:
    """Run one direction after the other."""
    return compose_directions(partial(form.run, backend="fused"))(*arguments, want=want)


@every_exact_form
def test_bidirectional_launch_equals_two_launches(form: Form) -> None:
    x, weights, states = bidirectional_arguments(form, exactly, [*RAGGED, 130])
    for before in (states, None):
        same(run_bidirectional(form, Arguments(x, weights, before)), run_each(form, Arguments(x, weights, before)))


@every_layer
def test_bidirectional_product_matches_two_launches(form: Form) -> None:
    arguments = bidirectional_arguments(form, made, [*RAGGED, 130])
    agree(run_bidirectional(form, arguments), run_each(form, arguments), TOLERANCE[torch.float16])


def test_each_direction_skips_from_its_own_columns() -> None:
    x, (forward, backward), states = bidirectional_arguments(SRU_COLUMNS, made, RAGGED)
    arguments = Arguments(x, (replace(forward, skip_from=0), replace(backward, skip_from=17)), states)
    agree(run_bidirectional(SRU_COLUMNS, arguments), run_each(SRU_COLUMNS, arguments), TOLERANCE[torch.float16])


@pytest.mark.parametrize("form", LINEAR, ids=str)
@pytest.mark.parametrize("lengths", [[1], [100], [1000], [63, 2, 900], *LONG], ids=str)
def test_bidirectional_divided_rows_give_the_same_bits(form: Form, lengths: list[int]) -> None:
    arguments = bidirectional_arguments(form, made, lengths)
    with in_shape(ScanShape(32)):
        expected = run_bidirectional(form, arguments, LAST)
    agree(expected, run_each(form, arguments, LAST), TOLERANCE[torch.float16])
    for shape in (*IN_TILES, *dividing(form, lengths)):
        with in_shape(shape):
            same(run_bidirectional(form, arguments, LAST), expected)


@pytest.mark.parametrize("form", [SRU_1, QRNN, *GATHERED], ids=str)
def test_bidirectional_gates_in_tiles_give_the_same_bits(form: Form) -> None:
    for lengths in LONG:
        arguments = bidirectional_arguments(form, exactly, lengths)
        with in_shape(ScanShape(32)):
            expected = run_each(form, arguments, LAST)
        with in_shape(TileShape(32, 2, split=True)):
            same(run_bidirectional(form, arguments, LAST), expected)


@every_exact_form
def test_bidirectional_layers_continue_chunk_by_chunk(form: Form) -> None:
    x, weights, (forward, backward) = bidirectional_arguments(form, exactly, [41, 0, 8, 1, *[5] * 30])
    whole = run_bidirectional(form, Arguments(x, weights, (forward, backward)))
    pieces = [(row[: len(row) // 3], row[len(row) // 3 :]) for row in inputs.rows(x)]
    early, late = map(joined, zip(*pieces, strict=True))
    # The backward direction starts with the late chunk; the forward direction continues with it after the early chunk.
    begun = run_bidirectional(form, Arguments(late, weights, (forward, backward)))
    first = run_bidirectional(form, Arguments(early, weights, (forward, begun.state[1])))
    second = run_bidirectional(form, Arguments(late, weights, (first.state[0], backward)))
    parts = zip(inputs.steps_by_row(first, early), inputs.steps_by_row(second, late), strict=True)
    assert whole.steps is not None
    assert torch.equal(torch.cat([part for row in parts for part in row]), whole.steps)
    for after, expected in zip((second.state[0], first.state[1]), whole.state, strict=True):
        assert all(torch.equal(array, getattr(expected, name)) for name, array in arrays(after).items())


@every_exact_form
def test_each_direction_has_its_own_slots(form: Form) -> None:
    x, weights, states = bidirectional_arguments(form, exactly, [4, 0, 2])
    expected = run_bidirectional(form, Arguments(x, weights, states))
    places = torch.tensor([3, 0, 4], device="cuda"), torch.tensor([5, 1, 2], device="cuda")
    caches = put_in_slots(states[0], places[0], places=6), put_in_slots(states[1], places[1], places=6)
    encoded = run_bidirectional(form, Arguments(x, weights, caches))
    assert all(after is cache for after, cache in zip(encoded.state, caches, strict=True))
    assert all(torch.equal(getattr(encoded, name), getattr(expected, name)) for name in OUTPUTS)
    for cache, state in zip(caches, expected.state, strict=True):
        same_state(cache.by_row(), state)


@every_exact_form
def test_each_direction_starts_from_its_sources(form: Form) -> None:
    x, weights, states = bidirectional_arguments(form, exactly, [4, 0, 2, 3, 0, 0])
    caches = with_shared_slots(states[0]), with_shared_slots(states[1], torch.int64)
    expected = run_bidirectional(form, Arguments(x, weights, (caches[0].by_row(), caches[1].by_row())))
    encoded = run_bidirectional(form, Arguments(x, weights, caches))
    assert all(torch.equal(getattr(encoded, name), getattr(expected, name)) for name in OUTPUTS)
    for after, state, expected_state in zip(encoded.state, states, expected.state, strict=True):
        assert_shared_slots_result(after, state, expected_state)


@pytest.mark.parametrize("family", ["sru", "qrnn"])
def test_explain_names_the_kernel_and_the_reasons(family: str) -> None:
    for dtype, hidden in product(["float16", "bfloat16", "float32"], [1, 512, 5000]):
        details = "after a library product" if dtype == "float32" else "with the product of its inputs"
        assert explain(family, device="cuda:0", dtype=dtype, hidden=hidden) == f"fused: chosen ({details})"
    for device, why in (("cuda:9", "this machine has no cuda:9"), ("cpu", "needs an NVIDIA GPU")):
        assert explain(family, device=device, dtype="float16", hidden=96).splitlines()[0] == f"fused: {why}"


@pytest.mark.parametrize("family", ["sru", "qrnn"])
def test_framework_runs_without_cupy_and_on_other_gpus(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    explanation = partial(explain, family, device="cuda:0", dtype="float16", hidden=96)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert (
        explanation() == "fused: needs compute capability 8.0, this device has 7.5\ncpu: runs on a CPU only\nframework: chosen"
    )
    monkeypatch.setattr(launching, "cupy_installed", lambda: False)
    assert explanation() == "fused: CuPy is not installed\ncpu: runs on a CPU only\nframework: chosen"


@every_exact_form
def test_chosen_backend_runs(form: Form) -> None:
    arguments = exactly(form, [3, 4], 192)
    assert form.module.choice(arguments.weights).backend.name == "fused"
    same(form.run(*arguments), run(form, arguments))


@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer_reports_no_errors(tool: str) -> None:
    assert_no_findings(tool, "tests.gpu.small_scan")
