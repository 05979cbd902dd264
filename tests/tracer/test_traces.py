"""Traces of a running service, as a receiver of OTLP gets them. The tests share the service, in their order."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from websockets.sync.client import connect

from service.frontend.oip.protobuf import METHODS
from tests.serving import Server, eventually, serving
from tests.tracer.receiver import ReceivedSpan, Receiver, receiving

TRACE, SPAN = "ab" * 16, "cd" * 8
SAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1", "baggage": "user=somebody"}
ROWS = [[0.1, -2.0, 30.0]] * 5
STAGES = ["parse", "channel", "queue", "stage_in", "compute", "stage_out", "reply", "encode"]
INFER = "inference.GRPCInferenceService/ModelInfer"


class Traced(NamedTuple):
    """A server, and the receiver of its traces."""

    server: Server
    receiver: Receiver

    def spans_of(self, trace: str) -> list[ReceivedSpan]:
        return [span for span in self.receiver.spans if span.trace == trace]


@pytest.fixture(scope="module")
def traced(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    """A server that traces only requests that its clients trace, errors and slow requests."""
    folder = tmp_path_factory.mktemp("log")
    with receiving("http") as receiver:
        variables = {
            "trace_endpoint": receiver.endpoint,
            "trace_rate": "0",
            "lame_duck_seconds": "0",
            "max_batch_tokens": "256",
        }
        with serving(models_folder, folder, **variables) as server:
            yield Traced(server, receiver)


def headers(number: int) -> dict[str, str]:
    """Return the headers of a request in a separate sampled trace."""
    return {"traceparent": f"00-{number:032x}-{SPAN}-01"}


def ask(server: Server, headers: dict[str, str] | None = None, path: str = "/infer", **body: Any) -> Any:
    return server.client.post(path, json={"model": "sensors", "inputs": [ROWS], **body}, headers=headers)


def message() -> bytes:
    request = METHODS["ModelInfer"].request_type(model_name="sensors")
    request.inputs.add(name="inputs", datatype="FP32", shape=[1, 5, 3]).contents.fp32_contents.extend([0.5] * 15)
    data: bytes = request.SerializeToString()
    return data


def test_request_has_a_span_for_each_stage(traced: Traced) -> None:
    """Requests that their clients do not trace have none."""
    ask(traced.server, {"traceparent": f"00-{'12' * 16}-{SPAN}-00"})
    reply = ask(traced.server, {**SAMPLED, "x-request-id": "my-request"})
    [root] = traced.receiver.await_spans("POST /infer", request_id="my-request")
    eventually(lambda: len(traced.spans_of(TRACE)) == 1 + len(STAGES))
    stages = [span for span in traced.spans_of(TRACE) if span != root]
    assert (root.trace, root.parent, root.state, root.in_error) == (TRACE, SPAN, "vendor=1", False)
    assert [span.name for span in stages] == STAGES
    assert {span.parent for span in stages} == {root.span}
    assert reply.headers["traceparent"] == f"00-{TRACE}-{root.span}-01" and reply.headers["tracestate"] == "vendor=1"
    assert root.begin == stages[0].begin and root.end == stages[-1].end
    assert [span.begin for span in stages] == sorted(span.begin for span in stages)
    for before, after in pairwise(stages[:6]):
        assert abs(after.begin - before.end) < 1000, "stages follow each other without a gap"
    assert root.resource["service.name"] == "seqserve"
    expected = {"model": "sensors", "version": "1", "sequences": 1, "tokens": 5, "outcome": "ok", "key": "local", "batches": 1}
    assert {f"seqserve.{name}": value for name, value in expected.items()}.items() <= root.attributes.items()
    assert root.attributes["http.response.status_code"] == 200
    compute = stages[STAGES.index("compute")]
    batch = {"engine": 0, "device": "cpu", "batch.sequences": 1, "batch.tokens": 5, "batch.by": "launches"}
    assert {f"seqserve.{name}": value for name, value in batch.items()}.items() <= compute.attributes.items()
    assert not any("somebody" in str(span) for span in traced.receiver.spans), "baggage is ignored"
    assert not traced.spans_of("12" * 16)


def test_batch_links_to_its_requests_and_they_to_it(traced: Traced) -> None:
    ask(traced.server, headers(17), inputs=[ROWS, ROWS])
    [root] = traced.receiver.await_spans("POST /infer", sequences=2)
    batches = eventually(lambda: [span for span in traced.receiver.spans if (root.trace, root.span) in span.links])
    [compute] = [span for span in traced.spans_of(root.trace) if span.name == "compute"]
    [batch] = batches
    assert batch.name == "batch" and batch.parent == "" and batch.trace != root.trace
    assert compute.links == [(batch.trace, batch.span)]
    assert batch.attributes["seqserve.batch.sequences"] == 2


def test_chunks_of_a_session_are_traced(traced: Traced) -> None:
    address = traced.server.address.replace("http", "ws") + "/stream?model=sensors"
    with connect(address, proxy=None, additional_headers={**headers(41), "x-request-id": "socket"}) as socket:
        for _ in range(2):
            socket.send(json.dumps({"input": ROWS}))
            socket.recv(timeout=30)
    chunks = traced.receiver.await_spans("chunk on /stream", 2, request_id="socket")
    assert {span.trace for span in chunks} == {f"{41:032x}"} and {span.parent for span in chunks} == {SPAN}


def test_grpc_calls_are_traced(traced: Traced) -> None:
    metadata = [(name, value) for name, value in headers(51).items()]
    with grpc.insecure_channel(traced.server.grpc) as channel:
        _, call = channel.unary_unary(f"/{INFER}").with_call(message(), metadata=metadata, timeout=60)
    [root] = [span for span in traced.receiver.await_spans(INFER) if span.trace == f"{51:032x}"]
    trailing = dict(call.trailing_metadata())
    assert trailing["traceparent"] == f"00-{root.trace}-{root.span}-01"
    assert trailing["x-request-id"] == root.attributes["seqserve.request_id"]
    assert root.attributes["rpc.method"] == "ModelInfer" and root.attributes["rpc.response.status_code"] == "OK"


def test_metrics_have_the_traces_as_examples(traced: Traced) -> None:
    ask(traced.server, headers(71))
    accept = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
    reply = eventually(
        lambda: (reply := traced.server.client.get("/metrics", headers=accept)) and f"{71:032x}" in reply.text and reply
    )
    assert reply.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert reply.text.endswith("# EOF\n")
    assert "trace_id" not in traced.server.scrape()
    assert traced.server.metric("seqserve_traced_requests_total", outcome="recorded") > 0
    eventually(lambda: traced.server.metric("seqserve_spans_total", outcome="exported") > 0)


def test_tracer_is_restarted_and_exports_the_last_spans_before_the_end(traced: Traced) -> None:
    """The last test with this service."""
    server = traced.server
    before = server.pid("tracer-0")
    os.kill(before, signal.SIGKILL)
    eventually(lambda: server.pid("tracer-0") != before)
    assert ask(server).status_code == 200 and server.ready()
    eventually(lambda: server.metric("seqserve_process_restarts_total", process="tracer") == 1)
    eventually(lambda: ask(server, headers(80)) and traced.spans_of(f"{80:032x}"))
    ask(server, headers(81))
    assert server.stop() == 0
    assert {span.name for span in traced.spans_of(f"{81:032x}")} >= {"POST /infer", "encode"}
    assert not server.events("bug")
