"""Blocks of requests: how the requests of one tick of an event loop share a frame, and how their answers are separated again."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise, repeat
from math import inf, prod
from typing import Any, Protocol, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from service.ipc.channel import MAX_COPIED_BYTES, Frame, encode
from service.ipc.messages.inference import (
    FEATURES,
    IDS,
    Answer,
    AnswerBlock,
    BlockKey,
    Request,
    RequestBlock,
    Returns,
    SessionOptions,
    Share,
)
from service.ipc.messages.models import ModelKey

MOST_JOINED_BYTES = 4096
"""Blocks with more bytes are not joined: a joined block is kept until the last of its requests runs."""
MOST_COPIED_BYTES = 4096
"""The columns of more bytes are views: of fewer, copies are faster."""
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


class Columns(msgspec.Struct, frozen=True):
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
        view = data if len(data) <= MOST_COPIED_BYTES else memoryview(data)
        deadlines = ID_BYTES * requests
        counts = deadlines + DEADLINE_BYTES * requests
        lengths = counts + COUNT_BYTES * requests
        values = lengths + COUNT_BYTES * sequences
        states = len(view) - state_bytes
        before = view[:deadlines], view[deadlines:counts], view[counts:lengths], view[lengths:values]
        return cls(*before, view[values:states], view[states:])


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


@lru_cache(MAX_KEYS)
def packed_key(key: BlockKey) -> bytes:
    """Return a key as a block carries it: engines compare these bytes, and decode most of them only once."""
    return msgspec.msgpack.encode(key)


@lru_cache(MAX_KEYS)
def key_of(packed: bytes) -> BlockKey:
    """Return what `packed_key` has encoded."""
    return msgspec.msgpack.decode(packed, type=BlockKey)


class QueuedRequest(Protocol):
    """A request that leaves in the next block. data: the values of its steps, and the states that it brings."""

    id: int
    request: Request
    data: Buffer


def encode_block(key: BlockKey, queued: Sequence[QueuedRequest], *, timed: bool = False) -> tuple[bytes, Buffer]:
    """Return the frame of a block, and the bytes that follow it without a copy: the values of a large request, which is alone.

    timed: whether the answers tell how their batches ran.
    """
    requests, count = [pending.request for pending in queued], len(queued)
    lengths = requests[0].lengths if count == 1 else [steps for request in requests for steps in request.lengths]
    deadlines = [request.deadline for request in requests]
    of_each = *[pending.id for pending in queued], *deadlines, *[len(request.lengths) for request in requests]
    columns = _columns(count, len(lengths)).pack(*of_each, *lengths)
    sessions, at = list[str](), list[int]()
    if key.options is not None:
        sessions = [request.session for request in requests if request.session is not None]
        at = _known([-1 if request.session_at is None else request.session_at for request in requests])
    totals = sum(lengths), min(lengths), max(lengths), min(deadlines), sum([request.sent for request in requests]) / count
    state_bytes = sum([request.state_bytes for request in requests]) if key.initial else 0
    # By place: keywords would cost five times as much.
    block = RequestBlock(*(packed_key(key), count, len(lengths), *totals, timed, sessions, at, state_bytes))
    values = [pending.data for pending in queued]
    if count == 1 and len(values[0]) > MAX_COPIED_BYTES:
        return encode(block, tail=(columns,), following=len(values[0])), values[0]
    if key.initial:
        ends = [len(pending.data) - pending.request.state_bytes for pending in queued]
        parts = [(data[:end], data[end:]) for data, end in zip(values, ends, strict=True)]
        values = list(chain.from_iterable(zip(*parts, strict=True)))
    return encode(block, tail=(columns, *values)), b""


@lru_cache
def _columns(requests: int, sequences: int) -> struct.Struct:
    """Return the format of the columns before the values."""
    return struct.Struct(f"<{requests}Q{requests}d{requests}i{sequences}i")


def _known(at: list[int]) -> list[int]:
    """Return the steps of sessions according to the clients, nothing if no client says them."""
    return at if at and max(at) >= 0 else []


def join_blocks(frames: Sequence[Frame], most: int) -> list[Frame]:
    """Return frames, with one frame for blocks that follow each other and could have been one: each block costs the engine as much.

    most: sequences of a joined block.
    """
    joined, alike, sequences, key = list[Frame](), list[Frame](), 0, b""
    for frame in frames:
        block = frame.message
        small = len(frame.tail) <= MOST_JOINED_BYTES
        if small and isinstance(block, RequestBlock) and not (block.timed or block.state_bytes):
            if block.key != key or sequences + block.sequences > most:
                joined += _joined(alike)
                alike, sequences, key = [], 0, block.key
            alike.append(frame)
            sequences += block.sequences
        else:
            joined += _joined(alike)
            joined.append(frame)
            alike, sequences = [], 0
    return joined + _joined(alike)


def _joined(alike: list[Frame]) -> list[Frame]:
    """Return one frame for all blocks, none without a block."""
    if len(alike) < 2:
        return alike
    columns, sessions, at = list[Columns](), list[str](), list[int]()
    requests = sequences = steps = longest = 0
    shortest, deadline, sent = cast(RequestBlock, alike[0].message).shortest, inf, 0.0
    for frame in alike:
        block = cast(RequestBlock, frame.message)
        columns.append(Columns.read(frame.tail, block.requests, block.sequences))
        requests += block.requests
        sequences += block.sequences
        steps += block.steps
        shortest = block.shortest if block.shortest < shortest else shortest  # cheaper than `min`
        longest = block.longest if block.longest > longest else longest
        deadline = block.deadline if block.deadline < deadline else deadline
        sent += block.requests * block.sent
        sessions += block.sessions
        at += block.at or [-1] * block.requests
    totals = requests, sequences, steps, shortest, longest, deadline, sent / requests
    tail = [
        *[each.ids for each in columns],
        *[each.deadlines for each in columns],
        *[each.counts for each in columns],
        *[each.lengths for each in columns],
        *[each.values for each in columns],
    ]
    return [Frame(RequestBlock(block.key, *totals, sessions=sessions, at=_known(at)), 0, b"".join(tail))]


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
