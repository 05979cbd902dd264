"""How long a call takes: repeated after a warm-up until a budget of seconds is used up, then the median and the spread.

eager   a call as users make it; on a GPU the device has nothing to do before it and is waited for after it
kernel  copies of the call one after the other in one CUDA graph, divided by their number: the device alone. There are as many as
        take 2 ms, judged by calls before the capture, but at least one and at most 20
replay  one replay of a CUDA graph of one call, between two device events
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from time import perf_counter
from typing import Any

import numpy as np
import torch

COPIES = 20
GRAPH_S = 2e-3
"""A graph that takes so long is hardly timed better with more copies."""
AT_LEAST, AT_MOST = 10, 1000
WARM_UP = 3


class NotCapturableError(Exception):
    """A call cannot be made a CUDA graph; the message says why."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Of `repetitions` calls, microseconds each."""

    median_us: float
    p10_us: float
    p90_us: float
    repetitions: int


def spread(seconds: Sequence[float]) -> Spread:
    median, low, high = (round(float(value) * 1e6, 3) for value in np.percentile(seconds, (50, 10, 90)))
    return Spread(median, low, high, len(seconds))


def repeated(once: Callable[[], float], budget_s: float) -> Spread:
    """`once` does it once and gives the seconds it took. A slow one is still done AT_LEAST times, a fast one at most AT_MOST."""
    _taken(once, WARM_UP, budget_s / 4)
    return spread(_taken(once, AT_LEAST, budget_s))


def _taken(once: Callable[[], float], at_least: int, budget_s: float) -> list[float]:
    begun, seconds = perf_counter(), list[float]()
    while len(seconds) < at_least or (len(seconds) < AT_MOST and perf_counter() - begun < budget_s):
        seconds.append(once())
    return seconds


def eager(call: Callable[[], Any], device: torch.device, budget_s: float) -> Spread:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def once() -> float:
        wait()
        begun = perf_counter()
        call()
        wait()
        return perf_counter() - begun

    return repeated(once, budget_s)


def kernel(call: Callable[[], Any], check: Callable[[Any], object], budget_s: float) -> Spread:
    """`check` sees what a replay gave, and raises if it is wrong."""
    return _replayed(call, check, COPIES, budget_s)


def replay(call: Callable[[], Any], check: Callable[[Any], object], budget_s: float) -> Spread:
    return _replayed(call, check, 1, budget_s)


def _replayed(call: Callable[[], Any], check: Callable[[Any], object], at_most: int, budget_s: float) -> Spread:
    graph, answer, copies = _captured(call, at_most)
    # What the capture left in memory must not pass for the answer: a kernel launched beside the graph would not be in it.
    answer.fill_(float("nan"))
    graph.replay()
    check(answer)
    return repeated(lambda: _on_device(graph.replay) / copies, budget_s)


def _on_device(run: Callable[[], Any]) -> float:
    """Seconds between two events of the device, one before and one after."""
    begin, end = _event(), _event()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch's own code has no types there


def _captured(call: Callable[[], Any], at_most: int) -> tuple[torch.cuda.CUDAGraph, Any, int]:
    """A graph of some copies of the call, where the last one leaves its answer, and how many they are."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call] # as above
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    try:
        # A capture that fails can leave the allocator in disorder, so that what waits for the device is found before.
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
