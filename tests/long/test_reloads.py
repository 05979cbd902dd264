"""What 200 replaced versions of a model leave behind in the processes of a server: nothing. Runs only when the folder is named:
`make test-long`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import models
from tests.reloading import answered, load
from tests.serving import eventually, serving
from tests.steady import open_files, processes, resident_bytes

WARM_UP, RELOADS = 40, 200
LIMIT = 2 << 20
"""Bytes by which a process may have grown by then; weights, tables and buffers of one version are more."""


def test_no_process_grows_with_versions_that_were_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
