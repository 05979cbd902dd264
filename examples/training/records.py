"""Measurements as JSON lines, with one naming for all recipes. Requires the standard library only.

Every record has `kind`, `task`, `set` and `model`. A training has the `quality` of the stored weights in PyTorch by figure, a served record
the quality of the same model through the service, and a speed record a load of `seqserve bench`.
"""

from __future__ import annotations

import datetime
import json
import platform
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def append(file: Path | None, record: Record) -> None:
    """Append a record, with the date and the processor. Without a file, nothing is written."""
    if file is not None:
        record |= {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "processor": processor()}
        with file.open("a") as lines:
            lines.write(f"{json.dumps(record)}\n")


def read(file: Path) -> list[Record]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def processor() -> str:
    """Return the name of the processor of this machine."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
