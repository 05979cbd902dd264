"""Sends signals to sessions of a running service over WebSockets, as fast as it answers or in real time."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import numpy as np
from numpy.typing import NDArray
from websockets.asyncio.client import ClientConnection, connect

Rows = NDArray[np.float32]
Chunk = TypeVar("Chunk")


@asynccontextmanager
async def session(url: str, model: str) -> AsyncIterator[ClientConnection]:
    """Open a session of a model that ends with the block. url: of the service, as in http://127.0.0.1:8000"""
    address = urlsplit(url)._replace(scheme="wss" if url.startswith("https") else "ws", path="/stream").geturl()
    async with connect(f"{address}?model={quote(model)}", compression=None, proxy=None) as socket:
        yield socket


async def answer(socket: ClientConnection, rows: Rows) -> Any:
    """Send a chunk, and return the model's output. Raises RuntimeError with the error of a refused chunk."""
    await socket.send(rows.astype("<f4").tobytes())
    reply = json.loads(await socket.recv())
    if "outputs" not in reply:
        raise RuntimeError(f"{reply['code']}: {reply['error']}")
    return reply["outputs"][0]


async def outputs(url: str, model: str, chunks: Iterable[Rows]) -> list[Any]:
    """Return the outputs of the chunks of one session, each sent when the previous chunk is answered."""
    async with session(url, model) as socket:
        return [await answer(socket, chunk) for chunk in chunks]


@dataclass(frozen=True)
class Reply:
    """The output of a chunk. due, done: seconds from the start of the stream until the chunk was complete, and until its reply."""

    output: Any
    due: float
    done: float

    @property
    def seconds(self) -> float:
        """The time that the chunk took: its rows, its way to the service and back, and the model."""
        return self.done - self.due


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage: replies pile up, and a pause of this process would count as a latency of the service."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def in_real_time(
    url: str, model: str, chunks: Sequence[Chunk], chunk_seconds: float, rows: Callable[[Chunk], Rows], delay: float
) -> list[Reply]:
    """Return the replies of one session whose chunks are complete at regular times.

    rows: makes the model's input of a chunk, when the chunk is complete. delay: seconds until the stream starts. A chunk that is due before
    the reply to the previous chunk is sent right after this reply, and its time counts from the moment at which it was due.
    """
    replies = []
    async with session(url, model) as socket:
        start = time.monotonic() + delay
        for number, chunk in enumerate(chunks, 1):
            due = number * chunk_seconds
            await asyncio.sleep(max(0.0, start + due - time.monotonic()))
            if len(inputs := rows(chunk)):
                output = await answer(socket, inputs)
                replies.append(Reply(output, due, time.monotonic() - start))
    return replies
