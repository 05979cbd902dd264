"""Channels deliver whole frames in order, however the socket splits them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.ipc.channel import HEADER, Channel, Frame, encode, pair
from service.ipc.messages import ALL
from service.ipc.messages.control import Attach, CollectMetrics, Failed, LoadModel, Ready
from service.ipc.messages.inference import AnswerBlock, Backlog, Cancel, RefusalBlock
from service.ipc.messages.message import Done, Message, Refusal

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


messages = st.one_of(
    st.sampled_from([Cancel(), Ready(), Done(), CollectMetrics(), AnswerBlock(1, 2, (2, 3))]),
    st.builds(LoadModel, st.text(max_size=9), st.none()),
    st.builds(RefusalBlock, st.builds(Refusal, st.text(max_size=9), st.text(max_size=9))),
    st.builds(Backlog, st.floats(0, 9), st.integers(0, 99)),
)


@given(st.lists(st.tuples(messages, st.integers(0, 2**64 - 1), st.binary(max_size=40)), min_size=1, max_size=5), st.data())
@settings(max_examples=40)
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


def test_large_frames_cross_without_blocking(ends: tuple[Channel, Channel]) -> None:
    """A large tail stays as it was received when later frames arrive. It may follow its frame, and consist of any buffers."""
    sender, receiver = ends
    tails = [os.urandom(size) for size in (2 * MIB, 5, 5 * MIB, 0, 2 * MIB)]
    for id, tail in enumerate(tails):
        sender.send(encode(AnswerBlock(0, 0), id, (tail[:5], bytearray(tail[5:9]), memoryview(tail)[9:])))
    sender.send(
        encode(AnswerBlock(0, 0), len(tails), (tails[0][:5],), following=2 * MIB - 5), following=memoryview(tails[0])[5:]
    )
    tails.append(tails[0])
    assert not sender.flush()
    frames = receive_all(sender, receiver, count=len(tails))
    assert [frame.id for frame in frames] == list(range(len(tails)))
    assert [bytes(frame.tail) for frame in frames] == tails
    assert [type(frame.tail) for frame in frames] == [memoryview, bytes, memoryview, bytes, memoryview, memoryview]
    assert sender.flush() and (sender.frames_sent, receiver.frames_received) == (6, 6)
    assert sender.bytes_sent == sum(map(len, tails)) + 6 * len(encode(AnswerBlock(0, 0)))


def test_small_frames_overtake_a_divided_frame(ends: tuple[Channel, Channel]) -> None:
    """Large frames that are not divided also arrive whole between its pieces."""
    sender, receiver = ends
    tails = {1: os.urandom(8 * MIB), 2: os.urandom(3 * MIB + 1), 3: b"small", 4: os.urandom(2 * MIB), 5: b"later"}
    frames = list[Frame]()
    for id, tail in tails.items():
        send = sender.send_divided if id < 3 else sender.send
        send(encode(AnswerBlock(0, 0), id, (tail,)))
        sender.flush()
        frames += receiver.receive()
    frames += receive_all(sender, receiver, count=len(tails) - len(frames))
    assert [frame.id for frame in frames] == [3, 4, 5, 1, 2]
    assert {frame.id: bytes(frame.tail) for frame in frames} == tails
    assert not sender.outgoing and (sender.frames_sent, receiver.frames_received) == (5, 5)


def test_frames_of_one_tick_leave_in_one_write(ends: tuple[Channel, Channel]) -> None:
    sender, receiver = ends
    for id in range(50):
        sender.send(encode(Cancel(), id))
    assert sender.writes == 0
    assert sender.flush()
    assert (sender.writes, sender.bytes_sent) == (1, 50 * len(encode(Cancel())))
    assert [frame.id for frame in receiver.receive()] == list(range(50))


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


def test_whole_frames_before_an_end_of_file_are_kept() -> None:
    raw, end = pair()
    raw.sendall(encode(AnswerBlock(0, 0), 1) + encode(AnswerBlock(0, 0), 2) + encode(Failed("cut off"), 3)[:-1])
    raw.close()
    receiver = Channel(end)
    receiver.send(encode(Cancel(), 1))
    receiver.flush()
    assert not receiver.open, "the write notices it"
    assert [frame.id for frame in receiver.receive()] == [1, 2]
    assert receiver.receive() == []
    sent = receiver.bytes_sent
    receiver.send(encode(Cancel(), 2))
    assert receiver.flush() and receiver.bytes_sent == sent
    receiver.close()


@pytest.mark.parametrize("arrived", [False, True])
def test_closing_releases_attached_sockets(ends: tuple[Channel, Channel], arrived: bool) -> None:
    """Before they were passed, and with a frame that has arrived in part."""
    kept, passed = socket_to_pass()
    if arrived:
        raw, end = pair()
        channel = Channel(end)
        socket.send_fds(raw, [encode(Attach(), 1)[:5]], [passed.fileno()])
        assert channel.receive() == []
        raw.close()
    else:
        channel = ends[0]
        channel.send(encode(Attach(), 1), attached=passed)
    passed.close()
    channel.close()
    assert kept.recv(1) == b""
    kept.close()
