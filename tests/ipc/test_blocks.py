"""The requests of one tick share a frame, and their answers are separated again."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from service.ipc.blocks import COUNT, MOST_JOINED_BYTES, BlockKey, Columns, encode_block, join_blocks, split_answers
from service.ipc.channel import MAX_COPIED_BYTES, Channel, Frame, decode, encode, pair
from service.ipc.messages.inference import FEATURES, AnswerBlock, Cancel, Request, RequestBlock, Returns, Share
from service.ipc.messages.models import ModelKey

KEY = BlockKey(ModelKey("words", "2", 3), 1, Returns(embedding=True))


@dataclass
class Pending:
    """A request that is about to leave."""

    id: int
    request: Request
    data: bytes | memoryview


def pending(id: int, lengths: list[int], data: bytes, deadline: float = 9.0, sent: float = 1.0) -> Pending:
    return Pending(id, Request("words", "2", lengths, deadline, sent=sent, priority=1, generation=3), data)


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
    return only.message, Columns.read(only.tail, only.message.requests, only.message.sequences)


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
    assert joined == together._replace(tail=bytes(together.tail))


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
    ]
    scores, picks, embedding, sequence = (array.shape for array in arrays)
    message = AnswerBlock(len(counts), len(steps), scores, picks, embedding, sequence, per_step, ready=3.5)
    columns = np.arange(len(counts), dtype="<u8"), np.array(counts, "<i4"), np.array(steps, "<i4")
    data = b"".join(part.tobytes() for part in (*columns, *arrays))
    first = first_step = 0
    for (id, answer, values), (index, count) in zip(split_answers(message, data), enumerate(counts), strict=True):
        own_steps = steps[first : first + count]
        by_sequence, by_step = slice(first, first + count), slice(first_step, first_step + sum(own_steps))
        by_line = by_step if per_step else by_sequence
        parts = [arrays[0][by_line], arrays[1][by_line], arrays[2][by_sequence], arrays[3][by_step]]
        assert (id, answer.steps, answer.ready) == (index, own_steps, 3.5)
        assert (answer.scores, answer.picks, answer.embedding, answer.sequence) == tuple(part.shape for part in parts)
        assert bytes(values) == b"".join(part.tobytes() for part in parts)
        first, first_step = first + count, first_step + sum(own_steps)
