"""Traces of a running server's batches, recorded while it is under load."""

from __future__ import annotations

import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from loadtest.discovery import CannotMeasure, fetch
from service.client_access import ClientAccess, reason_of

BATCHES = 100
MAX_SECONDS = 60.0
"""Longest recording that a server accepts."""
TIMEOUT_SECONDS = 130.0
"""The server may need as long as the recording to start it, and to write the trace."""


def prepare(url: str, access: ClientAccess) -> None:
    """Record one batch, so that the server loads its profiler, which may take seconds. Raises CannotMeasure."""
    _record(url, access, 1, 0.1)


@contextmanager
def recorded(url: str, access: ClientAccess, file: Path, seconds: float) -> Iterator[None]:
    """Record batches while the block runs, which must take `seconds`, and write them to `file`. Raises CannotMeasure."""
    ramp = min(1.0, seconds / 4)

    def record() -> bytes:
        time.sleep(ramp)
        return _record(url, access, BATCHES, min(MAX_SECONDS, seconds - ramp))

    with ThreadPoolExecutor(1) as pool:
        trace = pool.submit(record)
        yield
        file.write_bytes(trace.result())


def _record(url: str, access: ClientAccess, batches: int, seconds: float) -> bytes:
    try:
        return fetch(f"{url}/debug/trace?batches={batches}&seconds={seconds:g}", access, b"", timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        raise CannotMeasure(f"{url} returned no trace: {reason_of(error)}") from error
    except OSError as error:
        raise CannotMeasure(f"{url} returned no trace: {getattr(error, 'reason', error)}") from error
