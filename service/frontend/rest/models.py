"""GET /models: the served models."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from service.frontend.http_exchange import respond_json
from service.frontend.inference import Frontend


def add_routes(router: APIRouter, frontend: Frontend) -> None:
    """Add GET /models."""

    @router.get("/models")
    async def models(request: Request) -> Response:
        """List every served model version, with the kernels that run it, and the versions that cannot be served, with the reason."""
        return respond_json(frontend, {"models": _list_models(frontend), "unavailable": _list_unavailable(frontend)})


def _list_unavailable(frontend: Frontend) -> list[dict[str, Any]]:
    return [
        {"name": entry.name, "version": entry.version or None, "ready": False, "reason": entry.reason}
        for entry in frontend.catalog.unavailable
    ]


def _list_models(frontend: Frontend) -> list[dict[str, Any]]:
    loaded = {model.key: model for model in frontend.dispatcher.models}
    entries = []
    for name, versions in frontend.catalog.index.items():
        if name != next(iter(versions.values())).spec.name:
            continue  # an alias
        for version, model in versions.items():
            aliases = [
                alias for alias, targets in frontend.catalog.index.items() if targets.get(version) is model and alias != name
            ]
            running = loaded.get(model.key)
            entries.append(
                {
                    "name": name,
                    "version": version,
                    "aliases": aliases,
                    "description": model.spec.description,
                    "ready": running is not None,
                    "input": model.spec.input.model_dump(exclude_none=True),
                    "min_steps": model.spec.min_steps,
                    "head": model.spec.head.model_dump(),
                    "precision": model.spec.precision,
                    "device": running.device if running else None,
                    "backends": running.backends if running else [],
                    "folding": msgspec.structs.asdict(running.folding) if running and running.folding else None,
                    "streams": running is not None and running.streams,
                    "weight_bytes": running.weight_bytes if running else 0,
                }
            )
    return entries
