"""docs/operations.md describes every series, every alert and every row of the dashboard."""

from __future__ import annotations

import re
from itertools import chain

import pytest

from service.metrics import (
    CANCELLED_WHILE,
    DENIALS,
    ENGINE_WORK,
    REFUSALS,
    RESTARTS,
    SESSION_ENDS,
    SESSION_MOVES,
    Counter,
    Metrics,
    Series,
)
from tests.deploy.shipped import ROOT, alerts, panels

PAGE = (ROOT / "docs" / "operations.md").read_text()


def anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def line(one: Series) -> str:
    """Return the row of a series in the table of the page."""
    name = f"{one.name}_total" if isinstance(one, Counter) else one.name
    labels = ", ".join(f"`{label}`" for label in one.labels)
    return f"| `{name}` | {type(one).__name__.lower()} | {labels} | {one.help} |"


def test_metrics_table_lists_every_series() -> None:
    table = PAGE.partition("## Metrics")[2]
    assert re.findall(r"^\| `seqserve_.+$", table, re.MULTILINE) == [line(one) for one in Metrics().series()]


@pytest.mark.parametrize("name", alerts())
def test_every_alert_has_a_section(name: str) -> None:
    file, _, anchor = alerts()[name]["annotations"]["runbook"].partition("#")
    assert anchor in anchors((ROOT / file).read_text())
    assert f"### {name}\n" in PAGE


def test_every_dashboard_row_is_explained() -> None:
    parts = [panel["title"] for panel in panels() if panel["type"] == "row"]
    assert re.findall(r"^\| ([A-Z].+?) \|", PAGE.partition("## Alerts")[0], re.MULTILINE) == parts


def test_named_panels_and_files_exist() -> None:
    titles = {panel["title"] for panel in panels()}
    assert set(re.findall(r'"([A-Z][a-z, ]+)"', PAGE)) <= titles
    for name in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / name).exists(), name
    for anchor in re.findall(r"\]\(#(.+?)\)", PAGE):
        assert anchor in anchors(PAGE)


def test_every_label_value_is_explained() -> None:
    values = PAGE.partition("| label | values |")[2]
    closed_sets = REFUSALS, DENIALS, CANCELLED_WHILE, ENGINE_WORK, SESSION_ENDS, SESSION_MOVES, *RESTARTS
    for word in chain.from_iterable(closed_sets):
        assert f"`{word}`" in values
