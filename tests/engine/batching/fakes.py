"""Short constructors for sequences, limits and requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from service.engine.batching.scheduler import QueuedSequence, SchedulerLimits
from service.engine.execution.cost_model import Cost
from service.ipc.messages import IDS, ModelKey, Request, Returns

MODEL = ModelKey("words", "1")
OTHER = ModelKey("sensors", "1")
PLAIN = Returns()
NEVER = 1e9
COST = Cost(1.0, 0.0, 0.0)
"""Every batch costs the same, so the time budget never limits its steps."""


def sequences(
    *steps: int, deadline: float = NEVER, priority: int = 0, divisible: bool = False, stateful: bool = False
) -> list[QueuedSequence]:
    return [QueuedSequence(count, deadline, priority, divisible=divisible, stateful=stateful) for count in steps]


def limits(
    max_waiting: int = 100,
    max_batch_sequences: int = 8,
    max_batch_tokens: int = 100,
    batch_seconds: float = 100.0,
    continuous: bool = True,
) -> SchedulerLimits:
    return SchedulerLimits(max_waiting, max_batch_sequences, max_batch_tokens, batch_seconds, continuous)


def request(
    lengths: Sequence[int],
    *,
    model: ModelKey = MODEL,
    deadline: float = NEVER,
    priority: int = 0,
    returns: Returns = PLAIN,
    session: str | None = None,
    starts: bool | None = None,
    ends: bool = False,
    exactly: bool = True,
) -> Request:
    return Request(
        model.name,
        model.version,
        list(lengths),
        deadline,
        sent=0.0,
        priority=priority,
        returns=returns,
        session=session,
        session_starts=starts,
        session_ends=ends,
        generation=model.generation,
        exactly=exactly,
    )


def ids(sequences: Sequence[Sequence[int]]) -> bytes:
    """Return sequences of token ids in the format of the frontend."""
    return b"".join(np.array(sequence, IDS).tobytes() for sequence in sequences)
