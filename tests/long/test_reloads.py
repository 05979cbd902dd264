"""Versions that are replaced 200 times, broken versions under load, and callers that load and unload. `make test-all` runs it."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path

import pytest
import uvloop

from loadtest.target import Target
from service.modeling import spec
from tests import models
from tests.callers import Caller
from tests.long.soak import Sample, sample
from tests.reloading import TEXT, Load, answered, load
from tests.serving import Server, eventually, serving
from tests.steady import open_files, processes, resident_bytes, settled_open_files

WARM_UP, RELOADS = 40, 200
LIMIT = 2 << 20
"""Largest growth of a process in bytes. Weights, tables and buffers of one version are larger."""


def test_no_process_grows_with_replaced_versions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "models"
    models.words(root)
    with serving(root, tmp_path) as server:
        held, files = dict[int, dict[str, int]](), dict[int, dict[str, int]]()
        for reloads in range(1, RELOADS + 1):
            models.words(root, seed=reloads)
            load(server, "words")
            answered(server)
            if reloads in (WARM_UP, RELOADS):
                eventually(lambda reloads=reloads: len(server.events("unloaded")) == reloads, within_seconds=10)  # type: ignore[misc]
                held[reloads] = {name: resident_bytes(pid) for name, pid in processes(server).items()}
                files[reloads] = open_files(server)
    grown = {name: held[RELOADS][name] - held[WARM_UP][name] for name in held[RELOADS]}
    with capsys.disabled():
        print(f"\nMiB in {RELOADS - WARM_UP} reloads:", ", ".join(f"{name} {size / 2**20:.2f}" for name, size in grown.items()))
    assert max(grown.values()) < LIMIT
    assert files[RELOADS] == files[WARM_UP]


# Broken versions.

BROKEN_RELOADS, RATE = 50, 100


def cut_weights(folder: Path) -> None:
    weights = folder / spec.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:100])


def exchange_weights(folder: Path) -> None:
    """Replace the weights by weights of another model with the same tensors."""
    weights = folder / spec.WEIGHTS
    content = bytearray(weights.read_bytes())
    content[-4:] = b"\0\0\x80?"
    weights.write_bytes(content)


def forget_weights(folder: Path) -> None:
    (folder / spec.WEIGHTS).unlink()


def damage_model(folder: Path) -> None:
    (folder / spec.MODEL).write_text("name = ")


def forget_model(folder: Path) -> None:
    (folder / spec.MODEL).unlink()


BREAKS: tuple[Callable[[Path], None], ...] = (cut_weights, exchange_weights, forget_weights, damage_model, forget_model)


def broken_reloads(server: Server, root: Path, count: int) -> list[str]:
    """Reload to broken versions under load. Returns the breaks that were served."""
    expected, loading = dict([answered(server)]), Load(server)
    served, thread = [], threading.Thread(target=lambda: asyncio.run(loading.keep(RATE)))
    thread.start()
    try:
        for version, damage in enumerate(islice(cycle(BREAKS), count), start=2):
            models.words(root, version=version, seed=version)
            damage(root / "words" / str(version))
            policy = {"specific": {"versions": [version]}}
            reply = server.client.post(
                "/v2/repository/models/words/load", json={"parameters": {"config": json.dumps({"version_policy": policy})}}
            )
            if reply.status_code != 400:
                served.append(f"{damage.__name__}: {reply.status_code} {reply.text}")
            shutil.rmtree(root / "words" / str(version))
    finally:
        loading.ended.set()
        thread.join()
    if not served:
        assert loading.check(expected) > count
    return served


def test_50_broken_versions_leave_the_old_one(tmp_path: Path) -> None:
    """No request fails, and all answers are of the old version."""
    root = tmp_path / "models"
    models.words(root)
    with serving(root, tmp_path) as server:
        before = processes(server)
        assert broken_reloads(server, root, BROKEN_RELOADS) == []
        assert server.metric("seqserve_model_changes_total", outcome="invalid_model") == BROKEN_RELOADS
        assert processes(server) == before


# Many callers.

STORM_CALLERS, STORM_CHANGES = 32, 1024
WARM_UP_CHANGES = 128
"""Changes of each caller after which the memory pools of all processes have their final size."""
STORM_MODELS = [f"accumulator{number}" for number in range(4)]
DOCUMENTED = {200, 400, 404, 409, 503}


@contextmanager
def storming(root: Path, scratch: Path) -> Iterator[Server]:
    """Run a server with STORM_MODELS, which are loaded and unloaded, and with words, which is served throughout."""
    models.words(root)
    for name in STORM_MODELS:
        models.accumulator(root, name)
    with serving(root, scratch) as server:
        yield server


async def storm(server: Server, changes: int) -> Counter[int]:
    """Let 32 callers load and unload this many times each, with a request to words after each change. Returns the statuses."""
    statuses = Counter[int]()
    async with asyncio.TaskGroup() as callers:
        for caller in range(STORM_CALLERS):
            callers.create_task(change_often(server, caller, changes, statuses))
    return statuses


async def change_often(server: Server, number: int, changes: int, statuses: Counter[int]) -> None:
    infer = Target.of(server.address, "/infer")
    request = infer.request(json.dumps({"model": "words", "inputs": [TEXT]}).encode())
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


def rest(server: Server) -> dict[str, Sample]:
    """Return the resources of each process while each model is served."""
    for name in STORM_MODELS:
        load(server, name)
        assert server.infer(name, [[2]]).status_code == 200
    settled_open_files(server)
    return sample(server, 0)


def growth(before: dict[str, Sample], after: dict[str, Sample]) -> list[str]:
    """Return the additional resources of the processes, and the processes that were replaced."""
    grown = []
    for name, one in after.items():
        old = before[name]
        if (one.pid, one.threads, one.descriptors) != (old.pid, old.threads, old.descriptors):
            grown.append(f"{name}: {one}, before {old}")
        if one.bytes - old.bytes >= LIMIT:
            grown.append(f"{name}: {(one.bytes - old.bytes) / 2**20:.1f} MiB more")
    return grown


def test_32_callers_load_and_unload_1024_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each call gets a documented status, no request to another model fails, and the service holds no more than after the warm-up."""
    with storming(tmp_path / "models", tmp_path) as server:
        uvloop.run(storm(server, WARM_UP_CHANGES))
        before, began = rest(server), time.monotonic()
        statuses = uvloop.run(storm(server, STORM_CHANGES))
        seconds, after = time.monotonic() - began, rest(server)
        with capsys.disabled():
            grown = ", ".join(f"{name} {(after[name].bytes - one.bytes) / 2**20:.2f}" for name, one in before.items())
            print(f"\n{statuses.total()} changes in {seconds:.0f} s: {dict(statuses)}; MiB more: {grown}")
        assert statuses.total() == STORM_CALLERS * STORM_CHANGES
        assert growth(before, after) == []
