"""NUMA: the processor cores near each GPU, and which of them each process gets. Reads /sys and changes nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path

from service.supervisor.process import ENGINE, FRONTEND

Cores = frozenset[int]


def read_nodes(sys: Path) -> dict[int, Cores]:
    """Return the cores of each NUMA node; none where the system does not tell."""
    nodes = {}
    for file in sys.glob("devices/system/node/node*/cpulist"):
        number = re.fullmatch(r"node(\d+)", file.parent.name)
        if number:
            nodes[int(number[1])] = parse_cores(file.read_text())
    return nodes


def gpu_node(sys: Path, address: str) -> int | None:
    """Return the NUMA node of a GPU by its PCI address, or None if the system does not know it."""
    try:
        node = int((sys / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def plan(
    nodes: Mapping[int, Cores], engine_nodes: Sequence[int | None], usable: Set[int], frontends: int
) -> dict[str, tuple[int, Cores]]:
    """Return the node, and the cores, to which each process is pinned, by its name. Empty: no process is pinned.

    engine_nodes: the node of each engine's GPU, None if it is unknown or the engine runs on a CPU. usable: the cores that the service may
    use. Engines are pinned to the node of their GPU, and frontends are spread over these nodes in proportion to the engines. No process is
    pinned when a node has fewer usable cores than processes: they would wait for each other while other cores are idle.
    """
    usable_nodes = {node: cores & usable for node, cores in nodes.items() if cores & usable}
    known = sorted(node for node in engine_nodes if node in usable_nodes)
    if len(usable_nodes) < 2 or len(known) < len(engine_nodes):
        return {}
    frontend_nodes = [known[(2 * place + 1) * len(known) // (2 * frontends)] for place in range(frontends)]
    node_of = {f"{ENGINE}-{place}": node for place, node in enumerate(engine_nodes) if node is not None}
    node_of |= {f"{FRONTEND}-{place}": node for place, node in enumerate(frontend_nodes)}
    if any(count > len(usable_nodes[node]) for node, count in Counter(node_of.values()).items()):
        return {}
    return {name: (node, usable_nodes[node]) for name, node in node_of.items()}


def parse_cores(text: str) -> Cores:
    """Return the cores of a list as the kernel writes it, such as 0-3,8."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def format_cores(cores: Iterable[int]) -> str:
    """Return a list of cores as the kernel writes it."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and ranges[-1][1] == core - 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
