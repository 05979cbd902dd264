"""Removes every program but Python from the root file system of the image: what is not there cannot be run by an attacker.

`docker build` runs it as root. It deletes with Python alone, because the shell and `rm` go too.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

PROGRAMS = ("/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin")
KEPT = {"python", "python3", f"python3.{sys.version_info.minor}", "ldconfig"}
"""The container runtime of GPUs runs ldconfig: the loader finds the driver's libraries by its cache."""
FOLDERS = (
    "/usr/lib/apt",
    "/usr/share/perl",
    "/usr/share/perl5",
    "/usr/share/doc",
    "/usr/share/man",
    "/var/lib/apt",
    "/var/cache/apt",
)
"""The list of Debian's packages stays in /var/lib/dpkg, for scanners."""


def main() -> None:
    for folder in {Path(name).resolve() for name in PROGRAMS}:
        for program in folder.iterdir():
            if program.name not in KEPT:
                program.unlink()
    paths = sysconfig.get_paths()
    for folder in [*map(Path, FOLDERS), Path(paths["stdlib"], "ensurepip"), *Path(paths["purelib"]).iterdir()]:
        if folder.is_dir():
            shutil.rmtree(folder)
    Path(__file__).unlink()


if __name__ == "__main__":
    main()
