"""Sequences that come in chunks: each chunk goes on from those that were answered, and from nothing else."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from service.engine import session_state as states
from service.engine.batching.state_slots import Slot, Slots
from service.engine.session_state import Origin
from service.errors import (
    DeadlineExceeded,
    InferenceFailed,
    InvalidInput,
    InvalidRequest,
    Overloaded,
    ServiceError,
    SessionConflict,
    SessionExpired,
    SessionLost,
    TooManySessions,
    UnknownModel,
    UnknownSession,
)
from service.ipc.messages import FIRST, ModelKey
from service.ipc.session_journal import SessionJournal
from tests.engine.batching.fakes import MODEL, OTHER
from tests.engine.batching.harness import IDLE_SECONDS, POISON, AsynchronousEngine, Caller, FakeEngine, House, counted, total
from tests.engine.batching.story import NAMES, Story, any_event

EVENTS = 100
"""Of one story; there are a hundred."""


def answered(caller: Caller) -> tuple[float, int]:
    """The sum so far and the steps so far."""
    return caller.sums[0], caller.answers[0][0].session_steps


def refused(caller: Caller) -> type[ServiceError]:
    [error] = caller.errors
    return type(error)


def asked(house: House, *values: int, session: str = "a", **said: object) -> Caller:
    caller = house.call(values, session=session, **said)  # type: ignore[arg-type]
    house.run()
    return caller


def used(house: House, model: ModelKey = MODEL) -> int:
    house.batcher.count()
    return round(house.metrics.state_slots_used.values.get(model.labels, [0.0])[0])


def slow(slots: int = 4) -> House:
    """A house in which a turn takes LEAST_STEPS of each sequence, and ends when it is told to."""
    engine = AsynchronousEngine(slots)
    engine.per_row = engine.per_row._replace(fixed=0.0, per_step=1.0)
    return House(engine=engine, batch_seconds=1.0)


# Chunks.


def test_each_chunk_goes_on_from_the_one_before_it_and_says_how_far_the_session_is() -> None:
    house = House()
    assert [answered(asked(house, *values)) for values in ((1, 2), (3,), (4, 5, 6))] == [(3, 2), (6, 3), (21, 6)]


def test_sessions_side_by_side_and_single_requests_between_them_know_nothing_of_each_other() -> None:
    house = House()
    asked(house, 1)
    asked(house, 100, session="b")
    assert asked(house, 7, session="b").sums == [107.0]
    single = house.call([5])
    house.run()
    assert single.sums == [5.0] and single.answers[0][0].session_steps == 0
    assert asked(house, 2).sums == [3.0]


def test_the_last_chunk_ends_a_session_and_the_next_of_its_name_begins_anew() -> None:
    house = House()
    asked(house, 1)
    assert used(house) == 1
    assert answered(asked(house, 2, ends=True)) == (3, 2)
    assert used(house) == 0
    assert answered(asked(house, 5)) == (5, 1)


def test_who_begins_a_session_that_is_open_begins_it_anew() -> None:
    house = House()
    asked(house, 1)
    assert answered(asked(house, 5, starts=True)) == (5, 1)
    assert counted(house.metrics.sessions_ended) == {"restarted": 1}


def test_who_goes_on_with_a_session_that_is_not_there_is_told_so() -> None:
    house = House()
    assert refused(asked(house, 1, starts=False)) is UnknownSession
    assert answered(asked(house, 1)) == (1, 1)
    assert answered(asked(house, 1, starts=False)) == (2, 2)


def test_chunks_that_come_together_run_one_after_the_other_in_the_order_in_which_they_came() -> None:
    house = House()
    callers = [house.call([value], session="a") for value in range(1, 8)]
    house.run()
    assert [answered(caller) for caller in callers] == [(sum(range(value + 1)), value) for value in range(1, 8)]
    assert house.engine.ran == [[value] for value in range(1, 8)]


def test_a_long_chunk_is_cut_and_a_short_one_of_another_session_is_answered_between() -> None:
    house = slow()
    engine = house.engine
    assert isinstance(engine, AsynchronousEngine)
    long = house.call([1] * 70, session="long")
    house.batcher.step()
    short = house.call([5], session="short")
    engine.end()
    house.batcher.step()
    engine.end()
    house.batcher.step()
    assert short.sums == [5.0] and not long.told
    while not long.told:
        engine.end()
        house.batcher.step()
    assert answered(long) == (70, 70)


@pytest.mark.parametrize(
    "lengths, model, error",
    [([1, 1], MODEL, InvalidInput), ([1], OTHER, InvalidInput)],
    ids=["two sequences", "a model that sees the whole"],
)
def test_what_is_no_chunk_is_refused(lengths: Sequence[int], model: ModelKey, error: type[ServiceError]) -> None:
    house = House()
    caller = house.call(*([1] * one for one in lengths), model=model, session="a")
    assert refused(caller) is error
    assert asked(house, 3).sums == [3.0]


def test_a_session_is_of_one_model() -> None:
    house = House()
    house.engine.streams = lambda key: key in (MODEL, OTHER)  # type: ignore[method-assign]
    asked(house, 1)
    caller = house.call([1], model=OTHER, session="a")
    assert refused(caller) is SessionConflict


# Versions.


NEWER, ANEW = ModelKey(MODEL.name, "2", 1), ModelKey(*MODEL.labels, 1)
"""Another version of MODEL, and other files under the same number."""


def of_versions() -> House:
    house = House()
    served = (MODEL, NEWER, ANEW)
    house.engine.serves = house.engine.streams = lambda key: key in served  # type: ignore[method-assign]
    house.engine.states |= {key: [[0.0, 0.0] for _ in range(100)] for key in served}
    return house


@pytest.mark.parametrize(
    ("model", "exactly", "elsewhere"), [(NEWER, False, MODEL), (NEWER, True, None), (ANEW, False, MODEL), (ANEW, True, MODEL)]
)
def test_whoever_may_mean_the_session_s_own_version_is_told_which_it_is(
    model: ModelKey, exactly: bool, elsewhere: ModelKey | None
) -> None:
    house = of_versions()
    asked(house, 1)
    [error] = house.call([2], model=model, session="a", exactly=exactly).errors
    assert isinstance(error, SessionConflict) and error.elsewhere == elsewhere
    assert total(house.metrics.refused) == (elsewhere is None), "who comes again is not refused"
    assert house.batcher.model_of("a") == MODEL
    assert asked(house, 2).sums == [3.0]


def test_a_session_that_begins_anew_begins_with_the_version_that_is_named() -> None:
    house = of_versions()
    asked(house, 1)
    assert house.call([2], model=NEWER, session="a", starts=True).errors == []
    house.run()
    assert (house.batcher.model_of("a"), house.batcher.model_of("b")) == (NEWER, None)


def test_sessions_of_a_version_that_goes_are_told_once_and_others_never() -> None:
    house = of_versions()
    asked(house, 1)
    asked(house, 5, session="waits")
    asked(house, 7, session="other", model=NEWER)
    waits = house.call([6], session="waits")
    assert house.batcher.has(MODEL)
    house.batcher.lose_sessions(MODEL)
    assert refused(waits) is refused(house.call([1], session="a")) is SessionLost
    assert not house.batcher.has(MODEL) and house.batcher.has(NEWER)
    assert asked(house, 3).sums == [3.0]
    assert asked(house, 4, session="waits").sums == [4.0]
    assert asked(house, 1, session="other", model=NEWER).sums == [8.0]
    assert counted(house.metrics.sessions_ended)["unloaded"] == 2


def test_a_chunk_for_a_version_that_went_with_its_engine_is_told_that_the_session_is_lost() -> None:
    house, gone = of_versions(), ModelKey(MODEL.name, "3", 9)
    assert refused(house.call([1], model=gone, session="a", again=True)) is SessionLost
    assert refused(house.call([1], model=gone, session="a")) is UnknownModel


def test_after_its_last_chunk_has_come_a_session_takes_no_other() -> None:
    house = House()
    last, late = house.call([1], session="a", ends=True), house.call([1], session="a")
    house.run()
    assert last.sums == [1.0] and refused(late) is SessionConflict


# Chunks that are not run.


def test_a_chunk_that_is_given_up_between_two_turns_has_not_happened() -> None:
    house = slow()
    engine = house.engine
    assert isinstance(engine, AsynchronousEngine)

    def ended(caller: Caller) -> Caller:
        while not caller.told:
            house.batcher.step()
            engine.end()
        return caller

    ended(house.call([1], session="a"))
    gone = house.call([1] * 70, session="a")
    house.batcher.step()
    engine.end()
    house.batcher.step()
    assert used(house) == 2
    house.hang_up(gone)
    assert used(house) == 1
    assert counted(house.metrics.cancelled) == {"running": 1}
    engine.end()
    assert answered(ended(house.call([2], session="a"))) == (3, 2)


def test_a_chunk_that_is_given_up_while_it_runs_has_not_happened() -> None:
    house = House()
    asked(house, 1)
    gone = house.call([10], session="a")
    house.during_the_turn(lambda: house.hang_up(gone))
    assert answered(asked(house, 2)) == (3, 2)


def test_chunks_behind_one_that_is_given_up_are_refused_and_those_before_it_are_answered() -> None:
    house = House()
    first, gone, behind, last = (house.call([value], session="a") for value in (1, 2, 3, 4))
    house.hang_up(gone)
    house.run()
    assert first.sums == [1.0]
    assert refused(behind) is refused(last) is SessionConflict
    assert answered(asked(house, 2)) == (3, 2)


def test_a_chunk_whose_deadline_passes_has_not_happened() -> None:
    house = House()
    asked(house, 1)
    late = house.call([10], session="a", allowed=5.0)
    house.now = 5.0
    house.run()
    assert refused(late) is DeadlineExceeded
    assert answered(asked(house, 2)) == (3, 2)


def test_a_chunk_on_which_the_model_raises_has_not_happened_and_its_batch_mates_have_once() -> None:
    house = House()
    for name in ("a", "b"):
        asked(house, 1, session=name)
    bad, mate = house.call([POISON], session="a"), house.call([2], session="b")
    house.run()
    assert refused(bad) is InferenceFailed and mate.sums == [3.0]
    assert asked(house, 4).sums == [5.0]
    assert asked(house, 4, session="b").sums == [7.0]


def test_a_session_whose_first_chunk_is_refused_or_given_up_is_none() -> None:
    house = House(max_waiting=1)
    waits = house.call([1])
    assert refused(house.call([1], session="a")) is Overloaded
    house.run()
    gone = house.call([1], session="a")
    house.hang_up(gone)
    house.batcher.count()
    assert house.metrics.sessions.values[()] == [0.0] and waits.sums == [1.0]
    assert refused(asked(house, 1, starts=False)) is UnknownSession


# Slots.


def test_more_sessions_than_slots_go_on_from_the_host_as_if_they_had_never_left() -> None:
    house = House(engine=FakeEngine(slots=2), max_sessions=10)
    names = [f"s{number}" for number in range(10)]
    for value in (1, 10, 100):
        for number, name in enumerate(names):
            asked(house, value + number, session=name)
    assert [asked(house, 0, session=name).sums[0] for name in names] == [111.0 + 3 * number for number in range(10)]
    assert used(house) == 2
    assert counted(house.metrics.session_moves)["host"] >= 30


def test_one_slot_is_enough_for_any_number_of_sessions_at_once() -> None:
    house = House(engine=FakeEngine(slots=1), max_sessions=8)
    for value in (1, 2, 3):
        callers = [house.call([value] * 3, session=f"s{number}") for number in range(8)]
        house.run()
        assert {answered(caller) for caller in callers} == {(3 * sum(range(value + 1)), 3 * value)}


def test_a_session_in_a_slot_that_another_had_begins_from_nothing() -> None:
    house = House(engine=FakeEngine(slots=1))
    for number in range(50):
        assert answered(asked(house, 7, session=f"s{number}")) == (7, 1)
        asked(house, 9, session=f"s{number}", ends=True)


def test_a_slot_that_is_given_up_and_then_expires_is_never_two_sessions() -> None:
    """A caller goes while its chunk runs, the session is reaped later, and many begin: the double release of Triton's issue 7117."""
    chance = random.Random(7117)
    for _ in range(1000):
        house = House(engine=FakeEngine(slots=4), max_sessions=64)
        asked(house, 1, session="gone")
        gone = house.call([1], session="gone")
        if chance.random() < 0.5:
            house.during_the_turn(partial(house.hang_up, gone))
        else:
            house.hang_up(gone)
        house.now += IDLE_SECONDS + 2
        house.batcher.step()
        count = chance.randint(2, 64)
        for value in (1, 1000):
            callers = [house.call([value + number], session=f"new{number}") for number in range(count)]
            house.run()
        assert [caller.sums[0] for caller in callers] == [1001 + 2 * number for number in range(count)]


# The end of a session.


def test_an_idle_session_expires_and_who_goes_on_with_it_is_told_once() -> None:
    house = House()
    asked(house, 1)
    asked(house, 1, session="b")
    house.now = IDLE_SECONDS - 1
    asked(house, 1, session="b")
    house.now = IDLE_SECONDS
    house.batcher.step()
    assert used(house) == 1
    assert refused(asked(house, 2)) is SessionExpired
    assert answered(asked(house, 2)) == (2, 1)
    assert asked(house, 1, session="b").sums == [3.0]


def test_a_session_with_a_chunk_that_waits_is_not_idle() -> None:
    house = slow()
    engine = house.engine
    assert isinstance(engine, AsynchronousEngine)
    caller = house.call([1] * 20, session="a")
    house.batcher.step()
    house.now = 10 * IDLE_SECONDS
    engine.end()
    house.batcher.step()
    engine.end()
    house.batcher.step()
    assert answered(caller) == (20, 20)


def test_at_the_limit_a_new_session_is_refused_and_the_others_are_not_harmed() -> None:
    house = House(max_sessions=2)
    asked(house, 1)
    asked(house, 1, session="b")
    [error] = asked(house, 1, session="c").errors
    assert isinstance(error, TooManySessions) and error.retry_after == 1
    assert error.message.startswith("2 sessions are open and SEQSERVE_MAX_SESSIONS is 2")
    assert asked(house, 2).sums == [3.0]
    asked(house, 1, session="b", ends=True)
    assert asked(house, 1, session="c").sums == [1.0]


def test_a_session_that_is_deleted_is_gone_and_its_waiting_chunks_are_refused() -> None:
    house = House()
    asked(house, 1)
    waits = house.call([1], session="a")
    house.batcher.end("a")
    assert refused(waits) is SessionConflict
    assert used(house) == 0
    with pytest.raises(UnknownSession):
        house.batcher.end("a")


def test_20_000_sessions_that_are_begun_and_left_leave_nothing_behind() -> None:
    house = House(max_sessions=1000)
    for number in range(20_000):
        house.now += IDLE_SECONDS / 900
        caller = house.call([1], session=f"s{number}")
        house.batcher.step()
        assert caller.sums == [1.0]
        house.callers.clear()
    house.now += IDLE_SECONDS
    house.batcher.step()
    assert used(house) == 0
    house.batcher.count()
    assert house.metrics.sessions.values[()] == [0.0]
    assert refused(asked(house, 1, session="s19999")) is SessionExpired


# The end of an engine.


def test_a_session_whose_engine_ended_is_told_so_once_and_begins_anew() -> None:
    journal = SessionJournal(6)
    before = House(journal=journal)
    asked(before, 1)
    asked(before, 1, session="ended", ends=True)
    after = House(journal=journal)
    assert refused(asked(after, 2)) is SessionLost
    assert answered(asked(after, 2)) == (2, 1)
    assert answered(asked(after, 2, session="ended")) == (2, 1)
    assert answered(asked(after, 2, session="new")) == (2, 1)


def test_who_begins_anew_after_the_engine_ended_is_told_nothing() -> None:
    journal = SessionJournal(6)
    asked(House(journal=journal), 1)
    after = House(journal=journal)
    assert answered(asked(after, 2, starts=True)) == (2, 1)
    assert answered(asked(after, 2)) == (4, 2)


def test_what_was_lost_is_told_even_when_the_next_engine_ends_too() -> None:
    journal = SessionJournal(6)
    asked(House(journal=journal), 1)
    House(journal=journal)
    assert refused(asked(House(journal=journal), 1)) is SessionLost


def test_an_expired_session_is_remembered_by_the_next_engine() -> None:
    journal = SessionJournal(6)
    before = House(journal=journal)
    asked(before, 1)
    before.now = IDLE_SECONDS
    before.batcher.step()
    assert refused(asked(House(journal=journal), 1)) is SessionLost


def test_chunks_that_were_in_flight_when_the_engine_ended_are_all_told_and_nothing_of_them_is_run() -> None:
    journal = SessionJournal(6)
    asked(House(journal=journal), 1)
    after = House(journal=journal)
    callers = [after.call([value], session="a", again=True) for value in (1, 2)]
    begins = after.call([5], session="b", starts=True, again=True)
    after.run()
    assert [refused(caller) for caller in callers] == [SessionLost, SessionLost]
    assert begins.sums == [5.0]
    assert answered(asked(after, 3)) == (3, 1)


def test_more_ends_than_can_be_remembered_make_room_for_sessions_that_are_open() -> None:
    house = House(max_sessions=2)
    for number in range(50):
        asked(house, 1, session=f"s{number}")
        house.now += IDLE_SECONDS
        house.batcher.step()
    assert refused(asked(house, 1, session="s49")) is SessionExpired
    assert asked(house, 1, session="s3").sums == [1.0], "forgotten by now"


# States that travel.


def test_a_state_goes_on_in_another_engine_and_under_another_name() -> None:
    here, there = House(engine=FakeEngine(slots=1)), House()
    asked(here, 1, 2)
    asked(here, 9, session="b")
    data = here.batcher.export("a")
    there.batcher.adopt("a", data)
    here.batcher.adopt("fork", data)
    assert answered(asked(there, 3)) == (6, 3)
    assert answered(asked(here, 4, session="fork")) == (7, 3)
    assert answered(asked(here, 10)) == (13, 3)


def test_a_state_is_not_given_while_a_chunk_is_still_to_run() -> None:
    house = House()
    asked(house, 1)
    house.call([2], session="a")
    with pytest.raises(SessionConflict):
        house.batcher.export("a")
    house.run()
    assert states.unpack(house.batcher.export("a"))[1].steps == 2


def test_a_state_does_not_take_the_place_of_a_session_that_is_open_nor_exceed_the_limit() -> None:
    house = House(max_sessions=2)
    asked(house, 1)
    data = house.batcher.export("a")
    with pytest.raises(SessionConflict):
        house.batcher.adopt("a", data)
    house.batcher.adopt("b", data)
    with pytest.raises(TooManySessions):
        house.batcher.adopt("c", data)
    assert asked(house, 1).sums == [2.0]


@pytest.mark.parametrize(
    "origin",
    [
        Origin("other", "1", "abc", 1),
        Origin(MODEL.name, "2", "abc", 1),
        Origin(MODEL.name, "1", "abd", 1),
        Origin(*OTHER.labels, "abc", 1),
    ],
    ids=["model", "version", "weights", "a model without sessions"],
)
def test_a_state_of_another_model_version_or_weights_is_refused(origin: Origin) -> None:
    with pytest.raises(SessionConflict):
        House().batcher.adopt("a", states.pack({"sum": torch.zeros(2)}, origin))


@pytest.mark.parametrize(
    "state",
    [
        {"sum": torch.zeros(3)},
        {"sums": torch.zeros(2)},
        {},
        {"sum": torch.zeros(2), "more": torch.zeros(1)},
        {"sum": torch.tensor([0.0, float("nan")])},
        {"sum": torch.zeros(2, dtype=torch.int32)},
    ],
    ids=["shape", "name", "none", "more", "not a number", "dtype"],
)
def test_a_state_that_is_not_as_the_models_is_refused(state: states.State) -> None:
    with pytest.raises(InvalidRequest):
        House().batcher.adopt("a", states.pack(state, Origin(*MODEL.labels, "abc", 1)))


def test_bytes_that_are_no_state_are_refused_wherever_they_are_cut_or_changed() -> None:
    house = House()
    data = states.pack({"sum": torch.ones(2)}, Origin(*MODEL.labels, "abc", 1))
    chance = random.Random(0)
    for cut in range(len(data)):
        with pytest.raises(ServiceError):
            house.batcher.adopt("a", data[:cut])
    for _ in range(500):
        changed = bytearray(data)
        changed[chance.randrange(len(data) - 8)] = chance.randrange(256)
        try:
            house.batcher.adopt("a", bytes(changed))
        except ServiceError:
            continue
        assert house.batcher.export("a")
        house.batcher.end("a")


# Any order.


class AnyOrder(RuleBasedStateMachine):
    """Stories of EVENTS events, which hypothesis makes shorter when one ends badly."""

    def __init__(self) -> None:
        super().__init__()
        self.story = Story()

    @rule(
        name=st.sampled_from(NAMES),
        values=st.lists(st.sampled_from([1, 2, POISON]), min_size=1, max_size=20),
        starts=st.sampled_from([None, None, True, False]),
        ends=st.booleans(),
        allowed=st.sampled_from([1e9, 30.0]),
    )
    def chunk(self, name: str, values: list[int], starts: bool | None, ends: bool, allowed: float) -> None:
        self.story.chunk(name, values, starts, ends, allowed)

    @rule(seed=st.integers(0, 1 << 32))
    def anything(self, seed: int) -> None:
        any_event(self.story, random.Random(seed))

    @rule()
    def end_of_a_turn(self) -> None:
        self.story.end_of_a_turn()

    @rule(seconds=st.sampled_from([1.0, IDLE_SECONDS]))
    def time_passes(self, seconds: float) -> None:
        self.story.time_passes(seconds)

    @rule()
    def death(self) -> None:
        self.story.death()

    @invariant()
    def one_owner_of_every_slot(self) -> None:
        self.story.check()

    def teardown(self) -> None:
        self.story.finish()
        self.story.close()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=EVENTS, deadline=None)


def test_a_slot_that_is_released_twice_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The detector detects: whoever gives a slot back does it twice, past the generations."""
    give_back = Slots.give_back

    def twice(slots: Slots, slot: Slot) -> None:
        give_back(slots, slot)
        slots._free.append(slot.place - FIRST)

    monkeypatch.setattr(Slots, "give_back", twice)
    story, chance = Story(), random.Random(1)
    with pytest.raises(AssertionError):
        for _ in range(1000):
            any_event(story, chance)
            story.check()
