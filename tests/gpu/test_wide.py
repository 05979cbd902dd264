"""Tests of the wide kernel of the LSTM and the GRU, and of the choice of a backend by the number of rows."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest
import torch

from kernels.backend import PINNED, explain
from kernels.persistent import launch
from kernels.ragged import Encoded, Ragged
from tests.gpu.inputs import (
    TOLERANCE,
    agree,
    assert_any_rows_match,
    assert_graph_serves_other_values,
    assert_nan_stays_in_its_row,
    assert_rows_are_independent,
    assert_rows_move_between_slots,
    close,
    gates,
    made,
    outputs,
    same,
    stored,
)
from tests.kernels.families import Form
from tests.kernels.inputs import (
    Arguments,
    arrays,
)
from tests.kernels.shapes import fresh_shape_caches

pytestmark = pytest.mark.usefixtures("poisoned")

LSTM, GRU, PEEPHOLES = Form("lstm"), Form("gru", reset="after"), Form("lstm", peepholes=True)
RAGGED = [9, 0, 3, 17, 1, 5, 12, 12, 2, 30, 0]
every_form = pytest.mark.parametrize("form", [LSTM, GRU, PEEPHOLES], ids=str)


def in_tiles(form: Form, problem: Arguments, tile: int) -> Encoded:
    """Run the wide kernel in tiles of this many rows."""
    with patch.object(launch, "_tuned_shapes", lambda _: [{"tile": tile}]), fresh_shape_caches():
        return form.run(*problem, backend="wide")


@every_form
@pytest.mark.parametrize("hidden", [64, 192, 512, 768, 1024, 1536, 2048])
@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16], ids=str)
def test_outputs_and_state_match_the_reference(form: Form, hidden: int, storage: torch.dtype) -> None:
    problem = made(form, RAGGED, hidden, storage=storage)
    agree(form.run(*problem, backend="wide"), form.exact(problem), TOLERANCE[storage])


@every_form
@pytest.mark.parametrize("tile", [32, 64, 128])
@pytest.mark.parametrize("rows", [1, 31, 65, 256, 700, 2000])
def test_any_number_of_rows(form: Form, tile: int, rows: int) -> None:
    chance = random.Random(rows)
    problem = made(form, [chance.randint(0, 4) for _ in range(rows)], 128)
    with patch.object(launch, "_tuned_shapes", lambda _: [{"tile": tile}]), fresh_shape_caches():
        assert_any_rows_match(form, "wide", problem, TOLERANCE[torch.float16])


@every_form
@pytest.mark.parametrize("hidden", [128, 1024, 2048])
def test_tiles_of_any_size_give_the_same_bits(form: Form, hidden: int) -> None:
    chance = random.Random(hidden)
    problem = gates(form, [chance.randint(0, 9) for _ in range(150)], hidden)
    first, *others = (in_tiles(form, problem, tile) for tile in (32, 64, 128))
    for other in others:
        same(other, first)


@every_form
@pytest.mark.parametrize("hidden", [128, 1024])
def test_row_is_bit_equal_alone_in_a_batch_and_in_chunks(form: Form, hidden: int) -> None:
    assert_rows_are_independent(form, "wide", gates(form, [3, 41, 0, 8, 19, *[5] * 90], hidden))


@pytest.mark.parametrize("data", [torch.float16, torch.float32, torch.bfloat16], ids=str)
def test_gate_inputs_may_have_any_dtype_and_address(data: torch.dtype) -> None:
    x, weights, state = problem = stored(gates(GRU, RAGGED, 192), data)
    encoded = GRU.run(*problem, backend="wide")
    agree(encoded, GRU.exact(problem), TOLERANCE[torch.float16])
    shifted = torch.cat([x.data.new_zeros(1), x.data.flatten()])[1:].view_as(x.data)
    same(GRU.run(Ragged(shifted, x.offsets), weights, state, backend="wide"), encoded)


@every_form
@pytest.mark.parametrize("lengths", [RAGGED, [0, 0, 0, 0], [*RAGGED * 30, 0, 0]], ids=["few", "empty", "many"])
def test_rows_start_from_sources_and_write_to_slots(form: Form, lengths: list[int]) -> None:
    assert_rows_move_between_slots(form, "wide", gates(form, lengths, 128))


@every_form
def test_cuda_graph_serves_other_lengths_slots_and_values(form: Form) -> None:
    assert_graph_serves_other_values(form, "wide", hidden=192)


@every_form
def test_nan_in_other_rows_does_not_reach_a_row(form: Form) -> None:
    assert_nan_stays_in_its_row(form, "wide", hidden=128)


@every_form
def test_adaptive_backend_runs_many_rows_by_the_wide_kernel(form: Form) -> None:
    few, many = (gates(form, [5] * rows, 1024) for rows in (64, 65))
    same(form.run(*few), form.run(*few, backend="persistent"))
    same(form.run(*many), form.run(*many, backend="wide"))
    same(form.run(*many, backend=PINNED), form.run(*many, backend="persistent"))
    for name, array in outputs(form.run(*many)).items():
        close(array, outputs(form.run(*many, backend=PINNED))[name], TOLERANCE[torch.float16], name)


@every_form
def test_state_moves_between_backends_at_chunk_borders(form: Form) -> None:
    x, weights, state = problem = gates(form, [12] * 70, 768)
    steps = x.data.view(70, 12, -1)
    for begin, backend in ((0, "wide"), (5, "grid"), (9, "adaptive")):
        chunk = steps[:, begin : {0: 5, 5: 9, 9: 12}[begin]]
        offsets = torch.arange(71, dtype=torch.int32, device="cuda") * chunk.shape[1]
        state = form.run(Ragged(chunk.reshape(-1, steps.shape[2]), offsets), weights, state, backend=backend).state
    expected = form.exact(problem).state
    for name, array in arrays(state).items():
        close(array, getattr(expected, name), TOLERANCE[torch.float16], name)


def test_explain_names_the_rows_of_each_kernel() -> None:
    chosen = explain("lstm", device="cuda:0", dtype="float16", hidden=1024)
    assert chosen.startswith("adaptive: chosen (the grid with 8 units per block up to 8 rows")
    assert "wide tiles of 64 rows" in chosen
    small = explain("gru", device="cuda:0", dtype="float16", hidden=512).splitlines()
    assert small[0] == "adaptive: no other kernel runs many rows of 512 hidden units faster"


def test_all_blocks_of_the_largest_launch_are_resident() -> None:
    """The driver refuses a cooperative launch whose blocks are not resident at once."""
    for hidden in (64, 512, 1024, 2048):
        problem = gates(LSTM, [2] * 600, hidden)
        for tile in (32, 64, 128):
            in_tiles(LSTM, problem, tile)
