"""A goal, the line that it becomes, and the times that a run found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kernels.bench.report import Row
from kernels.bench.workload import Workload

HEADING = ("what", "found", "goal", "")
Line = tuple[str, str, str, str]
Ratios = dict[Workload, float]


@dataclass(frozen=True, slots=True)
class Goal:
    """At least `limit`, or with a unit, which a time has, at most."""

    limit: float
    unit: str = ""

    def __str__(self) -> str:
        return f"<= {self.limit} {self.unit}" if self.unit else f">= {self.limit}"

    def line(self, what: str, found: float, note: str = "", whole: bool = True) -> Line:
        """whole: every workload that the goal speaks of was timed."""
        holds = found <= self.limit if self.unit else found >= self.limit
        shown = " ".join(word for word in (f"{found:.4g}", self.unit, note) if word)
        return what, shown, str(self), ("met" if whole else "open") if holds else "missed"


class Times:
    """Median microseconds; ours are those of the backend that a caller gets, the first of `backends` that was timed."""

    def __init__(self, rows: Iterable[Row], backends: Sequence[str]) -> None:
        self._found = {(row.workload, row.timing, row.backend): row.spread.median_us for row in rows}
        timed = {(workload, backend) for workload, _, backend in self._found}
        chosen = {workload: [name for name in backends if (workload, name) in timed] for workload, _ in timed}
        self._chosen = {workload: names[0] for workload, names in chosen.items() if names}

    def chosen(self, workload: Workload) -> str:
        return self._chosen.get(workload, "nothing of ours")

    def of(self, backend: str, workload: Workload, timing: str) -> float | None:
        return self._found.get((workload, timing, backend))

    def ours(self, workload: Workload, timing: str) -> float | None:
        return self.of(self.chosen(workload), workload, timing)

    def ratios(self, peer: str, timing: str, over: Iterable[Workload]) -> Ratios:
        """How many times as long a peer takes as we do, on the workloads on which both were timed."""
        pairs = {one: (self.of(peer, one, timing), self.ours(one, timing)) for one in over}
        return {one: theirs / ours for one, (theirs, ours) in pairs.items() if theirs is not None and ours is not None}
