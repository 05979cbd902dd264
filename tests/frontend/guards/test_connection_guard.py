"""Which connections the guard closes, and when. The connections are played by the test."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from service.frontend.guards import connection_guard
from service.frontend.guards.connection_guard import MIN_PART, RECEIVE_RATE, ConnectionGuard, Phase, retirement
from service.frontend.server import TICKS_PER_SECOND
from service.metrics import Metrics
from service.settings import Settings

SETTINGS = Settings(idle_seconds=15, max_connections=3)


@dataclass
class Connection:
    """A connection that records how it was closed."""

    phase: Phase = Phase.IDLE
    phase_began: float = 0.0
    received_bytes: int = 0
    unread: float | None = None
    unread_bytes: int = 0
    closed: str = ""

    def unread_since(self, now: float) -> float | None:
        return self.unread

    def close_idle(self) -> None:
        self.closed += "closed"

    def refuse_slow_request(self) -> None:
        self.closed += "refused"

    def abort(self) -> None:
        self.closed += "aborted"


def fail(error: Exception) -> None:
    raise error


class Guard(ConnectionGuard):
    """The guard of some connections."""

    def __init__(self, *connections: Connection, report: Callable[[Exception], object] = fail) -> None:
        metrics, self.all = Metrics(), connections
        super().__init__(SETTINGS, metrics, lambda: [*connections], report)
        self.reasons = metrics.connections_closed.values
        """How many connections the guard has closed, by reason."""

    @property
    def ends(self) -> list[str]:
        """How each connection was closed."""
        return [connection.closed for connection in self.all]


@pytest.mark.parametrize(
    "connection, last_moment, end, reason",
    [
        (Connection(Phase.IDLE), 15, "closed", "idle"),
        (Connection(Phase.RECEIVING), 10, "refused", "slow_request"),
        (Connection(Phase.RECEIVING, received_bytes=10 * RECEIVE_RATE), 20, "refused", "slow_request"),
        (Connection(Phase.IDLE, phase_began=7), 22, "closed", "idle"),
        (Connection(Phase.RUNNING, unread=0), 30, "aborted", "slow_reader"),
    ],
)
def test_connection_is_closed_after_its_limit(connection: Connection, last_moment: float, end: str, reason: str) -> None:
    """A request may run for long."""
    guard = Guard(connection, Connection(Phase.RUNNING))
    guard.sweep(last_moment)
    assert guard.ends == ["", ""]
    guard.sweep(last_moment + 0.1)
    assert guard.ends == [end, ""] and guard.reasons == {(reason,): [1.0]}


class FaultyConnection(Connection):
    """A connection whose state is not what its code expects."""

    def unread_since(self, now: float) -> float | None:
        raise AttributeError("no transport")


@pytest.mark.parametrize("aborts", [True, False])
def test_faulty_connection_ends_alone(monkeypatch: pytest.MonkeyPatch, aborts: bool) -> None:
    """The error is reported, and the other connections keep their limits."""
    faulty, reported = FaultyConnection(), list[str]()
    if not aborts:
        monkeypatch.setattr(faulty, "abort", lambda: faulty.unread_since(0))
    guard = Guard(faulty, Connection(), report=lambda error: reported.append(str(error)))
    guard.sweep(16)
    assert reported == ["no transport"] and guard.ends == ["aborted" * aborts, "closed"]


@pytest.mark.parametrize("count", [1, MIN_PART, MIN_PART + 1, 2 * connection_guard.PARTS * MIN_PART + 1])
def test_sweep_looks_at_many_connections_in_parts(count: int) -> None:
    guard, most = Guard(*(Connection() for _ in range(count))), max(MIN_PART, math.ceil(count / connection_guard.PARTS))
    guard.sweep(16)
    closed = [guard.ends.count("closed")]
    for _ in range(TICKS_PER_SECOND - 1):
        guard.continue_sweep(16)
        closed.append(guard.ends.count("closed"))
    assert closed == [min(count, most * part) for part in range(1, TICKS_PER_SECOND + 1)]


def test_connections_with_the_most_unread_bytes_are_closed_after_the_last_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_guard, "MAX_UNREAD_BYTES", 100)
    guard = Guard(*(Connection(Phase.RUNNING, unread_bytes=size) for size in (60, 50, *[0] * MIN_PART)))
    guard.sweep(0)
    ends = [guard.ends[:2]]
    for _ in range(2):
        guard.continue_sweep(0)
        ends.append(guard.ends[:2])
    assert ends == [["", ""], ["aborted", ""], ["aborted", ""]]


def test_unread_bytes_are_freed_when_memory_is_short() -> None:
    guard = Guard(
        *(Connection(Phase.RUNNING, unread_bytes=connection_guard.FEW_BYTES * times) for times in (2, 1, 4)), Connection()
    )
    guard.all[3].unread_bytes = connection_guard.FEW_BYTES + 1
    for wanted, ends in ((-1, ["", "", "", ""]), (5 * connection_guard.FEW_BYTES, ["aborted", "", "aborted", ""])):
        guard.free_unread(wanted)
        assert guard.ends == ends
    guard.free_unread(1 << 40)
    assert (guard.all[1].closed, guard.all[3].closed) == ("", "aborted")


def test_longest_idle_connection_makes_room_first() -> None:
    guard = Guard(Connection(phase_began=2), Connection(Phase.RECEIVING, phase_began=0), Connection(phase_began=1))
    assert guard.make_room(2, 0)
    assert guard.ends == ["", "", ""]
    assert not guard.make_room(3, 0), "its socket closes later"
    assert guard.ends == ["", "", "aborted"] and guard.reasons == {("too_many",): [1.0]}
    for phase, end in ((Phase.RECEIVING, "aborted"), (Phase.RUNNING, "")):
        guard = Guard(Connection(Phase.RUNNING), Connection(phase))
        assert not guard.make_room(3, 0)
        assert guard.ends == ["", end]


def test_no_connection_closes_while_others_are_not_open_yet() -> None:
    """No connection of a silent burst can be closed yet. A kept connection would close in their place."""
    guard = Guard(Connection(Phase.KEPT))
    assert guard.make_room(1, 1) and not guard.make_room(1, 2)
    assert guard.ends == [""]
    assert not guard.make_room(3, 0)
    assert guard.ends == ["aborted"]


def test_default_limit_leaves_open_files_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, expected in ((200, 136), (1024, 896), (1 << 20, 1 << 16), (20, 1)):
        monkeypatch.setattr("resource.getrlimit", lambda _, soft=soft: (soft, soft))
        assert ConnectionGuard(Settings(), Metrics(), list, fail).limit == expected


def test_connections_that_began_together_end_apart() -> None:
    ends = [retirement(100.0, 20.0) for _ in range(100)]
    assert len(set(ends)) == 100 and all(118 <= end <= 122 for end in ends)
    assert retirement(100.0, math.inf) == math.inf
