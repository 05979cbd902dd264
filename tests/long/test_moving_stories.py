"""Many more of the stories of tests/mover: sessions move over a network that loses, delays and repeats messages."""

from __future__ import annotations

from collections import Counter

from tests.mover.test_story import tell

STORIES, EVENTS = 300, 600


def test_every_story_ends_well() -> None:
    total = sum((tell(1000 + seed, EVENTS).counts for seed in range(STORIES)), start=Counter[str]())
    print(dict(total))
    for event in ("answers", "SessionGiven", "TicketReport", "AskTicket", "crashes", "pauses", "session_unreachable"):
        assert total[event], f"{event} never happened"
