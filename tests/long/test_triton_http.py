"""The REST API of the Open Inference Protocol with Triton's clients. POST /infer has the expected outputs."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.http import aio
from tritonclient.utils import InferenceServerException

from tests import models
from tests.serving import Server, check_unharmed, serving

SHIPPED = Path(__file__).resolve().parents[2] / "models"
QUESTIONS = ["How far is it from Denver to Aspen ?", "Who was the first American in space ?", "What does NASA stand for ?"]
WAVE = np.sin(np.arange(3 * 48, dtype="f4") / 9).reshape(48, 3)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the models that ship with seqserve, and one test model for each kind of head."""
    root = tmp_path_factory.mktemp("service") / "models"
    shutil.copytree(SHIPPED, root)
    for make in models.OF_EVERY_HEAD.values():
        make(root)
    with serving(root, tmp_path_factory.mktemp("log")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with triton.InferenceServerClient(server.address.removeprefix("http://")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def unharmed(server: Server) -> Iterator[None]:
    yield
    check_unharmed(server)


def input(name: str, values: Any, datatype: str = "FP32", *, binary: bool = True) -> Any:
    array = np.asarray(values)
    tensor = triton.InferInput(name, array.shape, datatype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


def text_input(*texts: str, binary: bool = True) -> Any:
    return input("text", np.array([[text.encode()] for text in texts], object), "BYTES", binary=binary)


def requested(*names: str, binary: bool = True) -> list[Any]:
    return [triton.InferRequestedOutput(name, binary_data=binary) for name in names]


def values(server: Server, model: str, rows: Sequence[Any], field: str = "value", **options: Any) -> list[Any]:
    """Return one field of each output of POST /infer."""
    return [output[field] for output in server.infer(model, list(rows), **options).json()["outputs"]]


def test_client_reads_metadata_of_server_and_models(client: Any) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("words") and client.is_model_ready("words", "1")
    assert not client.is_model_ready("nobody") and not client.is_model_ready("words", "2")
    assert client.get_server_metadata()["name"] == "seqserve"
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    metadata = client.get_model_metadata("question-type")
    assert (metadata["name"], metadata["versions"]) == ("question-type-cnn", ["1"])
    assert metadata["inputs"][0] == {"name": "text", "datatype": "BYTES", "shape": [-1, 1]}
    assert client.get_model_config("sensor-forecast", "1")["sequence_batching"]["max_sequence_idle_microseconds"] == 60_000_000


@pytest.mark.parametrize("model", ["question-type", "question-type-lstm", "question-type-cnn", "question-type-sru"])
@pytest.mark.parametrize("binary", [True, False])
def test_texts_get_the_outputs_of_post_infer(server: Server, client: Any, model: str, binary: bool) -> None:
    names = ("label", "score", "scores")
    answer = client.infer(
        model, [text_input(*QUESTIONS, binary=binary)], outputs=requested(*names, binary=binary), request_id="mine"
    )
    assert answer.get_response()["id"] == "mine"
    assert answer.get_response()["model_version"] == "1"
    outputs = server.infer(model, QUESTIONS).json()["outputs"]
    assert answer.as_numpy("label").tolist() == [
        [output["label"].encode() if binary else output["label"]] for output in outputs
    ]
    assert answer.as_numpy("score")[:, 0] == pytest.approx([output["score"] for output in outputs], rel=1e-3)
    scores = [list(output["scores"].values()) for output in outputs]
    np.testing.assert_allclose(answer.as_numpy("scores"), scores, rtol=2e-3, atol=1e-6)


def test_each_output_is_raw_or_json_as_requested(client: Any) -> None:
    outputs = [*requested("scores"), *requested("label", binary=False), *requested("score")]
    answer = client.infer("words", [text_input("how far", "sea")], outputs=outputs)
    described = answer.get_response()["outputs"]
    assert [output["name"] for output in described] == ["scores", "label", "score"]
    assert [output.get("parameters") for output in described] == [{"binary_data_size": 24}, None, {"binary_data_size": 8}]
    np.testing.assert_array_equal(answer.as_numpy("score"), answer.as_numpy("scores").max(axis=1, keepdims=True))


@pytest.mark.parametrize("algorithm", [None, "gzip", "deflate"])
def test_requests_and_responses_may_be_compressed(server: Server, client: Any, algorithm: str | None) -> None:
    rows = np.sin(np.arange(2 * 100 * 3, dtype="f4")).reshape(2, 100, 3)
    answer = client.infer(
        "forecaster",
        [input("inputs", rows)],
        outputs=requested("value", "sequence"),
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    assert answer.as_numpy("sequence").shape == (2, 100, 5)
    np.testing.assert_allclose(answer.as_numpy("value"), values(server, "forecaster", rows.tolist()), rtol=1e-5)


def test_padded_and_packed_sequences_equal_post_infer(server: Server, client: Any) -> None:
    lengths = [3, 1, 5]
    rows = [np.cos(np.arange(3 * length, dtype="f4")).reshape(length, 3) for length in lengths]
    padded_rows = np.full((3, 5, 3), np.nan, "f4")
    for index, row in enumerate(rows):
        padded_rows[index, : len(row)] = row
    padded_inputs = [input("inputs", padded_rows), input("lengths", np.array(lengths, "i4")[:, None], "INT32")]
    offsets = input("offsets", np.cumsum([0, *lengths])[None], "INT64")
    packed_inputs = [input("inputs", np.concatenate(rows)[None]), offsets]
    outputs = requested("value", "sequence")
    padded = client.infer("forecaster", padded_inputs, outputs=[*outputs, *requested("lengths")])
    packed = client.infer("forecaster", packed_inputs, outputs=[*outputs, *requested("offsets")])
    expected = values(server, "forecaster", [row.tolist() for row in rows])
    for answer in (padded, packed):
        np.testing.assert_allclose(answer.as_numpy("value"), expected, rtol=1e-5, atol=1e-7)
    assert padded.as_numpy("lengths").tolist() == [[3], [1], [5]]
    assert packed.as_numpy("offsets").tolist() == [[0, 3, 4, 9]]
    assert (padded.as_numpy("sequence")[1, 1:] == 0).all()
    without_padding = [padded.as_numpy("sequence")[row, :length] for row, length in enumerate(lengths)]
    np.testing.assert_allclose(np.concatenate(without_padding), packed.as_numpy("sequence")[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP64"])
def test_features_may_have_any_float_datatype(server: Server, client: Any, datatype: str) -> None:
    rows = np.round(np.sin(np.arange(15).reshape(1, 5, 3)) * 8) / 8  # exact in every datatype
    tensor = triton.InferInput("inputs", rows.shape, datatype)
    tensor.set_data_from_numpy(rows.astype({"FP16": "f2", "BF16": ml_dtypes.bfloat16, "FP64": "f8"}[datatype]))
    answer = client.infer("forecaster", [tensor]).as_numpy("value")
    np.testing.assert_allclose(answer, values(server, "forecaster", rows.tolist()), rtol=1e-5)


@pytest.mark.parametrize("datatype", ["INT32", "INT64"])
@pytest.mark.parametrize("binary", [True, False])
def test_ids_may_be_int32_or_int64(server: Server, client: Any, datatype: str, binary: bool) -> None:
    ids = np.array([[1, 2, 3], [4, 5, 6]], {"INT32": "i4", "INT64": "i8"}[datatype])
    answer = client.infer("speller", [input("ids", ids, datatype, binary=binary)])
    assert answer.as_numpy("ids").tolist() == values(server, "speller", ids.tolist(), "ids")


def test_tags_are_padded_with_empty_strings(server: Server, client: Any) -> None:
    answer = client.infer("tagger", [text_input("how far is the sea", "who")])
    labels = values(server, "tagger", ["how far is the sea", "who"], "labels")
    padded = [[label.encode() for label in [*row, *[""] * (5 - len(row))]] for row in labels]
    assert answer.as_numpy("labels").tolist() == padded
    assert answer.as_numpy("lengths").tolist() == [[5], [1]]


def test_spans_vectors_and_steps_equal_those_of_post_infer(server: Server, client: Any) -> None:
    span = client.infer("reader", [input("ids", [[1, 2, 3, 4]], "INT64")])
    assert [[span.as_numpy(name)[0, 0] for name in ("start", "end")]] == [
        [output["start"], output["end"]] for output in server.infer("reader", [[1, 2, 3, 4]]).json()["outputs"]
    ]
    vector = client.infer("embedder", [text_input("how far is the sea")]).as_numpy("embedding")
    np.testing.assert_allclose(vector, values(server, "embedder", ["how far is the sea"], "embedding"), rtol=1e-5)
    rows = np.arange(14, dtype="f4").reshape(1, 7, 2) / 14
    steps = client.infer("halver", [input("inputs", rows)])
    np.testing.assert_allclose(steps.as_numpy("sequence"), values(server, "halver", rows.tolist(), "sequence"), rtol=1e-5)
    assert steps.as_numpy("lengths").tolist() == [[3]], "fewer steps than in the input"


def test_classes_are_sorted_best_first(server: Server, client: Any) -> None:
    answer = client.infer("words", [text_input("how far")], outputs=[triton.InferRequestedOutput("scores", class_count=2)])
    [output] = server.infer("words", ["how far"]).json()["outputs"]
    scores = list(output["scores"].items())
    best = sorted(range(3), key=lambda index: -scores[index][1])[:2]
    assert answer.as_numpy("scores").tolist() == [[f"{scores[index][1]}:{index}:{scores[index][0]}".encode() for index in best]]


@pytest.mark.parametrize("id", [7, "the-seventh"])
def test_session_in_chunks_gets_the_output_of_the_whole(server: Server, client: Any, id: int | str) -> None:
    def chunk(begin: int, end: int, **options: Any) -> Any:
        return client.infer("sensor-forecast", [input("inputs", WAVE[begin:end])], sequence_id=id, **options)

    expected = values(server, "sensor-forecast", [WAVE.tolist()])[0]
    for _ in range(2):  # sequence_start discards the state of the first round
        assert chunk(0, 7, sequence_start=True).get_response()["parameters"] == {"sequence_steps": 7}
        chunk(7, 40)
    last = chunk(40, 48, sequence_end=True)
    assert last.get_response()["parameters"] == {"sequence_steps": 48}
    np.testing.assert_allclose(last.as_numpy("value"), [expected], rtol=1e-3, atol=1e-4)
    with pytest.raises(InferenceServerException) as raised:
        chunk(0, 1)
    assert raised.value.status() == "404"


def test_model_without_sessions_rejects_a_sequence_id(client: Any) -> None:
    with pytest.raises(
        InferenceServerException, match=r"layers\.1 \(lstm\) needs a whole sequence: leave session out"
    ) as raised:
        client.infer("words", [text_input("how far")], sequence_id=7, sequence_start=True)
    assert raised.value.status() == "400"


@pytest.mark.parametrize(
    ("options", "status", "text"),
    [
        ({"model_name": "nobody"}, "404", "unknown model nobody"),
        ({"model_version": "9"}, "404", "no version 9"),
        ({"inputs": [triton.InferInput("text", [1], "BYTES")]}, "400", "binary_data_size"),
        ({"outputs": requested("logits")}, "400", "its outputs are label, score, scores"),
        ({"timeout": 10**9}, "400", "SEQSERVE_MAX_DEADLINE_MS"),
        ({"timeout": 1}, "504", "deadline"),
    ],
)
def test_client_reads_errors(client: Any, options: dict[str, Any], status: str, text: str) -> None:
    with pytest.raises(InferenceServerException, match=text) as raised:
        client.infer(**{"model_name": "words", "inputs": [text_input("how far")], **options})
    assert raised.value.status() == status


def test_statistics_count_requests(client: Any) -> None:
    client.infer("words", [text_input("how far")])
    [model] = client.get_inference_statistics("words")["model_stats"]
    assert (model["name"], model["version"]) == ("words", "1")
    assert model["inference_stats"]["success"]["count"] >= 1
    assert model["inference_stats"]["success"]["ns"] > model["inference_stats"]["compute_infer"]["ns"] > 0


def test_repository_is_listed_and_models_are_unloaded_and_loaded(client: Any) -> None:
    listed = {"name": "halver", "version": "1", "state": "READY", "reason": ""}
    assert listed in client.get_model_repository_index()
    client.unload_model("halver")
    assert not client.is_model_ready("halver")
    client.load_model("halver", config=json.dumps({"version_policy": {"latest": {"num_versions": 1}}}))
    assert client.is_model_ready("halver") and listed in client.get_model_repository_index()
    invalid: list[tuple[Any, str]] = [
        (lambda: client.load_model("nobody"), "404"),
        (lambda: client.unload_model("nobody"), "404"),
        (lambda: client.load_model("halver", files={"file:1/model.bin": b"x"}, config="{}"), "501"),
        (lambda: client.load_model("halver", config='{"max_batch_size": 8}'), "501"),
    ]
    for call, status in invalid:
        with pytest.raises(InferenceServerException) as raised:
            call()
        assert raised.value.status() == status
    assert client.is_model_ready("halver")


def test_unsupported_extensions_get_501(client: Any) -> None:
    shared = triton.InferInput("text", [1], "BYTES")
    shared.set_shared_memory("mine", 8)
    for call in (
        lambda: client.infer("words", [shared]),
        lambda: client.register_system_shared_memory("mine", "/mine", 8),
        client.get_system_shared_memory_status,
        client.get_cuda_shared_memory_status,
        client.get_trace_settings,
        client.get_log_settings,
    ):
        with pytest.raises(InferenceServerException, match="send") as raised:
            call()
        assert raised.value.status() == "501"


def test_asynchronous_client(server: Server) -> None:
    async def infer() -> list[list[str]]:
        async with aio.InferenceServerClient(server.address.removeprefix("http://")) as client:
            assert await client.is_server_ready()
            rows = np.ones((4, 100, 3), "f4")
            outputs = requested("sequence")
            for algorithm in (None, "gzip", "deflate"):
                answer = await client.infer(
                    "forecaster",
                    [input("inputs", rows)],
                    outputs=outputs,
                    request_compression_algorithm=algorithm,
                    response_compression_algorithm=algorithm,
                )
                assert answer.as_numpy("sequence").shape == (4, 100, 5)
            answers = await asyncio.gather(*(client.infer("words", [text_input(question)]) for question in QUESTIONS * 5))
            return [[label.decode() for label in answer.as_numpy("label")[:, 0]] for answer in answers]

    labels = values(server, "words", QUESTIONS, "label")
    assert asyncio.run(infer()) == [[label] for label in labels] * 5
