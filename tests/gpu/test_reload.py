"""Models that are loaded on a GPU while it answers: on a stream and in memory of their own until they serve."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import uvloop

from service.repository import POLICY
from tests import models
from tests.reloading import Load, answered, load
from tests.serving import eventually, serving

RELOADS, WARM = 12, 4
"""How many, and after how many of them memory is as large as it will be."""
SHARE = 0.5
"""Of the capacity. Graphs are captured on the device that answers."""
RESERVED = "seqserve_device_reserved_bytes"


def test_reloads_under_load_lose_no_request_mix_no_versions_and_leave_no_memory_behind(tmp_path: Path) -> None:
    root = tmp_path / "models"
    models.words(root, bidirectional=False)
    (root / "words" / POLICY).write_text('serve = "latest"')
    with serving(root, tmp_path, "--device", "cuda:0") as server, ThreadPoolExecutor(1) as thread:
        rate = SHARE * uvloop.run(Load(server).capacity())
        load_of, expected, held = Load(server), {"1": answered(server)[1]}, list[float]()
        running = thread.submit(uvloop.run, load_of.keep(rate))
        try:
            for version in range(2, RELOADS + 2):
                models.words(root, version=version, seed=version, bidirectional=False)
                load(server, "words")
                newest, expected[str(version)] = answered(server)
                assert newest == str(version)
                eventually(lambda version=version: len(server.events("unloaded")) == version - 1, within_seconds=10)  # type: ignore[misc]
                held.append(server.metric(RESERVED))
        finally:
            load_of.ended.set()
        running.result()
        print(f"{load_of.check(expected)} requests at {rate:.0f}/s, {RELOADS} reloads: 0 failed; reserved {held}")
        assert held[WARM:] == [held[WARM]] * (RELOADS - WARM)
        assert server.metric("seqserve_graphs", model="words") > 0
