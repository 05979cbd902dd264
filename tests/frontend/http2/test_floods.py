"""A client that connects again after it flooded a connection gains nothing. The clock is a fake."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from service.frontend.http2.floods import HOLD_SECONDS, MAX_ADDRESSES, RESETS, RESETS_PER_SECOND, WINDOW_SECONDS, Floods
from service.frontend.http2.frames import ErrorCode
from tests.frontend.http2.peer import PREFACE, ClockLoop, Peer, frame, goaway_codes, request, reset, settings

PEER = "127.0.0.1"
"""The address of every client of this file."""
CALM = ErrorCode.ENHANCE_YOUR_CALM


def resets(number: int) -> Iterator[bytes]:
    for stream in range(1, 2 * number, 2):
        yield request(stream, b"/hold") + reset(stream)


def connected(loop: ClockLoop, floods: Floods) -> Peer:
    return Peer(loop, floods=floods, greet=False)


def flood(loop: ClockLoop, floods: Floods) -> int:
    """Reset streams on a new connection until it ends. Returns how many of them the application got."""
    peer = connected(loop, floods)
    peer.send(PREFACE + settings())
    loop.now += HOLD_SECONDS
    peer.send()
    assert goaway_codes(peer.send(*resets(5000))) == [CALM]
    return len(peer.application.requests)


@pytest.fixture
def floods() -> Floods:
    return Floods()


def test_next_connection_is_held(loop: ClockLoop, floods: Floods) -> None:
    flood(loop, floods)
    peer = connected(loop, floods)
    peer.send(PREFACE + settings(), request(1))
    assert not peer.application.requests and not peer.closed
    loop.now += HOLD_SECONDS
    peer.send()
    assert len(peer.application.requests) == 1 and not peer.closed


def test_each_flood_holds_the_next_connection(loop: ClockLoop, floods: Floods) -> None:
    """A flood of a connection that was held counts from its end, not from the arrival of its frames."""
    flood(loop, floods)
    for _ in range(4):
        attacker = connected(loop, floods)
        attacker.send(PREFACE + settings(), *resets(5000))
        loop.now += HOLD_SECONDS
        assert goaway_codes(attacker.send()) == [CALM]
        peer = connected(loop, floods)
        peer.send(PREFACE + settings(), request(1))
        assert not peer.application.requests


def test_frames_that_arrive_meanwhile_wait_too(loop: ClockLoop, floods: Floods) -> None:
    flood(loop, floods)
    peer = connected(loop, floods)
    for part in (PREFACE, settings(), request(1), request(3)):
        peer.send(part)
        loop.now += HOLD_SECONDS / 8
    assert not peer.application.requests
    loop.now += HOLD_SECONDS
    peer.send()
    assert [handled.path for handled in peer.application.requests] == [b"/echo", b"/echo"]


def test_connections_of_the_address_share_a_small_budget(loop: ClockLoop, floods: Floods) -> None:
    first = flood(loop, floods)
    later = [flood(loop, floods) for _ in range(20)]
    assert sum(later) <= RESETS + 20 * (RESETS_PER_SECOND * HOLD_SECONDS + 1) < first


def test_other_connections_are_as_before(loop: ClockLoop, floods: Floods) -> None:
    """An open connection of the same address may belong to another client behind a proxy."""
    opened = Peer(loop, floods=floods)
    flood(loop, floods)
    opened.send(*resets(RESETS + 100))
    assert len(opened.application.requests) == RESETS + 100 and not opened.closed
    assert floods.find("192.0.2.1", loop.now) is None


def test_address_is_forgotten_after_a_while(loop: ClockLoop, floods: Floods) -> None:
    first = flood(loop, floods)
    loop.now += WINDOW_SECONDS + HOLD_SECONDS
    peer = connected(loop, floods)
    peer.send(PREFACE + settings(), request(1))
    assert len(peer.application.requests) == 1
    assert flood(loop, floods) == first


def test_client_whose_requests_are_too_large_is_not_held(loop: ClockLoop, floods: Floods) -> None:
    peer = Peer(loop, floods=floods)
    assert goaway_codes(peer.send(frame(1, 0, 1, bytes(16_000)), frame(9, 0, 1, bytes(16_000)))) == [CALM]
    assert floods.find(PEER, loop.now) is None


def test_number_of_addresses_is_bounded(floods: Floods) -> None:
    for number in range(MAX_ADDRESSES + 1):
        floods.record(f"peer {number}", 0.0)
    assert floods.find("peer 0", 0.0) is None and floods.find("peer 1", 0.0) is not None


def test_connection_that_ends_while_it_is_held_harms_nothing(loop: ClockLoop, floods: Floods) -> None:
    flood(loop, floods)
    peer = connected(loop, floods)
    peer.send(PREFACE + settings())
    peer.connection.abort()
    loop.now += HOLD_SECONDS
    peer.send()
    assert not peer.application.errors
