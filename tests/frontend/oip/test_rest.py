"""The REST API of the Open Inference Protocol: a call of Triton's client, and what depends on HTTP."""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from service.frontend.oip.http_infer import accepted_encoding
from service.frontend.oip.json import HEADER_LENGTH
from tests.frontend.conftest import BODY_BYTES
from tests.frontend.in_process import InProcess
from tests.frontend.rest.test_infer import refused
from tests.serving import check_unharmed

INFER = "/v2/models/words/infer"
VALID: dict[str, Any] = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["how far is the sea ?"]}]}
PACK: dict[str, Any] = {"gzip": gzip.compress, "deflate": zlib.compress}


@pytest.fixture(scope="module", autouse=True)
def unharmed(heads: InProcess) -> Iterator[None]:
    yield
    check_unharmed(heads)


def post(heads: InProcess, body: Any, path: str = INFER, **options: Any) -> httpx.Response:
    return heads.client.post(path, content=body if isinstance(body, bytes) else json.dumps(body), **options)


def test_triton_client_over_http(heads: InProcess) -> None:
    """tests/long/test_triton.py has every option of the client."""
    with triton.InferenceServerClient(heads.address.removeprefix("http://")) as client:
        assert client.is_server_live() and client.is_model_ready("words", "1") and not client.is_model_ready("nobody")
        texts = triton.InferInput("text", [2, 1], "BYTES")
        texts.set_data_from_numpy(np.array([[b"how far"], [b"sea"]], object))
        outputs = [triton.InferRequestedOutput(name, binary_data=name != "label") for name in ("label", "score")]
        answer = client.infer("words", [texts], outputs=outputs, request_id="mine")
        assert answer.get_response()["id"] == "mine"
        expected = heads.infer("words", ["how far", "sea"]).json()["outputs"]
        assert answer.as_numpy("label")[:, 0].tolist() == [output["label"] for output in expected]
        assert answer.as_numpy("score")[:, 0].tolist() == pytest.approx([output["score"] for output in expected])
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
    for path in ("/v2/repository/index", load := "/v2/repository/models/words/load"):
        refused(post(heads, b"{", path), 400, "invalid_request", "JSON")
        refused(post(heads, b" " * (64 << 10) + b"{}", path), 413, "too_large")
    refused(post(heads, {"ready": 1}, "/v2/repository/index"), 400, "invalid_input", field="ready")
    refused(post(heads, {"parameters": {"config": "{"}}, load), 400, "invalid_input", field="parameters.config")


def test_open_session_outlives_its_model(heads: InProcess) -> None:
    body = {"model": "speller", "inputs": [[1, 2]]}
    for general in ({}, {"te": "trailers"}):
        session = {**body, "session": "kept"}
        assert post(heads, session, "/infer", headers=general).status_code == 200
        assert post(heads, b"", "/v2/repository/models/speller/unload").status_code == 200
        assert post(heads, {**session, "start": False}, "/infer", headers=general).json()["session"]["steps"] == 4
        assert post(heads, {**session, "end": True}, "/infer", headers=general).status_code == 200
        refused(post(heads, body, "/infer", headers=general), 404, "unknown_model", field="model")
        assert post(heads, b"", "/v2/repository/models/speller/load").status_code == 200


def test_any_content_type_is_accepted_and_outcomes_are_counted(heads: InProcess) -> None:
    def counts() -> list[float]:
        labels = [{"model": "words", "outcome": "ok"}, {"model": "unknown", "outcome": "unknown_model"}]
        return [heads.metric("seqserve_requests_total", **selection) for selection in [*labels, {"outcome": "invalid_input"}]]

    before = counts()
    for media in ("application/octet-stream", "text/plain"):
        answer = post(heads, VALID, headers={"content-type": media})
        [output] = heads.infer("words", VALID["inputs"][0]["data"]).json()["outputs"]
        assert {tensor["name"]: tensor["data"] for tensor in answer.json()["outputs"]} == {
            "label": [output["label"]],
            "score": [output["score"]],
            "scores": list(output["scores"].values()),
        }
    refused(post(heads, VALID, "/v2/models/nobody/infer"), 404, "unknown_model", field="model")
    refused(post(heads, {**VALID, "parameters": {"priority": -1}}), 400, "invalid_input", field="parameters.priority")
    assert [after - count for count, after in zip(before, counts(), strict=True)] == [4, 1, 1]


def test_paths_and_methods(heads: InProcess) -> None:
    assert heads.client.get("/v2").json() == heads.client.get("/v2/").json()
    assert heads.client.get("/v2/health/live").json() == {"live": True}
    assert heads.client.get("/v2/models/words/ready").json() == {"name": "words", "ready": True}
    refused(heads.client.get(INFER), 405, "method_not_allowed", "POST")
    refused(post(heads, VALID, "/v2/models/words/versions/01/infer"), 404, "unknown_model", field="version")
    refused(post(heads, VALID, "/v2/models/%2e/infer"), 404, "unknown_model", field="model")
    for path in ("/v2/models/words/generate", "/v2/models", "/v2/models/a/b/infer", "/v2/x"):
        refused(heads.client.post(path), 404, "unknown_route")


def test_body_may_be_one_raw_sequence(heads: InProcess) -> None:
    rows = struct.pack("<6f", 1, 2, 3, 4, 5, 6)
    answer = post(heads, rows, "/v2/models/forecaster/versions/1/infer", headers={HEADER_LENGTH: "0"})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/octet-stream"), answer.text
    size = int(answer.headers[HEADER_LENGTH])
    [output] = heads.infer("forecaster", [[[1, 2, 3], [4, 5, 6]]]).json()["outputs"]
    assert np.frombuffer(answer.content[size:], "f4").tolist() == pytest.approx(output["value"], rel=1e-5)
    refused(post(heads, b"\xff", headers={HEADER_LENGTH: "0"}), 400, "invalid_input", field="text[0]")


@pytest.mark.parametrize("value", ["-1", "+5", "5.0", "", "9" * 19, "1 2", "٥".encode(), "twice"])
def test_header_length_is_a_single_number(heads: InProcess, value: Any) -> None:
    headers = [(HEADER_LENGTH, "2"), (HEADER_LENGTH, "2")] if value == "twice" else [(HEADER_LENGTH, value)]
    refused(post(heads, VALID, headers=headers), 400, "invalid_request", "not a single whole number")


@pytest.mark.parametrize("encoding", PACK)
def test_body_may_be_compressed(heads: InProcess, encoding: str) -> None:
    """The header length applies after decompression, and so does the limit of the size."""
    headers, pack = {"content-encoding": encoding.upper()}, PACK[encoding]
    ids = {"name": "ids", "datatype": "INT32", "shape": [2], "parameters": {"binary_data_size": 8}}
    document = json.dumps({"inputs": [ids]}).encode()
    answer = post(heads, pack(document + struct.pack("<2i", 3, 4)), headers={**headers, HEADER_LENGTH: str(len(document))})
    assert answer.status_code == 200, answer.text
    too_large = pack(json.dumps(VALID).encode().ljust(BODY_BYTES + 1))
    refused(post(heads, too_large, headers=headers), 413, "too_large", "SEQSERVE_MAX_BODY_BYTES", str(BODY_BYTES))
    whole = pack(json.dumps(VALID).encode())
    for content in (b"", b"garbage", whole[:-1], whole + b"x"):
        refused(post(heads, content, headers=headers), 400, "invalid_request", "compressed")
    for other in ("br", "gzip, deflate", "*"):
        refused(post(heads, VALID, headers={"content-encoding": other}), 415, "unsupported_media", "gzip")


def test_response_has_an_accepted_encoding(heads: InProcess) -> None:
    rows = {"name": "inputs", "datatype": "FP32", "shape": [60, 3], "data": [0.5] * 180}
    body, path = {"inputs": [rows], "outputs": [{"name": "sequence"}]}, "/v2/models/forecaster/infer"
    plain, *packed = [post(heads, body, path, headers={"accept-encoding": name}) for name in ("identity", *PACK)]
    assert "content-encoding" not in plain.headers
    for name, answer in zip(PACK, packed, strict=True):
        assert (answer.headers["content-encoding"], answer.json()) == (name, plain.json())
    assert "content-encoding" not in post(heads, VALID, headers={"accept-encoding": "gzip"}).headers, "it is small"
    accepted = {"br, GZIP;q=0.5": "gzip", "gzip;q=0, deflate": "deflate", "*": None, "identity": None, "gzip; q=0.00": None}
    assert {header: accepted_encoding(header) for header in accepted} == accepted


def test_openapi_describes_the_protocol(heads: InProcess) -> None:
    paths = heads.client.get("/openapi.json").json()["paths"]
    assert {"/v2", "/v2/health/live", "/v2/models/{name}/versions/{version}/infer", "/v2/repository/index"} < set(paths)
    infer = paths["/v2/models/{name}/infer"]["post"]
    assert set(infer["responses"]["200"]["content"]) == {"application/json", "application/octet-stream"}
    content = infer["requestBody"]["content"]["application/json"]
    assert set(content["schema"]["properties"]) == {"id", "inputs", "outputs", "parameters"}
    assert "$ref" not in json.dumps(content["schema"])
    assert {example["value"]["inputs"][0]["name"] for example in content["examples"].values()} == {"text", "ids", "inputs"}
    assert post(heads, content["examples"]["text"]["value"]).status_code == 200
