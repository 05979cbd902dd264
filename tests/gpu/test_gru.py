"""Tests of the CUDA kernels of the GRU, and of the LSTM with peepholes, against the float64 reference.

test_lstm.py has the tests that do not depend on the cell.
"""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch

from kernels.backend import explain
from kernels.gru.types import GRUState
from kernels.ragged import Ragged
from tests.gpu.inputs import (
    TOLERANCE,
    agree,
    assert_any_rows_match,
    assert_graph_serves_other_values,
    assert_nan_stays_in_its_row,
    assert_rows_are_independent,
    assert_rows_move_between_slots,
    gates,
    made,
    same,
    stored,
)
from tests.gpu.sanitizer import TOOLS, assert_no_findings
from tests.kernels.families import Form
from tests.kernels.inputs import (
    Arguments,
)

pytestmark = pytest.mark.usefixtures("poisoned")

GRU, PEEPHOLES = Form("gru", reset="after"), Form("lstm", peepholes=True)
RAGGED = [9, 0, 3, 17, 1, 5, 12, 12, 2, 30, 0]
CLUSTER = [1, 33, 64, 100, 128, 151, 256, 512, 768]
GRID = [1, 33, 100, 257, 512, 600, 801, 1024, 2048]
SIZES = [*product(["cluster"], CLUSTER), *product(["grid"], GRID)]

every_form = pytest.mark.parametrize("form", [GRU, PEEPHOLES], ids=str)
both_kernels = pytest.mark.parametrize("backend", ["cluster", "grid"])
all_backends = pytest.mark.parametrize("backend", ["persistent", "cluster", "grid"])


@every_form
@pytest.mark.parametrize("backend, hidden", SIZES)
@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16], ids=str)
def test_outputs_and_state_match_the_reference(form: Form, backend: str, hidden: int, storage: torch.dtype) -> None:
    problem = made(form, RAGGED, hidden, storage=storage)
    agree(form.run(*problem, backend=backend), form.exact(problem), TOLERANCE[storage])


@both_kernels
@pytest.mark.parametrize("hidden", [51, 200])
@pytest.mark.parametrize("data", [torch.float16, torch.float32, torch.bfloat16], ids=str)
def test_gate_inputs_may_have_any_dtype(backend: str, hidden: int, data: torch.dtype) -> None:
    problem = stored(gates(GRU, RAGGED, hidden), data)
    agree(GRU.run(*problem, backend=backend), GRU.exact(problem), TOLERANCE[torch.float16])


@both_kernels
def test_gate_inputs_may_begin_at_any_address(backend: str) -> None:
    x, weights, state = gates(GRU, RAGGED, 51)
    shifted = torch.cat([x.data.new_zeros(1), x.data.flatten()])[1:].view_as(x.data)
    assert shifted.data_ptr() % 4
    same(GRU.run(Ragged(shifted, x.offsets), weights, state, backend=backend), GRU.run(x, weights, state, backend=backend))


@every_form
@all_backends
@pytest.mark.parametrize("rows", [1, 7, 9, 64, 65, 256, 700, 4096])
def test_any_number_of_rows(form: Form, backend: str, rows: int) -> None:
    chance = random.Random(rows)
    problem = made(form, [chance.randint(0, 4) for _ in range(rows)], 72)
    assert_any_rows_match(form, backend, problem, TOLERANCE[torch.float16])


@every_form
@pytest.mark.parametrize("hidden", [600, 1024, 2048])
def test_many_rows_of_a_large_layer(form: Form, hidden: int) -> None:
    chance = random.Random(hidden)
    problem = gates(form, [chance.randint(0, 9) for _ in range(150)], hidden)
    encoded = form.run(*problem, backend="grid")
    agree(encoded, form.exact(problem), TOLERANCE[torch.float16])
    same(form.run(*problem, backend="persistent"), encoded)


@every_form
@pytest.mark.parametrize("hidden", [1, 64, 130, 256, 401, 512])
def test_both_kernels_give_the_same_bits_for_small_layers(form: Form, hidden: int) -> None:
    problem = gates(form, [7, 0, 3, 20, 1, 8, 8, 2, 5, *[4] * 40], hidden)
    same(form.run(*problem, backend="grid"), form.run(*problem, backend="cluster"))


@both_kernels
@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16], ids=str)
def test_gru_starts_from_large_states(backend: str, storage: torch.dtype) -> None:
    """A hidden value stays as large as its initial value while the update gate keeps it."""
    x, weights, state = made(GRU, [3, 12, 0, 25, 7], 130, storage=storage)
    large = GRUState(state.hidden * 30)
    assert 16 < large.hidden.abs().max() < 32
    problem = Arguments(x, weights, large)
    agree(GRU.run(*problem, backend=backend), GRU.exact(problem), 8 * TOLERANCE[storage])


@every_form
@all_backends
@pytest.mark.parametrize("hidden", [40, 131, 520])
def test_row_is_bit_equal_alone_in_a_batch_and_in_chunks(form: Form, backend: str, hidden: int) -> None:
    assert_rows_are_independent(form, backend, gates(form, [3, 41, 0, 8, 19, *[5] * 90], hidden))


@every_form
@both_kernels
@pytest.mark.parametrize("lengths", [RAGGED, [0, 0, 0, 0], [*RAGGED * 30, 0, 0]], ids=["few", "empty", "many"])
def test_rows_start_from_sources_and_write_to_slots(form: Form, backend: str, lengths: list[int]) -> None:
    assert_rows_move_between_slots(form, backend, gates(form, lengths, 112))


@every_form
@both_kernels
def test_cuda_graph_serves_other_lengths_slots_and_values(form: Form, backend: str) -> None:
    assert_graph_serves_other_values(form, backend, hidden=161)


@every_form
@both_kernels
def test_nan_in_other_rows_does_not_reach_a_row(form: Form, backend: str) -> None:
    assert_nan_stays_in_its_row(form, backend, hidden=97)


def test_explain_names_the_kernel_and_the_reasons() -> None:
    assert (
        explain("gru", device="cuda:0", dtype="float16", hidden=512)
        .splitlines()[1]
        .startswith("persistent: chosen (clusters of")
    )
    beyond = explain("gru", device="cuda:0", dtype="float16", hidden=5000).splitlines()
    assert (
        beyond[1] == "persistent: this device has no room for 5000 hidden units, at most for 2112"
        and beyond[-1] == "framework: chosen"
    )


@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer_reports_no_errors(tool: str) -> None:
    assert_no_findings(tool, "tests.gpu.small_gru")
