"""A load that its generators limit is measured again with more generators, as long as that helps."""

from __future__ import annotations

import pytest

from loadtest.generator.job import Result
from loadtest.generator.scaling import Measured, best, more_generators


def trial(generators: int, busy: float, rate: float) -> Measured:
    """Return a trial of 2 s. busy: the share of it that each generator used a processor."""
    return Measured(generators, Result(2.0, 0, int(2 * rate), b"", {}, 2.0 * generators * busy, []))


@pytest.mark.parametrize(
    ("trials", "most", "again"),
    [
        ([trial(1, 0.5, 1000)], 8, None),
        ([trial(1, 0.9, 1000)], 8, 2),
        ([trial(1, 0.9, 1000)], 1, None),
        ([trial(1, 0.9, 1000), trial(2, 0.9, 1900)], 8, 4),
        ([trial(1, 0.9, 1000), trial(2, 0.9, 1900)], 3, 3),
        ([trial(1, 0.9, 1000), trial(2, 0.9, 1900)], 2, None),
        ([trial(1, 0.9, 1000), trial(2, 0.9, 1010)], 8, None),
        ([trial(1, 0.9, 1000), trial(2, 0.7, 1900)], 8, None),
    ],
    ids=["not limited", "limited", "no core", "still limited", "fewer cores", "no core left", "no help", "limited no longer"],
)
def test_limited_load_is_measured_again(trials: list[Measured], most: int, again: int | None) -> None:
    assert more_generators(trials, most) == again


def test_best_trial_is_not_limited_or_has_the_largest_rate() -> None:
    few, more, slower = trial(1, 0.9, 1000), trial(2, 0.5, 990), trial(2, 0.9, 900)
    assert best([few]) is few
    assert best([few, more]) is more
    assert best([few, slower]) is few
