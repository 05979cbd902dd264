"""Selects what the next batch of one model takes from its queue. Pure: nothing here knows a clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from service.engine.batching.request_block import QueuedBlock
from service.engine.batching.tenant_queue import DONE, HANDLE, LEFT, NO_HANDLE, ORDER
from service.engine.execution.cost_model import Cost

PACE = 0.8
"""K keeps this share of the throughput that a batch of the whole time budget reaches, even if the shortest sequence is very short."""
BUDGET_OF_FIXED = 2.0
"""The time budget of a batch is at least this multiple of its fixed time: a host that is slow would otherwise cut all sequences, which
takes it even longer."""
STRETCHED = 2.0
"""A batch may take this multiple of the time that its longest sequence takes alone, even where its time is limited."""
UNLIMITED = 1 << 30
"""More steps than any sequence has."""
NEVER = np.iinfo(np.int64).max
"""A place among all arrivals that none has."""
LEAST_STEPS = 16
"""The fewest steps that a batch takes of a longer sequence. Fewer cost less than the host's work for a batch and each sequence in it."""

SHORTEST_OF, LONGEST_OF = attrgetter("shortest"), attrgetter("longest")
Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of the queue and of a batch."""

    max_waiting: int
    max_batch_sequences: int
    max_batch_tokens: int
    batch_seconds: float


def select(
    table: Array, limits: SchedulerLimits, cost: Cost, max_seconds: float, room: int, *, divisible: bool
) -> tuple[Array, Array]:
    """Take sequences in order until the batch is full. The first is always taken, if there is room for its state.

    Returns their places in the table, and how many steps of each.

    table: the sequences that may run, in their order, as in TenantQueue.
    max_seconds: limit of the predicted time of a batch, unless single sequences take about as long.
    room: how many more sequences of the model may hold a state.
    """
    left = table[:, LEFT]
    usual, steps = UNLIMITED, left
    if left.max(initial=0) > LEAST_STEPS:  # K is no less
        first = left[: limits.max_batch_sequences].tolist()
        limit = step_limit(limits, min(first), len(first), fair_share(first, limits.max_batch_tokens), cost)
        usual = max(limit, _rounded(first[0]))
        if divisible:
            steps = np.minimum(left, limit)
    needs_room = table[:, HANDLE] != NO_HANDLE
    if steps is not left:
        needs_room |= steps < left
    needs_room &= table[:, DONE] == 0
    places = np.arange(len(table))
    if np.count_nonzero(needs_room) > room:
        places = np.flatnonzero(~needs_room | (needs_room.cumsum() <= room))
    while True:
        window = places[: limits.max_batch_sequences]
        taken = steps[window]
        tokens = taken.cumsum()
        if divisible and max_seconds == math.inf:
            end = max(1, int(tokens.searchsorted(limits.max_batch_tokens, side="right")))
            return window[:end], taken[:end]
        longest = np.maximum.accumulate(taken)
        fits = tokens <= limits.max_batch_tokens
        if max_seconds < math.inf:
            fits &= cost.of(longest, tokens) <= np.maximum(max_seconds, STRETCHED * cost.of(longest, longest))
        fits[:1] = True
        end = len(fits) if fits.all() else int(fits.argmin())
        # A long sequence would delay shorter sequences beyond the budget. It runs when it is first.
        delays = (taken > usual) & (cost.of(longest, tokens) > budget_seconds(limits, cost))
        delays[:1] = False
        place = int(delays.argmax()) if delays.any() else len(delays)
        if divisible or place > end or place == len(delays):
            return window[:end], taken[:end]
        # So would every sequence behind it that is as long.
        places = places[(np.arange(len(places)) < place) | (steps[places] < taken[place])]


def may_run(table: Array, busy: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which sequences may run: of the chunks of a session only the first, and none while the session is busy.

    busy: whether the state handle of each sequence is in use; a sequence that has begun keeps its own in use.
    """
    handles, orders = table[:, HANDLE], table[:, ORDER]
    earliest = np.full(handles.max() + 2, NEVER)  # the last place stands for NO_HANDLE
    np.minimum.at(earliest, handles, orders)
    is_first: NDArray[np.bool_] = (orders == earliest[handles]) | (handles == NO_HANDLE)
    return is_first & (~busy | (table[:, DONE] > 0))


def runs_whole(
    blocks: Sequence[QueuedBlock],
    rows: int,
    steps: int,
    limits: SchedulerLimits,
    cost: Cost,
    max_seconds: float,
    *,
    divisible: bool,
) -> bool:
    """Return whether a batch takes these blocks as they are. rows, steps: of all of them."""
    longest = max(map(LONGEST_OF, blocks))
    if rows > limits.max_batch_sequences or steps > limits.max_batch_tokens:
        return False
    seconds = cost.of(longest, steps)
    if seconds > max_seconds and seconds > STRETCHED * cost.of(longest, longest):
        return False
    if longest <= LEAST_STEPS or longest <= step_limit(limits, min(map(SHORTEST_OF, blocks)), rows, UNLIMITED, cost):
        return True
    return not divisible and seconds <= budget_seconds(limits, cost)


def fair_share(lengths: Sequence[int], steps: int) -> int:
    """Return the most steps of each sequence, if all together take at most `steps`: what short sequences leave goes to the others."""
    if sum(lengths) <= steps:
        return UNLIMITED
    left = len(lengths)
    for length in sorted(lengths):
        if length * left > steps:
            break
        steps -= length
        left -= 1
    return steps // left


def budget_seconds(limits: SchedulerLimits, cost: Cost) -> float:
    """Return the time budget of a batch."""
    return max(limits.batch_seconds, BUDGET_OF_FIXED * cost.fixed)


def steps_within_budget(limits: SchedulerLimits, rows: int, share: int, cost: Cost) -> int:
    """Return the most steps that a batch takes of each of its rows. share: see `fair_share`."""
    return max(LEAST_STEPS, min(cost.steps_within(budget_seconds(limits, cost), rows), share))


def step_limit(limits: SchedulerLimits, shortest: int, rows: int, share: int, cost: Cost) -> int:
    """Return K: the most steps that the next batch takes of a divisible sequence.

    shortest: steps of the shortest sequence in it; rows: how many sequences it takes; share: see `fair_share`.
    """
    within_budget = steps_within_budget(limits, rows, share, cost)
    return min(within_budget, max(_rounded(shortest), cost.steps_at_pace(PACE, within_budget, rows)))


def _rounded(steps: int) -> int:
    """Round up to a power of two, and to at least LEAST_STEPS."""
    return max(LEAST_STEPS, 1 << (steps - 1).bit_length())
