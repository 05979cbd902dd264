"""The REST face of the Open Inference Protocol V2, with Triton's extensions of it. It translates; `oip` and `oip_models` decide."""

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
from service.frontend.http_exchange import BYTES, PACKED, read_tensors, unless_gone, written
from service.frontend.inference import Frontend, check_ready, counted
from service.frontend.oip import json, types
from service.frontend.oip import metadata as oip_models
from service.frontend.oip.json import HEADER_LENGTH
from service.modeling.spec import NAME, VERSION

MODEL = "/v2/models/{name}"
VERSIONED = MODEL + "/versions/{version}"
LEAST_PACKED = 1024
"""Bytes of the smallest answer that is compressed for who asks for it: what is smaller gains nothing."""
ELSEWHERE = (
    *("/v2/systemsharedmemory/{rest:path}", "/v2/cudasharedmemory/{rest:path}"),
    *("/v2/trace/setting", MODEL + "/trace/setting", "/v2/logging"),
)
"""What Triton has and this service has not."""
_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "pattern": f"^{NAME.pattern}$"}}
_VERSION = {"name": "version", "in": "path", "required": True, "schema": {"type": "string", "pattern": f"^{VERSION.pattern}$"}}
PATHS = ((MODEL, [_NAME]), (VERSIONED, [_NAME, _VERSION]))
"""The newest version, and one that is named."""
_HEADER = {
    "name": HEADER_LENGTH,
    "in": "header",
    "required": False,
    "description": "How many bytes of the body are JSON: the whole body when left out, and none of one that is a single row of values.",
    "schema": {"type": "integer", "minimum": 0},
}

Responses = dict[int | str, dict[str, Any]]


class IndexBody(msgspec.Struct):
    """Which versions to list."""

    ready: Annotated[bool | None, Meta(description="true for those alone that are ready.")] = None


class RepositoryBody(msgspec.Struct):
    """How to load a model."""

    parameters: Annotated[
        dict[str, Any] | None,
        Meta(description="config: JSON in a string, of which version_policy may say which versions are to be served."),
    ] = None


def add(router: APIRouter, frontend: Frontend, responses: Responses) -> None:
    """Serve it, with these error responses described."""
    _add_infer(router, frontend, responses)
    _add_service(router, frontend, responses)
    _add_models(router, frontend, responses)
    _add_repository(router, frontend, responses)

    async def not_here(request: Request) -> Response:
        raise Unsupported(oip_models.NOT_HERE)

    for path in ELSEWHERE:
        router.add_api_route(path, not_here, methods=["GET", "POST"], include_in_schema=False)


def _add_infer(router: APIRouter, frontend: Frontend, responses: Responses) -> None:
    async def infer(request: Request) -> Response:
        """Answer with the model's head. Raw tensors may follow the JSON, of which Inference-Header-Content-Length then gives the size."""
        return await _infer(frontend, request)

    for path, parameters in PATHS:
        described: dict[str, Any] = {"parameters": [*parameters, _HEADER], **_QUESTION}
        answers: Responses = {**responses, 200: {"content": _ANSWERS}}
        router.add_api_route(path + "/infer", infer, methods=["POST"], responses=answers, openapi_extra=described)


def _add_service(router: APIRouter, frontend: Frontend, responses: Responses) -> None:
    @router.get("/v2/", include_in_schema=False)
    @router.get("/v2", responses=responses)
    async def server_metadata(request: Request) -> Response:
        """Name, version and the extensions of the protocol that are served."""
        return _json(frontend, oip_models.server_metadata())

    @router.get("/v2/health/live", responses=responses)
    async def live(request: Request) -> Response:
        """200 as long as this process answers."""
        return _json(frontend, {"live": True})

    @router.get("/v2/health/ready", responses=responses)
    async def ready(request: Request) -> Response:
        """200 when requests are answered, else 503."""
        check_ready(frontend)
        return _json(frontend, {"ready": True})


def _add_models(router: APIRouter, frontend: Frontend, responses: Responses) -> None:
    async def metadata(request: Request) -> Response:
        """The tensors that a model takes and gives, rows first."""
        return _json(frontend, oip_models.model_metadata(frontend, *_model(request)))

    async def ready(request: Request) -> Response:
        """200 when requests to this model are answered, else 503."""
        name, version = _model(request)
        if not oip_models.ready(frontend, name, version):
            raise Unavailable(f"{name} is not ready: retry later", field="model", retry_after=1)
        return _json(frontend, {"name": name, "ready": True})

    async def config(request: Request) -> Response:
        """The model in the words of Triton's ModelConfig."""
        return _json(frontend, oip_models.model_config(frontend, *_model(request)))

    async def statistics(request: Request) -> Response:
        """How many requests there were, and where their time went."""
        return _json(frontend, await unless_gone(request, oip_models.statistics(frontend, *_model(request))))

    @router.get("/v2/models/stats", responses=responses)
    async def all_statistics(request: Request) -> Response:
        """How many requests there were, and where their time went, of every model."""
        return _json(frontend, await unless_gone(request, oip_models.statistics(frontend)))

    for path, parameters in PATHS:
        extra: dict[str, Any] = {"parameters": parameters}
        for end, answer in (("", metadata), ("/ready", ready), ("/config", config), ("/stats", statistics)):
            router.add_api_route(path + end, answer, methods=["GET"], responses=responses, openapi_extra=extra)


def _add_repository(router: APIRouter, frontend: Frontend, responses: Responses) -> None:
    @router.post("/v2/repository/index", responses=responses, openapi_extra=_optional(IndexBody, {"ready": True}))
    async def index(request: Request) -> Response:
        """Every version in the models folder, and whether it is served."""
        body = json.parse(IndexBody, await read_tensors(request, frontend) or b"{}")
        return _json(frontend, await unless_gone(request, oip_models.index(frontend, ready=bool(body.ready))))

    extra = {"parameters": [_NAME], **_optional(RepositoryBody, {"parameters": {"config": '{"version_policy": {"all": {}}}'}})}

    @router.post("/v2/repository/models/{name}/load", responses=responses, openapi_extra=extra)
    async def load(request: Request) -> Response:
        """Serve what the folder of a model holds now; answered when it is served."""
        name, parameters = await _of_repository(frontend, request)
        await unless_gone(request, frontend.supervisor.load(name, oip_models.policy(parameters)))
        return _json(frontend, {"name": name})

    @router.post("/v2/repository/models/{name}/unload", responses=responses, openapi_extra=extra)
    async def unload(request: Request) -> Response:
        """Take a model out of service."""
        name, _ = await _of_repository(frontend, request)
        await unless_gone(request, frontend.supervisor.unload(name))
        return _json(frontend, {"name": name})


async def _infer(frontend: Frontend, request: Request) -> Response:
    with counted(frontend.metrics, time.monotonic()) as call:
        (name, version), header = _model(request), _header_length(request)
        body = await read_tensors(request, frontend)
        if header == 0:
            asked = json.read_raw(body, frontend.models.find(name, version or None).spec, name, version)
        else:
            asked = json.read(body, header, name, version)
        response = await unless_gone(request, types.infer(frontend, call, asked.request))
        return await _answered(frontend, request, *json.written(response, asked.raw))


async def _answered(frontend: Frontend, request: Request, content: bytes, header: int | None) -> Response:
    """header: how many bytes are JSON when others follow, before all of them are compressed for who asks for it."""
    encoding = _encoding(request) if len(content) >= LEAST_PACKED else None
    if encoding is not None:
        # Which may take longer than everybody else should have to wait.
        content = await asyncio.to_thread(_packed, content, encoding)
    response = written(frontend, content, "application/json" if header is None else BYTES)
    if header is not None:
        response.headers[HEADER_LENGTH] = str(header)
    if encoding is not None:
        response.headers["content-encoding"] = encoding
    return response


def _model(request: Request) -> tuple[str, str]:
    """Name and version of the path."""
    return request.path_params["name"], request.path_params.get("version", "")


async def _of_repository(frontend: Frontend, request: Request) -> tuple[str, dict[str, Any]]:
    """A model's name, and what is said of it."""
    body = json.parse(RepositoryBody, await read_tensors(request, frontend) or b"{}")
    return request.path_params["name"], body.parameters or {}


def _header_length(request: Request) -> int | None:
    said = request.headers.getlist(HEADER_LENGTH)
    if not said:
        return None
    if len(said) > 1 or not re.fullmatch("[0-9]{1,18}", said[0]):
        raise InvalidRequest(f"{HEADER_LENGTH} is no single number of bytes: send how many of the body are JSON")
    return int(said[0])


def _encoding(request: Request) -> str | None:
    """The compression that a caller asks for by its name; one that takes any gets none."""
    for part in request.headers.get("accept-encoding", "").lower().split(","):
        name, _, quality = part.partition(";")
        if name.strip() in PACKED and not re.fullmatch(r"\s*q=0(\.0*)?\s*", quality):
            return name.strip()
    return None


def _packed(content: bytes, encoding: str) -> bytes:
    packer = zlib.compressobj(1, wbits=PACKED[encoding])
    return packer.compress(content) + packer.flush()


def _json(frontend: Frontend, value: Any) -> Response:
    return written(frontend, msgspec.json.encode(value))


def _optional(body: type[msgspec.Struct], example: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": json.schema(body), "example": example}}
    return {"requestBody": {"required": False, "content": content}}


_EXAMPLE = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["How far is it from Denver to Aspen ?"]}]}
_RAW = {"schema": {"type": "string", "format": "binary"}}
_ANSWERS = {"application/json": {"schema": json.schema(json.InferAnswer)}, BYTES: _RAW}
_QUESTION = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": json.schema(json.InferBody), "example": _EXAMPLE}, BYTES: _RAW},
    }
}
