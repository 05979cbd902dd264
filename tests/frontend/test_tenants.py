"""Quotas and fair shares of tenants, over every protocol of a running service with two frontends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException
from websockets.sync.client import connect

from service.access.keys import create
from service.access.scopes import Scope
from tests.serving import Server, eventually, serving

ROW = [[1.0, 2.0, 3.0]] * 2
"""Two steps of the sensors: 24 bytes."""


class Limited(NamedTuple):
    """A service with keys that have quotas."""

    server: Server
    tokens: dict[str, str]

    def infer(self, name: str, *inputs: object, **headers: str) -> httpx.Response:
        body = {"model": "sensors", "inputs": inputs or [ROW]}
        return self.server.client.post("/infer", json=body, headers={**self.bearer(name), **headers})

    def bearer(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.tokens[name]}"}


@pytest.fixture(scope="module")
def limited(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    scratch = tmp_path_factory.mktemp("keys")
    file = scratch / "keys.toml"
    quotas: dict[str, dict[str, float]] = {
        "free": {},
        "slow": {"max_requests_per_second": 1},
        "small": {"max_bytes_per_second": 20},
        "single": {"max_sequences_in_flight": 1},
    }
    scopes = [Scope.INFER, Scope.SESSION]
    tokens = {name: create(file, name, scopes, name, **limits) for name, limits in quotas.items()}
    tokens["watcher"] = create(file, "watcher", [Scope.METRICS], "watcher")
    with serving(models_folder, scratch, "--keys", str(file), frontends="2") as server:
        yield Limited(server, tokens)


@pytest.mark.parametrize("headers", [{}, {"connection": "close"}], ids=["hot path", "general path"])
def test_error_names_the_quota(headers: dict[str, str], limited: Limited) -> None:
    assert limited.infer("free", ROW, ROW, **headers).status_code == 200
    assert limited.infer("single", ROW, **headers).status_code == 200
    many = limited.infer("single", ROW, ROW, **headers)
    assert (many.status_code, many.json()["code"]) == (429, "quota_exceeded")
    assert "max_sequences_in_flight of the key single is 1" in many.json()["error"]
    large = limited.infer("small", **headers)
    assert (
        large.status_code == 429
        and "24 bytes a second and max_bytes_per_second of the key small is 20" in large.json()["error"]
    )


def test_rate_is_counted_over_all_frontends(limited: Limited) -> None:
    """Each request has a separate connection, and may reach another frontend."""

    def refused() -> bool:
        answers = [limited.infer("slow", connection="close") for _ in range(6)]
        late = [answer for answer in answers if answer.status_code == 429]
        assert all(answer.headers["retry-after"] == "1" for answer in late)
        return len(late) >= 4

    eventually(refused)
    assert limited.infer("free").status_code == 200
    eventually(lambda: limited.infer("slow").status_code == 200)


def test_quota_holds_over_grpc(limited: Limited) -> None:
    with triton.InferenceServerClient(limited.server.grpc) as client:
        tensor = triton.InferInput("inputs", [2, 2, 3], "FP32")
        tensor.set_data_from_numpy(np.ones((2, 2, 3), np.float32))
        client.infer("sensors", [tensor], headers=limited.bearer("free"))
        with pytest.raises(InferenceServerException, match="max_sequences_in_flight of the key single is 1") as refused:
            client.infer("sensors", [tensor], headers=limited.bearer("single"))
        assert refused.value.status() == "StatusCode.RESOURCE_EXHAUSTED"


def test_quota_holds_on_a_websocket(limited: Limited) -> None:
    url = limited.server.address.replace("http", "ws") + "/stream?model=sensors"

    def tell(socket: Any, steps: int) -> dict[str, Any]:
        socket.send(json.dumps({"input": ROW[:1] * steps}))
        reply: dict[str, Any] = json.loads(socket.recv())
        return reply

    with connect(url, additional_headers=limited.bearer("small")) as socket:
        assert tell(socket, 2)["code"] == "quota_exceeded"
        assert tell(socket, 1)["session"]["steps"] == 1, "the refused chunk left the session as it was"


def test_refusals_are_counted(limited: Limited) -> None:
    def refused() -> float:
        lines = limited.server.scrape(limited.bearer("watcher")).splitlines()
        labels = 'model="sensors",outcome="quota_exceeded"'
        return sum(float(line.split()[-1]) for line in lines if line.startswith("seqserve_requests_total{") and labels in line)

    before = refused()
    limited.infer("small")
    limited.infer("small", connection="close")
    assert refused() == before + 2


def test_requests_are_counted_by_key_over_every_protocol(limited: Limited) -> None:
    def counted(name: str, **labels: str) -> float:
        text = limited.server.scrape(limited.bearer("watcher"))
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return sum(sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items())

    free = {"tenant": "free", "key": "free"}
    requests, tokens = counted("seqserve_key_requests_total", **free), counted("seqserve_key_tokens_total", **free)
    for headers in {}, {"connection": "close"}:
        assert limited.infer("free", ROW, ROW, **headers).status_code == 200
    url = limited.server.address.replace("http", "ws") + "/stream?model=sensors"
    with connect(url, additional_headers=limited.bearer("free")) as socket:
        socket.send(json.dumps({"input": ROW}))
        socket.recv()
    with triton.InferenceServerClient(limited.server.grpc) as client:
        tensor = triton.InferInput("inputs", [1, 2, 3], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 2, 3), np.float32))
        client.infer("sensors", [tensor], headers=limited.bearer("free"))
    assert counted("seqserve_key_requests_total", **free) - requests == 4
    assert counted("seqserve_key_tokens_total", **free) - tokens == 12
    limited.infer("small")
    assert counted("seqserve_quota_exceeded_total", key="small", quota="max_bytes_per_second") > 0


def test_quota_is_free_again_at_the_end_of_requests(limited: Limited) -> None:
    assert [limited.infer("single").status_code for _ in range(20)] == [200] * 20
    for _ in range(5):
        with suppress(httpx.ReadTimeout):  # a busy client may notice the reply first
            limited.server.client.post(
                "/infer",
                json={"model": "sensors", "inputs": [ROW * 4000]},
                headers=limited.bearer("single"),
                timeout=httpx.Timeout(10, read=0.001),
            )
    eventually(lambda: limited.infer("single").status_code == 200)
