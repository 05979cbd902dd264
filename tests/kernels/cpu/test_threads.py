"""Threads share the rows of a batch, and change nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread, local

import pytest
import torch

from kernels.cpu import threads
from tests.kernels.families import FORMS, INT8_FORMS, Form, cpu_backends
from tests.kernels.inputs import OUTPUTS, arrays

COMPILED = [
    form for form in (*FORMS, *INT8_FORMS) if "cpu" in cpu_backends(form.family, form.variants) and form.family != "conv"
]


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(threads, "PART_OPERATIONS", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("form", COMPILED, ids=str)
def test_threads_give_the_same_bits(form: Form, three_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = form.arguments([9, 1, 14, 0, 5, 5, 2], 19, 7)
    shared = form.run(*arguments, backend="cpu")
    torch.set_num_threads(1)
    alone = form.run(*arguments, backend="cpu")
    for name in OUTPUTS:
        assert torch.equal(getattr(shared, name), getattr(alone, name)), name
    for name, array in arrays(alone.state).items():
        assert torch.equal(array, arrays(shared.state)[name]), name


def test_error_of_a_thread_is_raised(three_threads: None) -> None:
    def fail(part: int, parts: int, scratch: int) -> None:
        if part == 2:
            raise IndexError(f"part {part} of {parts}")

    with pytest.raises(IndexError, match="part 2 of 3"):
        threads.run_in_parts(fail, (), rows=5, operations=10, scratch_bytes=64)
    threads.run_in_parts(lambda *_: None, (), rows=5, operations=10, scratch_bytes=64)


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
