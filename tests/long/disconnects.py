"""Waves of clients that disconnect, and a device whose steps the test allows one by one.

All times are steps of the device: the resources of a client must be free before the step during which it leaves ends. The load of the
machine changes how long a step takes, and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests import models, planted
from tests.accumulator import REST, at_rest, counts
from tests.long.visits import BODY, HTTP, REPLY, Endpoints, Visit, visits
from tests.planted import Gate
from tests.serving import Server, eventually, serving
from tests.steady import open_files, processes

STEPS = 8
"""Steps of the device in a wave. The same number of clients leaves during each step."""
AT_ONCE = 100
EXACT, EXEMPLAR, REMEMBERED = ("Task ", "bytes of bodies "), "Example ", 8
"""Resources that must not grow at all, traced examples of which a metric keeps one for each bucket, and how many objects of a type a
process may keep of the last requests."""
SETTINGS = {
    "max_waiting": "4096",
    "max_batch_sequences": "256",
    "batch_budget_ms": "0.001",
    "state_slots": "512",
    **dict.fromkeys(("default_deadline_ms", "max_deadline_ms"), "3600000"),
    **dict.fromkeys(("idle_seconds", "session_idle_seconds"), "3600"),
    "lame_duck_seconds": "0",
}
"""Queues with room for a wave, batches of a few time steps of each sequence, and no limit of time."""


@dataclass(frozen=True)
class Service:
    """A running server with a gate, and the folder of its censuses."""

    server: Server
    gate: Gate
    censuses: Path

    def figures(self) -> Counter[str]:
        """Return all metrics, each summed over its labels."""
        figures: Counter[str] = Counter()
        for family in text_string_to_metric_families(self.server.scrape()):
            for sample in family.samples:
                figures[sample.name.removeprefix("seqserve_")] += int(sample.value)
        return figures

    def batches(self) -> int:
        return self.figures()["batches_total"]

    def holds(self) -> tuple[int, int]:
        """Return the requests that the frontend has, and the sequences that the engine has."""
        figures = self.figures()
        return figures["requests_in_flight"], figures["queue_depth"] + figures["sequences_begun"]

    def held(self) -> set[str]:
        """Return the names of the resources that are held."""
        figures = self.figures()
        return {name for name in REST if figures[name]}

    def descriptors(self) -> dict[str, int]:
        """Return the open descriptors of each process that clients can reach. A process that exports traces connects at any time."""
        return {name: count for name, count in open_files(self.server).items() if not name.startswith("tracer")}

    def census(self) -> dict[str, dict[str, int]]:
        """Return the objects that each frontend and each engine holds, by type. The supervisor holds nothing of a client."""
        pids = {name: pid for name, pid in processes(self.server).items() if name.startswith(("frontend", "engine"))}
        for pid in pids.values():
            (self.censuses / str(pid)).unlink(missing_ok=True)
        (self.censuses / "wanted").touch()
        eventually(lambda: counts(self.server) and all((self.censuses / str(pid)).exists() for pid in pids.values()))
        (self.censuses / "wanted").unlink()
        return {name: json.loads((self.censuses / str(pid)).read_text()) for name, pid in pids.items()}


@contextmanager
def gated(folder: Path, *flags: str, token: str = "", **settings: str) -> Iterator[Service]:
    """A server with a gate. token: of a key that may read metrics."""
    models.accumulator(folder / "models")
    (folder / "censuses").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GATE", str(folder / "gate"))
        patch.setenv("CENSUS", str(folder / "censuses"))
        planted.plant("gated-device,census", patch)
        gate = Gate(folder / "gate")
        with serving(folder / "models", folder, *flags, **(SETTINGS | settings)) as server:
            server.client.headers.update({"authorization": f"Bearer {token}"} if token else {})
            yield Service(server, gate, folder / "censuses")


async def begin(clients: Sequence[Visit]) -> None:
    """Begin all visits, some at once."""
    waiting = iter(clients)

    async def work() -> None:
        for client in waiting:
            await client.begin()

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work())


def settle(what: str, read: Callable[[], object], expected: object) -> None:
    """Wait until something has its expected value."""
    try:
        eventually(lambda: read() == expected)
    except AssertionError:
        raise AssertionError(f"{what}: {read()} and not {expected}") from None


async def wave(service: Service, clients: Sequence[Visit]) -> None:
    """Let clients come, and leave during their steps. Fails if a resource of theirs is not free before the step may end."""
    try:
        service.gate.open()
        await begin([client for client in clients if client.point == REPLY])
        await reach(service, [])
        service.gate.let(0)
        before = service.batches()
        await begin([client for client in clients if client.point != REPLY])
        await reach(service, clients)
        for step in range(1, STEPS + 1):
            await leave(service, clients, step)
            assert service.batches() == before + step - 1, "a step ended although the gate was closed"
            service.gate.let(1)
            await asyncio.to_thread(settle, "batches", service.batches, before + step)
    finally:
        for client in clients:
            client.hang_up()


async def leave(service: Service, clients: Sequence[Visit], step: int) -> None:
    """Let the clients of a step leave, in random order, and wait until all their resources are free."""
    leaving = [client for client in clients if client.step == step]
    random.Random(step).shuffle(leaving)
    for client in leaving:
        client.leave()
    remaining = [client for client in clients if client.step > step]
    await reach(service, remaining)
    if not remaining:
        await asyncio.to_thread(settle, "held", service.held, set())


async def reach(service: Service, remaining: Sequence[Visit]) -> None:
    """Wait until the service has the requests of these clients and no others."""
    expected = sum(client.counted for client in remaining), sum(client.complete for client in remaining)
    await asyncio.to_thread(settle, "requests and sequences", service.holds, expected)


def grown(before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]) -> dict[str, int]:
    """Return by how many the numbers of tasks and of objects have grown, unless a process may remember as many."""
    more = {
        f"{kind} of {name}": count - before[name].get(kind, 0)
        for name, counts in after.items()
        for kind, count in counts.items()
    }
    return {
        kind: count
        for kind, count in more.items()
        if count > (0 if kind.startswith(EXACT) else REMEMBERED) and not kind.startswith(EXEMPLAR)
    }


def outcomes_of(clients: Sequence[Visit]) -> Counter[str]:
    """Return the outcomes that the requests of clients must have. A reply that is written counts before it has arrived."""
    gone = sum(client.complete or (client.kind, client.point) == (HTTP, BODY) for client in clients)
    return Counter(ok=sum(client.point == REPLY for client in clients), client_gone=gone)


def check_wave(service: Service, count: int, seed: int, headers: tuple[str, ...] = ()) -> list[Visit]:
    """Let one wave of clients come and leave, and check that they leave nothing behind. Returns the clients."""
    server = service.server
    clients = visits(Endpoints(server.address, server.grpc, headers), STEPS, count, seed)
    before, files, census, batches = at_rest(server), service.descriptors(), service.census(), service.batches()
    asyncio.run(wave(service, clients))
    ran = service.batches()
    service.gate.open()
    settle("descriptors", service.descriptors, files)
    settle("objects", lambda: grown(census, service.census()), {})
    now = at_rest(server).since(before)
    now.check()
    assert now.outcomes == outcomes_of(clients), f"{now.outcomes} and not {outcomes_of(clients)}"
    assert service.batches() == ran > batches, "a step ran for clients that had left"
    return clients
