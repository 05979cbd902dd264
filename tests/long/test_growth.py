"""Memory and descriptors of a server's processes after 100,000 requests of many kinds. `make test-long` runs this folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import models, planted
from tests.mixed import ROUND, mixed, send
from tests.serving import eventually, serving
from tests.steady import WARM_UP, Memory, growing, open_files, settled_open_files

ROOT = Path(__file__).resolve().parent.parent.parent
ROUNDS = 100_000 // ROUND
ROUNDS_OF_A_LEAK = 2 * WARM_UP // ROUND
CALLERS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder with the embedded models and one model per head."""
    root = tmp_path_factory.mktemp("models")
    shutil.copytree(ROOT / "models", root, dirs_exist_ok=True)
    for make in models.OF_EVERY_HEAD.values():
        make(root)
    return root


@pytest.fixture
def slopes(folder: Path, tmp_path: Path, rounds: int, capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    """Return the growth of each process of a server under load, and print it. Fails if a descriptor stays open."""
    with serving(folder, tmp_path, "--device", "cpu") as server:
        # With its first connection the event loop opens one descriptor, which it keeps.
        server.infer("words", ["how far"])
        server.client.close()
        files, memory = settled_open_files(server), Memory(server)
        send(server.address, mixed(folder), rounds=rounds, callers=CALLERS, after_round=memory.sample)
        eventually(lambda: open_files(server) == files)
        slopes = memory.slopes()
    with capsys.disabled():
        print("\nMiB in 100,000 requests:", ", ".join(f"{name} {slope:.2f}" for name, slope in slopes.items()))
    return slopes


@pytest.mark.parametrize("rounds", [ROUNDS])
def test_no_process_grows_under_load(slopes: dict[str, float]) -> None:
    assert not growing(slopes)


@pytest.fixture(params=["engine", "frontend"])
def leaky(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a process that keeps 100 bytes of every request."""
    process: str = request.param
    planted.plant(f"{process}-leak", monkeypatch)
    return process


@pytest.mark.parametrize("rounds", [ROUNDS_OF_A_LEAK])
def test_leak_of_100_bytes_a_request_is_detected(leaky: str, slopes: dict[str, float]) -> None:
    assert {name.partition("-")[0] for name in growing(slopes)} == {leaky}
