"""Blocks of requests: how the requests of one tick of an event loop share a frame, and how their answers are separated again."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from math import prod
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from service.ipc.channel import MAX_COPIED_BYTES, Frame, encode
from service.ipc.messages.inference import FEATURES, IDS, NO_TENANT, Answer, AnswerBlock, Request, RequestBlock, Returns, Share
from service.ipc.messages.models import ModelKey

MOST_JOINED_BYTES = 4096
"""Blocks with more bytes are not joined: a joined block is kept until the last of its requests runs."""
ITEM_BYTES = 4
"""Size of each value in the arrays of an answer."""
ID, DEADLINE, COUNT = np.dtype("<u8"), np.dtype("<f8"), np.dtype("<i4")
"""Values in the columns of a block: ids, deadlines, and counts of sequences and steps."""
ID_BYTES, DEADLINE_BYTES, COUNT_BYTES = ID.itemsize, DEADLINE.itemsize, COUNT.itemsize
ANSWER_ARRAYS = {"scores": FEATURES, "picks": IDS, "embedding": FEATURES, "sequence": FEATURES, "state": FEATURES}
"""The arrays of an answer in their order, and their dtypes."""
Buffer = bytes | memoryview


class Columns(NamedTuple):
    """The requests of a block: see `RequestBlock` in `messages/inference.py`."""

    ids: Buffer
    deadlines: Buffer
    counts: Buffer
    lengths: Buffer
    values: Buffer
    states: Buffer = b""

    @classmethod
    def read(cls, data: Buffer, requests: int, sequences: int) -> Columns:
        """Return the columns, which lie end to end."""
        view = memoryview(data)
        deadlines = ID_BYTES * requests
        counts = deadlines + DEADLINE_BYTES * requests
        lengths = counts + COUNT_BYTES * requests
        values = lengths + COUNT_BYTES * sequences
        return cls(view[:deadlines], view[deadlines:counts], view[counts:lengths], view[lengths:values], view[values:])


class BlockKey(msgspec.Struct, frozen=True):
    """The values that the requests of a block share."""

    model: ModelKey
    priority: int
    returns: Returns
    share: Share = NO_TENANT


class QueuedRequest(Protocol):
    """A request that leaves in the next block. data: the values of its steps."""

    id: int
    request: Request
    data: Buffer


def encode_block(key: BlockKey, queued: Sequence[QueuedRequest], *, timed: bool = False) -> tuple[bytes, Buffer]:
    """Return the frame of a block, and the bytes that follow it without a copy: the values of a large request, which is alone.

    timed: whether the answers tell how their batches ran.
    """
    requests = [pending.request for pending in queued]
    lengths = array("i", [steps for request in requests for steps in request.lengths])
    deadlines = array("d", [request.deadline for request in requests])
    columns = (
        array("Q", [pending.id for pending in queued]),
        deadlines,
        array("i", [len(request.lengths) for request in requests]),
        lengths,
    )
    block = RequestBlock(
        *key.model,
        requests=len(requests),
        sequences=len(lengths),
        steps=sum(lengths),
        shortest=min(lengths),
        longest=max(lengths),
        deadline=min(deadlines),
        sent=sum([request.sent for request in requests]) / len(requests),
        priority=key.priority,
        returns=key.returns,
        share=key.share,
        timed=timed,
    )
    if len(queued) == 1 and len(queued[0].data) > MAX_COPIED_BYTES:
        return encode(block, tail=columns, following=len(queued[0].data)), queued[0].data
    return encode(block, tail=(*columns, *[pending.data for pending in queued])), b""


def join_blocks(frames: Sequence[Frame], most: int) -> Iterator[Frame]:
    """Yield frames, and one frame for blocks that follow each other and could have been one: each block costs the engine as much.

    most: blocks are joined as long as they have fewer requests together.
    """
    alike, requests = list[tuple[RequestBlock, Frame]](), 0
    for frame in frames:
        block = frame.message
        if not isinstance(block, RequestBlock) or block.timed or len(frame.tail) > MOST_JOINED_BYTES:
            yield from _joined(alike)
            yield frame
            alike, requests = [], 0
            continue
        if requests >= most or (alike and not _are_alike(alike[0][0], block)):
            yield from _joined(alike)
            alike, requests = [], 0
        alike.append((block, frame))
        requests += block.requests
    yield from _joined(alike)


def _are_alike(first: RequestBlock, second: RequestBlock) -> bool:
    """Return whether blocks share what the requests of a block share."""
    return (
        first.model == second.model
        and first.version == second.version
        and first.generation == second.generation
        and first.priority == second.priority
        and first.returns == second.returns
        and first.share == second.share
    )


def _joined(alike: Sequence[tuple[RequestBlock, Frame]]) -> list[Frame]:
    """Return one frame for all blocks, none without a block."""
    if len(alike) < 2:
        return [frame for _, frame in alike]
    first, columns = alike[0][0], list[Columns]()
    requests = sequences = steps = 0
    shortest, longest, deadline, sent = first.shortest, first.longest, first.deadline, 0.0
    for block, frame in alike:
        columns.append(Columns.read(frame.tail, block.requests, block.sequences))
        requests += block.requests
        sequences += block.sequences
        steps += block.steps
        shortest = block.shortest if block.shortest < shortest else shortest  # cheaper than `min`
        longest = block.longest if block.longest > longest else longest
        deadline = block.deadline if block.deadline < deadline else deadline
        sent += block.requests * block.sent
    joined = msgspec.structs.replace(
        first,
        requests=requests,
        sequences=sequences,
        steps=steps,
        shortest=shortest,
        longest=longest,
        deadline=deadline,
        sent=sent / requests,
    )
    return [Frame(joined, 0, b"".join(chain.from_iterable(zip(*columns, strict=True))))]


def split_answers(block: AnswerBlock, data: Buffer) -> Iterator[tuple[int, Answer, Buffer]]:
    """Yield the id of each request, its answer and the bytes of its arrays."""
    head = struct.Struct(f"<{block.requests}Q{block.requests}i{block.sequences}i")
    values = head.unpack_from(data)
    ids, counts = values[: block.requests], values[block.requests : 2 * block.requests]
    steps = values[2 * block.requests :]
    sequence_ends = list(accumulate(counts, initial=0))
    step_ends = list(accumulate(steps, initial=0))
    arrays = list(_arrays(block, head.size))
    single = len(arrays) == 1
    times: dict[str, Any] = {"queued": block.queued, "runs": block.runs} if block.runs else {}
    for index, (id, count) in enumerate(zip(ids, counts, strict=True)):
        first, end = sequence_ends[index], sequence_ends[index + 1]
        lines = count, step_ends[end] - step_ends[first]
        begins = first, step_ends[first]
        shapes, parts = {}, []
        for field in arrays:
            number = lines[field.per_step]
            begin = field.begin + begins[field.per_step] * field.line_bytes
            shapes[field.name] = number, *field.line
            parts.append(data[begin : begin + number * field.line_bytes])
        answer = Answer(**shapes, steps=list(steps[first:end]), ready=block.ready, **times)  # type: ignore[arg-type]
        yield id, answer, parts[0] if single else b"".join(parts)


class _Field(NamedTuple):
    """An array of a block's answers. line: the shape of one line; line_bytes: its size; begin: where the array begins."""

    name: str
    per_step: bool
    line: tuple[int, ...]
    line_bytes: int
    begin: int


def _arrays(block: AnswerBlock, begin: int) -> Iterator[_Field]:
    shapes = {"scores": block.scores, "picks": block.picks, "embedding": block.embedding, "sequence": block.sequence}
    for name, shape in shapes.items():
        if shape:
            per_step = name == "sequence" or (block.per_step and name != "embedding")
            yield _Field(name, per_step, shape[1:], ITEM_BYTES * prod(shape[1:]), begin)
            begin += ITEM_BYTES * prod(shape)


def answer_arrays(answer: Answer, data: Buffer) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the name and the value of each array that an answer has. data: their bytes."""
    start = 0
    for name, dtype in ANSWER_ARRAYS.items():
        shape: tuple[int, ...] = getattr(answer, name)
        if shape:
            array = np.frombuffer(data, dtype, prod(shape), start).reshape(shape)
            start += array.nbytes
            yield name, array
