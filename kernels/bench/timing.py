"""Timing of a call: repeated after a warm-up until a time budget is used; the result is the median and the spread.

eager   a call as in user code; a GPU is idle before it, and idle again when the clock stops
kernel  copies of the call in one CUDA graph, divided by their number: the time of the device alone. The graph has as many copies as take
        2 ms, judged by calls before the capture, but at least one and at most 20
replay  `kernel` with one copy: a replay of a CUDA graph of one call, between two device events

`graph_call` returns a replay as a call for `eager`, which includes its launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from time import perf_counter
from typing import Any

import numpy as np
import torch

from kernels.bench.tables import three_digits

COPIES = 20
GRAPH_S = 2e-3
"""Duration of a graph above which more copies hardly improve the timing."""
AT_LEAST, AT_MOST = 10, 1000
WARM_UP = 3


class NotCapturableError(Exception):
    """A call cannot be captured in a CUDA graph. The message has the reason."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Microseconds of a call: median, 10th and 90th percentile of `repetitions` calls."""

    median_us: float
    p10_us: float
    p90_us: float
    repetitions: int

    def __str__(self) -> str:
        low, median, high = map(three_digits, (self.p10_us, self.median_us, self.p90_us))
        return f"{median} ({low}-{high})"


def spread(seconds: Sequence[float]) -> Spread:
    median, low, high = (round(float(value) * 1e6, 3) for value in np.percentile(seconds, (50, 10, 90)))
    return Spread(median, low, high, len(seconds))


def repeated(once: Callable[[], float], budget_s: float) -> Spread:
    """Repeat `once`, which returns the seconds of one call, between AT_LEAST and AT_MOST times."""
    _repeat(once, WARM_UP, budget_s / 4)
    return spread(_repeat(once, AT_LEAST, budget_s))


def _repeat(once: Callable[[], float], at_least: int, budget_s: float) -> list[float]:
    start, seconds = perf_counter(), list[float]()
    while len(seconds) < at_least or (len(seconds) < AT_MOST and perf_counter() - start < budget_s):
        seconds.append(once())
    return seconds


def eager(call: Callable[[], Any], device: torch.device, budget_s: float) -> Spread:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def once() -> float:
        wait()
        start = perf_counter()
        call()
        wait()
        return perf_counter() - start

    return repeated(once, budget_s)


def kernel(call: Callable[[], Any], check: Callable[[Any], object], budget_s: float, copies: int = COPIES) -> Spread:
    """Time up to this many copies of a call in one graph. `check` raises if the answer of a replay is wrong."""
    graph, copies = _checked_graph(call, check, copies)
    return repeated(lambda: _on_device(graph.replay) / copies, budget_s)


def graph_call(call: Callable[[], Any], check: Callable[[Any], object]) -> Callable[[], None]:
    """Return a call that replays a graph of `call`. `check` raises if the answer of a replay is wrong."""
    graph, _ = _checked_graph(call, check, 1)
    return graph.replay


def _checked_graph(call: Callable[[], Any], check: Callable[[Any], object], at_most: int) -> tuple[torch.cuda.CUDAGraph, int]:
    """Return a graph of some copies of the call, and the number of copies."""
    graph, answer, copies = _captured(call, at_most)
    # The answer of the capture must not pass for that of a replay: a kernel launched outside of the graph is not in it.
    answer.fill_(float("nan"))
    graph.replay()
    check(answer)
    return graph, copies


def _on_device(run: Callable[[], Any]) -> float:
    """Return the seconds between device events before and after a call."""
    begin, end = _event(), _event()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch's own code has no types there


def _captured(call: Callable[[], Any], at_most: int) -> tuple[torch.cuda.CUDAGraph, Any, int]:
    """Return a graph of some copies of the call, the answer of its last copy, and the number of copies."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call] # as above
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    try:
        # A failed capture can corrupt the allocator, so calls that wait for the device are detected before it.
        torch.cuda.set_sync_debug_mode("error")
        with torch.cuda.stream(side):
            copies = min(at_most, ceil(GRAPH_S / min(_on_device(call) for _ in range(WARM_UP))))
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            for _ in range(copies):
                answer = call()
    except RuntimeError as error:
        raise NotCapturableError(str(error).splitlines()[0]) from error
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return graph, answer, copies
