"""The gRPC API of the Open Inference Protocol with Triton's clients, on every datatype and layout, and calls that end at any time."""

from __future__ import annotations

import asyncio
import queue
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import np_to_triton_dtype

from tests import models
from tests.frontend.conftest import BODY_BYTES
from tests.frontend.oip.test_grpc import QUESTIONS, ROWS, SERVICE, raw, serialised, stream_of
from tests.serving import Server, eventually, serving, sum_of

SHIPPED = Path(__file__).resolve().parents[2] / "models"
Outputs = dict[str, Any]
SLOW = np.full((100_000, 3), 0.1, np.float32)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a model for each kind of head, two shipped models, and two frontends that accept messages of up to 2 MiB."""
    root = tmp_path_factory.mktemp("models")
    for make in models.OF_EVERY_HEAD.values():
        make(root)
    models.sensors(root)
    for name in ("question-type-cnn", "sensor-forecast"):
        shutil.copytree(SHIPPED / name, root / name)
    with serving(root, tmp_path_factory.mktemp("log"), "--frontends", "2", max_body_bytes=str(BODY_BYTES)) as running:
        yield running


@pytest.fixture(scope="module")
def client(served: Server) -> Iterator[Any]:
    with triton.InferenceServerClient(served.grpc) as client:
        yield client


def tensor(name: str, array: Any) -> Any:
    """Return an input for Triton's client."""
    array = np.asarray(array)
    return triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)).set_data_from_numpy(array)


def infer(client: Any, model: str, *inputs: Any, outputs: Any = (), **options: Any) -> Outputs:
    """Return all outputs of an answer by name."""
    requested = [triton.InferRequestedOutput(name) if isinstance(name, str) else name for name in outputs]
    answer = client.infer(model, list(inputs), outputs=requested or None, **options)
    return {output.name: answer.as_numpy(output.name) for output in answer.get_response().outputs}


def text_tensor(*texts: str) -> Any:
    return tensor("text", np.array([[text] for text in texts], np.object_))


def post_infer(served: Server, model: str, inputs: list[Any]) -> list[Outputs]:
    """Return the outputs of POST /infer."""
    outputs: list[Outputs] = served.infer(model, inputs).json()["outputs"]
    return outputs


def test_texts_get_the_outputs_of_post_infer(served: Server, client: Any) -> None:
    answer = infer(client, "question-type-cnn", text_tensor(*QUESTIONS))
    expected = post_infer(served, "question-type-cnn", QUESTIONS)
    assert [label.decode() for label in answer["label"][:, 0]] == [output["label"] for output in expected] == ["NUM", "HUM"]
    assert answer["scores"].tolist() == [pytest.approx([*output["scores"].values()], abs=1e-6) for output in expected]
    assert answer["score"][:, 0].tolist() == pytest.approx([output["score"] for output in expected], abs=1e-6)


def test_features_may_have_any_float_datatype(served: Server, client: Any) -> None:
    [expected] = post_infer(served, "sensor-forecast", [ROWS.tolist()])
    for dtype, within in ((np.float32, 1e-6), (np.float64, 1e-6), (np.float16, 1e-2), (ml_dtypes.bfloat16, 0.1)):
        answer = infer(client, "sensor-forecast", tensor("inputs", ROWS[None].astype(dtype)))
        assert answer["value"][0].tolist() == pytest.approx(expected["value"], abs=within)


def test_ids_may_be_int32_or_int64(served: Server, client: Any) -> None:
    ids = [1, 5, 11, 0, 3]
    [expected] = post_infer(served, "speller", [ids])
    for dtype in (np.int32, np.int64):
        assert infer(client, "speller", tensor("ids", np.array([ids], dtype)))["ids"].tolist() == [expected["ids"]]


def test_padded_and_packed_sequences_equal_post_infer(served: Server, client: Any) -> None:
    sequences = [ROWS, ROWS[:5], ROWS[3:4]]
    outputs = post_infer(served, "sensor-forecast", [sequence.tolist() for sequence in sequences])
    padded = np.full((3, 12, 3), 9.0, np.float32)
    for row, sequence in enumerate(sequences):
        padded[row, : len(sequence)] = sequence
    for inputs in (
        (tensor("inputs", padded), tensor("lengths", np.array([[12], [5], [1]], np.int32))),
        (tensor("inputs", np.concatenate(sequences)[None]), tensor("offsets", np.array([[0, 12, 17, 18]], np.int32))),
    ):
        answer = infer(client, "sensor-forecast", *inputs)
        assert answer["value"].tolist() == [pytest.approx(output["value"], abs=1e-5) for output in outputs]


def test_step_outputs_have_the_layout_of_the_inputs(served: Server, client: Any) -> None:
    first, second = [1, 5, 3, 0, 3], [3, 7, 2]
    expected = [answer["labels"] for answer in post_infer(served, "tagger", [first, second])]
    padded = infer(client, "tagger", tensor("ids", np.array([first, [*second, 0, 0]])), tensor("lengths", np.array([5, 3])))
    assert [[label.decode() for label in row if label] for row in padded["labels"]] == expected
    packed = infer(client, "tagger", tensor("ids", np.array([first + second])), tensor("offsets", np.array([[0, 5, 8]])))
    assert [label.decode() for label in packed["labels"][0]] == expected[0] + expected[1]
    assert packed["offsets"].tolist() == [[0, 5, 8]]


def test_outputs_have_the_requested_order(client: Any) -> None:
    best = triton.InferRequestedOutput("scores", class_count=2)
    answer = infer(client, "question-type-cnn", text_tensor(QUESTIONS[0]), outputs=["embedding", best, "label"], request_id="7")
    assert list(answer) == ["embedding", "scores", "label"]
    assert [line.decode().split(":")[1:] for line in answer["scores"][0]] == [["5", "NUM"], ["4", "LOC"]]


def test_asynchronous_client(served: Server) -> None:
    async def infer_concurrently() -> list[str]:
        async with triton_aio.InferenceServerClient(served.grpc) as client:
            answers = await asyncio.gather(*[client.infer("words", [text_tensor("how far is the sea ?")]) for _ in range(40)])
            return [answer.as_numpy("label").item().decode() for answer in answers]

    assert set(asyncio.run(infer_concurrently())) == {post_infer(served, "words", ["how far is the sea ?"])[0]["label"]}


def test_message_may_be_compressed(client: Any) -> None:
    for algorithm in ("gzip", "deflate"):
        assert infer(client, "words", text_tensor("who was first"), compression_algorithm=algorithm)["label"].shape == (1, 1)


def outcomes(served: Server, outcome: str) -> float:
    return served.metric("seqserve_requests_total", outcome=outcome)


def test_cancelled_call_is_cancelled_in_the_engine(served: Server, client: Any) -> None:
    gone, cancelled = outcomes(served, "client_gone"), served.metric("seqserve_cancelled_total")
    answers: queue.Queue[Any] = queue.Queue()

    def handle_reply(result: Any, error: Any) -> None:
        answers.put(error)

    running = client.async_infer("sensors", [tensor("inputs", SLOW[None])], handle_reply)
    eventually(lambda: served.metric("seqserve_sequences_begun") == 1, 10)
    running.cancel()
    assert "CANCELLED" in str(answers.get(timeout=10))
    eventually(lambda: outcomes(served, "client_gone") == gone + 1, 5)
    eventually(lambda: served.metric("seqserve_cancelled_total") == cancelled + 1, 5)
    assert served.metric("seqserve_requests_in_flight") == 0


def test_cancelled_stream_cancels_its_requests(served: Server) -> None:
    gone = outcomes(served, "client_gone")
    with grpc.insecure_channel(served.grpc) as channel:
        answers = stream_of(channel, [raw("inputs", "FP32", [1, 20_000, 3], SLOW[:20_000].tobytes())] * 20)
        eventually(lambda: served.metric("seqserve_requests_in_flight") >= 15, 10)
        answers.cancel()
    eventually(lambda: served.metric("seqserve_requests_in_flight") == 0, 5)
    # A busy machine may answer some of them before it notices the end of the stream.
    assert outcomes(served, "client_gone") > gone


def test_calls_cancelled_at_any_time_leave_nothing_behind(served: Server) -> None:
    """Calls are cancelled before, while and after they are read and answered."""

    async def call_and_cancel(seconds: float) -> None:
        async def requests() -> AsyncIterator[Any]:
            for _ in range(5):
                yield raw("inputs", "FP32", [1, 1, 3], bytes(12))

        async with grpc.aio.insecure_channel(served.grpc) as channel:
            stream = channel.stream_stream(f"{SERVICE}/ModelStreamInfer", serialised)(requests())
            single = channel.unary_unary(f"{SERVICE}/ModelInfer", serialised)(
                raw("inputs", "FP32", [1, 500, 3], SLOW[:500].tobytes())
            )
            await asyncio.sleep(seconds)
            stream.cancel()
            single.cancel()

    async def call_concurrently() -> None:
        await asyncio.gather(*[call_and_cancel(0.002 * number) for number in range(40)])

    asyncio.run(call_concurrently())
    eventually(lambda: served.metric("seqserve_requests_in_flight") == 0, 5)
    assert not served.events("bug") + served.events("library warning")

    def all_have_an_outcome() -> bool:
        text = served.scrape()
        return sum_of(text, "seqserve_requests_accepted_total", {}) == sum_of(text, "seqserve_requests_total", {})

    eventually(all_have_an_outcome)
