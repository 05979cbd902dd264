"""When a request is due, which is its position in the queue. Pure: the time is an argument.

The longer the steps of a request take alone, the later it is due, in steps of about a millisecond: requests that take about as long run in
the order of their arrival, so a batch takes their blocks whole. What every batch takes counts for nothing here: it is the same for all
requests, but its measurement varies, and would change their order. All sequences of a request are due with its longest sequence, because
the request is answered with its last sequence. A request with little time before its deadline is due sooner.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.engine.execution.cost_model import Cost

HEAD_START_SECONDS = 1.0
"""How much earlier a request is due for each level of its priority."""
STRETCH = 5.0
"""A request is due at its arrival plus this multiple of the time that the steps of its longest sequence take alone."""
SLACK = 3.0
"""A request is due at least this multiple of its time alone before its deadline: in a batch a sequence takes longer than alone."""
GRAIN_SECONDS = 2**-10
"""Allowances are multiples of this. Finer differences gain nothing, and would cut every block that waits."""


def allowance(cost: Cost, longest: Any, seconds_left: Any) -> NDArray[np.float64]:
    """Return how long after its arrival a request is due, or each of many.

    longest: steps of its longest sequence; seconds_left: until its deadline.
    """
    alone = cost.of(longest, longest)
    longest_allowance: NDArray[np.float64] = np.maximum(
        0.0, np.minimum(STRETCH * (alone - cost.fixed), seconds_left - SLACK * alone)
    )
    return GRAIN_SECONDS * np.floor(longest_allowance / GRAIN_SECONDS)
