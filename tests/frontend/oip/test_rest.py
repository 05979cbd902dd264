"""The REST API of the Open Inference Protocol: a call of Triton's client, and bodies that are invalid, compressed or binary."""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException

from service.frontend.oip.json import HEADER_LENGTH
from service.frontend.oip.tensors import DATATYPES
from tests.frontend.conftest import BODY_BYTES
from tests.frontend.in_process import InProcess
from tests.frontend.rest.test_infer import refused
from tests.serving import check_unharmed

INFER = "/v2/models/words/infer"
VALID: dict[str, Any] = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["how far is the sea ?"]}]}


@pytest.fixture(autouse=True)
def unharmed(heads: InProcess) -> Iterator[None]:
    yield
    check_unharmed(heads)


def post(heads: InProcess, body: Any, path: str = INFER, **options: Any) -> httpx.Response:
    return heads.client.post(path, content=body if isinstance(body, bytes) else json.dumps(body), **options)


def values(heads: InProcess, model: str, rows: Sequence[Any], field: str = "value") -> list[Any]:
    """Return one field of each output of POST /infer."""
    return [output[field] for output in heads.infer(model, list(rows)).json()["outputs"]]


def test_triton_client_over_http(heads: InProcess) -> None:
    """tests/long/test_triton_http.py has every option of the client."""
    with triton.InferenceServerClient(heads.address.removeprefix("http://")) as client:
        assert client.is_server_live() and client.is_model_ready("words", "1") and not client.is_model_ready("nobody")
        texts = triton.InferInput("text", [2, 1], "BYTES")
        texts.set_data_from_numpy(np.array([[b"how far"], [b"sea"]], object))
        outputs = [triton.InferRequestedOutput(name, binary_data=name != "label") for name in ("scores", "label", "score")]
        answer = client.infer("words", [texts], outputs=outputs, request_id="mine")
        described = answer.get_response()
        assert (described["id"], [output["name"] for output in described["outputs"]]) == ("mine", ["scores", "label", "score"])
        assert [output.get("parameters") for output in described["outputs"]] == [
            *({"binary_data_size": 24}, None, {"binary_data_size": 8}),
        ]
        assert answer.as_numpy("label")[:, 0].tolist() == values(heads, "words", ["how far", "sea"], "label")
        np.testing.assert_array_equal(answer.as_numpy("score"), answer.as_numpy("scores").max(axis=1, keepdims=True))
        with pytest.raises(InferenceServerException, match="no version 9") as raised:
            client.infer("words", [texts], model_version="9")
        assert raised.value.status() == "404"
        shared = triton.InferInput("text", [1], "BYTES")
        shared.set_shared_memory("mine", 8)
        for call in (lambda: client.infer("words", [shared]), client.get_trace_settings, client.get_log_settings):
            with pytest.raises(InferenceServerException, match="send") as raised:
                call()
            assert raised.value.status() == "501"


def test_repository_is_listed_and_models_are_unloaded_and_loaded(heads: InProcess) -> None:
    listed = {"name": "halver", "version": "1", "state": "READY", "reason": ""}
    assert listed in post(heads, b"", "/v2/repository/index").json()
    for change, status in (("unload", 404), ("load", 200)):
        assert post(heads, b"", f"/v2/repository/models/halver/{change}").status_code == 200
        assert heads.client.get("/v2/models/halver").status_code == status
        refused(post(heads, b"", f"/v2/repository/models/nobody/{change}"), 404, "unknown_model", field="model")


def test_open_session_outlives_its_model(heads: InProcess) -> None:
    for general in ({}, {"te": "trailers"}):
        body = {"model": "speller", "inputs": [[1, 2]]}
        session = {**body, "session": "kept"}
        assert post(heads, session, "/infer", headers=general).status_code == 200
        assert post(heads, b"", "/v2/repository/models/speller/unload").status_code == 200
        assert post(heads, {**session, "start": False}, "/infer", headers=general).json()["session"]["steps"] == 4
        assert post(heads, {**session, "end": True}, "/infer", headers=general).status_code == 200
        refused(post(heads, body, "/infer", headers=general), 404, "unknown_model", field="model")
        assert post(heads, b"", "/v2/repository/models/speller/load").status_code == 200


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
    heads: InProcess, model: str, body: Any, tail: bytes, excess: int | None
) -> None:
    header = json.dumps(body).encode()
    headers = {} if excess is None else {HEADER_LENGTH: str(len(header) + excess)}
    answer = post(heads, header + tail, f"/v2/models/{model}/infer", headers=headers)
    assert answer.status_code in (200, 400, 413, 504), answer.text
    assert answer.status_code == 200 or {"error", "code"} <= set(answer.json())


def test_any_content_type_is_accepted(heads: InProcess) -> None:
    for media in (None, "application/json", "application/octet-stream", "text/plain"):
        assert post(heads, VALID, headers={} if media is None else {"content-type": media}).status_code == 200


def test_json_outputs_have_the_shortest_decimals(heads: InProcess) -> None:
    answer = post(heads, {**VALID, "id": "ü"}).json()
    assert (answer["id"], answer["model_name"], answer["model_version"]) == ("ü", "words", "1")
    [output] = heads.infer("words", VALID["inputs"][0]["data"]).json()["outputs"]
    assert {tensor["name"]: tensor["data"] for tensor in answer["outputs"]} == {
        "label": [output["label"]],
        "score": [output["score"]],
        "scores": list(output["scores"].values()),
    }


def test_root_is_served_with_and_without_a_slash(heads: InProcess) -> None:
    assert heads.client.get("/v2").json() == heads.client.get("/v2/").json()
    assert heads.client.get("/v2/health/live").json() == {"live": True}
    assert heads.client.get("/v2/models/words/ready").json() == {"name": "words", "ready": True}


def tensors(body: dict[str, Any], *tail: bytes) -> tuple[bytes, dict[str, str]]:
    """Return a body with raw bytes after the JSON, and its headers."""
    header = json.dumps(body).encode()
    return b"".join((header, *tail)), {HEADER_LENGTH: str(len(header))}


def binary(size: Any) -> dict[str, Any]:
    return {"name": "ids", "datatype": "INT32", "shape": [2], "parameters": {"binary_data_size": size}}


def test_raw_tensors_follow_in_the_order_of_the_inputs(heads: InProcess) -> None:
    lengths = {"name": "lengths", "datatype": "INT64", "shape": [1, 1], "parameters": {"binary_data_size": 8}}
    content, headers = tensors({"inputs": [lengths, binary(8)]}, struct.pack("<q", 1), struct.pack("<2i", 3, 4))
    answer = post(heads, content, headers=headers).json()
    assert answer["outputs"][1]["data"] == values(heads, "words", [[3]], "score")


@pytest.mark.parametrize(
    ("model", "body", "row"),
    [
        ("words", b"how far is the sea ?", "how far is the sea ?"),
        ("speller", struct.pack("<3i", 1, 2, 3), [1, 2, 3]),
        ("forecaster", struct.pack("<6f", 1, 2, 3, 4, 5, 6), [[1, 2, 3], [4, 5, 6]]),
    ],
)
def test_body_may_be_one_raw_sequence(heads: InProcess, model: str, body: bytes, row: Any) -> None:
    answer = post(heads, body, f"/v2/models/{model}/versions/1/infer", headers={HEADER_LENGTH: "0"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/octet-stream"
    size = int(answer.headers[HEADER_LENGTH])
    header = json.loads(answer.content[:size])
    [output] = heads.infer(model, [row]).json()["outputs"]
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
def test_invalid_raw_sequence_gets_400(heads: InProcess, model: str, body: bytes, field: str) -> None:
    answer = post(heads, body, f"/v2/models/{model}/infer", headers={HEADER_LENGTH: "0"})
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
def test_invalid_json_gets_400(heads: InProcess, body: bytes) -> None:
    refused(post(heads, body), 400, "invalid_request", "JSON")


@pytest.mark.parametrize("body", [b"null", b"3", b"[]", b'"inputs"', b"[" * 250_000])
def test_json_that_is_not_an_object_gets_400(heads: InProcess, body: bytes) -> None:
    refused(post(heads, body), 400, "invalid_request", "not an object")


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
def test_invalid_field_gets_400_with_its_name(heads: InProcess, body: dict[str, Any], field: str, text: str) -> None:
    refused(post(heads, body), 400, "invalid_input", text, field=field)


@pytest.mark.parametrize("value", ["-1", "+5", "5.0", "0x5", "five", "", "9" * 30, "1 2", "٥".encode()])
def test_header_length_that_is_not_a_number_gets_400(heads: InProcess, value: Any) -> None:
    refused(post(heads, VALID, headers={HEADER_LENGTH: value}), 400, "invalid_request", HEADER_LENGTH)


def test_two_header_lengths_get_400(heads: InProcess) -> None:
    size = str(len(json.dumps(VALID)))
    answer = post(heads, VALID, headers=[(HEADER_LENGTH, size), (HEADER_LENGTH, size)])
    refused(answer, 400, "invalid_request", "not a single whole number")


def test_header_length_beyond_the_body_gets_400(heads: InProcess) -> None:
    refused(post(heads, b"{}", headers={HEADER_LENGTH: "3"}), 400, "invalid_request", "is 3", "has 2 bytes")


@pytest.mark.parametrize("size", [-1, 7, 9, 2**70, 8.0, "8", True])
def test_invalid_size_of_raw_bytes_gets_400(heads: InProcess, size: Any) -> None:
    content, headers = tensors({"inputs": [binary(size)]}, struct.pack("<2i", 3, 4))
    refused(post(heads, content, headers=headers), 400, "invalid_input", field="ids")


def test_extra_raw_bytes_get_400(heads: InProcess) -> None:
    content, headers = tensors({"inputs": [binary(8)]}, struct.pack("<3i", 3, 4, 5))
    refused(post(heads, content, headers=headers), 400, "invalid_request", "12 bytes follow", "have 8")


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "identity", "GZIP"])
def test_header_length_applies_after_decompression(heads: InProcess, encoding: str) -> None:
    content, headers = tensors({"inputs": [binary(8)]}, struct.pack("<2i", 3, 4))
    pack: Any = {"gzip": gzip.compress, "deflate": zlib.compress, "identity": bytes}[encoding.lower()]
    answer = post(heads, pack(content), headers={**headers, "content-encoding": encoding})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, deflate", "*"])
def test_unknown_encoding_gets_415(heads: InProcess, encoding: str) -> None:
    refused(post(heads, VALID, headers={"content-encoding": encoding}), 415, "unsupported_media", "gzip")


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_broken_compressed_body_gets_400(heads: InProcess, encoding: str, pack: Any) -> None:
    whole = pack(json.dumps(VALID).encode())
    for content in (b"", b"garbage", whole[:-1], whole[:10], whole + b"x", json.dumps(VALID).encode()):
        refused(post(heads, content, headers={"content-encoding": encoding}), 400, "invalid_request", "compressed")


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_decompressed_size_is_limited(heads: InProcess, encoding: str, pack: Any) -> None:
    limit = BODY_BYTES
    headers = {"content-encoding": encoding}
    at_limit = json.dumps(VALID).encode().ljust(limit)
    assert post(heads, pack(at_limit), headers=headers).status_code == 200
    for content in (at_limit + b" ", bytes(40 * limit)):
        refused(post(heads, pack(content), headers=headers), 413, "too_large", "SEQSERVE_MAX_BODY_BYTES", str(limit))


@pytest.mark.parametrize(
    ("accepted", "chosen"),
    [
        *(("gzip", "gzip"), ("deflate", "deflate"), ("br, GZIP;q=0.5", "gzip"), ("gzip;q=0, deflate", "deflate")),
        *(("*", None), ("identity", None), ("br", None), ("gzip; q=0.00", None)),
    ],
)
def test_response_has_an_accepted_encoding(heads: InProcess, accepted: str, chosen: str | None) -> None:
    rows = {"name": "inputs", "datatype": "FP32", "shape": [60, 3], "data": [0.5] * 180}
    body = {"inputs": [rows], "outputs": [{"name": "sequence"}]}
    plain = post(heads, body, "/v2/models/forecaster/infer", headers={"accept-encoding": "identity"})
    answer = post(heads, body, "/v2/models/forecaster/infer", headers={"accept-encoding": accepted})
    assert (answer.status_code, answer.headers.get("content-encoding")) == (200, chosen)
    [output], [expected] = answer.json()["outputs"], plain.json()["outputs"]
    assert output == expected
    assert "content-encoding" not in post(heads, VALID, headers={"accept-encoding": accepted}).headers, "it is small"


@pytest.mark.parametrize(
    "path", ["/v2/models/words/versions/latest/infer", "/v2/models/words/versions/01/infer", "/v2/models/%2e/infer"]
)
def test_invalid_version_or_model_gets_404(heads: InProcess, path: str) -> None:
    refused(post(heads, VALID, path), 404, "unknown_model", field="version" if "versions" in path else "model")


def test_wrong_method_gets_405_and_unknown_path_404(heads: InProcess) -> None:
    answer = heads.client.get(INFER)
    refused(answer, 405, "method_not_allowed", "POST")
    assert answer.headers["allow"] == "POST"
    for path in ("/v2/models/words/generate", "/v2/models", "/v2/models/a/b/infer", "/v2/x"):
        refused(heads.client.post(path), 404, "unknown_route")


def test_repository_requests_are_validated(heads: InProcess) -> None:
    load = "/v2/repository/models/words/load"
    for body in (b"{", b'{"x":' + b"[" * 50_000):
        for path in ("/v2/repository/index", load):
            refused(heads.client.post(path, content=body), 400, "invalid_request", "JSON")
    refused(heads.client.post("/v2/repository/index", json={"ready": 1}), 400, "invalid_input", field="ready")
    config: Any = {"parameters": {"config": "{"}}
    refused(heads.client.post(load, json=config), 400, "invalid_input", field="parameters.config")
    upload = {"parameters": {"file:1/model.onnx": "AAAA"}}
    refused(heads.client.post(load, json=upload), 501, "unsupported", field="parameters.file:1/model.onnx")


def test_requests_are_counted_by_outcome(heads: InProcess) -> None:
    def counts() -> list[float]:
        labels = [
            {"model": "words", "outcome": "ok"},
            {"model": "unknown", "outcome": "unknown_model"},
            {"outcome": "invalid_input"},
        ]
        return [heads.metric("seqserve_requests_total", **selection) for selection in labels]

    before = counts()
    assert post(heads, VALID).status_code == 200
    assert post(heads, VALID, "/v2/models/nobody/infer").status_code == 404
    assert post(heads, {**VALID, "parameters": {"priority": -1}}).status_code == 400
    assert counts() == [count + 1 for count in before]


def test_openapi_describes_the_protocol(heads: InProcess) -> None:
    paths = heads.client.get("/openapi.json").json()["paths"]
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
    assert post(heads, example, "/v2/models/words/infer").status_code == 200
