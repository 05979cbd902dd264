"""Values, ratios within a round, tables and goals of invented trials."""

from __future__ import annotations

from collections import Counter

from kernels.bench.goals.limit import Limit
from loadtest.comparison import tables
from loadtest.comparison.contenders import INFER, OIP_BINARY, SEQSERVE, TRITON
from loadtest.comparison.goals import Goal
from loadtest.comparison.measurements import IN_TIME, NO_MODEL, P50, P99, Case, Measurements
from loadtest.comparison.models import CNN, LSTM
from loadtest.requests import CPU, FRONTENDS, GENERATORS
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
    assert measured.median(OURS, RATE, OURS._replace(callers=8)) is None
    assert Measurements([*rates(OURS, 10, 20), trial(TRITONS, 1, **{RATE: 5})]).ratios(OURS, TRITONS, RATE) == [4]


def test_goals_are_met_missed_or_open() -> None:
    goal = Goal("a rate", Limit(1.3), OURS, RATE, TRITONS)
    assert goal.line(Measurements([*rates(OURS, 14), *rates(TRITONS, 10)]))[-1] == "met"
    assert goal.line(Measurements([*rates(OURS, 12), *rates(TRITONS, 10)]))[-1] == "missed"
    assert goal.line(Measurements(rates(OURS, 12)))[-1] == "open"


def test_rate_that_is_not_held_misses_its_goal() -> None:
    case = Case(LSTM, SEQSERVE, INFER.name, rate=10000)
    goal = Goal("a tail", Limit(5, "ms"), case, P99)
    shares = [[1.0, 1.0, 0.5], [1.0, 0.5, 0.5]]
    held, beyond = (Measurements(trial(case, n, **{IN_TIME: share}) for n, share in enumerate(each)) for each in shares)
    assert goal.line(held)[1:] == ("2 ms", "<= 5 ms", "met")
    assert goal.line(beyond)[1:] == ("beyond", "<= 5 ms", "missed")


def test_tables_have_a_line_for_each_case() -> None:
    slow = Case(CNN, TRITON, INFER.name, rate=1000)
    fast, constant = OURS._replace(callers=0, rate=1000), TRITONS._replace(model=NO_MODEL)
    binary = OURS._replace(endpoint=OIP_BINARY.name)
    trials = [trial(OURS, 0, **{FRONTENDS: 20.0}), trial(TRITONS), trial(binary, 0, **{RATE: 1500.0})]
    trials += [trial(constant, 0, **{RATE: 500.0}), trial(slow, 0, **{IN_TIME: 0.9}), trial(fast, 0, **{IN_TIME: 1.0})]
    closed, ratios, opened, constants = tables.of(Measurements(trials))
    assert [line[:3] for line in closed[1:3]] == [["32", SEQSERVE, INFER.name], ["32", TRITON, OIP_BINARY.name]]
    assert closed[1][-2] == "20 (20 to 20)" and closed[2][-2] == "-"
    assert ratios[1] == [TRITON, OIP_BINARY.name, "answers/s", "1.5 (1.5 to 1.5)"]
    assert opened[1:] == [[TRITON, INFER.name, "beyond"], [SEQSERVE, INFER.name, "2 (2 to 2)"]]
    assert len(constants) == 2
