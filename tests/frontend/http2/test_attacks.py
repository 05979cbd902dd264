"""Clients that try to fill a connection's memory or to keep it busy are stopped or bounded. No check depends on the machine's speed."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from typing import Any

import hpack
import pytest

from service.frontend import connection_guard
from service.frontend.connection_guard import ConnectionGuard, Phase
from service.frontend.http2.frames import ErrorCode
from service.metrics import Metrics
from service.settings import Settings
from tests.frontend.http2.peer import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    REQUEST,
    SETTINGS,
    ClockLoop,
    Peer,
    block,
    body_of,
    frame,
    goaway_codes,
    request,
    reset,
    reset_codes,
    settings,
    window,
)

CALM = ErrorCode.ENHANCE_YOUR_CALM
OPEN = request(1, b"/hold", ended=False)


def rapid_resets() -> Iterator[bytes]:
    for number in range(5000):
        yield request(2 * number + 1, b"/hold") + reset(2 * number + 1)


def stream_errors() -> Iterator[bytes]:
    for number in range(5000):
        yield request(2 * number + 1, b"/hold") + window(2 * number + 1, 0)


def dribble() -> Iterator[bytes]:
    yield settings((4, 0)) + request(1, b"/large")
    for _ in range(5000):
        yield window(1, 1)


ENDLESS_FRAMES: dict[str, list[bytes] | Iterator[bytes]] = {
    "empty DATA": [OPEN, *[frame(DATA, 0, 1)] * 5000],
    "empty padded DATA": [OPEN, *[frame(DATA, 8, 1, b"\x03\0\0\0")] * 5000],
    "SETTINGS": [settings((4, 1))] * 5000,
    "SETTINGS with ACK": [frame(SETTINGS, 1)] * 5000,
    "PING": [frame(PING, 0, 0, bytes(8))] * 5000,
    "PING with ACK": [frame(PING, 1, 0, bytes(8))] * 5000,
    "PRIORITY": [frame(PRIORITY, 0, 3, bytes(5))] * 5000,
    "unknown": [frame(42, 0, 0, b"x")] * 5000,
    "GOAWAY": [frame(7, 0, 0, bytes(8))] * 5000,
    "DATA after the end": [request(1, b"/refuse", ended=False), *[frame(DATA, 0, 1, b"x")] * 5000],
    "rapid reset": rapid_resets(),
    "stream errors": stream_errors(),
    "tiny windows": dribble(),
}


@pytest.mark.parametrize("frames", ENDLESS_FRAMES.values(), ids=ENDLESS_FRAMES)
def test_endless_cheap_frames_end_the_connection(peer: Peer, frames: list[bytes]) -> None:
    assert goaway_codes(peer.send_parts(frames)) == [CALM] and peer.closed


@pytest.mark.parametrize("frames", [[frame(PING, 0, 0, bytes(8)), request(1)], [settings((4, 1 << 20))], [request(1)]])
def test_usual_rates_are_no_attack(peer: Peer, frames: list[bytes]) -> None:
    """An hour of a client that sends these frames once a second."""
    for number in range(3600):
        peer.loop.now += 1
        peer.send(*[part[:5] + struct.pack(">I", 2 * number + 1) + part[9:] if part[3] == HEADERS else part for part in frames])
        assert not peer.closed


def test_cancelling_every_call_is_allowed_at_a_usual_rate(peer: Peer) -> None:
    for number in range(5000):
        peer.loop.now += 0.01
        peer.send(request(2 * number + 1, b"/hold"), reset(2 * number + 1))
    assert not peer.closed and len(peer.application.lost) == 5000


def test_small_window_updates_without_waiting_data_are_usual(peer: Peer) -> None:
    """Some clients open the window again after each small message."""
    peer.send_parts([request(2 * number + 1) + window(0, 20) for number in range(5000)])
    assert not peer.closed


# Header blocks.


def test_continuation_flood_is_stopped(peer: Peer) -> None:
    frames = [frame(HEADERS, END_STREAM, 1, block()), *[frame(CONTINUATION, 0, 1, b"")] * 5000]
    assert goaway_codes(peer.send_parts(frames)) == [CALM]


def test_endless_header_block_is_stopped(peer: Peer) -> None:
    frames = [frame(HEADERS, END_STREAM, 1, block()), *[frame(CONTINUATION, 0, 1, bytes(16_000))] * 100]
    sent = peer.send_parts(frames)
    assert goaway_codes(sent) == [CALM]


def test_header_bomb_is_stopped_before_it_is_large(peer: Peer) -> None:
    """One large entry of the table, then thousands of references to it, a byte each."""
    entry = b"\x40\x01x" + b"\x7f\xa1\x1d" + bytes(b"y" * 3872)
    peer.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, block() + entry))
    bomb = frame(HEADERS, END_HEADERS | END_STREAM, 3, block() + b"\xbe" * 16_000)
    tracemalloc.start()
    try:
        sent = peer.send(bomb)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert goaway_codes(sent) == [CALM] and peak < 1 << 20


def test_table_size_updates_are_limited(peer: Peer) -> None:
    sent = peer.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\x20" * 10_000 + block()))
    assert goaway_codes(sent) == [ErrorCode.COMPRESSION_ERROR]


def test_two_table_size_updates_are_valid(peer: Peer) -> None:
    sent = peer.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\x20\x3f\xe1\x1f" + block()))
    assert sent[0].kind == HEADERS


def test_remembered_blocks_are_limited(peer: Peer) -> None:
    tracemalloc.start()
    try:
        for number in range(2000):
            peer.send(request(2 * number + 1, b"/%d" % number + b"x" * 300))
            peer.application.requests.clear()
            peer.application.handlers.clear()
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 1 << 20


def test_ended_streams_leave_nothing_behind(peer: Peer) -> None:
    """A connection with many requests does not grow."""

    def call(first: int, count: int) -> None:
        for number in range(first, first + count):
            peer.send(request(2 * number + 1, ended=False), frame(DATA, END_STREAM, 2 * number + 1, b"x" * 100))
            peer.application.requests.clear()
            peer.application.handlers.clear()
            peer.application.sent.clear()

    call(0, 1000)
    tracemalloc.start()
    try:
        call(1000, 1000)
        before = tracemalloc.get_traced_memory()[0]
        call(2000, 3000)
        assert tracemalloc.get_traced_memory()[0] - before < 50_000
    finally:
        tracemalloc.stop()


# Clients that do not read, or do not send.


def test_client_that_reads_nothing_is_not_read_from(peer: Peer) -> None:
    peer.send(settings((4, 2**31 - 1)), window(0, 2**31 - 1 - 65_535))
    peer.transport.full = True
    peer.send(*[request(id, b"/large") for id in range(1, 17, 2)])
    assert peer.transport.reading_paused
    assert peer.transport.largest_buffer < 300_000, "the rest waits where it can be dropped"
    assert peer.connection.unread_bytes > 7_900_000


def guard_of(peer: Peer, **settings: Any) -> tuple[ConnectionGuard, Metrics]:
    metrics = Metrics()
    return ConnectionGuard(Settings(**settings), metrics, lambda: list(peer.connections), peer.application.report), metrics


def closed_for(metrics: Metrics) -> dict[str, float]:
    return {labels[0]: values[0] for labels, values in metrics.connections_closed.values.items()}


def test_slow_reader_is_disconnected(peer: Peer) -> None:
    guard, metrics = guard_of(peer)
    peer.transport.full = True
    peer.send(settings((4, 1 << 20)), window(0, 1 << 20), request(1, b"/large"))
    for seconds in (0, 15, 14):
        peer.loop.now += seconds
        guard.sweep(peer.loop.now)
        assert not peer.closed
    peer.loop.now += 2
    guard.sweep(peer.loop.now)
    assert peer.closed and closed_for(metrics) == {"slow_reader": 1}


def test_stream_that_never_opens_its_window_is_reset_alone(peer: Peer) -> None:
    peer.send(settings((4, 100)), request(1, b"/large"))
    assert not reset_codes(peer.sweep(29), 1)
    body_of(peer.send(window(1, 1000)), 1)
    assert not reset_codes(peer.sweep(29), 1), "it made progress"
    assert reset_codes(peer.sweep(2), 1) == [ErrorCode.CANCEL]
    assert peer.application.lost == [1] and peer.connection.unread_bytes == 0
    assert peer.send(request(3))[0].kind == HEADERS


def test_most_unread_replies_are_closed_first(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_guard, "MAX_UNREAD_BYTES", 2_000_000)
    guard, metrics = guard_of(peer)
    peer.send(settings((4, 0)), request(1, b"/large"), request(3, b"/large"))
    guard.sweep(peer.loop.now)
    assert not peer.closed
    peer.send(request(5, b"/large"))
    guard.sweep(peer.loop.now)
    assert peer.closed and closed_for(metrics) == {"slow_reader": 1}


@pytest.mark.parametrize("start", [b"", PREFACE[:10], PREFACE, PREFACE + settings()[:5]])
def test_incomplete_handshake_ends(loop: ClockLoop, start: bytes) -> None:
    peer = Peer(loop, greet=False)
    guard, metrics = guard_of(peer)
    peer.send(start)
    loop.now += 9
    guard.sweep(loop.now)
    assert not peer.closed and peer.connection.phase is Phase.RECEIVING
    loop.now += 3
    guard.sweep(loop.now)
    assert peer.closed and closed_for(metrics) == {"slow_request": 1}


@pytest.mark.parametrize("rest", [frame(HEADERS, END_STREAM, 1, block()), request(1)[:20], b"\0"])
def test_slow_header_block_ends_the_connection(peer: Peer, rest: bytes) -> None:
    guard, metrics = guard_of(peer)
    peer.loop.now += 1000
    peer.send(rest)
    guard.sweep(peer.loop.now)
    assert not peer.closed, "an old connection may begin a request"
    peer.loop.now += 11
    guard.sweep(peer.loop.now)
    assert peer.closed and closed_for(metrics) == {"slow_request": 1}


def test_frames_of_a_header_block_share_its_time(peer: Peer) -> None:
    """A frame every 4 seconds would otherwise give the block 4 seconds more."""
    guard, metrics = guard_of(peer)
    peer.send(frame(HEADERS, END_STREAM, 1, block()))
    for _ in range(3):
        assert not peer.closed
        peer.loop.now += 4
        peer.send(frame(CONTINUATION, 0, 1, b"")[:5], frame(CONTINUATION, 0, 1, b"")[5:])
        guard.sweep(peer.loop.now)
    assert peer.closed and closed_for(metrics) == {"slow_request": 1}


def test_idle_connection_stays_while_there_is_room(peer: Peer) -> None:
    guard, metrics = guard_of(peer, max_connections=1)
    peer.loop.now += 3600
    guard.sweep(peer.loop.now)
    assert not peer.closed and peer.connection.phase is Phase.KEPT
    assert not guard.make_room(1, 0)
    assert peer.closed and closed_for(metrics) == {"too_many": 1}


def test_running_request_keeps_its_connection(peer: Peer) -> None:
    guard, _ = guard_of(peer, max_connections=1)
    peer.send(request(1, b"/hold"))
    assert peer.connection.phase is Phase.RUNNING and not guard.make_room(1, 0) and not peer.closed


def test_long_burst_is_handled_in_turns(loop: ClockLoop) -> None:
    """Other connections run between the turns of a connection with many frames, which is not read from meanwhile."""
    peer, other = Peer(loop), Peer(loop)
    encoder = hpack.Encoder()
    headers = [encoder.encode([*REQUEST, (b"x-number", b"%d" % number)], huffman=True) for number in range(6000)]
    burst = b"".join(frame(HEADERS, END_HEADERS | END_STREAM, 2 * number + 1, data) for number, data in enumerate(headers))
    waiting = []

    async def send() -> None:
        peer.connection.data_received(burst)
        waiting.append((peer.connection.has_unread_frames, peer.transport.reading_paused))
        other.connection.data_received(request(1))

    loop.run_until_complete(send())
    assert waiting == [(True, True)]
    assert other.send()[0].kind == HEADERS
    peer.send()
    assert len(peer.application.requests) == 6000 and not peer.transport.reading_paused


def test_fault_of_a_broken_connection_ends_only_that_connection(peer: Peer) -> None:
    """The transport of asyncio raises when the client has aborted its connection, which the server may not have noticed yet."""

    def fail() -> None:
        raise OSError(107, "Transport endpoint is not connected")

    peer.transport.write_eof = fail  # type: ignore[method-assign]
    peer.connection.refuse_slow_request()
    peer.sweep(10)
    assert peer.transport.closing
