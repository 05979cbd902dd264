"""The requests of one tick share a frame, and their answers are separated again."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from service.ipc.blocks import (
    ANSWER_ARRAYS,
    COUNT,
    MOST_JOINED_BYTES,
    BlockKey,
    Columns,
    encode_block,
    join_blocks,
    split_answers,
)
from service.ipc.channel import MAX_COPIED_BYTES, Channel, Frame, decode, encode, pair
from service.ipc.messages.inference import (
    ANY_SESSION,
    FEATURES,
    AnswerBlock,
    Cancel,
    Request,
    RequestBlock,
    Returns,
    SessionOptions,
    Share,
)
from service.ipc.messages.models import ModelKey

KEY = BlockKey(ModelKey("words", "2", 3), 1, Returns(embedding=True))


@dataclass
class Pending:
    """A request that is about to leave."""

    id: int
    request: Request
    data: bytes | memoryview


def pending(id: int, lengths: list[int], data: bytes, deadline: float = 9.0, sent: float = 1.0, **others: Any) -> Pending:
    return Pending(id, Request("words", "2", lengths, deadline, sent=sent, priority=1, generation=3, **others), data)


def received(frame: bytes, following: bytes | memoryview) -> tuple[RequestBlock, Columns]:
    near, far = (Channel(end) for end in pair())
    near.send(frame, following=following)
    frames: list[Any] = []
    while not frames:
        near.flush()
        frames = far.receive()
    near.close()
    far.close()
    [only] = frames
    assert isinstance(only.message, RequestBlock)
    return only.message, Columns.read(only.tail, only.message.requests, only.message.sequences, only.message.state_bytes)


def test_block_has_the_columns_and_totals_of_its_requests() -> None:
    requests = [pending(4, [2, 5], b"ab" * 14, 8.0, sent=1.0), pending(6, [1], b"cdef", sent=2.0)]
    message, columns = received(*encode_block(KEY, requests))
    assert message == RequestBlock("words", "2", 3, 2, 3, 8, 1, 5, 8.0, 1.5, 1, Returns(embedding=True)), "the mean of `sent`"
    assert (bytes(columns.ids), bytes(columns.deadlines)) == (np.array([4, 6], "<u8").tobytes(), np.array([8.0, 9.0]).tobytes())
    assert np.frombuffer(columns.counts, COUNT).tolist() == [2, 1]
    assert np.frombuffer(columns.lengths, COUNT).tolist() == [2, 5, 1]
    assert columns.values == b"ab" * 14 + b"cdef"


def frame(key: BlockKey, *requests: Pending, timed: bool = False) -> Frame:
    return decode(encode_block(key, requests, timed=timed)[0])


def test_blocks_that_follow_each_other_become_one() -> None:
    requests = [pending(4, [2, 5], b"ab" * 14, 8.0, sent=1.0), pending(6, [1], b"cdef", sent=2.0), pending(9, [3], b"xyz." * 3)]
    [joined] = join_blocks([frame(KEY, *requests[:2]), frame(KEY, requests[2])], most=4)
    together = frame(KEY, *requests)
    assert joined == replace(together, tail=bytes(together.tail))


def test_blocks_with_sessions_become_one() -> None:
    """The steps that clients name are kept if there are any."""
    options = replace(KEY, options=SessionOptions(ends=True))
    chunks = [pending(id, [1], b"abcd", session=f"session {id}") for id in range(3)]
    [joined] = join_blocks([frame(options, *chunks[:2]), frame(options, chunks[2])], most=4)
    together = frame(options, *chunks)
    assert joined == replace(together, tail=bytes(together.tail))
    assert isinstance(joined.message, RequestBlock)
    assert (joined.message.sessions, joined.message.at) == (["session 0", "session 1", "session 2"], [])
    named = pending(4, [1], b"abcd", session="session 4", session_at=0)
    [joined] = join_blocks([frame(options, *chunks), frame(options, named)], most=4)
    assert isinstance(joined.message, RequestBlock)
    assert (joined.message.sessions[3], joined.message.at) == ("session 4", [-1, -1, -1, 0])


@pytest.mark.parametrize("large", [False, True])
def test_states_follow_the_values_in_the_order_of_the_sequences(large: bool) -> None:
    values, states = bytes([1]) * (MAX_COPIED_BYTES if large else 12), bytes([2]) * 16
    first = pending(4, [len(values) // 4 - 1, 1], values + states, state_bytes=len(states))
    second = pending(5, [1], b"next" + b"--state-", state_bytes=8)
    requests = [first] if large else [first, second]
    message, columns = received(*encode_block(replace(KEY, initial=True), requests))
    assert message.initial
    expected = (values, states) if large else (values + b"next", states + b"--state-")
    assert (bytes(columns.values), bytes(columns.states)) == expected


def test_blocks_that_differ_stay_apart() -> None:
    one, two = pending(1, [2], b"ab" * 4), pending(2, [1], b"cdef")
    frames = [
        frame(KEY, one),
        frame(replace(KEY, priority=2), two),
        frame(replace(KEY, share=Share("tenant")), one),
        frame(KEY, one, timed=True),
        frame(KEY, two, timed=True),
        decode(encode(Cancel(), 1)),
        frame(KEY, two),
        frame(replace(KEY, options=ANY_SESSION), pending(1, [1], b"abcd", session="a")),
        frame(replace(KEY, options=SessionOptions(starts=True)), pending(2, [1], b"abcd", session="b")),
        frame(replace(KEY, initial=True), one),
        frame(replace(KEY, initial=True), two),
        Frame(frame(KEY, one).message, 0, bytes(MOST_JOINED_BYTES + 1)),
        frame(KEY, one),
    ]
    assert list(join_blocks(frames, most=100)) == frames


def test_blocks_are_joined_up_to_a_number_of_requests() -> None:
    frames = [frame(KEY, pending(id, [1], b"abcd"), pending(100 + id, [1], b"efgh")) for id in range(5)]
    joined = [joined.message for joined in join_blocks(frames, most=3)]
    assert [message.requests for message in joined if isinstance(message, RequestBlock)] == [4, 4, 2]


def test_values_of_a_large_request_follow_without_a_copy() -> None:
    data = bytes(MAX_COPIED_BYTES + 4)
    frame, following = encode_block(KEY, [pending(4, [len(data) // 4], data)])
    assert following is data
    message, columns = received(frame, following)
    assert columns.values == data and message.steps == len(data) // 4


@pytest.mark.parametrize("per_step", [False, True])
@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [3, 1, 2]])
def test_each_answer_has_the_lines_of_its_request(counts: list[int], per_step: bool) -> None:
    chance = random.Random(5)
    steps = [chance.randint(1, 4) for _ in range(sum(counts))]
    lines = sum(steps) if per_step else len(steps)
    arrays = [
        np.arange(lines * 3, dtype=FEATURES).reshape(lines, 3),
        np.arange(lines, dtype="<i4").reshape(lines, 1),
        np.arange(len(steps) * 2, dtype=FEATURES).reshape(len(steps), 2),
        np.arange(sum(steps) * 2, dtype=FEATURES).reshape(sum(steps), 2),
        np.arange(len(steps) * 5, dtype=FEATURES).reshape(len(steps), 5),
    ]
    scores, picks, embedding, sequence, state = (array.shape for array in arrays)
    shapes: dict[str, Any] = {"scores": scores, "picks": picks, "embedding": embedding, "sequence": sequence, "state": state}
    message = AnswerBlock(len(counts), len(steps), per_step=per_step, ready=3.5, sessions=True, **shapes)
    session_steps = 2**40 + np.arange(len(counts), dtype="<i8")
    columns = np.arange(len(counts), dtype="<u8"), np.array(counts, "<i4"), np.array(steps, "<i4"), session_steps
    data = b"".join(part.tobytes() for part in (*columns, *arrays))
    first = first_step = 0
    for (id, answer, values), (index, count) in zip(split_answers(message, data), enumerate(counts), strict=True):
        own_steps = steps[first : first + count]
        by_sequence, by_step = slice(first, first + count), slice(first_step, first_step + sum(own_steps))
        by_line = by_step if per_step else by_sequence
        parts = [arrays[0][by_line], arrays[1][by_line], arrays[2][by_sequence], arrays[3][by_step], arrays[4][by_sequence]]
        assert (id, answer.steps, answer.ready) == (index, own_steps, 3.5)
        assert (answer.session_steps, answer.finite) == (2**40 + index, True)
        assert tuple(getattr(answer, name) for name in ANSWER_ARRAYS) == tuple(part.shape for part in parts)
        assert bytes(values) == b"".join(part.tobytes() for part in parts)
        first, first_step = first + count, first_step + sum(own_steps)


def test_answers_that_are_not_finite_have_no_arrays() -> None:
    columns = np.arange(2, dtype="<u8"), np.array([1, 1], "<i4"), np.array([3, 4], "<i4"), np.array([5, 6], "<i8")
    answers = split_answers(AnswerBlock(2, 2, finite=False, sessions=True), b"".join(part.tobytes() for part in columns))
    seen = [(id, answer.steps, answer.session_steps, answer.finite, data) for id, answer, data in answers]
    assert seen == [(0, [3], 5, False, b""), (1, [4], 6, False, b"")]
