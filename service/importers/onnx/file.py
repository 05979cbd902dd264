"""Reads .onnx files within bounds, and external data only from regular files in the model's folder."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import numpy as np
from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto, helper, numpy_helper

from service.importers.draft import Array, ImportRefused
from service.modeling.spec.files import read_file

MODEL_BYTES = (1 << 31) - 1
"""Protocol buffers have no larger messages."""
EXTERNAL_BYTES = 1 << 34
"""All external data of a model together."""
READABLE = (
    *(TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16),
    *(TensorProto.INT64, TensorProto.INT32, TensorProto.INT16, TensorProto.INT8, TensorProto.UINT8, TensorProto.BOOL),
)
"""Types of weights, and of the sizes and masks from which graphs compute shapes."""


def read_model(path: Path) -> ModelProto:
    """Return the content of an .onnx file; raises ImportRefused if it is none."""
    try:
        content = read_file(path, limit=MODEL_BYTES)
    except OSError as error:
        raise ImportRefused(f"{path} cannot be read: {error.strerror}") from error
    try:
        model: ModelProto = ModelProto.FromString(content)
    except DecodeError as error:
        raise ImportRefused(f"{path} is not a complete ONNX file: export the model again") from error
    if not model.graph.node:
        raise ImportRefused(f"{path} is not an ONNX model, or its graph is empty: export the model again")
    return model


class Tensors:
    """Converts the tensors of a model to arrays, with external data from other files in its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._external_bytes = 0

    def array(self, tensor: TensorProto) -> Array:
        """Return the numbers of a tensor; raises ImportRefused if they do not fit its shape or are of a type that weights do not have."""
        _check(tensor)
        return self._external(tensor) if tensor.data_location == TensorProto.EXTERNAL else inline_array(tensor)

    def _external(self, tensor: TensorProto) -> Array:
        """Return a tensor from a file in the model's folder."""
        entries = {str(entry.key): str(entry.value) for entry in tensor.external_data}
        dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
        size = math.prod(tensor.dims) * dtype.itemsize
        self._external_bytes += size
        if self._external_bytes > EXTERNAL_BYTES:
            raise ImportRefused(f"the model has more than {EXTERNAL_BYTES} bytes of external data")
        offset = _byte_count(tensor, "offset", entries.get("offset", "0"))
        if _byte_count(tensor, "length", entries.get("length", str(size))) != size:
            raise ImportRefused(f"the external data of {tensor.name} has {entries['length']} bytes, and its shape needs {size}")
        with self._beside_model(entries.get("location", ""), tensor.name) as file:
            data = _read(file, offset, max(0, min(size, os.fstat(file).st_size - offset)))
        if len(data) < size:
            raise ImportRefused(f"the external data of {tensor.name} has {len(data)} of {size} bytes: copy the file again")
        return np.frombuffer(data, dtype).reshape(tuple(tensor.dims))

    @contextmanager
    def _beside_model(self, location: str, name: str) -> Iterator[int]:
        """Open a file below the model's folder. No part of its path may be a link, and it may have no other name."""
        parts = PurePosixPath(location).parts
        if not parts or any(part in ("/", "..") or "\\" in part or "\0" in part for part in parts):
            raise ImportRefused(f"the external data of {name} is in {location!r}: put the file into the folder of the model")
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        folder = os.open(self._folder, flags | os.O_DIRECTORY)
        try:
            for part in parts[:-1]:
                inner = os.open(part, flags | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
                os.close(folder)
                folder = inner
            file = os.open(parts[-1], flags | os.O_NOFOLLOW, dir_fd=folder)
        except OSError as error:
            raise ImportRefused(
                f"the external data of {name} cannot be read from {location!r}: {error.strerror}. Links are not followed: "
                "put a copy of the file into the folder of the model"
            ) from error
        finally:
            os.close(folder)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise ImportRefused(f"{location} is not a regular file")
            if status.st_nlink > 1:
                raise ImportRefused(
                    f"{location} has several names (hard links): put a copy of the file into the folder of the model"
                )
            yield file
        finally:
            os.close(file)


def inline_array(tensor: TensorProto) -> Array:
    """Return the numbers of a tensor with its data within the model."""
    _check(tensor)
    try:
        if tensor.data_location != TensorProto.EXTERNAL:
            return numpy_helper.to_array(tensor)
    except (ValueError, TypeError):
        pass
    raise ImportRefused(
        f"the data of the tensor {tensor.name} does not fit its shape {tuple(tensor.dims)}: export the model again"
    )


def _check(tensor: TensorProto) -> None:
    if tensor.data_type not in READABLE:
        known = tensor.data_type in TensorProto.DataType.values()
        name = TensorProto.DataType.Name(tensor.data_type) if known else f"unknown type {tensor.data_type}"
        raise ImportRefused(f"the tensor {tensor.name} is of type {name}: export the model with weights in float32")
    if any(size < 0 for size in tensor.dims):
        raise ImportRefused(f"the tensor {tensor.name} has the shape {tuple(tensor.dims)}: export the model again")


def _read(file: int, offset: int, size: int) -> bytes:
    """Return `size` bytes from an offset, or fewer if the file has become shorter."""
    if not size:
        return b""
    with open(file, "rb", closefd=False) as opened:
        opened.seek(offset)
        return opened.read(size)


def _byte_count(tensor: TensorProto, key: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 19):
        raise ImportRefused(f"the external data of {tensor.name} has the {key} {value!r}, which is no number of bytes")
    return int(value)
