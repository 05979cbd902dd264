"""All ordered pairs of events that end a request, at named points of its way: one outcome and one release for each request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service.engine.batching.state_cache import StateCache
from service.frontend.dispatch.connection import EngineConnection, PendingRequest
from service.frontend.dispatch.dispatcher import Dispatcher
from tests.races import Event
from tests.races.story import run_stories

SEEDS = 4
"""Stories of each pair. tests/long has 200."""


def test_every_request_has_one_outcome_and_one_release(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        results = run_stories(SEEDS, log.fileno())
    assert results.faults == []
    assert {event for event, _ in results.happened} == set(Event)
    assert {
        "ok",
        "cancelled",
        "deadline_exceeded",
        "inference_failed",
        "engine_lost",
        "session_lost",
    } <= results.outcomes.keys()


def _keep(pending: PendingRequest) -> None:
    pending.done = True
    if pending.on_end is not None:
        pending.on_end()


def _cancel_always(dispatcher: Dispatcher, pending: PendingRequest) -> None:
    dispatcher._withdraw(pending)
    pending.end()


@pytest.mark.parametrize(
    "owner, name, fault, found",
    [
        (PendingRequest, "end", _keep, "the outcomes ['deadline_exceeded', "),
        (Dispatcher, "cancel", _cancel_always, "2 releases"),
        (EngineConnection, "cancel", lambda *_: None, "the outcomes []"),
        (StateCache, "release", lambda *_: None, "the engine holds 1 slots"),
    ],
    ids=["ended twice", "released twice", "others not sent", "slot kept"],
)
def test_second_outcomes_and_kept_resources_are_detected(
    owner: type, name: str, fault: Callable[..., Any], found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, fault)
    with (tmp_path / "log").open("w") as log:
        faults = run_stories(SEEDS, log.fileno()).faults
    assert any(found in fault for fault in faults), faults[:10]
