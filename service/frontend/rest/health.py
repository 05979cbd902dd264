"""Health checks and metrics."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from starlette.responses import PlainTextResponse

from service.exposition import expose
from service.frontend.rest.http_exchange import respond_json
from service.frontend.run.frontend import Frontend


def add_routes(router: APIRouter, frontend: Frontend) -> None:
    """Add /healthz and /readyz, also under their names in the Open Inference Protocol, and /metrics."""

    @router.get("/v2/health/live")
    @router.get("/healthz")
    async def healthz(request: Request) -> Response:
        """Check that the process answers. Returns 200 as long as it does."""
        return respond_json(frontend, {"live": True})

    @router.get("/v2/health/ready")
    @router.get("/readyz")
    async def readyz(request: Request) -> Response:
        """Check that requests are answered. Returns 503 while models load, while no engine is ready, and during shutdown."""
        frontend.check_ready()
        return respond_json(frontend, {"ready": True})

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """Return the metrics of all processes. They have Prometheus' text format, or that of OpenMetrics if the client accepts it."""
        snapshot = await frontend.supervisor.scrape()
        # In a thread: the text of ten models takes longer than a callback of the event loop may.
        exposition = await asyncio.to_thread(expose, snapshot, request.headers.get("accept", ""))
        return Response(exposition.text, media_type=exposition.media_type, headers={"vary": "accept"})
