"""Tenants share the device by weight, whatever they send. Time is an argument: no test waits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from service.engine.batching import fair_shares
from service.engine.batching.fair_shares import TENANT_SHARE
from service.engine.batching.scheduler import Scheduler
from service.engine.execution.cost_model import Cost
from service.errors import Overloaded
from service.ipc.messages.inference import NO_TENANT, Share
from service.ipc.messages.models import ModelKey
from tests.engine.batching import harness as fakes
from tests.engine.batching.harness import MODEL, NEVER, OTHER, block

NOISY, QUIET, HEAVY = Share("noisy"), Share("quiet"), Share("heavy", weight=3.0)
ROW_COST = Cost(0.0, 0.0, 1.0)
"""One second per step of each row."""


def scheduler(**options: Any) -> Scheduler:
    return fakes.scheduler(**{"max_waiting": 1000, "max_batch_tokens": 10_000} | options)


def add(
    to: Scheduler,
    share: Share,
    count: int = 1,
    *,
    steps: int = 1,
    now: float = 0.0,
    deadline: float = NEVER,
    **options: Any,
) -> None:
    """Add blocks of one request each; raises a refusal. options: of the blocks."""
    for _ in range(count):
        for refused in to.add_block(block([(1, deadline, [steps])], share=share, **options), now=now):
            raise refused.error


def batch(of: Scheduler) -> Counter[str]:
    """Return how many sequences of each tenant the next batch has."""
    taken = of.next_batch()
    assert taken is not None
    assert not taken.pieces
    return Counter([made.share.tenant for made in taken.blocks for _ in range(made.sequences)])


def test_long_queue_of_one_tenant_does_not_delay_another() -> None:
    queue = scheduler()
    add(queue, NOISY, 100)
    add(queue, QUIET, 3, now=1.0)
    assert batch(queue) == {"quiet": 3, "noisy": 5}


def test_device_is_shared_by_weight() -> None:
    """A longer sequence costs its tenant more."""
    queue = scheduler(cost=ROW_COST)
    add(queue, NOISY, 100, steps=2)
    add(queue, HEAVY, 200)
    served = sum((batch(queue) for _ in range(20)), Counter())
    assert served["heavy"] == pytest.approx(6 * served["noisy"], abs=6)


def test_tenant_that_returns_has_no_credit() -> None:
    """A tenant gets no more than its share after a time without requests."""
    queue = scheduler()
    add(queue, QUIET)
    batch(queue)
    for _ in range(50):
        add(queue, NOISY, 8)
        batch(queue)
    for share in (NOISY, QUIET):
        add(queue, share, 100)
    served: Counter[str] = Counter()
    for _ in range(10):
        served += batch(queue)
    assert served["quiet"] == pytest.approx(40, abs=4), "no more credit than one batch"


def test_priority_counts_within_the_requests_of_a_tenant() -> None:
    queue = scheduler(max_batch_sequences=2)
    add(queue, NOISY, 20, priority=10)
    add(queue, QUIET, 1)
    assert batch(queue) == {"noisy": 1, "quiet": 1}


def test_models_do_not_multiply_the_share_of_a_tenant() -> None:
    """One tenant uses two models: the other still has half of the time."""
    queue = scheduler(max_batch_sequences=1)
    for model in (MODEL, OTHER):
        add(queue, NOISY, 50, model=model)
    add(queue, QUIET, 50, model=ModelKey("third", "1"))
    served = sum((batch(queue) for _ in range(40)), Counter())
    assert served == {"noisy": 20, "quiet": 20}


def test_tenant_cannot_take_all_places_in_the_queue() -> None:
    """Its first request may be as large as the queue."""
    queue, empty = scheduler(max_waiting=64), scheduler(max_waiting=64)
    assert not empty.add_block(block([(1, NEVER, [1] * 64)], share=QUIET), now=0.0) and empty.waiting == 64
    add(queue, NOISY, round(TENANT_SHARE * 64))
    with pytest.raises(Overloaded, match="56 sequences of this tenant wait"):
        add(queue, NOISY)
    add(queue, QUIET, 7)
    with pytest.raises(Overloaded, match="7 sequences of this tenant wait"):
        add(queue, QUIET)
    add(queue, HEAVY)
    with pytest.raises(Overloaded, match="64 sequences wait"):
        add(queue, NO_TENANT)


def test_queue_of_another_tenant_refuses_no_deadline() -> None:
    """Nor do refusals of another tenant. The noisy tenant's queue takes 50 s. Its blocks are refused as a whole."""
    queue = scheduler(cost=ROW_COST, max_batch_sequences=1)
    add(queue, NOISY, 50)
    with pytest.raises(Overloaded):
        add(queue, NOISY, deadline=11.0)
    add(queue, QUIET, 2, deadline=11.0)
    with pytest.raises(Overloaded):
        add(queue, QUIET, 5, deadline=11.0)
    [refused] = queue.add_block(block([(1, 10.0, [1]), (2, 10.0, [1])], share=NOISY), now=0.0)
    assert refused.ids == [1, 2]
    assert queue.add_block(block([(3, 11.0, [1])], share=HEAVY), now=0.0) == []


def test_batch_keeps_the_budget_while_tenants_compete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_shares, "MEMORY", 3)
    queue = scheduler(cost=ROW_COST, batch_seconds=3.0)
    add(queue, NOISY, 40)
    assert batch(queue)["noisy"] == 8, "alone, a full batch is the fastest"
    add(queue, QUIET)
    assert batch(queue) == {"quiet": 1, "noisy": 2}
    assert batch(queue) == {"noisy": 3}, "the other tenant may return at any time"
    assert [batch(queue) for _ in range(3)] == 3 * [{"noisy": 3}]
    assert batch(queue) == {"noisy": 8}, "it has been away for a while"
