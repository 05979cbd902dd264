"""ModelStreamInfer: requests on one call, each answered by one message in the order in which they came.

A request that is refused is answered with an error, and the call goes on; unless its caller asked for gRPC's own errors, of which the first
one ends it. When the service ends, what was read is answered, and then the call ends with UNAVAILABLE.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NamedTuple

from service.errors import ServiceError, Unavailable
from service.frontend.inference import CallerGone, Frontend, bug
from service.frontend.oip import protobuf_codec, types
from service.frontend.oip.grpc_calls import Context, Ending, accepted, answer, read, refuse
from service.frontend.oip.protobuf import METHODS, Message

IN_FLIGHT = 32
"""Requests of one call that are read before they are answered."""
LAST_WORD_SECONDS = 0.2
"""How long a call is still read when the service ends: what is on its way comes within this time."""
OWN_ERRORS = ("triton_grpc_error", "true")
"""Metadata of a caller who wants the call to end with the status of the first error."""
FINAL_WANTED, FINAL = "triton_enable_empty_final_response", "triton_final_response"
"""Parameters. Every response is the only one, and so the final one, of its request."""
RESPONSE = METHODS["ModelStreamInfer"].gives
Begin = Callable[[], Coroutine[Any, Any, Message]]


class _Answered(NamedTuple):
    """The message for a request, and the error in it, if there is one."""

    message: Message
    fault: ServiceError | None = None


class Stream:
    """One call. Requests of different sequences, and of none, run side by side."""

    def __init__(self, frontend: Frontend, ending: Ending, context: Context) -> None:
        self._frontend = frontend
        self._ending = ending
        self._context = context
        self._lanes: dict[str, _Lane] = {}
        self._room = asyncio.Semaphore(IN_FLIGHT)
        self._unanswered: asyncio.Queue[asyncio.Task[_Answered] | None] = asyncio.Queue()
        """Behind the last one comes None."""
        self._running: set[asyncio.Task[_Answered]] = set()

    async def run(self, requests: AsyncIterator[bytes]) -> None:
        """Until the caller has sent and heard all, or leaves, or the service ends."""
        reading = asyncio.ensure_future(self._read(requests))
        stopping = asyncio.ensure_future(self._stop(reading))
        try:
            await self._write()
            await asyncio.wait([reading])
            if reading.cancelled():
                await refuse(self._context, Unavailable("the service ends: go on with another call", retry_after=1))
            reading.result()
        finally:
            left = [reading, stopping, *self._running]
            for task in left:
                task.cancel()
            await asyncio.wait(left)

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        """Tasks begin in the order in which they are made, and so chunks leave for the engine in the order in which they came."""
        try:
            await self._room.acquire()
            async for data in requests:
                task = asyncio.ensure_future(self._answer(data, time.monotonic()))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
                self._unanswered.put_nowait(task)
                await self._room.acquire()
        finally:
            self._unanswered.put_nowait(None)

    async def _stop(self, reading: asyncio.Task[None]) -> None:
        await self._ending.begun.wait()
        await asyncio.sleep(LAST_WORD_SECONDS)
        reading.cancel()

    async def _write(self) -> None:
        while (task := await self._unanswered.get()) is not None:
            said = await task
            if said.fault is not None and OWN_ERRORS in self._context.invocation_metadata():
                await refuse(self._context, said.fault)
            await self._context.write(said.message.SerializeToString())
            self._room.release()

    async def _answer(self, data: bytes, arrived: float) -> _Answered:
        id = ""
        try:
            with accepted(self._frontend, self._ending, arrived) as call:
                message = read(METHODS["ModelInfer"], data, self._frontend)
                id = message.id
                asked = protobuf_codec.request(message)
                response = await self._in_order(asked, lambda: answer(self._frontend, call, asked, self._context))
        except CallerGone:
            raise asyncio.CancelledError from None
        except ServiceError as fault:
            return _refused(id, fault)
        except Exception as raised:
            return _refused(id, bug(self._frontend, raised))
        if asked.parameters.get(FINAL_WANTED):
            response.parameters[FINAL].bool_param = True
        return _Answered(RESPONSE(infer_response=response))

    async def _in_order(self, asked: types.InferRequest, begin: Begin) -> Message:
        """The answer to a request, begun when it is the turn of this chunk of its sequence."""
        said = asked.parameters
        sequence = str(said.get("sequence_id") or "")
        if not sequence:
            return await begin()
        lane = self._lanes.setdefault(sequence, _Lane())
        try:
            return await lane.run(begin, alone=bool(said.get("sequence_start") or said.get("sequence_end")))
        finally:
            if not lane.waited_for:
                self._lanes.pop(sequence, None)


class _Lane:
    """The chunks of one sequence, in the order in which they came.

    One that begins or ends the sequence is answered before another leaves for the engine, which would refuse what comes too early.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._begun: set[asyncio.Task[Message]] = set()
        self.waited_for = 0

    async def run(self, begin: Begin, *, alone: bool) -> Message:
        """alone: the chunk begins or ends the sequence."""
        self.waited_for += 1
        try:
            async with self._turn:
                if alone and self._begun:
                    await asyncio.wait(self._begun)
                task = asyncio.ensure_future(begin())
                self._begun.add(task)
                task.add_done_callback(self._begun.discard)
                if alone:
                    return await task
            return await task
        finally:
            self.waited_for -= 1


def _refused(id: str, fault: ServiceError) -> _Answered:
    return _Answered(RESPONSE(error_message=fault.message, infer_response={"id": id}), fault)
