"""Tensors of the Open Inference Protocol: decoding from bytes or lists, and encoding to bytes. Knows no model and no transport.

Every error is an InvalidInput or TooLarge that names the tensor. Sizes are checked before any memory is allocated for the values.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from service.errors import InvalidInput, TooLarge
from service.frontend.oip.limits import MAX_TEXTS
from service.frontend.run.large_answers import LARGE_ANSWER_BYTES
from service.frontend.run.quoting import describe_value, quote

Array = NDArray[Any]

BYTES = "BYTES"
DATATYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    **{
        f"{prefix}{8 * size}": np.dtype(f"<{code}{size}")
        for prefix, code in (("INT", "i"), ("UINT", "u"))
        for size in (1, 2, 4, 8)
    },
    **{f"FP{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    # NumPy has no bfloat16: these are the upper 16 bits of a float32.
    "BF16": np.dtype("<u2"),
}
"""Numeric datatypes and their representation in bytes. An element of BYTES follows its length as 4 bytes."""
RAW_ONLY = ("FP16", "BF16")
"""Datatypes that the protocol does not allow in lists."""
MAX_DIMENSIONS, MAX_SIZE = 8, 2**31 - 1
_LENGTH = struct.Struct("<I")


class Tensor(msgspec.Struct, frozen=True):
    """A named tensor. values: an array of this shape, BF16 as float32; for BYTES a flat list."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Array | list[bytes]

    @property
    def value_count(self) -> int:
        return math.prod(self.shape)


def decode(name: str, datatype: str, shape: Sequence[int], data: bytes | memoryview) -> Tensor:
    """Return the tensor in raw bytes: little-endian, row-major. Numbers are not copied."""
    count = _element_count(name, shape)
    if datatype == BYTES:
        return Tensor(name, datatype, tuple(shape), _split_elements(name, count, data))
    dtype = _dtype(name, datatype)
    size = count * dtype.itemsize
    if size != len(data):
        required = f"{datatype} with the shape {_shape_text(shape)} requires {size}"
        raise tensor_error(name, f"has {len(data)} bytes, but {required}: send exactly {size} bytes, or correct the shape")
    values = np.frombuffer(data, dtype)
    if datatype == "BOOL":
        # A byte other than 0 and 1 would become a bool that equals neither True nor False.
        values = values.view(np.uint8) != 0
    elif datatype == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return Tensor(name, datatype, tuple(shape), values.reshape(shape))


def from_list(name: str, datatype: str, shape: Sequence[int], values: Sequence[Any]) -> Tensor:
    """Return the tensor in a list, which is flat and row-major or nested like the shape. Elements of BYTES are str or bytes."""
    count, dtype = _element_count(name, shape), None if datatype == BYTES else _dtype(name, datatype)
    if datatype in RAW_ONLY:
        raise tensor_error(name, f"is {datatype}, which is accepted only as raw bytes: send raw bytes, or FP32")
    nested = bool(values) and isinstance(values[0], list)
    flat = _flatten(name, shape, values) if nested else values
    if len(flat) != count:
        required = f"the shape {_shape_text(shape)} requires {count}"
        raise tensor_error(name, f"has {len(flat)} values, but {required}: send {count} values, or correct the shape")
    if dtype is None:
        _check_texts(name, count)
        return Tensor(name, datatype, tuple(shape), _to_bytes(name, flat))
    _check_types(name, datatype, flat, _PYTHON_TYPES[dtype.kind])
    try:
        with np.errstate(over="ignore"):  # a float that is too large becomes infinite, and the model's input check rejects it
            return Tensor(name, datatype, tuple(shape), np.array(flat, dtype).reshape(shape))
    except OverflowError:
        raise tensor_error(name, f"has a value that {datatype} cannot hold: send smaller numbers") from None


def encode(tensor: Tensor) -> bytes | memoryview:
    """Return the raw bytes of a tensor: little-endian, row-major. Large arrays are not copied."""
    values = tensor.values
    if isinstance(values, list):
        return b"".join([part for element in values for part in (_LENGTH.pack(len(element)), element)])
    if tensor.datatype == "BF16":
        values = np.ascontiguousarray(values, "<f4").view("<u4") >> 16
    values = values.astype(DATATYPES[tensor.datatype], copy=False)
    return values.tobytes() if values.nbytes <= LARGE_ANSWER_BYTES else np.ascontiguousarray(values).data.cast("B")


def tensor_error(name: str, problem: str) -> InvalidInput:
    """Return the error for a tensor. The name is shortened: a client may send any text as a name."""
    field = quote(name)
    return InvalidInput(f"{field} {problem}", field=field)


_PYTHON_TYPES: dict[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {int, float}}
_EXPECTED = {"b": "true or false", "i": "a whole number", "u": "a whole number of at least 0", "f": "a number"}


def _element_count(name: str, shape: Sequence[int]) -> int:
    """Return the number of elements of a shape; raises InvalidInput for an invalid shape."""
    if len(shape) > MAX_DIMENSIONS:
        raise tensor_error(name, f"has {len(shape)} dimensions, but at most {MAX_DIMENSIONS} are allowed: send fewer")
    if not all(1 <= size <= MAX_SIZE for size in shape):
        raise tensor_error(name, f"has the shape {_shape_text(shape)}: each dimension must be between 1 and {MAX_SIZE}")
    return math.prod(shape)


def _check_texts(name: str, count: int) -> None:
    if count > MAX_TEXTS:
        raise TooLarge(
            f"{quote(name)} has {count} elements of BYTES, but at most {MAX_TEXTS} are allowed: send several requests",
            field=quote(name),
        )


def _dtype(name: str, datatype: str) -> np.dtype[Any]:
    if datatype not in DATATYPES:
        known = ", ".join((*DATATYPES, BYTES))
        raise tensor_error(name, f"has the unknown datatype {quote(datatype)!r}: send one of {known}")
    return DATATYPES[datatype]


def _split_elements(name: str, count: int, data: bytes | memoryview) -> list[bytes]:
    """Return the elements of BYTES. Each is preceded by its length."""
    if count * _LENGTH.size > len(data):
        required = f"{count} elements of BYTES require at least {count * _LENGTH.size} for their lengths alone"
        raise tensor_error(name, f"has {len(data)} bytes, but {required}: send all elements")
    _check_texts(name, count)
    elements, end = [], 0
    for index in range(count):
        begin = end + _LENGTH.size
        remaining = len(data) - begin
        if remaining < 0:
            raise tensor_error(name, f"ends before the length of element {index}: send all {count} elements")
        length = _LENGTH.unpack_from(data, end)[0]
        if length > remaining:
            problem = f"declares {length} bytes for element {index}, but only {remaining} remain"
            raise tensor_error(name, f"{problem}: send the whole element")
        end = begin + length
        elements.append(bytes(data[begin:end]))
    if end < len(data):
        problem = f"has {len(data)} bytes, but its {count} elements end at byte {end}"
        raise tensor_error(name, f"{problem}: send no other bytes, or correct the shape")
    return elements


def _flatten(name: str, shape: Sequence[int], values: Sequence[Any]) -> Sequence[Any]:
    """Return the values of nested lists as a flat list; raises InvalidInput unless they are nested like the shape."""
    level: Sequence[Any] = [values]
    for dimension, size in enumerate(shape):
        if not all(isinstance(part, list) and len(part) == size for part in level):
            problem = f"is not nested like its shape {_shape_text(shape)}"
            raise tensor_error(name, f"{problem}: every list in dimension {dimension} must have {size} entries")
        level = list(chain.from_iterable(level))
    return level


def _check_types(name: str, datatype: str, values: Sequence[Any], types: set[type]) -> None:
    if not set(map(type, values)) <= types:
        index = next(index for index, value in enumerate(values) if type(value) not in types)
        expected = _EXPECTED[DATATYPES[datatype].kind]
        raise tensor_error(
            name, f"has {describe_value(values[index])} at index {index}: each element of {datatype} must be {expected}"
        )


def _to_bytes(name: str, values: Sequence[Any]) -> list[bytes]:
    for index, value in enumerate(values):
        if not isinstance(value, str | bytes):
            raise tensor_error(name, f"has {describe_value(value)} at index {index}: each element of BYTES must be a string")
    return [value.encode() if isinstance(value, str) else value for value in values]


def _shape_text(shape: Sequence[int]) -> str:
    return quote(str(list(shape)))
