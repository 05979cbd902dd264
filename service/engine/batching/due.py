"""When a request is due, which is its position in the queue. Pure: the time is an argument.

The longer a request takes alone, the later it is due. All sequences of a request are due with its longest sequence, because the request is
answered with its last sequence. A request with little time before its deadline is due sooner.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.engine.execution.cost_model import Cost

HEAD_START_SECONDS = 1.0
"""How much earlier a request is due for each level of its priority."""
STRETCH = 5.0
"""A request is due at its arrival plus this multiple of the time that its longest sequence takes alone."""
SLACK = 3.0
"""A request is due at least this multiple of that time before its deadline: in a batch a sequence takes longer than alone."""


def allowance(cost: Cost, longest: int, seconds_left: float) -> float:
    """Return how long after its arrival a request is due. longest: steps of its longest sequence; seconds_left: until its deadline."""
    alone = cost.of(longest, longest)
    return max(0.0, min(STRETCH * alone, seconds_left - SLACK * alone))


def allowances(cost: Cost, longest: NDArray[Any], seconds_left: NDArray[Any]) -> NDArray[np.float64]:
    """Return `allowance` of many requests."""
    alone = cost.of(longest, longest)  # type: ignore[arg-type]
    return np.maximum(0.0, np.minimum(STRETCH * alone, seconds_left - SLACK * alone))
