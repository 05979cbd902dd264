"""A simulation answers everybody once, reckons what can be reckoned by hand, and places sequences as a front does."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from PIL import Image

from loadtest import simulate as command
from loadtest.simulation import costs, figures, loads, ways
from loadtest.simulation.clock import Clock, Frontend
from loadtest.simulation.figures import Case, Make
from loadtest.simulation.goals import goals
from loadtest.simulation.plan import Plan, Simulation
from loadtest.simulation.ways import Continuous, Sequence, Way
from service.engine.batching import scheduler
from service.engine.batching.scheduler import Limits
from service.engine.execution.cost_model import Cost
from service.frontend.dispatch.connection import PredictedWait

PLAIN = Cost(1.0, 0.1, 0.0)
"""A turn of so many steps takes 1 s and a tenth of that in seconds, however many rows it has."""
GPU = Cost(12e-6, 0.8e-6, 2e-9)
TINY = Plan(
    sequences=2000,
    searching=2000,
    apiece=100,
    loads=(0.7,),
    budgets_ms=(0.5,),
    replicas=(1, 3),
    mixtures=("short", "mixed"),
)


def made(way: str, cost: Cost = PLAIN, rows: int = 4, budget: float = 2.0, timer: float = 0.5) -> Way:
    return ways.make(way, cost, Limits(1 << 40, rows, 4096, budget), timer)


def maker(way: str) -> Make:
    return lambda: made(way, GPU, rows=64, budget=0.0005, timer=0.0001)


def answered(way: Way, *came: tuple[float, int]) -> list[float]:
    """When each is answered, of those that come at a moment with so many steps."""
    sequences = [Sequence(steps, moment) for moment, steps in came]
    Clock([way], PLAIN, sequences).run()
    return [one.answered for one in sequences]


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("arrivals", ["poisson", "bursty"])
@pytest.mark.parametrize("mixture", loads.MIXTURES)
@pytest.mark.parametrize("way", ways.NAMES)
def test_who_comes_is_answered_once_and_never_before_he_could_be(way: str, mixture: str, arrivals: str, replicas: int) -> None:
    sequences = loads.sequences(mixture, 50_000, 400, arrivals)
    totals = Clock([maker(way)() for _ in range(replicas)], GPU, sequences).run()
    for one in sequences:
        assert one.answered - one.arrived >= 0.999 * GPU.of(one.steps, one.steps)
    assert 0 < totals.worked <= totals.span * replicas
    assert 0 < totals.batches <= totals.rows


@pytest.mark.parametrize("way", ways.NAMES)
def test_a_seed_gives_the_same_figures_and_another_one_others(way: str) -> None:
    first, again, other = (
        figures.run(Case(GPU, "mixed", 2000, "bursty", seed), maker(way), 30_000, replicas=2, begun=1.5) for seed in (0, 0, 1)
    )
    assert first == again != other


def test_lengths_are_those_of_the_mixture_and_the_same_for_every_rate() -> None:
    slow, fast = ([one.steps for one in loads.sequences("mixed", rate, 20_000)] for rate in (1.0, 1e6))
    assert slow == fast
    assert slow.count(4096) / len(slow) == pytest.approx(0.01, rel=0.2)
    assert slow.count(10) == len(slow) - slow.count(4096)


def test_continuous_is_the_scheduler_of_the_service() -> None:
    way = made("continuous")
    assert isinstance(way, Continuous)
    assert type(way.scheduler) is scheduler.Scheduler


def test_the_scheduler_lets_a_short_sequence_out_of_a_long_ones_way() -> None:
    budget = 4.0
    long, short = answered(made("continuous", budget=budget), (0.0, 400), (0.5, 8))
    steps = PLAIN.steps_within(budget, rows=1)
    first = PLAIN.of(steps, steps)  # the long one alone, by a whole budget
    assert first + PLAIN.of(8, 16) <= short <= first + budget + 1e-9
    assert long > PLAIN.of(400, 400)


def test_a_static_batch_is_padded_to_its_longest_and_nobody_joins_it() -> None:
    assert answered(made("static"), (0.0, 2), (0.0, 10), (0.1, 1)) == pytest.approx([2.0, 2.0, 3.1])
    way = made("static")
    for steps in (2, 10, 3, 4, 5):
        way.add(Sequence(steps), 0.0)
    assert way.backlog_seconds() == pytest.approx(2 * 1.0 + 0.1 * 2 * (24 // 5))
    batch = way.next_batch(0.0)
    assert batch is not None
    assert (batch.rows, batch.longest, batch.tokens, batch.steps) == (4, 10, 40, 19)


def test_a_timer_holds_a_batch_until_it_is_full_or_its_oldest_has_waited() -> None:
    assert answered(made("timer"), (0.0, 1), (0.4, 1), (0.6, 1)) == pytest.approx([1.6, 1.6, 2.7])
    assert answered(made("timer", rows=2), (0.0, 1), (0.4, 1)) == pytest.approx([1.5, 1.5])
    assert answered(made("timer"), (0.0, 1), (1.55, 1)) == pytest.approx([1.6, 3.15])


def test_a_bucket_has_like_lengths_and_the_one_whose_first_is_oldest_runs() -> None:
    came = [(0.0, 16), (0.1, 2), (0.2, 16), (0.3, 9), (0.4, 1)]
    first, second, third = 2.6, 2.6 + 1.2, 2.6 + 1.2 + 2.6
    assert answered(made("bucketed"), *came) == pytest.approx([first, second, third, third, third + 1.1])


def test_one_long_sequence_alone_goes_on_by_whole_budgets() -> None:
    cost = Cost(1.0, 1.0, 0.0)
    pace = figures.solo_steps_per_second(cost, lambda: made("continuous", cost, budget=33.0))
    assert pace == pytest.approx(4096 / (128 * 33))


def test_capacity_is_what_full_turns_give() -> None:
    found = figures.capacity(Case(GPU, "short", 20_000), maker("static"), near=1e6)
    assert found == pytest.approx(64 / GPU.of(10, 640), rel=0.06)


def test_a_load_beyond_capacity_leaves_as_much_over_as_it_is_beyond() -> None:
    rate = 1.25 * 64 / GPU.of(10, 640)
    assert figures.run(Case(GPU, "short", 20_000), maker("static"), rate).growth == pytest.approx(0.2, abs=0.02)


def test_a_front_places_as_backlogs_of_all_replicas_would_have_it() -> None:
    source, frontend = random.Random(0), Frontend(5)
    backlogs, order = [PredictedWait() for _ in range(5)], list(range(5))
    now, frame = 0.0, 0
    for _ in range(500):
        now += source.expovariate(1.0)
        if source.random() < 0.3:
            place, seconds = source.randrange(5), source.choice([0.0, 1.0, 3.0])
            frontend.report(place, seconds, now)
            backlogs[place].report(seconds, frame, now)
            continue
        frame += 1
        expected = min(order, key=lambda place: round(backlogs[place].seconds(now), 9))
        order.remove(expected)
        order.append(expected)
        assert frontend.place(0.25, now) == expected
        backlogs[expected].add(frame, frame, 0.25)


def _simulation() -> Simulation:
    plan = Plan(sequences=15_000, searching=20_000, budgets_ms=(0.5,), mixtures=("mixed",))
    return Simulation(GPU, plan, budget_ms=0.5)


def test_short_sequences_wait_for_no_long_one() -> None:
    simulation = _simulation()
    found = list(goals([*simulation.over_budgets(), *simulation.beside_static()]))
    times = [goal for goal in found if "p99" in goal.wanted]
    assert len(times) == 2
    assert all(goal.met for goal in times), "\n".join(map(str, found))


def test_the_command_writes_records_and_pictures_and_says_what_was_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "QUICK", TINY)
    [name] = list(costs.read())[:1]
    assert command.main(["--quick", "--cost", name, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / f"simulate-{name}.jsonl").read_text().splitlines()]
    assert {record["part"] for record in records} == {"loads", "bursts", "beside", "budgets", "replicas"}
    assert {record["way"] for record in records} == set(ways.NAMES)
    assert all(record["short_p50_us"] <= record["short_p99_us"] <= record["short_p99.9_us"] for record in records)
    assert all((record["long_share_p50"] is None) == (record["mixture"] == "short") for record in records)
    assert len([line for line in printed.splitlines() if line.startswith(("met: ", "MISSED: "))]) == 3
    for part in ("loads", "budgets", "replicas"):
        with Image.open(tmp_path / f"simulate-{name}-{part}.png") as image:
            image.verify()


def test_a_cost_that_is_not_in_the_file_is_named_with_those_that_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--cost", "abacus", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "abacus" in said and "h200-lstm-512" in said
    assert not list(tmp_path.iterdir())


def test_what_was_measured_is_written_beside_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(costs, "UNITS", (8,))
    monkeypatch.setattr(costs, "WARM_UPS", 1)
    file = tmp_path / "costs.json"
    file.write_text('{"old": {"model": "a", "device": "b", "date": "c", "fixed": 1, "per_step": 2, "per_token": 3}}')
    assert command.main(["--measure", "cpu", "--costs", str(file)]) == 0
    found = costs.read(file)
    assert found.pop("old").cost == Cost(1, 2, 3)
    [(name, entry)] = found.items()
    assert name.endswith("-lstm-8") and name in capsys.readouterr().out
    assert entry.per_step > 0 and math.isfinite(sum(entry.cost))
