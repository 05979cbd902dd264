"""Reads and writes .npz files of plain arrays. Never reads a pickle, and never allocates more than a file may hold."""

from __future__ import annotations

import io
import lzma
import math
import sys
import tokenize
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from service.errors import ModelError
from service.modeling.spec.files import replacing

Array = NDArray[Any]
MAX_BYTES = 8 << 30
"""Most bytes of all arrays of a file together."""
MAX_EXPANSION, FREE_BYTES = 200, 64 << 20
"""How many times larger than its file the arrays may be, and the bytes up to which any expansion is accepted."""
MAX_ARRAYS = 4096
KINDS = "biufU"
"""Kinds of dtypes: booleans, integers, floating-point numbers and text."""
HEADERS = {
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
    (3, 0): npy.read_array_header_2_0,  # differs in the encoding of field names, which plain arrays do not have
}
"""The reader of the header of each version of the .npy format."""
DAMAGED = (OSError, EOFError, zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error, lzma.LZMAError)
"""Exceptions that zipfile raises for files that are damaged, encrypted or compressed in an unknown way."""


def read_npz(file: Path) -> dict[str, Array]:
    """Return the arrays of a file by name; raises ModelError for a file that is damaged, too large or has objects."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
            _check_sizes(file, members)
            return {member.filename.removesuffix(".npy"): _read(archive, member, file) for member in members}
    except DAMAGED as error:
        raise ModelError(f"{file} cannot be read as .npz: {error}") from error


def write_npz(file: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays by name; raises ModelError if the file cannot be written."""
    with replacing(file) as written, written.open("wb") as opened:
        np.savez(opened, **arrays)  # type: ignore[arg-type]  # savez also has a keyword parameter


def _check_sizes(file: Path, members: Sequence[zipfile.ZipInfo]) -> None:
    """Raise ModelError for too many or too large arrays, before any is read."""
    stored, whole = file.stat().st_size, sum(member.file_size for member in members)  # members may share compressed bytes
    if len(members) > MAX_ARRAYS or whole > MAX_BYTES:
        raise ModelError(f"{file} has more than {MAX_ARRAYS} arrays or {MAX_BYTES >> 30} GiB: split it")
    if whole > FREE_BYTES + MAX_EXPANSION * stored:
        raise ModelError(f"{file} has {stored} bytes that would expand to {whole}: write it with numpy.savez, uncompressed")
    if len({member.filename for member in members}) < len(members):
        raise ModelError(f"{file} has two arrays of one name: write it again")


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo, file: Path) -> Array:
    with archive.open(member) as opened:
        content = opened.read(member.file_size + 1)
    where = f"{file}: the array {member.filename.removesuffix('.npy')!r}"
    stream = io.BytesIO(content)
    try:
        shape, _, dtype = HEADERS[npy.read_magic(stream)](stream)
    except (ValueError, KeyError, SyntaxError, tokenize.TokenError) as error:
        raise ModelError(f"{where} is damaged: {error}") from error
    if dtype.kind not in KINDS:
        raise ModelError(f"{where} has the dtype {dtype}, which is not read: write numbers or text")
    found = len(content) - stream.tell()
    if min(shape, default=0) < 0 or not dtype.itemsize or math.prod(shape) * dtype.itemsize != found:
        raise ModelError(f"{where} is damaged: it has {found} bytes for the shape {shape} of {dtype}")
    stream.seek(0)
    try:
        array: Array = npy.read_array(stream, allow_pickle=False)
    except ValueError as error:
        raise ModelError(f"{where} is damaged: {error}") from error
    if dtype.kind == "U" and (np.frombuffer(array.tobytes(), dtype.str[0] + "u4") > sys.maxunicode).any():
        raise ModelError(f"{where} is damaged: it has characters that do not exist")
    return array
