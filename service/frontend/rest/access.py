"""GET /access: the caller, and the scopes that it may use."""

from __future__ import annotations

from collections.abc import Set

from fastapi import APIRouter, Request, Response

from service import __version__
from service.access.caller import ANYBODY
from service.access.scopes import Scope
from service.frontend.rest.http_exchange import authorization_of, identify, respond_json
from service.frontend.run.frontend import Frontend


def add_routes(router: APIRouter, frontend: Frontend, scopes: Set[Scope], grpc_port: int | None) -> None:
    """Add GET /access. scopes: of the endpoints on this port. grpc_port: of the service, None without gRPC."""

    @router.get("/access")
    async def access(request: Request) -> Response:
        """Name the caller, and list the scopes that it may use on this port. Without a key, where keys are needed, these are few."""
        needs_key = bool(frontend.settings.keys) and authorization_of(request) is None
        caller = ANYBODY if needs_key else await identify(frontend, request)
        allowed = {Scope.PUBLIC} if needs_key else caller.scopes
        return respond_json(
            frontend,
            {
                "caller": caller.name,
                "needs_key": needs_key,
                "scopes": sorted(allowed & scopes),
                "version": __version__,
                "grpc_port": grpc_port,
            },
        )
