"""Admits requests to the queues of an engine: the queues are bounded, and a request that would miss its deadline is rejected when it
arrives, by the predicted cost of the work queued before it.

Pure: the time is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from service.engine.batching.due import STRETCH
from service.engine.batching.fair_shares import TENANT_SHARE, FairShares
from service.engine.batching.model_queue import ModelQueue, WorkByDue
from service.engine.batching.request_block import LONGEST, SEQUENCES, STEPS, QueuedBlock
from service.engine.batching.selection import LEAST_STEPS, UNLIMITED, SchedulerLimits, steps_within_budget
from service.engine.batching.tenant_queue import Rejection
from service.engine.execution.cost_model import Cost, FloatOrArray
from service.errors import DeadlineExceeded, Overloaded, ServiceError
from service.ipc.messages.inference import Share
from service.ipc.messages.models import ModelKey

CAUTION = 1.5
"""A request is admitted if this multiple of its expected time fits before its deadline: no prediction knows the pauses of a host."""


class RefusedRequests(NamedTuple):
    """Requests of a block that were refused for one reason."""

    ids: list[int]
    error: ServiceError


class ArrivingRequest(NamedTuple):
    """The values that the deadline check of one request needs, as in QueuedBlock."""

    share: Share
    sequences: int
    steps: int
    longest: int
    deadline: float
    head_start: float
    requests: int = 1


def _by_reason(block: QueuedBlock, refused: Sequence[tuple[Sequence[int], ServiceError]]) -> list[RefusedRequests]:
    """Return the ids of the refused requests, together if they have the same error. refused: indices of requests, and their error."""
    reasons: dict[tuple[str, str], RefusedRequests] = {}
    for indices, error in refused:
        if indices:
            reason = reasons.setdefault((error.code, error.message), RefusedRequests([], error))
            reason.ids.extend([block.ids[index] for index in indices])
    return list(reasons.values())


class Admission:
    """A bounded queue per model, and the policy that admits requests. cost: returns the predicted cost of a model's batches."""

    def __init__(self, limits: SchedulerLimits, cost: Callable[[ModelKey], Cost]) -> None:
        self._limits = limits
        self._cost = cost
        self._queues: dict[ModelKey, ModelQueue] = {}
        self._shares = FairShares()
        self.earliest_deadline = math.inf
        """Lower bound of all queued deadlines."""
        self._used = 0.0
        """`used` of the model that ran last. A new queue starts here: a model earns no credit while it has no requests."""
        self._arrivals = 0
        """Number of requests so far."""
        self.waiting = 0
        """Sequences that have not begun."""
        self.begun = 0
        """Sequences that have begun and have steps left."""

    def add_block(self, block: QueuedBlock, *, now: float, busy: float = 0.0) -> list[RefusedRequests]:
        """Queue the requests of a block, as if each arrived alone, in turn. Returns the refused requests."""
        model, tenant = block.model, block.share.tenant
        queue = self._queues.get(model) or ModelQueue(model, self._cost(model), self._used)
        queue.divisible = block.divisible
        block.arrive(now, self._arrivals, queue.cost)
        self._arrivals += block.requests
        is_alone = block.requests == 1 and not busy and not self._queues
        has_room = block.sequences <= self._free_places(block.share, block.requests)
        in_time = is_alone or self._sure_seconds(queue, block, block.sequences, block.steps, busy) <= block.deadline - now
        if has_room and in_time and queue.rejections.get(tenant) is None:
            self._count(queue, block)
            queue.tenants[tenant].arrived.append(block)
            return []
        error = self._refusal_of_all(block, queue, now)
        if error is not None:
            return [RefusedRequests(block.ids, error)]
        refused = self._accept(block, queue, now, busy)
        left = block.without([index for indices, _ in refused for index in indices])
        if left is not None:
            queue.tenants[tenant].arrived.append(left)
        return _by_reason(block, refused)

    def holds(self, model: ModelKey) -> bool:
        """Return whether any sequence of this model has steps left."""
        return model in self._queues

    def waiting_by_model(self) -> dict[ModelKey, int]:
        return {
            model: queue.count - sum([work.begun for work in queue.tenants.values()]) for model, queue in self._queues.items()
        }

    def backlog_seconds(self) -> float:
        """Return the predicted time of all queued work."""
        return sum(self._seconds(queue, queue.count, queue.steps) for queue in self._queues.values())

    # Arrivals.

    def _count(self, queue: ModelQueue, request: ArrivingRequest | QueuedBlock) -> None:
        """Count a request that is queued."""
        self._queues[queue.model] = queue
        self.earliest_deadline = min(self.earliest_deadline, request.deadline)
        tenant = request.share.tenant
        waits = tenant in queue.tenants or (
            len(self._queues) > 1 and any(tenant in other.tenants for other in self._queues.values())
        )
        self._shares.arrive(request.share, waits=waits)
        self.waiting += request.sequences
        if request.longest > queue.longest:
            queue.longest = request.longest
        queue.count_work(tenant, request.sequences, request.steps)

    def _accept(
        self, block: QueuedBlock, queue: ModelQueue, now: float, busy: float
    ) -> list[tuple[Sequence[int], ServiceError]]:
        """Accept requests of a block and count them as queued. Returns the indices of the others, with their errors."""
        tenant = block.share.tenant
        refused: list[tuple[Sequence[int], ServiceError]] = []
        work = WorkByDue(queue, block)
        if block.requests == 1:
            error = self._accept_one(block, 0, queue, now, busy, work)
            return [] if error is None else [([0], error)]
        begin = self._accept_first(block, queue, now, busy)
        work.accept(slice(begin))
        time_left = block.deadlines - now
        while begin < block.requests:
            # Under heavy overload a refusal must cost little: most requests share the reason of an earlier one.
            rejection, end = queue.rejections.get(tenant), block.requests
            covered = np.zeros(end - begin, bool)
            if rejection is not None:
                covered = rejection.covers(block.sizes[begin:, STEPS], time_left[begin:], block.head_start)
            uncovered = begin + np.flatnonzero(~covered)
            for place in range(len(uncovered)):
                if self._free_places(block.share) < 1:
                    counts = block.counts[uncovered[place:]]
                    for count in set(counts.tolist()):
                        full = uncovered[place:][counts == count].tolist()
                        refused.append((full, self._queue_full(block.share, count)))
                    break
                index = int(uncovered[place])
                error = self._accept_one(block, index, queue, now, busy, work)
                if error is None:
                    work.accept(index)
                    continue
                refused.append(([index], error))
                if queue.rejections.get(tenant) is not rejection:
                    # The new rejection may cover the requests behind it.
                    end = index + 1
                    break
            if rejection is not None:
                refused.append(((begin + np.flatnonzero(covered[: end - begin])).tolist(), rejection.error()))
            begin = end
        return refused

    def _accept_one(
        self, block: QueuedBlock, index: int, queue: ModelQueue, now: float, busy: float, work: WorkByDue
    ) -> ServiceError | None:
        """Accept one request of a block and count it as queued, or return the error."""
        count, steps, longest = block.sizes[index].tolist()
        deadline = float(block.deadlines[index])
        request = ArrivingRequest(block.share, count, steps, longest, deadline, block.head_start)
        error = self._refusal(queue, request, float(block.due[index]), now, busy, work)
        if error is None:
            self._count(queue, request)
        return error

    def _accept_first(self, block: QueuedBlock, queue: ModelQueue, now: float, busy: float) -> int:
        """Accept the first requests that have room and surely keep their deadlines: see `_sure_seconds`. Returns their number."""
        places, rejection = self._free_places(block.share, block.requests), queue.rejections.get(block.share.tenant)
        counts, steps = block.sizes[:, SEQUENCES].cumsum(), block.sizes[:, STEPS].cumsum()
        sure = (counts <= places) & (self._sure_seconds(queue, block, counts, steps, busy) <= block.deadlines - now)
        if rejection is not None:
            sure &= ~rejection.covers(block.sizes[:, STEPS], block.deadlines - now, block.head_start)
        end = block.requests if sure.all() else int(sure.argmin())
        if end:
            longest, deadline = int(block.sizes[:end, LONGEST].max()), float(block.deadlines[:end].min())
            work = int(counts[end - 1]), int(steps[end - 1]), longest
            self._count(queue, ArrivingRequest(block.share, *work, deadline, block.head_start, end))
        return end

    def _refusal_of_all(self, block: QueuedBlock, queue: ModelQueue, now: float) -> ServiceError | None:
        """Return the error that all requests of a block share, or None if each needs a check. A rejection precedes the full queue."""
        rejection = queue.rejections.get(block.share.tenant)
        if rejection is None:
            full = block.sequences == block.requests and self._free_places(block.share) < 1
            return self._queue_full(block.share, 1) if full else None
        latest = block.deadline if block.requests == 1 else float(block.deadlines.max())
        return rejection.error() if rejection.covers(block.shortest, latest - now, block.head_start) else None

    # Predictions.

    def _seconds(self, queue: ModelQueue, count: int, steps: int, longest: int = 0) -> float:
        """Return the predicted time of `count` sequences of one model that have `steps` steps together.

        longest: steps of the longest sequence, if it is longer than the mean.
        """
        cost, max_sequences = queue.cost, self._limits.max_batch_sequences
        longest = max(longest, steps // max(1, count))
        # Sequences follow each other in each row of the batch, and the longest comes last.
        steps_per_row = longest if count <= max_sequences else (steps - longest) // max_sequences + longest
        rows = min(count, max_sequences)
        # A batch is likely to take the recent mean of steps, before the first batch the steps that the budget allows.
        reach = int(queue.reach) or steps_within_budget(self._limits, rows, self._limits.max_batch_tokens // rows, cost)
        batches = max(-(-count // max_sequences), -(-steps_per_row // reach))
        return cost.fixed * batches + (cost.per_step + cost.per_token * rows) * steps_per_row

    def _free_places(self, share: Share, requests: int = 1) -> int:
        """Return the most sequences of a tenant for which the queue has room: see `_free_in_share`."""
        free = self._limits.max_waiting - self.waiting
        return min(free, self._free_in_share(share, requests)) if share.tenant else free

    def _free_in_share(self, share: Share, requests: int = 1) -> int:
        """Return the most sequences of a tenant that leave the other tenants room. Its first request, if it is alone, may have more."""
        if not share.tenant:
            return UNLIMITED
        waiting = self._waiting_of(share.tenant)
        if not waiting and requests == 1:
            return UNLIMITED
        others = self.waiting - waiting
        return math.floor(TENANT_SHARE * (self._limits.max_waiting - others)) - waiting

    def _waiting_of(self, tenant: str) -> int:
        """Return the number of sequences of a tenant that have not begun."""
        works = [queue.tenants[tenant] for queue in self._queues.values() if tenant in queue.tenants]
        return sum([work.count - work.begun for work in works])

    def _sure_seconds(
        self,
        queue: ModelQueue,
        arriving: ArrivingRequest | QueuedBlock,
        count: FloatOrArray,
        steps: FloatOrArray,
        busy: float,
    ) -> FloatOrArray:
        """Return an upper bound of what `_refusal` needs for sequences of a request or of a block, at little cost.

        count, steps: of the sequences; of many requests as arrays.
        """
        longest = arriving.longest
        most = longest if longest > queue.longest else queue.longest
        total = busy + self._most_seconds(queue, queue.count + count, queue.steps + steps, most)
        for queued in self._queues.values():
            if queued is not queue:
                total += self._most_seconds(queued, queued.count, queued.steps, queued.longest)
        return CAUTION * total + STRETCH * queue.cost.of(longest, longest) - min(0.0, arriving.head_start)

    def _most_seconds(self, queue: ModelQueue, count: FloatOrArray, steps: FloatOrArray, longest: int) -> FloatOrArray:
        """Return an upper bound of `_seconds`. longest: no sequence has more steps."""
        cost, rows = queue.cost, self._limits.max_batch_sequences
        steps_per_row = steps / rows + longest
        batches = count / rows + steps_per_row / (int(queue.reach) or LEAST_STEPS) + 2
        return cost.fixed * batches + (cost.per_step + cost.per_token * rows) * steps_per_row

    def _refusal(
        self,
        queue: ModelQueue,
        request: ArrivingRequest,
        due: float,
        now: float,
        busy: float,
        work: WorkByDue,
    ) -> ServiceError | None:
        """Return the error if a request would miss its deadline or the queue is full, None if it is accepted."""
        time_left = request.deadline - now
        rejection = queue.rejections.get(request.share.tenant)
        if rejection is not None and rejection.covers(request.steps, time_left, request.head_start):
            return rejection.error()
        if request.sequences > self._free_places(request.share, request.requests):
            return self._queue_full(request.share, request.sequences)
        if not busy and not self._queues:
            return None
        if self._sure_seconds(queue, request, request.sequences, request.steps, busy) <= time_left:
            return None  # even if everything in the queue is due before it
        expected = busy + self._expected_seconds(queue, request, due, work)
        # Until the due time, later arrivals may take this request's place in a full batch.
        full = queue.count >= self._limits.max_batch_sequences
        needed = CAUTION * expected + (max(0.0, due - now) if full else 0.0)
        if needed <= time_left:
            return None
        alone = self._seconds(queue, request.sequences, request.steps, request.longest)
        if CAUTION * alone > time_left:
            return DeadlineExceeded(
                f"the request takes about {alone:.3g} s alone and its deadline is in {time_left:.3g} s: allow more time"
            )
        message = f"an answer is expected in {expected:.3g} s and the deadline is in {time_left:.3g} s: retry later, or allow more time"
        rejection = Rejection(request.steps, needed, request.head_start, message, math.ceil(expected))
        if request.share.tenant in queue.tenants:
            queue.rejections[request.share.tenant] = rejection
        return rejection.error()

    def _queue_full(self, share: Share, count: int) -> Overloaded:
        limit = f"SEQSERVE_MAX_WAITING is {self._limits.max_waiting}: retry later, or raise SEQSERVE_MAX_WAITING"
        if count <= self._free_in_share(share):
            message = f"{self.waiting} sequences wait, this request has {count} and {limit}"
        else:
            message = (
                f"{self._waiting_of(share.tenant)} sequences of this tenant wait, this request has {count}, "
                f"one tenant takes at most {TENANT_SHARE:.1%} of the places that the others leave and {limit}"
            )
        return Overloaded(message, retry_after=1)

    def _expected_seconds(self, queue: ModelQueue, request: ArrivingRequest, due: float, work: WorkByDue) -> float:
        """Return the expected completion time of a request, including the work of its tenant and model that is due before it.

        Each other tenant adds its queued work, but at most what its weight allows. Each other model adds its queued work, but at most as
        much again: models share the device by time.
        """
        count_later, steps_later = work.later(due)
        queued = queue.tenants.get(request.share.tenant)
        count, steps = request.sequences - count_later, request.steps - steps_later
        if queued is not None:
            count, steps = count + queued.count, steps + queued.steps
        count_of_others, steps_of_others = self._shares.work_of_others(queue, request.share, queue.price(count, steps))
        seconds = self._seconds(queue, count + count_of_others, steps + steps_of_others, request.longest)
        others = [
            min(seconds, self._seconds(other, other.count, other.steps))
            for other in self._queues.values()
            if other is not queue
        ]
        return seconds + sum(others)
