"""The placement of the processes on a machine: which are pinned to which cores, from fake files of the system."""

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
from service.supervisor.numa import Cores, format_cores, gpu_node, parse_cores, plan, read_nodes
from service.supervisor.placement import Placement, place_processes
from service.supervisor.process import pinned

TWO_NODES = {0: frozenset(range(8)), 1: frozenset(range(8, 16))}
ALL = set(range(16))
ADDRESSES = ["0000:1b:00.0", "0000:c3:00.0"]
WHERE = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]


def nodes_of(planned: dict[str, tuple[int, Cores]], role: str) -> list[int]:
    return [node for name, (node, _) in sorted(planned.items()) if name.startswith(role)]


@pytest.mark.parametrize(
    "engine_nodes, frontends, frontend_nodes",
    [
        ([0], 3, [0, 0, 0]),
        ([1], 1, [1]),
        ([0, 1], 4, [0, 0, 1, 1]),
        ([1, 0], 4, [0, 0, 1, 1]),
        ([0, 0, 1], 6, [0, 0, 0, 0, 1, 1]),
        ([0, 0, 1], 2, [0, 1]),
        ([0, 0, 1], 1, [0]),
        ([0, 0, 1, 1], 6, [0, 0, 0, 1, 1, 1]),
    ],
)
def test_frontends_follow_the_engines(engine_nodes: Sequence[int], frontends: int, frontend_nodes: list[int]) -> None:
    planned = plan(TWO_NODES, engine_nodes, ALL, frontends)
    assert nodes_of(planned, "engine") == list(engine_nodes)
    assert nodes_of(planned, "frontend") == frontend_nodes
    assert all(cores == TWO_NODES[node] for node, cores in planned.values())
    planned = plan(TWO_NODES, engine_nodes, ALL - {0, 9}, frontends)
    assert all(cores == TWO_NODES[node] - {0, 9} for node, cores in planned.values()), "only usable cores"


@pytest.mark.parametrize("frontends, pinned", [(7, True), (8, False)])
def test_nothing_is_pinned_when_a_node_has_too_few_cores(frontends: int, pinned: bool) -> None:
    assert bool(plan(TWO_NODES, [0], ALL, frontends)) == pinned


@pytest.mark.parametrize(
    "nodes, engine_nodes, usable",
    [
        ({}, [0], ALL),
        ({0: frozenset(range(16))}, [0], ALL),
        ({0: frozenset(range(16)), 1: frozenset()}, [0], ALL),
        (TWO_NODES, [0], set(range(8))),
        (TWO_NODES, [None], ALL),
        (TWO_NODES, [0, None], ALL),
        (TWO_NODES, [2], ALL),
    ],
    ids=["no nodes", "one node", "a node without cores", "a node with no usable core", "CPU", "GPU and CPU", "unknown node"],
)
def test_nothing_is_pinned_without_two_usable_nodes_and_the_nodes_of_all_engines(
    nodes: dict[int, Cores], engine_nodes: Sequence[int | None], usable: set[int]
) -> None:
    assert plan(nodes, engine_nodes, usable, 2) == {}


@pytest.mark.parametrize("text, cores", [("0", {0}), ("0-2", {0, 1, 2}), ("0-1,4,6-7", {0, 1, 4, 6, 7}), ("", set())])
def test_lists_of_cores_are_read_and_written(text: str, cores: set[int]) -> None:
    assert parse_cores(f"{text}\n") == cores
    assert format_cores(cores) == text


def test_nodes_are_read_from_the_system(tmp_path: Path) -> None:
    assert read_nodes(tmp_path) == {}
    for name, cores in (("node0", "0-3\n"), ("node12", "4-7\n"), ("nodes", "8\n")):
        folder = tmp_path / "devices/system/node" / name
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores)
    assert read_nodes(tmp_path) == {0: frozenset({0, 1, 2, 3}), 12: frozenset({4, 5, 6, 7})}


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


def test_node_of_a_gpu_may_be_unknown(tmp_path: Path) -> None:
    folder = tmp_path / "bus/pci/devices/0000:1b:00.0"
    folder.mkdir(parents=True)
    assert gpu_node(tmp_path, "0000:1b:00.0") is None
    for written, node in (("1\n", 1), ("-1\n", None), ("", None)):
        (folder / "numa_node").write_text(written)
        assert gpu_node(tmp_path, "0000:1b:00.0") == node


@pytest.mark.parametrize("settings", [Settings(frontends=1), Settings(device="cpu"), Settings(device="cuda:0")])
def test_driver_is_asked_only_when_the_answer_matters(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "find_gpus", lambda: pytest.fail("asked"))
    place_processes(settings, machine(tmp_path, 1))


def test_gpus_have_the_addresses_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that fails is an error, and one that cannot be asked has no GPUs."""

    def count(number: Any) -> int:
        number._obj.value = len(ADDRESSES)
        return 0

    def address(text: Any, size: int, device: int) -> int:
        text.value = ADDRESSES[device].upper().encode()
        return 0

    def driver(status: int) -> Any:
        return SimpleNamespace(cuInit=lambda _: status, cuDeviceGetCount=count, cuDeviceGetPCIBusId=address)

    assert gpus.read_addresses(driver(0)) == ADDRESSES
    with pytest.raises(OSError, match="999"):
        gpus.read_addresses(driver(999))
    run = subprocess.run
    for command in (["false"], ["echo", "no JSON"], ["no-such-program"]):
        monkeypatch.setattr(subprocess, "run", lambda _, command=command, **options: run(command, **options))
        assert gpus.find_gpus() == []


def test_pinned_process_has_its_cores_and_the_parent_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine. Cores that it lacks change nothing."""
    monkeypatch.undo()
    before = os.sched_getaffinity(0)
    for cores, expected in (({min(before)}, [min(before)]), (None, sorted(before)), ({1 << 15}, sorted(before))):
        with pinned(cores):
            assert json.loads(subprocess.check_output(WHERE)) == expected
    assert os.sched_getaffinity(0) == before
