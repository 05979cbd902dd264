"""One pool of threads for all compiled loops of the process. The rows of a batch are independent, so each thread takes a part
of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from queue import SimpleQueue
from threading import Thread, local
from typing import Any

import numpy as np
import torch

from kernels.ragged import Sizes

PART_OPERATIONS = 5_000_000
"""Multiplications that are worth another thread, which needs some 20 us to begin."""
LARGEST_KEPT_BYTES = 64 << 20

_kept = local()
Results = SimpleQueue[BaseException | None]


def part_count(rows: int, operations: int) -> int:
    """Return the parts of a batch: as many as torch has threads, if there is enough work."""
    return max(1, min(torch.get_num_threads(), rows, operations // PART_OPERATIONS))


def most_in_a_part(sizes: Sizes, parts: int) -> int:
    """Return the largest sum of the sizes of a part's rows, (rows,), if part n begins at row rows * n // parts."""
    ends = np.append(0, sizes.cumsum())
    cuts = len(sizes) * np.arange(parts + 1) // parts
    return int(np.diff(ends[cuts]).max())


def run_in_parts(
    function: Callable[..., None], arguments: Sequence[Any], rows: int, operations: int, scratch_bytes: int
) -> None:
    """Call a compiled function for the parts of a batch's rows.

    The function receives the part, the number of parts, the arguments, and the address of `scratch_bytes` of memory for this
    part alone.
    """
    parts = part_count(rows, operations)
    scratch = _scratch(parts * scratch_bytes)  # refers to the memory until the end
    if parts == 1:
        function(0, 1, *arguments, scratch.data_ptr())
        return
    results: Results = SimpleQueue()
    for part in range(1, parts):
        _tasks(part).put((function, (part, parts, *arguments, scratch.data_ptr() + part * scratch_bytes), results))
    try:
        function(0, parts, *arguments, scratch.data_ptr())
    finally:  # the others use the arrays until they have ended
        errors = [results.get() for _ in range(1, parts)]
    for error in filter(None, errors):
        raise error


def _scratch(size: int) -> torch.Tensor:
    """Return memory that this thread keeps for its next call, because new pages cost as much as a tenth of a large call. The
    memory of a very large call is not kept."""
    kept: torch.Tensor | None = getattr(_kept, "scratch", None)
    if kept is not None and kept.shape[0] >= size:
        return kept
    scratch = torch.empty(size, dtype=torch.uint8)
    if size <= LARGEST_KEPT_BYTES:
        _kept.scratch = scratch
    return scratch


@cache
def _tasks(worker: int) -> SimpleQueue[tuple[Callable[..., None], tuple[Any, ...], Results]]:
    """Return the queue of a worker thread, which runs until the process ends."""
    tasks: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...], Results]] = SimpleQueue()

    def work() -> None:
        while True:
            function, arguments, results = tasks.get()
            try:
                function(*arguments)
                results.put(None)
            except BaseException as error:  # the caller raises it
                results.put(error)

    Thread(target=work, name=f"kernels-{worker}", daemon=True).start()
    return tasks
