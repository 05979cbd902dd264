"""Structured log: one JSON object a line on standard error, so that no value can forge a second line. Logging never raises."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

STDERR = 2
MAX_CAPPED_LINES, CAP_SECONDS = 20, 10.0
"""How many lines of one event clients can cause in this time."""


@dataclass(slots=True)
class _Cap:
    """Lines of one event since its period began. until: monotonic time of the period's end."""

    until: float = -math.inf
    lines: int = 0
    left_out: int = 0


class LogHandler(logging.Handler):
    """Writes the warnings of libraries as JSON lines to a log. Clients may cause them."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        error = repr(record.exc_info[1]) if record.exc_info else None
        self._log.capped("warning", "library warning", message=record.getMessage().strip(), error=error)


class Log:
    """Writes the events of one process; `process` names it (supervisor, frontend, engine-0).

    A line that cannot be written is dropped, as on a full disk or after the reader of a pipe has ended. The next line that can be written
    is preceded by the number of dropped lines.
    """

    def __init__(self, process: str, descriptor: int = STDERR) -> None:
        self._process = process
        self._descriptor = descriptor
        self._dropped = 0
        self._torn = False
        """Whether the last write stopped in the middle of a line."""
        self._caps: dict[str, _Cap] = {}

    def info(self, event: str, **values: Any) -> None:
        self._write("info", event, values)

    def warning(self, event: str, **values: Any) -> None:
        self._write("warning", event, values)

    def error(self, event: str, **values: Any) -> None:
        self._write("error", event, values)

    def capped(
        self, level: str, event: str, *, kind: str = "", values_of: Callable[[], dict[str, Any]] | None = None, **values: Any
    ) -> None:
        """Write an event that clients cause, at most MAX_CAPPED_LINES lines of it in CAP_SECONDS.

        The first line after that has `left_out`, the number of lines that are missing before it. kind: events of each kind are counted
        separately. There must be few of them. values_of: returns more values of a line that is written.
        """
        cap = self._caps.setdefault(event + kind, _Cap())
        now = time.monotonic()
        if now >= cap.until:
            cap.until, cap.lines = now + CAP_SECONDS, 0
        cap.lines += 1
        if cap.lines > MAX_CAPPED_LINES:
            cap.left_out += 1
            return
        left_out, cap.left_out = cap.left_out, 0
        more = values_of() if values_of is not None else {}
        self._write(level, event, values | more | ({"left_out": left_out} if left_out else {}))

    def _write(self, level: str, event: str, values: dict[str, Any]) -> None:
        line = self._format(level, event, values)
        if self._dropped:
            line = self._format("warning", "log lines dropped", {"lines": self._dropped}) + line
        if self._torn:
            line = b"\n" + line
        try:
            self._write_all(line)
        except OSError:
            self._dropped += 1
        else:
            self._dropped, self._torn = 0, False

    def _format(self, level: str, event: str, values: dict[str, Any]) -> bytes:
        time_stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = {"time": time_stamp, "level": level, "process": self._process, "event": event, **values}
        try:
            text = json.dumps(line, default=str)
        except Exception as error:  # str() of a value may raise anything
            text = json.dumps({**line, **dict.fromkeys(values), "log_error": type(error).__name__})
        return text.encode() + b"\n"

    def _write_all(self, data: bytes) -> None:
        """Write in one call: the processes share the stream, and a whole line is never torn. Only a disk that fills up splits a line."""
        if self._descriptor == STDERR and sys.stderr is None:
            raise OSError("the process started without a standard error: the descriptor belongs to another file")
        written = os.write(self._descriptor, data)
        while written < len(data):
            self._torn = True
            written += os.write(self._descriptor, data[written:])
