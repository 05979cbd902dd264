"""Health checks and metrics."""

from __future__ import annotations

import re

from fastapi import APIRouter, Request, Response
from starlette.responses import PlainTextResponse

from service.frontend.http_exchange import respond_json
from service.frontend.inference import Frontend
from service.frontend.oip import statistics
from service.frontend.rest.schemas import ERRORS
from service.metrics import render

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def add_routes(router: APIRouter, frontend: Frontend) -> None:
    """Add /healthz, /readyz and /metrics."""

    @router.get("/healthz")
    async def healthz(request: Request) -> Response:
        """200 while this process answers."""
        return respond_json(frontend, {"live": True})

    @router.get("/readyz", responses=ERRORS)
    async def readyz(request: Request) -> Response:
        """200 when requests are answered; 503 while models load, while no engine is ready, and during shutdown."""
        frontend.check_ready()
        return respond_json(frontend, {"ready": True})

    @router.get("/metrics", response_class=PlainTextResponse, responses=ERRORS)
    async def metrics(request: Request) -> Response:
        """The metrics of all processes in Prometheus' text format, or in that of OpenMetrics if the client accepts it."""
        snapshot = await frontend.supervisor.scrape()
        openmetrics = accepts_openmetrics(request.headers.get("accept", ""))
        text = render(snapshot, statistics.families(snapshot), openmetrics=openmetrics)
        return Response(text, media_type=OPENMETRICS if openmetrics else PROMETHEUS, headers={"vary": "accept"})


def accepts_openmetrics(accept: str) -> bool:
    """Return whether an Accept header names the format, as Prometheus' does. A version that we do not write is answered with ours."""
    for part in accept.lower().split(","):
        media_type, *parameters = [value.strip() for value in part.split(";")]
        if media_type == OPENMETRICS.partition(";")[0]:
            return not any(re.fullmatch(r"q\s*=\s*0(\.0*)?", parameter) for parameter in parameters)
    return False
