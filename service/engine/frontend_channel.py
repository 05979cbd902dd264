"""The frontends that an engine serves, as the owners of their requests: each gets its replies through one channel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np

from service.engine.batching.request_block import QueuedBlock
from service.engine.batching.ticket import Ticket
from service.engine.execution.in_flight import BlockResult
from service.errors import ServiceError
from service.ipc.blocks import ID
from service.ipc.channel import Channel, encode
from service.ipc.messages.inference import Answer, AnswerBlock, RefusalBlock, Request
from service.ipc.messages.message import Refusal


class FrontendChannel:
    """A frontend, until its channel closes.

    tickets: of its requests that are not in a block, by id. answered: whether it receives a backlog report with its next write.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.tickets: dict[int, Ticket] = {}
        self.answered = False

    def answer(self, block: QueuedBlock, result: BlockResult, ready: float) -> None:
        """Send the answers to all requests of a block. ready: when the result was."""
        arrays = [result.scores, result.picks, result.embedding, result.sequence]
        scores, picks, embedding, sequence = [() if array is None else array.shape for array in arrays]
        answer = AnswerBlock(block.requests, block.sequences, scores, picks, embedding, sequence, result.per_step, ready)
        if block.timed:
            answer = msgspec.structs.replace(answer, queued=block.arrived, runs=list(result.runs))
        columns = block.columns.ids, block.columns.counts, result.steps
        self.channel.send_divided(encode(answer, tail=(*columns, *[array for array in arrays if array is not None])))
        self.answered = True

    def refuse(self, ids: Sequence[int], error: ServiceError) -> None:
        """Refuse requests of a block in one message."""
        self.channel.send(encode(RefusalBlock(Refusal.of(error)), tail=(np.array(ids, ID),)))
        self.answered = True

    def open_ticket(self, id: int, request: Request) -> Ticket:
        """Return a ticket for a request that leaves its block. It ends with a reply."""
        ticket = self.tickets[id] = Ticket(request, partial(self.send_answer, id), partial(self.send_refusal, id))
        return ticket

    def send_answer(self, id: int, answer: Answer, arrays: list[bytes]) -> None:
        """Answer a request that is not in a block."""
        self.send(id, encode(answer, id, arrays))

    def send_refusal(self, id: int, error: ServiceError) -> None:
        """Refuse a request or a call."""
        self.send(id, encode(Refusal.of(error), id))

    def send(self, id: int, frame: bytes) -> None:
        """Send the reply to a request or a call."""
        self.channel.send_divided(frame)
        self.answered = True
        self.tickets.pop(id, None)
