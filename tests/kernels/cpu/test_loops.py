"""The compiled loops: the same bits in threads, alone and in both directions, ids outside of a table, and int8 products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from threading import Thread, local
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu import threads
from kernels.quantized import quantize
from kernels.ragged import Encoded, Outputs, Ragged
from tests.kernels.families import FORMS, INT8_FORMS, VOCABULARY, Form, cpu_backends
from tests.kernels.inputs import (
    OUTPUTS,
    Arguments,
    arrays,
    assert_encodings_close,
    joined,
    longest,
    map_arrays,
    put_in_slots,
    rows,
)

LOOPS = [form for form in (*FORMS, *INT8_FORMS) if "cpu" in cpu_backends(form.family, form.variants) and form.family != "conv"]
SCANS = [form for form in FORMS if form.family in ("sru", "qrnn")]
OVER_IDS = [form for form in SCANS if form.takes_ids]
OVER_VECTORS = [form for form in INT8_FORMS if not form.takes_ids]
every_loop, every_scan = (pytest.mark.parametrize("form", forms, ids=str) for forms in (LOOPS, SCANS))
every_int8_form = pytest.mark.parametrize("form", INT8_FORMS, ids=str)
LENGTHS, HIDDEN, INPUTS = [40, 1, 0, 97, 3], 61, 7


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three threads, however small the batch is."""
    monkeypatch.setattr(threads, "PART_OPERATIONS", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def values(encoded: Encoded) -> list[Tensor]:
    """Return every output and every array of the state, or of the states of both directions."""
    states = encoded.state if isinstance(encoded.state, tuple) else (encoded.state,)
    return [getattr(encoded, name) for name in OUTPUTS] + [array for state in states for array in arrays(state).values()]


@every_loop
def test_threads_give_the_same_bits(form: Form, three_threads: None) -> None:
    forward, backward = (form.arguments(LENGTHS, HIDDEN, INPUTS, seed=seed) for seed in (0, 1))
    weights, states = (forward.weights, backward.weights), (forward.state, backward.state)
    shared = form.bidirectional(forward.x, weights, states, backend="cpu")
    torch.set_num_threads(1)
    alone = form.bidirectional(forward.x, weights, states, backend="cpu")
    assert all(torch.equal(*pair) for pair in zip(values(shared), values(alone), strict=True))


@every_scan
def test_row_has_the_same_bits_alone_in_both_directions(form: Form) -> None:
    forward, backward = (form.arguments(LENGTHS, HIDDEN, INPUTS, seed=seed) for seed in (0, 1))
    x, weights, states = forward.x, (forward.weights, backward.weights), (forward.state, backward.state)
    whole = form.bidirectional(x, weights, states, backend="cpu")
    assert whole.steps is not None
    for row, (data, steps) in enumerate(zip(rows(x), rows(Ragged(whole.steps, x.offsets)), strict=True)):
        before = (map_arrays(states[0], lambda array: array[row : row + 1]), map_arrays(states[1], lambda a: a[row : row + 1]))  # noqa: B023
        alone = form.bidirectional(joined([data]), weights, before, backend="cpu")
        assert alone.steps is not None and torch.equal(steps, alone.steps)
        assert all(torch.equal(getattr(whole, name)[row], getattr(alone, name)[0]) for name in ("last", "mean", "max"))
        for after, alone_after in zip(whole.state, alone.state, strict=True):
            assert all(torch.equal(array[row], arrays(alone_after)[name][0]) for name, array in arrays(after).items())


@every_scan
def test_wide_layers_run_in_several_groups_of_units(form: Form) -> None:
    arguments = form.arguments([5, 20, 0, 1], 530, INPUTS)
    assert_encodings_close(form.run(*arguments, backend="cpu"), form.exact(arguments), steps=longest(arguments.x))


@pytest.mark.parametrize("form", [*OVER_IDS, Form("lstm", ids=True), Form("gru", reset="after", ids=True)], ids=str)
@pytest.mark.parametrize("wrong", [VOCABULARY, 2**31 - 1, -2])
def test_id_outside_of_the_table_changes_no_state(form: Form, wrong: int, three_threads: None) -> None:
    x, weights, state = form.arguments(LENGTHS, HIDDEN, INPUTS)
    for dtype in (torch.int32, torch.int64):
        ids = x.data.to(dtype)
        ids[-1] = wrong
        caches = put_in_slots(state, torch.tensor([3, 0, 4, 1, 2]), places=6)
        before = {name: array.clone() for name, array in arrays(caches).items()}
        with pytest.raises(IndexError, match="outside of the table"):
            form.run(Ragged(ids, x.offsets), weights, caches, want=Outputs(last=True), backend="cpu")
        assert form not in OVER_IDS or all(torch.equal(array, before[name]) for name, array in arrays(caches).items())


@pytest.mark.parametrize("form", [form for form in OVER_IDS if form.options.get("window", 1) > 1], ids=str)
@pytest.mark.parametrize("wrong", [VOCABULARY + 1, -1])
def test_step_before_the_rows_outside_of_the_tables_is_refused(form: Form, wrong: int) -> None:
    x, weights, state = form.arguments(LENGTHS, HIDDEN, INPUTS)
    state.left[2, 0] = wrong
    with pytest.raises(IndexError, match="outside of the table"):
        form.run(x, weights, state, backend="cpu")


# Threads.


def test_error_of_a_thread_is_raised(three_threads: None) -> None:
    def fail(part: int, parts: int, scratch: int) -> None:
        if part == 2:
            raise IndexError(f"part {part} of {parts}")

    with pytest.raises(IndexError, match="part 2 of 3"):
        threads.run_in_parts(fail, (), rows=5, operations=10, scratch_bytes=64)
    threads.run_in_parts(lambda *_: None, (), rows=5, operations=10, scratch_bytes=64)


def test_parts_are_as_many_as_rows_threads_and_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    work = threads.PART_OPERATIONS
    taken = ((9, 9 * work), (3, 9 * work), (9, 2 * work), (9, 2 * work - 1), (9, 0), (0, work))
    assert [threads.part_count(*each) for each in taken] == [4, 3, 2, 1, 1, 1]
    sizes = torch.tensor([5, 1, 1, 7, 2]).numpy()
    assert [threads.most_in_a_part(sizes, parts) for parts in (1, 2, 5)] == [16, 10, 7]


def test_scratch_memory_is_kept_for_the_next_call_of_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "LARGEST_KEPT_BYTES", 128)
    monkeypatch.setattr(threads, "_kept", local())
    addresses: list[int] = []

    def call(size: int) -> None:
        threads.run_in_parts(lambda *arguments: addresses.append(arguments[-1]), (), 1, 1, size)

    for size in (64, 128, 32, 129, 128):
        call(size)
    other = Thread(target=call, args=(128,))
    other.start()
    other.join()
    _, kept, smaller, larger, again, of_another_thread = addresses
    assert kept == smaller == again
    assert kept != larger, "memory of a very large call is not kept"
    assert kept != of_another_thread


# Products of int8 weights.


def whole_rows(values: Tensor) -> Tensor:
    """Return values whose rows are whole numbers / 128, the largest number being 127."""
    return quantize(values.flatten(1).T)[0].T.reshape(values.shape) / 128.0


@pytest.mark.parametrize(
    "form",
    [form for form in INT8_FORMS if not form.options.get("projection") and form.options.get("reset") != "before"],
    ids=str,
)
@pytest.mark.parametrize("hidden, width", [(1, 1), (5, 3), (33, 70), (64, 128)])
def test_step_over_whole_numbers_is_exact(form: Form, hidden: int, width: int) -> None:
    """In forms in which no product takes the result of another computation."""
    x, weights, state = form.arguments([1] * 9, hidden, width)
    x = x if form.takes_ids else Ragged(whole_rows(x.data), x.offsets)
    arguments = Arguments(x, weights, map_arrays(state, whole_rows))
    if form.family == "qrnn":  # a row of its product is a window
        window = whole_rows(torch.cat((arguments.state.left, x.data[:, None]), dim=1))
        arguments = Arguments(Ragged(window[:, -1], x.offsets), weights, replace(arguments.state, left=window[:, :-1]))
    assert_encodings_close(form.run(*arguments, backend="cpu"), form.exact(arguments), steps=1)


@every_int8_form
def test_outputs_in_int8_are_close_to_float32(form: Form) -> None:
    for lengths, hidden, width in (([7, 1, 3], 5, 3), ([129, 0, 4, 40], 33, 70)):
        arguments = form.arguments(lengths, hidden, width)
        encoded, exact = form.run(*arguments, backend="cpu"), form.exact(arguments)
        for name in OUTPUTS:
            error, largest = (getattr(encoded, name) - getattr(exact, name)).abs(), getattr(exact, name).abs().max()
            assert error.mean() < 0.01 * largest and error.max() < 0.1 * largest, name


@every_int8_form
def test_each_row_has_its_own_scale(form: Form) -> None:
    """A batch with one huge row: with a common scale, the numbers of the other rows would be zeros."""
    x, weights, state = form.arguments([5, 5], 33, 7)
    second = Ragged(x.data[5:].clone(), torch.tensor([0, 5]))
    alone = form.run(second, weights, map_arrays(state, lambda array: array[1:]), backend="cpu")
    if not form.takes_ids:
        x.data[:5] *= 1e6
    state = map_arrays(state, lambda array: torch.cat((array[:1] * 100, array[1:])))
    together = form.run(x, weights, state, backend="cpu")
    assert torch.equal(steps_of(together)[5:], steps_of(alone))
    assert all(torch.equal(arrays(together.state)[name][1:], array) for name, array in arrays(alone.state).items())


@pytest.mark.parametrize("form", OVER_VECTORS, ids=str)
def test_tiny_rows_count_as_zeros_and_nan_is_not_hidden(form: Form) -> None:
    x, weights, _ = form.arguments([5], 33, 7)
    zeros = steps_of(form.run(Ragged(torch.zeros_like(x.data), x.offsets), weights, backend="cpu"))
    for size in (0.0, 1e-38, 1e-31):
        tiny = steps_of(form.run(Ragged(x.data * size, x.offsets), weights, backend="cpu"))
        torch.testing.assert_close(tiny, zeros, rtol=0, atol=1e-6)
    x.data[1, 2] = torch.nan
    assert bool(steps_of(form.run(x, weights, backend="cpu"))[1:].isnan().all())


def steps_of(encoded: Encoded) -> Any:
    assert encoded.steps is not None
    return encoded.steps
