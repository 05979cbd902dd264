"""The HTTP door: POST /infer, health, metrics, models and the API's description. It translates; `wire` validates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from service import __version__
from service.errors import (
    STATUS,
    InferenceFailed,
    InvalidRequest,
    MethodNotAllowed,
    ServiceError,
    TooLarge,
    Unavailable,
    UnknownRoute,
    UnsupportedMedia,
)
from service.faces import answers, wire
from service.faces.engines import Engines
from service.logs import Log
from service.metrics import CUT_OFF, Metrics, Snapshot, render
from service.settings import Settings

T = TypeVar("T")
UNKNOWN = ("unknown", "unknown")
"""Labels of a request that names no model that is served."""
CLIENT_CLOSED = 499
DISCARDED_BODIES = 4
"""A body over the limit is read and thrown away up to this many times the limit: who still sends cannot hear an answer."""


class ClientGone(Exception):
    """The caller closed the connection before the answer."""


@dataclass(slots=True)
class Front:
    """What the routes work with. `draining` says that the service is about to end."""

    settings: Settings
    catalog: wire.Catalog
    engines: Engines
    metrics: Metrics
    log: Log
    scrape: Callable[[], Awaitable[Snapshot]]
    draining: bool = False

    @property
    def ready(self) -> bool:
        return self.engines.ready and not self.draining


@dataclass(slots=True)
class _Call:
    """One request to /infer as the metrics see it."""

    arrived: float
    labels: tuple[str, str] = UNKNOWN
    outcome: str = "ok"


class _Direct(APIRoute):
    """A route whose endpoint takes the request and gives the response, with nothing between them and the server."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return handler


def build(front: Front) -> FastAPI:
    """The ASGI application. No middleware: one that wraps the receive channel would hide that a caller has gone."""
    app = FastAPI(title="seqserve", version=__version__, description="Sequences in, answers out.", redoc_url=None)
    responses: dict[int | str, dict[str, Any]] = {
        code: {"model": wire.ErrorBody} for code in sorted({status.http for status in STATUS.values()})
    }

    hot = APIRouter(route_class=_Direct)

    @hot.post("/infer", response_model=wire.InferAnswer, responses=responses, openapi_extra=_body_schema())
    async def infer(request: Request) -> Response:
        """Answer each input with the model's head."""
        call = _Call(arrived=time.monotonic())
        return await _counted(front, call, _infer(front, request, call))

    @hot.post("/debug/trace", include_in_schema=front.settings.debug, responses=responses, openapi_extra=_trace_parameters())
    async def trace(request: Request) -> Response:
        """Record the next turns of every engine, and answer with what ui.perfetto.dev and chrome://tracing open."""
        return await _trace(front, request)

    app.include_router(hot)

    @app.get("/models")
    async def models() -> Response:
        """Every served model and version, with the kernels that run it."""
        return _json(200, {"models": _models(front)})

    @app.get("/healthz")
    async def healthz() -> Response:
        """200 as long as this process answers."""
        return _json(200, {"live": True})

    @app.get("/readyz")
    async def readyz() -> Response:
        """200 when requests are answered, 503 while loading, while no engine is ready, or while draining."""
        if not front.ready:
            reason = "draining" if front.draining else "no engine is ready"
            raise Unavailable(f"not ready: {reason}", retry_after=1)
        return _json(200, {"ready": True})

    @app.get("/metrics")
    async def metrics() -> Response:
        """All processes' time series in Prometheus' text format."""
        return Response(render(await front.scrape()), media_type="text/plain; version=0.0.4; charset=utf-8")

    app.add_exception_handler(ServiceError, _refused(front))
    app.add_exception_handler(HTTPException, _no_route(front))
    app.add_exception_handler(Exception, _bug(front))
    _describe(app)
    return app


async def _infer(front: Front, request: Request, call: _Call) -> Response:
    body = wire.InferBody.parse(await _read(request, front.settings.max_body_bytes))
    model = wire.served(front.catalog, body.model, body.version)
    call.labels = (model.spec.name, model.version)
    asked, tail = wire.sequences(body, model, front.settings, call.arrived)
    parsed = time.monotonic()
    front.metrics.stage_seconds.observe(parsed - call.arrived, *call.labels, "parse")
    answered = await _unless_gone(request, front.engines.submit(asked, tail))
    start = time.monotonic()
    outputs = answers.outputs(model.spec, *answered)
    response = _json(200, {"model": model.spec.name, "version": model.version, "outputs": outputs})
    front.metrics.stage_seconds.observe(time.monotonic() - start, *call.labels, "encode")
    if front.draining:
        response.headers["connection"] = "close"
    return response


async def _trace(front: Front, request: Request) -> Response:
    if not front.settings.debug:
        raise UnknownRoute("nothing is traced, as SEQSERVE_DEBUG is off: start the service with --debug, or SEQSERVE_DEBUG=1")
    wanted = wire.TraceQuery.parse(request.query_params)
    try:
        recorded = await _unless_gone(request, front.engines.trace(wanted.turns, wanted.seconds))
    except (ClientGone, ClientDisconnect):
        return Response(status_code=CLIENT_CLOSED)
    # Joined as text: to read them all would keep every other request waiting.
    events = b",".join(events[1:-1] for events in recorded)
    return Response(b'{"traceEvents": [' + events + b"]}", media_type="application/json")


async def _counted(front: Front, call: _Call, work: Coroutine[Any, Any, Response]) -> Response:
    """Every request ends in exactly one outcome."""
    front.metrics.in_flight.add()
    try:
        return await work
    except ServiceError as error:
        call.outcome = error.code
        raise
    except (ClientGone, ClientDisconnect):
        call.outcome = "client_gone"
        return Response(status_code=CLIENT_CLOSED)
    except asyncio.CancelledError:
        call.outcome = CUT_OFF
        raise
    except Exception:
        call.outcome = InferenceFailed.code
        raise
    finally:
        front.metrics.in_flight.add(by=-1)
        front.metrics.requests.add(*call.labels, call.outcome)
        front.metrics.stage_seconds.observe(time.monotonic() - call.arrived, *call.labels, "total")


async def _read(request: Request, limit: int) -> bytes:
    """The whole body, when its type, encoding and size are ones that are read here."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media and media != "application/json" and not media.endswith("+json"):
        raise UnsupportedMedia("the content type is not JSON: send Content-Type: application/json, or none")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMedia("the body is compressed: send it without Content-Encoding")
    parts, size = [], 0
    declared = _declared(request)
    if declared > DISCARDED_BODIES * limit:
        raise _too_large(limit)
    async for part in request.stream():
        size += len(part)
        if size > DISCARDED_BODIES * limit:
            break
        if size <= limit:
            parts.append(part)
        else:
            parts.clear()
    if size > limit:
        raise _too_large(limit)
    return b"".join(parts)


def _declared(request: Request) -> int:
    length = request.headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit() and len(length) <= 19):
        raise InvalidRequest("Content-Length is not a number of bytes")
    return int(length)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(
        f"the body is larger than SEQSERVE_MAX_BODY_BYTES, which is {limit} bytes: send less at once, or raise the limit"
    )


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; raises ClientGone, with `work` cancelled, when the caller closes the connection first."""
    working, gone = asyncio.current_task(), False
    assert working is not None

    def stop(listening: asyncio.Future[None]) -> None:
        nonlocal gone
        if not listening.cancelled() and not ended:
            gone = True
            working.cancel()

    ended, listening = False, asyncio.ensure_future(_gone(request))
    listening.add_done_callback(stop)
    try:
        return await work
    except asyncio.CancelledError:
        if gone:
            working.uncancel()
            raise ClientGone from None
        raise
    finally:
        ended = True
        listening.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _models(front: Front) -> list[dict[str, Any]]:
    loaded = {(one.name, one.version): one for one in front.engines.models}
    listed = []
    for name, versions in front.catalog.items():
        if name != next(iter(versions.values())).spec.name:
            continue
        aliases = [alias for alias, other in front.catalog.items() if other is versions and alias != name]
        for version, model in versions.items():
            running = loaded.get((name, version))
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
                    "weight_bytes": running.weight_bytes if running else 0,
                }
            )
    return listed


def _json(status: int, value: Any) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _error(front: Front, error: ServiceError, headers: dict[str, str] | None = None) -> Response:
    response = _json(STATUS[type(error)].http, wire.error_body(error))
    response.headers.update(headers or {})
    if error.retry_after is not None:
        response.headers["retry-after"] = str(error.retry_after)
    if front.draining or isinstance(error, TooLarge):
        response.headers["connection"] = "close"
    return response


Handler = Callable[[Request, Exception], Awaitable[Response]]


def _refused(front: Front) -> Handler:
    async def handle(request: Request, error: Exception) -> Response:
        assert isinstance(error, ServiceError)
        return _error(front, error)

    return handle


def _no_route(front: Front) -> Handler:
    async def handle(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            return _error(front, MethodNotAllowed(f"this path takes {allowed} only: see /docs"), {"Allow": allowed})
        return _error(front, UnknownRoute("nothing is served at this path: see /docs"))

    return handle


def _bug(front: Front) -> Handler:
    async def handle(request: Request, error: Exception) -> Response:
        front.log.error("bug", error=f"{type(error).__name__}: {error}")
        return _error(front, InferenceFailed("the service failed on this request: its log says why"))

    return handle


def _body_schema() -> dict[str, Any]:
    """The body is read and validated by `wire`; the API's description shows the same model."""
    schema = wire.InferBody.model_json_schema(by_alias=True)
    example = {"model": "question-type", "inputs": ["How far is it from Denver to Aspen ?"]}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema, "example": example}}}}


def _trace_parameters() -> dict[str, Any]:
    properties = wire.TraceQuery.model_json_schema()["properties"]
    return {"parameters": [{"name": name, "in": "query", "schema": schema} for name, schema in properties.items()]}


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
