"""Sessions move in any order of events, over a network that loses, delays and repeats messages: one owner at a time, and no wrong sum."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from service.engine.batching.moves import Moves, Take
from service.ipc.messages import TakeSession
from service.mover.search import Search
from tests.mover.story import NAMES, REPLICAS, Story, any_event

EVENTS = 300
SEEDS = 15
"""Stories of this test; tests/long has more."""
PLANTED_SEEDS = 100
"""Stories within which a planted fault shows."""
PLACES = st.integers(0, REPLICAS - 1)
ANY = st.integers(0, 1 << 16)
STEPS = st.lists(st.integers(1, 3), min_size=1, max_size=3)


def tell(seed: int, events: int = EVENTS) -> Story:
    """Run one story to its end."""
    story, chance = Story(), random.Random(seed)
    for _ in range(events):
        any_event(story, chance)
    story.finish()
    return story


def test_every_story_ends_well() -> None:
    total = sum((tell(seed).counts for seed in range(SEEDS)), start=Counter[str]())
    for event in ("answers", "SessionGiven", "TicketReport", "crashes", "pauses", "lost replies", "session_unreachable"):
        assert total[event], f"{event} never happened"


def test_story_finds_a_giver_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def give(moves: Moves, wish: TakeSession, now: float, *, is_open: bool, is_busy: bool) -> Take:
        return Take.GIVE if is_open else Take.REFUSE

    monkeypatch.setattr(Moves, "take", give)
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(PLANTED_SEEDS):
            tell(seed)


def test_story_finds_a_search_that_trusts_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = Search.outcome

    def hasty(search: Search, replicas: set[str], gone: set[str], now: float, *, complete: bool) -> object:
        return outcome(search, search._answered & replicas, gone, now, complete=complete)

    monkeypatch.setattr(Search, "outcome", hasty)
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(PLANTED_SEEDS):
            tell(seed)


class MovingMachine(RuleBasedStateMachine):
    """Any order of events, which hypothesis makes short when it finds a fault."""

    def __init__(self) -> None:
        super().__init__()
        self.story = Story()

    @rule(name=st.sampled_from(NAMES), place=PLACES, values=STEPS, says_steps=st.booleans())
    def chunk(self, name: str, place: int, values: list[int], says_steps: bool) -> None:
        self.story.chunk(name, place, values, says_steps=says_steps)

    @rule(name=st.sampled_from(NAMES), place=PLACES)
    def begin_again(self, name: str, place: int) -> None:
        self.story.chunk(name, place, [1], says_steps=False, restarts=True)

    @rule(which=ANY, keep=st.booleans())
    def deliver(self, which: int, keep: bool) -> None:
        self.story.deliver(which, keep=keep)

    @rule(which=ANY)
    def lose(self, which: int) -> None:
        self.story.lose(which)

    @rule(place=PLACES)
    def pass_local(self, place: int) -> None:
        self.story.replicas[place].pass_local()
        self.story.check()

    @rule(place=PLACES)
    def step(self, place: int) -> None:
        self.story.replicas[place].step()
        self.story.check()

    @rule(seconds=st.sampled_from((0.001, 0.1, 0.6, 3.0)))
    def time_passes(self, seconds: float) -> None:
        self.story.time_passes(seconds)

    @rule(place=PLACES)
    def pause(self, place: int) -> None:
        self.story.toggle_pause(place)

    @rule(one=PLACES, other=PLACES)
    def cut(self, one: int, other: int) -> None:
        self.story.toggle_cut(one, other)

    @rule(place=PLACES)
    def crash(self, place: int) -> None:
        self.story.crash(place)

    @rule(place=PLACES, other=PLACES)
    def learn(self, place: int, other: int) -> None:
        self.story.learn(self.story.replicas[place], other)

    @rule(name=st.sampled_from(NAMES))
    def lose_reply(self, name: str) -> None:
        self.story.lose_reply(name)

    @rule(name=st.sampled_from(NAMES))
    def give_up(self, name: str) -> None:
        self.story.give_up(name)

    def teardown(self) -> None:
        self.story.finish()


TestMovingMachine = MovingMachine.TestCase
TestMovingMachine.settings = settings(max_examples=10, stateful_step_count=60)
