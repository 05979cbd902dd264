"""Requests that a frontend refuses while the memory limit of its container is nearly used up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec
import pytest

from service.errors import Overloaded
from service.frontend.body_budget import BodyBudget
from service.frontend.memory_guard import ANSWER_BYTES, LARGE_BYTES, TRIM_TICKS, MemoryGuard
from service.frontend.oip.grpc_wire import MessageReader, ReceivingAccount
from service.ipc.messages import Request
from service.log import Log
from service.memory_limit import NO_LIMIT, MemoryUse
from service.metrics import MEMORY, Metrics

LIMIT = 100 << 20
PERCENT = LIMIT // 100
WHOLE = Request("words", "1", [1], 0.0, 0.0)
CHUNK = msgspec.structs.replace(WHOLE, session="s")


@dataclass
class Memory:
    """The memory of a container that the test fills, its guard, and how often freed memory was returned."""

    percent: float = 0.0
    trims: int = 0
    max_share: float = 0.95
    metrics: Metrics = field(default_factory=Metrics)

    def __post_init__(self) -> None:
        self.guard = MemoryGuard(self.max_share, self.read, self.metrics, Log("frontend"), self.trim)

    def read(self) -> MemoryUse:
        return MemoryUse(self.percent * PERCENT, LIMIT)

    def trim(self) -> None:
        self.trims += 1

    def fill(self, percent: float) -> None:
        self.percent = percent
        self.guard.update()

    def refusals(self) -> float:
        return self.metrics.refused.values.get((MEMORY,), [0.0])[0]


def refused(action: Callable[[], object]) -> bool:
    try:
        action()
    except Overloaded as error:
        assert error.retry_after == 1 and "of the memory limit of the service is in use" in error.message
        return True
    return False


@pytest.mark.parametrize(
    "percent, small, large, opens, continues",
    [
        (0, True, True, True, True),
        (84, True, True, True, True),
        (85, True, False, False, True),
        (94, True, False, False, True),
        (95, False, False, False, False),
        (120, False, False, False, False),
    ],
)
def test_requests_are_refused_by_the_share_in_use(
    percent: float, small: bool, large: bool, opens: bool, continues: bool
) -> None:
    memory = Memory()
    memory.fill(percent)
    guard = memory.guard
    assert refused(partial(guard.admit, WHOLE, LARGE_BYTES, 1)) is not small
    assert refused(partial(guard.admit, WHOLE, LARGE_BYTES + 1, 1)) is not large
    assert refused(guard.check_large) is not large
    assert refused(guard.check_new_session) is not opens
    assert refused(partial(guard.admit, CHUNK, 1, 1)) is not continues
    assert memory.refusals() == [small, large, large, opens, continues].count(False)
    assert memory.metrics.memory_limit_used.values[()] == [percent / 100]
    if continues:
        assert guard.admit(CHUNK, 1, 1)[0].opens_session is opens


def test_service_recovers_when_memory_falls() -> None:
    memory = Memory()
    for percent in (96, 86, 84):
        memory.fill(percent)
    assert memory.guard.admit(CHUNK, LARGE_BYTES + 1, 0) == (CHUNK, None)


def test_memory_without_a_limit_changes_nothing() -> None:
    guard = MemoryGuard(0.95, lambda: NO_LIMIT, Metrics(), Log("frontend"), lambda: pytest.fail("nothing is returned"))
    guard.update()
    guard.arrive(1 << 50)
    guard.check_large()
    guard.check_new_session()
    assert not guard.limited and guard.excess_bytes < 0


def test_largest_share_refuses_nothing() -> None:
    memory = Memory(max_share=1)
    memory.fill(120)
    memory.guard.arrive(LIMIT)
    assert memory.guard.admit(CHUNK, LIMIT, LIMIT)[0] is CHUNK
    memory.guard.check_large()
    memory.guard.check_new_session()
    assert not memory.guard.limited and memory.guard.excess_bytes < 0 and memory.trims == 0
    assert memory.metrics.memory_limit_used.values[()] == [1.2]


def test_smaller_share_refuses_earlier() -> None:
    memory = Memory(max_share=0.5)
    memory.fill(39)
    memory.guard.check_new_session()
    memory.fill(41)
    assert refused(memory.guard.check_new_session)
    memory.fill(51)
    assert refused(partial(memory.guard.admit, CHUNK, 1, 1))


def test_bytes_between_two_readings_count() -> None:
    memory = Memory()
    memory.fill(80)
    bodies = BodyBudget(LIMIT, memory.guard)
    bodies.add(5 * PERCENT - 1)
    bodies.check()
    bodies.add(1)
    assert refused(bodies.check)
    bodies.add(-5 * PERCENT)
    assert refused(bodies.check), "memory may have been taken meanwhile"
    memory.fill(80)
    bodies.check()


def test_large_messages_are_refused_while_they_arrive() -> None:
    memory = Memory()
    memory.fill(86)
    reader = MessageReader(LIMIT, ReceivingAccount(LIMIT, memory.guard))
    reader.feed(bytes(LARGE_BYTES))
    assert refused(partial(reader.feed, b"x"))


def test_reserved_bytes_are_refused_to_others() -> None:
    memory = Memory()
    memory.fill(50)
    release = memory.guard.reserve(40 * PERCENT)
    answer = 5 * PERCENT // ANSWER_BYTES + 1
    assert refused(partial(memory.guard.admit, WHOLE, 1, answer))
    request, end = memory.guard.admit(WHOLE, 1, answer // 2)
    assert request is WHOLE and end is not None
    end()
    release()
    assert memory.guard.admit(WHOLE, 1, answer)[1] is not None


def test_freed_memory_is_returned_while_it_is_wanted() -> None:
    memory = Memory()
    for _ in range(2 * TRIM_TICKS):
        memory.fill(84)
    assert memory.trims == 0
    assert refused(partial(memory.guard.reserve, 20 * PERCENT))
    for _ in range(2 * TRIM_TICKS):
        memory.fill(84)
    assert memory.trims == 1
    for _ in range(2 * TRIM_TICKS):
        memory.fill(86)
    assert memory.trims == 3
