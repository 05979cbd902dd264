"""Tensors of the Open Inference Protocol: decoding from bytes or lists, and encoding to bytes. Knows no model and no transport.

Every error is an InvalidInput or TooLarge that names the tensor. Sizes are checked before any memory is allocated for the values.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from service.errors import InvalidInput, TooLarge
from service.frontend.oip.limits import MAX_TEXTS
from service.frontend.run.large_answers import LARGE_ANSWER_BYTES
from service.frontend.run.quoting import describe_value, quote

Array = NDArray[Any]


class Datatype(NamedTuple):
    """A datatype of the protocol. dtype: of its elements in raw bytes, None for BYTES, whose elements follow their lengths as 4 bytes.

    contents: the field of InferTensorContents that has its elements, empty if the protocol does not allow it in lists. types: Python types
    of an element in a list. expected: an element, for error messages.
    """

    dtype: np.dtype[Any] | None
    contents: str
    types: frozenset[type]
    expected: str


def _numbers(code: str, contents: str, types: Iterable[type], expected: str) -> Datatype:
    return Datatype(np.dtype(code), contents, frozenset(types), expected)


BYTES = "BYTES"
_WHOLE = partial(_numbers, types=[int], expected="a whole number")
_COUNT = partial(_numbers, types=[int], expected="a whole number of at least 0")
_FLOAT = partial(_numbers, types=[int, float], expected="a number")
DATATYPES: dict[str, Datatype] = {
    "BOOL": _numbers("?", "bool_contents", [bool], "true or false"),
    **{f"INT{8 * size}": _WHOLE(f"<i{size}", "int_contents") for size in (1, 2, 4)},
    "INT64": _WHOLE("<i8", "int64_contents"),
    **{f"UINT{8 * size}": _COUNT(f"<u{size}", "uint_contents") for size in (1, 2, 4)},
    "UINT64": _COUNT("<u8", "uint64_contents"),
    "FP16": _FLOAT("<f2", ""),
    "FP32": _FLOAT("<f4", "fp32_contents"),
    "FP64": _FLOAT("<f8", "fp64_contents"),
    # NumPy has no bfloat16: these are the upper 16 bits of a float32.
    "BF16": _FLOAT("<u2", ""),
    BYTES: Datatype(None, "bytes_contents", frozenset((str, bytes)), "a string"),
}
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
    count, dtype = _element_count(name, shape), _datatype(name, datatype).dtype
    if dtype is None:
        return Tensor(name, datatype, tuple(shape), _split_elements(name, count, data))
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
    count, known = _element_count(name, shape), _datatype(name, datatype)
    if not known.contents:
        raise tensor_error(name, f"is {datatype}, which is accepted only as raw bytes: send raw bytes, or FP32")
    nested = bool(values) and isinstance(values[0], list)
    flat = _flatten(name, shape, values) if nested else values
    if len(flat) != count:
        required = f"the shape {_shape_text(shape)} requires {count}"
        raise tensor_error(name, f"has {len(flat)} values, but {required}: send {count} values, or correct the shape")
    if known.dtype is None:
        _check_texts(name, count)
    _check_types(name, datatype, flat, known)
    if known.dtype is None:
        return Tensor(name, datatype, tuple(shape), [each.encode() if isinstance(each, str) else each for each in flat])
    try:
        with np.errstate(over="ignore"):  # a float that is too large becomes infinite, and the model's input check rejects it
            return Tensor(name, datatype, tuple(shape), np.array(flat, known.dtype).reshape(shape))
    except OverflowError:
        raise tensor_error(name, f"has a value that {datatype} cannot hold: send smaller numbers") from None


def encode(tensor: Tensor) -> bytes | memoryview:
    """Return the raw bytes of a tensor: little-endian, row-major. Large arrays are not copied."""
    values = tensor.values
    if isinstance(values, list):
        return b"".join([part for element in values for part in (_LENGTH.pack(len(element)), element)])
    if tensor.datatype == "BF16":
        values = np.ascontiguousarray(values, "<f4").view("<u4") >> 16
    values = values.astype(DATATYPES[tensor.datatype].dtype, copy=False)
    return values.tobytes() if values.nbytes <= LARGE_ANSWER_BYTES else np.ascontiguousarray(values).data.cast("B")


def tensor_error(name: str, problem: str) -> InvalidInput:
    """Return the error for a tensor. The name is shortened: a client may send any text as a name."""
    field = quote(name)
    return InvalidInput(f"{field} {problem}", field=field)


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


def _datatype(name: str, datatype: str) -> Datatype:
    if datatype not in DATATYPES:
        raise tensor_error(name, f"has the unknown datatype {quote(datatype)!r}: send one of {', '.join(DATATYPES)}")
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


def _check_types(name: str, datatype: str, values: Sequence[Any], known: Datatype) -> None:
    if not known.types.issuperset(map(type, values)):
        index = next(index for index, value in enumerate(values) if type(value) not in known.types)
        problem = f"has {describe_value(values[index])} at index {index}"
        raise tensor_error(name, f"{problem}: each element of {datatype} must be {known.expected}")


def _shape_text(shape: Sequence[int]) -> str:
    return quote(str(list(shape)))
