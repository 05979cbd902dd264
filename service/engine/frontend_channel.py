"""The frontends that an engine serves, as the owners of their requests: each gets its replies through one channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from service.engine.batching.request_block import QueuedBlock
from service.engine.execution.in_flight import BlockResult
from service.errors import ServiceError
from service.ipc.blocks import COUNT_BYTES, ID, ITEM_BYTES
from service.ipc.channel import Channel, encode
from service.ipc.messages.inference import AnswerBlock, RefusalBlock
from service.ipc.messages.message import Refusal


class FrontendChannel:
    """A frontend, until its channel closes.

    answered: whether a backlog report is due with its next write. backlog: the seconds that were reported last.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.answered, self.backlog = False, 0.0

    def answer(self, block: QueuedBlock, result: BlockResult, ready: float) -> None:
        """Send the answers to all requests of a block. ready: when the result was."""
        message, columns = answer_message(block, result, ready)
        self.channel.send_divided(encode(message, tail=columns))
        self.answered = True

    def refuse(self, ids: Sequence[int], error: ServiceError) -> None:
        """Refuse requests of a block in one message."""
        self.channel.send(encode(RefusalBlock(Refusal.of(error)), tail=(np.array(ids, ID),)))
        self.answered = True

    def send_refusal(self, id: int, error: ServiceError) -> None:
        """Refuse a call."""
        self.send(id, encode(Refusal.of(error), id))

    def send(self, id: int, frame: bytes) -> None:
        """Send the reply to a call."""
        self.channel.send_divided(frame)
        self.answered = True


def answer_message(block: QueuedBlock, result: BlockResult, ready: float) -> tuple[AnswerBlock, list[Any]]:
    """Return the answers to all requests of a block, and the columns that follow the message. A result without steps has no sequences."""
    arrays = [array for array in result[:4] if array is not None]
    scores, picks, embedding, sequence = [() if array is None else array.shape for array in result[:4]]
    sequences, session_steps = len(result.steps) // COUNT_BYTES, result.session_steps
    queued, runs = (block.arrived, list(result.runs)) if block.timed else (0.0, [])
    state = (sequences, len(result.state) // (ITEM_BYTES * sequences)) if result.state else ()
    message = AnswerBlock(
        *(block.requests, sequences, scores, picks, embedding, sequence, result.per_step, ready),
        *(queued, runs, state, result.is_finite, session_steps is not None),
    )
    counts = block.columns.counts if sequences else bytes(COUNT_BYTES * block.requests)
    columns = block.columns.ids, counts, result.steps, b"" if session_steps is None else session_steps
    return message, [*columns, *arrays, result.state]
