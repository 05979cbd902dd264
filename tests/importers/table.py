"""The table of checkpoints that import or are refused, in docs/imported-layers.md. Each of its lines is a test.

`python -m tests.importers.table` writes the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "imported-layers.md"
SOURCES = {
    "pytorch": "State dicts of PyTorch",
    "torch_archive": "torch.export and TorchScript",
    "onnx": "ONNX",
    "keras": "Keras",
    "tensorflow1": "TensorFlow 1",
}
"""Packages of tests by the name of their source. `cases.TABLE` of each is a sequence of lines."""
OPENING = """\
# What imports

A test checks each line: the model that `seqserve import` writes computes the same as its source, or the import is refused with the words
in the last column. [importing.md](importing.md) describes the command. `python -m tests.importers.table` writes this page.
"""


@dataclass(frozen=True)
class Line:
    """part: a layer or an operator of the source; option: its tested option; refused: words of the refusal, or empty."""

    part: str
    option: str
    refused: str = ""


def page() -> str:
    """Return the content of the page."""
    return "\n".join([OPENING, *(line for package, title in SOURCES.items() for line in _section(package, title))])


def _section(package: str, title: str) -> Iterator[str]:
    yield f"## {title}\n"
    yield "| part | option | |\n|---|---|---|"
    for line in import_module(f"tests.importers.{package}.cases").TABLE:
        outcome = f"refused: {line.refused}" if line.refused else "imports"
        yield f"| {line.part} | {line.option.replace('|', chr(92) + '|')} | {outcome} |"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page())
