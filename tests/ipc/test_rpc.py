"""Calls over a channel: replies match calls by id, timeouts and lost processes become errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from service.errors import EngineLost, Unavailable, UnknownModel
from service.ipc.async_channel import AsyncChannel
from service.ipc.channel import Channel, Frame, encode, pair
from service.ipc.messages.inference import Cancel
from service.ipc.messages.message import Done, Message, Refusal, Reply
from service.ipc.messages.sessions import EndSession, ExportSession, SessionFound
from service.ipc.rpc import Rpc

Exchange = Callable[[Rpc, "OtherProcess"], Awaitable[None]]
MIB = 1 << 20


class OtherProcess:
    """Records the frames that it receives, and replies on the test's command."""

    def __init__(self, channel: Channel) -> None:
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()
        self.channel = AsyncChannel(channel, self.frames.put_nowait, lambda: None)

    async def next_frame(self) -> Frame:
        return await asyncio.wait_for(self.frames.get(), 10)

    def reply(self, frame: Frame, reply: Reply, tail: bytes | memoryview = b"") -> None:
        self.channel.send(encode(reply, frame.id, (tail,)))


def with_other_process(test: Exchange) -> Callable[[], None]:
    """Return a test that runs in an event loop, with an Rpc and the process at its other end."""

    async def run() -> None:
        near, far = pair()
        other = OtherProcess(Channel(far))

        def handle_frame(frame: Frame) -> None:
            assert rpc.handle_reply(frame) or isinstance(frame.message, Done), "only a late reply is ignored"

        channel = AsyncChannel(Channel(near), handle_frame, lambda: rpc.close(EngineLost("the engine ended")))
        rpc = Rpc(channel.send, "the engine")
        try:
            await asyncio.wait_for(test(rpc, other), 20)
        finally:
            channel.close()
            other.channel.close()

    return lambda: asyncio.run(run())


def call(rpc: Rpc, message: Message, tail: bytes = b"", timeout: float | None = None) -> asyncio.Future[bytes | memoryview]:
    return asyncio.ensure_future(rpc.call_done(message, tail=tail, timeout=timeout))


@with_other_process
async def test_replies_in_another_order_reach_their_calls(rpc: Rpc, other: OtherProcess) -> None:
    found = asyncio.ensure_future(rpc.call(ExportSession("s"), SessionFound))
    other.reply(await other.next_frame(), SessionFound(None))
    assert await found == (SessionFound(None), b"")
    calls = [call(rpc, ExportSession(name)) for name in "abc"]
    frames = [await other.next_frame() for _ in calls]
    for frame in reversed(frames):
        assert isinstance(frame.message, ExportSession)
        other.reply(frame, Done(), frame.message.session.encode())
    assert await asyncio.gather(*calls) == [b"a", b"b", b"c"]


@with_other_process
async def test_refusal_raises_its_error(rpc: Rpc, other: OtherProcess) -> None:
    pending = call(rpc, EndSession("a"))
    other.reply(await other.next_frame(), Refusal.of(UnknownModel("no such model", field="model")))
    with pytest.raises(UnknownModel, match="no such model"):
        await pending


@with_other_process
async def test_late_or_cancelled_call_tells_the_other_process(rpc: Rpc, other: OtherProcess) -> None:
    late = call(rpc, EndSession("a"), timeout=0.05)
    frame = await other.next_frame()
    with pytest.raises(Unavailable, match=r"EndSession within 0.05 s"):
        await late
    cancel = await other.next_frame()
    assert (cancel.message, cancel.id) == (Cancel(), frame.id)
    other.reply(frame, Done())
    cancelled = call(rpc, EndSession("a"))
    frame = await other.next_frame()
    cancelled.cancel()
    cancel = await other.next_frame()
    assert (cancel.message, cancel.id) == (Cancel(), frame.id) and rpc.pending_bytes == 0
    following = call(rpc, EndSession("b"))
    other.reply(await other.next_frame(), Done(), b"in time")
    assert await following == b"in time"


@with_other_process
async def test_end_of_the_other_process_fails_calls(rpc: Rpc, other: OtherProcess) -> None:
    pending = call(rpc, EndSession("a"))
    await other.next_frame()
    other.channel.close()
    for future in (pending, call(rpc, EndSession("b"))):
        with pytest.raises(EngineLost):
            await future


@with_other_process
async def test_large_call_leaves_while_the_loop_goes_on(rpc: Rpc, other: OtherProcess) -> None:
    """A frame that exceeds the socket's buffer leaves in pieces, without blocking the loop."""

    pending = call(rpc, EndSession("a"), bytes(15 * MIB))
    frame = await other.next_frame()
    assert rpc.pending_bytes > 15 * MIB
    assert len(frame.tail) == 15 * MIB
    other.reply(frame, Done(), frame.tail)
    assert len(await pending) == 15 * MIB
