"""Structured lines: one JSON object a line on standard error, so that no value can forge a second line."""

from __future__ import annotations

import json
import sys
import time
from typing import Any


class Log:
    """Writes events of one process; `process` names it (supervisor, front, engine-0)."""

    def __init__(self, process: str) -> None:
        self._process = process

    def info(self, event: str, **values: Any) -> None:
        self._write("info", event, values)

    def warning(self, event: str, **values: Any) -> None:
        self._write("warning", event, values)

    def error(self, event: str, **values: Any) -> None:
        self._write("error", event, values)

    def _write(self, level: str, event: str, values: dict[str, Any]) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
        line = {"time": stamp + "Z", "level": level, "process": self._process, "event": event, **values}
        # One write call a line: the processes share this file, and a whole line is never torn.
        sys.stderr.write(json.dumps(line, default=str) + "\n")
        sys.stderr.flush()
