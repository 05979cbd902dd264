"""Tensors of the Open Inference Protocol: bytes or lists to values and back. Nothing here knows a model or a transport.

Every fault is InvalidInput and names the tensor; sizes are compared before anything is made of them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.errors import InvalidInput
from service.frontend.wording import kind, shown

Array = NDArray[Any]

BYTES = "BYTES"
DATATYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    **{
        f"{called}{8 * size}": np.dtype(f"<{code}{size}")
        for called, code in (("INT", "i"), ("UINT", "u"))
        for size in (1, 2, 4, 8)
    },
    **{f"FP{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    # There is no such type in NumPy: the upper half of a float32.
    "BF16": np.dtype("<u2"),
}
"""What an element is in bytes. Each of BYTES is as long as the four bytes before it say."""
RAW_ONLY = ("FP16", "BF16")
"""No list says what these are in decimals."""
MAX_DIMENSIONS, MAX_SIZE = 8, 2**31 - 1
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Tensor:
    """values: of this shape, BF16 as float32; those of BYTES in a flat list."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Array | list[bytes]


def decode(name: str, datatype: str, shape: Sequence[int], data: bytes | memoryview) -> Tensor:
    """What raw bytes say: little-endian, row-major. Numbers are not copied."""
    count = _count(name, shape)
    if datatype == BYTES:
        return Tensor(name, datatype, tuple(shape), _elements(name, count, data))
    dtype = _dtype(name, datatype)
    if count * dtype.itemsize != len(data):
        needed = f"{datatype} of shape {_listed(shape)} has {count * dtype.itemsize}"
        raise wrong(name, f"has {len(data)} bytes and {needed}: send as many as the shape says")
    values = np.frombuffer(data, dtype)
    if datatype == "BOOL":
        # Any other byte than 0 and 1 would be a bool that equals neither.
        values = values.view(np.uint8) != 0
    elif datatype == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return Tensor(name, datatype, tuple(shape), values.reshape(shape))


def listed(name: str, datatype: str, shape: Sequence[int], values: Sequence[Any]) -> Tensor:
    """What a list says: flat and row-major, or nested as the shape is. Elements of BYTES are str or bytes."""
    count, dtype = _count(name, shape), None if datatype == BYTES else _dtype(name, datatype)
    if datatype in RAW_ONLY:
        raise wrong(name, f"is {datatype}, of which only raw bytes are read: send it in binary, or as FP32")
    nested = bool(values) and isinstance(values[0], list)
    flat = _unnested(name, shape, values) if nested else values
    if len(flat) != count:
        raise wrong(name, f"has {len(flat)} values and the shape {_listed(shape)} has {count}: send as many as the shape says")
    if dtype is None:
        return Tensor(name, datatype, tuple(shape), _encoded(name, flat))
    _check_kinds(name, datatype, flat, _KINDS[dtype.kind])
    try:
        with np.errstate(over="ignore"):  # a float that is too large becomes infinite, which is for a model to refuse
            return Tensor(name, datatype, tuple(shape), np.array(flat, dtype).reshape(shape))
    except OverflowError:
        raise wrong(name, f"has a value that {datatype} cannot hold: send smaller numbers") from None


def encode(tensor: Tensor) -> bytes:
    """The raw bytes that say this."""
    values = tensor.values
    if isinstance(values, list):
        return b"".join([part for element in values for part in (_LENGTH.pack(len(element)), element)])
    if tensor.datatype == "BF16":
        values = np.ascontiguousarray(values, "<f4").view("<u4") >> 16
    return values.astype(DATATYPES[tensor.datatype], copy=False).tobytes()


_KINDS: dict[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {int, float}}
_CALLED = {"b": "true or false", "i": "a whole number", "u": "a whole number from 0", "f": "a number"}


def _count(name: str, shape: Sequence[int]) -> int:
    """How many elements there are."""
    if len(shape) > MAX_DIMENSIONS:
        raise wrong(name, f"has {len(shape)} dimensions, and {MAX_DIMENSIONS} is the most that a tensor may have")
    if not all(1 <= size <= MAX_SIZE for size in shape):
        raise wrong(name, f"has the shape {_listed(shape)}: each dimension has to be from 1 to {MAX_SIZE}")
    return math.prod(shape)


def _dtype(name: str, datatype: str) -> np.dtype[Any]:
    if datatype not in DATATYPES:
        raise wrong(name, f"has the datatype {shown(datatype)!r}: known are {', '.join((*DATATYPES, BYTES))}")
    return DATATYPES[datatype]


def _elements(name: str, count: int, data: bytes | memoryview) -> list[bytes]:
    """The elements of BYTES, each behind its length."""
    if count * _LENGTH.size > len(data):
        raise wrong(
            name, f"has {len(data)} bytes, and {count} elements of BYTES have {count * _LENGTH.size} for their lengths alone"
        )
    elements, at = [], 0
    for index in range(count):
        begin = at + _LENGTH.size
        left = len(data) - begin
        length = _LENGTH.unpack_from(data, at)[0] if left >= 0 else 0
        if length > left:
            raise wrong(name, f"says that element {index} has {length} bytes, and {max(left, 0)} are left: send all of it")
        at = begin + length
        elements.append(bytes(data[begin:at]))
    if at < len(data):
        raise wrong(name, f"has {len(data)} bytes, and its {count} elements end after {at}: send as many as the shape says")
    return elements


def _unnested(name: str, shape: Sequence[int], values: Sequence[Any]) -> Sequence[Any]:
    """The values of a list of lists of lists, which has to be nested as the shape is."""
    level: Sequence[Any] = [values]
    for depth, size in enumerate(shape):
        if not all(isinstance(part, list) and len(part) == size for part in level):
            raise wrong(
                name, f"is not nested as the shape {_listed(shape)} says: dimension {depth} has other lists than of {size}"
            )
        level = list(chain.from_iterable(level))
    return level


def _check_kinds(name: str, datatype: str, values: Sequence[Any], kinds: set[type]) -> None:
    if not set(map(type, values)) <= kinds:
        index = next(index for index, value in enumerate(values) if type(value) not in kinds)
        called = _CALLED[DATATYPES[datatype].kind]
        raise wrong(name, f"has {kind(values[index])} at {index} and {datatype} is {called}: send {called}")


def _encoded(name: str, values: Sequence[Any]) -> list[bytes]:
    for index, value in enumerate(values):
        if not isinstance(value, str | bytes):
            raise wrong(name, f"has {kind(value)} at {index} and an element of BYTES is a string: send a string")
    return [value.encode() if isinstance(value, str) else value for value in values]


def _listed(shape: Sequence[int]) -> str:
    return shown(str(list(shape)))


def wrong(name: str, said: str) -> InvalidInput:
    """What is wrong with a tensor, whose name may be whatever a caller sent."""
    field = shown(name)
    return InvalidInput(f"{field} {said}", field=field)
