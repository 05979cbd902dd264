"""REST routes of the Open Inference Protocol V2, with Triton's extensions. They translate; `infer` and `metadata` decide."""

from __future__ import annotations

import asyncio
import re
import time
import zlib
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from service.errors import InvalidRequest, Unavailable, Unsupported
from service.frontend.decoder.client import MAX_LOOP_BODY_BYTES
from service.frontend.decompression import WINDOW_BITS
from service.frontend.http_exchange import (
    JSON,
    MANAGEMENT_LIMIT,
    OCTET_STREAM,
    caller_of,
    cancel_on_disconnect,
    identity_of,
    named_session,
    read_tensors,
    respond,
    respond_json,
)
from service.frontend.inference import Frontend, TrackedRequest, track_request
from service.frontend.large_answers import PIECE_VALUES
from service.frontend.oip import infer as oip_infer
from service.frontend.oip import json, metadata
from service.frontend.oip.inputs import text_bytes
from service.frontend.oip.json import HEADER_LENGTH
from service.frontend.oip.large_requests import DecodedInputs, RequestOptions
from service.frontend.oip.types import InferResponse
from service.frontend.openapi import named_examples
from service.frontend.session_header import DESCRIPTION
from service.ipc.messages import Api, DecodeBody
from service.modeling.spec import NAME, VERSION

MODEL = "/v2/models/{name}"
VERSIONED = MODEL + "/versions/{version}"
MIN_COMPRESSED_BYTES = 1024
"""Smaller responses are not compressed: they would not shrink enough."""
UNSUPPORTED_PATHS = (
    *("/v2/systemsharedmemory/{rest:path}", "/v2/cudasharedmemory/{rest:path}"),
    *("/v2/trace/setting", MODEL + "/trace/setting", "/v2/logging"),
)
"""Endpoints of Triton that this service does not support."""
_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "pattern": f"^{NAME.pattern}$"}}
_VERSION = {"name": "version", "in": "path", "required": True, "schema": {"type": "string", "pattern": f"^{VERSION.pattern}$"}}
MODEL_PATHS = ((MODEL, [_NAME]), (VERSIONED, [_NAME, _VERSION]))
"""Path prefixes and their parameters: without a version the newest is used."""
_HEADER = {
    "name": HEADER_LENGTH,
    "in": "header",
    "required": False,
    "description": "Size in bytes of the JSON at the start of the body. Without it, the whole body is JSON. "
    "With 0, the body is the raw values of a single sequence.",
    "schema": {"type": "integer", "minimum": 0},
}


class RepositoryIndexJson(msgspec.Struct):
    """The versions to list."""

    ready: Annotated[bool | None, Meta(description="true lists only the versions that are ready.")] = None


class RepositoryLoadJson(msgspec.Struct):
    """Options for loading a model."""

    parameters: Annotated[
        dict[str, Any] | None,
        Meta(description="config: a JSON object in a string; its version_policy selects the versions to serve."),
    ] = None


def add_routes(router: APIRouter, frontend: Frontend) -> None:
    """Add the protocol's routes."""
    _add_infer(router, frontend)
    _add_server(router, frontend)
    _add_models(router, frontend)
    _add_repository(router, frontend)

    async def unsupported(request: Request) -> Response:
        raise Unsupported(metadata.UNSUPPORTED_EXTENSION)

    for path in UNSUPPORTED_PATHS:
        router.add_api_route(path, unsupported, methods=["GET", "POST"], include_in_schema=False)


def _add_infer(router: APIRouter, frontend: Frontend) -> None:
    async def infer(request: Request) -> Response:
        """Run inference. Raw tensors may follow the JSON; Inference-Header-Content-Length is then the size of the JSON."""
        return await _infer(frontend, request)

    for path, parameters in MODEL_PATHS:
        description: dict[str, Any] = {"parameters": [*parameters, _HEADER, DESCRIPTION], **_INFER_REQUEST}
        router.add_api_route(
            path + "/infer", infer, methods=["POST"], responses={200: {"content": _INFER_RESPONSE}}, openapi_extra=description
        )


def _add_server(router: APIRouter, frontend: Frontend) -> None:
    @router.get("/v2/", include_in_schema=False)
    @router.get("/v2")
    async def server_metadata(request: Request) -> Response:
        """Return the name and version of the server and the supported protocol extensions."""
        return respond_json(frontend, metadata.server_metadata())


def _add_models(router: APIRouter, frontend: Frontend) -> None:
    async def model_metadata(request: Request) -> Response:
        """Return the inputs and outputs of a model. The first dimension of every shape counts the sequences."""
        return respond_json(frontend, metadata.model_metadata(frontend, *_path_model(request)))

    async def ready(request: Request) -> Response:
        """Return 200 if the model accepts inference requests, otherwise 503."""
        name, version = _path_model(request)
        if not metadata.model_ready(frontend, name, version):
            raise Unavailable(f"{name} is not ready: retry later", field="model", retry_after=1)
        return respond_json(frontend, {"name": name, "ready": True})

    async def config(request: Request) -> Response:
        """Return the model configuration as Triton's ModelConfig."""
        return respond_json(frontend, metadata.model_config(frontend, *_path_model(request)))

    async def statistics(request: Request) -> Response:
        """Return request counts and durations of a model."""
        asked = metadata.model_statistics(frontend, msgspec.json.encode, *_path_model(request))
        return respond(frontend, await cancel_on_disconnect(request, asked))

    @router.get("/v2/models/stats")
    async def all_statistics(request: Request) -> Response:
        """Return request counts and durations of all models."""
        return respond(frontend, await cancel_on_disconnect(request, metadata.model_statistics(frontend, msgspec.json.encode)))

    for path, parameters in MODEL_PATHS:
        extra: dict[str, Any] = {"parameters": parameters}
        for end, endpoint in (("", model_metadata), ("/ready", ready), ("/config", config), ("/stats", statistics)):
            router.add_api_route(path + end, endpoint, methods=["GET"], openapi_extra=extra)


def _add_repository(router: APIRouter, frontend: Frontend) -> None:
    index_body = _optional_body(RepositoryIndexJson, {"ready": True})

    @router.post("/v2/repository/index", openapi_extra=index_body)
    async def index(request: Request) -> Response:
        """List every version in the models folder and its state."""
        body = json.parse(RepositoryIndexJson, await read_tensors(request, frontend, MANAGEMENT_LIMIT) or b"{}")
        versions = await cancel_on_disconnect(request, metadata.repository_index(frontend, ready=bool(body.ready)))
        return respond_json(frontend, versions)

    example = {"parameters": {"config": '{"version_policy": {"all": {}}}'}}
    extra = {"parameters": [_NAME], **_optional_body(RepositoryLoadJson, example)}

    @router.post("/v2/repository/models/{name}/load", openapi_extra=extra)
    async def load(request: Request) -> Response:
        """Load or reload a model from the models folder. Returns when the model is served."""
        name, parameters = await _repository_request(frontend, request)
        await cancel_on_disconnect(request, frontend.supervisor.load(name, metadata.version_policy(parameters)))
        return respond_json(frontend, {"name": name})

    @router.post("/v2/repository/models/{name}/unload", openapi_extra=extra)
    async def unload(request: Request) -> Response:
        """Unload a model."""
        name, _ = await _repository_request(frontend, request)
        await cancel_on_disconnect(request, frontend.supervisor.unload(name))
        return respond_json(frontend, {"name": name})


async def _infer(frontend: Frontend, request: Request) -> Response:
    with track_request(frontend, time.monotonic(), caller_of(request), Api.OIP, identity_of(request)) as tracked:
        (name, version), header_length = _path_model(request), _header_length(request)
        data = await read_tensors(request, frontend)
        session = named_session(request)
        answering = _answer_data(frontend, tracked, data, header_length, name, version, session)
        response, raw = await cancel_on_disconnect(request, answering)
        return await _infer_response(frontend, request, *await encode_response(frontend, response, raw))


async def _answer_data(
    frontend: Frontend,
    tracked: TrackedRequest,
    data: bytes,
    header_length: int | None,
    name: str,
    version: str,
    session: str | None = None,
) -> tuple[InferResponse, json.RawOutputs]:
    """Return the response to the request in a body, and which of its outputs are sent as raw bytes; raises a ServiceError.

    session: that the header names.
    """
    if min(len(data), len(data) if header_length is None else header_length) <= MAX_LOOP_BODY_BYTES:
        parsed = parse_infer(frontend, data, header_length, name, version)
        if header_length == 0 or text_bytes(parsed.request.inputs) <= MAX_LOOP_BODY_BYTES:
            return await oip_infer.infer(frontend, tracked, parsed.request, header=session), parsed.raw
    async with frontend.decoder.decode(DecodeBody("oip_json", header_length, name, version), data) as body:
        options = msgspec.json.decode(body.options, type=RequestOptions)
        decoded = DecodedInputs(options, body)
        return await oip_infer.infer(frontend, tracked, options.request(), decoded=decoded, header=session), options.raw


def parse_infer(frontend: Frontend, body: bytes, header_length: int | None, name: str, version: str) -> json.ParsedRequest:
    """Return the request in a body; raises a ServiceError. header_length: the value of HEADER_LENGTH, if the client sent it."""
    if header_length == 0:
        return json.parse_raw_sequence(body, frontend.catalog.find(name, version or None).spec, name, version)
    return json.parse_request(body, header_length, name, version)


async def encode_response(frontend: Frontend, response: InferResponse, raw: json.RawOutputs) -> tuple[bytes, int | None]:
    """Return the body of a response, and the size of its JSON if raw bytes follow it. A large response is written in pieces."""
    if sum(tensor.value_count for tensor in response.outputs) <= PIECE_VALUES:
        return json.encode_response(response, raw)
    pieces = await asyncio.to_thread(json.response_pieces, response, raw)
    header = await frontend.large_answers.join(pieces.json)
    if not pieces.tail:
        return header, None
    return await frontend.large_answers.join([header, *pieces.tail]), len(header)


async def _infer_response(frontend: Frontend, request: Request, content: bytes, header_length: int | None) -> Response:
    """Return the response, compressed if the client accepts it. header_length: the size of the JSON if raw bytes follow it."""
    accepted = accepted_encoding(request.headers.get("accept-encoding", ""))
    encoding = accepted if len(content) >= MIN_COMPRESSED_BYTES else None
    if encoding is not None:
        # In a thread: a large response would hold up every other request on the event loop.
        content = await asyncio.to_thread(compress, content, encoding)
    response = respond(frontend, content, JSON if header_length is None else OCTET_STREAM)
    if header_length is not None:
        response.headers[HEADER_LENGTH] = str(header_length)
    if encoding is not None:
        response.headers["content-encoding"] = encoding
    return response


def _path_model(request: Request) -> tuple[str, str]:
    """Return the model name and version in the path. The version is empty if the path has none."""
    return request.path_params["name"], request.path_params.get("version", "")


async def _repository_request(frontend: Frontend, request: Request) -> tuple[str, dict[str, Any]]:
    """Return the model name and the parameters of a load or unload request."""
    body = json.parse(RepositoryLoadJson, await read_tensors(request, frontend, MANAGEMENT_LIMIT) or b"{}")
    return request.path_params["name"], body.parameters or {}


def _header_length(request: Request) -> int | None:
    values = request.headers.getlist(HEADER_LENGTH)
    if not values:
        return None
    if len(values) > 1 or not re.fullmatch("[0-9]{1,18}", values[0]):
        raise InvalidRequest(f"{HEADER_LENGTH} is not a single whole number: send the size of the JSON in bytes")
    return int(values[0])


def accepted_encoding(header: str) -> str | None:
    """Return the first supported encoding in an Accept-Encoding header. `*` selects none."""
    for part in header.lower().split(","):
        name, _, quality = part.partition(";")
        if name.strip() in WINDOW_BITS and not re.fullmatch(r"\s*q=0(\.0*)?\s*", quality):
            return name.strip()
    return None


def compress(content: bytes | memoryview, encoding: str) -> bytes:
    """Return the content in a supported encoding, at the fastest level."""
    compressor = zlib.compressobj(1, wbits=WINDOW_BITS[encoding])
    return compressor.compress(content) + compressor.flush()


def _optional_body(body: type[msgspec.Struct], example: dict[str, Any]) -> dict[str, Any]:
    content = {JSON: {"schema": json.inline_schema(body), "example": example}}
    return {"requestBody": {"required": False, "content": content}}


_ROWS = {"name": "inputs", "datatype": "FP32", "shape": [1, 2, 3], "data": [0.1, 0.5, 0.3, 0.2, 0.4, 0.3]}
_EXAMPLES: dict[str, dict[str, Any]] = {
    "text": {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["How far is it from Denver to Aspen ?"]}]},
    "token_ids": {"inputs": [{"name": "ids", "datatype": "INT32", "shape": [1, 4], "data": [4, 11, 2, 7]}]},
    "rows_of_numbers": {"inputs": [_ROWS]},
}
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_INFER_RESPONSE = {JSON: {"schema": json.inline_schema(json.InferResponseJson)}, OCTET_STREAM: _BINARY}
_INFER_REQUEST = {
    "requestBody": {
        "required": True,
        "content": {
            JSON: {"schema": json.inline_schema(json.InferRequestJson), "examples": named_examples(**_EXAMPLES)},
            OCTET_STREAM: _BINARY,
        },
    }
}
