"""The OpenAPI document: the group, the name and the errors of every route. The routes describe their bodies and parameters themselves."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict

from service import errors
from service.access.scopes import KEY_SCOPES, Scope
from service.errors import STATUS, ServiceError
from service.frontend.rest.scopes import HTTP_SCOPES, scopes_of

Kinds = tuple[type[ServiceError], ...]
_GROUPS = (
    (r"/(infer|tokens|models)", "Inference"),
    (r"/(stream|sessions)", "Sessions"),
    (r"/v2/repository", "Model repository"),
    (r"/v2", "Open Inference Protocol"),
    (r"/", "Operation"),
)
"""By the beginning of a path; the first that fits."""
_ANY: Kinds = (errors.InvalidRequest, errors.RequestTimeout, errors.HeadersTooLarge, errors.Overloaded, errors.InferenceFailed)
"""Errors of the connection and of the service, which any request may get."""
_ENGINE: Kinds = (errors.Unavailable, errors.EngineLost, errors.DeadlineExceeded)
_IMPORT: Kinds = (errors.InvalidInput, errors.SessionConflict, errors.SessionUnreachable, *_ENGINE)
_SESSION: Kinds = (*_IMPORT, errors.UnknownSession, errors.SessionExpired, errors.SessionLost)
_OPEN: Kinds = (errors.UnknownModel, errors.TooManySessions, errors.Overloaded)
_INFER: Kinds = (*_SESSION, *_OPEN, errors.QuotaExceeded, errors.OutOfMemory)
_ERRORS: tuple[tuple[str, Kinds], ...] = (
    (r"post /infer", _INFER),
    (r"post /v2/.*/infer", (*_INFER, errors.Unsupported)),
    (r"get /stream", (errors.InvalidRequest, errors.UnknownModel, errors.Unavailable)),
    (r"(get|delete) /sessions/.*", _SESSION),
    (r"put /sessions/.*", (*_IMPORT, *_OPEN)),
    (r"post /sessions/.*", (*_SESSION, *_OPEN)),
    (r"post /tokens|.*{name}.*", (errors.UnknownModel, errors.Unavailable)),
    (r"get /access", (errors.Unauthorized, errors.Forbidden)),
    (r"get (/readyz|/metrics|/v2/health/ready|/v2/models/stats)|post /v2/repository/index", (errors.Unavailable,)),
    (r"post .*/(un)?load", (errors.Unsupported,)),
    (r"post .*/load", (errors.InvalidModel, errors.NoRoom)),
    (r"post /debug/trace", _ENGINE),
)
"""By the method and the path: what scopes, bodies and queries do not tell."""


class ErrorBody(BaseModel):
    """Body of every error."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    error: str
    code: str
    field: str | None = None
    steps: int | None = None
    """How many steps the session has, if the request expected another number."""


def named_examples(**examples: dict[str, Any]) -> dict[str, Any]:
    """Return the examples of a body. An underscore in a name stands for a space."""
    return {name.replace("_", " "): {"value": example} for name, example in examples.items()}


def inline_schema(body: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON schema of a body without references: the API description does not resolve them."""
    [root], components = msgspec.json.schema_components([body], ref_template="{name}")

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(item) for item in node]
        if isinstance(node, dict):
            return resolve(components[node["$ref"]]) if "$ref" in node else {name: resolve(item) for name, item in node.items()}
        return node

    schema: dict[str, Any] = resolve(root)
    return schema


def describe(app: FastAPI, router: APIRouter, *, with_keys: bool) -> None:
    """Complete the description of all routes. with_keys: whether requests need a key, which /docs then asks for and sends."""
    app.openapi_tags = [{"name": group} for _, group in _GROUPS]
    for route in router.routes:
        if isinstance(route, APIRoute) and route.include_in_schema:
            _describe(route, with_keys)
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        if with_keys:
            document.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        return document

    app.openapi = openapi  # type: ignore[method-assign]

    @cache
    def content() -> bytes:
        return msgspec.json.encode(openapi())

    async def respond_document(request: Request) -> Response:
        return Response(content(), media_type="application/json")

    # FastAPI's own route writes the document anew for each request, which takes a millisecond and needs no key.
    app.add_route("/openapi.json", respond_document, include_in_schema=False)


def _describe(route: APIRoute, with_keys: bool) -> None:
    path, method = route.path_format, next(iter(route.methods or ()))
    route.tags = [next(group for beginning, group in _GROUPS if re.match(beginning, path))]
    name = route.description.partition(". ")[0].rstrip(".")
    route.summary = f"{name} (by version)" if "{version}" in path else name
    route.operation_id = "_".join(re.findall(r"\w+", f"{method} {path}")).lower()
    # STATE comes with SESSION, and PUBLIC with every key.
    needed = sorted(scopes_of(route.path) & set(KEY_SCOPES))
    extra = route.openapi_extra = dict(route.openapi_extra or {})
    if with_keys and needed:
        extra["security"] = [{"key": needed}]
    kinds = [kind for pattern, found in _ERRORS if re.fullmatch(pattern, f"{method.lower()} {path}") for kind in found]
    if HTTP_SCOPES[route.path] is not Scope.PUBLIC:
        kinds += [errors.Unauthorized, errors.Forbidden] if with_keys else [errors.Forbidden]
    if "requestBody" in extra:
        kinds += [errors.InvalidRequest, errors.InvalidInput, errors.TooLarge, errors.UnsupportedMedia]
    if any(parameter["in"] == "query" for parameter in extra.get("parameters", ())):
        kinds.append(errors.InvalidInput)
    codes: dict[int | str, dict[str, None]] = {}
    for kind in sorted(kinds, key=lambda kind: STATUS[kind].http):
        codes.setdefault(STATUS[kind].http, {})[kind.code] = None
    codes["default"] = dict.fromkeys(kind.code for kind in _ANY)
    route.responses = {code: {"model": ErrorBody, "description": ", ".join(codes[code])} for code in codes} | route.responses
