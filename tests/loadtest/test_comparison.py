"""Ratios within a round and goals of invented trials of several servers."""

from __future__ import annotations

from collections import Counter

from kernels.bench.goals.limit import Limit
from loadtest.comparison.contenders import INFER, OIP_BINARY, SEQSERVE, TRITON
from loadtest.comparison.goals import Goal
from loadtest.comparison.measurements import IN_TIME, P50, P99, Case, Measurements
from loadtest.comparison.models import CNN, LSTM
from loadtest.requests import CPU, GENERATORS
from loadtest.scenarios.rounds import RATE, Trial, Values

OURS, TRITONS = Case(CNN, SEQSERVE, INFER.name, 32), Case(CNN, TRITON, OIP_BINARY.name, 32)


def trial(case: Case, round: int = 0, **values: float) -> Trial:
    everything: Values = {RATE: 1000.0, P50: 1.0, P99: 2.0, CPU: 50.0, GENERATORS: 10.0} | values
    return Trial(case.labels(), round, 100, Counter(), everything)


def rates(case: Case, *values: float) -> list[Trial]:
    return [trial(case, number, **{RATE: value}) for number, value in enumerate(values)]


def test_ratios_are_taken_within_a_round_that_has_both() -> None:
    measured = Measurements([*rates(OURS, 10, 20, 30), *rates(TRITONS, 10, 10, 60)])
    assert measured.ratios(OURS, TRITONS, RATE) == [1, 2, 0.5] and measured.median(OURS, RATE, TRITONS) == 1
    assert Measurements([*rates(OURS, 10, 20), trial(TRITONS, 1, **{RATE: 5})]).ratios(OURS, TRITONS, RATE) == [4]


def test_goals_are_met_missed_or_open() -> None:
    goal = Goal("a rate", Limit(1.3), OURS, RATE, TRITONS)
    lines = [goal.line(Measurements([*rates(OURS, ours), *rates(TRITONS, 10)]))[-1] for ours in (14, 12)]
    assert [*lines, goal.line(Measurements(rates(OURS, 12)))[-1]] == ["met", "missed", "open"]
    case = Case(LSTM, SEQSERVE, INFER.name, rate=10000)
    for shares, expected in (([1, 1, 0.5], ("2 ms", "<= 5 ms", "met")), ([1, 0.5, 0.5], ("beyond", "<= 5 ms", "missed"))):
        trials = [trial(case, n, **{IN_TIME: share}) for n, share in enumerate(shares)]
        assert Goal("a tail", Limit(5, "ms"), case, P99).line(Measurements(trials))[1:] == expected
