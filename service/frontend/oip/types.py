"""Inference requests and responses of the Open Inference Protocol V2, independent of REST and gRPC.

The first dimension of a tensor counts sequences. A sequence of the protocol (`sequence_id`) is a session of this service.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from service.frontend.oip.tensors import Tensor

Parameters = Mapping[str, Any]
"""Parameters by name, each a bool, int, float or str. Unknown names are ignored."""


class RequestedOutput(msgspec.Struct, frozen=True):
    """An output that a client requests. classes: return this many of the best labels as strings, or all scores for 0."""

    name: str
    classes: int = 0


class InferRequest(msgspec.Struct, frozen=True):
    """An inference request.

    version: empty for the newest version, or for the version of the session. outputs: empty for the outputs of the model's head.
    """

    model: str
    version: str
    id: str
    parameters: Parameters
    inputs: list[Tensor]
    outputs: list[RequestedOutput]


class InferResponse(msgspec.Struct, frozen=True):
    """The reply to an InferRequest.

    outputs: in the order of the request. parameters: `sequence_steps` for a session, otherwise empty.
    """

    model: str
    version: str
    id: str
    parameters: Parameters
    outputs: list[Tensor]
