"""How many cores the service may use, and how its processes share them."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from service.cores import compute_threads, cpu_limit, frontend_count, usable_cores
from service.settings import Settings


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    "device, cores, frontends",
    [
        *(("cpu", cores, frontends) for cores, frontends in ((1, 1), (7, 1), (8, 2), (32, 8), (256, 8))),
        *(("cpu,cpu", cores, frontends) for cores, frontends in ((2, 1), (16, 4), (256, 16))),
        *(("cuda:0", cores, frontends) for cores, frontends in ((1, 1), (4, 1), (5, 2), (8, 3), (16, 7), (64, 8))),
        *(("cuda:0,cuda:1", cores, frontends) for cores, frontends in ((2, 1), (32, 15), (64, 16))),
    ],
)
def test_auto_chooses_frontends_by_cores_and_engines(device: str, cores: int, frontends: int) -> None:
    assert frontend_count(Settings(device=device), cores, gpus="cuda" in device) == frontends
    assert frontend_count(Settings(device=device, frontends=5), cores, gpus="cuda" in device) == 5


@pytest.mark.parametrize(
    "cores, frontends, engines, threads", [(8, 1, 1, 7), (8, 2, 2, 3), (8, 1, 3, 2), (2, 1, 2, 1), (1, 4, 1, 1)]
)
def test_engines_share_the_cores_that_frontends_leave(cores: int, frontends: int, engines: int, threads: int) -> None:
    assert compute_threads(cores, frontends, engines) == threads


@pytest.mark.parametrize(
    "files, limit",
    [
        ({}, math.inf),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, math.inf),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2.5),
        ({"proc/self/cgroup": "0::/pod/box\n", "sys/fs/cgroup/pod/box/cpu.max": "150000 50000\n"}, 3),
        (
            {
                "proc/self/cgroup": "0::/pod/box\n",
                "sys/fs/cgroup/pod/cpu.max": "100000 100000\n",
                "sys/fs/cgroup/pod/box/cpu.max": "400000 100000\n",
            },
            1,
        ),
        ({"proc/self/cgroup": "0::/of/the/host\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        (
            {
                "proc/self/cgroup": "5:memory:/\n4:cpu,cpuacct:/box\n0::/\n",
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            math.inf,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "nonsense\n"}, math.inf),
    ],
)
def test_cpu_limit_is_the_smallest_of_all_control_groups(files: dict[str, str], limit: float, tmp_path: Path) -> None:
    write(tmp_path, files)
    assert cpu_limit(tmp_path) == limit


def test_usable_cores_are_whole_and_at_least_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert usable_cores(tmp_path) == 8
    for quota, cores in (("2900000", 8), ("290000", 2), ("50000", 1)):
        write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota} 100000\n"})
        assert usable_cores(tmp_path) == cores
