"""Decides which sequences run in the next batch, and how many steps of each.

The scheduler is pure: the time is an argument, and nothing here knows about a device, a socket or a client.

- **A batch never waits for more requests.** It starts when the device is free and takes what is queued at that moment. Batches form
  because the device is busy, not because a timer expires.
- **A batch takes up to K steps of each sequence.** K is the number of steps that fit into the time budget of a batch, but no more than the
  shortest sequence needs, so that a short sequence finishes early. K does not become so small that launches would dominate. A sequence with
  steps left continues in the next batch.
- **The sequence that is due first runs first.** The longer a sequence takes alone, the later it is due, so a long sequence never blocks a
  short one. Sequences of equal length run in the order of their arrival, so later requests never delay an accepted request. A priority
  level is a fixed head start in seconds: a higher level runs earlier, and no level starves.
- **Models share the device by time.** The model with the fewest seconds of device time runs next.
- **A request that would miss its deadline is rejected when it arrives**, by the predicted cost of the work queued before it.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from service.engine.execution.cost_model import Cost
from service.errors import DeadlineExceeded, Overloaded
from service.ipc.messages import ModelKey

HEAD_START_SECONDS = 1.0
LEAST_STEPS = 16
"""Lower limit of K. Fewer steps would cost less than the host's work for a batch and each sequence in it."""
PACE = 0.8
"""K keeps this share of the throughput that a batch of the whole time budget reaches, even if the shortest sequence is very short."""
NEWEST = 0.05
"""Weight of the newest batch in the running mean of the steps per batch."""
STRETCH = 5.0
"""A sequence is due at its arrival plus this multiple of the time that it takes alone."""
SLACK = 3.0
"""A sequence is due at least this multiple of the time that it takes alone before its deadline: in a batch it takes longer than alone."""
CAUTION = 1.25
"""A request is admitted if this multiple of its expected time fits before its deadline."""
UNLIMITED = 1 << 30
"""More steps than any sequence has."""


class QueuedSequence:
    """One sequence, from its arrival until its last step has been scheduled.

    remaining: steps that have not been scheduled.
    divisible: whether several batches may share its steps.
    stateful: whether it continues from a state or leaves one behind.
    ready: whether every chunk before it has run.
    begun: whether some of its steps have been scheduled.
    due: its position in the queue: arrival plus an allowance, minus the head start of its priority.
    """

    __slots__ = ("arrived", "begun", "deadline", "divisible", "due", "head_start", "ready", "remaining", "stateful")

    def __init__(
        self, steps: int, deadline: float, priority: int = 0, *, divisible: bool = True, stateful: bool = False
    ) -> None:
        self.remaining = steps
        self.deadline = deadline
        self.head_start = priority * HEAD_START_SECONDS
        self.divisible = divisible
        self.stateful = stateful
        self.ready = True
        self.begun = False
        self.arrived = 0.0
        self.due = 0.0


S = TypeVar("S", bound=QueuedSequence)


class ScheduledSteps(NamedTuple, Generic[S]):
    """The steps of one sequence that run in a batch. first, last: whether the sequence begins or ends with them."""

    sequence: S
    steps: int
    first: bool
    last: bool


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of the queue and of a batch.

    continuous: whether sequences join and leave at every batch. Otherwise each batch runs whole sequences in the order of their arrival.
    """

    max_waiting: int
    max_batch_sequences: int
    max_batch_tokens: int
    batch_seconds: float
    continuous: bool = True


class Rejection(NamedTuple):
    """A request that was rejected because it would have missed its deadline.

    A request with at least as many steps, less time than `needed` and no higher priority would miss its deadline too.
    """

    steps: int
    needed: float
    head_start: float
    message: str
    retry_after: int

    def covers(self, steps: int, time_left: float, head_start: float) -> bool:
        return steps >= self.steps and time_left < self.needed and head_start <= self.head_start


class ModelQueue(Generic[S]):
    """The queued sequences of one model, in the order of their due times.

    steps: remaining steps of all sequences.
    used: seconds that the model's batches have taken, on the scheduler's account.
    reach: running mean of the steps that a batch takes of its longest sequence.
    cost: of the model's batches, as of the last batch.
    rejection: the last rejection since then.
    """

    __slots__ = ("cost", "reach", "rejection", "sequences", "serial", "steps", "used")

    def __init__(self, cost: Cost, used: float) -> None:
        self.sequences: list[S] = []
        self.steps = 0
        self.used = used
        self.reach = 0.0
        self.update_cost(cost)

    def update_cost(self, cost: Cost) -> None:
        self.rejection: Rejection | None = None
        self.cost = cost
        self.serial = cost.fixed / LEAST_STEPS + cost.per_step + cost.per_token
        """Upper bound of the seconds per step: no two sequences share a batch, and every batch takes LEAST_STEPS."""

    def insert(self, sequence: S) -> None:
        sequences = self.sequences
        # Most sequences arrive in due order, and a comparison is cheaper than a search.
        if not sequences or sequences[-1].due <= sequence.due:
            sequences.append(sequence)
        else:
            insort(sequences, sequence, key=_due)
        self.steps += sequence.remaining


def _unlimited_room(model: ModelKey) -> int:
    return UNLIMITED


class Scheduler(Generic[S]):
    """A bounded queue per model, and the policy that takes batches from the queues.

    cost: returns the predicted cost of a model's batches.
    room: returns how many more sequences of a model may keep a state between batches.
    """

    def __init__(
        self, limits: SchedulerLimits, cost: Callable[[ModelKey], Cost], room: Callable[[ModelKey], int] = _unlimited_room
    ) -> None:
        self._limits = limits
        self._cost = cost
        self._room = room
        self._queues: dict[ModelKey, ModelQueue[S]] = {}
        self._earliest_deadline = math.inf
        """Lower bound of all queued deadlines."""
        self._used = 0.0
        """`used` of the model that ran last. A new queue starts here: a model earns no credit while it has no requests."""
        self.waiting = 0
        """Sequences that have not begun."""
        self.begun = 0
        """Sequences that have begun and have steps left."""

    def add(self, model: ModelKey, sequences: list[S], *, now: float, busy: float = 0.0) -> None:
        """Queue all sequences of one request, or none of them. busy: seconds until the batches in flight end.

        Raises Overloaded if the queue is full or the request would miss its deadline behind the queued work, and DeadlineExceeded if the
        request would miss its deadline even alone.
        """
        if self.waiting + len(sequences) > self._limits.max_waiting:
            raise Overloaded(
                f"{self.waiting} sequences wait, this request has {len(sequences)} and "
                f"SEQSERVE_MAX_WAITING is {self._limits.max_waiting}: retry later, or raise SEQSERVE_MAX_WAITING",
                retry_after=1,
            )
        if not sequences:
            return
        queue = self._queues.get(model) or ModelQueue[S](self._cost(model), self._used)
        if busy or self._queues:
            self._check_deadline(model, queue, sequences, now, busy)
        self._queues[model] = queue
        for sequence in sequences:
            sequence.arrived, sequence.due = now, self._due(queue.cost, sequence, sequence.remaining, now)
            queue.insert(sequence)
        self._earliest_deadline = min(self._earliest_deadline, sequences[0].deadline)
        self.waiting += len(sequences)

    def holds(self, model: ModelKey) -> bool:
        """Return whether any sequence of this model has steps left."""
        return model in self._queues

    def waiting_by_model(self) -> dict[ModelKey, int]:
        """Return the number of sequences that have not begun, by model."""
        return {model: sum([not sequence.begun for sequence in queue.sequences]) for model, queue in self._queues.items()}

    def drop(self, sequences: list[S]) -> int:
        """Remove these sequences of one request from the queue. Returns how many of them were queued."""
        dropped = {id(sequence) for sequence in sequences}
        return len(self._remove(lambda sequence: id(sequence) in dropped))

    def drop_late(self, now: float) -> list[S]:
        """Remove and return the sequences with a past deadline."""
        if now < self._earliest_deadline:
            return []
        late = self._remove(lambda sequence: sequence.deadline <= now)
        deadlines = (sequence.deadline for queue in self._queues.values() for sequence in queue.sequences)
        self._earliest_deadline = min(deadlines, default=math.inf)
        return late

    def backlog_seconds(self) -> float:
        """Return the predicted time of all queued work."""
        return sum(self._seconds(queue, len(queue.sequences), queue.steps) for queue in self._queues.values())

    def next_batch(self) -> tuple[ModelKey, list[ScheduledSteps[S]]] | None:
        """Choose the model that runs next and the steps of its sequences. Returns None if no sequence can run now."""
        for model in sorted(self._queues, key=self._claim) if len(self._queues) > 1 else list(self._queues):
            queue = self._queues[model]
            queue.update_cost(self._cost(model))
            scheduled = self._choose(model, queue)
            if scheduled:
                longest = max([part.steps for part in scheduled])
                self._used = queue.used
                queue.used += queue.cost.of(longest, sum([part.steps for part in scheduled]))
                queue.reach += NEWEST * (longest - queue.reach) if queue.reach else longest
                self._advance(model, queue, scheduled)
                return model, scheduled
        return None

    def _claim(self, model: ModelKey) -> float:
        """Sort key of the models: the smallest runs next. A priority level is worth as much as within a queue."""
        queue = self._queues[model]
        return queue.used - queue.sequences[0].head_start

    def _choose(self, model: ModelKey, queue: ModelQueue[S]) -> list[ScheduledSteps[S]]:
        """Take sequences in due order until the batch is full. The first sequence is always taken."""
        limits = self._limits
        first = list(islice((sequence for sequence in queue.sequences if sequence.ready), limits.max_batch_sequences))
        if not first:
            return []
        limit, first_steps = self._step_limit(first, queue.cost), _rounded(first[0].remaining)
        scheduled: list[ScheduledSteps[S]] = []
        tokens, longest, room = 0, 0, -1
        for sequence in queue.sequences:
            if not sequence.ready:
                continue
            steps = min(sequence.remaining, limit) if sequence.divisible else sequence.remaining
            if not sequence.begun and (sequence.stateful or steps < sequence.remaining):
                room = self._room(model) if room < 0 else room
                if room == 0:
                    continue
                room -= 1
            if scheduled:
                if tokens + steps > limits.max_batch_tokens or len(scheduled) == limits.max_batch_sequences:
                    break
                # A long indivisible sequence would delay shorter sequences beyond the budget. It runs when it is first in the queue.
                if (
                    steps > max(first_steps, limit)
                    and queue.cost.of(max(longest, steps), tokens + steps) > limits.batch_seconds
                ):
                    continue
            tokens, longest = tokens + steps, max(longest, steps)
            scheduled.append(ScheduledSteps(sequence, steps, not sequence.begun, steps == sequence.remaining))
        return scheduled

    def _step_limit(self, ready: list[S], cost: Cost) -> int:
        """Return K: the most steps that the next batch takes of a divisible sequence."""
        if not self._limits.continuous:
            return UNLIMITED
        within_budget = max(LEAST_STEPS, cost.steps_within(self._limits.batch_seconds, len(ready)))
        shortest = _rounded(min([sequence.remaining for sequence in ready]))
        return min(within_budget, max(shortest, cost.steps_at_pace(PACE, within_budget, len(ready))))

    def _advance(self, model: ModelKey, queue: ModelQueue[S], scheduled: list[ScheduledSteps[S]]) -> None:
        """Update the counts, and remove the sequences that have no steps left."""
        finished = 0
        for part in scheduled:
            sequence = part.sequence
            queue.steps -= part.steps
            sequence.remaining -= part.steps
            sequence.begun = True
            finished += part.last
            self.waiting -= part.first
            self.begun += (not part.last) - (not part.first)
        if finished == len(queue.sequences):
            del self._queues[model]
        elif finished:
            # The batch usually is a prefix of the queue: the sequences behind it need no check.
            end = queue.sequences.index(scheduled[-1].sequence) + 1
            queue.sequences[:end] = [sequence for sequence in queue.sequences[:end] if sequence.remaining]

    def _remove(self, matches: Callable[[S], bool]) -> list[S]:
        """Remove and return the matching sequences of all queues."""
        removed: list[S] = []
        for model, queue in list(self._queues.items()):
            matching = [sequence for sequence in queue.sequences if matches(sequence)]
            if matching:
                queue.sequences = [sequence for sequence in queue.sequences if not matches(sequence)]
                queue.steps -= sum([sequence.remaining for sequence in matching])
                queue.rejection = None
                removed += matching
                if not queue.sequences:
                    del self._queues[model]
        begun = sum([sequence.begun for sequence in removed])
        self.begun -= begun
        self.waiting -= len(removed) - begun
        return removed

    # Predictions.

    def _due(self, cost: Cost, sequence: S, steps: int, now: float) -> float:
        """Return the due time of a sequence of `steps` steps that arrives now."""
        if not self._limits.continuous:
            return now - sequence.head_start
        alone = cost.of(steps, steps)
        return now - sequence.head_start + max(0.0, min(STRETCH * alone, sequence.deadline - now - SLACK * alone))

    def _seconds(self, queue: ModelQueue[S], count: int, steps: int, longest: int = 0) -> float:
        """Return the predicted time of `count` sequences of one model that have `steps` steps together.

        longest: steps of the longest sequence, if it is longer than the mean.
        """
        cost, max_sequences = queue.cost, self._limits.max_batch_sequences
        longest = max(longest, steps // max(1, count))
        # Sequences follow each other in each row of the batch, and the longest comes last.
        steps_per_row = longest if count <= max_sequences else (steps - longest) // max_sequences + longest
        rows = min(count, max_sequences)
        batches = max(-(-count // max_sequences), -(-steps_per_row // self._expected_steps(queue, rows)))
        return cost.fixed * batches + (cost.per_step + cost.per_token * rows) * steps_per_row

    def _expected_steps(self, queue: ModelQueue[S], rows: int) -> int:
        """Return how many steps a batch is likely to take: the recent mean, or before the first batch the steps that the budget allows."""
        if not self._limits.continuous:
            return UNLIMITED
        return int(queue.reach) or max(LEAST_STEPS, queue.cost.steps_within(self._limits.batch_seconds, rows))

    def _check_deadline(self, model: ModelKey, queue: ModelQueue[S], sequences: list[S], now: float, busy: float) -> None:
        """Raise Overloaded or DeadlineExceeded if a request would miss its deadline."""
        first, steps = sequences[0], sum([sequence.remaining for sequence in sequences])
        time_left = first.deadline - now
        if queue.rejection is not None and queue.rejection.covers(steps, time_left, first.head_start):
            # Under heavy overload a rejection must cost little.
            raise Overloaded(queue.rejection.message, retry_after=queue.rejection.retry_after)
        serial = len(sequences) * queue.cost.fixed + steps * queue.serial
        for queued in self._queues.values():
            serial += len(queued.sequences) * queued.cost.fixed + queued.steps * queued.serial
        if (CAUTION + STRETCH) * (busy + serial) <= time_left:
            return
        longest = max([sequence.remaining for sequence in sequences])
        due = self._due(queue.cost, first, longest, now)
        expected = busy + self._expected_seconds(model, queue, len(sequences), steps, longest, due)
        # Until the due time, later arrivals may take this request's place in a full batch.
        full = len(queue.sequences) >= self._limits.max_batch_sequences
        needed = CAUTION * expected + (max(0.0, due - now) if full else 0.0)
        if needed <= time_left:
            return
        alone = self._seconds(queue, len(sequences), steps, longest)
        if CAUTION * alone > time_left:
            raise DeadlineExceeded(
                f"the request takes about {alone:.3g} s alone and its deadline is in {time_left:.3g} s: allow more time"
            )
        message = f"an answer is expected in {expected:.3g} s and the deadline is in {time_left:.3g} s: retry later, or allow more time"
        queue.rejection = Rejection(steps, needed, first.head_start, message, math.ceil(expected))
        raise Overloaded(message, retry_after=queue.rejection.retry_after)

    def _expected_seconds(
        self, model: ModelKey, queue: ModelQueue[S], count: int, steps: int, longest: int, due: float
    ) -> float:
        """Return the expected completion time of a request, including the work of its model that is due before it.

        Each other model adds its queued work, but at most as much again: models share the device by time.
        """
        ahead = bisect_right(queue.sequences, due, key=_due)
        steps_ahead = queue.steps - sum([sequence.remaining for sequence in queue.sequences[ahead:]])
        own = self._seconds(queue, count + ahead, steps + steps_ahead, longest)
        others = [
            min(own, self._seconds(other, len(other.sequences), other.steps))
            for key, other in self._queues.items()
            if key != model
        ]
        return own + sum(others)


def _rounded(steps: int) -> int:
    """Round up to a power of two, and to at least LEAST_STEPS."""
    return max(LEAST_STEPS, 1 << (steps - 1).bit_length())


def _due(sequence: QueuedSequence) -> float:
    return sequence.due
