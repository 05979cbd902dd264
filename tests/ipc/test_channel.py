"""Channels deliver whole frames in order, however the socket splits them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.ipc.channel import HEADER, Channel, Frame, encode, pair
from service.ipc.messages import (
    ALL,
    Answer,
    Attach,
    Cancel,
    CollectMetrics,
    Done,
    Failed,
    LoadModel,
    Message,
    ModelKey,
    Ready,
    Refusal,
    RefusalBlock,
    Release,
    Request,
)

MIB = 1 << 20


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    first, second = (Channel(end) for end in pair())
    yield first, second
    first.close()
    second.close()


def socket_to_pass() -> tuple[socket.socket, socket.socket]:
    """Return a kept end and an end to pass. Reading the kept end fails after 5 s if the other end is never closed."""
    kept, passed = pair()
    kept.settimeout(5.0)
    return kept, passed


def receive_all(sender: Channel, receiver: Channel, *, count: int) -> list[Frame]:
    """Flush and receive alternately, as two event loops would, until `count` frames have arrived."""
    frames: list[Frame] = []
    for _ in range(1000):
        sender.flush()
        frames += receiver.receive()
        if len(frames) >= count:
            break
    return frames


texts = st.text(max_size=9)
some_messages = st.one_of(
    st.sampled_from([Cancel(), Ready(), Done(), CollectMetrics(), Answer((2, 3), steps=[1, 2])]),
    st.builds(Failed, texts),
    st.builds(LoadModel, texts, texts | st.none()),
    st.builds(Release, st.builds(ModelKey, texts, texts, st.integers(0, 9))),
    st.builds(Refusal, texts, texts, texts | st.none()),
    st.builds(RefusalBlock, st.builds(Refusal, texts, texts, texts | st.none())),
    st.builds(Request, texts, texts, st.lists(st.integers(1, 99), max_size=3), st.floats(0, 9), st.floats(0, 9)),
)
some_frames = st.lists(st.tuples(some_messages, st.integers(0, 2**64 - 1), st.binary(max_size=40)), min_size=1, max_size=5)


@given(sent=some_frames, data=st.data())
def test_frames_arrive_whole_however_they_are_split(sent: list[tuple[Message, int, bytes]], data: st.DataObject) -> None:
    stream = b"".join(encode(message, id, (tail,)) for message, id, tail in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    raw, end = pair()
    receiver, frames = Channel(end), list[Frame]()
    for begin, stop in pairwise([0, *cuts, len(stream)]):
        raw.sendall(stream[begin:stop])
        frames += receiver.receive()
    assert [(frame.message, frame.id, frame.tail) for frame in frames] == sent
    assert receiver.open
    raw.close()
    receiver.close()


def test_every_message_has_a_tag_of_its_own() -> None:
    tags = [kind.__struct_config__.tag for kind in ALL]
    assert len(set(tags)) == len(tags) > 20


def test_unknown_tag_is_refused(ends: tuple[Channel, Channel]) -> None:
    sender, receiver = ends
    packed = msgspec.msgpack.encode(["Surprise"])
    sender.send(HEADER.pack(len(packed), len(packed), 1) + packed)
    sender.flush()
    with pytest.raises(msgspec.ValidationError):
        receiver.receive()


def test_tail_is_made_of_any_contiguous_buffers(ends: tuple[Channel, Channel]) -> None:
    sender, receiver = ends
    sender.send(encode(Failed("reason"), 3, (b"ab", bytearray(b"cd"), memoryview(b"xefx")[1:3])))
    [frame] = receive_all(sender, receiver, count=1)
    assert (frame.message, frame.tail, frame.attached) == (Failed("reason"), b"abcdef", None)


def test_frames_of_one_tick_leave_in_one_write(ends: tuple[Channel, Channel]) -> None:
    sender, receiver = ends
    for id in range(50):
        sender.send(encode(Cancel(), id))
    assert sender.writes == 0
    assert sender.flush()
    assert (sender.writes, sender.bytes_sent) == (1, 50 * len(encode(Cancel())))
    assert [frame.id for frame in receiver.receive()] == list(range(50))


def test_empty_channel_stays_open(ends: tuple[Channel, Channel]) -> None:
    assert ends[0].receive() == []
    assert ends[0].open


def test_five_mebibytes_cross_without_blocking(ends: tuple[Channel, Channel]) -> None:
    sender, receiver = ends
    tail = os.urandom(5 * MIB)
    sender.send(encode(Answer(), 1, (tail,)))
    assert not sender.flush()
    sender.send(encode(Answer(), 2))
    first, second = receive_all(sender, receiver, count=2)
    assert first.tail == tail
    assert (first.id, second.id) == (1, 2)
    assert sender.flush()
    assert sender.bytes_sent == 2 * len(encode(Answer())) + 5 * MIB


def test_directions_are_independent(ends: tuple[Channel, Channel]) -> None:
    first, second = ends
    first.send(encode(Cancel(), 1))
    second.send(encode(Answer(), 2))
    first.flush(), second.flush()
    assert [frame.id for frame in second.receive()] == [1]
    assert [frame.id for frame in first.receive()] == [2]


@pytest.mark.parametrize("big", [0, 2 * MIB])
def test_attached_sockets_arrive_with_their_frames(ends: tuple[Channel, Channel], big: int) -> None:
    sender, receiver = ends
    kept_ends: list[socket.socket] = []
    sender.send(encode(Ready(), 0, (bytes(big),)))
    for id in range(1, 13):
        kept, passed = socket_to_pass()
        kept_ends.append(kept)
        sender.send(encode(Attach(), id), attached=passed)
        passed.close()
        sender.send(encode(CollectMetrics(), id))
    frames = receive_all(sender, receiver, count=25)
    assert [(frame.message, frame.id) for frame in frames[1:]] == [
        (message, id) for id in range(1, 13) for message in (Attach(), CollectMetrics())
    ]
    for kept, frame in zip(kept_ends, frames[1::2], strict=True):
        assert frame.attached is not None
        kept.sendall(bytes([frame.id]))
        assert frame.attached.recv(1) == bytes([frame.id])
        frame.attached.close()
        assert kept.recv(1) == b""
        kept.close()
    assert all(frame.attached is None for frame in frames[::2])


def test_frames_before_an_end_of_file_are_kept(ends: tuple[Channel, Channel]) -> None:
    sender, receiver = ends
    sender.send(encode(Answer(), 1))
    sender.send(encode(Answer(), 2))
    sender.flush()
    sender.close()
    assert [frame.id for frame in receiver.receive()] == [1, 2]
    assert receiver.receive() == []
    assert not receiver.open


def test_incomplete_frame_before_an_end_of_file_is_dropped() -> None:
    raw, end = pair()
    raw.sendall(encode(Answer(), 1) + encode(Failed("cut off"), 2)[:-1])
    raw.close()
    receiver = Channel(end)
    assert [frame.id for frame in receiver.receive()] == [1]
    assert receiver.receive() == []
    assert not receiver.open
    receiver.close()


def test_write_notices_a_closed_end_and_keeps_its_frames(ends: tuple[Channel, Channel]) -> None:
    first, second = ends
    second.send(encode(Answer(), 7))
    second.flush()
    second.close()
    first.send(encode(Cancel(), 1))
    first.flush()
    assert not first.open
    assert [frame.id for frame in first.receive()] == [7]


def test_frames_sent_after_the_end_are_dropped(ends: tuple[Channel, Channel]) -> None:
    first, second = ends
    second.close()
    assert first.receive() == []
    first.send(encode(Cancel(), 1))
    assert first.flush()
    assert first.bytes_sent == 0


def test_closing_releases_sockets_that_were_not_passed() -> None:
    first, second = (Channel(end) for end in pair())
    kept, passed = socket_to_pass()
    first.send(encode(Attach(), 1), attached=passed)
    passed.close()
    first.close()
    assert kept.recv(1) == b""
    kept.close()
    second.close()


def test_closing_releases_sockets_of_an_incomplete_frame() -> None:
    raw, end = pair()
    kept, passed = socket_to_pass()
    socket.send_fds(raw, [encode(Attach(), 1)[:5]], [passed.fileno()])
    passed.close()
    receiver = Channel(end)
    assert receiver.receive() == []
    receiver.close()
    assert kept.recv(1) == b""
    kept.close()
    raw.close()


def test_trailing_bytes_may_follow_their_frame(ends: tuple[Channel, Channel]) -> None:
    sender, receiver = ends
    tail = os.urandom(3 * MIB)
    frame = encode(Failed("first"), 7, (tail[:5],), following=len(tail) - 5)
    sender.send(frame, following=memoryview(tail)[5:])
    sender.send(encode(Cancel(), 8))
    frames = receive_all(sender, receiver, count=2)
    assert [(frame.message, frame.id, bytes(frame.tail)) for frame in frames] == [
        (Failed("first"), 7, tail),
        (Cancel(), 8, b""),
    ]
    assert (sender.frames_sent, receiver.frames_received) == (2, 2)


def test_large_tail_stays_as_it_was_received(ends: tuple[Channel, Channel]) -> None:
    """Frames that arrive later do not change it."""
    sender, receiver = ends
    tails = [os.urandom(size) for size in (2 * MIB, 5, 3 * MIB, 0, 2 * MIB)]
    for id, tail in enumerate(tails):
        sender.send(encode(Answer(), id, (tail,)))
    frames = receive_all(sender, receiver, count=len(tails))
    assert [bytes(frame.tail) for frame in frames] == tails
    assert [type(frame.tail) for frame in frames] == [memoryview, bytes, memoryview, bytes, memoryview]
