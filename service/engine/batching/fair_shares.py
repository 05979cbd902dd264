"""Shares the device between tenants, by start-time fair queueing. Pure: nothing here knows a clock.

A tenant pays for its sequences what they would cost alone, divided by its weight. The tenant that has paid the least runs next. No share is
reserved: a tenant alone has the whole device. A tenant that returns starts at the level of the others, so it earns no credit while it has
no requests. (P. Goyal, H. Vin and H. Cheng, Start-time Fair Queueing, SIGCOMM 1996.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from service.engine.batching.model_queue import ModelQueue
from service.engine.batching.tenant_queue import LEFT, ORDER
from service.ipc.messages.inference import Share

TENANT_SHARE = 0.875
"""Of the places that the other tenants leave, in the queue and among the sessions, a tenant that has places takes at most this share."""
MEMORY = 1000
"""Tenants compete until this many batches in a row were of one tenant."""


@dataclass(slots=True)
class _Account:
    """What a tenant has paid."""

    weight: float
    paid: float


class FairShares:
    """The accounts of all tenants of an engine. The keys of the service bound their number."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._level = 0.0
        """The least that any tenant with requests had paid, at the last batch."""
        self._batches = 0
        self._newest = ""
        """The tenant that was the last to send a request or to be in a batch."""
        self._last_change = -MEMORY
        """The number of the batch at which this tenant last changed."""

    def arrive(self, share: Share, *, waits: bool) -> None:
        """Note a request. waits: whether others of its tenant are queued."""
        account = self._accounts.get(share.tenant)
        if account is None:
            account = self._accounts[share.tenant] = _Account(share.weight, self._level)
        elif not waits and account.paid < self._level:
            account.paid = self._level
        account.weight = share.weight
        if share.tenant != self._newest:
            self._note(share.tenant)

    @property
    def contested(self) -> bool:
        """Whether more than one tenant sent requests lately."""
        return self._batches - self._last_change < MEMORY

    def least_paid(self, tenants: Iterable[str]) -> float:
        """Return the smallest amount that a tenant has paid."""
        return min([self._accounts[tenant].paid for tenant in tenants])

    def start_batch(self, queues: Iterable[ModelQueue]) -> None:
        """Note that a batch starts. queues: all that have requests."""
        self._batches += 1
        if len(self._accounts) == 1:
            [account] = self._accounts.values()
            self._level = account.paid
        else:
            self._level = max(self._level, self.least_paid({tenant for queue in queues for tenant in queue.tenants}))

    def charge(self, tenant: str, price: float) -> None:
        """Charge a tenant for sequences of the batch that starts."""
        account = self._accounts[tenant]
        account.paid += price / account.weight
        if tenant != self._newest:
            self._note(tenant)

    def _note(self, tenant: str) -> None:
        if self._newest:
            self._last_change = self._batches
        self._newest = tenant

    def work_of_others(self, queue: ModelQueue, share: Share, price: float) -> tuple[int, int]:
        """Return the sequences and steps of other tenants that run until a tenant's work of this price has run."""
        count = steps = 0
        for tenant, work in queue.tenants.items():
            if tenant != share.tenant:
                theirs = queue.price(work.count, work.steps)
                allowed = price * self._accounts[tenant].weight / share.weight
                part = allowed / theirs if allowed < theirs else 1.0
                count, steps = count + ceil(part * work.count), steps + ceil(part * work.steps)
        return count, steps

    def in_turn(self, queue: ModelQueue) -> NDArray[np.int64]:
        """Return the order in which the sequences of a queue run: each request from the tenant that will have paid the least when the
        requests before it have run. A sequence counts by its place in the joined tables of `queue.tenants`.
        """
        paid: list[NDArray[np.float64]] = []
        for tenant, work in queue.tenants.items():
            account, table = self._accounts[tenant], work.table()
            prices = queue.cost.fixed + table[:, LEFT] * (queue.cost.per_step + queue.cost.per_token)
            before = prices.cumsum() - prices
            is_first = np.ones(len(table), bool)
            is_first[1:] = table[1:, ORDER] != table[:-1, ORDER]
            # All sequences of a request run at the turn of its first.
            paid.append(account.paid + np.maximum.accumulate(np.where(is_first, before, 0.0)) / account.weight)
        order: NDArray[np.int64] = np.concatenate(paid).argsort(kind="stable")
        return order
