"""The placement of the processes on a machine, from fake files of the system."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from service.settings import Settings
from service.supervisor import gpus, placement
from service.supervisor.placement import Placement, place_processes
from service.supervisor.process import pinned

ADDRESSES = ["0000:1b:00.0", "0000:c3:00.0"]
WHERE = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]


def machine(sys: Path, nodes: int) -> Path:
    """Write the files of a machine with 16 cores, and a GPU on its first node and on its last node."""
    share = 16 // nodes
    for node in range(nodes):
        folder = sys / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{node * share}-{node * share + share - 1}\n")
    for address, node in zip(ADDRESSES, (0, nodes - 1), strict=True):
        folder = sys / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return sys


@pytest.fixture(autouse=True)
def _cores_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setattr(placement, "usable_cores", lambda: 16)
    monkeypatch.setattr(placement, "find_gpus", lambda: list(ADDRESSES))


def pinned_nodes(placed: Placement) -> dict[str, int]:
    return {name: node for name, (node, _) in placed.pinned.items()}


def test_engines_and_frontends_go_to_the_nodes_of_the_gpus(tmp_path: Path) -> None:
    placed = place_processes(Settings(device="cuda:1,cuda:0", frontends=2), machine(tmp_path, 2))
    assert (placed.cores, placed.frontends, placed.compute_threads) == (16, 2, 7)
    assert pinned_nodes(placed) == {"engine-0": 1, "engine-1": 0, "frontend-0": 0, "frontend-1": 1}
    assert placed.pinned["engine-0"][1] == set(range(8, 16))


@pytest.mark.parametrize(("gpus", "placed"), [(ADDRESSES, (7, 9, {0})), ([], (4, 12, set()))])
def test_auto_is_the_first_gpu_or_else_the_cpu(
    gpus: list[str], placed: tuple[int, int, set[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU, most cores are the engine's."""
    monkeypatch.setattr(placement, "find_gpus", lambda: gpus)
    found = place_processes(Settings(), machine(tmp_path, 2))
    assert (found.frontends, found.compute_threads, set(pinned_nodes(found).values())) == placed


@pytest.mark.parametrize(
    "settings, nodes",
    [
        (Settings(frontends=2), 1),
        (Settings(frontends=2, device="cpu"), 2),
        (Settings(frontends=2, device="cuda:0,cpu"), 2),
        (Settings(frontends=2, device="cuda:7"), 2),
    ],
    ids=["one node", "CPU", "GPU and CPU", "missing GPU"],
)
def test_nothing_is_pinned(settings: Settings, nodes: int, tmp_path: Path) -> None:
    assert place_processes(settings, machine(tmp_path, nodes)).pinned == {}


@pytest.mark.parametrize("settings", [Settings(frontends=1), Settings(device="cpu"), Settings(device="cuda:0")])
def test_the_driver_is_asked_only_when_the_answer_matters(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "find_gpus", lambda: pytest.fail("asked"))
    place_processes(settings, machine(tmp_path, 1))


# The driver.


def driver(status: int = 0) -> Any:
    """Return a stand-in for the CUDA driver, with two GPUs."""

    def count(number: Any) -> int:
        number._obj.value = len(ADDRESSES)
        return 0

    def address(text: Any, size: int, device: int) -> int:
        text.value = ADDRESSES[device].upper().encode()
        return 0

    return SimpleNamespace(cuInit=lambda _: status, cuDeviceGetCount=count, cuDeviceGetPCIBusId=address)


def test_gpus_have_the_addresses_of_the_system() -> None:
    assert gpus.read_addresses(driver()) == ADDRESSES
    with pytest.raises(OSError, match="999"):
        gpus.read_addresses(driver(999))


@pytest.mark.parametrize(
    "command",
    [["false"], ["echo", "no JSON"], ["no-such-program"]],
)
def test_a_driver_that_cannot_be_asked_has_no_gpus(command: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda _, **options: run(command, **options))
    assert gpus.find_gpus() == []


# On this machine.


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> int:
    """A core that this process may use."""
    monkeypatch.undo()
    return min(os.sched_getaffinity(0))


def test_pinned_process_has_its_cores_and_the_parent_keeps_its_own(core: int) -> None:
    before = os.sched_getaffinity(0)
    with pinned({core}):
        assert json.loads(subprocess.check_output(WHERE)) == [core]
    assert os.sched_getaffinity(0) == before
    for cores in (None, {1 << 15}):
        with pinned(cores):
            assert json.loads(subprocess.check_output(WHERE)) == sorted(before)
