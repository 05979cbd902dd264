"""Blocks of requests: how the requests of one tick of an event loop share a frame, and how their answers are separated again."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise, repeat
from math import prod
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from service.ipc.channel import MAX_COPIED_BYTES, Frame, encode
from service.ipc.messages.inference import (
    ANY_SESSION,
    FEATURES,
    IDS,
    NO_TENANT,
    Answer,
    AnswerBlock,
    Request,
    RequestBlock,
    Returns,
    SessionOptions,
    Share,
)
from service.ipc.messages.models import ModelKey

MOST_JOINED_BYTES = 4096
"""Blocks with more bytes are not joined: a joined block is kept until the last of its requests runs."""
MAX_KEYS = 4096
"""Keys of blocks that are kept."""
ITEM_BYTES = 4
"""Size of each value in the arrays of an answer."""
ID, DEADLINE, COUNT = np.dtype("<u8"), np.dtype("<f8"), np.dtype("<i4")
"""Values in the columns of a block: ids, deadlines, and counts of sequences and steps."""
ID_BYTES, DEADLINE_BYTES, COUNT_BYTES = ID.itemsize, DEADLINE.itemsize, COUNT.itemsize
ANSWER_ARRAYS = {"scores": FEATURES, "picks": IDS, "embedding": FEATURES, "sequence": FEATURES, "state": FEATURES}
"""The arrays of an answer in their order, and their dtypes."""
Buffer = bytes | memoryview
NO_SHAPE: Iterable[tuple[int, ...]] = repeat(())


class Columns(NamedTuple):
    """The requests of a block: see `RequestBlock` in `messages/inference.py`."""

    ids: Buffer
    deadlines: Buffer
    counts: Buffer
    lengths: Buffer
    values: Buffer
    states: Buffer = b""

    @classmethod
    def read(cls, data: Buffer, requests: int, sequences: int, state_bytes: int = 0) -> Columns:
        """Return the columns, which lie end to end."""
        view = memoryview(data)
        deadlines = ID_BYTES * requests
        counts = deadlines + DEADLINE_BYTES * requests
        lengths = counts + COUNT_BYTES * requests
        values = lengths + COUNT_BYTES * sequences
        states = len(view) - state_bytes
        return cls(
            *(view[:deadlines], view[deadlines:counts], view[counts:lengths], view[lengths:values]),
            *(view[values:states], view[states:]),
        )


class BlockKey(msgspec.Struct, frozen=True, cache_hash=True):
    """The values that the requests of a block share. options: None without sessions. initial: whether they bring states."""

    model: ModelKey
    priority: int
    returns: Returns
    share: Share = NO_TENANT
    options: SessionOptions | None = None
    initial: bool = False


def block_key(request: Request) -> BlockKey:
    """Return what a request shares with the others of its block: one object for all of them, which is found faster."""
    options = None
    if request.session is not None:
        starts, ends, opens = request.session_starts, request.session_ends, request.opens_session
        options = starts, ends, request.exactly, opens, request.session_limit, request.resubmitted
    model = request.model, request.version, request.generation
    return _interned(model, request.priority, request.returns, request.share, options, request.state_bytes > 0)


@lru_cache(MAX_KEYS)
def _interned(
    model: tuple[str, str, int], priority: int, returns: Returns, share: Share, options: tuple[Any, ...] | None, initial: bool
) -> BlockKey:
    return BlockKey(ModelKey(*model), priority, returns, share, None if options is None else SessionOptions(*options), initial)


class QueuedRequest(Protocol):
    """A request that leaves in the next block. data: the values of its steps, and the states that it brings."""

    id: int
    request: Request
    data: Buffer


def encode_block(key: BlockKey, queued: Sequence[QueuedRequest], *, timed: bool = False) -> tuple[bytes, Buffer]:
    """Return the frame of a block, and the bytes that follow it without a copy: the values of a large request, which is alone.

    timed: whether the answers tell how their batches ran.
    """
    requests = [pending.request for pending in queued]
    lengths = [steps for request in requests for steps in request.lengths]
    deadlines = [request.deadline for request in requests]
    columns = (
        array("Q", [pending.id for pending in queued]),
        array("d", deadlines),
        array("i", [len(request.lengths) for request in requests]),
        array("i", lengths),
    )
    sessions = [request.session for request in requests if request.session is not None]
    at = [-1 if request.session_at is None else request.session_at for request in requests] if sessions else []
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
        options=key.options or ANY_SESSION,
        initial=key.initial,
        sessions=sessions,
        at=_known(at),
        state_bytes=sum([request.state_bytes for request in requests]) if key.initial else 0,
    )
    values = [pending.data for pending in queued]
    if len(values) == 1 and len(values[0]) > MAX_COPIED_BYTES:
        return encode(block, tail=columns, following=len(values[0])), values[0]
    if key.initial:
        ends = [len(pending.data) - pending.request.state_bytes for pending in queued]
        values = [data[:end] for data, end in zip(values, ends, strict=True)] + [
            data[end:] for data, end in zip(values, ends, strict=True)
        ]
    return encode(block, tail=(*columns, *values)), b""


def _known(at: list[int]) -> list[int]:
    """Return the steps of sessions according to the clients, nothing if no client says them."""
    return at if at and max(at) >= 0 else []


def join_blocks(frames: Sequence[Frame], most: int) -> Iterator[Frame]:
    """Yield frames, and one frame for blocks that follow each other and could have been one: each block costs the engine as much.

    most: blocks are joined as long as they have fewer requests together.
    """
    alike, requests = list[tuple[RequestBlock, Frame]](), 0
    for frame in frames:
        block = frame.message
        if not isinstance(block, RequestBlock) or block.timed or block.initial or len(frame.tail) > MOST_JOINED_BYTES:
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
        and first.options == second.options
        and bool(first.sessions) is bool(second.sessions)
    )


def _joined(alike: Sequence[tuple[RequestBlock, Frame]]) -> list[Frame]:
    """Return one frame for all blocks, none without a block."""
    if len(alike) < 2:
        return [frame for _, frame in alike]
    first, columns, at = alike[0][0], list[Columns](), list[int]()
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
        at += block.at or [-1] * block.requests
    joined = msgspec.structs.replace(
        first,
        requests=requests,
        sequences=sequences,
        steps=steps,
        shortest=shortest,
        longest=longest,
        deadline=deadline,
        sent=sent / requests,
        sessions=[session for block, _ in alike for session in block.sessions],
        at=_known(at),
    )
    return [Frame(joined, 0, b"".join(chain.from_iterable(zip(*columns, strict=True))))]


def split_answers(block: AnswerBlock, data: Buffer) -> Iterable[tuple[int, Answer, Buffer]]:
    """Return the id of each request, its answer and the bytes of its arrays."""
    requests, sequences = block.requests, block.sequences
    if requests == 1:  # its arrays are those of the block
        head = f"<Qi{sequences}i{'q' * block.sessions}"
        id, _, *steps_and_more = struct.unpack_from(head, data)
        session_steps = steps_and_more.pop() if block.sessions else 0
        arrays_of, others = (
            (block.scores, block.picks, block.embedding, block.sequence),
            (block.state, block.queued, block.runs),
        )
        answer = Answer(*arrays_of, steps_and_more, session_steps, block.ready, block.finite, *others)
        return [(id, answer, data[struct.calcsize(head) :])]
    head = f"<{requests}Q{requests}i{sequences}i{requests if block.sessions else 0}q"
    columns = struct.unpack_from(head, data)
    counts, steps = columns[requests : 2 * requests], columns[2 * requests : 2 * requests + sequences]
    if sequences == requests:
        steps_of, steps_in = [[number] for number in steps], steps
    else:
        steps_of = [list(steps[first:end]) for first, end in pairwise(accumulate(counts, initial=0))]
        steps_in = tuple([sum(own) for own in steps_of])
    begin, shapes, parts = struct.calcsize(head), list[Iterable[tuple[int, ...]]](), list[list[Buffer]]()
    whole = block.scores, block.picks, block.embedding, block.sequence, block.state
    for shape, per_step in zip(whole, (block.per_step, block.per_step, False, True, False), strict=True):
        if not shape:
            shapes.append(NO_SHAPE)
            continue
        lines, line = steps_in if per_step else counts, shape[1:]
        line_bytes = ITEM_BYTES * prod(line)
        end = begin + shape[0] * line_bytes
        if sequences == requests and line_bytes and not per_step:  # one line each, in half the time
            shapes.append(repeat((1, *line)))
            parts.append([data[at : at + line_bytes] for at in range(begin, end, line_bytes)])
        else:
            ends = accumulate([number * line_bytes for number in lines], initial=begin)
            shapes.append([(number, *line) for number in lines])
            parts.append([data[first:last] for first, last in pairwise(ends)])
        begin = end
    scores, picks, embedding, sequence, state = shapes
    session_steps = columns[2 * requests + sequences :] if block.sessions else repeat(0)
    alike = repeat(block.ready), repeat(block.finite), state, repeat(block.queued), repeat(block.runs)
    answers = map(Answer, scores, picks, embedding, sequence, steps_of, session_steps, *alike)
    arrays: Iterable[Buffer] = parts[0] if len(parts) == 1 else map(b"".join, zip(*parts or [[b""] * requests], strict=True))
    return zip(columns[:requests], answers, arrays, strict=True)


def answer_arrays(answer: Answer, data: Buffer) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the name and the value of each array that an answer has. data: their bytes."""
    start = 0
    for name, dtype in ANSWER_ARRAYS.items():
        shape: tuple[int, ...] = getattr(answer, name)
        if shape:
            array = np.frombuffer(data, dtype, prod(shape), start).reshape(shape)
            start += array.nbytes
            yield name, array
