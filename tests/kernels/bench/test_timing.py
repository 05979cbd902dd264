"""Medians and spreads of known samples, repetitions, and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kernels.bench.timing import (
    AT_LEAST,
    COPIES,
    WARM_UP,
    Spread,
    kernel,
    repeated,
    replay,
    spread,
)


def test_median_and_deciles_of_known_samples() -> None:
    assert spread([us / 1e6 for us in range(1, 102)]) == Spread(median_us=51.0, p10_us=11.0, p90_us=91.0, repetitions=101)


def test_warm_up_is_not_counted() -> None:
    seconds = iter([1.0] * WARM_UP + [2e-6] * AT_LEAST)
    assert repeated(lambda: next(seconds), 0.0) == Spread(2.0, 2.0, 2.0, AT_LEAST)


class FakeDevice:
    """Replaces torch.cuda: a graph repeats `work`, and two events are always `apart_ms` apart."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, work: Callable[[], object] = lambda: None, apart_ms: float = 0.04
    ) -> None:
        self.modes: list[str] = []
        self.captures = 0
        stream = SimpleNamespace(wait_stream=lambda _: None)
        nothing = dict.fromkeys(("record", "synchronize"), lambda: None)
        for name, made_up in {
            "Stream": lambda: stream,
            "current_stream": lambda: stream,
            "stream": lambda _: nullcontext(),
            "CUDAGraph": lambda: SimpleNamespace(replay=work),
            "graph": self._graph,
            "Event": lambda **_: SimpleNamespace(elapsed_time=lambda _: apart_ms, **nothing),
            "set_sync_debug_mode": self.modes.append,
        }.items():
            monkeypatch.setattr(torch.cuda, name, made_up)

    @contextmanager
    def _graph(self, graph: object) -> Iterator[None]:
        assert self.modes[-1] == "default"
        self.captures += 1
        yield


def test_kernel_time_is_one_copy_and_replay_time_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, seen = torch.zeros(3), list[Tensor]()
    device = FakeDevice(monkeypatch, work=lambda: answer.fill_(7))
    calls = 0

    def call() -> Tensor:
        nonlocal calls
        calls += 1
        return answer

    assert kernel(call, seen.append, 0.0).median_us == 40 / COPIES
    assert replay(call, seen.append, 0.0).median_us == 40
    assert device.captures == 2 and calls == 2 * WARM_UP + COPIES + 1
    assert [tensor.tolist() for tensor in seen] == [[7, 7, 7]] * 2


@pytest.mark.parametrize("takes_ms, copies", [(0.001, COPIES), (0.4, 5), (0.41, 5), (1.9, 2), (2.0, 1), (300.0, 1)])
def test_graph_has_copies_for_two_milliseconds(takes_ms: float, copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDevice(monkeypatch, apart_ms=takes_ms)
    calls = 0

    def call() -> Tensor:
        nonlocal calls
        calls += 1
        return torch.zeros(3)

    assert kernel(call, id, 0.0).median_us == pytest.approx(takes_ms * 1e3 / copies)
    assert calls == WARM_UP + copies
