"""Forms: requests whose values follow as raw bytes. Everything else in them is validated once and remembered by its exact bytes.

The head of a request is its JSON or, over gRPC, the fields of its message except the id and the values. A client that sends raw values
repeats the head, and nothing in it depends on the values. Requests with one input and without an id in the head have a form; all others
are read each time.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field

import msgspec
import numpy as np

from service.frontend.oip import parameters
from service.frontend.oip.inputs import ID_BYTES, InputTensors
from service.frontend.oip.json import ParsedRequest
from service.frontend.oip.tensors import BYTES, Tensor, decode
from service.frontend.run import validation
from service.frontend.run.catalog import Catalog, ModelIndex, ServedModel
from service.frontend.run.validation import PackedInputs
from service.ipc.messages.inference import FEATURES
from service.modeling.spec import ModelSpec
from service.modeling.spec.heads.fields import AnswerField
from service.settings import Settings

MAX_FORMS = 256
MAX_FORM_BYTES = 1024
"""Longer heads are read each time: one client must not fill the memory with heads that it never repeats."""
MAX_UNPACKED_IDS = 256
"""For more ids than this NumPy finds the largest faster than Python does."""
_LENGTH = struct.Struct("<I")

FormKey = tuple[str, bytes]
"""The path of a request, which is empty for gRPC, and its head of at most MAX_FORM_BYTES."""


@dataclass(slots=True)
class BinaryForm:
    """The content of a request's head, for one model version. `parsed` and `tensors` have no values.

    `size` is the size of the raw bytes, `lengths` the steps of each sequence (none for a text), `options` the request's options.
    `response` is the head of every successful response, if the engine's answer of `response_size` bytes follows it unchanged. It
    is known after the first response.
    """

    parsed: ParsedRequest
    model: ServedModel
    tensors: InputTensors
    size: int
    lengths: list[int]
    options: validation.Options
    response_size: int
    response: bytes | None = None
    _unpack_ids: struct.Struct | None = field(init=False)

    def __post_init__(self) -> None:
        ids = self.size // ID_BYTES
        self._unpack_ids = struct.Struct(f"<{ids}I") if self._input.name == "ids" and ids <= MAX_UNPACKED_IDS else None

    def fits(self, values: bytes | memoryview) -> bool:
        """Return whether raw bytes have the size in the head; for a text, its single element must have the right size too."""
        if len(values) != self.size:
            return False
        return self._input.datatype != BYTES or _LENGTH.unpack_from(values)[0] == self.size - _LENGTH.size

    def answered_by(self, data: bytes | memoryview) -> bool:
        """Return whether the response is known except for an engine's answer, which it contains unchanged."""
        return self.response is not None and len(data) == self.response_size

    def pack(self, values: bytes | memoryview) -> PackedInputs | None:
        """Return the steps of each sequence and the engine's tensor bytes, or None for values that the model does not take.

        Raises InvalidInput or TooLarge for a text.
        """
        match self._input.datatype:
            case "BYTES":
                return self._tokenize(values)
            case "INT32":
                valid = self._largest_id(values) < (self.model.spec.input.vocabulary or 0)
            case _:
                valid = bool(np.isfinite(np.frombuffer(values, FEATURES)).all())
        return PackedInputs(self.lengths, values) if valid else None

    def decode(self, values: bytes | memoryview) -> InputTensors:
        """Return the tensors with their values."""
        tensor = self._input
        return InputTensors([decode(tensor.name, tensor.datatype, tensor.shape, values)])

    @property
    def _input(self) -> Tensor:
        return self.parsed.request.inputs[0]

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
        name = self.tensors.field_of(0)
        ids = validation.tokenize(text, name, self.model)
        steps = len(ids) // ID_BYTES
        validation.check_steps(steps, name, self.model)
        return PackedInputs([steps], ids)


class BinaryForms:
    """The forms of the served models."""

    def __init__(self, catalog: Catalog, settings: Settings) -> None:
        self._catalog = catalog
        self._settings = settings
        self._index: ModelIndex = catalog.index
        self._known: dict[FormKey, BinaryForm] = {}

    def find(self, key: FormKey) -> BinaryForm | None:
        """Return a remembered form of the models that are served now."""
        if self._catalog.index is not self._index:
            self._known.clear()
            self._index = self._catalog.index
        return self._known.get(key)

    def remember(self, key: FormKey, parsed: ParsedRequest, model: ServedModel, lengths: list[int]) -> None:
        """Remember the form of a request that was valid, if it has one. lengths: the steps of each of its sequences."""
        request = parsed.request
        if request.id or len(request.inputs) != 1:
            return
        tensor, width = request.inputs[0], model.step_bytes
        if (tensor.name, tensor.datatype) == ("text", BYTES) and len(tensor.values) == 1:
            size = _LENGTH.size + len(tensor.values[0])
        elif (tensor.name, tensor.datatype) in (("ids", "INT32"), ("inputs", "FP32")):
            size = sum(lengths) * width
        else:
            return
        if len(self._known) >= MAX_FORMS:
            self._known.clear()
        empty = Tensor(tensor.name, tensor.datatype, tensor.shape, [])
        self._known[key] = BinaryForm(
            parsed._replace(request=msgspec.structs.replace(request, inputs=[empty])),
            model,
            InputTensors([empty]),
            size,
            lengths,
            parameters.request_options(request, None, model, self._settings, math.inf),
            _whole_output_size(parsed, model, len(lengths)),
        )


def _whole_output_size(parsed: ParsedRequest, model: ServedModel, sequences: int) -> int:
    """Return the size of the engine's answer if nothing else follows the head of the response, otherwise 0."""
    spec, requested = model.spec, parsed.request.outputs
    whole = _whole_output(spec)
    names = [output.name for output in requested] or [field.name for field in spec.answer_fields]
    if whole is None or names != [whole.name] or not parsed.raw(names[0]) or any(output.classes for output in requested):
        return 0
    return sequences * math.prod(whole.dims) * np.dtype(FEATURES).itemsize


def _whole_output(spec: ModelSpec) -> AnswerField | None:
    """Return the output of a head that is the engine's answer as it is, if no other output is requested."""
    numbers = [field for field in spec.answer_fields if not field.best]
    return numbers[0] if len(numbers) == 1 and not spec.answers_steps else None


def all_finite(answers: list[bytes | memoryview]) -> bool:
    """Return whether all values of engines' answers are finite. Only these are sent as they are."""
    return bool(np.isfinite(np.frombuffer(b"".join(answers), FEATURES)).all())
