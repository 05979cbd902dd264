"""Who runs in the next turn, and how far. Pure: the time is an argument, and nothing here knows a device, a socket or a caller.

A batch forms because the engine is busy, never because a timer runs: whatever waits when a turn ends may be in the next one. A turn takes
at most K steps of each sequence: as many as its budget of time allows, and no more than the shortest sequence has left, unless so short a
turn would hardly be worth its launch. What has steps left goes on in the next turn.

Where more wait than a turn has rows, a sequence is due the later the longer it takes alone, so that long ones never block a short one, and
of equals who came first is first done: whoever is accepted is not held up by those who come after. Each level of priority is worth a fixed
head start in time, so that higher levels go first and none starves. Models share the engine by the seconds that their turns take.
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
"""Of a turn, whatever the budget says: less would be spent on what every turn and every row in it costs the host."""
PACE = 0.8
"""Sequences keep this share of the pace that they have in turns of the whole budget, however short the shortest is: many short turns
would spend their time on launches."""
NEWEST = 0.05
"""Share of the newest turn in the mean of how far turns go."""
STRETCH = 5.0
"""A sequence is due so many times as long after its arrival as it takes alone."""
SLACK = 3.0
"""And so many times as long before its deadline: beside others it takes longer than alone."""
CAUTION = 1.25
"""A deadline counts as met when so many times as long is left as the answer is expected to take."""
ENDLESS = 1 << 30
"""More steps than any sequence has."""


class Waiting:
    """One sequence from its arrival until its last step has been taken into a turn.

    `left` counts its steps that are still to run; `cuts` says whether these may be spread over turns, `stateful` whether it goes on from a
    state or leaves one, `ready` whether all that has to run before it has. `due` orders the queue: some time after arrival, less its
    priority's head start.
    """

    __slots__ = ("arrived", "cuts", "deadline", "due", "head_start", "left", "ready", "stateful", "taken")

    def __init__(self, steps: int, deadline: float, priority: int = 0, *, cuts: bool = True, stateful: bool = False) -> None:
        self.left = steps
        self.deadline = deadline
        self.head_start = priority * HEAD_START_SECONDS
        self.cuts = cuts
        self.stateful = stateful
        self.ready = True
        self.taken = False
        """Whether some of it has run."""
        self.arrived = 0.0
        self.due = 0.0


W = TypeVar("W", bound=Waiting)


class Cut(NamedTuple, Generic[W]):
    """So many steps of one sequence; first: it waited until now; last: none are left."""

    of: W
    steps: int
    first: bool
    last: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the queue and of a turn. continuous: whether sequences are cut and turns mixed as they come; else every turn runs whole
    sequences, in the order in which they came."""

    max_waiting: int
    max_batch_sequences: int
    max_batch_tokens: int
    batch_seconds: float
    continuous: bool = True


class Refused(NamedTuple):
    """Somebody who could not be in time: whoever has as much to do, less time than he would have needed and no priority before him cannot
    either."""

    steps: int
    needed: float
    head_start: float
    message: str
    retry_after: int

    def covers(self, steps: int, left: float, head_start: float) -> bool:
        return steps >= self.steps and left < self.needed and head_start <= self.head_start


class Queue(Generic[W]):
    """The sequences of one model, in the order in which they are due. used: seconds of turns that it has had, on the scheduler's count;
    reach: how many steps of its longest row a turn takes in the mean; cost: of its turns, as of the last one; refused: since then."""

    __slots__ = ("cost", "lines", "reach", "refused", "serial", "steps", "used")

    def __init__(self, cost: Cost, used: float) -> None:
        self.lines: list[W] = []
        self.steps = 0
        self.used = used
        self.reach = 0.0
        self.price(cost)

    def price(self, cost: Cost) -> None:
        self.refused: Refused | None = None
        self.cost = cost
        self.serial = cost.fixed / LEAST_STEPS + cost.per_step + cost.per_token
        """Seconds of a step when no two rows run side by side: beside the cost of one turn for each, nothing takes longer."""

    def insert(self, one: W) -> None:
        lines = self.lines
        # Most come in order: a search takes longer than a look.
        if not lines or lines[-1].due <= one.due:
            lines.append(one)
        else:
            insort(lines, one, key=_due)
        self.steps += one.left


def _endless(model: ModelKey) -> int:
    """Room without end."""
    return ENDLESS


class Scheduler(Generic[W]):
    """A bounded queue per model and the rule by which turns are taken from it.

    cost: what a turn of a model is expected to take. room: how many more sequences of a model may begin to be kept from turn to turn.
    """

    def __init__(self, limits: Limits, cost: Callable[[ModelKey], Cost], room: Callable[[ModelKey], int] = _endless) -> None:
        self._limits = limits
        self._cost = cost
        self._room = room
        self._queues: dict[ModelKey, Queue[W]] = {}
        self._soonest = math.inf
        """No deadline in any queue is sooner."""
        self._used = 0.0
        """Of the model that had the last turn: who comes anew begins there, and has no claim for the time before."""
        self.waiting = 0
        """Sequences of which nothing has run."""
        self.begun = 0
        """Sequences of which some has run, and some is left."""

    def add(self, model: ModelKey, sequences: list[W], *, now: float, busy: float = 0.0) -> None:
        """Queue all sequences of one request, or none: raises Overloaded when they do not fit, or cannot be in time behind what is there,
        DeadlineExceeded when they could not alone. busy: seconds that the turns in flight still take."""
        if self.waiting + len(sequences) > self._limits.max_waiting:
            raise Overloaded(
                f"{self.waiting} sequences wait, this request has {len(sequences)} and "
                f"SEQSERVE_MAX_WAITING is {self._limits.max_waiting}: retry later, or raise SEQSERVE_MAX_WAITING",
                retry_after=1,
            )
        if not sequences:
            return
        queue = self._queues.get(model) or Queue[W](self._cost(model), self._used)
        if busy or self._queues:
            self._check_deadline(model, queue, sequences, now, busy)
        self._queues[model] = queue
        for one in sequences:
            one.arrived, one.due = now, self._due(queue.cost, one, one.left, now)
            queue.insert(one)
        self._soonest = min(self._soonest, sequences[0].deadline)
        self.waiting += len(sequences)

    def holds(self, model: ModelKey) -> bool:
        """Whether anything of it waits, or has begun and is not done."""
        return model in self._queues

    def waiting_by_model(self) -> dict[ModelKey, int]:
        """Sequences of which nothing has run."""
        return {model: sum([not one.taken for one in queue.lines]) for model, queue in self._queues.items()}

    def drop(self, sequences: list[W]) -> int:
        """Take what still waits of these out of the queue; returns how many there were. All are of one request."""
        gone = {id(one) for one in sequences}
        return len(self._take(lambda one: id(one) in gone))

    def drop_late(self, now: float) -> list[W]:
        """Take out and return what has passed its deadline, so that nothing more is computed for it."""
        if now < self._soonest:
            return []
        late = self._take(lambda one: one.deadline <= now)
        self._soonest = min((one.deadline for queue in self._queues.values() for one in queue.lines), default=math.inf)
        return late

    def backlog_seconds(self) -> float:
        """What all that is in the queues is expected to take."""
        return sum(self._seconds(queue, len(queue.lines), queue.steps) for queue in self._queues.values())

    def next_batch(self) -> tuple[ModelKey, list[Cut[W]]] | None:
        """The model whose turn it is, and what of which sequences runs; None when nothing waits that can run now."""
        for model in sorted(self._queues, key=self._claim) if len(self._queues) > 1 else list(self._queues):
            queue = self._queues[model]
            queue.price(self._cost(model))
            taken = self._fitting(model, queue)
            if taken:
                longest = max([cut.steps for cut in taken])
                self._used = queue.used
                queue.used += queue.cost.of(longest, sum([cut.steps for cut in taken]))
                queue.reach += NEWEST * (longest - queue.reach) if queue.reach else longest
                self._advance(model, queue, taken)
                return model, taken
        return None

    def _claim(self, model: ModelKey) -> float:
        """Who has had the least runs next; a level of priority is worth as much here as it is within a queue."""
        queue = self._queues[model]
        return queue.used - queue.lines[0].head_start

    def _fitting(self, model: ModelKey, queue: Queue[W]) -> list[Cut[W]]:
        """The longest-due sequences that may run together, at least one if any may, however long it is."""
        limits = self._limits
        first = list(islice((one for one in queue.lines if one.ready), limits.max_batch_sequences))
        if not first:
            return []
        steps, most = self._steps(first, queue.cost), _rounded(first[0].left)
        taken: list[Cut[W]] = []
        tokens, longest, room = 0, 0, -1
        for one in queue.lines:
            if not one.ready:
                continue
            mine = min(one.left, steps) if one.cuts else one.left
            if not one.taken and (one.stateful or mine < one.left):
                room = self._room(model) if room < 0 else room
                if room == 0:
                    continue
                room -= 1
            if taken:
                if tokens + mine > limits.max_batch_tokens or len(taken) == limits.max_batch_sequences:
                    break
                # What cannot be cut may not hold up shorter ones beyond the budget; first in line, it runs with its like.
                if mine > max(most, steps) and queue.cost.of(max(longest, mine), tokens + mine) > limits.batch_seconds:
                    continue
            tokens, longest = tokens + mine, max(longest, mine)
            taken.append(Cut(one, mine, not one.taken, mine == one.left))
        return taken

    def _steps(self, ready: list[W], cost: Cost) -> int:
        """K: the most steps that a turn takes of a sequence which may be cut."""
        if not self._limits.continuous:
            return ENDLESS
        within = max(LEAST_STEPS, cost.steps_within(self._limits.batch_seconds, len(ready)))
        shortest = _rounded(min([one.left for one in ready]))
        return min(within, max(shortest, cost.steps_at_pace(PACE, within, len(ready))))

    def _advance(self, model: ModelKey, queue: Queue[W], taken: list[Cut[W]]) -> None:
        """What was taken has run, as far as this queue goes."""
        done = 0
        for cut in taken:
            one = cut.of
            queue.steps -= cut.steps
            one.left -= cut.steps
            one.taken = True
            done += cut.last
            self.waiting -= cut.first
            self.begun += (not cut.last) - (not cut.first)
        if done == len(queue.lines):
            self._leave(model)
        elif done:
            # They are among the first, as a rule: who waits behind them is not looked at.
            seen = queue.lines.index(taken[-1].of) + 1
            queue.lines[:seen] = [one for one in queue.lines[:seen] if one.left]

    def _leave(self, model: ModelKey) -> None:
        """A model without sequences has no claim: when it comes back it begins where the others are."""
        del self._queues[model]

    def _take(self, unwanted: Callable[[W], bool]) -> list[W]:
        """Out of all queues."""
        gone: list[W] = []
        for model, queue in list(self._queues.items()):
            found = [one for one in queue.lines if unwanted(one)]
            if found:
                queue.lines = [one for one in queue.lines if not unwanted(one)]
                queue.steps -= sum([one.left for one in found])
                queue.refused = None
                gone += found
                if not queue.lines:
                    self._leave(model)
        begun = sum([one.taken for one in gone])
        self.begun -= begun
        self.waiting -= len(gone) - begun
        return gone

    # What is expected.

    def _due(self, cost: Cost, one: W, steps: int, now: float) -> float:
        """When a sequence of so many steps that comes now is due."""
        if not self._limits.continuous:
            return now - one.head_start
        alone = cost.of(steps, steps)
        return now - one.head_start + max(0.0, min(STRETCH * alone, one.deadline - now - SLACK * alone))

    def _seconds(self, queue: Queue[W], rows: int, steps: int, longest: int = 0) -> float:
        """Of so many sequences of one model with so many steps together, the longest as long as that if not as the mean."""
        cost, most = queue.cost, self._limits.max_batch_sequences
        longest = max(longest, steps // max(1, rows))
        # One after the other in every row, and the longest last.
        each = longest if rows <= most else (steps - longest) // most + longest
        side_by_side = min(rows, most)
        batches = max(-(-rows // most), -(-each // self._reach(queue, side_by_side)))
        return cost.fixed * batches + (cost.per_step + cost.per_token * side_by_side) * each

    def _reach(self, queue: Queue[W], rows: int) -> int:
        """How many steps a turn is likely to take: as of late, or as the budget allows."""
        if not self._limits.continuous:
            return ENDLESS
        return int(queue.reach) or max(LEAST_STEPS, queue.cost.steps_within(self._limits.batch_seconds, rows))

    def _check_deadline(self, model: ModelKey, queue: Queue[W], sequences: list[W], now: float, busy: float) -> None:
        first, steps = sequences[0], sum([one.left for one in sequences])
        left = first.deadline - now
        if queue.refused is not None and queue.refused.covers(steps, left, first.head_start):
            # Where far too much is asked for, refusing must cost little.
            raise Overloaded(queue.refused.message, retry_after=queue.refused.retry_after)
        serial = len(sequences) * queue.cost.fixed + steps * queue.serial
        for other in self._queues.values():
            serial += len(other.lines) * other.cost.fixed + other.steps * other.serial
        if (CAUTION + STRETCH) * (busy + serial) <= left:
            return
        longest = max([one.left for one in sequences])
        due = self._due(queue.cost, first, longest, now)
        expected = busy + self._expected(model, queue, len(sequences), steps, longest, due)
        # Until it is due, those who come after it may have its place in a turn.
        full = len(queue.lines) >= self._limits.max_batch_sequences
        needed = CAUTION * expected + (max(0.0, due - now) if full else 0.0)
        if needed <= left:
            return
        alone = self._seconds(queue, len(sequences), steps, longest)
        if CAUTION * alone > left:
            raise DeadlineExceeded(
                f"it takes about {alone:.3g} s alone and its deadline is in {left:.3g} s: allow it more time"
            )
        message = (
            f"an answer is expected in {expected:.3g} s and the deadline is in {left:.3g} s: retry later, or allow it more time"
        )
        queue.refused = Refused(steps, needed, first.head_start, message, math.ceil(expected))
        raise Overloaded(message, retry_after=queue.refused.retry_after)

    def _expected(self, model: ModelKey, queue: Queue[W], rows: int, steps: int, longest: int, due: float) -> float:
        """Until so many sequences have run of which the last is due then: with what is due before it of their own model, and of each other
        model no more than as long again."""
        ahead = bisect_right(queue.lines, due, key=_due)
        before = queue.steps - sum([one.left for one in queue.lines[ahead:]])
        own = self._seconds(queue, rows + ahead, steps + before, longest)
        others = [
            min(own, self._seconds(other, len(other.lines), other.steps)) for key, other in self._queues.items() if key != model
        ]
        return own + sum(others)


def _rounded(steps: int) -> int:
    """To a power of two, and LEAST_STEPS at least."""
    return max(LEAST_STEPS, 1 << (steps - 1).bit_length())


def _due(waiting: Waiting) -> float:
    return waiting.due
