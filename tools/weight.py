"""`python -m tools.weight`: prints the size of the project by folder, and compares it with the budgets in budgets.toml.

Exits with 1 if something weighs more than its budget. Files of more than MAX_FILE_LINES are only listed.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from service.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
BUDGETS = Path(__file__).with_name("budgets.toml")
SOURCES = {".py", ".cu", ".cuh", ".js", ".css", ".html", ".proto", ".java", ".go", ".c"}
"""Programming languages. The Makefile and scripts that install programs are not counted."""
RESULTS = re.compile(r"(kernels/bench|loadtest)/results/(?!README)|examples/\w*results\w*\.jsonl")
MAX_FILE_LINES = 500
UNCOUNTED = {"models"}


class Weight(NamedTuple):
    """The size of some files. prose: lines of comments and docstrings; characters: of all lines."""

    lines: int
    statements: int
    prose: int
    characters: int


def main() -> int:
    """Return the exit status."""
    files = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()  # noqa: S607
    sources = {name: weigh(ROOT / name) for name in files if Path(name).suffix in SOURCES and (ROOT / name).is_file()}
    pages = {name: weigh(ROOT / name) for name in files if is_page(name)}
    print_folders({**sources, **pages})
    large = sorted((weight.lines, name) for name, weight in sources.items() if weight.lines > MAX_FILE_LINES)
    print(f"\n{len(large)} files have more than {MAX_FILE_LINES} lines: " + ", ".join(name for _, name in large) + "\n")
    used = {
        "product_lines": lines(weight for name, weight in sources.items() if kind(name) == "product"),
        "test_lines": lines(weight for name, weight in sources.items() if kind(name) == "tests"),
        "doc_lines": lines(pages.values()),
        "settings": len(Settings.model_fields),
        "makefile_targets": len(targets((ROOT / "Makefile").read_text())),
        "result_bytes": sum((ROOT / name).stat().st_size for name in files if RESULTS.match(name)),
    }
    return compare(used, tomllib.loads(BUDGETS.read_text()))


def compare(used: dict[str, int], budgets: dict[str, int]) -> int:
    """Print each size beside its budget. Returns 1 if one is larger, otherwise 0."""
    for name, budget in budgets.items():
        print(f"{name:<18} {used[name]:>10,} of {budget:>10,}" + ("  TOO MUCH" if used[name] > budget else ""))
    beyond = [name for name, budget in budgets.items() if used[name] > budget]
    if beyond:
        print(f"\n{', '.join(beyond)}: let something go, or change the budget in {BUDGETS.relative_to(ROOT)}", file=sys.stderr)
    return 1 if beyond else 0


def kind(name: str) -> str:
    """Return what a source file belongs to: the product, the tests, or a folder that is not counted."""
    folder = name.split("/")[0]
    return folder if folder in {"tests", "docs", *UNCOUNTED} else "product"


def is_page(name: str) -> bool:
    return name.endswith(".md") and (name == "README.md" or name.startswith(("docs/", "examples/")))


def folder_of(name: str) -> str:
    """Return the folder in which a file is counted: its first two, and only the first of tests and docs."""
    parts = name.split("/")[:-1]
    return "/".join(parts[:1] if parts[:1] in (["tests"], ["docs"]) else parts[:2]) or "."


def weigh(file: Path) -> Weight:
    """Return the size of one file. Only Python has statements and prose that are counted."""
    text = file.read_text()
    statements = prose = 0
    if file.suffix == ".py":
        tree = ast.parse(text)
        statements = sum(isinstance(node, ast.stmt) for node in ast.walk(tree))
        prose = len(prose_lines(text, tree))
    return Weight(text.count("\n"), statements, prose, sum(map(len, text.splitlines())))


def prose_lines(text: str, tree: ast.AST) -> set[int]:
    """Return the numbers of the lines with a comment, or in a string that is a statement."""
    found = {token.start[0] for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT}
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            assert node.end_lineno is not None
            found |= set(range(node.lineno, node.end_lineno + 1))
    return found


def targets(makefile: str) -> list[str]:
    """Return the targets of .PHONY, which are commands and no files."""
    joined = makefile.replace("\\\n", " ")
    return [name for line in joined.splitlines() if line.startswith(".PHONY:") for name in line.split()[1:]]


def lines(weights: Iterable[Weight]) -> int:
    return sum(weight.lines for weight in weights)


def print_folders(weights: dict[str, Weight]) -> None:
    """Print the size of each folder, then of all product files, tests and pages."""
    folders, totals = defaultdict[str, list[Weight]](list), defaultdict[str, list[Weight]](list)
    for name, weight in weights.items():
        folders[folder_of(name) + (" (pages)" if is_page(name) else "")].append(weight)
        totals["pages" if is_page(name) else kind(name)].append(weight)
    print(f"{'folder':<28} {'files':>6} {'lines':>8} {'statements':>11} {'prose, %':>9} {'line length':>12}")
    for name, found in [*sorted(folders.items()), *sorted(totals.items())]:
        count, statements, prose, characters = map(sum, zip(*found, strict=True))
        share, length = 100 * prose / max(1, count), characters / max(1, count)
        print(f"{name:<28} {len(found):>6} {count:>8,} {statements:>11,} {share:>9.1f} {length:>12.1f}")


if __name__ == "__main__":
    sys.exit(main())
