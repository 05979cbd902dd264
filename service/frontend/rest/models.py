"""GET /models: the served models. GET /models/{name}/card: the card of one."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from service.frontend.rest.http_exchange import respond, respond_json
from service.frontend.rest.schemas import QueryParameters, describe_query
from service.frontend.run.frontend import Frontend
from service.ipc.messages.models import ModelKey

MARKDOWN = "text/markdown; charset=utf-8"
_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
_CARD: dict[int | str, Any] = {200: {"content": {"text/markdown": {"schema": {"type": "string"}}}}}


class CardQuery(QueryParameters):
    """Query parameters of GET /models/{name}/card."""

    endpoint = "/models/{name}/card"

    version: str | None = None
    """Version of the model; the newest by default."""


def add_routes(router: APIRouter, frontend: Frontend) -> None:
    """Add GET /models and GET /models/{name}/card."""

    @router.get("/models")
    async def models(request: Request) -> Response:
        """List the served models. Each version has the kernels that run it, and each that cannot be served has the reason."""
        unavailable = [
            {"name": entry.name, "version": entry.version or None, "ready": False, "reason": entry.reason}
            for entry in frontend.catalog.unavailable
        ]
        return respond_json(frontend, {"models": _list_models(frontend), "unavailable": unavailable})

    @router.get(
        "/models/{name}/card",
        responses=_CARD,
        response_class=Response,
        openapi_extra={"parameters": [_NAME, *describe_query(CardQuery)["parameters"]]},
    )
    async def card(request: Request) -> Response:
        """Return the card of a model. At most the first 64 KiB of its card.md when it was loaded; empty for a model without one."""
        query = CardQuery.parse(request.query_params.multi_items())
        model = frontend.catalog.find(request.path_params["name"], query.version)
        return respond(frontend, model.card, MARKDOWN)


def _list_models(frontend: Frontend) -> list[dict[str, Any]]:
    loaded = {model.key: model for model in frontend.dispatcher.models}
    aliases = _aliases(frontend)
    entries = []
    for name, versions in frontend.catalog.index.items():
        if name != next(iter(versions.values())).spec.name:
            continue  # an alias
        for version, model in versions.items():
            running = loaded.get(model.key)
            entries.append(
                {
                    "name": name,
                    "version": version,
                    "aliases": aliases.get(model.key, []),
                    "description": model.spec.description,
                    "ready": running is not None,
                    "input": model.spec.input.model_dump(exclude_none=True),
                    "min_steps": model.spec.min_steps,
                    "layers": [layer.model_dump(exclude_defaults=True) for layer in model.spec.layers],
                    "head": model.spec.head.model_dump(),
                    "precision": model.spec.precision,
                    "device": running.device if running else None,
                    "backends": running.backends if running else [],
                    "streams": running is not None and running.streams,
                    "weight_bytes": model.weight_bytes,
                }
            )
    return entries


def _aliases(frontend: Frontend) -> dict[ModelKey, list[str]]:
    """Return the aliases of each model version."""
    aliases: dict[ModelKey, list[str]] = {}
    for name, versions in frontend.catalog.index.items():
        for model in versions.values():
            if name != model.spec.name:
                aliases.setdefault(model.key, []).append(name)
    return aliases
