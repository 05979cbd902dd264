"""What every backend of the LSTM promises, on odd sizes, against the reference in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels.backend import explain
from kernels.contract import ContractError, Encoded, LSTMState, LSTMWeights, Outputs, Ragged
from kernels.lstm import BACKENDS, choice, lstm, reference
from tests.kernels import inputs
from tests.kernels.inputs import EVERYTHING, OUTPUTS, Given, assert_close, assert_encodes_alike

NAMES = [backend.name for backend in BACKENDS]
HALVES = [torch.float16, torch.bfloat16]
SIZES = [
    ([1], 1, 1),
    ([7, 1, 3], 5, 3),
    ([129, 0, 4, 151], 33, 7),
    ([0, 0], 3, 5),
    ([], 3, 5),
    ([0, 5, 5, 0, 2], 151, 37),
]

every_backend = pytest.mark.parametrize("backend", NAMES)
every_size = pytest.mark.parametrize("lengths, hidden, width", SIZES, ids=str)


def longest(x: Ragged) -> int:
    return max(x.lengths(), default=0)


@every_backend
@every_size
def test_all_outputs_and_the_state_agree_with_the_reference(backend: str, lengths: list[int], hidden: int, width: int) -> None:
    given = inputs.lstm(lengths, hidden, width)
    actual = lstm(*given, want=EVERYTHING, backend=backend)
    assert_encodes_alike(actual, reference.lstm(*inputs.widened(given), want=EVERYTHING), steps=longest(given.x))


@every_backend
@hypothesis.given(
    lengths=st.lists(st.integers(0, 23), max_size=7),
    hidden=st.integers(1, 19),
    width=st.integers(1, 19),
    seed=st.integers(0, 2**31),
)
@hypothesis.settings(max_examples=25, deadline=None)
def test_any_size_agrees_with_the_reference(backend: str, lengths: list[int], hidden: int, width: int, seed: int) -> None:
    given = inputs.lstm(lengths, hidden, width, seed=seed)
    actual = lstm(*given, want=EVERYTHING, backend=backend)
    assert_encodes_alike(actual, reference.lstm(*inputs.widened(given), want=EVERYTHING), steps=longest(given.x))


@every_backend
def test_all_that_comes_out_is_float32(backend: str) -> None:
    encoded = lstm(*inputs.lstm([7, 1, 3], 5, 3), want=EVERYTHING, backend=backend)
    arrays = [encoded.state.hidden, encoded.state.cell, *(getattr(encoded, name) for name in OUTPUTS)]
    assert {array.dtype for array in arrays} == {torch.float32}


@every_backend
def test_without_a_state_every_row_starts_from_zeros(backend: str) -> None:
    x, weights, state = inputs.lstm([7, 0, 3], 5, 3)
    zeros = LSTMState(torch.zeros_like(state.hidden), torch.zeros_like(state.cell))
    actual = lstm(x, weights, want=EVERYTHING, backend=backend)
    assert_encodes_alike(actual, lstm(x, weights, zeros, want=EVERYTHING, backend=backend), steps=0)


@every_backend
def test_a_row_without_steps_keeps_its_state_and_pools_to_zero(backend: str) -> None:
    x, weights, state = inputs.lstm([3, 0, 1, 0], 5, 3)
    encoded = lstm(x, weights, state, want=EVERYTHING, backend=backend)
    assert encoded.last is not None and encoded.mean is not None and encoded.max is not None
    for row in (1, 3):
        assert torch.equal(encoded.state.hidden[row], state.hidden[row])
        assert torch.equal(encoded.state.cell[row], state.cell[row])
        assert torch.equal(encoded.last[row], state.hidden[row])
        assert not encoded.mean[row].any() and not encoded.max[row].any()


@every_backend
def test_int32_and_int64_offsets_mean_the_same(backend: str) -> None:
    x, weights, state = inputs.lstm([7, 1, 3], 5, 3)
    wide = Ragged(x.data, x.offsets.long())
    expected = lstm(x, weights, state, want=EVERYTHING, backend=backend)
    assert_encodes_alike(lstm(wide, weights, state, want=EVERYTHING, backend=backend), expected, steps=0)


@every_backend
@pytest.mark.parametrize("seed", range(5))
def test_chunks_that_carry_the_state_give_the_whole(backend: str, seed: int) -> None:
    x, weights, state = inputs.lstm([31, 1, 0, 17, 8], 13, 7, seed=seed)
    whole = lstm(x, weights, state, want=EVERYTHING, backend=backend)
    written: list[list[Tensor]] = [[] for _ in range(x.rows)]
    for chunk in in_chunks(x, chunks=4, seed=seed):
        encoded = lstm(chunk, weights, state, want=EVERYTHING, backend=backend)
        state = encoded.state
        assert encoded.steps is not None
        for row, steps in enumerate(inputs.rows(Ragged(encoded.steps, chunk.offsets))):
            written[row].append(steps)
    assert whole.steps is not None and whole.last is not None and encoded.last is not None
    assert_close(torch.cat([steps for row in written for steps in row]), whole.steps, steps=longest(x))
    assert_close(encoded.last, whole.last, steps=longest(x))
    assert_close(state.hidden, whole.state.hidden, steps=longest(x))
    assert_close(state.cell, whole.state.cell, steps=longest(x))


def in_chunks(x: Ragged, *, chunks: int, seed: int) -> list[Ragged]:
    """Every row cut at random points, empty pieces included; the k-th chunk has the k-th piece of every row."""
    chance = random.Random(seed)
    pieces = []
    for row in inputs.rows(x):
        cuts = sorted(chance.randint(0, len(row)) for _ in range(chunks - 1))
        pieces.append([row[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(row)], strict=True)])
    return [inputs.ragged(torch.cat(chunk), [len(piece) for piece in chunk]) for chunk in zip(*pieces, strict=True)]


@every_backend
def test_a_row_encodes_the_same_alone_and_in_any_batch(backend: str) -> None:
    x, weights, state = inputs.lstm([9, 0, 31, 1, 9], 33, 7)
    together = lstm(x, weights, state, want=EVERYTHING, backend=backend)
    begin = 0
    for row, data in enumerate(inputs.rows(x)):
        mine = LSTMState(state.hidden[row : row + 1], state.cell[row : row + 1])
        alone = lstm(inputs.ragged(data, [len(data)]), weights, mine, want=EVERYTHING, backend=backend)
        assert_encodes_alike(alone, one_row(together, row, begin, begin + len(data)), steps=len(data))
        begin += len(data)


def one_row(encoded: Encoded, row: int, begin: int, end: int) -> Encoded:
    """What a batch's encoding says of one of its rows, whose tokens are [begin, end)."""
    assert encoded.steps is not None and encoded.last is not None and encoded.mean is not None and encoded.max is not None
    mine = slice(row, row + 1)
    return Encoded(
        LSTMState(encoded.state.hidden[mine], encoded.state.cell[mine]),
        steps=encoded.steps[begin:end],
        last=encoded.last[mine],
        mean=encoded.mean[mine],
        max=encoded.max[mine],
    )


@every_backend
@every_size
def test_gate_inputs_may_be_given_instead_of_inputs(backend: str, lengths: list[int], hidden: int, width: int) -> None:
    given = inputs.lstm(lengths, hidden, width)
    expected = lstm(*given, want=EVERYTHING, backend=backend)
    assert_encodes_alike(lstm(*inputs.gated(given), want=EVERYTHING, backend=backend), expected, steps=longest(given.x))


@pytest.mark.parametrize("storage", HALVES, ids=str)
@every_size
def test_on_a_cpu_half_precision_is_storage_and_arithmetic_is_float32(
    storage: torch.dtype, lengths: list[int], hidden: int, width: int
) -> None:
    given = inputs.lstm(lengths, hidden, width, storage=storage)
    encoded = lstm(*given, want=EVERYTHING)
    assert encoded.steps is not None and encoded.steps.dtype == encoded.state.cell.dtype == torch.float32
    assert_encodes_alike(encoded, reference.lstm(*inputs.widened(given), want=EVERYTHING), steps=longest(given.x))


@every_backend
@pytest.mark.parametrize("wanted", [(), ("steps",), ("last",), ("mean",), ("max",), ("steps", "mean")], ids=str)
def test_what_is_not_wanted_is_none_and_changes_nothing(backend: str, wanted: tuple[str, ...]) -> None:
    given = inputs.lstm([7, 1, 3], 5, 3)
    everything = lstm(*given, want=EVERYTHING, backend=backend)
    expected = Encoded(everything.state, **{name: getattr(everything, name) for name in wanted})
    actual = lstm(*given, want=Outputs(**dict.fromkeys(wanted, True)), backend=backend)
    assert_encodes_alike(actual, expected, steps=0)


@every_backend
@pytest.mark.parametrize("as_gates", [False, True])
def test_no_argument_is_modified(backend: str, as_gates: bool) -> None:
    given = inputs.lstm([7, 1, 3], 5, 3)
    given = inputs.gated(given) if as_gates else given
    before = [array.clone() for array in tensors(given)]
    lstm(*given, want=EVERYTHING, backend=backend)
    assert all(torch.equal(array, copy) for array, copy in zip(tensors(given), before, strict=True))


def tensors(given: Given) -> list[Tensor]:
    x, weights, state = given
    held = (x.data, x.offsets, weights.input, weights.recurrent, weights.bias, state.hidden, state.cell)
    return [array for array in held if array is not None]


@pytest.mark.parametrize("backward", [False, True])
def test_the_reference_is_torch_nn_lstm_in_float64(backward: bool) -> None:
    x, weights, state = inputs.widened(inputs.lstm([9, 1, 14], 5, 3))
    encoded = reference.lstm(x.reversed() if backward else x, weights, state, want=EVERYTHING)
    assert encoded.steps is not None and encoded.last is not None and encoded.mean is not None and encoded.max is not None
    peer = torch_lstm(weights)
    ours = inputs.rows(Ragged(encoded.steps, x.offsets))
    for row, data in enumerate(inputs.rows(x)):
        initial = (state.hidden[row : row + 1], state.cell[row : row + 1])
        steps, (hidden, cell) = peer(data.flip(0) if backward else data, initial)
        for actual, expected in (
            (ours[row], steps),
            (encoded.last[row], hidden[0]),
            (encoded.state.cell[row], cell[0]),
            (encoded.mean[row], steps.mean(0)),
            (encoded.max[row], steps.amax(0)),
        ):
            assert_close(actual, expected, steps=len(data), dtype=torch.float64)


def torch_lstm(weights: LSTMWeights) -> torch.nn.LSTM:
    """torch.nn.LSTM keeps its weights transposed, in the gate order i f g o, and has two biases that are added."""
    assert weights.input is not None and weights.bias is not None
    peer = torch.nn.LSTM(weights.input.shape[0], weights.hidden, dtype=torch.float64).requires_grad_(False)
    peer.load_state_dict(
        {
            "weight_ih_l0": weights.input.T,
            "weight_hh_l0": weights.recurrent.T,
            "bias_ih_l0": weights.bias * 0.25,
            "bias_hh_l0": weights.bias * 0.75,
        }
    )
    return peer


Break = Callable[[Given], Given]


def with_x(**changes: Any) -> Break:
    return lambda given: given._replace(x=replace(given.x, **changes))


def with_weights(**changes: Any) -> Break:
    return lambda given: given._replace(weights=replace(given.weights, **changes))


def with_state(**changes: Any) -> Break:
    return lambda given: given._replace(state=replace(given.state, **changes))


@pytest.mark.parametrize(
    "broken, says",
    [
        (with_x(data=torch.zeros(4, 2)), "x.data has the shape (4, 2), expected (4, 3)"),
        (with_x(data=torch.zeros(4)), "x.data has the shape (4,), expected (4, 3)"),
        (with_x(offsets=torch.zeros(3, 1)), "x.offsets has the shape (3, 1), expected (3,)"),
        (with_weights(recurrent=torch.zeros(5, 15)), "weights.recurrent has the shape (5, 15), expected (5, 20)"),
        (with_weights(input=torch.zeros(3, 16)), "weights.input has the shape (3, 16), expected (3, 20)"),
        (with_weights(bias=torch.zeros(5)), "weights.bias has the shape (5,), expected (20,)"),
        (with_weights(input=None, bias=None), "x.data has the shape (4, 3), expected (4, 20)"),
        (with_weights(bias=None), "weights.input and weights.bias are given together or not at all"),
        (with_weights(input=None), "weights.input and weights.bias are given together or not at all"),
        (with_state(hidden=torch.zeros(1, 5)), "state.hidden has the shape (1, 5), expected (2, 5)"),
        (with_state(cell=torch.zeros(2, 6)), "state.cell has the shape (2, 6), expected (2, 5)"),
    ],
)
def test_a_shape_that_does_not_fit_is_named_with_both_shapes(broken: Break, says: str) -> None:
    given = broken(inputs.lstm([3, 1], 5, 3))
    with pytest.raises(ContractError) as caught:
        lstm(*given, want=EVERYTHING)
    assert str(caught.value) == says


@pytest.mark.parametrize(
    "broken",
    [with_x(data=torch.tensor(1.0)), with_x(offsets=torch.zeros(0)), with_weights(recurrent=torch.tensor(1.0))],
    ids=["data without a dimension", "offsets without a row", "weights without a dimension"],
)
def test_an_array_without_any_size_is_a_contract_error_too(broken: Break) -> None:
    x, weights, _ = broken(inputs.lstm([3, 1], 5, 3))
    with pytest.raises(ContractError):
        lstm(x, weights, want=EVERYTHING)


@pytest.mark.parametrize("offsets", [[0, 3, 9], [0, 3, 3], [1, 3, 4], [0, 5, 4]], ids=str)
def test_offsets_that_do_not_lay_out_the_tokens_are_a_contract_error(offsets: list[int]) -> None:
    x, weights, state = with_x(offsets=torch.tensor(offsets))(inputs.lstm([3, 1], 5, 3))
    with pytest.raises(ContractError, match="offsets"):
        lstm(x, weights, state, want=EVERYTHING)


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ContractError, match=f"unknown backend 'abacus'; known are {', '.join(NAMES)}"):
        lstm(*inputs.lstm([3], 5, 3), want=EVERYTHING, backend="abacus")


@every_backend
def test_a_backend_asked_for_by_name_is_taken(backend: str) -> None:
    taken = choice(inputs.lstm([1], 5, 3).weights, backend)
    assert taken.backend.name == backend
    assert taken.why == (f"{backend}: asked for by name",)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_explain_says_of_each_backend_considered_why_and_ends_with_the_chosen(dtype: str) -> None:
    lines = explain("lstm", device="cpu", dtype=dtype, hidden=151).splitlines()
    assert [line.partition(": ")[0] for line in lines] == NAMES[: len(lines)]
    assert lines[-1].endswith(": chosen")
    assert not any(line.endswith(": chosen") for line in lines[:-1])


def test_explain_refuses_an_unknown_family_with_the_known_ones() -> None:
    with pytest.raises(ContractError, match="unknown kernel family 'gnu'; known are lstm"):
        explain("gnu", device="cpu", dtype="float32", hidden=5)


@pytest.mark.parametrize("device, dtype", [("cpu", "float31"), ("toaster", "float32")])
def test_explain_refuses_a_device_or_a_dtype_that_does_not_exist(device: str, dtype: str) -> None:
    with pytest.raises(ContractError, match=r"float31|toaster"):
        explain("lstm", device=device, dtype=dtype, hidden=5)
