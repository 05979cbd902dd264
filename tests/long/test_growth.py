"""What a server holds does not grow: with requests of many kinds, abandoned sessions, loads and unloads, and with calls
of Triton's client libraries, which do not grow either."""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import uvloop

from loadtest.target import Target
from service.modeling import spec
from tests import models
from tests.accumulator import NEW, Account, rests, start_sessions
from tests.callers import Caller
from tests.long import scaled
from tests.mixed import ROUND, mixed, send
from tests.reloading import TEXT, Load, answered, load
from tests.serving import Server, eventually, serving
from tests.steady import (
    Sample,
    growing,
    growth,
    open_files,
    processes,
    resident_bytes,
    sample,
    settled_open_files,
    slope,
)

ROOT = Path(__file__).resolve().parents[2]
REQUESTS, SAMPLES, CALLERS = 1_000_000, 100, 16
MOST_BYTES = 2 << 20
"""Largest growth of a process with versions. Weights, tables and buffers of one version are larger."""
SESSIONS, WAVE = 100_000, 2000
"""Sessions that are abandoned, in all and at once, nearly as many as may be open."""
BROKEN_RELOADS, RATE = 50, 100
STORM_CALLERS, STORM_CHANGES, WARM_UP_CHANGES = 32, 1024, 128
STORM_MODELS = [f"accumulator{number}" for number in range(4)]
DOCUMENTED = {200, 400, 404, 409, 503}
LIBRARIES, CALLS, SAMPLE_CALLS, LONGEST = ("http", "grpc"), 100_000, 1000, 64

Show = Callable[[object], None]


def test_no_process_grows_in_a_million_requests(tmp_path: Path, show: Show) -> None:
    """The embedded models, and a model of each head."""
    folder, found = tmp_path / "models", list[dict[str, Sample]]()
    shutil.copytree(ROOT / "models", folder)
    for make in models.OF_EVERY_HEAD.values():
        make(folder)
    requests = scaled(REQUESTS, 100_000)
    every = max(1, requests // ROUND // SAMPLES)
    with serving(folder, tmp_path, "--device", "cpu") as server:
        # With its first connection the event loop opens one descriptor, which it keeps.
        server.infer("words", ["how far"])
        server.client.close()
        files = settled_open_files(server)

        def after_round(sent: int) -> None:
            if sent >= requests / 2 and sent // ROUND % every == 0:
                found.append(sample(server, sent))

        send(server.address, mixed(folder), rounds=requests // ROUND, callers=CALLERS, after_round=after_round)
        eventually(lambda: open_files(server) == files)
    slopes = growth(found)
    show({name: f"{each.middle:.2g} ({each.low:.2g} to {each.high:.2g})" for name, each in slopes.items()})
    assert {name: one.pid for name, one in found[0].items()} == {name: one.pid for name, one in found[-1].items()}
    assert not growing(slopes)
    assert {name: one.threads for name, one in found[0].items()} == {name: one.threads for name, one in found[-1].items()}


def test_100_000_abandoned_sessions_leave_nothing_behind(tmp_path: Path, show: Show) -> None:
    """The engine remembers the names of expired sessions, up to twice as many as may be open."""
    models.accumulator(tmp_path / "models")
    waves, found = max(12, scaled(SESSIONS) // WAVE), list[dict[str, Sample]]()
    with serving(tmp_path / "models", tmp_path, session_idle_seconds="1", max_sessions=str(WAVE)) as server:
        for wave in range(waves):
            assert start_sessions(server.address, [f"{wave} {number}" for number in range(WAVE)]) == {200: WAVE}
            eventually(lambda: rests(server))
            found.append(sample(server, (wave + 1) * WAVE))
        assert server.metric("seqserve_sessions_ended_total", reason="expired") == waves * WAVE
    slopes = growth(found[2:])  # until then the engine has learned as many names as it remembers
    show(slopes)
    assert not growing(slopes)


# Versions that are broken.


def exchange_weights(folder: Path) -> None:
    """Change a number: the digest is that of other weights."""
    weights = folder / spec.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\x80?")


BREAKS: tuple[Callable[[Path], object], ...] = (
    lambda folder: os.truncate(folder / spec.WEIGHTS, 100),
    exchange_weights,
    lambda folder: (folder / spec.WEIGHTS).unlink(),
    lambda folder: (folder / spec.MODEL).write_text("name = "),
    lambda folder: (folder / spec.MODEL).unlink(),
)


def test_50_broken_versions_leave_the_old_one(tmp_path: Path) -> None:
    """No request fails meanwhile, and all answers are of the old version."""
    root, reloads = tmp_path / "models", scaled(BROKEN_RELOADS, len(BREAKS))
    models.words(root)
    with serving(root, tmp_path) as server, ThreadPoolExecutor(1) as pool:
        before, expected, loading = processes(server), dict([answered(server)]), Load(server)
        keeping = pool.submit(lambda: asyncio.run(loading.keep(RATE)))
        try:
            for version, damage in enumerate(islice(cycle(BREAKS), reloads), start=2):
                models.words(root, version=version, seed=version)
                damage(root / "words" / str(version))
                load(server, "words", status=400, policy={"specific": {"versions": [version]}})
                shutil.rmtree(root / "words" / str(version))
        finally:
            loading.ended.set()
            keeping.result()
        assert loading.check(expected) > reloads
        assert server.metric("seqserve_model_changes_total", outcome="invalid_model") == reloads
        assert processes(server) == before


# Many callers that load and unload.


async def storm(server: Server, changes: int) -> Counter[int]:
    """Let callers load and unload this many times each, with a request to words after each change. Returns the statuses."""
    infer, statuses = Target.of(server.address, "/infer"), Counter[int]()
    request = infer.request(json.dumps({"model": "words", "inputs": [TEXT]}).encode())

    async def change_often(number: int) -> None:
        caller = await Caller.connect(infer)
        for change in range(changes):
            name = STORM_MODELS[(number + change // 2) % len(STORM_MODELS)]
            verb = "unload" if (number + change) % 2 else "load"
            reply = await caller.ask(infer._replace(path=f"/v2/repository/models/{name}/{verb}").request(b"{}"))
            statuses[reply.status] += 1
            assert reply.status in DOCUMENTED, reply.body
            reply = await caller.ask(request)
            assert reply.status == 200, reply.body
        caller.hang_up()

    async with asyncio.TaskGroup() as callers:
        for number in range(STORM_CALLERS):
            callers.create_task(change_often(number))
    return statuses


def at_peace(server: Server) -> dict[str, Sample]:
    """Return the resources of each process while each model is served."""
    for name in STORM_MODELS:
        load(server, name)
        assert server.infer(name, [[2]]).status_code == 200
    settled_open_files(server)
    return sample(server, 0)


def grown(before: dict[str, Sample], after: dict[str, Sample], show: Show) -> list[str]:
    """Return the additional resources of the processes, and the processes that were replaced."""
    show({name: f"{(one.bytes - before[name].bytes) / 2**20:.2f} MiB more" for name, one in after.items()})
    return [
        f"{name}: {one}, before {before[name]}"
        for name, one in after.items()
        if (one.pid, one.threads, one.descriptors) != (before[name].pid, before[name].threads, before[name].descriptors)
        or one.bytes - before[name].bytes >= MOST_BYTES
    ]


def test_32_callers_load_and_unload_1024_times(tmp_path: Path, show: Show) -> None:
    """Each call gets a documented status, no request to another model fails, and the service holds no more than after the warm-up."""
    root, changes = tmp_path / "models", scaled(STORM_CHANGES)
    models.words(root)
    for name in STORM_MODELS:
        models.accumulator(root, name)
    with serving(root, tmp_path) as server:
        uvloop.run(storm(server, WARM_UP_CHANGES))
        before = at_peace(server)
        statuses = uvloop.run(storm(server, changes))
        assert statuses.total() == STORM_CALLERS * changes
        assert grown(before, at_peace(server), show) == []


# Triton's client libraries. The project has none of its own.


def call(library: str, address: str, calls: int) -> None:
    """Call a server with a library, check each answer, and print how many calls were sent and the memory of this process."""
    triton: Any = importlib.import_module(f"tritonclient.{library}")
    chance = random.Random(0)
    with triton.InferenceServerClient(address) as client:
        for number in range(1, calls + 1):
            values = chance.choices((-1, 0, 1), k=chance.randint(1, LONGEST))
            tensor = triton.InferInput("ids", [1, len(values)], "INT32")
            tensor.set_data_from_numpy(np.array([values], np.int32) + 1)
            answer = client.infer("accumulator", [tensor], outputs=[triton.InferRequestedOutput("value")])
            told = Account.told(answer.as_numpy("value")[0].tolist())
            assert told == NEW.plus(values), (told, values)
            if number % SAMPLE_CALLS == 0:
                gc.collect()  # the garbage of a sample would depend on when the last collection was
                print(number, resident_bytes("self"), flush=True)


def test_100_000_requests_of_each_library_grow_nothing(tmp_path: Path, show: Show) -> None:
    pytest.importorskip("tritonclient", reason="tritonclient is missing")
    models.accumulator(tmp_path / "models")
    calls = scaled(CALLS, 60_000)
    with serving(tmp_path / "models", tmp_path) as server:
        of_server: list[dict[str, Sample]] = []

        def samples(library: str) -> list[tuple[int, int]]:
            address, found = urlsplit(server.address).netloc if library == "http" else server.grpc, []
            command = [sys.executable, "-m", __name__, library, address, str(calls)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as client:
                for line in client.stdout or ():
                    sent, held = map(int, line.split())
                    found.append((sent, held))
                    if library == LIBRARIES[0]:
                        of_server.append(sample(server, sent))
            assert client.returncode == 0
            return found[len(found) // 2 :]

        with ThreadPoolExecutor() as pool:
            of_clients = dict(zip(LIBRARIES, pool.map(samples, LIBRARIES), strict=True))
    slopes = growth(of_server[len(of_server) // 2 :])
    slopes |= {f"{name} client bytes": found for name, points in of_clients.items() if (found := slope([points]))}
    show(slopes)
    assert not growing(slopes)


if __name__ == "__main__":
    call(sys.argv[1], sys.argv[2], int(sys.argv[3]))
