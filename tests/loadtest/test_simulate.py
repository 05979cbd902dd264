"""A simulation answers every sequence once, matches results computed by hand, and places sequences like a frontend."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from PIL import Image

from loadtest.__main__ import main
from loadtest.scenarios import simulate_batching as command
from loadtest.simulation import arrivals as simulated_arrivals
from loadtest.simulation import costs, figures, policies
from loadtest.simulation.clock import Clock, SimulatedFrontend
from loadtest.simulation.figures import MakePolicy, SimulationCase
from loadtest.simulation.goals import goals
from loadtest.simulation.plan import Simulation, SimulationPlan
from loadtest.simulation.policies import BatchingPolicy, Continuous, SimulatedSequence
from service.engine.batching import scheduler
from service.engine.batching.batch_builder import SchedulerLimits
from service.engine.execution.cost_model import Cost
from service.frontend.dispatch.connection import PredictedWait

PLAIN = Cost(1.0, 0.1, 0.0)
"""A batch takes 1 s and 0.1 s for each step, with any number of rows."""
GPU = Cost(12e-6, 0.8e-6, 2e-9)
TINY = SimulationPlan(
    sequences=2000, searching=2000, apiece=100, loads=(0.7,), budgets_ms=(0.5,), replicas=(1, 3), mixtures=("short", "mixed")
)


def made(policy: str, cost: Cost = PLAIN, rows: int = 4, budget: float = 2.0, timer: float = 0.5) -> BatchingPolicy:
    return policies.make(policy, cost, SchedulerLimits(1 << 40, rows, 4096, budget), timer)


def maker(policy: str) -> MakePolicy:
    return lambda: made(policy, GPU, rows=64, budget=0.0005, timer=0.0001)


def answered(policy: BatchingPolicy, *arrivals: tuple[float, int]) -> list[float]:
    """Return the times of the answers to sequences, given the arrival and the steps of each."""
    sequences = [SimulatedSequence(steps, moment) for moment, steps in arrivals]
    Clock([policy], PLAIN, sequences).run()
    return [sequence.answered for sequence in sequences]


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("arrivals", ["poisson", "bursty"])
@pytest.mark.parametrize("mixture", simulated_arrivals.MIXTURES)
@pytest.mark.parametrize("policy", policies.NAMES)
def test_every_sequence_is_answered_once_and_not_too_early(policy: str, mixture: str, arrivals: str, replicas: int) -> None:
    sequences = simulated_arrivals.sequences(mixture, 50_000, 400, arrivals)
    totals = Clock([maker(policy)() for _ in range(replicas)], GPU, sequences).run()
    for sequence in sequences:
        assert sequence.answered - sequence.arrived >= 0.999 * GPU.of(sequence.steps, sequence.steps)
    assert 0 < totals.busy <= totals.span * replicas
    assert 0 < totals.batches <= totals.rows


@pytest.mark.parametrize("policy", policies.NAMES)
def test_figures_depend_only_on_the_seed(policy: str) -> None:
    first, again, other = (
        figures.run(SimulationCase(GPU, "mixed", 2000, "bursty", seed), maker(policy), 30_000, replicas=2, started=1.5)
        for seed in (0, 0, 1)
    )
    assert first == again != other


def test_lengths_follow_the_mixture_at_every_rate() -> None:
    slow, fast = ([sequence.steps for sequence in simulated_arrivals.sequences("mixed", rate, 20_000)] for rate in (1.0, 1e6))
    assert slow == fast
    assert slow.count(4096) / len(slow) == pytest.approx(0.01, rel=0.2)
    assert slow.count(10) == len(slow) - slow.count(4096)


def test_continuous_policy_is_the_scheduler_of_the_service() -> None:
    policy = made("continuous")
    assert isinstance(policy, Continuous)
    assert type(policy.scheduler) is scheduler.Scheduler


def test_long_sequence_does_not_block_a_short_one() -> None:
    budget = 4.0
    long, short = answered(made("continuous", budget=budget), (0.0, 400), (0.5, 8))
    steps = PLAIN.steps_within(budget, rows=1)
    first = PLAIN.of(steps, steps)  # the long sequence alone takes a whole budget
    assert first + PLAIN.of(8, 16) <= short <= first + budget + 1e-9
    assert long > PLAIN.of(400, 400)


def test_static_batch_is_padded_and_not_joined() -> None:
    assert answered(made("static"), (0.0, 2), (0.0, 10), (0.1, 1)) == pytest.approx([2.0, 2.0, 3.1])
    policy = made("static")
    for steps in (2, 10, 3, 4, 5):
        policy.add(SimulatedSequence(steps), 0.0)
    assert policy.backlog_seconds() == pytest.approx(2 * 1.0 + 0.1 * 2 * (24 // 5))
    batch = policy.next_batch(0.0)
    assert batch is not None
    assert (batch.rows, batch.longest, batch.tokens, batch.steps) == (4, 10, 40, 19)


def test_timer_holds_a_partial_batch_for_its_oldest_sequence() -> None:
    assert answered(made("timer"), (0.0, 1), (0.4, 1), (0.6, 1)) == pytest.approx([1.6, 1.6, 2.7])
    assert answered(made("timer", rows=2), (0.0, 1), (0.4, 1)) == pytest.approx([1.5, 1.5])
    assert answered(made("timer"), (0.0, 1), (1.55, 1)) == pytest.approx([1.6, 3.15])


def test_oldest_bucket_of_similar_lengths_runs_first() -> None:
    arrivals = [(0.0, 16), (0.1, 2), (0.2, 16), (0.3, 9), (0.4, 1)]
    first, second, third = 2.6, 2.6 + 1.2, 2.6 + 1.2 + 2.6
    assert answered(made("bucketed"), *arrivals) == pytest.approx([first, second, third, third, third + 1.1])


def test_long_sequence_alone_takes_whole_budgets() -> None:
    cost = Cost(1.0, 1.0, 0.0)
    pace = figures.solo_steps_per_second(cost, lambda: made("continuous", cost, budget=33.0))
    assert pace == pytest.approx(4096 / (128 * 33))


def test_capacity_is_the_rate_of_full_batches() -> None:
    capacity = figures.capacity(SimulationCase(GPU, "short", 20_000), maker("static"), near=1e6)
    assert capacity == pytest.approx(64 / GPU.of(10, 640), rel=0.06)


def test_overload_leaves_the_excess_unanswered() -> None:
    rate = 1.25 * 64 / GPU.of(10, 640)
    case = SimulationCase(GPU, "short", 20_000)
    assert figures.run(case, maker("static"), rate).growth == pytest.approx(0.2, abs=0.02)


def test_frontend_places_like_the_backlogs_of_the_service() -> None:
    source, frontend = random.Random(0), SimulatedFrontend(5)
    backlogs, order = [PredictedWait() for _ in range(5)], list(range(5))
    now, frame = 0.0, 0
    for _ in range(500):
        now += source.expovariate(1.0)
        if source.random() < 0.3:
            index, seconds = source.randrange(5), source.choice([0.0, 1.0, 3.0])
            frontend.report(index, seconds, now)
            backlogs[index].report(seconds, frame, now)
            continue
        frame += 1
        expected = min(order, key=lambda index: round(backlogs[index].seconds(now), 9))
        order.remove(expected)
        order.append(expected)
        assert frontend.choose(0.25, now) == expected
        backlogs[expected].add(frame, 0.25)
        backlogs[expected].sent([frame], frame)


def _simulation() -> Simulation:
    plan = SimulationPlan(sequences=15_000, searching=20_000, budgets_ms=(0.5,), mixtures=("mixed",))
    return Simulation(GPU, plan, budget_ms=0.5)


@pytest.mark.slow
def test_short_sequences_meet_their_latency_goals() -> None:
    simulation = _simulation()
    results = list(goals([*simulation.over_budgets(), *simulation.at_static_rate()]))
    times = [goal for goal in results if "p99" in goal.description]
    assert len(times) == 2
    assert all(goal.met for goal in times), "\n".join(map(str, results))


@pytest.mark.slow
def test_command_writes_records_and_charts_and_prints_goals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "QUICK", TINY)
    [name] = list(costs.read())[:1]
    assert main(["simulate", "batching", "--quick", "--cost", name, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / f"simulate-{name}.jsonl").read_text().splitlines()]
    assert {record["part"] for record in records} == {"loads", "bursts", "same rate", "budgets", "replicas"}
    assert {record["policy"] for record in records} == set(policies.NAMES)
    assert all(record["short_p50_us"] <= record["short_p99_us"] <= record["short_p99.9_us"] for record in records)
    assert all((record["long_share_p50"] is None) == (record["mixture"] == "short") for record in records)
    assert len([line for line in printed.splitlines() if line.startswith(("met: ", "MISSED: "))]) == 3
    for part in ("loads", "budgets", "replicas"):
        with Image.open(tmp_path / f"simulate-{name}-{part}.png") as image:
            image.verify()


def test_unknown_cost_is_reported_with_the_known_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "batching", "--cost", "abacus", "--out", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert "abacus" in printed and "h200-lstm-512" in printed
    assert not list(tmp_path.iterdir())


def test_measured_cost_is_added_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(costs, "UNITS", (8,))
    monkeypatch.setattr(costs, "WARM_UPS", 1)
    file = tmp_path / "costs.json"
    file.write_text('{"old": {"model": "a", "device": "b", "date": "c", "fixed": 1, "per_step": 2, "per_token": 3}}')
    assert main(["simulate", "batching", "--measure", "cpu", "--costs", str(file)]) == 0
    written = costs.read(file)
    assert written.pop("old").cost == Cost(1, 2, 3)
    [(name, measured)] = written.items()
    assert name.endswith("-lstm-8") and name in capsys.readouterr().out
    assert measured.per_step > 0 and math.isfinite(sum(measured.cost))
