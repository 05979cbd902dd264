"""A limit, and the line of a table that compares a value with it."""

from __future__ import annotations

from dataclasses import dataclass

HEADING = ("goal", "measured", "limit", "")
Line = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class Limit:
    """An upper limit if it has a unit, a lower limit otherwise. Without a value, nothing is judged."""

    value: float | None = None
    unit: str = ""

    def __str__(self) -> str:
        if self.value is None:
            return ""
        return f"<= {self.value} {self.unit}" if self.unit else f">= {self.value}"

    def line(self, name: str, measured: float, note: str = "", complete: bool = True) -> Line:
        """Return the line of a goal. complete: every workload of the goal was timed."""
        shown = " ".join(word for word in (f"{measured:.4g}", self.unit, note) if word)
        if self.value is None:
            return name, shown, "", ""
        met = measured <= self.value if self.unit else measured >= self.value
        return name, shown, str(self), ("met" if complete else "open") if met else "missed"
