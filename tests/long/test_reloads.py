"""Memory and descriptors of a server's processes after 200 replaced versions. `make test-long` runs this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import models
from tests.reloading import answered, load
from tests.serving import eventually, serving
from tests.steady import open_files, processes, resident_bytes

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
