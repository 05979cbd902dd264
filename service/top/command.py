"""`seqserve top`: read the metrics of a running service, and draw them until an interrupt."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import partial
from io import StringIO
from typing import NoReturn

from rich.console import Console
from rich.live import Live

from service.client_access import ClientAccess
from service.errors import SettingsError, StartError
from service.top.figures import SERIES
from service.top.scrape import Scrape
from service.top.screen import draw
from service.top.watch import Frame, Watch

TIMEOUT_SECONDS = 5.0
"""A frontend waits up to a second for the metrics of the other processes."""
MAX_BYTES = 16 << 20
"""Of metrics; 100 models have about 2 MB."""
METRICS = "/metrics"


def top(url: str, access: ClientAccess, interval_seconds: float, once: bool) -> int:
    """Draw the figures every `interval_seconds` until an interrupt. With `once`, print one frame of that time instead, as plain text."""
    url = url.rstrip("/").removesuffix(METRICS)
    if not url.startswith(("http://", "https://")):
        raise SettingsError(f"{url!r} is not the address of a service: it must begin with http:// or https://")
    watch = Watch(url, partial(scrape, url, access), time.monotonic)
    if once:
        _print_once(watch, interval_seconds)
        return 0
    console = Console(highlight=False)
    try:
        if console.is_terminal and not console.is_dumb_terminal:
            _draw_in_place(watch, console, interval_seconds)
        # One frame after the other, for files, pipes and terminals that cannot move the cursor.
        _repeat(watch, lambda frame: print(_as_text(frame), end="\n\n", flush=True), interval_seconds)
    except KeyboardInterrupt:
        return 0


def scrape(url: str, access: ClientAccess) -> Scrape:
    """Return the metrics of a service. Raises OSError without an answer, ValueError for something else than its metrics."""
    text = access.fetch(f"{url}{METRICS}", timeout=TIMEOUT_SECONDS, max_bytes=MAX_BYTES).decode()
    metrics = Scrape.parse(text, time.monotonic())
    if not metrics.has(SERIES.ready):
        raise ValueError(f"{url}{METRICS} has no metrics of seqserve")
    return metrics


def _print_once(watch: Watch, interval_seconds: float) -> None:
    """Print the figures of one interval. Raises StartError if the service does not answer."""
    for pause_seconds in 0.0, interval_seconds:
        time.sleep(pause_seconds)
        frame = watch.frame()
        if frame.error:
            raise StartError(f"{frame.url} does not answer with metrics: {frame.error}")
    print(_as_text(frame))


def _as_text(frame: Frame) -> str:
    """Return a frame without colours, as wide as the terminal, or with 80 columns where there is none."""
    console = Console(file=StringIO(), width=shutil.get_terminal_size().columns, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(draw(frame))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _draw_in_place(watch: Watch, console: Console, interval_seconds: float) -> NoReturn:
    with Live(console=console, screen=True, auto_refresh=False) as live:
        _repeat(watch, lambda frame: live.update(draw(frame, console.height), refresh=True), interval_seconds)


def _repeat(watch: Watch, show: Callable[[Frame], None], interval_seconds: float) -> NoReturn:
    """Show frames until an interrupt."""
    while True:
        began = time.monotonic()
        show(watch.frame())
        time.sleep(max(0.0, began + interval_seconds - time.monotonic()))
