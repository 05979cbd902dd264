"""The REST API of the Open Inference Protocol over a socket, with Triton's clients and with invalid bodies."""

from __future__ import annotations

import asyncio
import gzip
import json
import shutil
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.http import aio
from tritonclient.utils import InferenceServerException

from service.frontend.oip.json import HEADER_LENGTH
from service.frontend.oip.tensors import DATATYPES
from tests import models
from tests.frontend.rest.test_infer import raw, refused
from tests.serving import Server, check_unharmed, serving

SHIPPED = Path(__file__).resolve().parents[3] / "models"
QUESTIONS = ["How far is it from Denver to Aspen ?", "Who was the first American in space ?", "What does NASA stand for ?"]
WAVE = np.sin(np.arange(3 * 48, dtype="f4") / 9).reshape(48, 3)
INFER = "/v2/models/words/infer"
VALID: dict[str, Any] = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["how far is the sea ?"]}]}


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


def post(server: Server, body: Any, path: str = INFER, **options: Any) -> httpx.Response:
    return server.client.post(path, content=body if isinstance(body, bytes) else json.dumps(body), **options)


def values(server: Server, model: str, rows: Sequence[Any], field: str = "value", **options: Any) -> list[Any]:
    """Return one field of each output of POST /infer."""
    return [output[field] for output in server.infer(model, list(rows), **options).json()["outputs"]]


# Triton's client.


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


# Bodies.


NUMBERS = st.integers(-2, 9) | st.sampled_from([2**31, 2**63, -(2**63), 2**70, True, None, 0.5, "1"])
PARAMETERS = st.dictionaries(
    st.sampled_from(["binary_data_size", "binary_data", "sequence_start", "priority", "timeout", "classification", "x"]),
    NUMBERS,
    max_size=2,
)
TENSORS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["text", "ids", "inputs", "lengths", "offsets", "x"]),
        "datatype": st.sampled_from([*DATATYPES, "BYTES", "x"]),
        "shape": st.lists(NUMBERS, max_size=3),
    },
    optional={
        "data": st.recursive(st.lists(NUMBERS, max_size=4), lambda inner: st.lists(inner, max_size=3)),
        "parameters": PARAMETERS,
    },
)
BODIES = st.fixed_dictionaries(
    {"inputs": st.lists(TENSORS, max_size=3)},
    optional={
        "id": st.text(max_size=3),
        "parameters": PARAMETERS,
        "outputs": st.lists(
            st.fixed_dictionaries(
                {"name": st.sampled_from(["label", "scores", "sequence", "value", "x"]), "parameters": PARAMETERS}
            ),
            max_size=2,
        ),
    },
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    model=st.sampled_from(["words", "speller", "forecaster", "tagger"]),
    body=BODIES,
    tail=st.binary(max_size=24),
    excess=st.sampled_from([None, 0, 0, 0, 1, -1]),
)
def test_random_body_gets_an_answer_or_a_known_error(
    server: Server, model: str, body: Any, tail: bytes, excess: int | None
) -> None:
    header = json.dumps(body).encode()
    headers = {} if excess is None else {HEADER_LENGTH: str(len(header) + excess)}
    answer = post(server, header + tail, f"/v2/models/{model}/infer", headers=headers)
    assert answer.status_code in (200, 400, 413, 504), answer.text
    assert answer.status_code == 200 or {"error", "code"} <= set(answer.json())


def test_any_content_type_is_accepted(server: Server) -> None:
    for media in (None, "application/json", "application/octet-stream", "text/plain"):
        assert post(server, VALID, headers={} if media is None else {"content-type": media}).status_code == 200


def test_json_outputs_have_the_shortest_decimals(server: Server) -> None:
    answer = post(server, {**VALID, "id": "ü"}).json()
    assert (answer["id"], answer["model_name"], answer["model_version"]) == ("ü", "words", "1")
    [output] = server.infer("words", VALID["inputs"][0]["data"]).json()["outputs"]
    assert {tensor["name"]: tensor["data"] for tensor in answer["outputs"]} == {
        "label": [output["label"]],
        "score": [output["score"]],
        "scores": list(output["scores"].values()),
    }


def test_root_is_served_with_and_without_a_slash(server: Server) -> None:
    assert server.client.get("/v2").json() == server.client.get("/v2/").json()
    assert server.client.get("/v2/health/live").json() == {"live": True}
    assert server.client.get("/v2/models/words/ready").json() == {"name": "words", "ready": True}


def tensors(body: dict[str, Any], *tail: bytes) -> tuple[bytes, dict[str, str]]:
    """Return a body with raw bytes after the JSON, and its headers."""
    header = json.dumps(body).encode()
    return b"".join((header, *tail)), {HEADER_LENGTH: str(len(header))}


def binary(size: Any) -> dict[str, Any]:
    return {"name": "ids", "datatype": "INT32", "shape": [2], "parameters": {"binary_data_size": size}}


def test_raw_tensors_follow_in_the_order_of_the_inputs(server: Server) -> None:
    lengths = {"name": "lengths", "datatype": "INT64", "shape": [1, 1], "parameters": {"binary_data_size": 8}}
    content, headers = tensors({"inputs": [lengths, binary(8)]}, struct.pack("<q", 1), struct.pack("<2i", 3, 4))
    answer = post(server, content, headers=headers).json()
    assert answer["outputs"][1]["data"] == values(server, "words", [[3]], "score")


@pytest.mark.parametrize(
    ("model", "body", "row"),
    [
        ("words", b"how far is the sea ?", "how far is the sea ?"),
        ("speller", struct.pack("<3i", 1, 2, 3), [1, 2, 3]),
        ("forecaster", struct.pack("<6f", 1, 2, 3, 4, 5, 6), [[1, 2, 3], [4, 5, 6]]),
    ],
)
def test_body_may_be_one_raw_sequence(server: Server, model: str, body: bytes, row: Any) -> None:
    answer = post(server, body, f"/v2/models/{model}/versions/1/infer", headers={HEADER_LENGTH: "0"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/octet-stream"
    size = int(answer.headers[HEADER_LENGTH])
    header = json.loads(answer.content[:size])
    [output] = server.infer(model, [row]).json()["outputs"]
    sizes = [tensor["parameters"]["binary_data_size"] for tensor in header["outputs"]]
    assert len(answer.content) == size + sum(sizes)
    if model == "words":
        label = output["label"].encode()
        assert answer.content[size : size + sizes[0]] == struct.pack("<I", len(label)) + label
    else:
        numbers = np.frombuffer(answer.content[size : size + sizes[0]], "i4" if model == "speller" else "f4")
        assert numbers.tolist() == pytest.approx(output["ids"] if model == "speller" else output["value"], rel=1e-5)


@pytest.mark.parametrize(
    ("model", "body", "field"),
    [
        ("words", b"\xff", "text[0]"),
        ("speller", b"", "ids"),
        ("speller", b"12345", "ids"),
        ("forecaster", b"1234", "inputs"),
    ],
)
def test_invalid_raw_sequence_gets_400(server: Server, model: str, body: bytes, field: str) -> None:
    answer = post(server, body, f"/v2/models/{model}/infer", headers={HEADER_LENGTH: "0"})
    refused(answer, 400, "invalid_input", field=field)


NOT_JSON: list[bytes] = [
    *(b"", b"{", b"status", b'{"x":' + b"[" * 250_000, b'{"x":' * 250_000),
    *(b'{"inputs": [{"name": "\xff"}]}', b'{"id": "\\ud800"}', b"\x00", json.dumps(VALID).encode() + b"x"),
    *(
        b'{"inputs": [{"name": "ids", "datatype": "FP32", "shape": [1], "data": [%s]}]}' % number
        for number in (b"NaN", b"Infinity")
    ),
]


@pytest.mark.parametrize("body", NOT_JSON, ids=range(len(NOT_JSON)))
def test_invalid_json_gets_400(server: Server, body: bytes) -> None:
    refused(post(server, body), 400, "invalid_request", "JSON")


@pytest.mark.parametrize("body", [b"null", b"3", b"[]", b'"inputs"', b"[" * 250_000])
def test_json_that_is_not_an_object_gets_400(server: Server, body: bytes) -> None:
    refused(post(server, body), 400, "invalid_request", "not an object")


TEXT = VALID["inputs"][0]
INVALID: list[tuple[dict[str, Any], str, str]] = [
    ({}, "inputs", "missing"),
    ({"inputs": {}}, "inputs", "expected `array`"),
    ({"inputs": [[]]}, "inputs[0]", "expected `object`"),
    ({"inputs": []}, "text", "missing"),
    ({"inputs": [3]}, "inputs[0]", "expected `object`"),
    ({"inputs": [{**TEXT, "name": 3}]}, "inputs[0].name", "expected `str`"),
    ({"inputs": [{"datatype": "BYTES", "shape": [1], "data": ["a"]}]}, "inputs[0].name", "missing"),
    ({"inputs": [{**TEXT, "shape": [1.5]}]}, "inputs[0].shape[0]", "expected `int`"),
    ({"inputs": [{**TEXT, "shape": [-1]}]}, "text", "[-1]"),
    ({"inputs": [{**TEXT, "shape": [2]}]}, "text", "has 1 values"),
    ({"inputs": [{**TEXT, "datatype": "STRING"}]}, "text", "'STRING'"),
    ({"inputs": [{**TEXT, "datatype": "BF16"}]}, "text", "raw bytes"),
    ({"inputs": [{**TEXT, "data": "how"}]}, "inputs[0].data", "expected `array`"),
    ({"inputs": [{**TEXT, "data": [3]}]}, "text", "3 at index 0"),
    ({"inputs": [{**TEXT, "data": [["how"], ["far"]], "shape": [3]}]}, "text", "nested"),
    ({"inputs": [{**TEXT, "parameters": 3}]}, "inputs[0].parameters", "expected `object"),
    ({"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1]}]}, "text", "either data or parameters.binary_data_size"),
    ({"inputs": [{**TEXT, "parameters": {"binary_data_size": 4}}]}, "text", "send exactly one of them"),
    ({**VALID, "outputs": [{}]}, "outputs[0].name", "missing"),
    (
        {**VALID, "outputs": [{"name": "score", "parameters": {"binary_data": 1}}]},
        "score.parameters.binary_data",
        "true or false",
    ),
    (
        {**VALID, "outputs": [{"name": "score", "parameters": {"classification": "2"}}]},
        "score.parameters.classification",
        "a string",
    ),
    ({**VALID, "parameters": {"binary_data_output": "yes"}}, "parameters.binary_data_output", "true or false"),
    ({**VALID, "parameters": []}, "parameters", "expected `object"),
    ({**VALID, "id": 7}, "id", "expected `str"),
]


@pytest.mark.parametrize(("body", "field", "text"), INVALID, ids=range(len(INVALID)))
def test_invalid_field_gets_400_with_its_name(server: Server, body: dict[str, Any], field: str, text: str) -> None:
    refused(post(server, body), 400, "invalid_input", text, field=field)


@pytest.mark.parametrize("value", ["-1", "+5", "5.0", "0x5", "five", "", "9" * 30, "1 2", "٥".encode()])
def test_header_length_that_is_not_a_number_gets_400(server: Server, value: Any) -> None:
    refused(post(server, VALID, headers={HEADER_LENGTH: value}), 400, "invalid_request", HEADER_LENGTH)


def test_two_header_lengths_get_400(server: Server) -> None:
    size = str(len(json.dumps(VALID)))
    answer = post(server, VALID, headers=[(HEADER_LENGTH, size), (HEADER_LENGTH, size)])
    refused(answer, 400, "invalid_request", "not a single whole number")


def test_header_length_beyond_the_body_gets_400(server: Server) -> None:
    refused(post(server, b"{}", headers={HEADER_LENGTH: "3"}), 400, "invalid_request", "is 3", "has 2 bytes")


@pytest.mark.parametrize("size", [-1, 7, 9, 2**70, 8.0, "8", True])
def test_invalid_size_of_raw_bytes_gets_400(server: Server, size: Any) -> None:
    content, headers = tensors({"inputs": [binary(size)]}, struct.pack("<2i", 3, 4))
    refused(post(server, content, headers=headers), 400, "invalid_input", field="ids")


def test_extra_raw_bytes_get_400(server: Server) -> None:
    content, headers = tensors({"inputs": [binary(8)]}, struct.pack("<3i", 3, 4, 5))
    refused(post(server, content, headers=headers), 400, "invalid_request", "12 bytes follow", "have 8")


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "identity", "GZIP"])
def test_header_length_applies_after_decompression(server: Server, encoding: str) -> None:
    content, headers = tensors({"inputs": [binary(8)]}, struct.pack("<2i", 3, 4))
    pack: Any = {"gzip": gzip.compress, "deflate": zlib.compress, "identity": bytes}[encoding.lower()]
    answer = post(server, pack(content), headers={**headers, "content-encoding": encoding})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, deflate", "*"])
def test_unknown_encoding_gets_415(server: Server, encoding: str) -> None:
    refused(post(server, VALID, headers={"content-encoding": encoding}), 415, "unsupported_media", "gzip")


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_broken_compressed_body_gets_400(server: Server, encoding: str, pack: Any) -> None:
    whole = pack(json.dumps(VALID).encode())
    for content in (b"", b"garbage", whole[:-1], whole[:10], whole + b"x", json.dumps(VALID).encode()):
        refused(post(server, content, headers={"content-encoding": encoding}), 400, "invalid_request", "compressed")


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_decompressed_size_is_limited(server: Server, encoding: str, pack: Any) -> None:
    limit = 16 << 20
    headers = {"content-encoding": encoding}
    at_limit = json.dumps(VALID).encode().ljust(limit)
    assert post(server, pack(at_limit), headers=headers).status_code == 200
    for content in (at_limit + b" ", bytes(40 * limit)):
        refused(post(server, pack(content), headers=headers), 413, "too_large", "SEQSERVE_MAX_BODY_BYTES", str(limit))


@pytest.mark.parametrize(
    ("accepted", "chosen"),
    [
        *(("gzip", "gzip"), ("deflate", "deflate"), ("br, GZIP;q=0.5", "gzip"), ("gzip;q=0, deflate", "deflate")),
        *(("*", None), ("identity", None), ("br", None), ("gzip; q=0.00", None)),
    ],
)
def test_response_has_an_accepted_encoding(server: Server, accepted: str, chosen: str | None) -> None:
    rows = {"name": "inputs", "datatype": "FP32", "shape": [60, 3], "data": [0.5] * 180}
    body = {"inputs": [rows], "outputs": [{"name": "sequence"}]}
    plain = post(server, body, "/v2/models/forecaster/infer", headers={"accept-encoding": "identity"})
    answer = post(server, body, "/v2/models/forecaster/infer", headers={"accept-encoding": accepted})
    assert (answer.status_code, answer.headers.get("content-encoding")) == (200, chosen)
    [output], [expected] = answer.json()["outputs"], plain.json()["outputs"]
    # The last digit depends on where the engine cuts the sequence.
    assert output.pop("data") == pytest.approx(expected.pop("data"), rel=1e-5)
    assert output == expected


def test_small_response_is_not_compressed(server: Server) -> None:
    assert "content-encoding" not in post(server, VALID, headers={"accept-encoding": "gzip"}).headers


@pytest.mark.parametrize(
    "path", ["/v2/models/words/versions/latest/infer", "/v2/models/words/versions/01/infer", "/v2/models/%2e/infer"]
)
def test_invalid_version_or_model_gets_404(server: Server, path: str) -> None:
    refused(post(server, VALID, path), 404, "unknown_model", field="version" if "versions" in path else "model")


def test_wrong_method_gets_405_and_unknown_path_404(server: Server) -> None:
    answer = server.client.get(INFER)
    refused(answer, 405, "method_not_allowed", "POST")
    assert answer.headers["allow"] == "POST"
    for path in ("/v2/models/words/generate", "/v2/models", "/v2/models/a/b/infer", "/v2/x"):
        refused(server.client.post(path), 404, "unknown_route")


def test_repository_requests_are_validated(server: Server) -> None:
    load = "/v2/repository/models/words/load"
    for body in (b"{", b'{"x":' + b"[" * 50_000):
        for path in ("/v2/repository/index", load):
            refused(server.client.post(path, content=body), 400, "invalid_request", "JSON")
    refused(server.client.post("/v2/repository/index", json={"ready": 1}), 400, "invalid_input", field="ready")
    config: Any = {"parameters": {"config": "{"}}
    refused(server.client.post(load, json=config), 400, "invalid_input", field="parameters.config")
    upload = {"parameters": {"file:1/model.onnx": "AAAA"}}
    refused(server.client.post(load, json=upload), 501, "unsupported", field="parameters.file:1/model.onnx")


def test_requests_are_counted_by_outcome(server: Server) -> None:
    def counts() -> list[float]:
        labels = [
            {"model": "words", "outcome": "ok"},
            {"model": "unknown", "outcome": "unknown_model"},
            {"outcome": "invalid_input"},
        ]
        return [server.metric("seqserve_requests_total", **selection) for selection in labels]

    before = counts()
    assert post(server, VALID).status_code == 200
    assert post(server, VALID, "/v2/models/nobody/infer").status_code == 404
    assert post(server, {**VALID, "parameters": {"priority": -1}}).status_code == 400
    assert counts() == [count + 1 for count in before]


def test_openapi_describes_the_protocol(server: Server) -> None:
    paths = server.client.get("/openapi.json").json()["paths"]
    model_paths = {
        f"/v2/models/{{name}}{version}{end}"
        for version in ("", "/versions/{version}")
        for end in ("", "/ready", "/config", "/stats", "/infer")
    }
    repository_paths = {f"/v2/repository/{end}" for end in ("index", "models/{name}/load", "models/{name}/unload")}
    assert {path for path in paths if path.startswith("/v2")} == {
        "/v2",
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/stats",
    } | model_paths | repository_paths
    infer = paths["/v2/models/{name}/infer"]["post"]
    schema = infer["requestBody"]["content"]["application/json"]["schema"]
    assert set(schema["properties"]) == {"id", "inputs", "outputs", "parameters"}
    assert "$ref" not in json.dumps(schema)
    assert set(infer["responses"]["200"]["content"]) == {"application/json", "application/octet-stream"}
    example = infer["requestBody"]["content"]["application/json"]["example"]
    assert post(server, example, "/v2/models/question-type-cnn/infer").status_code == 200


def test_disconnect_inside_a_body_is_harmless(server: Server) -> None:
    assert raw(server, b"POST /v2/models/words/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{") == b""
