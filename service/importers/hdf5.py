"""Reads tensors and attributes of HDF5 files. Opens nothing outside the file, and never reads more than the file holds.

HDF5 allows links to other files, data sets spread over other files, and compressed data sets of any size. Keras writes none of these:
every object has one name, and numbers are stored uncompressed. Texts of variable length are read by a child process first:
`python -m service.importers.hdf5 FILE`.
"""

from __future__ import annotations

import io
import math
import resource
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, KeysView, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5a, h5d, h5f, h5g, h5l, h5o, h5t

from service.importers.draft import Array, ImportRefused, refusing

MOST_OBJECTS = 100_000
DEEPEST_GROUP = 32
ATTRIBUTE_BYTES = 1 << 26
CHILD_SECONDS = 10
CHILD_BYTES = 2 << 30
"""Limits of the process that reads the texts of a file first; the memory besides three times the file."""
TRAINING = ("optimizer", "optimizer_weights")
"""Groups with the state of a training."""
PLAIN = (h5d.CONTIGUOUS, h5d.COMPACT)
SAVE_AGAIN = "save the model again"
DAMAGED = (OSError, RuntimeError, KeyError, ValueError, TypeError, MemoryError)
"""Exceptions of h5py for damaged files."""


class Hdf5:
    """An open file. tensors: the paths of its data sets, in the order of the file."""

    def __init__(
        self, name: str, source: Path | bytes, groups: Mapping[str, h5g.GroupID], tensors: Mapping[str, h5d.DatasetID]
    ) -> None:
        """source: the file, or its content; groups, tensors: by path, with "" for the root."""
        self.name = name
        self._source = source
        self._groups = groups
        self._tensors = tensors
        self._remaining = _size(source)
        self._has_checked_texts = False

    @property
    def tensors(self) -> KeysView[str]:
        return self._tensors.keys()

    def array(self, path: str) -> Array:
        """Return a tensor in float32, or in float64 if it is stored so; raises ImportRefused if it is no plain array of floats."""
        where = f"{self.name}: {path}"
        with refusing(DAMAGED, f"{where} is damaged", SAVE_AGAIN):
            return self._read(where, self._tensors[path])

    def text(self, group: str, attribute: str) -> str | None:
        """Return an attribute with a text, or None if the group does not have it."""
        texts = self.texts(group, attribute)
        return None if texts is None else "".join(texts)

    def texts(self, group: str, attribute: str) -> list[str] | None:
        """Return an attribute with several texts, or None. Keras splits a long attribute into several, with 0, 1, 2, ... after the name."""
        whole = self._texts(group, attribute)
        if whole is not None:
            return whole
        texts: list[str] = []
        number = 0
        while (part := self._texts(group, f"{attribute}{number}")) is not None:
            texts += part
            number += 1
        return texts if number else None

    def read_all_texts(self) -> None:
        """Read every attribute with texts."""
        for group in self._groups.values():
            for attribute in list(h5py.Group(group).attrs):
                if h5a.open(group, attribute.encode()).get_type().get_class() == h5t.STRING:
                    h5py.Group(group).attrs[attribute]

    def _texts(self, group: str, attribute: str) -> list[str] | None:
        where = f"{self.name}: the attribute {attribute} of {group or 'the file'}"
        found = self._groups.get(group)
        if found is None:
            return None
        with refusing(DAMAGED, f"{where} is damaged", SAVE_AGAIN):
            return self._texts_of(found, attribute, where) if h5a.exists(found, attribute.encode()) else None

    def _texts_of(self, group: h5g.GroupID, attribute: str, where: str) -> list[str]:
        opened_attribute = h5a.open(group, attribute.encode())
        kind = opened_attribute.get_type()
        size = math.prod(opened_attribute.shape) * kind.get_size()
        if not size:
            return []
        if kind.get_class() != h5t.STRING:  # h5py crashes on some others
            raise ImportRefused(f"{where} has the type {opened_attribute.dtype}, and texts are needed: save the model again")
        if size > min(ATTRIBUTE_BYTES, self._remaining):
            raise ImportRefused(f"{where} has {size} bytes, more than are read")
        if kind.is_variable_str() and not self._has_checked_texts:
            _check_texts(self._source, self.name)
            self._has_checked_texts = True
        values = np.asarray(h5py.Group(group).attrs[attribute], dtype=object).ravel()
        return [_text(value) for value in values]

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
    """Open a file, or the content of one; raises ImportRefused unless it is a complete HDF5 file with no links but names of objects."""
    with refusing(DAMAGED, f"{name} is not a complete HDF5 file", SAVE_AGAIN):
        file = h5py.File(io.BytesIO(source) if isinstance(source, bytes) else source, "r", locking=False)
    with file:
        yield _walked(file.id, name, source)


def _walked(file: h5f.FileID, name: str, source: Path | bytes) -> Hdf5:
    """Return the file with every group and data set that belongs to the model."""
    groups: dict[str, h5g.GroupID] = {}
    tensors: dict[str, h5d.DatasetID] = {}
    waiting = deque([""])
    known: set[tuple[int, int]] = set()
    while waiting:
        path = waiting.popleft()
        if path.count("/") >= DEEPEST_GROUP or len(groups) + len(tensors) > MOST_OBJECTS:
            raise ImportRefused(f"{name} has more than {MOST_OBJECTS} objects, or groups within {DEEPEST_GROUP} others")
        with refusing(DAMAGED, f"{name}: {path or 'the file'} is damaged", SAVE_AGAIN):
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
    return Hdf5(name, source, groups, tensors)


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


def _check_texts(source: Path | bytes, name: str) -> None:
    """Raise ImportRefused unless a child process reads every text of the file within its limits.

    HDF5 allocates any length that is written before a text, and may never return for damaged texts.
    """
    command = [sys.executable, "-m", __name__, "-" if isinstance(source, bytes) else str(source)]
    child = subprocess.run(command, input=source if isinstance(source, bytes) else b"", capture_output=True)
    if child.returncode:
        reason = child.stderr.decode(errors="replace").strip().rpartition("\n")[2] or "it takes too much time or memory"
        raise ImportRefused(f"the texts of {name} cannot be read ({reason[:200]}): save the model again")


def _read_texts(argument: str) -> None:
    """Read every text of a file within limits of time and memory."""
    source = sys.stdin.buffer.read() if argument == "-" else Path(argument)
    limit = CHILD_BYTES + 3 * _size(source)
    resource.setrlimit(resource.RLIMIT_CPU, (CHILD_SECONDS, CHILD_SECONDS))
    with opened(source, "the file") as file:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        file.read_all_texts()


def _size(source: Path | bytes) -> int:
    return len(source) if isinstance(source, bytes) else source.stat().st_size


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise TypeError(f"it is {type(value).__name__}, and not text")
    return value


if __name__ == "__main__":
    _read_texts(sys.argv[1])
