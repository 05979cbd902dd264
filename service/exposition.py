"""The answer of /metrics on every port: the metrics of all processes in one of Prometheus' formats."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from service import triton_statistics
from service.metrics import Rows, render

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class Exposition(NamedTuple):
    """The text of /metrics and its media type."""

    text: bytes
    media_type: str


def expose(snapshot: Mapping[str, Rows], accept: str) -> Exposition:
    """Return a snapshot in Prometheus' text format, or in that of OpenMetrics if the Accept header names it."""
    openmetrics = accepts_openmetrics(accept)
    text = render(snapshot, triton_statistics.families(snapshot), openmetrics=openmetrics)
    return Exposition(text, OPENMETRICS if openmetrics else PROMETHEUS)


def accepts_openmetrics(accept: str) -> bool:
    """Return whether an Accept header names the format, as Prometheus' does. A version that we do not write is answered with ours."""
    for part in accept.lower().split(","):
        media_type, *parameters = [value.strip() for value in part.split(";")]
        if media_type == OPENMETRICS.partition(";")[0]:
            return not any(re.fullmatch(r"q\s*=\s*0(\.0*)?", parameter) for parameter in parameters)
    return False
