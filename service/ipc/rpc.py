"""Calls over a channel: a message out, its reply in, with a timeout. Replies match calls by the frame's id."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, Generic, TypeVar

from service.errors import ServiceError, Unavailable
from service.ipc.channel import Frame, encode
from service.ipc.messages.inference import Cancel
from service.ipc.messages.message import Done, Message, Refusal, Reply

T = TypeVar("T")
R = TypeVar("R", bound=Reply)
MAX_LOOP_BYTES = 4 << 20
"""The frames of larger calls are joined in a thread: Python copies large pieces without the interpreter lock."""


class Rpc:
    """The calls of this process on one channel. Every reply on the channel goes to `handle_reply`, its end to `close`."""

    def __init__(self, send: Callable[[bytes], None], other_end: str, ids: Callable[[], int] | None = None) -> None:
        """send: writes an encoded frame to the channel; other_end: its name in error messages; ids: a source of unused frame ids."""
        self._send = send
        self._other_end = other_end
        self._next_id = ids or count(1).__next__
        self._pending: dict[int, asyncio.Future[Frame]] = {}
        self._closed: ServiceError | None = None
        self.pending_bytes = 0

    async def call(
        self, message: Message, reply: type[R], *, tail: bytes | memoryview = b"", timeout: float | None = None
    ) -> tuple[R, bytes | memoryview]:
        """Send a call and return its reply with the trailing bytes.

        Raises the error of a Refusal, Unavailable after `timeout` seconds, and the error passed to `close` when the other process ends.
        The other process receives a Cancel when nothing waits for the reply any more.
        """
        id, future = self._next_id(), asyncio.get_running_loop().create_future()
        if len(tail) <= MAX_LOOP_BYTES:
            frame = encode(message, id, (tail,))
        else:
            frame = await asyncio.to_thread(encode, message, id, (tail,))
        if self._closed is not None:
            raise self._closed
        self._pending[id] = future
        self.pending_bytes += len(frame)
        self._send(frame)
        try:
            async with asyncio.timeout(timeout):
                received: Frame = await future
        except TimeoutError:
            self._send(encode(Cancel(), id))
            raise Unavailable(
                f"{self._other_end} did not reply to {type(message).__name__} within {timeout:g} s: retry", retry_after=1
            ) from None
        except asyncio.CancelledError:
            self._send(encode(Cancel(), id))
            raise
        finally:
            self.pending_bytes -= len(frame)
            del self._pending[id]
        if isinstance(received.message, Refusal):
            raise received.message.error
        assert isinstance(received.message, reply), f"{type(message).__name__} was answered with {received.message}"
        return received.message, received.tail

    async def call_done(
        self, message: Message, *, tail: bytes | memoryview = b"", timeout: float | None = None
    ) -> bytes | memoryview:
        """Send a call that expects Done as its reply; return the trailing bytes. Raises as `call` does."""
        return (await self.call(message, Done, tail=tail, timeout=timeout))[1]

    def handle_reply(self, frame: Frame) -> bool:
        """Resolve the call that a frame replies to; false when no such call waits."""
        future = self._pending.get(frame.id)
        if future is None or not isinstance(frame.message, Reply):
            return False
        if not future.done():
            future.set_result(frame)
        return True

    def close(self, error: ServiceError) -> None:
        """Fail all calls, now and later: the other process has ended."""
        self._closed = error
        for future in self._pending.values():
            if not future.done():
                future.set_exception(error)


class SharedCall(Generic[T]):
    """A call that runs once at a time. All callers that wait for it to end share the next one, which begins after their calls."""

    def __init__(self, call: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._call = call
        self._running: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None

    async def result(self) -> T:
        """Return the result. A caller that is cancelled does not end the call of the others."""
        if self._next is None:
            self._next = asyncio.create_task(self._run(self._running))
            # All callers may have been cancelled: nothing else would look at its error.
            self._next.add_done_callback(lambda call: call.cancelled() or call.exception())
        return await asyncio.shield(self._next)

    async def _run(self, before: asyncio.Task[T] | None) -> T:
        if before is not None:
            await asyncio.wait([before])
        self._running, self._next = self._next, None
        return await self._call()
