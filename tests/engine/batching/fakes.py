"""Short constructors for sequences, limits and requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from service.engine.batching.batch_builder import SchedulerLimits
from service.engine.batching.model_queue import QueuedSequence
from service.engine.batching.request_block import RequestBlock
from service.engine.execution.cost_model import Cost
from service.ipc.blocks import COUNT, DEADLINE, ID, Columns
from service.ipc.messages import IDS, NO_TENANT, ModelKey, Request, Returns, Share

MODEL = ModelKey("words", "1")
OTHER = ModelKey("sensors", "1")
PLAIN = Returns()
NEVER = 1e9
COST = Cost(1.0, 0.0, 0.0)
"""Every batch costs the same, so the time budget never limits its steps."""


def sequences(
    *steps: int,
    deadline: float = NEVER,
    priority: int = 0,
    divisible: bool = False,
    stateful: bool = False,
    share: Share = NO_TENANT,
) -> list[QueuedSequence]:
    return [QueuedSequence(count, deadline, priority, divisible=divisible, stateful=stateful, share=share) for count in steps]


def limits(
    max_waiting: int = 100,
    max_batch_sequences: int = 8,
    max_batch_tokens: int = 100,
    batch_seconds: float = 100.0,
) -> SchedulerLimits:
    return SchedulerLimits(max_waiting, max_batch_sequences, max_batch_tokens, batch_seconds)


def request(
    lengths: Sequence[int],
    *,
    model: ModelKey = MODEL,
    deadline: float = NEVER,
    starts: bool | None = None,
    ends: bool = False,
    at: int | None = None,
    opens: bool = True,
    **others: Any,
) -> Request:
    """Return a request. starts, ends, at, opens: of its session; others: as in Request."""
    session = {"session_starts": starts, "session_ends": ends, "session_at": at, "opens_session": opens}
    key = {"generation": model.generation, "exactly": True}
    return Request(*model.labels, list(lengths), deadline, sent=0.0, **(key | session | others))  # type: ignore[arg-type]


def ids(sequences: Sequence[Sequence[int]]) -> bytes:
    """Return sequences of token ids in the format of the frontend."""
    return b"".join(np.array(sequence, IDS).tobytes() for sequence in sequences)


def block(
    requests: Sequence[tuple[int, float, Sequence[int]]],
    values: bytes = b"",
    *,
    model: ModelKey = MODEL,
    priority: int = 0,
    returns: Returns = PLAIN,
    share: Share = NO_TENANT,
    divisible: bool = False,
    owner: object = None,
) -> RequestBlock:
    """Return a block. requests: the id, the deadline and the lengths of each; values: their token ids, zeros by default."""
    lengths = [steps for _, _, of_request in requests for steps in of_request]
    columns = Columns(
        np.array([id for id, _, _ in requests], ID).tobytes(),
        np.array([deadline for _, deadline, _ in requests], DEADLINE).tobytes(),
        np.array([len(of_request) for _, _, of_request in requests], COUNT).tobytes(),
        np.array(lengths, COUNT).tobytes(),
        values or bytes(np.dtype(IDS).itemsize * sum(lengths)),
    )
    return RequestBlock(
        model,
        columns,
        steps=sum(lengths),
        shortest=min(lengths, default=0),
        longest=max(lengths, default=0),
        deadline=min(deadline for _, deadline, _ in requests),
        priority=priority,
        returns=returns,
        share=share,
        divisible=divisible,
        owner=owner,
    )
