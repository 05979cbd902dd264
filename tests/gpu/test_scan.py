"""Tests of the kernels of the SRU and the QRNN against the float64 reference: sizes, addresses, and rows that are divided into parts.

Streams of whole rows divide them in the same way as tiles: all launch shapes give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from typing import Any

import pytest
import torch

from kernels.directions import compose_directions
from kernels.ragged import Encoded, Outputs, Ragged
from kernels.scan.shape import PART, ScanShape, TileShape
from tests.gpu.cases import QRNN, QRNN_OF_IDS, SCANS, SRU_1, SRU_2, SRU_OF_IDS
from tests.gpu.comparisons import agree, assert_any_rows_match, outputs, same, same_state
from tests.gpu.inputs import (
    FLOAT32,
    HALF,
    LAST,
    RAGGED,
    TOLERANCE,
    Shape,
    begun_later,
    captured,
    exactly,
    gates,
    in_shape,
    joined,
    made,
    random_lengths,
)
from tests.kernels.families import Form
from tests.kernels.inputs import EVERYTHING, Arguments

pytestmark = pytest.mark.usefixtures("poisoned")

SRU_COLUMNS = Form("sru", version=1, skip="columns")
LAYERS = [SRU_1, SRU_2, QRNN]
LINEAR = [
    SRU_1,
    SRU_COLUMNS,
    Form("sru", version=1, tanh=True),
    QRNN,
    Form("qrnn", pooling="fo", window=3),
    Form("qrnn", pooling="ifo", window=2),
    Form("qrnn", pooling="f", window=1),
]
"""Layers whose rows can be divided: no gate depends on the cell."""
GATHERED = [SRU_OF_IDS, Form("sru", version=1, skip="block", ids=True), Form("qrnn", pooling="ifo", window=1, ids=True)]
LONG = [[4096], [1500, 0, 3, 2049, 64, 700], [63, 1, 65, 128, 0, 127]]
STREAMS = ScanShape(32)
IN_TILES = [TileShape(8, 1), TileShape(16, 2), TileShape(32, 2), TileShape(32, 1)]
DIVIDED = [TileShape(16, 2, split=True), TileShape(32, 2, split=True)]
IN_STREAMS = [ScanShape(32, split=True), ScanShape(64, split=True)]

every_layer = pytest.mark.parametrize("form", LAYERS, ids=str)
every_linear_layer = pytest.mark.parametrize("form", LINEAR, ids=str)


def run(form: Form, arguments: Arguments, want: Outputs = EVERYTHING, shape: Shape = None) -> Encoded:
    with in_shape(shape):
        return form.run(*arguments, want=want, backend="fused")


def pair_of(form: Form, lengths: Sequence[int], make: Any = made) -> Arguments:
    """Return rows, and the weights and states of both directions."""
    (x, *forward), (_, *backward) = (make(form, lengths, 72, seed=seed) for seed in (0, 1))
    return Arguments(x, *zip(forward, backward, strict=True))


def run_both(form: Form, arguments: Arguments, want: Outputs = EVERYTHING, shape: Shape = None) -> Encoded:
    with in_shape(shape):
        return form.bidirectional(*arguments, want=want, backend="fused")


def run_each(form: Form, arguments: Arguments, want: Outputs = EVERYTHING, shape: Shape = None) -> Encoded:
    """Run one direction after the other."""
    with in_shape(shape):
        return compose_directions(partial(form.run, backend="fused"))(*arguments, want=want)


def dividing(form: Form, lengths: Sequence[int]) -> list[ScanShape | TileShape]:
    """Return all shapes that divide these rows. Only a single row is divided between streams."""
    weights = form.arguments([1], 8, 8).weights
    blocks = weights.input.shape[-1] // weights.hidden
    return [*DIVIDED, *(shape for shape in IN_STREAMS if len(lengths) == 1 and shape.units * blocks <= 192)]


@every_layer
@pytest.mark.parametrize(
    "hidden, storage", [*product([33, 200], TOLERANCE), *zip([1, 64, 256, 300], cycle(TOLERANCE))], ids=str
)
def test_outputs_and_state_match_the_reference(form: Form, hidden: int, storage: torch.dtype) -> None:
    arguments = made(form, RAGGED, hidden, storage=storage)
    agree(run(form, arguments), form.exact(arguments), TOLERANCE[storage])


@pytest.mark.parametrize("form", [SRU_2, SRU_COLUMNS, QRNN], ids=str)
@pytest.mark.parametrize(
    "lengths, hidden, width", [(RAGGED, 41, 5), (RAGGED, 41, 130), (RAGGED, 41, 1100), ([700, 0, 500], 280, 24)], ids=str
)
def test_any_number_of_inputs(form: Form, lengths: list[int], hidden: int, width: int) -> None:
    """A library product may precede the recurrence of a few long rows of a wide layer."""
    arguments = made(form, lengths, hidden, width)
    agree(run(form, arguments), form.exact(arguments), TOLERANCE[HALF])


@pytest.mark.parametrize("pooling, units", [*product(["f", "fo"], [32, 64]), ("ifo", 32)])
def test_blocks_may_have_any_number_of_units(pooling: str, units: int) -> None:
    form = Form("qrnn", pooling=pooling, window=1)
    arguments = made(form, [*RAGGED, 130, *[7] * 60], 100)
    agree(run(form, arguments, shape=ScanShape(units)), form.exact(arguments), TOLERANCE[HALF])


@pytest.mark.parametrize(
    "form, shape", [*product(LAYERS, [ScanShape(64)]), *product([SRU_1, QRNN], [ScanShape(32, busy=True)])], ids=str
)
def test_launch_shape_does_not_change_a_bit(form: Form, shape: ScanShape) -> None:
    arguments = gates(form, [*RAGGED, 130, *[7] * 60], 104)
    same(run(form, arguments, shape=shape), run(form, arguments, shape=STREAMS))


@pytest.mark.parametrize("places", [1, 4])
def test_inputs_and_tables_may_begin_at_any_address(places: int) -> None:
    for form in LAYERS:
        x, weights, state = made(form, RAGGED, 64)
        shifted = Ragged(begun_later(x.data, places), x.offsets)
        same(run(form, Arguments(shifted, weights, state)), run(form, Arguments(x, weights, state)))
    x, weights, state = made(QRNN_OF_IDS, RAGGED, 64)
    later = replace(weights, tables=begun_later(weights.tables, places))
    same(run(QRNN_OF_IDS, Arguments(x, later, state)), run(QRNN_OF_IDS, Arguments(x, weights, state)))


@every_layer
@pytest.mark.parametrize("lengths", [[1], [64, 64], [63, 2, 63], [200, 0, 1, 130, 5], [*RAGGED, 130]], ids=str)
def test_tiles_may_end_at_any_step(form: Form, lengths: list[int]) -> None:
    """Boxes of inputs reach beyond the rows of a block, and beyond the first and the last row of the batch."""
    alone, both = made(form, lengths, 72), pair_of(form, lengths)
    agree(run(form, alone), form.exact(alone), TOLERANCE[HALF])
    agree(run_both(form, both), run_each(form, both), TOLERANCE[HALF])


@pytest.mark.parametrize("form", [*LAYERS, QRNN_OF_IDS], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 256, 700, 4096])
def test_any_number_of_rows(form: Form, rows: int) -> None:
    arguments = made(form, random_lengths(rows, 4), 72)
    assert_any_rows_match(partial(form.run, backend="fused"), form, arguments, TOLERANCE[HALF])


# Divided rows.


@pytest.mark.parametrize("form", [SRU_1, SRU_COLUMNS, QRNN, Form("qrnn", pooling="f", window=1)], ids=str)
@pytest.mark.parametrize(
    "lengths, added", [([4096], 0.0), ([4096], 6.0), ([700, 0, 1500], 6.0), ([700, 0, 1500], -6.0)], ids=str
)
def test_divided_rows_match_the_reference(form: Form, lengths: list[int], added: float) -> None:
    """With open forget gates, an error made in one step stays in the cell for many steps."""
    x, weights, state = made(form, lengths, 72)
    bias, begin = weights.bias.clone(), 0 if form.family == "sru" else 72  # an SRU's candidate has no bias
    bias[begin : begin + 72] += added
    arguments = Arguments(x, replace(weights, bias=bias), state)
    expected = form.exact(arguments)
    for shape in (STREAMS, *dividing(form, lengths)):
        agree(run(form, arguments, LAST, shape), expected, TOLERANCE[HALF])


@every_linear_layer
@pytest.mark.parametrize("width", [24, 700])
def test_tiles_give_the_same_bits_as_streams(form: Form, width: int) -> None:
    """Also in streams of parts of a single row."""
    for lengths in (RAGGED, *LONG, [64, 64], [7] * 300, [1], [PART], [PART + 1], [1000]):
        arguments = made(form, lengths, 72, width)
        expected = run(form, arguments, LAST, STREAMS)
        for shape in (*IN_TILES, *dividing(form, lengths)):
            same(run(form, arguments, LAST, shape), expected)


@pytest.mark.parametrize("form", [SRU_1, QRNN, *GATHERED], ids=str)
@pytest.mark.parametrize("large", [False, True])
def test_gates_in_tiles_give_the_same_bits_as_in_streams(form: Form, large: bool) -> None:
    """Also with gate inputs near the float16 limit in every block."""
    for lengths in (RAGGED, *LONG):
        arguments = exactly(form, lengths, 72)
        if large and not form.takes_ids:
            drawn = torch.rand(arguments.x.data.shape, generator=torch.Generator().manual_seed(7)).cuda()
            arguments.x.data[drawn < 0.01], arguments.x.data[drawn > 0.99] = 60000.0, -60000.0
        expected = run(form, arguments, LAST, STREAMS)
        assert all(bool(array.isfinite().all()) for array in outputs(expected).values())
        for shape in (TileShape(32, 2), TileShape(32, 2, split=True)):
            same(run(form, arguments, LAST, shape), expected)


@pytest.mark.parametrize("form", [SRU_1, QRNN], ids=str)
@pytest.mark.parametrize("shape", [STREAMS, TileShape(32, 2), TileShape(32, 2, split=True)], ids=str)
def test_nan_stays_in_its_long_row(form: Form, shape: ScanShape | TileShape) -> None:
    x, weights, state = gates(form, [1500, 700], 72)
    clean = outputs(run(form, Arguments(x, weights, state), LAST, shape))
    x.data[777] = torch.nan
    encoded = outputs(run(form, Arguments(x, weights, state), LAST, shape))
    for name in ("last", "cell"):
        assert encoded[name][0].isnan().all() and torch.equal(encoded[name][1], clean[name][1]), name


@pytest.mark.parametrize("form", [SRU_1, QRNN, SRU_OF_IDS, QRNN_OF_IDS], ids=str)
@pytest.mark.parametrize("steps", [70, 900])
def test_long_row_has_the_same_bits_alone_and_anywhere_in_a_batch(form: Form, steps: int) -> None:
    """Alone it is divided, or computed in tiles, unless its steps are requested too. In a batch it is a part of a stream."""
    x, weights, _ = exactly(form, [steps, 120], 72)
    row, others = x.data[:steps], x.data[steps:]
    alone = run(form, Arguments(joined([row]), weights, None), LAST)
    same(alone, run(form, Arguments(joined([row]), weights, None)))
    for place in (0, 7, 120):
        rows = joined([others[:place], row, *torch.split(others[place:], 2)])
        whole = outputs(run(form, Arguments(rows, weights, None), LAST))
        for name in ("last", "cell"):
            assert torch.equal(outputs(alone)[name][0], whole[name][1]), name


@pytest.mark.parametrize("form", [SRU_1, QRNN, QRNN_OF_IDS], ids=str)
def test_chunks_of_a_long_row_agree_within_rounding(form: Form) -> None:
    """Parts are counted from the beginning of a chunk."""
    x, weights, state = exactly(form, [1000], 72)
    whole = run(form, Arguments(x, weights, state), LAST)
    for chunk in (joined([part]) for part in torch.split(x.data, 300)):
        encoded = run(form, Arguments(chunk, weights, state), LAST)
        state = encoded.state
    agree(encoded, whole, TOLERANCE[FLOAT32])


@pytest.mark.parametrize("form", SCANS, ids=str)
def test_early_launches_wait_for_earlier_kernels(form: Form) -> None:
    """Each launch continues from the last output of the previous launch, also in a graph with a fork."""
    x, weights, state = exactly(form, [PART], 200)
    whole = run(form, Arguments(x, weights, state), LAST).state
    chunks, side = [joined([part]) for part in torch.split(x.data, 8)], torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def go_on(state: Any, chunks: Sequence[Ragged]) -> Encoded:
        for chunk in chunks:
            encoded = run(form, Arguments(chunk, weights, state), LAST)
            state = encoded.state
        return encoded

    def forked() -> Encoded:
        """Run the chunks twice at the same time, except the last, which ends both."""
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            begun = go_on(state, chunks[:-1])
        alone = go_on(state, chunks)
        torch.cuda.current_stream().wait_stream(side)
        return replace(alone, state=(alone.state, go_on(begun.state, chunks[-1:]).state))

    same_state(go_on(state, chunks).state, whole)
    replay, encoded = captured(forked)
    replay()
    for after in encoded.state:
        same_state(after, whole)


# Both directions.


def test_each_direction_skips_from_its_own_columns() -> None:
    x, (forward, backward), states = pair_of(SRU_COLUMNS, RAGGED)
    arguments = Arguments(x, (replace(forward, skip_from=0), replace(backward, skip_from=17)), states)
    agree(run_both(SRU_COLUMNS, arguments), run_each(SRU_COLUMNS, arguments), TOLERANCE[HALF])


@every_linear_layer
def test_bidirectional_divided_rows_give_the_same_bits(form: Form) -> None:
    for lengths in ([1], [100], [1000], [63, 2, 900], *LONG):
        arguments = pair_of(form, lengths)
        expected = run_both(form, arguments, LAST, STREAMS)
        agree(expected, run_each(form, arguments, LAST), TOLERANCE[HALF])
        for shape in (*IN_TILES, *dividing(form, lengths)):
            same(run_both(form, arguments, LAST, shape), expected)


@pytest.mark.parametrize("form", [SRU_1, QRNN, *GATHERED], ids=str)
def test_bidirectional_gates_in_tiles_give_the_same_bits(form: Form) -> None:
    for lengths in LONG:
        arguments = pair_of(form, lengths, exactly)
        same(run_both(form, arguments, LAST, DIVIDED[1]), run_each(form, arguments, LAST, STREAMS))
