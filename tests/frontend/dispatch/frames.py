"""Frames between a frontend and an engine, request by request."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from service.ipc.blocks import COUNT, DEADLINE, ID, Columns, key_of
from service.ipc.channel import Frame, encode
from service.ipc.messages.inference import ANY_SESSION, Answer, AnswerBlock, Request, RequestBlock


def requests_of(frame: Frame) -> list[Frame]:
    """Return a frame for each request of a block, and any other frame unchanged."""
    message = frame.message
    if not isinstance(message, RequestBlock):
        return [frame]
    columns = Columns.read(frame.tail, message.requests, message.sequences, message.state_bytes)
    key, row_bytes = key_of(message.key), len(columns.states) // message.sequences
    options = key.options or ANY_SESSION
    lengths, deadlines = np.frombuffer(columns.lengths, COUNT).tolist(), np.frombuffer(columns.deadlines, DEADLINE).tolist()
    frames, row, begin, before = [], 0, 0, 0
    counts = np.frombuffer(columns.counts, COUNT).tolist()
    sessions: list[Any] = message.sessions or [None] * message.requests
    at = message.at or [-1] * message.requests
    ids = np.frombuffer(columns.ids, ID).tolist()
    for id, deadline, count, session, steps in zip(ids, deadlines, counts, sessions, at, strict=True):
        own = lengths[row : row + count]
        states = columns.states[row * row_bytes : (row + count) * row_bytes]
        sent = Request(
            *(key.model.name, key.model.version, own, deadline, message.sent, key.priority, key.returns, session),
            *(options.starts, options.ends, key.model.generation, options.exactly, options.resubmitted, options.limit),
            *(key.share, len(states), message.timed, None if steps < 0 else steps, options.opens),
        )
        row, before = row + count, before + sum(own)
        end = len(columns.values) * before // message.steps if message.steps else 0
        frames.append(Frame(cast(Any, sent), id, bytes(columns.values[begin:end]) + bytes(states)))
        begin = end
    return frames


def answer_frame(id: int, answer: Answer, data: bytes | memoryview = b"") -> bytes:
    """Return the frame of the answer to one request. data: of its arrays."""
    count = len(answer.steps) or (answer.scores or (0,))[0]
    steps = answer.steps or [1] * count
    message = AnswerBlock(
        *(1, count, answer.scores, answer.picks, answer.embedding, answer.sequence),
        per_step=any(shape and shape[0] != count for shape in (answer.scores, answer.picks)),
        ready=answer.ready,
        state=answer.state,
        finite=answer.finite,
        sessions=True,
    )
    columns = np.array([id], ID), np.array([count], COUNT), np.array(steps, COUNT), np.array([answer.session_steps])
    return encode(message, tail=(*columns, data))
