"""Reads and writes .npz files of plain arrays. Never reads a pickle, and never allocates more than a file may hold."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from service.errors import ModelError

Array = NDArray[Any]
MAX_BYTES = 8 << 30
"""Most bytes of all arrays of a file together."""
MAX_ARRAYS = 4096
KINDS = "biufU"
"""Kinds of dtypes: booleans, integers, floating-point numbers and text."""


def read_npz(file: Path) -> dict[str, Array]:
    """Return the arrays of a file by name; raises ModelError for a file that is damaged, too large or has objects."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
            if len(members) > MAX_ARRAYS or sum(member.file_size for member in members) > MAX_BYTES:
                raise ModelError(f"{file} has more than {MAX_ARRAYS} arrays or {MAX_BYTES >> 30} GiB: split it")
            return {member.filename.removesuffix(".npy"): _read(archive, member, file) for member in members}
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise ModelError(f"{file} cannot be read as .npz: {error}") from error


def write_npz(file: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays by name; raises ModelError if the file cannot be written."""
    try:
        with file.open("wb") as opened:
            np.savez(opened, **arrays)  # type: ignore[arg-type]  # NumPy has a keyword of its own among the names
    except OSError as error:
        raise ModelError(f"{file} cannot be written: {error.strerror}") from error


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo, file: Path) -> Array:
    with archive.open(member) as opened:
        content = opened.read(member.file_size + 1)
    where = f"{file}: the array {member.filename.removesuffix('.npy')!r}"
    stream = io.BytesIO(content)
    try:
        version = npy.read_magic(stream)
        shape, _, dtype = (npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0)(stream)
    except ValueError as error:
        raise ModelError(f"{where} is damaged: {error}") from error
    if dtype.kind not in KINDS:
        raise ModelError(f"{where} has the dtype {dtype}, which is not read: write numbers or text")
    if math.prod(shape) * dtype.itemsize != len(content) - stream.tell():
        raise ModelError(f"{where} is damaged: it has {len(content) - stream.tell()} bytes for the shape {shape}")
    stream.seek(0)
    array: Array = npy.read_array(stream, allow_pickle=False)
    return array
