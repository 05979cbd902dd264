"""The OpenAPI document: the group, the name and the errors of every route. The routes describe their bodies and parameters themselves."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict

from service import errors
from service.access.scopes import KEY_SCOPES, Scope
from service.errors import STATUS, ServiceError
from service.frontend.scopes import HTTP_SCOPES, scopes_of

Kinds = tuple[type[ServiceError], ...]
OPERATION = "Operation"
GROUPS = {
    "Inference": "Run models on texts, token ids or rows of numbers.",
    "Sessions": "Sequences that arrive in chunks.",
    "Open Inference Protocol": "Inference for KServe's and Triton's clients.",
    "Model repository": "Load and unload models.",
    OPERATION: "Health, metrics and traces.",
}
_GROUP_OF = {
    **dict.fromkeys(("infer", "tokens", "models"), "Inference"),
    **dict.fromkeys(("stream", "sessions"), "Sessions"),
    "v2/repository": "Model repository",
    "v2": "Open Inference Protocol",
}
"""By the first segments of a path."""

_ANYWHERE: Kinds = (
    errors.InvalidRequest,
    errors.RequestTimeout,
    errors.HeadersTooLarge,
    errors.Overloaded,
    errors.InferenceFailed,
)
"""Errors of the connection, and of the service."""
_BODY: Kinds = (errors.InvalidRequest, errors.InvalidInput, errors.TooLarge, errors.UnsupportedMedia)
_MODEL: Kinds = (errors.UnknownModel, errors.Unavailable)
_ENGINE: Kinds = (errors.Unavailable, errors.EngineLost, errors.DeadlineExceeded)
_IMPORT: Kinds = (errors.InvalidInput, errors.SessionConflict, errors.SessionUnreachable, *_ENGINE)
_SESSION: Kinds = (*_IMPORT, errors.UnknownSession, errors.SessionExpired, errors.SessionLost)
_OPEN: Kinds = (errors.UnknownModel, errors.TooManySessions, errors.Overloaded)
_INFER: Kinds = (*_SESSION, *_OPEN, errors.QuotaExceeded, errors.OutOfMemory)
_ERRORS: dict[str, Kinds] = {
    "post /infer": _INFER,
    "post /v2/models/{name}/infer": (*_INFER, errors.Unsupported),
    "post /v2/models/{name}/versions/{version}/infer": (*_INFER, errors.Unsupported),
    "get /stream": (errors.InvalidRequest, *_MODEL),
    "get /sessions/{id}/state": _SESSION,
    "put /sessions/{id}/state": (*_IMPORT, *_OPEN),
    "delete /sessions/{id}/state": _SESSION,
    "post /sessions/{id}/fork": (*_SESSION, *_OPEN),
    "post /tokens": _MODEL,
    "get /access": (errors.Unauthorized, errors.Forbidden),
    "get /readyz": (errors.Unavailable,),
    "get /metrics": (errors.Unavailable,),
    "get /v2/health/ready": (errors.Unavailable,),
    "get /v2/models/stats": (errors.Unavailable,),
    "post /v2/repository/index": (errors.Unavailable,),
    "post /v2/repository/models/{name}/load": (errors.InvalidModel, errors.NoRoom, errors.Unsupported),
    "post /v2/repository/models/{name}/unload": (errors.Unsupported,),
    "post /debug/trace": _ENGINE,
}
"""What a method and a path do not tell by themselves."""


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


def describe(app: FastAPI, router: APIRouter, *, with_keys: bool) -> None:
    """Complete the description of all routes. with_keys: whether requests need a key, which /docs then asks for and sends."""
    app.openapi_tags = [{"name": name, "description": text} for name, text in GROUPS.items()]
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


def _describe(route: APIRoute, with_keys: bool) -> None:
    path, [method] = route.path_format, route.methods
    segments = path[1:].split("/")
    route.tags = [_GROUP_OF.get("/".join(segments[:2])) or _GROUP_OF.get(segments[0], OPERATION)]
    name = route.description.partition(". ")[0].rstrip(".")
    route.summary = f"{name} (by version)" if "{version}" in path else name
    route.operation_id = "_".join(re.findall(r"\w+", f"{method} {path}")).lower()
    # STATE comes with SESSION, and PUBLIC with every key.
    needed = sorted(scopes_of(route.path) & set(KEY_SCOPES))
    extra = route.openapi_extra = dict(route.openapi_extra or {})
    if with_keys and needed:
        extra["security"] = [{"key": needed}]
    route.responses = {
        **_described(_errors_of(route, f"{method.lower()} {path}", extra, with_keys)),
        "default": {"model": ErrorBody, "description": f"Errors of any request: {_codes(_ANYWHERE)}"},
        **route.responses,
    }


def _errors_of(route: APIRoute, operation: str, extra: dict[str, Any], with_keys: bool) -> list[type[ServiceError]]:
    """Return the errors that a route has besides those of any request."""
    kinds = [*_ERRORS.get(operation, ())]
    if HTTP_SCOPES[route.path] is not Scope.PUBLIC:
        kinds += [errors.Unauthorized, errors.Forbidden] if with_keys else [errors.Forbidden]
    if "requestBody" in extra:
        kinds += _BODY
    if any(parameter["in"] == "query" for parameter in extra.get("parameters", ())):
        kinds.append(errors.InvalidInput)
    if "{name}" in operation:
        kinds += _MODEL
    return kinds


def _described(kinds: Iterable[type[ServiceError]]) -> dict[int | str, dict[str, Any]]:
    """Return the description of errors by status code."""
    codes: dict[int, list[type[ServiceError]]] = {}
    for kind in dict.fromkeys(kinds):
        codes.setdefault(STATUS[kind].http, []).append(kind)
    return {code: {"model": ErrorBody, "description": _codes(codes[code])} for code in sorted(codes)}


def _codes(kinds: Iterable[type[ServiceError]]) -> str:
    return ", ".join(kind.code for kind in kinds)
