"""The tables of docs/reliability.md name tests that exist, and count their rows rightly."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"
STATES = ("tested", "built without a test", "partly", "missing")
GOALS = 87
ROW = re.compile(
    r"\| (?P<name>[A-Z]+-\d\d) \| (?P<goal>[^|]+) \| (?P<state>[^|]+) \| (?P<tests>[^|]*)\| (?P<planted>[^|]*)\| (?P<lacking>[^|]*)\|"
)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows(text: str) -> list[dict[str, str]]:
    """Return the rows of all tables, each with its columns."""
    return [row.groupdict() for line in text.splitlines() if (row := ROW.fullmatch(line))]


def absent(text: str) -> list[str]:
    """Return the tests that a text names and that do not exist."""
    return [f"{file}::{name}" for file, name in TEST.findall(text) if name not in names_in(file)]


@cache
def names_in(file: str) -> frozenset[str]:
    """Return the names of the tests in a file, none for a file that does not exist."""
    path = ROOT / file
    return frozenset(_names(ast.parse(path.read_text()))) if path.is_file() else frozenset()


def _names(module: ast.Module) -> Iterator[str]:
    """Yield functions, and classes that hypothesis makes: `TestName = Machine.TestCase`."""
    for statement in module.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and statement.name.startswith("test_"):
            yield statement.name
        if isinstance(statement, ast.Assign):
            yield from (
                target.id for target in statement.targets if isinstance(target, ast.Name) and target.id.startswith("Test")
            )


def test_every_named_test_exists() -> None:
    assert absent(PAGE.read_text()) == []


def test_every_goal_has_one_row() -> None:
    found = rows(PAGE.read_text())
    assert len(found) == GOALS
    assert not [name for name, count in Counter(row["name"] for row in found).items() if count > 1]


def test_row_has_what_its_state_needs() -> None:
    """A tested goal lacks nothing, a partly tested goal names the missing part, and a missing goal has no test."""
    for row in rows(PAGE.read_text()):
        name, tests, lacking = row["name"], TEST.findall(row["tests"]), row["lacking"].strip()
        assert row["state"] in STATES, name
        assert bool(lacking) == (row["state"] != "tested"), name
        assert bool(tests) == (row["state"] != "missing"), name
        assert tests or not TEST.findall(row["planted"]), name


def test_counts_are_those_of_the_rows() -> None:
    text = PAGE.read_text()
    counted = Counter(row["state"] for row in rows(text))
    stated = {state: int(count) for state, count in re.findall(r"^\| ([a-z ]+) \| (\d+) \|", text, re.MULTILINE)}
    assert stated == {state: counted[state] for state in STATES}
