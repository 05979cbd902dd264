"""Overload up to 20 times the capacity, bound by the device, the engine's processor and the frontends. `make test-all` runs it.

All figures are ratios within one run. The device is planted, but in one test: a batch takes a fixed time and no processor time, so that the
load generator, which shares the cores with the server, takes nothing from it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests import planted
from tests.accumulator import at_rest
from tests.long.flood import flooded
from tests.long.overload import (
    ATTEMPTS,
    DEADLINE_SECONDS,
    LAGS,
    MOST_CALLERS,
    SECONDS,
    Overload,
    check_computed,
    faults,
    staircase,
)
from tests.serving import LIMIT_SECONDS, Server, eventually, serving
from tests.steady import open_files

ROWS = [[0.1, 0.2, 0.3]] * 4
LSTM, COMPUTED_CAPACITY = {"kind": "lstm", "hidden": 256, "depth": 8}, 40.0
"""With 100 requests per second, the refusals at 10 times the capacity take a tenth of the engine's time on a machine with two cores."""
BURST_SECONDS, BURSTS, BURST, BETWEEN = 0.2, 5, 50, 0.3
IDLE = 1000
LEAST_FRONTEND_GOODPUT, MOST_LAG_SECONDS = 0.8, 0.1
DEFAULT_DEADLINES_MS = {"http": "5000", "grpc": "5000", "large http": str(round(1000 * DEADLINE_SECONDS))}
"""By kind of request. A frontend refuses requests that have waited for a tenth of it, and a decoder for half of it."""
PROBE_SECONDS = 0.01
TIMES = 10
"""Ratio of the callers that overload the frontends to the callers that keep them busy."""


@pytest.fixture(scope="module")
def device(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        planted.plant("slow-device", patch)
        with serving(folder, tmp_path_factory.mktemp("log"), max_batch_sequences="4", idle_seconds="600") as server:
            yield server


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_goodput_holds_up_to_20_times_the_capacity_of_the_device(
    transport: str, device: Server, show: Callable[[object], None]
) -> None:
    before = at_rest(device)
    assert staircase(Overload.of(device, transport, "sensors", ROWS), show) == []
    at_rest(device).since(before).check()


def test_goodput_holds_up_to_20_times_the_capacity_of_the_processor_of_the_engine(
    tmp_path: Path, show: Callable[[object], None]
) -> None:
    """The engine computes batches and refuses requests in one process."""
    limits = {"max_batch_sequences": "4", "frontends": "1", "idle_seconds": "600"}
    check_computed(LSTM, COMPUTED_CAPACITY, tmp_path, show, **limits)


def test_frontends_answer_ten_times_the_callers(folder: Path, tmp_path: Path, show: Callable[[object], None]) -> None:
    """The model is tiny: the callers wait for the frontend."""
    with serving(folder, tmp_path) as server:
        overload = Overload.of(server, "http", "sensors", ROWS)
        before = at_rest(server)
        rates = [(overload.capacity(SECONDS), overload.capacity(SECONDS, TIMES * 64)) for _ in range(3)]
        show(f"64 callers and {TIMES} times as many: {', '.join(f'{one:.0f} and {many:.0f}' for one, many in rates)} answers/s")
        assert max(many / one for one, many in rates) >= 0.8
        outcomes = at_rest(server).since(before).outcomes
    assert outcomes.keys() <= {"ok", "overloaded"}, outcomes


@contextmanager
def frontend_bound(folder: Path, scratch: Path, kind: str) -> Iterator[Overload]:
    with pytest.MonkeyPatch.context() as patch:
        planted.plant("slow-frontend", patch)
        with serving(folder, scratch, idle_seconds="600", default_deadline_ms=DEFAULT_DEADLINES_MS[kind]) as server:
            yield Overload.of(server, kind, "sensors", ROWS)


class LoopLag:
    """The times in which a frontend answers /healthz, which needs nothing but its event loop."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._ended = threading.Event()
        self.seconds: list[float] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure within the context."""
        with ThreadPoolExecutor(1) as pool:
            measuring = pool.submit(self._measure)
            try:
                yield
            finally:
                self._ended.set()
                measuring.result()

    def _measure(self) -> None:
        with httpx.Client(base_url=self._server.address, timeout=LIMIT_SECONDS, trust_env=False) as client:
            while not self._ended.wait(PROBE_SECONDS):
                before = time.monotonic()
                assert client.get("/healthz").status_code == 200
                self.seconds.append(time.monotonic() - before)

    @property
    def p99(self) -> float:
        return sorted(self.seconds)[int(0.99 * (len(self.seconds) - 1))]


def frontend_faults(overload: Overload, times: float, capacity: float, show: Callable[[object], None]) -> list[str]:
    """Return the faults at this multiple of the frontends' capacity."""
    lag = LoopLag(overload.server)
    with lag.measured():
        step = overload.step(times * capacity, SECONDS)
    show(f"{times} times: {step}, p99 of the event loop's lag {1000 * lag.p99:.0f} ms")
    found = []
    if step.goodput < LEAST_FRONTEND_GOODPUT * capacity:
        found.append(f"{step.goodput:.0f} answers in time per second, of a capacity of {capacity:.0f}")
    if step.other:
        found.append(f"failures {step.other}")
    if lag.p99 > MOST_LAG_SECONDS + LAGS * step.lag:
        found.append(f"p99 of the event loop's lag is {lag.p99:.3f} s")
    return [f"{times} times: {fault}" for fault in found]


@pytest.mark.parametrize("kind", ["http", "grpc", "large http"])
def test_goodput_holds_up_to_10_times_the_capacity_of_the_frontends(
    kind: str, folder: Path, tmp_path: Path, show: Callable[[object], None]
) -> None:
    """An open loop. The decoding is planted: it takes a fixed time, and no processor time from the generator."""
    with frontend_bound(folder, tmp_path, kind) as overload:
        capacity, found = overload.capacity(SECONDS), []
        for times in (1, 2, 5, 10):
            for _ in range(ATTEMPTS):
                wrong = frontend_faults(overload, times, capacity, show)
                if not wrong:
                    break
                capacity = min(capacity, overload.capacity(SECONDS))
            found += wrong
    assert found == []


def test_bursts_keep_the_deadlines_of_accepted_requests(device: Server, show: Callable[[object], None]) -> None:
    overload = Overload.of(device, "http", "sensors", ROWS)
    capacity = overload.capacity(SECONDS / 2)
    with ThreadPoolExecutor(1) as pool:
        base = pool.submit(overload.step, BETWEEN * capacity, SECONDS + 2 * BURSTS)
        bursts = [overload.step(BURST * capacity, BURST_SECONDS) for _ in range(BURSTS)]
        steady = base.result()
    show(f"{BETWEEN} times the capacity: {steady}")
    for burst in bursts:
        show(f"a burst of {BURST} times: {burst}")
    assert sum(burst.refused for burst in bursts) > 0
    assert not [fault for burst in [*bursts, steady] for fault in faults(BETWEEN, burst, capacity)]


def test_goodput_holds_beside_a_thousand_idle_connections(device: Server, show: Callable[[object], None]) -> None:
    overload = Overload.of(device, "http", "sensors", ROWS)
    with flooded(device, IDLE, lambda: None):
        eventually(lambda: open_files(device)["frontend-0"] > IDLE)
        for _ in range(ATTEMPTS):
            capacity = overload.capacity(SECONDS)
            step = overload.step(TIMES * capacity, SECONDS)
            show(f"{IDLE} idle connections, {TIMES} times {capacity:.0f} requests/s: {step}")
            wrong = faults(TIMES, step, capacity)
            if not wrong:
                break
    assert not wrong


def test_clients_that_retry_at_once_do_not_stop_the_service(device: Server, show: Callable[[object], None]) -> None:
    """MOST_CALLERS callers send requests without a pause. Afterwards, requests at half of the capacity are all answered."""
    overload = Overload.of(device, "http", "sensors", ROWS)
    capacity = overload.capacity(SECONDS)
    storm = overload.capacity(SECONDS, MOST_CALLERS)
    after = overload.step(capacity / 2, SECONDS)
    show(f"{capacity:.0f} answers/s, {storm:.0f} while {MOST_CALLERS} callers retry at once; afterwards {after}")
    assert storm > 0.85 * capacity
    assert after.refused == after.expired == after.late == 0 and not after.other
