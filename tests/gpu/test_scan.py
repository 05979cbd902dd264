"""The CUDA kernels of the SRU and the QRNN against the float64 reference: odd sizes, ragged rows, rings, chunks, slots and graphs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
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
from kernels.contract import Encoded, Outputs, Ragged
from kernels.directions import composed
from kernels.scan.launch import Shape
from tests.gpu.inputs import TOLERANCE, agree, close, gates, in_shape, joined, made, outputs, same, stored, with_wrong_guesses
from tests.gpu.sanitizer import TOOLS, finds_nothing
from tests.kernels import inputs
from tests.kernels.families import Form
from tests.kernels.inputs import (
    EVERYTHING,
    OUTPUTS,
    SCRAP,
    ZERO,
    Given,
    arrays,
    assert_only_slots_were_written,
    assert_went_on_from_shared_places,
    begun_in_zeros,
    from_place_to_place,
    from_shared_places,
    in_chunks,
    in_slots,
    mapped,
    poisoned_memory,
)

SRU_1 = Form("sru", version=1, skip="block")
SRU_2 = Form("sru", version=2, skip="block", tanh=True)
SRU_COLUMNS = Form("sru", version=1, skip="columns")
SRU_OF_IDS = Form("sru", version=1, skip="none", ids=True)
QRNN = Form("qrnn", pooling="fo", window=2)
QRNN_OF_IDS = Form("qrnn", pooling="ifo", window=2, ids=True)
LAYERS = [SRU_1, SRU_2, QRNN]
EXACT = [*LAYERS, SRU_OF_IDS, QRNN_OF_IDS]
"""Forms that compute to the bit, once the first three have their gates given."""

RAGGED = [9, 0, 3, 17, 1, 5, 12, 12, 2, 30, 0]
LONG = [[4096], [1500, 0, 3, 2049, 64, 700], [63, 1, 65, 128, 0, 127]]
WITHOUT_POOLS = Outputs(steps=True, last=True)
LAST = Outputs(last=True)

every_layer = pytest.mark.parametrize("form", LAYERS, ids=str)
every_exact_form = pytest.mark.parametrize("form", EXACT, ids=str)
with_and_without_rings = pytest.mark.parametrize(
    "form, ring", [*((form, 0) for form in EXACT), (SRU_1, 2), (QRNN, 2), (SRU_OF_IDS, 2), (QRNN_OF_IDS, 2)], ids=str
)
every_index = pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)


@pytest.fixture(autouse=True, scope="module")
def _poisoned_memory() -> Iterator[None]:
    with poisoned_memory():
        yield


def run(form: Form, given: Given, want: Outputs = EVERYTHING) -> Encoded:
    return form.run(*given, want=want, backend="fused")


def exactly(form: Form, lengths: Sequence[int], hidden: int, *, seed: int = 0) -> Given:
    """With nothing before the recurrence that may round otherwise in another batch."""
    return (made if form.takes_ids else gates)(form, lengths, hidden, seed=seed)


def begun_later(array: Tensor, places: int) -> Tensor:
    """The same values, so many places after where memory is aligned."""
    return torch.cat([array.new_zeros(places), array.flatten()])[places:].view_as(array)


@every_layer
@pytest.mark.parametrize("hidden", [1, 33, 64, 200, 256, 300])
@pytest.mark.parametrize("storage", TOLERANCE, ids=str)
def test_all_outputs_and_the_state_agree_with_the_reference(form: Form, hidden: int, storage: torch.dtype) -> None:
    given = made(form, RAGGED, hidden, storage=storage)
    agree(run(form, given), form.exact(given), TOLERANCE[storage])


@pytest.mark.parametrize("form", [SRU_2, SRU_COLUMNS, QRNN], ids=str)
@pytest.mark.parametrize("width", [5, 130, 1100])
def test_any_number_of_inputs(form: Form, width: int) -> None:
    given = made(form, RAGGED, 41, width)
    agree(run(form, given), form.exact(given), TOLERANCE[torch.float16])


@pytest.mark.parametrize("form", [SRU_2, SRU_COLUMNS, QRNN], ids=str)
def test_few_long_rows_of_a_wide_layer(form: Form) -> None:
    """A library's product may stand before the recurrence."""
    given = made(form, [700, 0, 500], 280)
    agree(run(form, given), form.exact(given), TOLERANCE[torch.float16])


@pytest.mark.parametrize("pooling, units", [*product(["f", "fo"], [32, 64]), ("ifo", 32)])
def test_blocks_of_any_number_of_units(pooling: str, units: int) -> None:
    form = Form("qrnn", pooling=pooling, window=1)
    given = made(form, [*RAGGED, 130, *[7] * 60], 100)
    with in_shape(Shape(units)):
        agree(run(form, given), form.exact(given), TOLERANCE[torch.float16])


@pytest.mark.parametrize(
    "form, shape", [*product(LAYERS, [Shape(64)]), *product([SRU_1, QRNN], [Shape(32, busy=True)])], ids=str
)
def test_given_the_gates_the_shape_does_not_change_a_bit(form: Form, shape: Shape) -> None:
    given = gates(form, [*RAGGED, 130, *[7] * 60], 104)
    with in_shape(Shape(32)):
        expected = run(form, given)
    with in_shape(shape):
        same(run(form, given), expected)


@every_layer
@pytest.mark.parametrize("data", [torch.float16, torch.float32, torch.bfloat16], ids=str)
def test_gates_come_in_any_dtype(form: Form, data: torch.dtype) -> None:
    given = stored(gates(form, RAGGED, 200), data)
    agree(run(form, given), form.exact(given), TOLERANCE[torch.float16])


@pytest.mark.parametrize("form", [SRU_1, QRNN], ids=str)
@pytest.mark.parametrize("places", [1, 4])
def test_gates_begin_anywhere(form: Form, places: int) -> None:
    x, weights, state = gates(form, RAGGED, 64)
    shifted = Ragged(begun_later(x.data, places), x.offsets)
    assert shifted.data.data_ptr() % 16 == 2 * places
    same(run(form, Given(shifted, weights, state)), run(form, Given(x, weights, state)))


@pytest.mark.parametrize("places", [1, 4])
def test_tables_begin_anywhere(places: int) -> None:
    x, weights, state = made(QRNN_OF_IDS, RAGGED, 64)
    shifted = replace(weights, tables=begun_later(weights.tables, places))
    same(run(QRNN_OF_IDS, Given(x, shifted, state)), run(QRNN_OF_IDS, Given(x, weights, state)))


@every_layer
@pytest.mark.parametrize("lengths", [[1], [64, 64], [63, 2, 63], [200, 0, 1, 130, 5]], ids=str)
def test_tiles_end_anywhere(form: Form, lengths: list[int]) -> None:
    """Boxes of inputs reach beyond the rows of a block, and beyond the first and the last one of all."""
    alone, given = made(form, lengths, 72), both_ways(form, made, lengths)
    agree(run(form, alone), form.exact(alone), TOLERANCE[torch.float16])
    agree(run_both(form, given), run_each(form, given), TOLERANCE[torch.float16])


@every_layer
def test_inputs_begin_anywhere(form: Form) -> None:
    x, weights, state = made(form, RAGGED, 64)
    shifted = Ragged(begun_later(x.data, 1), x.offsets)
    same(run(form, Given(shifted, weights, state)), run(form, Given(x, weights, state)))


@pytest.mark.parametrize("form", [*LAYERS, QRNN_OF_IDS], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 256, 700, 4096])
def test_any_number_of_rows(form: Form, rows: int) -> None:
    chance = random.Random(rows)
    x, weights, state = made(form, [chance.randint(0, 4) for _ in range(rows)], 72)
    encoded = outputs(run(form, Given(x, weights, state)))
    some = sorted(chance.sample(range(rows), min(rows, 40)))
    each = inputs.rows(x)
    mine = mapped(state, itemgetter(some))
    expected = outputs(form.exact(Given(joined([each[row] for row in some]), weights, mine)))
    for name in encoded.keys() - {"steps"}:
        close(encoded[name][some], expected[name], TOLERANCE[torch.float16], name)


# Long rows in a ring. What a ring guesses, it finds out before anybody sees it.


def untroubled(given: Given) -> Given:
    return given


def with_long_memory(given: Given) -> Given:
    """Forget gates near one: what is guessed wrong stays wrong for long."""
    hidden = given.weights.hidden
    given.x.data[:, hidden : 2 * hidden] += 4.0
    return given


def with_large_values(given: Given) -> Given:
    """As large as float16 has them, in every block."""
    drawn = torch.rand(given.x.data.shape, generator=torch.Generator().manual_seed(7)).cuda()
    given.x.data[drawn < 0.01] = 60000.0
    given.x.data[drawn > 0.99] = -60000.0
    return given


@pytest.mark.parametrize("form", [SRU_1, QRNN], ids=str)
@pytest.mark.parametrize("want", [WITHOUT_POOLS, LAST], ids=["steps", "last"])
@pytest.mark.parametrize("lengths", LONG, ids=str)
@pytest.mark.parametrize("trouble", [untroubled, with_long_memory, with_large_values, with_wrong_guesses])
def test_a_ring_gives_the_same_bits_as_no_ring(
    form: Form, want: Outputs, lengths: list[int], trouble: Callable[[Given], Given]
) -> None:
    given = trouble(gates(form, lengths, 72))
    with in_shape(Shape(32)):
        expected = run(form, given, want)
    assert all(bool(array.isfinite().all()) for array in outputs(expected).values())
    for ring in (1, 2, 8):
        with in_shape(Shape(32, ring)):
            same(run(form, given, want), expected)


@pytest.mark.parametrize("form", [SRU_1, QRNN], ids=str)
@pytest.mark.parametrize("ring", [1, 2, 8])
def test_a_ring_hands_on_what_is_not_a_number(form: Form, ring: int) -> None:
    x, weights, state = gates(form, [1500, 700], 72)
    with in_shape(Shape(32)):
        clean = run(form, Given(x, weights, state), WITHOUT_POOLS)
    data = x.data.clone()
    data[777] = torch.nan
    with in_shape(Shape(32, ring)):
        encoded = run(form, Given(Ragged(data, x.offsets), weights, state), WITHOUT_POOLS)
    assert encoded.steps is not None and clean.steps is not None
    assert encoded.steps[777:1500].isnan().all()
    for unharmed in (slice(0, 777), slice(1500, 2200)):
        assert torch.equal(encoded.steps[unharmed], clean.steps[unharmed])
    assert encoded.state.cell[0].isnan().all()
    assert torch.equal(encoded.state.cell[1], clean.state.cell[1])


@pytest.mark.parametrize("form", [SRU_1, QRNN, SRU_OF_IDS, QRNN_OF_IDS], ids=str)
@pytest.mark.parametrize("ring", [2, 8])
def test_a_ring_makes_its_own_gates(form: Form, ring: int) -> None:
    for lengths in LONG:
        given = made(form, lengths, 72)
        with in_shape(Shape(32)):
            expected = run(form, given, WITHOUT_POOLS)
        with in_shape(Shape(32, ring)):
            same(run(form, given, WITHOUT_POOLS), expected)


@pytest.mark.parametrize("form", [SRU_1, QRNN, QRNN_OF_IDS], ids=str)
def test_a_long_row_has_a_ring_alone_and_none_in_a_batch_and_the_same_bits(form: Form) -> None:
    x, weights, state = exactly(form, [900, *[2] * 60], 72)
    whole = run(form, Given(x, weights, state), WITHOUT_POOLS)
    mine = mapped(state, itemgetter(slice(0, 1)))
    alone = run(form, Given(joined([x.data[:900]]), weights, mine), WITHOUT_POOLS)
    assert alone.steps is not None and whole.steps is not None
    assert torch.equal(alone.steps, whole.steps[:900])
    for name, array in arrays(alone.state).items():
        assert torch.equal(array[0], getattr(whole.state, name)[0])


@every_exact_form
@pytest.mark.parametrize("hidden", [40, 130])
def test_a_row_is_the_same_to_the_bit_alone_in_any_batch_and_in_any_chunks(form: Form, hidden: int) -> None:
    x, weights, state = exactly(form, [3, 41, 0, 8, 19, *[5] * 90], hidden)
    whole = outputs(run(form, Given(x, weights, state)))
    for row in (0, 1, 2, 4, 60):
        mine = mapped(state, itemgetter(slice(row, row + 1)))
        alone = outputs(run(form, Given(joined([inputs.rows(x)[row]]), weights, mine)))
        assert all(torch.equal(alone[name][0], whole[name][row]) for name in alone.keys() - {"steps"})
    cuts = [1, 7, 0, 4, 2, *[2] * 90]
    pieces = [(data[:cut], data[cut : 2 * cut], data[2 * cut :]) for data, cut in zip(inputs.rows(x), cuts, strict=True)]
    steps: list[list[Tensor]] = [[] for _ in pieces]
    for chunk in map(joined, zip(*pieces, strict=True)):
        encoded = run(form, Given(chunk, weights, state))
        state = encoded.state
        for so_far, part in zip(steps, inputs.steps_by_row(encoded, chunk), strict=True):
            so_far.append(part)
    assert torch.equal(torch.cat([part for row in steps for part in row]), whole["steps"])
    assert all(torch.equal(array, whole[name]) for name, array in arrays(state).items())


@pytest.mark.parametrize("form, make", [*((form, exactly) for form in EXACT), (QRNN, made)])
def test_poison_in_other_rows_does_not_reach_a_row(form: Form, make: Callable[..., Given]) -> None:
    x, weights, state = make(form, [4, 2, 0, 7, 7, 1, 3, 5, 6], 96)
    clean = outputs(run(form, Given(x, weights, state)))
    poisoned = mapped(state, torch.clone)
    poisoned.cell[1], poisoned.cell[3] = torch.inf, torch.nan
    data = x.data.clone()
    if not form.takes_ids:
        data[4:6], data[-3:] = torch.nan, torch.nan
    encoded = outputs(run(form, Given(Ragged(data, x.offsets), weights, poisoned)))
    for row in (0, 2, 4, 5, 6, 7):
        assert all(torch.equal(encoded[name][row], clean[name][row]) for name in clean.keys() - {"steps"})
    assert encoded["cell"][[3] if form.takes_ids else [3, 8]].isnan().all()


@every_exact_form
@pytest.mark.parametrize("wanted", [(), ("steps",), ("last",), ("mean",), ("max",), ("steps", "max")], ids=str)
def test_what_is_not_wanted_is_none_and_changes_nothing(form: Form, wanted: tuple[str, ...]) -> None:
    given = exactly(form, RAGGED, 48)
    encoded = run(form, given, Outputs(**dict.fromkeys(wanted, True)))
    assert {name for name in OUTPUTS if getattr(encoded, name) is not None} == set(wanted)
    same(encoded, run(form, given))


@with_and_without_rings
@every_index
def test_a_state_in_slots_is_read_and_written_in_place(form: Form, ring: int, index: torch.dtype) -> None:
    x, weights, state = made(form, LONG[2], 72)
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(1))[: x.rows].to("cuda", index)
    slabs = in_slots(state, slots, places=40)
    with in_shape(Shape(32, ring)):
        expected = run(form, Given(x, weights, state), WITHOUT_POOLS)
        encoded = run(form, Given(x, weights, slabs), WITHOUT_POOLS)
    assert encoded.state is slabs
    same_state(slabs.by_row(), expected.state)
    assert encoded.last is not None and expected.last is not None
    assert torch.equal(encoded.last, expected.last)
    others = torch.ones(40, dtype=torch.bool, device="cuda").index_fill(0, slots.long(), False)
    assert all(bool((slab[others] == 9).all()) for name, slab in arrays(slabs).items() if name != "slots")


def same_state(actual: Any, expected: Any) -> None:
    """A slab may hold what it has in a wider dtype."""
    for name, array in arrays(expected).items():
        assert torch.equal(getattr(actual, name).to(array.dtype), array), name


@pytest.mark.parametrize("form", [SRU_1, SRU_2, QRNN, SRU_OF_IDS, QRNN_OF_IDS], ids=str)
def test_a_graph_runs_with_other_lengths_slots_and_values(form: Form) -> None:
    first, second = made(form, [5, 9, 0, 30], 160), made(form, [20, 1, 7, 6], 160, seed=1)
    x = Ragged(torch.zeros_like(first.x.data), first.x.offsets.clone())
    slots = torch.tensor([3, 1, 0, 2], dtype=torch.int32, device="cuda")
    slabs, weights = in_slots(first.state, slots, places=4), first.weights
    run(form, Given(x, weights, slabs))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        encoded = outputs(run(form, Given(x, weights, slabs)))
    for given, order in ((first, [0, 1, 2, 3]), (second, [2, 0, 3, 1])):
        tokens = len(given.x.data)
        x.data[:tokens], slots[:] = given.x.data, torch.tensor(order, dtype=torch.int32)
        x.offsets.copy_(given.x.offsets)
        for name, array in arrays(given.state).items():
            getattr(slabs, name)[order] = array
        graph.replay()
        expected = run(form, Given(given.x, weights, given.state))
        assert expected.steps is not None
        assert torch.equal(encoded["steps"][:tokens], expected.steps)
        assert all(torch.equal(encoded[name], getattr(expected, name)) for name in ("last", "mean", "max"))
        same_state(slabs.by_row(), expected.state)


@with_and_without_rings
@every_index
def test_rows_begin_in_one_place_go_on_from_slot_to_slot_and_end_in_one(form: Form, ring: int, index: torch.dtype) -> None:
    x, weights, state = exactly(form, [*LONG[2], 41, *[5] * 40], 72)
    slabs = begun_in_zeros(state)

    def go_on(chunk: Ragged, state: Any) -> Encoded:
        return run(form, Given(chunk, weights, state), WITHOUT_POOLS)

    with in_shape(Shape(32, ring)):
        whole = go_on(x, None)
        steps, after = from_place_to_place(go_on, in_chunks(x, chunks=4), slabs, index)
    assert whole.steps is not None
    assert torch.equal(steps, whole.steps)
    same_state(after, whole.state)
    assert_only_slots_were_written(slabs)


@with_and_without_rings
@every_index
@pytest.mark.parametrize("lengths", [RAGGED, LONG[2], [9, 0, 0, 0], [500, 0, 0, 0]], ids=str)
def test_rows_with_and_without_steps_go_on_from_their_sources_and_are_written_to_their_slots(
    form: Form, ring: int, index: torch.dtype, lengths: list[int]
) -> None:
    x, weights, state = made(form, lengths, 72)
    slabs = from_shared_places(state, index)
    with in_shape(Shape(32, ring)):
        expected = run(form, Given(x, weights, slabs.by_row()), WITHOUT_POOLS)
        encoded = run(form, Given(x, weights, slabs), WITHOUT_POOLS)
    assert encoded.steps is not None and expected.steps is not None
    assert encoded.last is not None and expected.last is not None
    assert torch.equal(encoded.steps, expected.steps) and torch.equal(encoded.last, expected.last)
    assert_went_on_from_shared_places(encoded.state, state, expected.state)


@pytest.mark.parametrize("form", [SRU_1, SRU_2, QRNN, SRU_OF_IDS, QRNN_OF_IDS], ids=str)
@every_index
def test_a_graph_goes_on_from_other_places_than_those_that_it_was_made_with(form: Form, index: torch.dtype) -> None:
    """Where all rows begin in one place at first, then where they end in one."""
    first, second = made(form, [5, 9, 0, 30], 160), made(form, [20, 0, 18, 6], 160, seed=1)
    x, weights = Ragged(first.x.data.clone(), first.x.offsets.clone()), first.weights
    slots, sources = torch.tensor([[3, 4, 5, 6], [ZERO] * 4], dtype=index, device="cuda")
    begun = begun_in_zeros(first.state)
    slabs = replace(begun, slots=slots, sources=sources)
    run(form, Given(x, weights, slabs))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        encoded = outputs(run(form, Given(x, weights, slabs)))
    middle = [5, 3, 2, 7]
    state = mapped(first.state, torch.zeros_like)
    for given, origins, ends in ((first, [ZERO] * 4, middle), (second, middle, [SCRAP] * 4)):
        x.data.copy_(given.x.data)
        x.offsets.copy_(given.x.offsets)
        slots.copy_(torch.tensor(ends))
        sources.copy_(torch.tensor(origins))
        graph.replay()
        expected = run(form, Given(given.x, weights, state))
        assert all(torch.equal(encoded[name], getattr(expected, name)) for name in OUTPUTS)
        state = expected.state if ends == middle else state
        same_state(mapped(begun, itemgetter(middle)), state)
        assert_only_slots_were_written(begun)


@every_exact_form
def test_launches_that_begin_early_wait_for_those_before(form: Form) -> None:
    """Each goes on from what the one before writes at its end, in a graph with a fork as well."""
    x, weights, state = exactly(form, [1280], 200)
    whole = run(form, Given(x, weights, state), LAST).state
    chunks = [joined([part]) for part in torch.split(x.data, 32)]

    def go_on(state: Any, chunks: Sequence[Ragged]) -> Any:
        for chunk in chunks:
            state = run(form, Given(chunk, weights, state), LAST).state
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


def both_ways(form: Form, make: Callable[..., Given], lengths: Sequence[int]) -> Given:
    """The same rows, and for each direction the weights and the state."""
    forward, backward = (make(form, lengths, 72, seed=seed) for seed in (0, 1))
    return Given(forward.x, (forward.weights, backward.weights), (forward.state, backward.state))


def run_both(form: Form, given: Given, want: Outputs = EVERYTHING) -> Encoded:
    return form.both(*given, want=want, backend="fused")


def run_each(form: Form, given: Given, want: Outputs = EVERYTHING) -> Encoded:
    """One direction after the other."""
    return composed(partial(form.run, backend="fused"))(*given, want=want)


@every_exact_form
def test_both_directions_in_one_launch_are_two_launches_to_the_bit(form: Form) -> None:
    x, weights, states = both_ways(form, exactly, [*RAGGED, 130])
    for before in (states, None):
        same(run_both(form, Given(x, weights, before)), run_each(form, Given(x, weights, before)))


@every_layer
def test_both_directions_from_the_inputs_are_two_launches(form: Form) -> None:
    given = both_ways(form, made, [*RAGGED, 130])
    agree(run_both(form, given), run_each(form, given), TOLERANCE[torch.float16])


def test_each_direction_skips_from_columns_of_its_own() -> None:
    x, (forward, backward), states = both_ways(SRU_COLUMNS, made, RAGGED)
    given = Given(x, (replace(forward, skip_from=0), replace(backward, skip_from=17)), states)
    agree(run_both(SRU_COLUMNS, given), run_each(SRU_COLUMNS, given), TOLERANCE[torch.float16])


@pytest.mark.parametrize("form", [SRU_1, QRNN, QRNN_OF_IDS], ids=str)
def test_both_directions_in_a_ring_each_are_those_without(form: Form) -> None:
    for lengths in LONG:
        given = both_ways(form, exactly, lengths)
        with in_shape(Shape(32)):
            expected = run_each(form, given, WITHOUT_POOLS)
        with in_shape(Shape(32, ring=2)):
            same(run_both(form, given, WITHOUT_POOLS), expected)


@every_exact_form
def test_both_directions_go_on_chunk_by_chunk(form: Form) -> None:
    x, weights, (forward, backward) = both_ways(form, exactly, [41, 0, 8, 1, *[5] * 30])
    whole = run_both(form, Given(x, weights, (forward, backward)))
    pieces = [(row[: len(row) // 3], row[len(row) // 3 :]) for row in inputs.rows(x)]
    early, late = map(joined, zip(*pieces, strict=True))
    # The backward direction begins with the late chunk, and the forward one goes on with it when it has had the early one.
    begun = run_both(form, Given(late, weights, (forward, backward)))
    first = run_both(form, Given(early, weights, (forward, begun.state[1])))
    second = run_both(form, Given(late, weights, (first.state[0], backward)))
    parts = zip(inputs.steps_by_row(first, early), inputs.steps_by_row(second, late), strict=True)
    assert whole.steps is not None
    assert torch.equal(torch.cat([part for row in parts for part in row]), whole.steps)
    for after, expected in zip((second.state[0], first.state[1]), whole.state, strict=True):
        assert all(torch.equal(array, getattr(expected, name)) for name, array in arrays(after).items())


@every_exact_form
def test_both_directions_go_on_in_slots_of_their_own(form: Form) -> None:
    x, weights, states = both_ways(form, exactly, [4, 0, 2])
    expected = run_both(form, Given(x, weights, states))
    places = torch.tensor([3, 0, 4], device="cuda"), torch.tensor([5, 1, 2], device="cuda")
    slabs = in_slots(states[0], places[0], places=6), in_slots(states[1], places[1], places=6)
    encoded = run_both(form, Given(x, weights, slabs))
    assert all(after is slab for after, slab in zip(encoded.state, slabs, strict=True))
    assert all(torch.equal(getattr(encoded, name), getattr(expected, name)) for name in OUTPUTS)
    for slab, state in zip(slabs, expected.state, strict=True):
        same_state(slab.by_row(), state)


@every_exact_form
def test_both_directions_go_on_from_their_sources(form: Form) -> None:
    x, weights, states = both_ways(form, exactly, [4, 0, 2, 3, 0, 0])
    slabs = from_shared_places(states[0]), from_shared_places(states[1], torch.int64)
    expected = run_both(form, Given(x, weights, (slabs[0].by_row(), slabs[1].by_row())))
    encoded = run_both(form, Given(x, weights, slabs))
    assert all(torch.equal(getattr(encoded, name), getattr(expected, name)) for name in OUTPUTS)
    for after, state, one in zip(encoded.state, states, expected.state, strict=True):
        assert_went_on_from_shared_places(after, state, one)


@pytest.mark.parametrize("family", ["sru", "qrnn"])
def test_what_runs_and_why(family: str) -> None:
    for dtype, hidden in product(["float16", "bfloat16", "float32"], [1, 512, 5000]):
        assert explain(family, device="cuda:0", dtype=dtype, hidden=hidden) == "fused: chosen"
    for device, why in (("cuda:9", "there is no cuda:9 here"), ("cpu", "runs on an NVIDIA GPU")):
        assert explain(family, device=device, dtype="float16", hidden=96) == f"fused: {why}\nframework: chosen"


@pytest.mark.parametrize("family", ["sru", "qrnn"])
def test_without_cupy_or_on_another_gpu_the_framework_runs(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = partial(explain, family, device="cuda:0", dtype="float16", hidden=96)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    assert asked() == "fused: needs compute capability 9.0, this device has 8.6\nframework: chosen"
    monkeypatch.setattr(launching, "installed", lambda: False)
    assert asked() == "fused: CuPy is not installed\nframework: chosen"


@every_exact_form
def test_the_choice_is_what_runs(form: Form) -> None:
    given = exactly(form, [3, 4], 192)
    assert form.module.choice(given.weights).backend.name == "fused"
    same(form.run(*given), run(form, given))


@pytest.mark.parametrize("tool", TOOLS)
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    finds_nothing(tool, "tests.gpu.small_scan")
