"""Memory, descriptors and threads of a server's processes during a million requests of many kinds. `make test-all` runs this folder."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import models
from tests.long import soak
from tests.long.soak import Sample, Slope
from tests.mixed import ROUND, mixed, send
from tests.serving import eventually, serving
from tests.steady import open_files, settled_open_files

ROOT = Path(__file__).resolve().parent.parent.parent
REQUESTS = 1_000_000
SAMPLES = 100
CALLERS = 16
LIMIT_BYTES = 10.0
"""Bytes per request: 1 MiB in 100,000 requests. The whole interval of confidence of a process that does not grow lies below it."""
Samples = Sequence[dict[str, Sample]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder with the embedded models and one model per head."""
    root = tmp_path_factory.mktemp("models")
    shutil.copytree(ROOT / "models", root, dirs_exist_ok=True)
    for make in models.OF_EVERY_HEAD.values():
        make(root)
    return root


@pytest.fixture
def samples(folder: Path, tmp_path: Path) -> Samples:
    """Samples of each process of a server under load, from the second half of the requests. Fails if a descriptor stays open."""
    found, rounds = list[dict[str, Sample]](), REQUESTS // ROUND
    with serving(folder, tmp_path, "--device", "cpu") as server:
        # With its first connection the event loop opens one descriptor, which it keeps.
        server.infer("words", ["how far"])
        server.client.close()
        files = settled_open_files(server)

        def sample(sent: int) -> None:
            if sent >= REQUESTS / 2 and sent // ROUND % max(1, rounds // SAMPLES) == 0:
                found.append(soak.sample(server, sent))

        send(server.address, mixed(folder), rounds=rounds, callers=CALLERS, after_round=sample)
        eventually(lambda: open_files(server) == files)
    assert len({one.pid for each in found for one in each.values()}) == len(found[0]), "a process was replaced"
    return found


def surely_below(slopes: dict[str, Slope]) -> set[str]:
    """Return the processes that surely grow by less than the limit."""
    return {role(name) for name, slope in slopes.items() if name.endswith(" bytes") and slope.high <= LIMIT_BYTES}


def role(name: str) -> str:
    return name.partition(" ")[0]


def test_no_process_grows_in_a_million_requests(samples: Samples, capsys: pytest.CaptureFixture[str]) -> None:
    slopes = soak.growth(samples)
    with capsys.disabled():
        print()
        for name, slope in slopes.items():
            print(f"{name} per request: {slope.middle:.2g}, from {slope.low:.2g} to {slope.high:.2g}")
    assert surely_below(slopes) == {"supervisor", "engine", "frontend"}
    first, last = samples[0], samples[-1]
    assert {name: one.threads for name, one in last.items()} == {name: one.threads for name, one in first.items()}
