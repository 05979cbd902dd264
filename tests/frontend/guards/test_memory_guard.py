"""Requests that a frontend refuses while the memory limit of its container is nearly used up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec
import pytest

from service.access.caller import LOCAL, Caller
from service.errors import Overloaded
from service.frontend.grpc.wire import MessageReader
from service.frontend.guards.body_budget import BodyBudget
from service.frontend.guards.memory_guard import (
    ANSWER_BYTES,
    LARGE_BYTES,
    QUIET_BYTES,
    TRIM_BYTES,
    TRIM_TICKS,
    MemoryGuard,
)
from service.ipc.messages.inference import Request
from service.ipc.messages.models import ModelKey
from service.log import Log
from service.memory_limit import NO_LIMIT, MemoryUse
from service.metrics import MEMORY, Metrics
from tests.frontend.dispatch.test_dispatcher import FutureReceiver
from tests.frontend.guards.test_quotas import caller
from tests.frontend.in_process import InProcess
from tests.frontend.oip.harness import InferHarness

LIMIT = 100 << 20
PERCENT = LIMIT // 100
WHOLE = Request("words", "1", [1], 0.0, 0.0)
CHUNK = msgspec.structs.replace(WHOLE, session="s")
HALVER = ModelKey("halver", "1")
"""Its answers grow with the steps."""


class Memory(MemoryGuard):
    """The guard of the memory of a container that the test fills. It counts how often freed memory was returned."""

    def __init__(self, percent: float = 0, max_share: float = 0.95) -> None:
        self.trims, self.metrics = 0, Metrics()
        super().__init__(max_share, self._use_of_memory, self.metrics, Log("frontend"), self._return)
        self.fill(percent)

    def _use_of_memory(self) -> MemoryUse:
        return MemoryUse(self._percent * PERCENT, LIMIT)

    def _return(self) -> None:
        self.trims += 1

    def fill(self, percent: float) -> None:
        self._percent = percent
        self.update()


def refused(action: Callable[..., object], *arguments: object) -> bool:
    try:
        action(*arguments)
    except Overloaded as error:
        assert error.retry_after == 1 and "of the memory limit of the service is in use" in error.message
        return True
    return False


@pytest.mark.parametrize(
    "percent, small, large, opens, continues",
    [
        *((percent, True, True, True, True) for percent in (0, 84)),
        *((percent, True, False, False, True) for percent in (85, 94)),
        *((percent, False, False, False, False) for percent in (95, 120)),
    ],
)
def test_requests_are_refused_by_the_share_in_use(
    percent: float, small: bool, large: bool, opens: bool, continues: bool
) -> None:
    memory = Memory(percent)
    assert refused(memory.admit, WHOLE, LARGE_BYTES, 1) is not small
    assert refused(memory.admit, WHOLE, LARGE_BYTES + 1, 1) is not large
    assert refused(memory.check_large) is not large
    assert refused(memory.check_new_session) is not opens
    assert refused(memory.admit, CHUNK, 1, 1) is not continues
    count = [small, large, large, opens, continues].count(False)
    assert memory.metrics.refused.values == ({(MEMORY,): [count]} if count else {})
    assert memory.metrics.memory_limit_used.values[()] == [percent / 100]
    if continues:
        assert memory.admit(CHUNK, 1, 1)[0].opens_session is opens
    memory.fill(84)
    assert memory.admit(CHUNK, LARGE_BYTES + 1, 0) == (CHUNK, None), "the service recovers"


def test_largest_share_refuses_nothing_and_a_smaller_one_earlier() -> None:
    memory = Memory(120, max_share=1)
    memory.arrive(LIMIT)
    assert memory.admit(CHUNK, LIMIT, LIMIT)[0] is CHUNK
    memory.check_large()
    memory.check_new_session()
    assert not memory.limited and memory.excess_bytes < 0 and memory.trims == 0
    assert memory.metrics.memory_limit_used.values[()] == [1.2]
    guard = MemoryGuard(0.95, lambda: NO_LIMIT, Metrics(), Log("frontend"), lambda: pytest.fail("nothing is returned"))
    guard.update()
    guard.arrive(1 << 50)
    guard.check_large()
    guard.check_new_session()
    assert not guard.limited and guard.excess_bytes < 0, "without a limit"
    half = Memory(39, max_share=0.5)
    half.check_new_session()
    half.fill(41)
    assert half.limited and refused(half.check_new_session) and not refused(half.admit, CHUNK, 1, 1)
    half.fill(51)
    assert refused(half.admit, CHUNK, 1, 1)


def test_bytes_between_two_readings_count() -> None:
    memory = Memory(80)
    bodies = BodyBudget(LIMIT, memory)
    bodies.add(5 * PERCENT - 1)
    bodies.check()
    bodies.add(1)
    assert refused(bodies.check)
    bodies.add(-5 * PERCENT)
    assert refused(bodies.check), "memory may have been taken meanwhile"
    memory.fill(80)
    bodies.check()
    memory.fill(86)
    reader = MessageReader(LIMIT, BodyBudget(LIMIT, memory))
    reader.feed(bytes(LARGE_BYTES))
    assert refused(reader.feed, b"x"), "a large message, while it arrives"


def test_reserved_bytes_are_refused_to_others() -> None:
    memory = Memory(50)
    release = memory.reserve(40 * PERCENT)
    answer = 5 * PERCENT // ANSWER_BYTES + 1
    assert refused(memory.admit, WHOLE, 1, answer)
    request, end = memory.admit(WHOLE, 1, answer // 2)
    assert request is WHOLE and end is not None
    end()
    release()
    assert memory.admit(WHOLE, 1, answer)[1] is not None


def test_request_gives_back_its_memory_and_its_quota(harness: InferHarness) -> None:
    """Two would not fit at once."""
    harness.frontend.limits.memory = Memory(50)
    steps = 30 * PERCENT // (ANSWER_BYTES * harness.frontend.catalog[HALVER].answer_numbers(1, sequence=False))
    request = Request(HALVER.name, HALVER.version, [steps], 0.0, 0.0)

    async def answered(caller: Caller) -> None:
        receiver = FutureReceiver()
        harness.frontend.send(caller, request, b"", receiver)
        await receiver.future

    for each in (LOCAL, LOCAL, *[caller(sequences_in_flight=1)] * 2):
        asyncio.run(answered(each))
    assert harness.frontend.limits.memory._reserved == 0


def test_freed_memory_is_returned_while_it_is_wanted() -> None:
    memory = Memory()

    def trims_at(percent: float) -> int:
        for _ in range(2 * TRIM_TICKS):
            memory.fill(percent)
        return memory.trims

    assert trims_at(84) == 0
    assert refused(partial(memory.reserve, 20 * PERCENT))
    assert [trims_at(84), trims_at(86)] == [1, 3]
    memory = Memory()
    for _ in range(TRIM_BYTES // QUIET_BYTES + 1):
        memory.arrive(QUIET_BYTES)
        memory.fill(0)
    assert memory.trims == 0, "bodies arrive"
    assert trims_at(0) == 1, "what large bodies have left"


def test_import_and_fork_open_no_session_when_memory_is_short(local: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"model": "sensors", "inputs": [[[1, 2, 3]]], "session": "kept"}
    assert local.client.post("/infer", json=body).status_code == 200
    state = local.client.get("/sessions/kept/state").content
    monkeypatch.setattr(local.frontend.limits.memory, "check_new_session", Memory(85).check_new_session)
    answers = [
        local.client.put("/sessions/brought/state", content=state),
        local.client.post("/sessions/kept/fork", json={"session": "copy"}),
    ]
    assert [(answer.status_code, answer.json()["code"]) for answer in answers] == [(503, "overloaded")] * 2
    assert local.client.delete("/sessions/kept/state").status_code == 200
