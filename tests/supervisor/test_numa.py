"""Which processes are pinned to which cores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from service.supervisor.numa import Cores, format_cores, gpu_node, parse_cores, plan, read_nodes

TWO_NODES = {0: frozenset(range(8)), 1: frozenset(range(8, 16))}
ALL = set(range(16))


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


@pytest.mark.parametrize("written, node", [("1\n", 1), ("-1\n", None), ("", None), (None, None)])
def test_node_of_a_gpu_may_be_unknown(written: str | None, node: int | None, tmp_path: Path) -> None:
    folder = tmp_path / "bus/pci/devices/0000:1b:00.0"
    folder.mkdir(parents=True)
    if written is not None:
        (folder / "numa_node").write_text(written)
    assert gpu_node(tmp_path, "0000:1b:00.0") == node
