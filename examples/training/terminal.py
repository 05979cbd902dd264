"""What a recipe shows in the terminal: a progress bar on the standard error, and its results as a table on the standard output."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.box import MARKDOWN
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

WIDTH = 200
"""The width of a table where the standard output is no terminal."""
LINE_SECONDS = 5.0
"""How often a line tells the progress where the standard error is no terminal."""
UNITS = {"percent": "%", "ms": "ms"}


@contextmanager
def bar(title: str, total: float) -> Iterator[Callable[..., None]]:
    """Show a progress bar within the block. The function that the block gets adds to the progress, with a text if there is one."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    printed = start = time.monotonic()
    with Progress(*columns, TextColumn("{task.fields[text]}"), console=console) as progress:
        task = progress.add_task(title, total=total, text="")

        def advance(amount: float = 1.0, text: str = "") -> None:
            nonlocal printed
            progress.update(task, advance=amount, text=text)
            now = time.monotonic()
            if not console.is_terminal and now - printed >= LINE_SECONDS:  # in a file, the bar shows only when it is complete
                printed = now
                console.print(f"{title}: {progress.tasks[0].percentage:.0f} %, {now - start:.0f} s  {text}")

        yield advance
        progress.update(task, completed=total)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table that is Markdown too."""
    console = Console() if Console().is_terminal else Console(width=WIDTH)
    shown = Table(*columns, box=MARKDOWN)
    for row in rows:
        shown.add_row(*row)
    console.print(shown)


def heading(figure: str) -> str:
    """Return the column of a figure: `accuracy_percent` becomes `accuracy, %`."""
    return ", ".join(_parts(figure))


def number(value: float) -> str:
    """Return a figure with four significant digits."""
    return f"{value:.4g}"


def sentence(quality: Mapping[str, float]) -> str:
    """Return figures of quality as part of a sentence: `accuracy 90.6 %, f1 84.1 %`."""
    figures = ((_parts(name), number(value)) for name, value in quality.items())
    return ", ".join(" ".join([name, value, *unit]) for (name, *unit), value in figures)


def _parts(figure: str) -> list[str]:
    """Return the name of a figure, and its unit if it has one."""
    name, _, last = figure.rpartition("_")
    return [name.replace("_", " "), UNITS[last]] if last in UNITS else [figure.replace("_", " ")]
