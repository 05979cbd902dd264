"""The file that a session is exported to: a safetensors file with the tensors of its state. Knows no tensor library.

A client sends the file back to import the session. `read` therefore accepts only what an export writes, and its limits hold before
anything is allocated: a general reader of safetensors accepts headers that take seconds to read, and shapes that overflow.

The file is the length of a JSON header (8 bytes), the header, and the tensors in sequence. The header has an entry for each
tensor (dtype, shape, offsets behind the header), and the origin of the state under METADATA. There, the first entry of a signed file is
its signature, at a place that is the same in all files: it is found without parsing anything.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from service.errors import InvalidRequest

FORMAT = "seqserve state 1"
METADATA = "__metadata__"
MAX_HEADER_BYTES = 64 << 10
"""The header of a model with 16 recurrent layers takes 3 KiB."""
MAX_TENSORS = 512
MAX_REASON_CHARACTERS = 200
"""Limit for an error message of the library that reads the header."""
MAX_DIMENSIONS = 4
"""A state has up to two dimensions for each slot."""
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4, "I64": 8}
"""The dtypes of states. Whole numbers are the ids of earlier steps, which only another replica may send."""
ID_DTYPES = {"I32", "I64"}
SIGNATURE_CHARACTERS = 64
ALIGNMENT = 8
"""Of the tensors in the file."""
_LENGTH = struct.Struct("<Q")
_METADATA_BEGIN = b'{"__metadata__":{'
_SIGNATURE_BEGIN = _METADATA_BEGIN + b'"signature": "'
_SIGNATURE_END = b'",'
_SIGNATURE_AT = _LENGTH.size + len(_SIGNATURE_BEGIN)

Name = Annotated[str, Meta(pattern=r"\A[a-z0-9_.]{1,64}\Z")]
Size = Annotated[int, Meta(ge=0, lt=1 << 31)]
Offset = Annotated[int, Meta(ge=0, lt=1 << 62)]


class StateOrigin(msgspec.Struct, frozen=True):
    """Where a state comes from: the model version, the digest of its weights, and the steps that led to the state."""

    model: str
    version: str
    weights: str
    steps: int


class StoredTensor(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A tensor in the file: where its bytes begin and end behind the header."""

    dtype: Literal["F32", "F16", "BF16", "I32", "I64"]
    shape: Annotated[tuple[Size, ...], Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[Offset, Offset]

    @property
    def size(self) -> int:
        """The bytes that a tensor of this shape has."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class SessionFile(NamedTuple):
    """The content of a file: the origin of the state, its tensors by name, and their bytes."""

    origin: StateOrigin
    tensors: dict[str, StoredTensor]
    data: memoryview


class _Metadata(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The metadata of the header. safetensors has only texts there."""

    format: Annotated[str, Meta(max_length=64)]
    model: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._-]{1,128}\Z")]
    version: Annotated[str, Meta(pattern=r"\A[0-9]{1,9}\Z")]
    weights: Annotated[str, Meta(pattern=r"\A[0-9a-f]{0,64}\Z")]
    steps: Annotated[str, Meta(pattern=r"\A[1-9][0-9]{0,17}\Z")]
    signature: Annotated[str, Meta(max_length=SIGNATURE_CHARACTERS)] = ""


class _Invalid(ValueError):
    """An error in a file."""


def metadata_of(origin: StateOrigin) -> dict[str, str]:
    """Return the metadata of a file with a state of this origin."""
    return {"format": FORMAT, **msgspec.structs.asdict(origin), "steps": str(origin.steps)}


class SignedFile(NamedTuple):
    """A signed file: the bytes before its signature, the signature, and the bytes after it. It shares the memory of the file.

    The signature covers the bytes before and after it. Its place and its length are fixed, so two files never have the same two parts.
    """

    before: bytes
    signature: bytes
    after: memoryview


def with_signature_entry(data: bytes | memoryview) -> SignedFile:
    """Return the parts of a file that an engine has written, with an entry for a signature, which is still empty."""
    view = memoryview(data)
    [length] = _LENGTH.unpack_from(view)
    assert view[_LENGTH.size :][: len(_METADATA_BEGIN)] == _METADATA_BEGIN, "safetensors writes the metadata first"
    entry_bytes = len(_SIGNATURE_BEGIN) - len(_METADATA_BEGIN) + SIGNATURE_CHARACTERS + len(_SIGNATURE_END)
    assert entry_bytes % ALIGNMENT == 0, "the tensors stay aligned"
    before = _LENGTH.pack(length + entry_bytes) + _SIGNATURE_BEGIN
    after = b"".join((_SIGNATURE_END, view[_LENGTH.size + len(_METADATA_BEGIN) :]))
    return SignedFile(before, b"", memoryview(after))


def split_signed(data: bytes | memoryview) -> SignedFile | None:
    """Return the parts of a signed file, None for a file without a signature. Reads only the place of the signature."""
    view = memoryview(data)
    before, end = bytes(view[:_SIGNATURE_AT]), _SIGNATURE_AT + SIGNATURE_CHARACTERS
    if not before.endswith(_SIGNATURE_BEGIN) or len(view) < end:
        return None
    return SignedFile(before, bytes(view[_SIGNATURE_AT:end]), view[end:])


def read(data: bytes | memoryview, *, with_ids: bool = False) -> SessionFile:
    """Return the content of an exported file, which shares the memory of `data`; raises InvalidRequest for anything else.

    with_ids: whether it may have tensors of whole numbers, as a file from another replica may.
    """
    try:
        return _read(memoryview(data), with_ids)
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        # The reason may repeat names of the header, in any characters.
        reason = str(error).encode("ascii", "backslashreplace").decode()[:MAX_REASON_CHARACTERS]
        raise InvalidRequest(
            f"the body is not the state of a session: {reason}; send the body that GET on this path returned"
        ) from None


def _read(data: memoryview, with_ids: bool) -> SessionFile:
    if len(data) < _LENGTH.size:
        raise _Invalid(f"it has {len(data)} bytes")
    [length] = _LENGTH.unpack_from(data)
    begin = _LENGTH.size + length
    if length > MAX_HEADER_BYTES:
        raise _Invalid(f"its header has {length} bytes and at most {MAX_HEADER_BYTES} are allowed")
    if begin > len(data):
        raise _Invalid(f"its header has {length} bytes and {len(data) - _LENGTH.size} bytes follow")
    header = json.loads(str(data[_LENGTH.size : begin], "utf-8"), object_pairs_hook=_without_duplicates)
    if not isinstance(header, dict) or METADATA not in header:
        raise _Invalid(f"its header is not an object with {METADATA}")
    metadata = msgspec.convert(header.pop(METADATA), _Metadata)
    if metadata.format != FORMAT:
        raise _Invalid(f"its format is not {FORMAT}")
    if len(header) > MAX_TENSORS:
        raise _Invalid(f"it has {len(header)} tensors and at most {MAX_TENSORS} are allowed")
    tensors = msgspec.convert(header, dict[Name, StoredTensor])
    if not with_ids and any(tensor.dtype in ID_DTYPES for tensor in tensors.values()):
        raise _Invalid("it has tensors of whole numbers")
    _check_offsets(tensors, len(data) - begin)
    origin = StateOrigin(metadata.model, metadata.version, metadata.weights, int(metadata.steps))
    return SessionFile(origin, tensors, data[begin:])


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise _Invalid("its header names something twice")
    return members


def _check_offsets(tensors: dict[str, StoredTensor], size: int) -> None:
    """Check that the tensors follow each other without a gap, and that they fill the `size` bytes behind the header."""
    position = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin, end = tensor.data_offsets
        if begin != position or end - begin != tensor.size:
            raise _Invalid(
                f"tensor {name} of {tensor.size} bytes has the offsets {begin} and {end}, and {position} bytes precede it"
            )
        position = end
    if position != size:
        raise _Invalid(f"its tensors have {position} bytes and {size} bytes follow the header")
