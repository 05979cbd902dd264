"""The section "Compression" of a model card."""

from __future__ import annotations

import re

from service.compress.comparison import Comparison

HEADING = "## Compression"
_SECTION = re.compile(rf"^{HEADING}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def compression_section(comparison: Comparison, source: str, sizes: tuple[int, int]) -> str:
    """Return the section. source: the model and version that was compressed; sizes: the bytes of its weights and of the new weights."""
    before, after = comparison.precisions
    rows = [("precision", before, after), ("bytes of the weights", *(f"{size:,}" for size in sizes))]
    if comparison.accuracies is not None:
        rows.append(("accuracy", *(f"{100 * accuracy:.1f} %" for accuracy in comparison.accuracies)))
    for device, times in comparison.times.items():
        rows.append((f"time of one sequence, {device}", *(f"{1e6 * seconds:,.0f} µs" for seconds in times)))
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    same = comparison.same_best
    agreement = "" if same is None else f" The best answer is the same for {100 * same:.1f} % of them."
    return (
        f"{HEADING}\n\n"
        f"`seqserve compress` made these weights of {source}, with precision {after}.\n\n"
        f"| | before | after |\n|---|---|---|\n{table}\n\n"
        f"Both versions answered {comparison.origin}, on a CPU.{agreement}\n"
        f"The outputs differ by {comparison.largest:.2g} at most and by {comparison.mean:.2g} on average.\n"
    )


def with_section(card: str, section: str) -> str:
    """Return a card with this section at its end, instead of an earlier one."""
    rest = _SECTION.sub("", card).strip()
    return f"{rest}\n\n{section}" if rest else section
