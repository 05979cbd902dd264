"""Requests beyond the quotas of their key are refused, and the error names the quota."""

from __future__ import annotations

import pytest

from service.access.caller import Caller, Quotas
from service.access.scopes import Scope
from service.errors import QuotaExceeded
from service.frontend.quotas import QuotaLedger
from service.ipc.messages import Share
from service.ipc.quota_counts import QuotaCounts
from service.metrics import Metrics


class Ledger(QuotaLedger):
    """A ledger with a clock that the test moves."""

    def __init__(self) -> None:
        self.now, self.metrics = 100.0, Metrics()
        super().__init__(QuotaCounts.private(), self.metrics, lambda: self.now)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def caller(name: str = "reader", **quotas: int) -> Caller:
    return Caller(name, Share("sales"), frozenset((Scope.INFER,)), 0, quotas=Quotas(**quotas))


def test_rate_of_requests_is_limited(ledger: Ledger) -> None:
    """Refused requests do not count."""
    limited = caller(requests_per_second=5)
    for _ in range(5):
        ledger.begin(limited, 1, 10)
    for _ in range(50):
        with pytest.raises(QuotaExceeded, match="max_requests_per_second is 5") as refused:
            ledger.begin(limited, 1, 10)
    assert refused.value.retry_after == 1
    ledger.begin(caller("other", requests_per_second=5), 1, 10)
    ledger.now += 1.5
    for _ in range(2):
        ledger.begin(limited, 1, 10)
    with pytest.raises(QuotaExceeded):
        ledger.begin(limited, 1, 10)


def test_sequences_in_flight_are_limited(ledger: Ledger) -> None:
    limited = caller(sequences_in_flight=4)
    end = ledger.begin(limited, 3, 10)
    with pytest.raises(QuotaExceeded, match=r"has 3 sequences in flight, this request adds 2 .*max_sequences_in_flight is 4"):
        ledger.begin(limited, 2, 10)
    end()
    ledger.begin(limited, 4, 10)


def test_bytes_are_limited_and_refusals_are_counted(ledger: Ledger) -> None:
    """A request above the quota is asked not to retry."""
    limited = caller(bytes_per_second=100, sequences_in_flight=2)
    ledger.begin(limited, 1, 60)
    with pytest.raises(QuotaExceeded, match=r"has 60 bytes a second, this request adds 60 .*max_bytes_per_second is 100"):
        ledger.begin(limited, 1, 60)
    ledger.begin(limited, 1, 40)
    with pytest.raises(QuotaExceeded, match="send less at once") as refused:
        ledger.begin(caller(bytes_per_second=100), 1, 101)
    assert refused.value.retry_after is None
    quotas = {"max_requests_per_second": 0, "max_bytes_per_second": 2, "max_sequences_in_flight": 0}
    counted = {labels: values[0] for labels, values in ledger.metrics.quota_exceeded.values.items()}
    assert counted == {("sales", "reader", quota): count for quota, count in quotas.items()}
