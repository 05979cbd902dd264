"""Versions that are replaced 200 times, broken versions under load, and callers that load and unload. `make test-long` runs it."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path

import httpx
import pytest

from service.modeling import spec
from tests import models, planted
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
    """Let the weights be those of another model with the same tensors."""
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


def test_broken_version_that_is_served_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "models"
    models.words(root)
    planted.plant("unverified", monkeypatch)
    with serving(root, tmp_path) as server:
        assert any("exchange_weights" in each for each in broken_reloads(server, root, len(BREAKS)))


# Many callers.

STORM_CALLERS, STORM_CHANGES = 32, 32
DOCUMENTED = {200, 400, 404, 409, 503}


def test_32_callers_load_and_unload(tmp_path: Path) -> None:
    """Each call gets a documented status, and at the end the service is as at the start."""
    root = tmp_path / "models"
    names = [f"words{number}" for number in range(4)]
    for name in (*names, "words"):
        models.words(root, name)

    def change(caller: int) -> Counter[int]:
        statuses = Counter[int]()
        with httpx.Client(base_url=server.address, timeout=600, trust_env=False) as client:
            for number in range(STORM_CHANGES):
                verb = "unload" if (caller + number) % 2 else "load"
                reply = client.post(f"/v2/repository/models/{names[(caller + number // 2) % len(names)]}/{verb}", json={})
                statuses[reply.status_code] += 1
                assert reply.status_code in DOCUMENTED, reply.text
                reply = client.post("/infer", json={"model": "words", "inputs": [TEXT]})
                assert reply.status_code == 200, reply.text
        return statuses

    with serving(root, tmp_path) as server:
        for name in names:
            server.client.post(f"/v2/repository/models/{name}/unload")
            load(server, name)
        before, files = processes(server), settled_open_files(server)
        with ThreadPoolExecutor(STORM_CALLERS) as pool:
            statuses = sum(pool.map(change, range(STORM_CALLERS)), Counter[int]())
        print(dict(statuses))
        for name in names:
            load(server, name)
            answered(server, name)
        assert processes(server) == before
        eventually(lambda: settled_open_files(server) == files)
