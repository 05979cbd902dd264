"""Arguments on a GPU, and comparisons of outputs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kernels.ragged import Encoded, Ragged
from kernels.scan import launch
from kernels.scan.shape import ScanShape, TileShape
from tests.kernels import inputs
from tests.kernels.families import Form
from tests.kernels.inputs import (
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
    run_from_slot_to_slot,
    with_shared_slots,
)

TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
LSTM = Form("lstm")


def on_gpu(arguments: Arguments) -> Arguments:
    return arguments.map_arrays(torch.Tensor.cuda)


def stored(arguments: Arguments, dtype: torch.dtype) -> Arguments:
    """Return the arguments with data of this dtype, unless the data are ids."""
    data = arguments.x.data
    return arguments._replace(x=Ragged(data.to(dtype) if data.is_floating_point() else data, arguments.x.offsets))


def made(
    form: Form,
    lengths: Sequence[int],
    hidden: int,
    width: int = 24,
    *,
    storage: torch.dtype = torch.float16,
    seed: int = 0,
) -> Arguments:
    """Return arguments on the GPU, the data in the dtype of the weights."""
    return on_gpu(stored(form.arguments(lengths, hidden, width, storage=storage, seed=seed), storage))


def gates(form: Form, lengths: Sequence[int], hidden: int, *, storage: torch.dtype = torch.float16, seed: int = 0) -> Arguments:
    """Return arguments on the GPU with gate inputs, so that no library product precedes the recurrence."""
    x, weights, state = form.gated(form.arguments(lengths, hidden, 24, seed=seed))
    return on_gpu(stored(Arguments(x, map_arrays(weights, lambda array: array.to(storage)), state), storage))


def lstm(lengths: Sequence[int], hidden: int, *, storage: torch.dtype = torch.float16, seed: int = 0) -> Arguments:
    return made(LSTM, lengths, hidden, storage=storage, seed=seed)


def gated(lengths: Sequence[int], hidden: int, *, storage: torch.dtype = torch.float16, seed: int = 0) -> Arguments:
    """Return arguments of an LSTM with gate inputs."""
    return gates(LSTM, lengths, hidden, storage=storage, seed=seed)


def joined(rows: Sequence[Tensor]) -> Ragged:
    """Return rows packed end to end on the GPU."""
    x = inputs.joined(rows)
    return Ragged(x.data, x.offsets.cuda())


@contextmanager
def tf32_products() -> Iterator[None]:
    """Allow TF32 in the products of float32 layers."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def in_shape(shape: ScanShape | TileShape) -> Iterator[None]:
    """Launch every layer of an SRU or a QRNN in this shape."""
    with patch.object(launch, "shape_for", lambda *_: shape):
        yield


def outputs(encoded: Encoded) -> dict[str, Tensor]:
    """Return the outputs and the arrays of the state, or of several states, by name."""
    requested = {name: array for name in OUTPUTS if (array := getattr(encoded, name)) is not None}
    if not isinstance(encoded.state, tuple):
        return requested | arrays(encoded.state)
    states = enumerate(encoded.state)
    return requested | {f"{name} {number}": array for number, state in states for name, array in arrays(state).items()}


def agree(actual: Encoded, expected: Encoded, tolerance: float) -> None:
    for name, array in outputs(actual).items():
        close(array, outputs(expected)[name], tolerance, name)


def close(actual: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    """Assert that two arrays are close, whatever their devices and dtypes are."""
    torch.testing.assert_close(
        actual.cpu().double(), expected.cpu().double(), rtol=tolerance, atol=2 * tolerance, msg=lambda text: f"{name}: {text}"
    )


def same(actual: Encoded, expected: Encoded) -> None:
    differing = [name for name, array in outputs(actual).items() if not torch.equal(array, outputs(expected)[name])]
    assert not differing


def assert_any_rows_match(form: Form, backend: str, arguments: Arguments, tolerance: float) -> None:
    """Compare up to 40 random rows with the reference."""
    x, weights, state = arguments
    encoded = outputs(form.run(x, weights, state, backend=backend))
    some = sorted(random.Random(x.rows).sample(range(x.rows), min(x.rows, 40)))
    each = inputs.rows(x)
    sampled = Arguments(joined([each[row] for row in some]), weights, map_arrays(state, lambda array: array[some]))
    expected = outputs(form.exact(sampled))
    for name in ("last", "mean", "max", *arrays(state)):
        close(encoded[name][some], expected[name], tolerance, name)


def assert_rows_are_independent(form: Form, backend: str, arguments: Arguments) -> None:
    """Assert that rows have the same bits alone, in the batch and in chunks."""
    x, weights, state = arguments
    whole = outputs(form.run(x, weights, state, backend=backend))
    names = [*arrays(state), "last", "mean", "max"]
    for row in (0, 1, 2, 4, 60):
        own = map_arrays(state, partial(Tensor.narrow, dim=0, start=row, length=1))
        alone = outputs(form.run(joined([inputs.rows(x)[row]]), weights, own, backend=backend))
        assert all(torch.equal(alone[name][0], whole[name][row]) for name in names)
    fresh = form.run(x, weights, backend=backend)
    caches = caches_with_zero_slot(state)

    def run_chunk(chunk: Ragged, state: Any) -> Encoded:
        return form.run(chunk, weights, state, backend=backend)

    steps, after = run_from_slot_to_slot(run_chunk, in_chunks(x, chunks=4), caches)
    assert fresh.steps is not None and torch.equal(steps, fresh.steps)
    for name, array in arrays(after).items():
        assert torch.equal(array, getattr(fresh.state, name))
    assert_reserved_slots_unchanged(caches)


def assert_rows_move_between_slots(form: Form, backend: str, arguments: Arguments) -> None:
    """Assert that rows start from the states of shared slots and write theirs, with the outputs that they have without slots."""
    x, weights, state = arguments
    caches = with_shared_slots(state, torch.int64)
    expected = form.run(x, weights, caches.by_row(), backend=backend)
    encoded = form.run(x, weights, caches, backend=backend)
    assert all(torch.equal(getattr(encoded, name), getattr(expected, name)) for name in OUTPUTS)
    assert_shared_slots_result(encoded.state, state, expected.state)


def assert_graph_serves_other_values(form: Form, backend: str, hidden: int) -> None:
    """Assert that a CUDA graph runs with the lengths, slots and values that are in place when it is replayed."""
    first, second = gates(form, [5, 9, 0, 30], hidden), gates(form, [20, 0, 18, 6], hidden, seed=1)
    x = Ragged(torch.zeros_like(first.x.data), first.x.offsets.clone())
    slots, sources = (torch.tensor(places, dtype=torch.int32, device="cuda") for places in ([3, 4, 5, 6], [ZERO_SLOT] * 4))
    caches = replace(caches_with_zero_slot(first.state), slots=slots, sources=sources)
    form.run(x, first.weights, caches, backend=backend)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        encoded = outputs(form.run(x, first.weights, caches, backend=backend))
    state = None
    for problem, origins, ends in ((first, [ZERO_SLOT] * 4, [5, 3, 2, 7]), (second, [5, 3, 2, 7], [SCRAP_SLOT] * 4)):
        x.data.copy_(problem.x.data)
        x.offsets.copy_(problem.x.offsets)
        slots.copy_(torch.tensor(ends))
        sources.copy_(torch.tensor(origins))
        graph.replay()
        expected = form.run(problem.x, first.weights, state, backend=backend)
        assert all(torch.equal(encoded[name], getattr(expected, name)) for name in OUTPUTS)
        state = expected.state


def assert_nan_stays_in_its_row(form: Form, backend: str, hidden: int) -> None:
    """Assert that values which are not finite in some rows change nothing in the other rows."""
    x, weights, state = gates(form, [4, 2, 0, 7, 7, 1, 3, 5, 6], hidden)
    clean = outputs(form.run(x, weights, state, backend=backend))
    data, first = x.data.clone(), state.hidden.clone()
    data[4:6], first[1], data[-3:] = torch.nan, torch.inf, torch.nan
    encoded = outputs(form.run(Ragged(data, x.offsets), weights, replace(state, hidden=first), backend=backend))
    for row in (0, 2, 3, 4, 5, 6, 7):
        assert all(torch.equal(encoded[name][row], clean[name][row]) for name in (*arrays(state), "mean"))
    assert not encoded["hidden"][8].isfinite().any()
