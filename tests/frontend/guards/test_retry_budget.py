"""Which refusals for overload ask their clients not to retry."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import grpc
import numpy as np
import pytest

from loadtest import oip_requests
from service.errors import EngineLost, OutOfMemory, Overloaded, QuotaExceeded, ServiceError
from service.frontend.grpc.wire import error_status
from service.frontend.guards.retry_budget import LEAST_PER_SECOND, MOST_SAVED, REPEATED_SECONDS, SHARE, RetryBudget
from service.metrics import Metrics
from tests.frontend.in_process import in_process
from tests.retries import MOST_ATTEMPTS, RETRIES

HOT, GENERAL = {"content-type": "application/json"}, {"content-type": "application/vnd.seqserve+json"}
"""Media types whose requests take the hot path, and the general path."""
ROW = [0.1, 0.2, 0.3]


class Budget(RetryBudget):
    """A budget with a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.metrics = Metrics()
        super().__init__(self.metrics, lambda: self.now)

    def refuse(self, kind: type[ServiceError] = Overloaded, retry_after: int = 1) -> ServiceError:
        """Return the error of a refused request."""
        error = kind("retry later", retry_after=retry_after)
        self.charge(error)
        return error

    def spend(self) -> int:
        """Return how many retries the budget invites until it is spent."""
        return sum(1 for _ in iter(lambda: self.refuse().final, True))


@pytest.fixture
def budget() -> Budget:
    return Budget()


def test_refusals_of_an_idle_service_invite_retries(budget: Budget) -> None:
    assert budget.spend() == MOST_SAVED
    budget.now += 3 / LEAST_PER_SECOND
    assert budget.spend() == 3
    budget.answered += 1_000_000
    budget.now += 1_000_000
    assert budget.spend() == MOST_SAVED, "no more are saved up"


def test_retries_are_a_share_of_the_answered_requests(budget: Budget) -> None:
    budget.spend()
    invited, chance = 0, Random(0)
    for _ in range(20_000):
        if chance.random() < 0.5:
            budget.answered += 1
        else:
            invited += not budget.refuse().final
    assert invited == pytest.approx(SHARE * 10_000, rel=0.03)
    assert budget.metrics.retries_discouraged.values[()] == [pytest.approx(9_000, rel=0.03)]


def test_clients_beyond_the_budget_wait_for_different_times(budget: Budget) -> None:
    budget.spend()
    least, most = REPEATED_SECONDS
    assert {budget.refuse().retry_after for _ in range(500)} == set(range(least, most + 1))
    assert budget.refuse(retry_after=60).retry_after == 60, "a longer predicted wait is kept"
    for kind in (EngineLost, QuotaExceeded):
        error = budget.refuse(kind)
        assert (error.final, error.retry_after) == (False, 1), "other errors are not changed"


def test_final_error_forbids_retries_over_grpc(budget: Budget) -> None:
    assert "grpc-retry-pushback-ms" not in dict(error_status(budget.refuse(OutOfMemory)).metadata)
    budget.spend()
    assert dict(error_status(budget.refuse(OutOfMemory)).metadata)["grpc-retry-pushback-ms"] == "-1"


def test_clients_of_a_full_service_are_asked_to_give_up(models_folder: Path, tmp_path: Path) -> None:
    """Over HTTP on both paths, and over gRPC, whose library makes the retries. The first clients may retry."""
    message, body = oip_requests.message("sensors", np.zeros((1, 1, 3), np.float32)), {"model": "sensors", "inputs": [[ROW]]}
    with in_process(models_folder, tmp_path) as full:
        full.engine.refusal = Overloaded("the queue is full", retry_after=1)
        with grpc.insecure_channel(full.grpc, options=[("grpc.service_config", json.dumps(RETRIES))]) as channel:

            def refusal() -> grpc.RpcError:
                with pytest.raises(grpc.RpcError) as refused:
                    channel.unary_unary(oip_requests.PATH)(message, timeout=20)
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
                return refused.value

            refusal()
            assert full.metric("seqserve_requests_accepted_total") == MOST_ATTEMPTS
            while ("grpc-retry-pushback-ms", "-1") not in refusal().trailing_metadata():
                pass
        for headers in (HOT, GENERAL):
            while int(full.client.post("/infer", json=body, headers=headers).headers["retry-after"]) < REPEATED_SECONDS[0]:
                pass
        assert full.metric("seqserve_retries_discouraged_total") >= 3
