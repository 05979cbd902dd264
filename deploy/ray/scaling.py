"""How many replicas Ray Serve should run, from the figures that each replica reports. Knows no Ray.

Two figures count, and the larger answer wins. The backlog rises only when a replica is at its capacity, and cannot tell how many replicas
an idle service needs. The share of time in which the device is busy can, and rises before anything waits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

BACKLOG, BUSY = "backlog_seconds", "busy_share"
TOLERANCE = 0.1
"""Nothing changes while a figure is within a tenth of its target."""


def wanted(replicas: int, figures: Mapping[str, Collection[float]], targets: Mapping[str, float]) -> int:
    """Return the number of replicas that brings the mean of every figure to its target; one fewer at a time.

    replicas: the present number; figures: of each replica that reports, by name; targets: by the same names. A replica that reports
    nothing counts as idle when there are too few, and as the mean when there are too many.
    """
    answers = [_wanted(replicas, figures.get(name, ()), target) for name, target in targets.items()]
    return max(max(answers), replicas - 1)


def _wanted(replicas: int, values: Collection[float], target: float) -> int:
    if not values:
        return replicas
    ratio = sum(values) / len(values) / target
    if abs(ratio - 1) <= TOLERANCE:
        return replicas
    return max(replicas, math.ceil(sum(values) / target)) if ratio > 1 else math.ceil(replicas * ratio)


class FiguresPolicy:
    """The policy of an `AutoscalingConfig`. Ray makes one with the `policy_kwargs`, and calls it with an `AutoscalingContext`."""

    def __init__(self, backlog_seconds: float = 0.02, busy_share: float = 0.6) -> None:
        self._targets = {BACKLOG: backlog_seconds, BUSY: busy_share}

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        figures = {name: list(values.values()) for name, values in (context.aggregated_metrics or {}).items()}
        return wanted(context.target_num_replicas, figures, self._targets), {}
