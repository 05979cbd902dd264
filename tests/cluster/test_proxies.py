"""Requests and sessions behind the shipped configurations of real proxies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2
from websockets.sync.client import connect

from tests import models
from tests.cluster.replicas import Cluster, clustered
from tests.cluster.shipped import REPLICAS, Front, shipped
from tests.cluster.streams import SESSION_HEADER as HEADER
from tests.proxies import PROXIES
from tests.serving import eventually

SERVICE = "/inference.GRPCInferenceService"


class Proxied(NamedTuple):
    """A cluster behind a proxy."""

    name: str
    front: Front
    cluster: Cluster


@contextmanager
def behind(proxy: str, folder: Path, **settings: str) -> Iterator[Proxied]:
    """Run three replicas behind a proxy."""
    models.accumulator(folder / "models")
    with (
        clustered(folder / "models", folder, REPLICAS, replicated="1", **settings) as cluster,
        shipped(proxy, cluster, folder) as front,
    ):
        eventually(lambda: uses_all(front, cluster))
        yield Proxied(proxy, front, cluster)


@pytest.fixture(params=PROXIES)
def proxied(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Proxied]:
    """Replicas whose sessions stay where they are: they do not know each other."""
    with behind(request.param, tmp_path) as started:
        yield started


def message(**parameters: bool) -> Any:
    """Return a ModelInferRequest of one step."""
    request = service_pb2.ModelInferRequest(model_name="accumulator", raw_input_contents=[b"\2\0\0\0"])
    request.inputs.add(name="ids", datatype="INT32", shape=[1, 1])
    for name, value in parameters.items():
        request.parameters[name].bool_param = value
    return request


def infer_over(channel: grpc.Channel) -> Any:
    """Return the method ModelInfer."""
    return channel.unary_unary(
        f"{SERVICE}/ModelInfer", service_pb2.ModelInferRequest.SerializeToString, service_pb2.ModelInferResponse.FromString
    )


def answers(cluster: Cluster) -> list[int]:
    """Return how many requests each replica has answered."""
    return [int(replica.metric("seqserve_requests_total", outcome="ok")) for replica in cluster.running]


def send_stateless(front: Front, requests: int) -> None:
    """Send requests without a session over HTTP, and as many over gRPC. The first may meet a proxy that has not checked all replicas."""
    with (
        httpx.Client(base_url=front.address, trust_env=False, timeout=60) as client,
        grpc.insecure_channel(front.grpc) as channel,
    ):
        infer = infer_over(channel)
        for _ in range(requests):
            client.post("/infer", json={"model": "accumulator", "inputs": [[2]]}).raise_for_status()
            infer(message(), timeout=60)


def uses_all(front: Front, cluster: Cluster) -> bool:
    """Return whether the proxy sends requests of both protocols to all replicas."""
    before = answers(cluster)
    try:
        send_stateless(front, 30)
    except (httpx.HTTPError, grpc.RpcError):
        return False
    return all(after > start for start, after in zip(before, answers(cluster), strict=True))


def test_protocols_of_a_session_meet_one_replica(proxied: Proxied) -> None:
    """POST /infer, a WebSocket that names the session in its query, the session routes, and gRPC, behind all but nginx."""
    front = proxied.front
    with (
        httpx.Client(base_url=front.address, trust_env=False, timeout=60) as client,
        grpc.insecure_channel(front.grpc) as channel,
    ):
        infer = infer_over(channel)
        stream = channel.stream_stream(
            f"{SERVICE}/ModelStreamInfer",
            service_pb2.ModelInferRequest.SerializeToString,
            service_pb2.ModelStreamInferResponse.FromString,
        )
        for number in range(30):
            name = f"pump-{number}"
            answer = client.post(
                "/infer", json={"model": "accumulator", "inputs": [[2]], "start": True}, headers={HEADER: name}
            )
            assert answer.json()["session"]["steps"] == 1
            for query, headers in ((f"&session={name}", {}), ("", {HEADER: name})):
                address = f"{front.address.replace('http', 'ws')}/stream?model=accumulator{query}"
                with connect(address, proxy=None, additional_headers=headers) as socket:
                    socket.send(json.dumps({"input": [2], "start": False}))
                    answered = json.loads(socket.recv(timeout=60))
            assert answered["session"]["steps"] == 3
            assert client.get(f"/sessions/{name}/state").status_code == 200
            assert client.get(f"/sessions/{name}/state", headers={HEADER: name}).status_code == 200

            metadata, steps = [(HEADER, name)], []
            if proxied.name == "nginx":  # it hashes with the port: the sessions of the two protocols are apart
                steps.append(infer(message(sequence_start=True), metadata=metadata, timeout=60).parameters["sequence_steps"])
            steps.append(infer(message(), metadata=metadata, timeout=60).parameters["sequence_steps"])
            for part in stream(iter([message(), message()]), metadata=metadata, timeout=60):
                assert not part.error_message
                steps.append(part.infer_response.parameters["sequence_steps"])
            first = 1 if proxied.name == "nginx" else 4
            assert [step.int64_param for step in steps] == list(range(first, first + len(steps)))
