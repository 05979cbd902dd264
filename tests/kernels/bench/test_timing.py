"""Medians and spreads of known samples, and how often something is repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kernels.bench.timing import (
    AT_LEAST,
    AT_MOST,
    COPIES,
    WARM_UP,
    NotCapturableError,
    Spread,
    kernel,
    repeated,
    replay,
    spread,
)


def test_median_and_deciles_of_known_samples() -> None:
    assert spread([one / 1e6 for one in range(1, 102)]) == Spread(median_us=51.0, p10_us=11.0, p90_us=91.0, repetitions=101)


def test_the_order_of_the_samples_does_not_matter_and_between_two_the_middle_counts() -> None:
    assert spread([4e-6, 1e-6, 3e-6, 2e-6]) == Spread(2.5, 1.3, 3.7, 4)


def test_one_outlier_moves_neither_the_median_nor_the_deciles() -> None:
    assert spread([5e-6] * 30 + [1.0]) == Spread(5.0, 5.0, 5.0, 31)


@pytest.mark.parametrize("budget_s, repetitions", [(0.0, AT_LEAST), (60.0, AT_MOST)])
def test_a_slow_call_is_repeated_often_enough_and_a_fast_one_not_for_ever(budget_s: float, repetitions: int) -> None:
    assert repeated(lambda: 1e-6, budget_s).repetitions == repetitions


def test_the_warm_up_is_not_counted() -> None:
    seconds = iter([1.0] * WARM_UP + [2e-6] * AT_LEAST)
    assert repeated(lambda: next(seconds), 0.0) == Spread(2.0, 2.0, 2.0, AT_LEAST)


class MadeUpDevice:
    """Stands in for torch.cuda: a graph does again what `work` does, and two events are always `apart_ms` apart."""

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


def test_a_kernel_is_one_copy_out_of_a_graph_of_many_and_a_replay_is_a_graph_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, seen = torch.zeros(3), list[Tensor]()
    device = MadeUpDevice(monkeypatch, work=lambda: answer.fill_(7))
    calls = 0

    def call() -> Tensor:
        nonlocal calls
        calls += 1
        return answer

    assert kernel(call, seen.append, 0.0).median_us == 40 / COPIES
    assert replay(call, seen.append, 0.0).median_us == 40
    assert device.captures == 2 and calls == 2 * WARM_UP + COPIES + 1
    assert [one.tolist() for one in seen] == [[7, 7, 7]] * 2


@pytest.mark.parametrize("takes_ms, copies", [(0.001, COPIES), (0.4, 5), (0.41, 5), (1.9, 2), (2.0, 1), (300.0, 1)])
def test_a_graph_has_as_many_copies_as_fill_two_milliseconds(
    takes_ms: float, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    MadeUpDevice(monkeypatch, apart_ms=takes_ms)
    calls = 0

    def call() -> Tensor:
        nonlocal calls
        calls += 1
        return torch.zeros(3)

    assert kernel(call, id, 0.0).median_us == pytest.approx(takes_ms * 1e3 / copies)
    assert calls == WARM_UP + copies


def test_an_answer_that_the_graph_does_not_write_is_seen_by_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(answer: Tensor) -> None:
        assert not answer.isnan().any(), "not written"

    MadeUpDevice(monkeypatch)
    with pytest.raises(AssertionError, match="not written"):
        kernel(lambda: torch.zeros(3), check, 0.0)


def test_a_call_that_waits_for_the_device_is_not_captured_and_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def waiting() -> None:
        raise RuntimeError("called a synchronizing CUDA operation\nmore about it")

    device = MadeUpDevice(monkeypatch)
    with pytest.raises(NotCapturableError, match=r"^called a synchronizing CUDA operation$"):
        kernel(waiting, id, 0.0)
    assert device.captures == 0 and device.modes[-1] == "default"
