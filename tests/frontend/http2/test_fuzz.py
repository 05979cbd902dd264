"""Random frames, cut at random positions: no exception, and the connection either continues or ends with GOAWAY."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.frontend.http2.peer import GOAWAY, HEADERS, PREFACE, ClockLoop, Frame, Peer, block, frame, request, settings

ids = st.sampled_from([0, 1, 1, 3, 3, 5, 7, 2, 9, 2**31 - 1])
payloads = st.one_of(
    st.binary(max_size=20),
    st.sampled_from([b"", bytes(4), bytes(5), bytes(8), b"\0\0\0\x05", b"\x7f\xff\xff\xff"]),
    st.sampled_from([b"\0\x04\0\0\0\x01", b"\0\x04\x7f\xff\xff\xff"]),
    st.sampled_from([b"/echo", b"/hold", b"/slow", b"/large", b"/refuse"]).map(lambda path: block(path=path)),
)
frames = st.builds(
    frame,
    st.one_of(st.integers(0, 9), st.integers(0, 255)),
    st.one_of(st.sampled_from([0, 1, 4, 5, 8, 0xD, 0x25]), st.integers(0, 255)),
    ids,
    payloads,
)
requests = st.builds(
    request,
    st.sampled_from([1, 3, 5, 7, 9, 11]),
    st.sampled_from([b"/echo", b"/hold", b"/slow", b"/large"]),
    ended=st.booleans(),
)
conversations = st.lists(
    st.one_of(frames, requests, st.builds(lambda value: settings((4, value)), st.integers(0, 1 << 17))), max_size=30
)


@hypothesis_settings(max_examples=100)
@given(conversations, st.randoms(use_true_random=False), st.booleans())
def test_any_frames_at_any_cuts(conversation: list[bytes], random: random.Random, greet: bool) -> None:
    loop = ClockLoop()
    try:
        peer, other = Peer(loop, greet=False), Peer(loop)
        data, sent = (PREFACE + settings() if greet else b"") + b"".join(conversation), []
        while data:
            cut = random.randint(1, 1 + len(data) // random.randint(1, 8))
            sent += peer.send(data[:cut])
            data = data[cut:]
        assert not peer.application.errors
        assert peer.closed == (bool(sent) and sent[-1].kind == GOAWAY)
        assert len(peer.application.lost) == len(set(peer.application.lost))
        assert other.send(request(1))[0].kind == HEADERS
        peer.transport.close()
        peer.send()
        assert not peer.connections and peer.connection.unread_bytes == 0
    finally:
        loop.close()


@hypothesis_settings(max_examples=60)
@given(conversations, st.randoms(use_true_random=False))
def test_frames_mean_the_same_wherever_they_are_cut(conversation: list[bytes], random: random.Random) -> None:
    loop = ClockLoop()
    try:
        data, whole, parts = b"".join(conversation), Peer(loop), Peer(loop)
        expected, actual = whole.send(data), list[Frame]()
        while data:
            cut = random.randint(1, 40)
            actual += parts.send(data[:cut])
            data = data[cut:]
        assert _by_stream(actual) == _by_stream(expected)
    finally:
        loop.close()


def _by_stream(frames: list[Frame]) -> dict[int, list[Frame]]:
    """Return the data sent on each stream: the cuts of the data depend on the order in which windows open."""
    streams: dict[int, list[Frame]] = {}
    for sent in frames:
        streams.setdefault(sent.stream, []).append(sent)
    return streams


@hypothesis_settings(max_examples=60)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes(data: bytes, greet: bool) -> None:
    loop = ClockLoop()
    try:
        peer = Peer(loop, greet=greet)
        peer.send(data)
        assert not peer.application.errors
    finally:
        loop.close()
