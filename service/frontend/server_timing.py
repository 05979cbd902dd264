"""The response header Server-Timing, for clients that ask for it with `Prefer: server-timing`: the time of one request by stage.

Browsers show it in their developer tools. The general path answers such a request, so the others pay nothing for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import Request, Response

PREFERENCE = "server-timing"


def is_wanted(request: Request) -> bool:
    """Return whether the client prefers a response with its times, RFC 7240."""
    preferences = request.headers.get("prefer", "").lower().split(",")
    return PREFERENCE in [preference.partition(";")[0].strip() for preference in preferences]


def add(response: Response, stages: Mapping[str, float]) -> None:
    """Add the seconds in each stage and in total, as milliseconds."""
    response.headers["server-timing"] = ", ".join(f"{name};dur={seconds * 1e3:.3f}" for name, seconds in stages.items())
    response.headers["preference-applied"] = PREFERENCE
