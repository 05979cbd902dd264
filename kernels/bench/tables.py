"""Tables for people and JSON lines for programs, without torch: commands that only send requests use them too."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")
"""The folder of the results that are kept."""


def aligned(lines: Sequence[Sequence[str]], right: bool = False) -> str:
    """Return lines with left-aligned or right-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    pad = str.rjust if right else str.ljust
    return "\n".join("  ".join(map(pad, line, widths)).rstrip() for line in lines)


def three_digits(value: float) -> str:
    """Return three significant digits, or all digits before the decimal point."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def write(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object a line, creating the folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    print(f"written to {path}")


def write_results(
    folder: Path | None, name: str, records: Iterable[Mapping[str, Any]], text: str, ending: str = "-goals"
) -> None:
    """Write the records of a run, and beside them its text with this ending, if there is a folder and a text."""
    if folder is not None:
        write(folder / f"{name}.jsonl", records)
        if text:
            path = folder / f"{name}{ending}.txt"
            path.write_text(text)
            print(f"written to {path}")
