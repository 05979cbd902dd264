"""How many cores and how much memory the service may use, by the files of control groups, and how its processes share them."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from service.cores import compute_threads, cpu_limit, frontend_count, usable_cores
from service.memory_limit import NO_LIMIT, PAGES_READINGS, MemoryLimit, MemoryUse
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


V1_QUOTA, V1_PERIOD = "cpu/box/cpu.cfs_quota_us", "cpu/box/cpu.cfs_period_us"


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        (None, {}, math.inf),
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2.5),
        ("0::/\n", {"cpu.max": "nonsense\n"}, math.inf),
        ("0::/pod/box\n", {"pod/box/cpu.max": "150000 50000\n"}, 3),
        ("0::/pod/box\n", {"pod/cpu.max": "100000 100000\n", "pod/box/cpu.max": "400000 100000\n"}, 1),
        ("0::/of/the/host\n", {"cpu.max": "400000 100000\n"}, 4),
        ("5:memory:/\n4:cpu,cpuacct:/box\n0::/\n", {V1_QUOTA: "50000\n", V1_PERIOD: "100000\n"}, 0.5),
        ("1:cpu:/box\n", {V1_QUOTA: "-1\n", V1_PERIOD: "100000\n"}, math.inf),
    ],
)
def test_cpu_limit_is_the_smallest_of_all_control_groups(
    groups: str | None, files: dict[str, str], limit: float, tmp_path: Path
) -> None:
    write(tmp_path, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    if groups is not None:
        write(tmp_path, {"proc/self/cgroup": groups})
    assert cpu_limit(tmp_path) == limit


def test_usable_cores_are_whole_and_at_least_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert usable_cores(tmp_path) == 8
    for quota, cores in (("2900000", 8), ("290000", 2), ("50000", 1)):
        write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota} 100000\n"})
        assert usable_cores(tmp_path) == cores


V2, V1 = "proc/self/cgroup", "sys/fs/cgroup/memory/box/memory"
BOX = "sys/fs/cgroup/box/memory"
STAT = "anon 10\nfile 500\ninactive_file 300\nactive_file 200\n"


def version_2(limit: str, used: str = "900\n", stat: str = STAT) -> dict[str, str]:
    return {V2: "0::/box\n", f"{BOX}.max": limit, f"{BOX}.current": used, f"{BOX}.stat": stat}


def version_1(limit: str) -> dict[str, str]:
    stat = "inactive_file 1\ntotal_inactive_file 300\ntotal_active_file 200\n"
    used, groups = {f"{V1}.usage_in_bytes": "900\n", f"{V1}.stat": stat}, {V2: "5:cpu:/\n4:memory:/box\n0::/\n"}
    return groups | used | {f"{V1}.limit_in_bytes": limit}


@pytest.mark.parametrize(
    "files, use",
    [
        ({}, NO_LIMIT),
        ({V2: "0::/\n"}, NO_LIMIT),
        (version_2("max\n"), NO_LIMIT),
        (version_2("1000\n"), MemoryUse(400, 1000)),
        (version_2("1000\n", stat="anon 900\n"), MemoryUse(900, 1000)),
        (version_2("1000\n", used="200\n"), MemoryUse(0, 1000)),
        (version_2("nonsense\n"), NO_LIMIT),
        (version_2("1000\n", used="nonsense\n"), NO_LIMIT),
        (version_2("0\n"), NO_LIMIT),
        (version_1("1000\n"), MemoryUse(400, 1000)),
        (version_1("9223372036854771712\n"), NO_LIMIT),
        (
            version_2("1000\n")
            | {f"sys/fs/cgroup/memory.{name}": text for name, text in (("max", "800"), ("current", "750"), ("stat", ""))},
            MemoryUse(750, 800),
        ),
    ],
)
def test_use_is_that_of_the_group_nearest_to_its_limit(files: dict[str, str], use: MemoryUse, tmp_path: Path) -> None:
    write(tmp_path, files)
    assert MemoryLimit(tmp_path).read() == use


def test_limit_may_change(tmp_path: Path) -> None:
    write(tmp_path, version_2("max\n"))
    limit = MemoryLimit(tmp_path)
    assert limit.read().share == 0
    for text, share in (("1000\n", 0.4), ("2000\n", 0.2)):
        write(tmp_path, {f"{BOX}.max": text})
        assert limit.read().share == share


def test_file_pages_are_counted_rarely_unless_much_is_used(tmp_path: Path) -> None:
    """The kernel takes long to count them, and reclaims them only near the limit. Other memory is seen at once."""
    write(tmp_path, version_2("1000\n", used="400\n", stat="inactive_file 300\n"))
    limit = MemoryLimit(tmp_path)
    assert limit.read().used == 100
    write(tmp_path, {f"{BOX}.current": "500\n", f"{BOX}.stat": "inactive_file 50\n"})
    assert [limit.read().used for _ in range(PAGES_READINGS + 1)] == [200] * PAGES_READINGS + [450]
    write(tmp_path, {f"{BOX}.current": "501\n", f"{BOX}.stat": "inactive_file 0\n"})
    assert limit.read().used == 501
