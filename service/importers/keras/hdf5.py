"""Reads tensors and attributes of HDF5 files. Nothing outside the file is opened, and nothing is read that the file does not hold.

HDF5 allows links to other files, data sets spread over other files, and compressed data sets of any size. Keras writes none of these:
every object has one name, and numbers are stored uncompressed.
"""

from __future__ import annotations

import math
import resource
from collections import deque
from collections.abc import Iterator, KeysView, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5a, h5d, h5f, h5g, h5l, h5o, h5p, h5t

from service.importers.draft import Array, ImportRefused

MOST_OBJECTS = 100_000
DEEPEST_GROUP = 32
ATTRIBUTE_BYTES = 1 << 26
SPARE_BYTES = 1 << 28
"""What reading an attribute may allocate besides its text."""
MEMORY_OF_PROCESS = Path("/proc/self/statm")
TRAINING = ("optimizer", "optimizer_weights")
"""Groups with the state of a training."""
PLAIN = (h5d.CONTIGUOUS, h5d.COMPACT)
DAMAGED = (OSError, RuntimeError, KeyError, ValueError, TypeError, MemoryError)
"""What h5py raises for a file that is damaged."""


class Hdf5:
    """An open file. tensors: the paths of its data sets, in the order of the file."""

    def __init__(self, name: str, groups: Mapping[str, h5g.GroupID], tensors: Mapping[str, h5d.DatasetID], size: int) -> None:
        """groups, tensors: by path, with "" for the root; size: of the file in bytes."""
        self.name = name
        self._groups = groups
        self._tensors = tensors
        self._size = self._remaining = size

    @property
    def tensors(self) -> KeysView[str]:
        return self._tensors.keys()

    def array(self, path: str) -> Array:
        """Return a tensor in float32, or in float64 if it is stored so; raises ImportRefused if it is no plain array of floats."""
        where = f"{self.name}: {path}"
        try:
            return self._read(where, self._tensors[path])
        except DAMAGED as error:
            raise ImportRefused(f"{where} is damaged ({error}): save the model again") from error

    def text(self, group: str, attribute: str) -> str | None:
        """Return an attribute with a text, or None if the group does not have it."""
        texts = self.texts(group, attribute)
        return None if texts is None else "".join(texts)

    def texts(self, group: str, attribute: str) -> list[str] | None:
        """Return an attribute with several texts, or None. Keras splits a long one into those with 0, 1, 2, ... after the name."""
        whole = self._texts(group, attribute)
        if whole is not None:
            return whole
        texts: list[str] = []
        number = 0
        while (part := self._texts(group, f"{attribute}{number}")) is not None:
            texts += part
            number += 1
        return texts if number else None

    def _texts(self, group: str, attribute: str) -> list[str] | None:
        where = f"{self.name}: the attribute {attribute} of {group or 'the file'}"
        found = self._groups.get(group)
        if found is None:
            return None
        try:
            if not h5a.exists(found, attribute.encode()):
                return None
            attribute_id = h5a.open(found, attribute.encode())
            kind = attribute_id.get_type()
            size = math.prod(attribute_id.shape) * kind.get_size()
            if not size:
                return []
            if kind.get_class() != h5t.STRING:  # h5py crashes on some others
                raise ImportRefused(f"{where} has the type {attribute_id.dtype}, and texts are needed: save the model again")
            if size > min(ATTRIBUTE_BYTES, self._remaining):
                raise ImportRefused(f"{where} has {size} bytes, more than are read")
            with _limited_memory(2 * self._size + SPARE_BYTES):
                values = np.asarray(h5py.Group(found).attrs[attribute], dtype=object).ravel()
            return [_text(value) for value in values]
        except DAMAGED as error:
            raise ImportRefused(f"{where} is damaged ({error}): save the model again") from error

    def _read(self, where: str, tensor: h5d.DatasetID) -> Array:
        _check_storage(where, tensor)  # before the shape is read: that opens the parts of a virtual data set
        kind, shape = tensor.get_type(), tensor.shape
        size = math.prod(shape) * kind.get_size()
        is_bfloat16 = kind.get_class() == h5t.OPAQUE and kind.get_size() == 2
        if kind.get_class() != h5t.FLOAT and not is_bfloat16:
            raise ImportRefused(f"{where} has the type {tensor.dtype}, and weights are floating-point numbers")
        if not size:
            raise ImportRefused(f"{where} has the shape {shape}, which has no numbers")
        if size != tensor.get_storage_size() or size > self._remaining:
            raise ImportRefused(f"{where} has the shape {shape}, and the file has fewer numbers: save the model again")
        self._remaining -= size
        array: Array = h5py.Dataset(tensor)[()]
        if is_bfloat16:
            bits = np.frombuffer(array.tobytes(), np.uint16).astype(np.uint32) << 16
            return bits.view(np.float32).reshape(shape)
        return np.asarray(array, np.float32 if array.dtype.itemsize <= 4 else np.float64)


@contextmanager
def opened(source: Path | bytes, name: str) -> Iterator[Hdf5]:
    """Open a file, or the content of one; raises ImportRefused if it is no complete HDF5 file or has other links than names of objects."""
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    access.set_file_locking(False, True)
    size = len(source) if isinstance(source, bytes) else source.stat().st_size
    try:
        if isinstance(source, bytes):
            access.set_fapl_core(backing_store=False)
            access.set_file_image(source)
        file = h5f.open((name if isinstance(source, bytes) else str(source)).encode(), h5f.ACC_RDONLY, fapl=access)
    except DAMAGED as error:
        raise ImportRefused(f"{name} is not a complete HDF5 file ({error}): save the model again") from error
    try:
        yield _walked(file, name, size)
    finally:
        file.close()


def _walked(file: h5f.FileID, name: str, size: int) -> Hdf5:
    """Return the file with every group and data set that belongs to the model."""
    groups: dict[str, h5g.GroupID] = {}
    tensors: dict[str, h5d.DatasetID] = {}
    waiting = deque([""])
    known: set[tuple[int, int]] = set()
    while waiting:
        path = waiting.popleft()
        if path.count("/") >= DEEPEST_GROUP or len(groups) + len(tensors) > MOST_OBJECTS:
            raise ImportRefused(f"{name} has more than {MOST_OBJECTS} objects, or groups within {DEEPEST_GROUP} others")
        try:
            if not path:
                groups[path] = h5g.open(file, b"/")
                known.add(_address(groups[path]))
            for label, found in _objects(groups[path], f"{name}: {path}", skipped=() if path else TRAINING):
                inner = f"{path}/{label}".lstrip("/")
                if _address(found) in known:
                    raise ImportRefused(f"{name}: {inner} is a second name of another object: save the model again")
                known.add(_address(found))
                if isinstance(found, h5g.GroupID):
                    groups[inner] = found
                    waiting.append(inner)
                elif isinstance(found, h5d.DatasetID):
                    tensors[inner] = found
        except DAMAGED as error:
            raise ImportRefused(f"{name}: {path or 'the file'} is damaged ({error}): save the model again") from error
    return Hdf5(name, groups, tensors, size)


def _objects(group: h5g.GroupID, where: str, skipped: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the objects of a group by name. No link is followed."""
    for encoded in group:
        label = encoded.decode(errors="replace")
        if label in skipped:
            continue
        if group.links.get_info(encoded).type != h5l.TYPE_HARD:
            raise ImportRefused(f"{where}/{label} is a link to another place, which is not followed: save the model again")
        yield label, h5o.open(group, encoded)


def _address(found: Any) -> tuple[int, int]:
    info = h5o.get_info(found)
    return info.fileno, info.addr


def _check_storage(where: str, tensor: h5d.DatasetID) -> None:
    """Raise ImportRefused unless the numbers of a data set are in one place of the file, as they are."""
    how = tensor.get_create_plist()
    if how.get_layout() == h5d.VIRTUAL:
        raise ImportRefused(f"{where} is made of parts of other files, which are not read: save the model again")
    if how.get_external_count():
        raise ImportRefused(f"{where} has its numbers in another file, which is not read: save the model again")
    if how.get_nfilters() or how.get_layout() not in PLAIN:
        raise ImportRefused(f"{where} is compressed or in chunks, which Keras does not do: save the model again")


@contextmanager
def _limited_memory(more: int) -> Iterator[None]:
    """Let this process allocate only so many bytes more: for a text, HDF5 allocates any length that is written in the file.

    Systems other than Linux do not tell how much a process has, and get no limit.
    """
    if not MEMORY_OF_PROCESS.exists():
        yield
        return
    limit, highest = resource.getrlimit(resource.RLIMIT_AS)
    wanted = int(MEMORY_OF_PROCESS.read_text().split()[0]) * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (wanted if limit == resource.RLIM_INFINITY else min(wanted, limit), highest))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (limit, highest))


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise TypeError(f"it is {type(value).__name__}, and not text")
    return value
