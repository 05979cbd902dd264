"""Quotas of keys hold over every protocol, are counted, and are free again at the end of a request."""

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
from service.ipc.quota_counts import QuotaCounts
from tests.frontend.conftest import Guarded, bearer
from tests.frontend.in_process import in_process
from tests.serving import eventually

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


def test_quota_holds_over_every_protocol(guarded: Guarded) -> None:
    refused = guarded.local.metric("seqserve_requests_total", model="sensors", outcome="quota_exceeded")
    for headers in ({}, {"connection": "close"}):
        assert infer(guarded, "single", ROW, **headers).status_code == 200
        many, large = infer(guarded, "single", ROW, ROW, **headers), infer(guarded, "small", **headers)
        assert (many.status_code, many.json()["code"], large.status_code) == (429, "quota_exceeded", 429)
        assert "max_sequences_in_flight of the key single is 1" in many.json()["error"]
    assert guarded.local.metric("seqserve_requests_total", model="sensors", outcome="quota_exceeded") == refused + 4
    with pytest.raises(grpc.RpcError, match="max_sequences_in_flight of the key single is 1") as raised:
        call(guarded, "single")
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    first, second = tell(guarded, "small", 2, 1)
    assert first["code"] == "quota_exceeded"
    assert second["session"]["steps"] == 1, "the refused chunk left the session as it was"
    assert guarded.local.metric("seqserve_quota_exceeded_total", key="small", quota="max_bytes_per_second") > 0


def test_requests_are_counted_by_key_over_every_protocol(guarded: Guarded) -> None:
    def counts() -> list[float]:
        names = ("seqserve_key_requests_total", "seqserve_key_tokens_total")
        return [guarded.local.metric(name, tenant="support", key="support") for name in names]

    before = counts()
    for headers in {}, {"connection": "close"}:
        assert infer(guarded, "support", ROW, ROW, **headers).status_code == 200
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
