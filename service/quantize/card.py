"""The section "Precision" of a model card."""

from __future__ import annotations

import re

from service.quantize.comparison import Comparison

HEADING = "## Precision"
_SECTION = re.compile(rf"^{HEADING}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def precision_section(comparison: Comparison, source: str, sizes: tuple[int, int]) -> str:
    """Return the section. source: the model and version that was converted; sizes: the bytes of its weights and of the new ones."""
    before, after = comparison.precisions
    rows = [("bytes of the weights", *(f"{size:,}" for size in sizes))]
    if comparison.accuracies is not None:
        rows.append(("accuracy", *(f"{100 * accuracy:.1f} %" for accuracy in comparison.accuracies)))
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    same = comparison.same_best
    agreement = "" if same is None else f" The best answer is the same for {100 * same:.1f} % of them."
    return (
        f"{HEADING}\n\n"
        f"`seqserve quantize` made these {after} weights of {source}, which is in {before}.\n\n"
        f"| | {before} | {after} |\n|---|---|---|\n{table}\n\n"
        f"Both versions ran on a CPU, on {comparison.origin}.{agreement}\n"
        f"The outputs differ by {comparison.largest:.2g} at most and by {comparison.mean:.2g} on average.\n"
    )


def with_section(card: str, section: str) -> str:
    """Return a card with this section at its end, instead of an earlier one."""
    rest = _SECTION.sub("", card).strip()
    return f"{rest}\n\n{section}" if rest else section
