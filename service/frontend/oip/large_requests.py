"""Inference requests that a decoder parses. The frontend gets their options; their inputs stay with the decoder."""

from __future__ import annotations

from typing import Any

import msgspec

from service.frontend.decoder.client import DecodedBody
from service.frontend.oip.inputs import InputTensors
from service.frontend.oip.json import ParsedRequest, RawOutputs
from service.frontend.oip.types import InferRequest, RequestedOutput
from service.frontend.run.catalog import ServedModel
from service.frontend.run.validation import PackedInputs


class RequestOptions(msgspec.Struct, frozen=True):
    """Everything but the inputs of a request. values_name: the input that holds the values; the other fields are as in InferRequest."""

    model: str
    version: str
    id: str
    parameters: dict[str, Any]
    outputs: list[RequestedOutput]
    raw: RawOutputs
    ragged: bool
    values_name: str

    def request(self) -> InferRequest:
        return InferRequest(self.model, self.version, self.id, self.parameters, [], self.outputs)


class DecodedInputs:
    """The inputs of a large request. They have the names of its InputTensors; the decoder has their values."""

    def __init__(self, options: RequestOptions, body: DecodedBody) -> None:
        self.ragged = options.ragged
        self._values_name = options.values_name
        self._body = body

    def field_of(self, index: int) -> str:
        """Return the name of a sequence in error messages."""
        return f"{self._values_name}[{index}]"

    async def pack(self, model: ServedModel) -> PackedInputs:
        """Return the sequences as the engine takes them; raises InvalidInput or TooLarge with the name of the invalid input."""
        return await self._body.pack(model)


def request_options(parsed: ParsedRequest) -> tuple[RequestOptions, InputTensors]:
    """Return the two parts of a request; raises InvalidInput for two inputs with the same name."""
    request, inputs = parsed.request, InputTensors(parsed.request.inputs)
    options = RequestOptions(
        model=request.model,
        version=request.version,
        id=request.id,
        parameters=dict(request.parameters),
        outputs=request.outputs,
        raw=parsed.raw,
        ragged=inputs.ragged,
        values_name=inputs.values_name,
    )
    return options, inputs
