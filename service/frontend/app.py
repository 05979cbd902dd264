"""The HTTP door: POST /infer, health, metrics, models and the API's description. It translates; `wire` validates."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response, WebSocket
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.routing import Match, Route

from service import __version__
from service.errors import STATUS, InvalidRequest, MethodNotAllowed, ServiceError, UnknownRoute
from service.frontend.http_exchange import Direct, error, read_json, unless_gone, written
from service.frontend.inference import CallerGone, Frontend, answer, bug, check_ready, counted
from service.frontend.oip import rest, statistics
from service.frontend.rest import schemas, sessions
from service.frontend.rest.websocket import stream
from service.metrics import render

CLIENT_CLOSED = 499


def build(frontend: Frontend) -> FastAPI:
    """The ASGI application. No middleware: one that wraps the receive channel would hide that a caller has gone."""
    app = FastAPI(title="seqserve", version=__version__, description="Sequences in, answers out.", redoc_url=None)
    responses: dict[int | str, dict[str, Any]] = {
        code: {"model": schemas.ErrorBody} for code in sorted({status.http for status in STATUS.values()})
    }

    hot = APIRouter(route_class=Direct)

    @hot.post("/infer", response_model=schemas.InferAnswer, responses=responses, openapi_extra=_infer_body())
    async def infer(request: Request) -> Response:
        """Answer each input with the model's head."""
        with counted(frontend.metrics, time.monotonic()) as call:
            body = schemas.InferBody.parse(await read_json(request, frontend))
            return written(frontend, await unless_gone(request, answer(frontend, call, body)))

    # Routes are tried in their order: those that have to be fast come first.
    rest.add(hot, frontend, responses)

    @hot.post(
        "/debug/trace",
        include_in_schema=frontend.settings.debug,
        responses=responses,
        openapi_extra=_parameters(schemas.TraceQuery),
    )
    async def trace(request: Request) -> Response:
        """Record the next turns of every engine, and answer with what ui.perfetto.dev and chrome://tracing open."""
        return await _trace(frontend, request)

    @hot.get("/stream", responses=responses, openapi_extra=_parameters(schemas.StreamQuery))
    async def stream_without_upgrade(request: Request) -> Response:
        """A WebSocket: a session whose chunks are its messages, each answered by one, as /infer answers."""
        raise InvalidRequest("this path is a WebSocket: connect with ws:// or wss://, or send chunks to /infer")

    sessions.add(hot, frontend, responses)
    app.include_router(hot)

    @app.websocket("/stream")
    async def stream_chunks(socket: WebSocket) -> None:
        await stream(frontend, socket)

    @app.websocket("/{path:path}")
    async def no_stream(socket: WebSocket) -> None:
        raise UnknownRoute("no WebSocket is served at this path: see /docs")

    @app.get("/models")
    async def models() -> Response:
        """Every served model and version, with the kernels that run it."""
        return _json({"models": _models(frontend)})

    @app.get("/healthz")
    async def healthz() -> Response:
        """200 as long as this process answers."""
        return _json({"live": True})

    @app.get("/readyz", responses=responses)
    async def readyz() -> Response:
        """200 when requests are answered, 503 while loading, while no engine is ready, or while draining."""
        check_ready(frontend)
        return _json({"ready": True})

    @app.get("/metrics", response_class=PlainTextResponse, responses=responses)
    async def metrics() -> Response:
        """All processes' time series in Prometheus' text format."""
        snapshot = await frontend.supervisor.scrape()
        return Response(render(snapshot, statistics.families(snapshot)), media_type="text/plain; version=0.0.4; charset=utf-8")

    app.add_exception_handler(ServiceError, _refused(frontend))
    app.add_exception_handler(HTTPException, _no_route(frontend, hot))
    app.add_exception_handler(CallerGone, _unheard)
    app.add_exception_handler(Exception, _bug(frontend))
    _describe(app)
    return app


async def _trace(frontend: Frontend, request: Request) -> Response:
    if not frontend.settings.debug:
        raise UnknownRoute("nothing is traced, as SEQSERVE_DEBUG is off: start the service with --debug, or SEQSERVE_DEBUG=1")
    wanted = schemas.TraceQuery.parse(request.query_params.multi_items())
    recorded = await unless_gone(request, frontend.engines.trace(wanted.batches, wanted.seconds))
    # Joined as text: to read them all would keep every other request waiting.
    events = b",".join(events[1:-1] for events in recorded)
    return Response(b'{"traceEvents": [' + events + b"]}", media_type="application/json")


def _models(frontend: Frontend) -> list[dict[str, Any]]:
    loaded = {one.key: one for one in frontend.engines.models}
    listed = []
    for name, versions in frontend.catalog.items():
        if name != next(iter(versions.values())).spec.name:
            continue
        for version, model in versions.items():
            aliases = [alias for alias, other in frontend.catalog.items() if other.get(version) is model and alias != name]
            running = loaded.get(model.key)
            listed.append(
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
                    "streams": running is not None and running.streams,
                    "weight_bytes": running.weight_bytes if running else 0,
                }
            )
    return listed


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


Handler = Callable[[Request, Exception], Awaitable[Response]]


def _refused(frontend: Frontend) -> Handler:
    async def handle(request: Request, fault: Exception) -> Response:
        assert isinstance(fault, ServiceError)
        return error(frontend, fault)

    return handle


def _no_route(frontend: Frontend, hot: APIRouter) -> Handler:
    async def handle(request: Request, fault: Exception) -> Response:
        assert isinstance(fault, HTTPException)
        if fault.status_code == 405:
            allowed = ", ".join(sorted(_methods(request, hot)))
            return error(frontend, MethodNotAllowed(f"this path takes {allowed} only: see /docs"), {"Allow": allowed})
        return error(frontend, UnknownRoute("nothing is served at this path: see /docs"))

    return handle


def _methods(request: Request, hot: APIRouter) -> set[str]:
    """All that a path takes: the router names those of one of its routes."""
    routes = [route for route in (*request.app.routes, *hot.routes) if isinstance(route, Route)]
    return {method for route in routes if route.matches(request.scope)[0] is not Match.NONE for method in route.methods or ()}


def _bug(frontend: Frontend) -> Handler:
    async def handle(request: Request, fault: Exception) -> Response:
        return error(frontend, bug(frontend, fault))

    return handle


async def _unheard(request: Request, fault: Exception) -> Response:
    """Nobody hears it; the server wants to have an answer."""
    return Response(status_code=CLIENT_CLOSED)


def _infer_body() -> dict[str, Any]:
    return schemas.described(schemas.InferBody, {"model": "question-type", "inputs": ["How far is it from Denver to Aspen ?"]})


def _parameters(query: type[schemas.Query]) -> dict[str, Any]:
    schema = query.model_json_schema(by_alias=True)
    required = schema.get("required", [])
    return {
        "parameters": [
            {"name": name, "in": "query", "required": name in required, "schema": one}
            for name, one in schema["properties"].items()
        ]
    }


def _describe(app: FastAPI) -> None:
    """FastAPI lists 422 for its own validation, which is not used here."""
    described = app.openapi

    def without_422() -> dict[str, Any]:
        schema = described()
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return schema

    app.openapi = without_422  # type: ignore[method-assign]
