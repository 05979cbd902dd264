"""Frames in, frames out, whole and in order, however the socket cuts them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.ipc.channel import HEADER, Channel, Frame, Kind, encode, pair

MIB = 1 << 20


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = (Channel(end) for end in pair())
    yield one, other
    one.close()
    other.close()


def to_hand_over() -> tuple[socket.socket, socket.socket]:
    """A pair of which one end is kept; a read that waits for an end-of-file which never comes fails."""
    mine, theirs = pair()
    mine.settimeout(5.0)
    return mine, theirs


def receive_all(sender: Channel, receiver: Channel, *, count: int) -> list[Frame]:
    """Both ends by turns, as two event loops would, until `count` frames have come."""
    frames: list[Frame] = []
    for _ in range(1000):
        sender.flush()
        frames += receiver.receive()
        if len(frames) >= count:
            break
    return frames


some_frames = st.lists(
    st.tuples(st.sampled_from(list(Kind)), st.integers(0, 2**64 - 1), st.text(max_size=9) | st.none(), st.binary(max_size=40)),
    min_size=1,
    max_size=5,
)


@given(sent=some_frames.filter(lambda frames: all(kind != Kind.ATTACH for kind, *_ in frames)), data=st.data())
@settings(deadline=None)
def test_frames_come_whole_however_they_are_cut(sent: list[tuple[Kind, int, str | None, bytes]], data: st.DataObject) -> None:
    stream = b"".join(encode(kind, id, body, (tail,)) for kind, id, body, tail in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    raw, end = pair()
    receiver, frames = Channel(end), list[Frame]()
    for begin, stop in pairwise([0, *cuts, len(stream)]):
        raw.sendall(stream[begin:stop])
        frames += receiver.receive()
    assert [(frame.kind, frame.id, frame.read(str | None), frame.tail) for frame in frames] == sent  # type: ignore[arg-type]
    assert receiver.open
    raw.close()
    receiver.close()


def test_a_frame_s_parts_may_be_any_contiguous_buffers(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    one.send(encode(Kind.ANSWER, 3, ["body"], (b"ab", bytearray(b"cd"), memoryview(b"xefx")[1:3])))
    [frame] = receive_all(one, other, count=1)
    assert (frame.read(list[str]), frame.tail, frame.attached) == (["body"], b"abcdef", None)


def test_a_body_of_another_kind_is_refused() -> None:
    frame = Frame(Kind.SUBMIT, 1, msgspec.msgpack.encode("text"), b"")
    with pytest.raises(msgspec.ValidationError):
        frame.read(int)


def test_all_frames_of_one_tick_leave_in_one_write_and_come_in_one_read(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    for id in range(50):
        one.send(encode(Kind.SUBMIT, id))
    assert one.writes == 0
    assert one.flush()
    assert (one.writes, one.bytes_sent) == (1, 50 * len(encode(Kind.SUBMIT, 0)))
    assert [frame.id for frame in other.receive()] == list(range(50))


def test_nothing_has_come_before_a_frame_is_whole(ends: tuple[Channel, Channel]) -> None:
    assert ends[0].receive() == []
    assert ends[0].open


def test_five_mebibytes_cross_a_pair_that_never_blocks(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    tail = os.urandom(5 * MIB)
    one.send(encode(Kind.ANSWER, 1, None, (tail,)))
    assert not one.flush()
    one.send(encode(Kind.ANSWER, 2))
    first, second = receive_all(one, other, count=2)
    assert first.tail == tail
    assert (first.id, second.id) == (1, 2)
    assert one.flush()
    assert one.bytes_sent == 2 * HEADER.size + 5 * MIB + 2 * len(msgspec.msgpack.encode(None))


def test_frames_of_both_directions_do_not_meet(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    one.send(encode(Kind.SUBMIT, 1))
    other.send(encode(Kind.ANSWER, 2))
    one.flush(), other.flush()
    assert [frame.id for frame in other.receive()] == [1]
    assert [frame.id for frame in one.receive()] == [2]


@pytest.mark.parametrize("big", [0, 2 * MIB])
def test_attached_sockets_arrive_with_their_frames_in_order(ends: tuple[Channel, Channel], big: int) -> None:
    one, other = ends
    kept: list[socket.socket] = []
    one.send(encode(Kind.READY, 0, None, (bytes(big),)))
    for id in range(1, 13):
        mine, theirs = to_hand_over()
        kept.append(mine)
        one.send(encode(Kind.ATTACH, id), attached=theirs)
        theirs.close()
        one.send(encode(Kind.GATHER, id))
    frames = receive_all(one, other, count=25)
    assert [(frame.kind, frame.id) for frame in frames[1:]] == [
        (kind, id) for id in range(1, 13) for kind in (Kind.ATTACH, Kind.GATHER)
    ]
    for mine, frame in zip(kept, frames[1::2], strict=True):
        assert frame.attached is not None
        mine.sendall(bytes([frame.id]))
        assert frame.attached.recv(1) == bytes([frame.id])
        frame.attached.close()
        assert mine.recv(1) == b""
        mine.close()
    assert all(frame.attached is None for frame in frames[::2])


def test_frames_before_an_end_of_file_are_kept(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    one.send(encode(Kind.ANSWER, 1))
    one.send(encode(Kind.ANSWER, 2))
    one.flush()
    one.close()
    assert [frame.id for frame in other.receive()] == [1, 2]
    assert not other.open


def test_half_a_frame_before_an_end_of_file_is_none() -> None:
    raw, end = pair()
    raw.sendall(encode(Kind.ANSWER, 1) + encode(Kind.ANSWER, 2, "cut off")[:-1])
    raw.close()
    receiver = Channel(end)
    assert [frame.id for frame in receiver.receive()] == [1]
    assert not receiver.open
    receiver.close()


def test_a_peer_that_has_gone_is_noticed_by_a_write_and_what_it_said_before_is_kept(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    other.send(encode(Kind.ANSWER, 7))
    other.flush()
    other.close()
    one.send(encode(Kind.SUBMIT, 1))
    one.flush()
    assert not one.open
    assert [frame.id for frame in one.receive()] == [7]


def test_what_is_sent_after_the_end_is_dropped_quietly(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    other.close()
    assert one.receive() == []
    one.send(encode(Kind.SUBMIT, 1))
    assert one.flush()
    assert one.bytes_sent == 0


def test_closing_gives_back_the_sockets_that_were_not_handed_over() -> None:
    one, end = (Channel(end) for end in pair())
    mine, theirs = to_hand_over()
    one.send(encode(Kind.ATTACH, 1), attached=theirs)
    theirs.close()
    one.close()
    assert mine.recv(1) == b""
    mine.close()
    end.close()


def test_closing_gives_back_the_sockets_that_came_with_half_a_frame() -> None:
    raw, end = pair()
    mine, theirs = to_hand_over()
    socket.send_fds(raw, [encode(Kind.ATTACH, 1)[:5]], [theirs.fileno()])
    theirs.close()
    receiver = Channel(end)
    assert receiver.receive() == []
    receiver.close()
    assert mine.recv(1) == b""
    mine.close()
    raw.close()
