"""Quotas of keys: the ledger, and every protocol. Requests beyond a quota are refused, and the error names the quota."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from websockets.sync.client import connect

from loadtest import oip_requests
from service.access.caller import Caller, Quotas
from service.access.scopes import Scope
from service.errors import QuotaExceeded
from service.frontend.guards.quotas import QuotaLedger
from service.ipc.messages.inference import Share
from service.ipc.quota_counts import QuotaCounts
from service.metrics import Metrics
from tests.frontend.conftest import Guarded, bearer
from tests.frontend.in_process import in_process
from tests.serving import eventually


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


# Every protocol.

ROW = [[1.0, 2.0, 3.0]] * 2
"""Two steps of the sensors: 24 bytes."""
TWO_ROWS = oip_requests.message("sensors", np.zeros((2, 2, 3), np.float32))


def infer(guarded: Guarded, name: str, *inputs: object, **headers: str) -> httpx.Response:
    body = {"model": "sensors", "inputs": inputs or [ROW]}
    return guarded.local.client.post("/infer", json=body, headers={**bearer(guarded.tenants[name]), **headers})


def call(guarded: Guarded, name: str) -> None:
    """Send two sequences of two steps over gRPC."""
    with grpc.insecure_channel(guarded.local.grpc) as channel:
        channel.unary_unary(oip_requests.PATH)(TWO_ROWS, metadata=list(bearer(guarded.tenants[name]).items()), timeout=60)


def tell(guarded: Guarded, name: str, *steps: int) -> list[dict[str, Any]]:
    """Send chunks of this many steps on a WebSocket, and return the replies."""
    url = guarded.address.replace("http", "ws") + "/stream?model=sensors"
    with connect(url, additional_headers=bearer(guarded.tenants[name]), proxy=None) as socket:
        for count in steps:
            socket.send(json.dumps({"input": ROW[:1] * count}))
        return [json.loads(socket.recv()) for _ in steps]


def test_quotas_and_counts_hold_over_every_protocol(guarded: Guarded) -> None:
    def counts() -> list[float]:
        names = ("seqserve_key_requests_total", "seqserve_key_tokens_total")
        return [guarded.local.metric(name, tenant="support", key="support") for name in names]

    before, refused = counts(), guarded.local.metric("seqserve_requests_total", model="sensors", outcome="quota_exceeded")
    for headers in ({}, {"connection": "close"}):
        assert infer(guarded, "support", ROW, ROW, **headers).status_code == 200
        assert infer(guarded, "single", ROW, **headers).status_code == 200
        many, large = infer(guarded, "single", ROW, ROW, **headers), infer(guarded, "small", **headers)
        assert (many.status_code, many.json()["code"], large.status_code) == (429, "quota_exceeded", 429)
        assert "max_sequences_in_flight of the key single is 1" in many.json()["error"]
    assert guarded.local.metric("seqserve_requests_total", model="sensors", outcome="quota_exceeded") == refused + 4
    body = {"model": "words", "inputs": ["a b", "c d"]}
    tokens = [
        guarded.local.client.post("/tokens", json=body, headers=bearer(guarded.tenants[key])) for key in ("single", "support")
    ]
    assert [reply.status_code for reply in tokens] == [429, 200]
    with pytest.raises(grpc.RpcError, match="max_sequences_in_flight of the key single is 1") as raised:
        call(guarded, "single")
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    first, second = tell(guarded, "small", 2, 1)
    assert first["code"] == "quota_exceeded"
    assert second["session"]["steps"] == 1, "the refused chunk left the session as it was"
    assert guarded.local.metric("seqserve_quota_exceeded_total", key="small", quota="max_bytes_per_second") > 0
    tell(guarded, "support", 2)
    call(guarded, "support")
    assert [after - count for after, count in zip(counts(), before, strict=True)] == [4, 14]


def test_quota_is_counted_over_all_frontends(models_folder: Path, tmp_path: Path, guarded: Guarded) -> None:
    """It is free again at the end of a request, also of a client that leaves."""
    counts = QuotaCounts.create(2)
    others = [QuotaCounts.open(os.dup(counts.descriptor), place) for place in range(2)]
    headers, body = bearer(guarded.tenants["single"]), {"model": "sensors", "inputs": [ROW]}
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(in_process(models_folder, tmp_path, keys=str(guarded.file), quota_counts=each))
            for each in others
        )
        pool = stack.enter_context(ThreadPoolExecutor(1))
        with first.held() as engine:
            waiting = pool.submit(first.client.post, "/infer", json=body, headers=headers)
            eventually(lambda: engine.waiting)
            assert second.client.post("/infer", json=body, headers=headers).status_code == 429
        assert waiting.result().status_code == 200
        with second.held(), suppress(httpx.ReadTimeout):
            second.client.post("/infer", json=body, headers=headers, timeout=httpx.Timeout(60, read=0.3))
        eventually(lambda: first.client.post("/infer", json=body, headers=headers).status_code == 200)
