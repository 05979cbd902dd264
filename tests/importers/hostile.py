"""A small valid file of each kind, and the runner of hostile files, which tests make from the valid files."""

from __future__ import annotations

import contextlib
import io
import json
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import nn

from service.importers import keras, onnx, torch_archive
from service.importers.draft import ImportRefused
from tests.importers.importing import import_file
from tests.importers.onnx.graphs import dense, graph

Change = Callable[[dict[str, bytes]], Any]
"""Changes the members of an archive."""
LSTM = {"name": "rnn", "units": 2, "activation": "tanh", "recurrent_activation": "sigmoid", "use_bias": True}
LAYERS = [
    {"module": "keras.layers", "class_name": "InputLayer", "config": {"name": "x", "batch_shape": [None, None, 3]}},
    {"module": "keras.layers", "class_name": "LSTM", "config": LSTM},
]
SEQUENTIAL: dict[str, Any] = {"module": "keras", "class_name": "Sequential", "config": {"name": "model", "layers": LAYERS}}
IH, HH, BIAS = "rnn.weight_ih_l0", "rnn.weight_hh_l0", "rnn.bias_ih_l0"
STATE_DICT = {IH: torch.ones(8, 3), HH: torch.ones(8, 2), BIAS: torch.ones(8), "rnn.bias_hh_l0": torch.ones(8)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.fc(x))


def hdf5(architecture: Any = SEQUENTIAL, *, of_any_length: bool = False, **replaced: Any) -> bytes:
    """Return an .h5 as Keras writes it, with other arrays in place of some of its tensors.

    of_any_length: write texts as Keras 3 does; a child process reads them first, which takes most of the time of a test.
    """
    content = io.BytesIO()
    with h5py.File(content, "w") as opened:
        text = architecture if isinstance(architecture, str) else json.dumps(architecture)
        is_short = len(text) < 60_000 and not of_any_length
        opened.attrs["model_config"] = np.bytes_(text) if is_short else text
        opened.attrs["keras_version"] = np.bytes_("3.15.1")
        layers = opened.create_group("model_weights")
        layers.attrs["layer_names"] = np.array(["x", "rnn"], "S")
        layers.create_group("x").attrs["weight_names"] = np.array([], "S1")
        arrays = {"kernel": np.ones((3, 8)), "recurrent_kernel": np.ones((2, 8)), "bias": np.ones(8)}
        layers.create_group("rnn").attrs["weight_names"] = np.array(list(arrays), "S")
        for name, array in arrays.items():
            layers["rnn"][name] = replaced.get(name, array.astype(np.float32))
    return content.getvalue()


def zipped(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", compression) as opened:
        for name, member in members.items():
            opened.writestr(name, member)
    return content.getvalue()


def unzipped(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def _keras() -> bytes:
    members = {"metadata.json": b'{"keras_version": "3.15.1"}', "config.json": json.dumps(SEQUENTIAL).encode()}
    return zipped({**members, "model.weights.h5": hdf5()})


def _by_torch(save: Callable[[Any], Any]) -> bytes:
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own exporters
        save(content)
    return content.getvalue()


def _export(content: Any) -> None:
    axes = ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},)
    torch.export.save(torch.export.export(Net(), (torch.randn(2, 5, 3),), dynamic_shapes=axes), content)


def _trace(content: Any) -> None:
    torch.jit.save(torch.jit.trace(Net(), torch.randn(2, 5, 3)), content)  # type: ignore[no-untyped-call]


KINDS: dict[str, tuple[Callable[[], bytes], Callable[[Path], Any], int]] = {
    "model.onnx": (lambda: graph(dense(3, 4))().SerializeToString(), onnx.read, 300 << 20),
    "model.h5": (hdf5, keras.read, 20 << 20),
    "model.keras": (_keras, keras.read, 20 << 20),
    "model.pt2": (partial(_by_torch, _export), torch_archive.read, 200 << 20),
    "traced.pt": (partial(_by_torch, _trace), torch_archive.read, 200 << 20),
    "weights.pt": (lambda: _by_torch(partial(torch.save, STATE_DICT)), lambda file: import_file(file.parent, file), 10 << 20),
    "weights.safetensors": (lambda: save(STATE_DICT), lambda file: import_file(file.parent, file), 10 << 20),
}
"""What makes a file that imports, what reads it, and the bytes that reading may allocate, which are fewer than hostile files ask for."""


@cache
def good(name: str) -> bytes:
    """Return the content of a file that imports."""
    return KINDS[name][0]()


def write(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def changed(folder: Path, name: str, change: Change) -> Path:
    """Write an archive with other members."""
    members = unzipped(good(name))
    change(members)
    return write(folder, name, zipped(members))


def assert_refused(file: Path, message: str = ".") -> None:
    """Assert that a file is refused with these words, in bounded memory, and that nothing in it was executed in this folder."""
    _, read, most_bytes = KINDS[file.name]
    tracemalloc.start()
    try:
        with contextlib.chdir(file.parent), pytest.raises(ImportRefused, match=message):
            read(file)
        assert tracemalloc.get_traced_memory()[1] < most_bytes
    finally:
        tracemalloc.stop()
    assert not {"executed", "models"} & {path.name for path in file.parent.iterdir()}
