"""Tests of `make test-all` that take minutes.

SCALE is the share of the sizes that docs/reliability.md names: 0.1 unless the variable SCALE says otherwise. Before a release, 1.
"""

from __future__ import annotations

import os

SCALE = float(os.environ.get("SCALE", "0.1"))


def scaled(size: float, least: int = 1) -> int:
    """Return a size at this run's scale."""
    return max(least, round(SCALE * size))
