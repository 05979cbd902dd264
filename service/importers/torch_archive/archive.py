"""Reads the members of a zip archive that torch wrote, within bounds, and the tensors in them."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from service.importers.draft import ZIP_ERRORS, ImportRefused, refusing

TEXT_BYTES = 1 << 24
"""All compressed members together, and the largest member that is no tensor: code and descriptions."""
MAX_MEMBERS = 100_000


class Archive:
    """The members of an archive by their names below its only folder. Nothing is unpacked to a disk."""

    def __init__(self, file: Path) -> None:
        self._file = file
        with refusing(ZIP_ERRORS, f"{file} is no archive of torch", "save it again"):
            self._zip = zipfile.ZipFile(file)
        members = self._zip.infolist()
        if len(members) > MAX_MEMBERS:
            raise ImportRefused(f"{file} has {len(members)} members, and the limit is {MAX_MEMBERS}")
        self._members: dict[str, zipfile.ZipInfo] = {}
        self._storages: dict[str, Tensor] = {}
        for member in members:
            _, _, name = member.filename.partition("/")
            if name in self._members:
                raise ImportRefused(f"{file} has two members with the name {name}: save it again")
            self._members[name] = member
        self._check_sizes()

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def tensor(self, name: str, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
        """Return a tensor over the numbers in a member. strides, offset: in numbers."""
        sizes = [*shape, *strides, offset]
        if len(shape) != len(strides) or any(type(size) is not int or size < 0 for size in sizes):
            raise ImportRefused(
                f"{self._file}: the tensor in {name} has the shape {list(shape)} and the strides {list(strides)}"
            )
        numbers = int(math.prod(shape))
        content = self._numbers(name)
        count = len(content) // dtype.itemsize
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if numbers > count or (numbers and last >= count):
            raise ImportRefused(
                f"{self._file}: {name} has {len(content)} bytes, and its tensor of shape {list(shape)} needs more: copy the file again"
            )
        if not numbers:
            return torch.empty(tuple(shape), dtype=dtype)
        return content[: count * dtype.itemsize].view(dtype).as_strided(tuple(shape), tuple(strides), offset)

    def _numbers(self, name: str) -> Tensor:
        """Return the bytes of a member, which several tensors may share."""
        if name not in self._storages:
            content = self.read(name, self._file.stat().st_size)
            self._storages[name] = (
                torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
            )
        return self._storages[name]

    def read(self, name: str, limit: int = TEXT_BYTES) -> bytes:
        """Return a member; raises ImportRefused for more bytes than `limit`."""
        member = self._members.get(name)
        if member is None or member.file_size > limit:
            size = "is missing" if member is None else f"has {member.file_size} bytes, and the limit is {limit}"
            raise ImportRefused(f"{self._file}: {name} {size}: save it again")
        damaged = f"{self._file}: {name} is damaged"
        with refusing(ZIP_ERRORS, damaged, "copy the file again"), self._zip.open(member) as opened:
            content = opened.read(member.file_size + 1)
        if len(content) != member.file_size:
            raise ImportRefused(f"{damaged}: copy the file again")
        return content

    def _check_sizes(self) -> None:
        """Raise ImportRefused for members that expand to more than they may: only code is compressed."""
        packed = [member for member in self._members.values() if member.compress_type != zipfile.ZIP_STORED]
        stored = sum(member.file_size for member in self._members.values() if member.compress_type == zipfile.ZIP_STORED)
        expanded = sum(member.file_size for member in packed)
        if expanded > TEXT_BYTES or stored > self._file.stat().st_size:
            raise ImportRefused(
                f"{self._file} expands to {expanded + stored} bytes: torch compresses only code, of at most {TEXT_BYTES} bytes here"
            )
