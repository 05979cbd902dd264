"""POST /debug/trace: a trace of the next batches, served only with --debug."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import Field

from service.errors import UnknownRoute
from service.frontend.rest.http_exchange import JSON, cancel_on_disconnect
from service.frontend.rest.schemas import QueryParameters, describe_query
from service.frontend.run.frontend import Frontend


class TraceQuery(QueryParameters):
    """Query parameters of POST /debug/trace."""

    endpoint = "/debug/trace"

    batches: Annotated[int, Field(ge=1, le=1000)] = 50
    """Number of batches to record on every engine."""
    seconds: Annotated[float, Field(gt=0, le=60)] = 10.0
    """Time to wait for these batches; the trace ends with the last batch within this time."""


def add_routes(router: APIRouter, frontend: Frontend) -> None:
    """Add POST /debug/trace. Without --debug the route answers 404 and names the setting."""

    @router.post(
        "/debug/trace",
        include_in_schema=frontend.settings.debug,
        openapi_extra=describe_query(TraceQuery),
    )
    async def trace(request: Request) -> Response:
        """Record the next batches of every engine. Returns a trace that ui.perfetto.dev and chrome://tracing open."""
        if not frontend.settings.debug:
            raise UnknownRoute(
                "tracing is off because SEQSERVE_DEBUG is off: start the service with --debug or SEQSERVE_DEBUG=1"
            )
        query = TraceQuery.parse(request.query_params.multi_items())
        traces = await cancel_on_disconnect(request, frontend.dispatcher.trace(query.batches, query.seconds))
        # Joined as text: decoding large traces would block all other requests.
        events = b",".join(trace[1:-1] for trace in traces)
        return Response(b'{"traceEvents": [' + events + b"]}", media_type=JSON)
