"""The ASGI application: the routes of every HTTP API and the responses to errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Set
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Match, Route, WebSocketRoute
from starlette.types import ASGIApp

from service import __version__
from service.access.scopes import Scope
from service.errors import Forbidden, MethodNotAllowed, ServiceError, UnknownRoute
from service.frontend.oip import rest as oip_rest
from service.frontend.rest import access, debug, docs_page, health, infer, models, openapi, sessions, tokens, websocket
from service.frontend.rest.http_exchange import DirectRoute, IdentifyingApp, respond_error
from service.frontend.rest.scopes import HTTP_SCOPES, scopes_of
from service.frontend.run.exchange import ClientDisconnected
from service.frontend.run.frontend import Frontend
from service.frontend.ui import page

CLIENT_CLOSED_REQUEST = 499
"""nginx's status code for a disconnected client."""
Handler = Callable[[Request, Exception], Awaitable[Response]]


def build_app(frontend: Frontend, scopes: Set[Scope] = frozenset(Scope), grpc_port: int | None = None) -> FastAPI:
    """Return the ASGI application. scopes: of the endpoints that it has. grpc_port: of the service, None without gRPC.

    FastAPI routes requests and generates the OpenAPI document; the endpoints read, validate and write by themselves (DirectRoute).
    """
    app = FastAPI(
        title="seqserve",
        version=__version__,
        description="A model server for sequence models.",
        openapi_url=None,  # openapi.py has the route
        docs_url=None,  # FastAPI's own page loads its scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,  # a redirect names the Host of the request, and is sent before any check
    )
    app.state.frontend = frontend
    router = APIRouter(route_class=DirectRoute, redirect_slashes=False)
    # Starlette tries routes in this order. Probes need no key, so they cost least, and the routes of inference come next.
    health.add_routes(router, frontend)
    infer.add_routes(router, frontend)
    oip_rest.add_routes(router, frontend)
    sessions.add_routes(router, frontend)
    websocket.add_routes(router, frontend)
    models.add_routes(router, frontend)
    tokens.add_routes(router, frontend)
    access.add_routes(router, frontend, scopes, grpc_port)
    debug.add_routes(router, frontend)
    docs_page.add_routes(router)
    if frontend.settings.page:
        page.add_routes(router)
    router.routes = [route for route in router.routes if _path(route) not in HTTP_SCOPES or scopes_of(_path(route)) <= scopes]
    openapi.describe(app, router, with_keys=bool(frontend.settings.keys))
    app.include_router(router)

    if frontend.access.policy.origins:
        # It wraps only the sending side: a wrapper around the receiving side would hide that a client has disconnected.
        app.add_middleware(
            Preflights,
            frontend=frontend,
            allow_origins=list(frontend.access.policy.origins),
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    app.add_exception_handler(ServiceError, _error_handler(frontend))
    app.add_exception_handler(HTTPException, _routing_error_handler(frontend, router))
    app.add_exception_handler(ClientDisconnected, _handle_disconnect)
    app.add_exception_handler(Exception, _error_handler(frontend))
    # The outermost layer: Starlette answers unexpected exceptions outside of the layers that are added.
    app.build_middleware_stack = IdentifyingApp.around(app.build_middleware_stack, frontend.request_ids)  # type: ignore[method-assign]
    return app


class Preflights(CORSMiddleware):
    """Answers what browsers ask before a request of another origin, after the same checks, and adds their headers to replies."""

    def __init__(self, app: ASGIApp, /, frontend: Frontend, **options: Any) -> None:
        super().__init__(app, **options)
        self._frontend = frontend

    def preflight_response(self, request_headers: Headers) -> Response:
        """Return the answer to a preflight. Browsers send it without a key."""
        response = super().preflight_response(request_headers)
        try:
            self._frontend.access.policy.check_page(request_headers.get("host", ""), request_headers["origin"])
        except Forbidden as error:
            return respond_error(self._frontend, error)
        refusal = Forbidden(f"web pages may not send this request: {bytes(response.body).decode()}")
        return response if response.status_code == 200 else respond_error(self._frontend, refusal)


def _path(route: BaseRoute) -> str:
    assert isinstance(route, Route | WebSocketRoute)
    return route.path


def _error_handler(frontend: Frontend) -> Handler:
    async def handle(request: Request, error: Exception) -> Response:
        return respond_error(frontend, frontend.error_for(error))

    return handle


def _routing_error_handler(frontend: Frontend, router: APIRouter) -> Handler:
    """Return the handler of Starlette's own errors: a path that no route has, or a method that the path does not have."""

    async def handle(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            allowed = ", ".join(sorted(_allowed_methods(request, router)))
            return respond_error(frontend, MethodNotAllowed(f"this path allows only {allowed}: see /docs"), {"Allow": allowed})
        return respond_error(frontend, UnknownRoute("no route has this path: see /docs"))

    return handle


def _allowed_methods(request: Request, router: APIRouter) -> set[str]:
    """Return the methods of all routes at the request's path; Starlette's Allow header has the methods of a single route."""
    routes = [route for route in (*request.app.routes, *router.routes) if isinstance(route, Route)]
    matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return {method for route in matching for method in route.methods or ()}


async def _handle_disconnect(request: Request, error: Exception) -> Response:
    """Return a response that no client reads: the ASGI server expects one."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)
