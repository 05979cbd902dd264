"""A scan of an encoded ModelInferRequest, before the protobuf library builds an object for each of its parts.

A message of two megabytes may hold a million empty inputs, for which the library would take seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from service.errors import TooLarge
from service.frontend.oip.limits import MAX_PARTS, check_count

MAX_UNSCANNED_BYTES = 1 << 10
"""Smaller messages are not scanned: they hold few parts."""
_ID, _RAW = 3, 7
_PARTS = {4: "parameters", 5: "inputs", 6: "outputs", _RAW: "raw_input_contents"}
"""The repeated fields of a ModelInferRequest by number."""
_MAX_FIELDS = (len(_PARTS) + 1) * MAX_PARTS
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_SIZES = {_FIXED64: 8, _FIXED32: 4}


class SplitMessage(NamedTuple):
    """A ModelInferRequest in two parts: the message without raw_input_contents, and these, which are not copied."""

    message: bytes
    raw_contents: list[memoryview]


class _Field(NamedTuple):
    """A field of a message: the positions of its first byte, of its content, and of the byte after it."""

    number: int
    wire_type: int
    start: int
    content: int
    end: int


class NotAMessage(Exception):
    """The bytes are not an encoded message."""


def read_number(data: bytes, position: int) -> tuple[int, int]:
    """Return a number and the position after it; raises NotAMessage."""
    value = 0
    for index, byte in enumerate(data[position : position + 10]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, position + index + 1
    raise NotAMessage


def split(data: bytes) -> SplitMessage:
    """Return the two parts of a message; raises TooLarge for too many parts, and NotAMessage."""
    view, counts = memoryview(data), dict.fromkeys(_PARTS, 0)
    kept, raw, begin = list[memoryview](), list[memoryview](), 0
    for index, field in enumerate(_fields(data)):
        if index >= _MAX_FIELDS:
            raise TooLarge(f"the message has more than {_MAX_FIELDS} fields: send each field once")
        if field.wire_type == _BYTES and field.number in counts:
            counts[field.number] += 1
            check_count(counts[field.number], _PARTS[field.number])
            if field.number == _RAW:
                kept.append(view[begin : field.start])
                raw.append(view[field.content : field.end])
                begin = field.end
    return SplitMessage(b"".join([*kept, view[begin:]]), raw)


def structured_bytes(data: bytes) -> int:
    """Return the size of a message without raw_input_contents; 0 for a message that `split` refuses."""
    try:
        return len(split(data).message)
    except (NotAMessage, TooLarge):
        return 0


def request_id(data: bytes) -> str:
    """Return the id of a request, for the reply to a message that is refused; empty if it has none."""
    try:
        ids = [field for field in islice(_fields(data), _MAX_FIELDS) if (field.number, field.wire_type) == (_ID, _BYTES)]
    except NotAMessage:
        return ""
    return data[ids[-1].content : ids[-1].end].decode(errors="replace") if ids else ""


def _fields(data: bytes) -> Iterator[_Field]:
    """Yield the fields of a message; raises NotAMessage."""
    position = 0
    while position < len(data):
        start = position
        tag, position = read_number(data, position)
        wire_type, content = tag & 7, position
        if wire_type == _VARINT:
            _, position = read_number(data, position)
        elif wire_type == _BYTES:
            size, content = read_number(data, position)
            position = content + size
        elif wire_type in _FIXED_SIZES:
            position += _FIXED_SIZES[wire_type]
        else:
            raise NotAMessage
        if position > len(data):
            raise NotAMessage
        yield _Field(tag >> 3, wire_type, start, content, position)
