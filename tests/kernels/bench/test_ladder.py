"""Every rung agrees with the reference, a wrong rung is reported, and streams may run in any order that events allow."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from kernels.bench import __main__ as command
from kernels.bench import timing
from kernels.bench.agreement import expected_answer
from kernels.bench.baselines.baseline import TimedCall
from kernels.bench.case import BenchCase, random_case
from kernels.bench.ladder import climb as climbing
from kernels.bench.ladder import command as ladder
from kernels.bench.ladder import figure, loop, report
from kernels.bench.ladder.climb import Climb, climb, workload_for
from kernels.bench.ladder.loop import Plan, looped
from kernels.bench.ladder.rungs import RUNGS, Rung
from kernels.bench.report import Setting
from kernels.bench.timing import NotCapturableError, Spread
from kernels.bench.workload import ENCODER, Workload
from tests.kernels.bench.conftest import CPU

STACK = Workload("lstm", 3, 12, 5, 6, kind=ENCODER, depth=3)
"""The last group of steps is shorter than the others."""
SETTING = Setting("Abacus, 2 cores", "2026-01-02", {"torch": "2"}, threads=1)
ON_CPU = [1, 2, 5, 6, 8, 10]
"""Rungs without a stream, a kernel or a graph."""


def climbed(*rungs: Rung, workload: Workload = STACK, device: torch.device = CPU) -> Climb:
    return climb(workload, rungs, device, 0.0, lambda _: None)


def numbers(result: Climb) -> list[int]:
    return [step.rung.number for step in result.steps]


def always(_: torch.device) -> None:
    """A rung that no device skips."""


def wrong(case: BenchCase) -> TimedCall:
    run = RUNGS[0].build(case).run
    return TimedCall(lambda: run() * 1.001)


def failing(case: BenchCase) -> TimedCall:
    raise RuntimeError("no such instruction")


def test_rungs_of_a_cpu_agree_and_the_others_are_named() -> None:
    result = climbed(*RUNGS)
    assert not result.wrong and numbers(result) == ON_CPU
    assert all(step.error < 1e-5 and step.called.repetitions >= timing.AT_LEAST for step in result.steps)
    assert result.skipped == [
        "3 two streams is skipped: a CPU has no streams",
        "4 fused pointwise operations is skipped: its kernel needs an NVIDIA GPU",
        "7 layers side by side is skipped: a CPU has no streams",
        "9 torch.nn.LSTM, in a graph is skipped: a CPU has no CUDA graphs",
    ]


def test_each_rung_adds_one_optimisation() -> None:
    plans: list[Plan] = [rung.build.args[0] for rung in RUNGS if isinstance(rung.build, partial)]
    assert plans[0] == Plan() and len(plans) == 7
    for before, after in pairwise(plans):
        changed = [name for name in Plan.__slots__ if getattr(before, name) != getattr(after, name)]
        assert len(changed) == 1 and not getattr(before, changed[0]) > 1
    assert [rung.published for rung in RUNGS[:7]] == [1, 2.1, 2.8, 5.5, 6.3, 6.5, 11.1]


@pytest.mark.parametrize("rung", RUNGS[:7], ids=str)
def test_call_can_be_repeated(rung: Rung) -> None:
    case = random_case(STACK, CPU)
    with torch.no_grad():
        call = rung.build(case)
        first = call.run().clone()
        assert torch.equal(first, call.run())
        assert expected_answer(case).error(first) < 1e-5


def test_wrong_rung_is_reported_and_not_timed() -> None:
    result = climbed(RUNGS[0], replace(RUNGS[1], build=wrong), replace(RUNGS[4], build=failing), RUNGS[5])
    assert numbers(result) == [1, 6]
    disagrees, fails = result.wrong
    assert disagrees.startswith(f"2 one product for all gates, {STACK}: the answer has an error of")
    assert fails == f"5 transposed weights, {STACK}: RuntimeError: no such instruction"


@pytest.mark.parametrize("layers, groups", [(1, 1), (1, 5), (4, 1), (3, 7), (7, 3)])
@pytest.mark.parametrize("wavefront", [False, True])
def test_groups_of_steps_follow_those_they_need(layers: int, groups: int, wavefront: bool) -> None:
    order = list(loop._order(layers, groups, wavefront))
    assert sorted(order) == [(layer, group) for layer in range(layers) for group in range(groups)]
    at = {place: number for number, place in enumerate(order)}
    for layer, group in order:
        assert layer == 0 or at[layer - 1, group] < at[layer, group]
        assert group == 0 or at[layer, group - 1] < at[layer, group]
    if wavefront and min(layers, groups) > 1:
        assert at[1, 0] < at[0, groups - 1]


class Streams:
    """Replaces the streams of torch. Launches wait in the queue of their stream, and `drain` makes them in a random order that events
    allow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, events: bool = True) -> None:
        self.queues: dict[int, list[tuple[str, Any]]] = {0: []}
        self.recorded: set[tuple[int, int]] = set()
        self.counts: dict[int, int] = {}
        self.current = 0
        self.events = events
        monkeypatch.setattr(torch.cuda, "Stream", self._new)
        monkeypatch.setattr(torch.cuda, "Event", lambda: _Event(self, len(self.counts)))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: _Stream(self, 0))
        monkeypatch.setattr(torch.cuda, "set_stream", self.use)
        monkeypatch.setattr(Plan, "on", lambda plan, _: replace(plan, fused=False))
        monkeypatch.setattr(loop._Launches, "add", lambda launches, *added: self._add(launches, added))

    def _new(self, priority: int) -> _Stream:
        number = len(self.queues)
        self.queues[number] = []
        return _Stream(self, number)

    def _add(self, launches: Any, added: Sequence[Callable[[], object]]) -> None:
        for launch in added:
            of_streams = isinstance(getattr(getattr(launch, "func", None), "__self__", None), (Streams, _Stream, _Event))
            launches._launches.append(launch if of_streams else partial(self.queue, "launch", launch))

    def use(self, stream: _Stream) -> None:
        self.current = stream.number

    def queue(self, kind: str, what: Any, stream: int | None = None) -> None:
        self.queues[self.current if stream is None else stream].append((kind, what))

    def drain(self, seed: int) -> None:
        chooser = random.Random(seed)
        while waiting := [queue for queue in self.queues.values() if queue and self._may_run(*queue[0])]:
            kind, what = chooser.choice(waiting).pop(0)
            if kind == "launch":
                what()
            elif kind == "record":
                self.recorded.add(what)
        assert not any(self.queues.values()), "a stream waits for an event that is never recorded"

    def _may_run(self, kind: str, what: Any) -> bool:
        return kind != "wait" or not self.events or what in self.recorded


class _Stream:
    def __init__(self, streams: Streams, number: int) -> None:
        self.streams, self.number = streams, number

    def wait_stream(self, other: _Stream) -> None:
        """Nothing runs before or after the call."""

    def wait_event(self, event: _Event) -> None:
        self.streams.queue("wait", (event.number, self.streams.counts[event.number]), self.number)


class _Event:
    def __init__(self, streams: Streams, number: int) -> None:
        self.streams, self.number = streams, number
        streams.counts[number] = 0

    def record(self, stream: _Stream) -> None:
        self.streams.counts[self.number] += 1
        self.streams.queue("record", (self.number, self.streams.counts[self.number]), stream.number)


def answers(plan: Plan, case: BenchCase, streams: Streams, seeds: Sequence[int]) -> list[Tensor]:
    """Return the answer of a call for each seed."""
    with torch.no_grad():
        call = looped(plan, case)
        collected = []
        for seed in seeds:
            answer = call.run()
            streams.drain(seed)
            collected.append(answer.clone())
    return collected


STREAMED = [rung.build.args[0] for rung in (RUNGS[2], RUNGS[5], RUNGS[6]) if isinstance(rung.build, partial)]


@pytest.mark.parametrize("plan", STREAMED, ids=["two streams", "groups of steps", "wavefront"])
def test_any_order_of_streams_gives_the_same_answer(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(STACK, CPU)
    expected, streams = expected_answer(case), Streams(monkeypatch)
    found = answers(plan, case, streams, range(20))
    assert len(streams.queues) == 1 + 2 * (STACK.depth if plan.wavefront else 1)
    assert all(expected.error(answer) < 1e-5 and torch.equal(answer, found[0]) for answer in found)


@pytest.mark.parametrize("plan", STREAMED, ids=["two streams", "groups of steps", "wavefront"])
def test_streams_need_their_events(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    found = answers(plan, random_case(STACK, CPU), Streams(monkeypatch, events=False), range(20))
    assert not all(torch.equal(answer, found[0]) for answer in found)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Climb]:
    """Return a climb that behaves as on a GPU where a call takes 9 us and a replay 3 us."""
    replayed = object()

    def graph_call(call: Callable[[], Any], check: Callable[[Any], object]) -> object:
        answer = call()
        if answer is None:
            raise NotCapturableError("it waits for the device")
        check(answer)
        return replayed

    def eager(call: object, *_: object) -> Spread:
        us = 3.0 if call is replayed else 9.0
        return Spread(us, us, us, 10)

    monkeypatch.setattr(climbing, "random_case", lambda workload, _: random_case(workload, CPU))
    monkeypatch.setattr(timing, "graph_call", graph_call)
    monkeypatch.setattr(timing, "eager", eager)
    return partial(climbed, device=torch.device("cuda"))


def test_last_rungs_are_called_in_a_graph(on_cuda: Callable[..., Climb]) -> None:
    result = on_cuda(RUNGS[0], RUNGS[7], RUNGS[8], RUNGS[9])
    assert not result.wrong
    times = [(step.called.median_us, step.in_graph and step.in_graph.median_us) for step in result.steps]
    assert times == [(9, 3), (9, 3), (3, 3), (3, 3)]
    assert [result.speedup(step.called) for step in result.steps] == [1, 1, 3, 3]
    assert {result.speedup(step.in_graph, in_graph=True) for step in result.steps} == {1}


def test_call_without_a_graph_is_timed_as_called(on_cuda: Callable[..., Climb]) -> None:
    def walking(case: BenchCase) -> TimedCall:
        encode = case.encoder("framework")
        return TimedCall(lambda: None, lambda _: encode())

    result = on_cuda(Rung(9, "walking", walking, always, in_graph=True))
    assert [(step.called.median_us, step.in_graph) for step in result.steps] == [(9, None)]
    assert result.skipped == ["9 walking has no graph: it waits for the device"]


def timed(*steps: tuple[int, float, float | None], peak: float | None = 1e6) -> Climb:
    """Return a climb with the number of each rung, and its times as called and in a graph."""

    def spread(us: float) -> Spread:
        return Spread(us, us, us, 20)

    found = [
        climbing.Step(RUNGS[number - 1], spread(called), None if graph is None else spread(graph), 1e-7)
        for number, called, graph in steps
    ]
    return Climb(workload_for("cuda", "float16", quick=False), peak, found)


def test_table_compares_with_the_first_rung_and_the_published_ladder() -> None:
    # Four layers multiply 53,687,091,200 times: 107,374 GFLOP/s in a millisecond.
    text = report.table(timed((1, 8000.0, 4000.0), (2, 4000.0, 1000.0), (10, 1000.0, 1000.0)))
    title, _, heading, first, second, ours = text.splitlines()
    assert title == "lstm encoder 64 x 100, 512 -> 512, float16, 4 levels; peak 2 TFLOP/s"
    assert heading.split()[-4:] == ["graph", "speed-up", "published,", "M40"]
    assert first.split()[-9:] == ["(8000-8000)", "13422", "6.7e+02", "%", "1", "4000", "(4000-4000)", "1", "1"]
    assert second.split()[-7:] == ["1.3e+03", "%", "2", "1000", "(1000-1000)", "4", "2.1"]
    assert ours.split()[-5:] == ["8", "1000", "(1000-1000)", "4", "-"]


def test_records_have_the_fields_of_the_bench_and_the_ratios() -> None:
    first, graph, ours, ours_in_graph = report.records(timed((1, 8000.0, 4000.0), (10, 1000.0, 1000.0)), SETTING)
    assert (first["rung"], first["backend"], first["timing"]) == (1, "products and operations by gate", "called")
    assert (first["family"], first["dtype"], first["layers"], first["device"]) == ("lstm", "float16", 4, "Abacus, 2 cores")
    assert first["gflops"] == pytest.approx(13421.77) and first["share_of_peak"] == pytest.approx(6.71089)
    assert (first["speedup"], first["published_speedup"], graph["timing"]) == (1, 1, "graph")
    assert (ours["speedup"], ours_in_graph["speedup"]) == (8, 4) and "published_speedup" not in ours


@pytest.fixture
def tiny_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "measured_peaks", lambda *_: None)
    monkeypatch.setattr(ladder, "workload_for", lambda *_: STACK)
    monkeypatch.setattr(ladder, "product_rate", lambda *_: 1000.0)


def test_ladder_writes_records_and_text(
    tiny_ladder: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ladder, "find_spec", lambda _: None)
    assert command.main(["ladder", "--quick", "--out", str(tmp_path)]) == 0
    records, text = sorted(tmp_path.iterdir())
    assert records.name.startswith("ladder-") and (records.suffix, text.suffix) == (".jsonl", ".txt")
    assert [json.loads(line)["rung"] for line in records.read_text().splitlines()] == ON_CPU
    printed = capsys.readouterr()
    assert text.read_text() in printed.out and "install matplotlib" in printed.out
    assert "3 two streams is skipped: a CPU has no streams" in text.read_text()
    assert f"1 products and operations by gate, {STACK}" in printed.err


def test_wrong_rung_sets_exit_status_1(
    tiny_ladder: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ladder, "RUNGS", (RUNGS[0], replace(RUNGS[1], build=wrong)))
    monkeypatch.setattr(ladder, "find_spec", lambda _: None)
    assert command.main(["ladder", "--quick", "--out", str(tmp_path)]) == 1
    assert "WRONG: 2 one product for all gates" in capsys.readouterr().out
    records, text = sorted(tmp_path.iterdir())
    assert len(records.read_text().splitlines()) == 1 and "WRONG" in text.read_text()


def test_chart_has_every_speed_up(tiny_ladder: None, tmp_path: Path) -> None:
    records = [*report.records(timed((1, 8000.0, 4000.0), (10, 611.0, 611.0)), SETTING)]
    path = tmp_path / "ladder.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    assert figure.main([str(path)]) == figure.main([str(path), str(tmp_path / "again.svg")]) == 0
    drawn = (tmp_path / "ladder.svg").read_bytes()
    assert drawn == (tmp_path / "again.svg").read_bytes()
    texts = [element.text for element in ElementTree.fromstring(drawn).iter() if element.tag.endswith("text")]
    assert texts.count("11.1") == 2 and {"13.1", "6.55", "float16", "published: Tesla M40, float32"} <= set(texts)
    assert "LSTM, 4 layers of 512 units, 64 rows of 100 steps, Abacus, 2 cores, 2026-01-02" in texts


def test_chart_needs_the_first_rung(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ladder.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in report.records(timed((2, 1.0, 1.0)), SETTING)))
    assert figure.main([str(path)]) == 1
    assert "has no times of the first rung" in capsys.readouterr().err and not (tmp_path / "ladder.svg").exists()


def test_command_draws_the_chart(tiny_ladder: None, tmp_path: Path) -> None:
    assert command.main(["ladder", "--quick", "--out", str(tmp_path)]) == 0
    (chart,) = tmp_path.glob("*.svg")
    ElementTree.parse(chart)
