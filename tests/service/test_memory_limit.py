"""The share of the container's memory limit in use, by the files of both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.memory_limit import NO_LIMIT, MemoryLimit, MemoryUse
from tests.service.test_cores import write

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
