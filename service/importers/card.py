"""Writes the card of an imported model: its source, the differences from the source, and the evidence of a comparison."""

from __future__ import annotations

from collections.abc import Sequence

from service.importers.check import Difference, SourceComparison
from service.importers.draft import Draft


def card(
    name: str,
    draft: Draft,
    source: str,
    digest: str,
    assumed: Sequence[str],
    found: SourceComparison | None,
    tolerance: float,
) -> str:
    """Return the card. source: the name of the checkpoint; digest: its SHA-256; assumed: what nothing proves; found: the comparison, or
    None."""
    lines = [f"# {name}", "", f"Imported from `{source}` ({draft.source}), SHA-256 `{digest}`.", ""]
    if draft.notes:
        lines += ["## Differences from the source", "", *(f"- {note}" for note in draft.notes), ""]
    if assumed:
        lines += ["## Assumed, because the source lacks it", "", *(f"- {text}" for text in assumed), ""]
    lines += ["## Evidence", "", *_evidence(found, tolerance), ""]
    return "\n".join(lines)


def table(found: Sequence[Difference]) -> list[str]:
    """Return the differences as a table."""
    rows = [f"| {one.name} | {one.largest:.2g} | {one.mean:.2g} | {one.numbers:,} |" for one in found]
    return ["| output | largest difference | mean difference | numbers |", "|---|---|---|---|", *rows]


def _evidence(found: SourceComparison | None, tolerance: float) -> list[str]:
    if found is None:
        return ["The outputs were not compared with those of the source."]
    agree = f"The outputs agree with those of the source within {tolerance:g} for {found.source}:"
    return [agree, "", *table(found.differences)]
