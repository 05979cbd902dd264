"""Sessions under long load: a million events in an engine, 512,000 sequences on a server. `make test-all` runs this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import models
from tests.accumulator import CALLERS, REST_SECONDS, SMALL, counts, faults_of, rests, start_sessions, tell
from tests.engine.batching.story import tell_story
from tests.serving import eventually, serving
from tests.steady import WARM_UP, Memory, growing

EVENTS = 1_000_000
EVENTS_OF_A_STORY = 200
SEQUENCES = 2000
"""Sequences per client."""
WAVE, ABANDONED = 4000, 100_000
"""Sessions that are abandoned at once, nearly as many as may be open, and in all."""


def test_million_events_keep_states_and_sums_of_sessions() -> None:
    for seed in range(EVENTS // EVENTS_OF_A_STORY):
        tell_story(seed, EVENTS_OF_A_STORY)


def test_512_000_sequences_have_exact_sums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models.accumulator(tmp_path / "models")
    with serving(tmp_path / "models", tmp_path, **SMALL) as server:
        before = counts(server)
        told = tell(server.address, callers=CALLERS, sequences=SEQUENCES, seed=2)
        with capsys.disabled():
            print(f"\n{told}")
        assert not told.faults, faults_of(told.faults)
        eventually(lambda: rests(server), REST_SECONDS)
        told.ledger.check(counts(server).since(before))


def abandon(count: int, scratch: Path) -> dict[str, float]:
    """Abandon sessions in waves until `count` have followed the warm-up. Return the growth of each process in MiB per 100,000 sessions.

    The engine remembers the names of sessions that have expired until twice as many as may be open are remembered. The warm-up has more.
    """
    models.accumulator(scratch / "models")
    waves = (WARM_UP + count) // WAVE
    with serving(scratch / "models", scratch, session_idle_seconds="1") as server:
        memory = Memory(server)
        for wave in range(waves):
            assert start_sessions(server.address, [f"{wave} {number}" for number in range(WAVE)]) == {"ok": WAVE}
            eventually(lambda: rests(server))
            memory.sample((wave + 1) * WAVE)
        assert server.metric("seqserve_sessions_ended_total", reason="expired") == waves * WAVE
        return memory.slopes()


def test_100_000_abandoned_sessions_leave_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slopes = abandon(ABANDONED, tmp_path)
    with capsys.disabled():
        print("\nMiB in 100,000 sessions:", ", ".join(f"{name} {slope:.2f}" for name, slope in slopes.items()))
    assert not growing(slopes)
