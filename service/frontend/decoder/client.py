"""A frontend's end of its decoder: starts the process, sends it one large body at a time, and stops it when it is idle.

The decoder returns bytes, not Python objects: the options of the request, and its inputs as the engine takes them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import TypeVar

from service.errors import Unavailable
from service.frontend.decoder.turns import Turns
from service.frontend.guards.body_budget import BodyBudget
from service.frontend.guards.memory_guard import MemoryGuard
from service.frontend.guards.start_queue import LongWaits
from service.frontend.run.catalog import ServedModel
from service.frontend.run.validation import PackedInputs
from service.ipc.async_channel import AsyncChannel
from service.ipc.channel import Channel, Frame, encode, pair
from service.ipc.messages.decoder import BodyDecoded, DecodeBody, DefineModel, InputsPacked, PackInputs
from service.ipc.messages.inference import Cancel
from service.ipc.messages.message import Message, Reply
from service.ipc.messages.models import ModelKey
from service.ipc.process_config import ProcessConfig
from service.ipc.rpc import Rpc
from service.log import Log
from service.settings import Settings

R = TypeVar("R", bound=Reply)
MAX_LOOP_BODY_BYTES = 1 << 16
"""Larger bodies of JSON, or of protobuf without raw tensors, are decoded by the decoder."""
MAX_PAIRED_BODY_BYTES = 1 << 20
"""The decoder has two bodies of at most this size, so that it has work while the event loop handles what it returned. A larger body is
alone: its objects take much memory."""
PLACES = 2
PARSED_FACTOR = 45
"""The objects of a parsed body take at most this many times its memory."""
START_BYTES = 70 << 20
"""What the process takes from its start."""
CALL_SECONDS = 60.0
"""Longest time that the decoder may take for a body."""
ENVIRONMENT = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(128 << 10))
"""glibc returns the memory of a large body as soon as it is free. The frontend keeps its own."""
LONG_WAIT_SHARE = 0.5
"""A wait for the decoder is long after this share of the default deadline. A large body may take a second itself."""
IDLE_SECONDS = 60.0
"""The decoder ends when it had no work for this time, and its memory is free again."""


class BodyDecoder:
    """Decodes large bodies in a separate process, which starts with the first large body."""

    def __init__(self, settings: Settings, bodies: BodyBudget, memory: MemoryGuard, log: Log) -> None:
        self._settings = settings
        self._bodies = bodies
        self._memory = memory
        self._log = log
        self._turns = Turns(LongWaits(LONG_WAIT_SHARE * settings.default_deadline_ms / 1000), PLACES)
        """A body has its turn until its inputs are packed: the objects of a parsed body take many times its memory."""
        self._process: _DecoderProcess | None = None
        self._users = 0
        self._idle: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def decode(self, call: DecodeBody, data: bytes) -> AsyncIterator[DecodedBody]:
        """Parse a body. Within the context its inputs can be packed.

        Raises the ServiceError of a body that is not valid, and Unavailable if the process ends.
        """
        with self._bodies.hold(len(data)), self._in_use():
            places = 1 if len(data) <= MAX_PAIRED_BODY_BYTES else PLACES
            await self._turns.take(places)
            with ExitStack() as objects:
                objects.callback(self._turns.end, places)
                objects.callback(self._memory.reserve(len(data) * PARSED_FACTOR + (0 if self._runs else START_BYTES)))
                process = self._running()
                reply, options = await process.call(call, BodyDecoded, data)
                try:
                    yield DecodedBody(process, reply.body, bytes(options), objects)
                finally:
                    process.drop(reply.body)

    def close(self) -> None:
        """End the process."""
        if self._idle is not None:
            self._idle.cancel()
        if self._process is not None:
            self._process.close()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        self._users += 1
        if self._idle is not None:
            self._idle.cancel()
        try:
            yield
        finally:
            self._users -= 1
            if self._users == 0:
                self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, self.close)

    @property
    def _runs(self) -> bool:
        return self._process is not None and self._process.open

    def _running(self) -> _DecoderProcess:
        """Return the running process. Starts a process if there is none, or if the last process has ended."""
        if self._process is None or not self._process.open:
            self._process = _DecoderProcess(self._settings, self._log)
        return self._process


class DecodedBody:
    """One large body. `options` has everything but its inputs, which stay with the decoder until they are packed."""

    def __init__(self, process: _DecoderProcess, id: int, options: bytes, objects: ExitStack) -> None:
        """objects: gives back the turn of the body and the memory of its objects, which are gone when its inputs are packed."""
        self.options = options
        self._process = process
        self._id = id
        self._objects = objects

    async def pack(self, model: ServedModel) -> PackedInputs:
        """Return the inputs as the engine takes them; raises the ServiceError of inputs that are not valid for a model."""
        self._process.define(model)
        reply, data = await self._process.call(PackInputs(self._id, model.key), InputsPacked)
        self._objects.close()
        return PackedInputs(reply.lengths, data, reply.state_bytes)


class _DecoderProcess:
    """A running decoder."""

    def __init__(self, settings: Settings, log: Log) -> None:
        """Raises Unavailable if the system lacks the resources."""
        near, far = pair()
        config = ProcessConfig(parent=os.getpid(), settings=settings.model_dump_json(), control=far.fileno())
        try:
            with far:
                self._process = config.spawn("service.frontend.decoder", **ENVIRONMENT)
        except OSError as error:
            near.close()
            log.error("decoder not started", error=str(error))
            raise Unavailable("no process could be started to decode a large body: retry later", retry_after=1) from error
        self._log = log
        self._models: set[ModelKey] = set()
        self._channel = AsyncChannel(Channel(near), self._handle_frame, self._handle_end)
        self._rpc = Rpc(self._channel.send, "the decoder")
        log.info("decoder started", pid=self._process.pid)

    @property
    def open(self) -> bool:
        return self._channel.open

    async def call(self, message: Message, reply: type[R], data: bytes = b"") -> tuple[R, bytes | memoryview]:
        """Call the decoder. Raises its ServiceError, and Unavailable when it ends or takes too long, which ends it."""
        try:
            return await self._rpc.call(message, reply, tail=data, timeout=CALL_SECONDS)
        except Unavailable:
            self.close()
            raise

    def define(self, model: ServedModel) -> None:
        """Make sure that the decoder knows a model."""
        if model.key not in self._models:
            self._models.add(model.key)
            tokenizer = b"" if model.tokenizer is None else model.tokenizer.definition
            message = DefineModel(model.version, model.generation, model.spec.model_dump_json())
            self._channel.send(encode(message, 0, (tokenizer,)))

    def drop(self, body: int) -> None:
        """Let the decoder forget the inputs of a body."""
        self._channel.send_message(Cancel(), body)

    def close(self) -> None:
        """End the process; its calls fail."""
        if self.open:
            self._channel.close()
            self._release()

    def _handle_frame(self, frame: Frame) -> None:
        self._rpc.handle_reply(frame)

    def _handle_end(self) -> None:
        self._log.error("decoder ended", pid=self._process.pid)
        self._release()

    def _release(self) -> None:
        self._rpc.close(
            Unavailable("the process that decodes large bodies has ended: retry, or send a smaller body", retry_after=1)
        )
        self._process.kill()
        asyncio.get_running_loop().run_in_executor(None, self._process.wait)
