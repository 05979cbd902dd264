"""Header blocks: decoding with hpack, the rules for the fields of a request, and writing without a dynamic table.

A client repeats its header blocks byte for byte. A block that leaves the dynamic table as it is means the same the next time, as long as
the table stays the same, so its fields are remembered. Most requests of a connection then cost one look-up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from hpack import Decoder
from hpack.exceptions import HPACKError, OversizedHeaderListError

from service.frontend.http2.frames import ConnectionFault, ErrorCode, StreamFault

Fields = list[tuple[bytes, bytes]]

MAX_REMEMBERED, MAX_REMEMBERED_BYTES = 64, 512
"""Blocks that a connection remembers, and the size of the largest one: one client must not fill the memory."""
MAX_CONTINUATIONS = 8
"""Frames of one header block after the first: its largest size needs one or two."""
TOLERANCE = 4
"""How many times the largest header list and block a connection decodes, to refuse one request rather than the connection."""
FIELD_BYTES = 32
"""What a field counts beside its name and its value: RFC 9113, section 10.5.1."""
MAX_SIZE_UPDATES = 2
"""Changes of the table's size in one block: RFC 7541 needs no more, and each costs more to handle than to send."""
PSEUDO_FIELDS = (b":method", b":scheme", b":path", b":authority")
FORBIDDEN = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
"""Fields about an HTTP/1.1 connection, which make a request malformed."""
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_VALUE = re.compile(rb"(?:[^\0\r\n\t ](?:[^\0\r\n]*[^\0\r\n\t ])?)?")


class RequestFields:
    """The header fields of a request. context: derived from them by the application, kept with a remembered block."""

    __slots__ = ("authority", "content_length", "context", "fields", "method", "path")

    def __init__(self, fields: Fields) -> None:
        """Raises StreamFault for a malformed request."""
        pseudo: dict[bytes, bytes] = {}
        regular: Fields = []
        for name, value in fields:
            if name.startswith(b":"):
                if regular or name in pseudo or name not in PSEUDO_FIELDS:
                    raise StreamFault(ErrorCode.PROTOCOL_ERROR)
                pseudo[name] = value
            else:
                regular.append((name, value))
            if not _VALUE.fullmatch(value):
                raise StreamFault(ErrorCode.PROTOCOL_ERROR)
        check_fields(regular)
        if not (pseudo.get(b":method") and pseudo.get(b":scheme") and pseudo.get(b":path")):
            raise StreamFault(ErrorCode.PROTOCOL_ERROR)
        self.method, self.path = pseudo[b":method"], pseudo[b":path"]
        self.authority = pseudo.get(b":authority", b"")
        self.fields = regular
        self.content_length = _content_length(regular)
        self.context: Any = None

    def get(self, name: bytes) -> bytes | None:
        """Return the value of a field, the last value if there are several."""
        return next((value for other, value in reversed(self.fields) if other == name), None)


def check_fields(fields: Fields) -> None:
    """Raise StreamFault unless these are fields that a request or its trailers may have."""
    for name, value in fields:
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise StreamFault(ErrorCode.PROTOCOL_ERROR)
        if name in FORBIDDEN or (name == b"te" and value.lower() != b"trailers"):
            raise StreamFault(ErrorCode.PROTOCOL_ERROR)


class HeaderBlock:
    """The parts of a header block that has several frames. flags: of the first frame."""

    def __init__(self, stream: int, flags: int, part: bytes) -> None:
        self.stream = stream
        self.flags = flags
        self._parts = [part]

    def add(self, part: bytes, max_bytes: int) -> None:
        """Add the part in a CONTINUATION frame; raises ConnectionFault for a large block, and for many frames."""
        self._parts.append(part)
        if sum(map(len, self._parts)) > max_bytes or len(self._parts) > MAX_CONTINUATIONS:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "a header block is too large, or in too many frames")

    @property
    def content(self) -> bytes:
        """Return the whole block."""
        return b"".join(self._parts)


class HeaderReader:
    """Decodes the header blocks of one connection."""

    def __init__(self, max_list_bytes: int) -> None:
        """max_list_bytes: of one header list, as RFC 9113 counts it. A request with a larger list is refused; the connection ends
        only if the list is TOLERANCE times as large.
        """
        self._max_list_bytes = max_list_bytes
        self._decoder = Decoder(TOLERANCE * max_list_bytes)
        self._remembered: dict[bytes, RequestFields] = {}

    def request(self, block: bytes) -> RequestFields:
        """Return the fields of a request; raises ConnectionFault for an invalid block, StreamFault for a malformed request."""
        try:
            return self._remembered[block]
        except KeyError:
            pass
        fields, changed = self._decode(block)
        self._check_size(fields)
        request = RequestFields(fields)
        if not changed and len(block) <= MAX_REMEMBERED_BYTES:
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[block] = request
        return request

    def trailers(self, block: bytes) -> None:
        """Decode and check the trailers of a request; this side uses none of them."""
        fields, _ = self._decode(block)
        self._check_size(fields)
        check_fields(fields)

    def skip(self, block: bytes) -> None:
        """Decode a block that is ignored: later blocks may refer to its fields."""
        self._decode(block)

    def _check_size(self, fields: Fields) -> None:
        if sum(len(name) + len(value) + FIELD_BYTES for name, value in fields) > self._max_list_bytes:
            raise StreamFault(ErrorCode.ENHANCE_YOUR_CALM)

    def _decode(self, block: bytes) -> tuple[Fields, bool]:
        """Return the fields of a block, and whether it changed the dynamic table: what is remembered then means something else."""
        _check_size_updates(block)
        table = self._decoder.header_table
        entries, maximum = table.dynamic_entries, table.maxsize
        count, newest = len(entries), entries[0] if entries else None
        try:
            fields = [(bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True)]
        except OversizedHeaderListError:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "the header list is too large") from None
        except (HPACKError, IndexError, ValueError):
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, "the header block is invalid") from None
        entries = table.dynamic_entries
        changed = table.maxsize != maximum or len(entries) != count or bool(entries and entries[0] is not newest)
        if changed:
            self._remembered.clear()
        return fields, changed


def encode_fields(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a header block. It uses no dynamic table, so it means the same on every connection."""
    return b"".join([b"\0" + string_literal(name) + string_literal(value) for name, value in fields])


def string_literal(value: bytes) -> bytes:
    """Return a name or a value in a header block, without compression."""
    size = len(value)
    if size < 127:
        return bytes((size,)) + value
    return bytes((127, *groups_of_seven_bits(size - 127))) + value


def groups_of_seven_bits(number: int) -> list[int]:
    """Return a number in groups of seven bits, the lowest first. All but the last have the highest bit set."""
    groups = []
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    return [*groups, number]


def _check_size_updates(block: bytes) -> None:
    at = count = 0
    while at < len(block) and block[at] & 0xE0 == 0x20:
        count += 1
        if count > MAX_SIZE_UPDATES:
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, "a header block changes the size of the table too often")
        long = block[at] & 0x1F == 0x1F
        at += 1
        while long and at < len(block):
            long = block[at] >= 128
            at += 1


def _content_length(fields: Fields) -> int | None:
    lengths = {value for name, value in fields if name == b"content-length"}
    if not lengths:
        return None
    length = lengths.pop()
    if lengths or not (length.isdigit() and len(length) <= 18):
        raise StreamFault(ErrorCode.PROTOCOL_ERROR)
    return int(length)
