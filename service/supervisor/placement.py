"""How many frontends the service has, and on which cores its processes run. Decided once, at the start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from service.cores import compute_threads, frontend_count, usable_cores
from service.settings import AUTO, Settings
from service.supervisor import numa
from service.supervisor.gpus import find_gpus

SYS = Path("/sys")


class Placement(NamedTuple):
    """The number of frontends, the threads of each engine, and the cores of the processes that are pinned to a NUMA node."""

    cores: int
    frontends: int
    compute_threads: int
    pinned: dict[str, tuple[int, numa.Cores]]


def place_processes(settings: Settings, sys: Path = SYS) -> Placement:
    """Choose the placement for this machine."""
    cores = usable_cores()
    nodes = numa.read_nodes(sys) if hasattr(os, "sched_setaffinity") else {}
    on_cpu = "cpu" in settings.devices
    needed = not on_cpu and (len(nodes) > 1 or settings.device == settings.frontends == AUTO)
    addresses = find_gpus() if needed else []
    frontends = frontend_count(settings, cores, gpus=not on_cpu and (settings.device != AUTO or bool(addresses)))
    pinned = {}
    if len(nodes) > 1 and addresses:
        engine_nodes = [_engine_node(device, addresses, sys) for device in settings.devices]
        pinned = numa.plan(nodes, engine_nodes, os.sched_getaffinity(0), frontends)
    return Placement(cores, frontends, compute_threads(cores, frontends, len(settings.devices)), pinned)


def _engine_node(device: str, addresses: list[str], sys: Path) -> int | None:
    """Return the NUMA node of an engine's GPU; auto is the first GPU."""
    number = 0 if device == AUTO else int(device.removeprefix("cuda:"))
    return numa.gpu_node(sys, addresses[number]) if number < len(addresses) else None
