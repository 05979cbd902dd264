"""Triton's client libraries for HTTP and gRPC, on every datatype and layout, and calls that end at any time.

POST /infer has the expected outputs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from loadtest.scenarios import perf_analyzer
from loadtest.servers import ROOT
from service.frontend.oip.protobuf import METHODS, SERVICE
from tests import models
from tests.serving import Server, check_unharmed, eventually, serving

ROWS = np.round(np.sin(np.arange(36).reshape(12, 3)) * 8) / 8  # exact in every datatype
FLOATS = {"FP32": np.float32, "FP64": np.float64, "FP16": np.float16, "BF16": ml_dtypes.bfloat16}
LIBRARIES: dict[str, ModuleType] = {"http": tritonclient.http, "grpc": tritonclient.grpc}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a model for each kind of input."""
    root = tmp_path_factory.mktemp("models")
    for make in (models.sensors, models.forecaster, models.speller):
        make(root)
    with serving(root, tmp_path_factory.mktemp("log"), "--frontends", "2") as running:
        yield running


class Client:
    """A client of one library, and its tensors."""

    def __init__(self, server: Server, transport: str) -> None:
        self.server, self.library = server, LIBRARIES[transport]
        address = server.grpc if transport == "grpc" else server.address.removeprefix("http://")
        self.calls: Any = self.library.InferenceServerClient(address)

    def tensor(self, name: str, values: Any, datatype: str) -> Any:
        array = np.asarray(values)
        return self.library.InferInput(name, list(array.shape), datatype).set_data_from_numpy(array)

    def infer(self, model: str, *inputs: Any, outputs: tuple[str, ...]) -> dict[str, Any]:
        """Return the outputs with these names."""
        answer = self.calls.infer(model, list(inputs), outputs=[self.library.InferRequestedOutput(name) for name in outputs])
        return {name: answer.as_numpy(name) for name in outputs}

    def expected(self, model: str, *inputs: Any) -> list[dict[str, Any]]:
        """Return the outputs of POST /infer."""
        outputs: list[dict[str, Any]] = self.server.infer(model, list(inputs)).json()["outputs"]
        return outputs


@pytest.fixture(params=LIBRARIES)
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[Client]:
    made = Client(server, request.param)
    yield made
    made.calls.close()
    check_unharmed(server)


@pytest.mark.parametrize("datatype", FLOATS)
def test_features_may_have_any_float_datatype(client: Client, datatype: str) -> None:
    answer = client.infer(
        "forecaster", client.tensor("inputs", ROWS[None].astype(FLOATS[datatype]), datatype), outputs=("value",)
    )
    np.testing.assert_allclose(answer["value"], [client.expected("forecaster", ROWS.tolist())[0]["value"]], rtol=1e-5)


@pytest.mark.parametrize("datatype", ["INT32", "INT64"])
def test_ids_may_be_int32_or_int64(client: Client, datatype: str) -> None:
    ids = np.array([[1, 2, 3], [4, 5, 6]], datatype.lower())
    answer = client.infer("speller", client.tensor("ids", ids, datatype), outputs=("ids",))
    assert answer["ids"].tolist() == [output["ids"] for output in client.expected("speller", *ids.tolist())]


def test_padded_and_packed_sequences_equal_post_infer(client: Client) -> None:
    parts = [ROWS[:3], ROWS[3:4], ROWS[4:9]]
    padded_rows = np.full((3, 5, 3), np.nan, "f4")
    for place, part in enumerate(parts):
        padded_rows[place, : len(part)] = part
    lengths = client.tensor("lengths", np.array([[3], [1], [5]], "i4"), "INT32")
    offsets = client.tensor("offsets", np.array([[0, 3, 4, 9]], "i8"), "INT64")
    packed_rows = np.concatenate(parts)[None].astype("f4")
    padded = client.infer(
        "forecaster", client.tensor("inputs", padded_rows, "FP32"), lengths, outputs=("value", "sequence", "lengths")
    )
    packed = client.infer(
        "forecaster", client.tensor("inputs", packed_rows, "FP32"), offsets, outputs=("value", "sequence", "offsets")
    )
    expected = [output["value"] for output in client.expected("forecaster", *(part.tolist() for part in parts))]
    for answer in (padded, packed):
        np.testing.assert_allclose(answer["value"], expected, rtol=1e-5, atol=1e-7)
    assert padded["lengths"].tolist() == [[3], [1], [5]] and packed["offsets"].tolist() == [[0, 3, 4, 9]]
    without_padding = np.concatenate([padded["sequence"][place, : len(part)] for place, part in enumerate(parts)])
    np.testing.assert_allclose(without_padding, packed["sequence"][0], rtol=1e-5, atol=1e-7)


# Calls of gRPC that are cancelled.


def slow(steps: int) -> Any:
    message = METHODS["ModelInfer"].request_type(model_name="sensors", raw_input_contents=[bytes(12 * steps)])
    message.inputs.add(name="inputs", datatype="FP32", shape=[1, steps, 3])
    return message


def test_calls_cancelled_at_any_time_leave_nothing_behind(server: Server) -> None:
    """Calls are cancelled before, while and after they are read and answered."""
    serialise = METHODS["ModelInfer"].request_type.SerializeToString

    async def call_and_cancel(seconds: float) -> None:
        async def requests() -> AsyncIterator[Any]:
            for _ in range(5):
                yield slow(1)

        async with grpc.aio.insecure_channel(server.grpc) as channel:
            stream = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer", serialise)(requests())
            single = channel.unary_unary(f"/{SERVICE}/ModelInfer", serialise)(slow(500))
            await asyncio.sleep(seconds)
            stream.cancel()
            single.cancel()

    async def call_concurrently() -> None:
        await asyncio.gather(*[call_and_cancel(0.002 * number) for number in range(40)])

    asyncio.run(call_concurrently())
    eventually(lambda: server.metric("seqserve_requests_in_flight") == 0)
    accepted = server.metric("seqserve_requests_accepted_total")
    eventually(lambda: server.metric("seqserve_requests_total") == accepted)
    check_unharmed(server)


def test_load_generator_calls_with_grpc_for_cpp(tmp_path: Path) -> None:
    """Questions, and sessions in single calls and on streams. Another implementation than that of the Python library."""
    if not perf_analyzer.BINARY.is_file():
        pytest.skip(f"{perf_analyzer.BINARY} is missing: `make test-all` installs it")
    with serving(ROOT / "models", tmp_path) as server:
        cases = perf_analyzer.cases(tmp_path, server.address, server.grpc, callers=[8])
        for case in [case for case in cases if case.protocol != perf_analyzer.REST]:
            # A fixed number of calls: a busy machine takes longer, and no figure has to be stable.
            assert perf_analyzer.measure(case, tmp_path, "--request-count", "500") is not None, f"{case.name} failed"
        check_unharmed(server)
