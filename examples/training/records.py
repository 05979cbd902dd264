"""Measurements as JSON lines: one object for each training, each served model and each load. Requires the standard library only."""

from __future__ import annotations

import datetime
import json
import platform
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def append(file: Path | None, record: Record) -> None:
    """Append a record, with the date and the processor. Without a file, nothing is written."""
    if file is None:
        return
    line = json.dumps(record | {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "processor": processor()})
    with file.open("a") as lines:
        lines.write(f"{line}\n")


def report(file: Path | None, record: Record) -> None:
    """Print every figure of a record, and append it."""
    for name, value in record.items():
        print(f"{name.replace('_', ' ')}: {value}")
    append(file, record)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of the files of a version folder."""
    return sum(file.stat().st_size for file in folder.iterdir())


def read(file: Path) -> list[Record]:
    """Return the records of a file, none if it does not exist."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def processor() -> str:
    """Return the name of the processor of this machine."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
