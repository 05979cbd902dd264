"""Files of Keras that are damaged or made to harm are refused with the reason, in bounded memory, and nothing outside them is read."""

from __future__ import annotations

import resource
import stat
import struct
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from service.importers.keras import graph
from tests.importers.hostile import SEQUENTIAL, assert_refused, hdf5, write

KERNEL = "model_weights/rnn/kernel"
Change = Callable[[h5py.File, Path], Any]


def written(folder: Path, architecture: Any = SEQUENTIAL, **options: Any) -> Path:
    """Write an .h5 as Keras does. options: of hdf5."""
    return write(folder, "model.h5", hdf5(architecture, **options))


def _virtual(opened: h5py.File, other: Path) -> None:
    """The shape of the data set is known only after its parts were opened."""
    layout = h5py.VirtualLayout((3, 8), np.float32, maxshape=(None, 8))
    layout[: h5py.h5s.UNLIMITED] = h5py.VirtualSource(other, "secret", (3, 8), maxshape=(None, 8))[: h5py.h5s.UNLIMITED]
    opened.create_virtual_dataset(KERNEL, layout)


def _replaced(create: Callable[[h5py.File, Path], Any]) -> Change:
    def change(opened: h5py.File, other: Path) -> None:
        del opened[KERNEL]
        create(opened, other)

    return change


def _linked(link: Callable[[Path], Any]) -> Change:
    return _replaced(lambda opened, other: opened.__setitem__(KERNEL, link(other)))


def _created(**options: Any) -> Change:
    return _replaced(lambda opened, _: opened.create_dataset(KERNEL, **options))


CHANGES: dict[str, tuple[Change, str]] = {
    "link to another file": (_linked(lambda other: h5py.ExternalLink(other, "/secret")), "is a link to another"),
    "links in a circle": (_linked(lambda _: h5py.SoftLink(f"/{KERNEL}")), "is a link to another"),
    "group within itself": (
        lambda opened, _: opened.__setitem__("again", opened["model_weights"]),
        "is a second name of another",
    ),
    "deep groups": (lambda opened, _: opened.create_group("model_weights" + "/a" * 40), "groups within 32 others"),
    "virtual data set": (_replaced(_virtual), "is made of parts of other files"),
    "numbers in another file": (
        _created(shape=(3, 8), dtype="f4", external=[("x", 0, h5py.h5f.UNLIMITED)]),
        "has its numbers in another file",
    ),
    "compressed": (_created(data=np.zeros((400, 400), np.float32), compression="gzip"), "is compressed or in chunks"),
    "chunks that are not there": (_created(shape=(1 << 40, 8), dtype="f4", chunks=(1024, 8)), "is compressed or in chunks"),
    "shape without numbers in the file": (_created(shape=(1 << 40, 8), dtype="f4"), "the file has fewer numbers"),
    "no numbers": (_created(shape=(0, 8), dtype="f4"), r"has the shape \(0, 8\), which has no numbers"),
    "not a number": (_created(data=np.full((3, 8), np.nan, np.float32)), "weights are finite numbers"),
    "text": (_created(data=["a", "b"]), "weights are floating-point numbers"),
    "integers": (_created(data=np.ones((3, 8), np.int8)), "weights are floating-point numbers"),
    "records": (_created(data=np.zeros(4, [("a", "f4"), ("b", "f4")])), "weights are floating-point numbers"),
    "wrong shape": (_created(data=np.ones((4, 8), np.float32)), r"its kernels have the shapes \(4, 8\) and \(2, 8\): for 3 in"),
    "group in place of a tensor": (_replaced(lambda opened, _: opened.create_group(KERNEL)), "lists the tensor"),
    "no names": (lambda opened, _: opened["model_weights/rnn"].attrs.update(weight_names=[1, 2]), "and texts are needed"),
}


@pytest.mark.parametrize("change, message", CHANGES.values(), ids=CHANGES)
def test_data_set_that_is_no_plain_tensor_is_refused(tmp_path: Path, change: Change, message: str) -> None:
    other = tmp_path / "other.h5"
    with h5py.File(other, "w") as opened:
        opened["secret"] = np.full((3, 8), 0.5, np.float32)
    file = written(tmp_path)
    with h5py.File(file, "r+") as opened:
        change(opened, other)
    assert_refused(file, message)


def test_text_of_any_length_takes_no_memory(tmp_path: Path) -> None:
    """HDF5 allocates the length, 4 bytes before the place of the text, before it looks at the text."""
    file = written(tmp_path, of_any_length=True)
    content = file.read_bytes()
    place = content.index(struct.pack("<Q", content.index(b"GCOL")), content.index(b"model_config")) - 4
    file.write_bytes(content[:place] + struct.pack("<I", 0xFFFFFFF0) + content[place + 4 :])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert_refused(file, "the texts of .* cannot be read")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB


def test_texts_whose_reading_does_not_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], -9, b"", b""))
    assert_refused(
        written(tmp_path, of_any_length=True), r"the texts of .* cannot be read \(it takes too much time or memory\)"
    )


def test_archive_that_keras_does_not_write_is_refused(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("config.json")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    for info, message in ((link, "is compressed or a link"), ("notes.txt", r"has 0 files config\.json,.* It has notes\.txt")):
        with zipfile.ZipFile(tmp_path / "model.keras", "w") as opened:
            opened.writestr(info, b"/etc/passwd")
        assert_refused(tmp_path / "model.keras", message)


def _sequential(*layers: Any) -> dict[str, Any]:
    return {"class_name": "Sequential", "config": {"name": "model", "layers": list(layers)}}


def _functional(layers: list[Any], output: str) -> dict[str, Any]:
    start = {"class_name": "InputLayer", "name": "x", "config": {"batch_shape": [None, None, 3]}, "inbound_nodes": []}
    config = {"name": "model", "layers": [start, *layers], "input_layers": [["x", 0, 0]], "output_layers": [[output, 0, 0]]}
    return {"class_name": "Functional", "config": config}


def _layer(name: str, kind: str, *inputs: Any, **config: Any) -> dict[str, Any]:
    return {"class_name": kind, "name": name, "config": config, "inbound_nodes": [[[*one, {}] for one in inputs]]}


def _doubled(count: int) -> dict[str, Any]:
    """Each layer joins the output of the previous layer to itself."""
    layers = [_layer(f"x{index}", "Concatenate", *[(f"x{index - 1}" if index else "x", 0, 0)] * 2) for index in range(count)]
    return _functional(layers, f"x{count - 1}")


def _called_within(depth: int) -> dict[str, Any]:
    """Each model calls its inner model ten times."""
    inner = _functional([_layer("y", "Activation", ("x", 0, 0), activation="tanh")], "y")
    calls = [[["x", 0, 0, {}]], *([["inner", number, 0, {}]] for number in range(9))]
    for _ in range(depth):
        inner = _functional([{**inner, "name": "inner", "inbound_nodes": calls}], "inner")
        inner["config"]["output_layers"] = [["inner", 9, 0]]
    return inner


def _nested(depth: int) -> dict[str, Any]:
    return _sequential(_nested(depth - 1)) if depth else SEQUENTIAL


def _pool(**config: Any) -> dict[str, Any]:
    return _functional([_layer("a", "MaxPooling1D", ("x", 0, 0), **config)], "a")


NONE = "is not as Keras writes it"
ARCHITECTURES: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "is not the JSON that Keras writes"),
    "deep JSON": ("[" * 100_000, "is not the JSON that Keras writes"),
    "a list": ([], NONE),
    "a number": (3, NONE),
    "no layers": (_sequential(), "has no layers"),
    "many layers": (_sequential(*[1] * 2000), "or more than 1000"),
    "a layer without a name": (_sequential({"class_name": "Dense", "config": {}}), NONE),
    "models within models": (_nested(10), "within more than 8 others"),
    "a cycle": (_functional([_layer("a", "Add", ("x", 0, 0), ("a", 0, 0))], "a"), "has a cycle"),
    "a layer that is not there": (_functional([_layer("a", "Add", ("gone", 0, 0))], "a"), "has no call 0 of a layer gone"),
    "an output that is not there": (_functional([_layer("a", "Add", ("x", 0, 5))], "a"), "and number 5 is used"),
    "two layers of one name": (_functional([_layer("a", "Add", ("x", 0, 0))] * 2, "a"), "two layers named a"),
    "columns that double": (_doubled(40), "columns, and the limit is 1048576"),
    "models that call models": (_called_within(2), "more than 50 calls"),
    "a huge window": (_pool(pool_size=10**30), "its window covers"),
    "infinity": (_functional([_layer("a", "Rescaling", ("x", 0, 0), scale=1e999)], "a"), "its option scale is inf"),
    "text for a number": (_pool(pool_size="2"), "its option pool_size is '2'"),
    "a missing option": (_pool(), "it has no option pool_size"),
}


@pytest.mark.parametrize("architecture, message", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_architecture_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: Any, message: str
) -> None:
    monkeypatch.setattr(graph, "MOST_CALLS", 50)  # which take a tenth of a second
    assert_refused(written(tmp_path, architecture), message)
