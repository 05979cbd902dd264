"""The table of exports to each format, in docs/exported-layers.md. Each of its cells is a test.

`python -m tests.exporters.table` writes the page.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from tests.exporters.cases import CASES, Case

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "exported-layers.md"
FORMATS = {"pytorch": "PyTorch", "onnx": "ONNX"}
OPENING = """\
# What exports

A test checks each cell. "yes": with the exported file, PyTorch or ONNX Runtime computes the same within 1e-5, and
`seqserve import` reads the same model back, bit by bit. "yes, comes back": the model that is read back computes the same, but differs as
described. "no" is followed by the words of the refusal. [exporting.md](exporting.md) describes the command.
`python -m tests.exporters.table` writes this page.
"""


def page() -> str:
    """Return the content of the page."""
    sections = [_section(part, list(cases)) for part, cases in groupby(sorted(CASES, key=_place), key=lambda case: case.part)]
    return "\n".join([OPENING, *sections])


def _place(case: Case) -> int:
    """Return the first position of the part of a case, which keeps its cases together."""
    return next(index for index, other in enumerate(CASES) if other.part == case.part)


def _section(part: str, cases: list[Case]) -> str:
    lines = [f"## {part}", "", f"| option | {' | '.join(FORMATS.values())} |", "|---" * (1 + len(FORMATS)) + "|"]
    lines += [f"| {case.option} | {' | '.join(_cell(case, format) for format in FORMATS)} |" for case in cases]
    return "\n".join([*lines, ""])


def _cell(case: Case, format: str) -> str:
    if format in case.refused:
        return f"no: {case.refused[format]}"
    return f"yes, comes back: {case.changed[format]}" if format in case.changed else "yes"


if __name__ == "__main__":
    PAGE.write_text(page())
