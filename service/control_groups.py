"""The control groups of this process, which limit what its container may use. Knows both versions of the kernel's interface."""

from __future__ import annotations

from pathlib import Path, PurePosixPath


def control_groups(controller: str, root: Path = Path("/")) -> list[Path]:
    """Return the folders of the groups that this process belongs to, as far as they may limit `controller`: cpu, memory, ...

    A limit holds for all groups below it, so the parents are included. Some of the folders may not exist: in a container, the path of a
    group may be its path on the host, and only the root exists.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(
            ","
        ):  # version 2 has one tree for all controllers, without their names
            mount = root / "sys/fs/cgroup" / (controller if controllers else "")
            group = PurePosixPath(path.lstrip("/"))
            folders += [mount / ancestor for ancestor in (group, *group.parents)]
    return folders
