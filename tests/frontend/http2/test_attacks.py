"""Clients that try to fill a connection's memory or to keep it busy are stopped or bounded. No check depends on the machine's speed."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import pytest

from service.frontend.guards.connection_guard import ConnectionGuard, Phase
from service.frontend.guards.rate_budget import RateBudget
from service.frontend.guards.reading_turns import ReadingTurns
from service.frontend.http2 import header_blocks
from service.frontend.http2.frames import ErrorCode
from service.metrics import Metrics
from service.settings import Settings
from tests.frontend.http2.peer import (
    END_HEADERS,
    END_STREAM,
    KINDS,
    PREFACE,
    RESPONSE,
    TRAILERS,
    ClockLoop,
    Peer,
    block,
    frame,
    request,
    reset,
    settings,
    window,
)

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = KINDS
CALM = ErrorCode.ENHANCE_YOUR_CALM
STREAMS = range(1, 3001, 2)
OPEN, GREETING = request(1, b"/hold", ended=False), PREFACE + settings()
BEGUN, PINGED = frame(HEADERS, END_STREAM, 1, block()), frame(PING, 0, 0, bytes(8))
RESETS_OF_STREAMS = [request(id, b"/hold") + reset(id) for id in STREAMS]
ENDLESS_FRAMES: dict[str, list[bytes]] = {
    "empty DATA": [OPEN, *[frame(DATA, 0, 1)] * 1500],
    "empty padded DATA": [OPEN, *[frame(DATA, 8, 1, b"\x03\0\0\0")] * 1500],
    "SETTINGS": [settings((4, 1))] * 300,
    "SETTINGS with ACK": [frame(SETTINGS, 1)] * 300,
    "many SETTINGS": [settings(*[(99, 1)] * 65)],
    "PING": [PINGED] * 4,
    "PING with ACK": [frame(PING, 1, 0, bytes(8))] * 1500,
    "PRIORITY": [frame(PRIORITY, 0, 3, bytes(5))] * 1500,
    "unknown": [frame(42, 0, 0, b"x")] * 1500,
    "GOAWAY": [frame(GOAWAY, 0, 0, bytes(8))] * 1500,
    "DATA after the end": [request(1, b"/refuse", ended=False), *[frame(DATA, 0, 1, b"x")] * 1500],
    "rapid reset": RESETS_OF_STREAMS,
    "stream errors": [request(id, b"/hold") + window(id, 0) for id in STREAMS],
    "tiny windows": [settings((4, 0)), request(1, b"/large"), *[window(1, 1)] * 1500],
    "window updates": [window(0, 1)] * 10_100,
    "CONTINUATION": [BEGUN, *[frame(CONTINUATION, 0, 1, b"")] * 8],
    "endless header block": [BEGUN, *[frame(CONTINUATION, 0, 1, bytes(10_000))] * 7],
}
USUAL_FRAMES: dict[str, list[list[bytes]]] = {
    "a ping around each answer": [[PINGED, request(id), PINGED] for id in range(1, 600, 2)],
    "a ping now and then": [[PINGED], *[[]] * 9] * 10 + [[PINGED, PINGED, PINGED]],
    "a change of settings": [[settings((4, 1 << 20))]] * 600,
    "resets of 150 calls": [RESETS_OF_STREAMS[at : at + 150] for at in range(0, 1500, 150)],
    "a small window after each message": [[request(id) + window(0, 20) for id in STREAMS]],
}


@pytest.mark.parametrize("frames", ENDLESS_FRAMES.values(), ids=ENDLESS_FRAMES)
def test_endless_cheap_frames_end_the_connection(peer: Peer, frames: list[bytes]) -> None:
    assert peer.send(*frames).goaways == [CALM] and peer.closed


@pytest.mark.parametrize("seconds", USUAL_FRAMES.values(), ids=USUAL_FRAMES)
def test_usual_rates_are_no_attack(peer: Peer, seconds: list[list[bytes]]) -> None:
    """A client sends these frames in a second."""
    for frames in seconds:
        peer.loop.now += 1
        peer.send(*frames)
        assert not peer.closed


def test_stream_may_change_both_windows_after_each_small_message(peer: Peer) -> None:
    """gRPC's libraries for C++ and Python do."""
    peer.send(OPEN)
    stream = peer.application.handlers[1].stream
    stream.send_headers(RESPONSE)
    for _ in range(7_000):
        peer.run(stream.send, bytes(23))
        peer.send(window(0, 23), window(1, 23))
        assert not peer.closed


def test_calls_that_are_given_up_are_no_flood(loop: ClockLoop) -> None:
    """Behind a proxy, one connection has the calls of many clients, and their deadlines pass."""
    peer = Peer(loop, max_streams=3000)
    peer.send(request(1, b"/hold"), *[request(id, b"/hold") for id in STREAMS[1:]])
    loop.now += 0.01
    assert not peer.send(*[reset(id) for id in STREAMS[1:]]).goaways
    later = [id + STREAMS[-1] + 1 for id in STREAMS]
    assert peer.send(*[request(id, b"/hold") + reset(id) for id in later]).goaways == [CALM] and not peer.closed
    answer = peer.run(peer.application.handlers[1].stream.respond, RESPONSE, b"", TRAILERS)
    assert answer[0].kind == HEADERS and peer.closed, "the open call is answered first"


def test_large_metadata_end_only_their_call(peer: Peer) -> None:
    large = block((b"x-large", b"x" * 20_000))
    frames = frame(HEADERS, END_STREAM, 3, large[:16_000]) + frame(CONTINUATION, END_HEADERS, 3, large[16_000:])
    sent = peer.send(request(1, b"/hold"), frames, request(5))
    assert sent.resets(3) == [CALM] and not sent.goaways
    assert [received.path for received in peer.application.requests] == [b"/hold", b"/echo"]


def test_budget_fills_up_to_its_burst() -> None:
    budget = RateBudget(3, per_second=2)
    assert [budget.spend(100.0) for _ in range(4)] == [True, True, True, False]
    assert [budget.spend(101.0) for _ in range(3)] == [True, True, False], "what was refused cost nothing"
    assert [budget.spend(900.0) for _ in range(4)] == [True, True, True, False]


# Memory.


def test_header_bomb_is_stopped_before_it_is_large(peer: Peer) -> None:
    """A large entry of the table, then thousands of references to it, a byte each."""
    entry = b"\x40\x01x" + b"\x7f\xa1\x1d" + bytes(b"y" * 3872)
    peer.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, block() + entry))
    bomb = frame(HEADERS, END_HEADERS | END_STREAM, 3, block() + b"\xbe" * 16_000)
    tracemalloc.start()
    try:
        sent = peer.send(bomb)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sent.goaways == [CALM] and peak < 1 << 20


def test_table_size_updates_are_limited(peer: Peer) -> None:
    assert peer.send(frame(HEADERS, 5, 1, b"\x20\x3f\xe1\x1f" + block()))[0].kind == HEADERS, "two are valid"
    assert peer.send(frame(HEADERS, 5, 3, b"\x20\x3f\xe1\x1f\x20" + block())).goaways == [ErrorCode.COMPRESSION_ERROR]


def test_ended_streams_leave_nothing_behind(peer: Peer) -> None:
    """A connection with many requests does not grow, and remembers few and small header blocks."""

    def call(first: int) -> None:
        for id in range(2 * first + 1, 2 * first + 1201, 2):
            path = b"/%d" % id + b"x" * (id % 2000)
            peer.send(request(id, path, ended=False), frame(DATA, END_STREAM, id, b"x" * 100))
            for kept in (peer.application.requests, peer.application.handlers, peer.application.sent):
                kept.clear()

    call(0)
    tracemalloc.start()
    try:
        call(600)
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()
    remembered = peer.connection._headers._remembered
    assert 0 < len(remembered) <= header_blocks.MAX_REMEMBERED
    assert max(map(len, remembered)) <= header_blocks.MAX_REMEMBERED_BYTES


# Clients that do not read, or do not send.


def test_client_that_reads_nothing_is_not_read_from(peer: Peer) -> None:
    peer.send(settings((4, 2**31 - 1)), window(0, 2**31 - 1 - 65_535))
    peer.transport.full = True
    peer.send(*[request(id, b"/large") for id in range(1, 17, 2)])
    assert peer.transport.reading_paused
    assert peer.transport.buffered < 300_000, "the rest waits where it can be dropped"
    assert peer.connection.unread_bytes > 7_900_000
    peer.transport.full, peer.transport.buffered = False, 0
    peer.run(peer.connection.resume_writing)
    assert not peer.transport.reading_paused and peer.connection.unread_bytes == 0


class Guarded:
    """A connection with its guard."""

    def __init__(self, peer: Peer, **settings: Any) -> None:
        self.peer, self.metrics = peer, Metrics()
        report = peer.application.report
        self.guard = ConnectionGuard(Settings(**settings), self.metrics, lambda: list(peer.connections), report)

    def closed_after(self, *seconds: float) -> list[str]:
        """Let time pass, check that the connection ends with the last part of it, and return why."""
        closed = []
        for part in seconds:
            self.peer.loop.now += part
            self.guard.sweep(self.peer.loop.now)
            closed.append(self.peer.closed)
        assert closed == [False] * (len(seconds) - 1) + [True]
        return [labels[0] for labels in self.metrics.connections_closed.values]


def test_slow_reader_is_disconnected(peer: Peer) -> None:
    guarded = Guarded(peer)
    peer.transport.full = True
    peer.send(settings((4, 1 << 20)), window(0, 1 << 20), request(1, b"/large"))
    assert guarded.closed_after(0, 15, 14, 2) == ["slow_reader"]


def test_stream_that_never_opens_its_window_is_reset_alone(peer: Peer) -> None:
    peer.send(settings((4, 100)), request(1, b"/large"))
    assert not peer.sweep(29).resets(1)
    peer.send(window(1, 1000))
    assert not peer.sweep(29).resets(1), "it made progress"
    assert peer.sweep(2).resets(1) == [ErrorCode.CANCEL]
    assert peer.application.lost == [1] and peer.connection.unread_bytes == 0
    assert peer.send(request(3))[0].kind == HEADERS


@pytest.mark.parametrize("start", [b"", PREFACE[:10], PREFACE, PREFACE + settings()[:5]])
def test_incomplete_handshake_ends(loop: ClockLoop, start: bytes) -> None:
    peer = Peer(loop, greet=False)
    guarded = Guarded(peer)
    peer.send(start)
    assert peer.connection.phase is Phase.RECEIVING
    assert guarded.closed_after(9, 3) == ["slow_request"]


@pytest.mark.parametrize("start", [BEGUN, request(1)[:20], b"\0"])
def test_slow_header_block_ends_the_connection(peer: Peer, start: bytes) -> None:
    guarded = Guarded(peer)
    peer.loop.now += 1000
    peer.send(start)
    guarded.guard.sweep(peer.loop.now)
    peer.loop.now += 9
    peer.send(frame(CONTINUATION, 0, 1) * (start == BEGUN))  # all frames of a block share its time
    assert guarded.closed_after(0, 2) == ["slow_request"]


def test_idle_connection_stays_while_there_is_room(peer: Peer) -> None:
    guarded = Guarded(peer, max_connections=1)
    peer.send(request(1, b"/hold"))
    phase = peer.connection.phase
    assert phase is Phase.RUNNING and not guarded.guard.make_room(1, 0) and not peer.closed
    peer.send(reset(1))
    peer.loop.now += 3600
    guarded.guard.sweep(peer.loop.now)
    assert not peer.closed and peer.connection.phase is Phase.KEPT and not guarded.guard.make_room(1, 0)
    assert guarded.closed_after(0) == ["too_many"]


def test_long_burst_is_handled_in_turns(loop: ClockLoop) -> None:
    """Other connections run between the turns of a connection with many frames, which is not read from meanwhile."""
    turns = ReadingTurns(clock=itertools.count(step=0.001).__next__)
    peer, other = Peer(loop, turns=turns), Peer(loop, turns=turns)

    async def send() -> bool:
        peer.connection.data_received(b"".join(request(id) for id in range(1, 200, 2)))
        other.connection.data_received(request(1))
        peer.connection.resume_writing()
        return peer.has_unread_frames and peer.transport.reading_paused

    assert loop.run_until_complete(send())
    assert other.send()[0].kind == HEADERS and len(peer.application.requests) < 100
    peer.send()
    assert len(peer.application.requests) == 100 and not peer.transport.reading_paused


def test_fault_of_a_broken_connection_ends_only_that_connection(peer: Peer) -> None:
    """The transport of asyncio raises when the client has aborted its connection, which the server may not have noticed yet."""

    def fail() -> None:
        raise OSError(107, "Transport endpoint is not connected")

    peer.transport.write_eof = fail  # type: ignore[method-assign]
    peer.connection.refuse_slow_request()
    peer.sweep(10)
    assert peer.transport.closing
