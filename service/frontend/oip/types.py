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
    """An output that a client requests. classes: return this many of the best labels as strings, or all scores for 0. raw: as raw bytes."""

    name: str
    classes: int = 0
    raw: bool = True


class InferRequest(msgspec.Struct, frozen=True):
    """An inference request without its inputs.

    version: empty for the newest version, or for the version of the session. outputs: empty for the outputs of the model's head.
    values_name: the input that holds the values. ragged: the sequences are packed end to end. raw: whether outputs are sent as raw
    bytes that the request does not name.
    """

    model: str
    version: str
    id: str
    parameters: Parameters
    outputs: list[RequestedOutput]
    values_name: str
    ragged: bool = False
    raw: bool = True

    def field_of(self, index: int) -> str:
        """Return the name of a sequence in error messages."""
        return f"{self.values_name}[{index}]"

    def is_raw(self, name: str) -> bool:
        """Return whether an output is sent as raw bytes."""
        return next((output.raw for output in self.outputs if output.name == name), self.raw)


class InferResponse(msgspec.Struct, frozen=True):
    """The reply to an InferRequest.

    outputs: in the order of the request. parameters: `sequence_steps` for a session, otherwise empty.
    """

    model: str
    version: str
    id: str
    parameters: Parameters
    outputs: list[Tensor]
