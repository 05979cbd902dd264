"""Overload up to 20 times the capacity, bound by the device, the engine's processor and the frontends. `make test-all` runs it.

All figures are ratios within one run. The device is planted, but in one test: a batch takes a fixed time and no processor time, so that the
load generator, which shares the cores with the server, takes nothing from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import httpx
import pytest

from tests import planted
from tests.accumulator import at_rest
from tests.long import scaled
from tests.long.overload import (
    ATTEMPTS,
    DEADLINE_SECONDS,
    LAGS,
    SECONDS,
    Overload,
    Probes,
    check_computed,
    faults,
    staircase,
)
from tests.serving import LIMIT_SECONDS, Server, eventually, serving, stopped
from tests.steady import processes

ROWS = [[0.1, 0.2, 0.3]] * 4
LSTM, COMPUTED_CAPACITY = {"kind": "lstm", "hidden": 256, "depth": 8}, 40.0
"""With 100 requests per second, the refusals at 10 times the capacity take a tenth of the engine's time on a machine with two cores."""
BURST_SECONDS, BURSTS, BURST, BURST_CALLERS, BETWEEN = 0.2, 5, 50, 960, 0.3
"""BURST_CALLERS: connections. With fewer of them, the requests of a burst would wait in the generator for the replies to others."""
LATE_LOAD_SECONDS = 300.0
LIMITS_SECONDS, SCRAPES = {"/healthz": 0.1, "/readyz": 0.1, "/metrics": 0.3}, 10
LEAST_FRONTEND_GOODPUT, MOST_LAG_SECONDS = 0.8, 0.1
DEFAULT_DEADLINES_MS = {"http": "5000", "grpc": "5000", "large http": str(round(1000 * DEADLINE_SECONDS))}
"""By kind of request. A frontend refuses requests that have waited for a tenth of it, and a decoder for half of it."""


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


def frontend_faults(overload: Overload, times: float, capacity: float, show: Callable[[object], None]) -> list[str]:
    """Return the faults at this multiple of the frontends' capacity. /healthz needs nothing of a frontend but its event loop."""
    probes = Probes(overload.server.address, "/healthz", connection="keep-alive")
    with probes.running():
        step = overload.step(times * capacity, SECONDS)
    lag = probes.quantile("/healthz", 0.99)
    show(f"{times} times: {step}, p99 of the event loop's lag {1000 * lag:.0f} ms")
    found = []
    if step.goodput < LEAST_FRONTEND_GOODPUT * capacity:
        found.append(f"{step.goodput:.0f} answers in time per second, of a capacity of {capacity:.0f}")
    if step.other:
        found.append(f"failures {step.other}")
    if lag > MOST_LAG_SECONDS + LAGS * step.lag:
        found.append(f"p99 of the event loop's lag is {lag:.3f} s")
    return [f"{times} times: {fault}" for fault in found]


@pytest.mark.parametrize("kind", ["http", "grpc", "large http"])
def test_goodput_holds_up_to_10_times_the_capacity_of_the_frontends(
    kind: str, folder: Path, tmp_path: Path, show: Callable[[object], None]
) -> None:
    """The decoding is planted: it takes a fixed time, and no processor time from the generator."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        planted.plant("slow-frontend", patch)
        limits = {"idle_seconds": "600", "default_deadline_ms": DEFAULT_DEADLINES_MS[kind]}
        overload = Overload.of(stack.enter_context(serving(folder, tmp_path, **limits)), kind, "sensors", ROWS)
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
        bursts = [overload.step(BURST * capacity, BURST_SECONDS, BURST_CALLERS) for _ in range(BURSTS)]
        steady = base.result()
    show(f"{BETWEEN} times the capacity: {steady}")
    for burst in bursts:
        show(f"a burst of {BURST} times: {burst}")
    assert sum(burst.refused for burst in bursts) > 0
    assert not [fault for burst in [*bursts, steady] for fault in faults(BETWEEN, burst, capacity)]


def test_no_late_request_is_computed_at_twice_the_capacity(
    folder: Path, tmp_path: Path, show: Callable[[object], None]
) -> None:
    rows = tmp_path / "rows"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROWS", str(rows))
        planted.plant("dated-device", patch)
        with serving(folder, tmp_path, max_batch_sequences="2", idle_seconds="600") as server:
            overload, before = Overload.of(server, "http", "sensors", ROWS), at_rest(server)
            step = overload.step(2 * overload.capacity(SECONDS), scaled(LATE_LOAD_SECONDS))
            at_rest(server).since(before).check()
    batches = [line.split() for line in rows.read_text().splitlines()]
    computed, late = (sum(int(batch[place]) for batch in batches) for place in (0, 1))
    show(f"{step}; {computed} rows computed, {late} late")
    assert computed and not late and step.refused + step.expired and not step.other
    assert step.late <= step.answered // 100


# Health checks and /metrics.


@pytest.mark.parametrize("names", [["engine-0", "frontend-1"], ["supervisor"]], ids=" and ".join)
def test_metrics_answer_within_300_ms_while_processes_are_stopped(names: list[str], folder: Path, tmp_path: Path) -> None:
    """The last values of a process that does not answer are known. A frontend knows those of its last scrape, so without the supervisor
    there is one frontend."""
    frontends = "1" if "supervisor" in names else "2"
    with serving(folder, tmp_path, "--health-port", "0", frontends=frontends) as server, ExitStack() as stops:
        assert server.infer("sensors", [ROWS]).status_code == 200
        before = server.metric("seqserve_requests_accepted_total")
        for name in names:
            stops.enter_context(stopped(processes(server)[name]))
        address = server.health if "supervisor" not in names else server.address  # the supervisor has the health port
        probes = Probes(address, "/metrics")
        with probes.running():
            eventually(lambda: len(probes.seconds["/metrics"]) > SCRAPES)
        assert median(probes.seconds["/metrics"]) < LIMITS_SECONDS["/metrics"], probes.seconds
        text = httpx.get(f"{address}/metrics", timeout=LIMIT_SECONDS, trust_env=False).text
        assert f"seqserve_requests_accepted_total {before}" in text
        stops.close()
        eventually(server.ready)


def test_health_port_answers_in_time_during_overload(folder: Path, tmp_path: Path, show: Callable[[object], None]) -> None:
    """Twenty times as many requests arrive as the service answers."""
    with serving(folder, tmp_path, "--health-port", "0", frontends="2") as server:
        overload, probes = Overload.of(server, "http", "sensors", ROWS), Probes(server.health, *LIMITS_SECONDS)
        rate = 20 * overload.capacity(SECONDS)
        with probes.running():
            step = overload.step(rate, SECONDS)
    show(f"{step}; { ({path: max(seconds) for path, seconds in probes.seconds.items()}) }")
    assert [path for path, limit in LIMITS_SECONDS.items() if max(probes.seconds[path]) > limit + LAGS * step.lag] == []
