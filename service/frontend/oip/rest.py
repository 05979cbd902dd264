"""REST routes of the Open Inference Protocol V2, with Triton's extensions. They translate; `infer` and `metadata` decide."""

from __future__ import annotations

import re
from contextlib import AsyncExitStack
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from service.errors import InvalidRequest, Unavailable, Unsupported
from service.frontend.oip import json, metadata
from service.frontend.oip.http_infer import HttpCall, HttpRunner, accepted_encoding
from service.frontend.oip.json import HEADER_LENGTH
from service.frontend.rest.http_exchange import (
    JSON,
    MANAGEMENT_LIMIT,
    OCTET_STREAM,
    answer_request,
    cancel_on_disconnect,
    named_session,
    read_tensors,
    respond,
    respond_json,
)
from service.frontend.rest.openapi import inline_schema, named_examples
from service.frontend.run.frontend import Frontend
from service.frontend.run.runner import DecodedRequest
from service.frontend.run.session_header import DESCRIPTION
from service.modeling.spec import NAME, VERSION

MODEL = "/v2/models/{name}"
VERSIONED = MODEL + "/versions/{version}"
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

    @router.get("/v2/", include_in_schema=False)
    @router.get("/v2")
    async def server_metadata(request: Request) -> Response:
        """Return the name and version of the server and the supported protocol extensions."""
        return respond_json(frontend, metadata.server_metadata())

    _add_models(router, frontend)
    _add_repository(router, frontend)

    async def unsupported(request: Request) -> Response:
        raise Unsupported(metadata.UNSUPPORTED_EXTENSION)

    for path in UNSUPPORTED_PATHS:
        router.add_api_route(path, unsupported, methods=["GET", "POST"], include_in_schema=False)


def _add_infer(router: APIRouter, frontend: Frontend) -> None:
    runner = HttpRunner(frontend)

    async def infer(request: Request) -> Response:
        """Run inference. Raw tensors may follow the JSON; Inference-Header-Content-Length is then the size of the JSON."""
        return await _infer(frontend, runner, request)

    for path, parameters in MODEL_PATHS:
        description: dict[str, Any] = {"parameters": [*parameters, _HEADER, DESCRIPTION], **_INFER_REQUEST}
        router.add_api_route(
            path + "/infer", infer, methods=["POST"], responses={200: {"content": _INFER_RESPONSE}}, openapi_extra=description
        )


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
        encoding = metadata.model_statistics(frontend, msgspec.json.encode, *_path_model(request))
        return respond(frontend, await cancel_on_disconnect(request, encoding))

    @router.get("/v2/models/stats")
    async def all_statistics(request: Request) -> Response:
        """Return request counts and durations of all models."""
        return respond(frontend, await cancel_on_disconnect(request, metadata.model_statistics(frontend, msgspec.json.encode)))

    for path, parameters in MODEL_PATHS:
        description: dict[str, Any] = {"parameters": parameters}
        for end, endpoint in (("", model_metadata), ("/ready", ready), ("/config", config), ("/stats", statistics)):
            router.add_api_route(path + end, endpoint, methods=["GET"], openapi_extra=description)


def _add_repository(router: APIRouter, frontend: Frontend) -> None:
    index_body = _optional_body(RepositoryIndexJson, {"ready": True})

    @router.post("/v2/repository/index", openapi_extra=index_body)
    async def index(request: Request) -> Response:
        """List every version in the models folder and its state."""
        body = json.parse(RepositoryIndexJson, await read_tensors(request, frontend, MANAGEMENT_LIMIT) or b"{}")
        versions = await cancel_on_disconnect(request, metadata.repository_index(frontend, ready=bool(body.ready)))
        return respond_json(frontend, versions)

    example = {"parameters": {"config": '{"version_policy": {"all": {}}}'}}
    description = {"parameters": [_NAME], **_optional_body(RepositoryLoadJson, example)}

    @router.post("/v2/repository/models/{name}/load", openapi_extra=description)
    async def load(request: Request) -> Response:
        """Load or reload a model from the models folder. Returns when the model is served."""
        name, parameters = await _repository_request(frontend, request)
        await cancel_on_disconnect(request, frontend.supervisor.load(name, metadata.version_policy(parameters)))
        return respond_json(frontend, {"name": name})

    @router.post("/v2/repository/models/{name}/unload", openapi_extra=description)
    async def unload(request: Request) -> Response:
        """Unload a model."""
        name, _ = await _repository_request(frontend, request)
        await cancel_on_disconnect(request, frontend.supervisor.unload(name))
        return respond_json(frontend, {"name": name})


async def _infer(frontend: Frontend, runner: HttpRunner, request: Request) -> Response:
    async def read(request: Request, frontend: Frontend) -> bytes:
        _header_length(request)  # a wrong number is refused before the body is read
        return await read_tensors(request, frontend)

    async def decode(data: bytes, stack: AsyncExitStack) -> DecodedRequest:
        encoding = accepted_encoding(request.headers.get("accept-encoding", ""))
        call = HttpCall(request.scope["path"], *_path_model(request), _header_length(request), encoding)
        return await runner.decode_slowly(call, data, named_session(request), stack)

    return await answer_request(frontend, request, runner, read, decode)


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


def _optional_body(body: type[msgspec.Struct], example: dict[str, Any]) -> dict[str, Any]:
    content = {JSON: {"schema": inline_schema(body), "example": example}}
    return {"requestBody": {"required": False, "content": content}}


_ROWS = {"name": "inputs", "datatype": "FP32", "shape": [1, 2, 3], "data": [0.1, 0.5, 0.3, 0.2, 0.4, 0.3]}
_EXAMPLES: dict[str, dict[str, Any]] = {
    "text": {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["How far is it from Denver to Aspen ?"]}]},
    "token_ids": {"inputs": [{"name": "ids", "datatype": "INT32", "shape": [1, 4], "data": [4, 11, 2, 7]}]},
    "rows_of_numbers": {"inputs": [_ROWS]},
}
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_INFER_RESPONSE = {JSON: {"schema": inline_schema(json.InferResponseJson)}, OCTET_STREAM: _BINARY}
_INFER_REQUEST = {
    "requestBody": {
        "required": True,
        "content": {
            JSON: {"schema": inline_schema(json.InferRequestJson), "examples": named_examples(**_EXAMPLES)},
            OCTET_STREAM: _BINARY,
        },
    }
}
