"""The processor cores that the service may use, and how its processes share them."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

from service.control_groups import control_groups
from service.settings import Settings

CORES_PER_CPU_FRONTEND = 4
"""On a CPU the engines compute on the cores that the frontends leave, and a request costs them more than it costs a frontend."""
FRONTENDS_PER_ENGINE = 8
"""More frontends would take memory, and split the requests for an engine into smaller blocks."""


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use: its affinity, limited by the CPU limit of its container."""
    # Only Linux knows the affinity. Elsewhere, these are the cores of the machine.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(cores, cpu_limit(root))))


def cpu_limit(root: Path) -> float:
    """Return the CPU time per second that this process's control groups allow; infinity without a limit."""
    return min([math.inf, *map(_quota, control_groups("cpu", root))])


def frontend_count(settings: Settings, cores: int, *, gpus: bool) -> int:
    """Return the number of frontends, which `auto` chooses by the cores. gpus: whether every engine runs on a GPU.

    An engine on a GPU occupies one core. Frontends get half of the other cores: decoders, the network and the supervisor need some too.
    """
    if isinstance(settings.frontends, int):
        return settings.frontends
    engines = len(settings.devices)
    share = (cores - engines) // 2 if gpus else cores // CORES_PER_CPU_FRONTEND
    return max(1, min(share, FRONTENDS_PER_ENGINE * engines))


def compute_threads(cores: int, frontends: int, engines: int) -> int:
    """Return the threads of one engine: the engines share the cores that the frontends leave free."""
    return max(1, (cores - frontends) // engines)


def _quota(group: Path) -> float:
    """Return the CPU time per second that a control group allows, from the files of version 2 or version 1."""
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (group / "cpu.max").read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota_us = int((group / "cpu.cfs_quota_us").read_text())
        return math.inf if quota_us < 0 else quota_us / int((group / "cpu.cfs_period_us").read_text())
    return math.inf
