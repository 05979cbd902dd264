"""The response header Server-Timing, for clients that ask for it with `Prefer: server-timing`: the time of one request by stage.

Browsers show it in their developer tools. The general path answers such a request, so the others pay nothing for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import Request

PREFERENCE = "server-timing"


def is_wanted(request: Request) -> bool:
    """Return whether the client prefers a response with its times, RFC 7240."""
    preferences = request.headers.get("prefer", "").lower().split(",")
    return PREFERENCE in [preference.partition(";")[0].strip() for preference in preferences]


def lines(stages: Mapping[str, float]) -> bytes:
    """Return the header lines with the seconds in each stage and in total, as milliseconds."""
    times = ", ".join(f"{name};dur={seconds * 1e3:.3f}" for name, seconds in stages.items())
    return f"server-timing: {times}\r\npreference-applied: {PREFERENCE}\r\n".encode()
