"""Sessions for a long time: a million events in one engine's account of them, 51,200 sequences on a server. Runs only when the folder is
named: `make test-long`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from service.engine.batching.state_slots import Slot, Slots
from service.ipc.messages import FIRST
from tests import models
from tests.accumulator import CALLERS, REST_SECONDS, SMALL, counts, faults_of, rests, tell
from tests.engine.batching.story import Story, any_event
from tests.serving import eventually, serving

EVENTS = 1_000_000
EVENTS_OF_A_STORY = 200
SEQUENCES = 2_000
"""Of each caller."""


def tell_story(seed: int) -> None:
    """What is held is looked at after every event; a fault names the story."""
    story, chance = Story(), random.Random(seed)
    try:
        for _ in range(EVENTS_OF_A_STORY):
            any_event(story, chance)
            story.check()
        story.finish()
    except BaseException as fault:
        fault.add_note(f"in the story of seed {seed}")
        raise
    finally:
        story.close()


def test_in_a_million_events_every_state_has_one_owner_and_every_session_its_own_sum() -> None:
    for seed in range(EVENTS // EVENTS_OF_A_STORY):
        tell_story(seed)


def test_a_story_in_which_a_slot_is_released_twice_would_be_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    give_back = Slots.give_back

    def twice(slots: Slots, slot: Slot) -> None:
        give_back(slots, slot)
        slots._free.append(slot.place - FIRST)

    monkeypatch.setattr(Slots, "give_back", twice)
    with pytest.raises(AssertionError) as found:
        tell_story(7)
    assert found.value.__notes__ == ["in the story of seed 7"]


def test_of_51_200_sequences_every_sum_is_exact_and_every_request_is_accounted_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models.accumulator(tmp_path / "models")
    with serving(tmp_path / "models", tmp_path, **SMALL) as server:
        before = counts(server)
        told = tell(server.address, callers=CALLERS, sequences=SEQUENCES, seed=2)
        with capsys.disabled():
            print(f"\n{told}")
        assert not told.faults, faults_of(told.faults)
        eventually(lambda: rests(server), REST_SECONDS)
        told.ledger.check(counts(server).since(before))
