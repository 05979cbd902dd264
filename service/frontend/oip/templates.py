"""Templates: requests whose values follow as raw bytes. Everything else in them is validated once and remembered by its exact bytes.

The head of a request is its JSON or, over gRPC, the fields of its message except the id and the values. A client that sends raw values
repeats the head, and nothing in it depends on the values. Requests with one input and without an id in the head have a template; all
others are read each time.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field

import msgspec
import numpy as np

from service.frontend.decoder.client import MAX_LOOP_BODY_BYTES
from service.frontend.oip import parameters
from service.frontend.oip.inputs import ID_BYTES, InputTensors
from service.frontend.oip.limits import MAX_LOOP_TENSOR_BYTES
from service.frontend.oip.metadata import VALUE_INPUTS
from service.frontend.oip.tensors import BYTES, Tensor, decode
from service.frontend.oip.types import InferRequest
from service.frontend.run import validation
from service.frontend.run.catalog import Catalog, ModelIndex, ServedModel
from service.frontend.run.validation import PackedInputs
from service.ipc.messages.inference import FEATURES
from service.settings import Settings

MAX_TEMPLATES = 256
MAX_HEAD_BYTES = 1024
"""Longer heads are read each time: one client must not fill the memory with heads that it never repeats."""
MAX_UNPACKED_IDS = 256
"""For more ids than this NumPy finds the largest faster than Python does."""
_LENGTH = struct.Struct("<I")

TemplateKey = tuple[str | int, bytes]
"""The path of a request, or for gRPC the size of its values, and its head of at most MAX_HEAD_BYTES."""


@dataclass(slots=True)
class RequestTemplate:
    """The content of a request's head, for one model version.

    `input` has no values, `size` is the size of the raw bytes, `lengths` the steps of each sequence (none for a text), `options` the
    request's options. `response` is the head of every successful response, if the engine's answer of `response_size` bytes follows it
    unchanged. It is known after the first response.
    """

    request: InferRequest
    model: ServedModel
    input: Tensor
    size: int
    lengths: list[int]
    options: validation.Options
    response_size: int
    response: bytes | None = None
    _unpack_ids: struct.Struct | None = field(init=False)

    def __post_init__(self) -> None:
        ids = self.size // ID_BYTES
        self._unpack_ids = struct.Struct(f"<{ids}I") if self.input.name == "ids" and ids <= MAX_UNPACKED_IDS else None

    def fits(self, values: bytes | memoryview) -> bool:
        """Return whether raw bytes have the size in the head; for a text, its single element must have the right size too."""
        if len(values) != self.size:
            return False
        return self.input.datatype != BYTES or _LENGTH.unpack_from(values)[0] == self.size - _LENGTH.size

    def pack(self, values: bytes | memoryview) -> PackedInputs | None:
        """Return the steps of each sequence and the engine's tensor bytes, or None for values that the model does not take.

        Raises InvalidInput or TooLarge for a text.
        """
        match self.input.datatype:
            case "BYTES":
                return self._tokenize(values)
            case "INT32":
                valid = self._largest_id(values) < (self.model.spec.input.vocabulary or 0)
            case _:
                valid = bool(np.isfinite(np.frombuffer(values, FEATURES)).all())
        return PackedInputs(self.lengths, values) if valid else None

    def decode(self, values: bytes | memoryview) -> InputTensors:
        """Return the input with its values."""
        return InputTensors([decode(self.input.name, self.input.datatype, self.input.shape, values)])

    def _largest_id(self, values: bytes | memoryview) -> int:
        """Return the largest id. As an unsigned number, a negative id is larger than every vocabulary."""
        if self._unpack_ids is not None:
            largest: int = max(self._unpack_ids.unpack(values))
            return largest
        return int(np.frombuffer(values, "<u4").max())

    def _tokenize(self, values: bytes | memoryview) -> PackedInputs | None:
        try:
            text = bytes(values[_LENGTH.size :]).decode()
        except UnicodeDecodeError:
            return None
        name = self.request.field_of(0)
        ids = validation.tokenize(text, name, self.model)
        steps = len(ids) // ID_BYTES
        validation.check_steps(steps, name, self.model)
        return PackedInputs([steps], ids)


class Templates:
    """The templates of the served models."""

    def __init__(self, catalog: Catalog, settings: Settings) -> None:
        self._catalog = catalog
        self._settings = settings
        self._index: ModelIndex = catalog.index
        self._known: dict[TemplateKey, RequestTemplate] = {}

    def find(self, key: TemplateKey) -> RequestTemplate | None:
        """Return a remembered template of the models that are served now."""
        if self._catalog.index is not self._index:
            self._known.clear()
            self._index = self._catalog.index
        return self._known.get(key)

    def remember(
        self, key: TemplateKey, request: InferRequest, inputs: InputTensors, model: ServedModel, lengths: list[int]
    ) -> None:
        """Remember the template of a request that was valid, if it has one. lengths: the steps of each of its sequences."""
        tensor, *others = inputs.tensors
        if others or VALUE_INPUTS[tensor.name][0] != tensor.datatype:
            return
        size, limit = sum(lengths) * model.step_bytes, MAX_LOOP_TENSOR_BYTES
        if isinstance(tensor.values, list):
            if len(tensor.values) > 1:
                return
            size, limit = _LENGTH.size + len(tensor.values[0]), MAX_LOOP_BODY_BYTES
        if size > limit:
            return
        if len(self._known) >= MAX_TEMPLATES:
            self._known.clear()
        self._known[key] = RequestTemplate(
            msgspec.structs.replace(request, id=""),
            model,
            msgspec.structs.replace(tensor, values=[]),
            size,
            lengths,
            parameters.request_options(request, None, model, self._settings, math.inf),
            _whole_output_size(request, model, len(lengths)),
        )


def _whole_output_size(request: InferRequest, model: ServedModel, sequences: int) -> int:
    """Return the size of the engine's answer if nothing else follows the head of the response, otherwise 0.

    That is so if the only requested output, as raw bytes, is the only array of the answer.
    """
    spec = model.spec
    arrays = [field for field in spec.answer_fields if not field.best]
    names = [output.name for output in request.outputs] or [field.name for field in spec.answer_fields]
    if len(arrays) != 1 or spec.answers_steps or names != [arrays[0].name] or not request.is_raw(names[0]):
        return 0
    if any(output.classes for output in request.outputs):
        return 0
    return sequences * math.prod(arrays[0].dims) * np.dtype(FEATURES).itemsize


def all_finite(answers: list[bytes | memoryview]) -> bool:
    """Return whether all values of engines' answers are finite. Only these are sent as they are."""
    return bool(np.isfinite(np.frombuffer(b"".join(answers), FEATURES)).all())
