"""A trace of a running server's turns, recorded while something else loads it."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

TURNS = 100
MOST_SECONDS = 60.0
"""A server records no longer."""
PATIENCE_SECONDS = 130.0
"""It may need as long again to begin, and to write what it saw."""


class NoTrace(Exception):
    """The server gave none; the message says why, in the server's words where it has any."""


def prepare(url: str) -> None:
    """Have the server load what it records with, which may take it seconds; raises NoTrace when it records nothing."""
    _recorded(url, 1, 0.1)


@contextmanager
def recorded(url: str, file: Path, seconds: float) -> Iterator[None]:
    """Turns of the time in which the block runs, which is so many seconds, are in `file` after it; raises NoTrace."""
    ramp = min(1.0, seconds / 4)

    def record() -> bytes:
        time.sleep(ramp)
        return _recorded(url, TURNS, min(MOST_SECONDS, seconds - ramp))

    with ThreadPoolExecutor(1) as pool:
        trace = pool.submit(record)
        yield
        file.write_bytes(trace.result())


def _recorded(url: str, batches: int, seconds: float) -> bytes:
    asked = urllib.request.Request(f"{url}/debug/trace?batches={batches}&seconds={seconds:g}", b"", method="POST")
    try:
        with urllib.request.urlopen(asked, timeout=PATIENCE_SECONDS) as answer:
            body: bytes = answer.read()
            return body
    except urllib.error.HTTPError as fault:
        raise NoTrace(f"{url} gives no trace: {_said(fault)}") from fault
    except OSError as fault:
        raise NoTrace(f"{url} gives no trace: {getattr(fault, 'reason', fault)}") from fault


def _said(fault: urllib.error.HTTPError) -> str:
    """The server's words, which name the way out, where it is one of ours."""
    try:
        return str(json.load(fault)["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"it answers {fault.code}"
