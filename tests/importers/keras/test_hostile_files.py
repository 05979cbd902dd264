"""Files of Keras that are damaged or made to harm are refused with the reason, in bounded memory, and nothing outside them is read."""

from __future__ import annotations

import json
import resource
import stat
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from service.importers import hdf5
from service.importers.draft import ImportRefused
from service.importers.keras import read

SEQUENTIAL: dict[str, Any] = {
    "module": "keras",
    "class_name": "Sequential",
    "config": {
        "name": "model",
        "layers": [
            {"module": "keras.layers", "class_name": "InputLayer", "config": {"name": "x", "batch_shape": [None, None, 3]}},
            {
                "module": "keras.layers",
                "class_name": "LSTM",
                "config": {
                    "name": "rnn",
                    "units": 2,
                    "activation": "tanh",
                    "recurrent_activation": "sigmoid",
                    "use_bias": True,
                },
            },
        ],
    },
}
SHAPES = {"kernel": (3, 8), "recurrent_kernel": (2, 8), "bias": (8,)}
CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"
KERNEL = "model_weights/rnn/kernel"
Change = Callable[[h5py.File, Path], None]


def written(folder: Path, architecture: Any = SEQUENTIAL, **replaced: Any) -> Path:
    """Write an .h5 as Keras does, with other arrays in place of some of its tensors."""
    file = folder / "model.h5"
    with h5py.File(file, "w") as opened:
        text = architecture if isinstance(architecture, str) else json.dumps(architecture)
        opened.attrs["model_config"] = text
        opened.attrs["keras_version"] = "3.15.1"
        group = opened.create_group("model_weights")
        group.attrs["layer_names"] = ["x", "rnn"]
        group.create_group("x").attrs["weight_names"] = np.array([], "S1")
        group.create_group("rnn").attrs["weight_names"] = list(SHAPES)
        for name, shape in SHAPES.items():
            group["rnn"][name] = replaced.get(name, np.ones(shape, np.float32))
    return file


def archive(folder: Path, **replaced: bytes) -> Path:
    """Write a .keras archive, with other content in place of some of its files."""
    (folder / "inner").mkdir(exist_ok=True)
    weights = written(folder / "inner").read_bytes()
    members = {"metadata.json": b'{"keras_version": "3.15.1"}', "config.json": json.dumps(SEQUENTIAL).encode()}
    file = folder / "model.keras"
    with zipfile.ZipFile(file, "w") as opened:
        for name, content in {**members, "model.weights.h5": weights, **replaced}.items():
            opened.writestr(name, content)
    return file


@contextmanager
def bounded_memory(limit: int = 20 << 20) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def refused(file: Path, message: str) -> None:
    with bounded_memory(), pytest.raises(ImportRefused, match=message):
        read(file)


def test_files_that_the_others_change_are_imported(tmp_path: Path) -> None:
    for file in (written(tmp_path), archive(tmp_path)):
        assert [part.table for part in read(file).layers] == [{"kind": "lstm", "hidden": 2}]


def test_file_is_closed_after_it_was_read(tmp_path: Path) -> None:
    file = written(tmp_path)
    draft = read(file)
    with h5py.File(file, "r+") as opened:
        opened[KERNEL][:] = 0
    assert draft.layers[0].arrays["0.forward.input"].all()


def _virtual(opened: h5py.File, other: Path) -> None:
    del opened[KERNEL]
    layout = h5py.VirtualLayout((3, 8), np.float32)
    layout[:] = h5py.VirtualSource(other, "secret", (3, 8))
    opened.create_virtual_dataset(KERNEL, layout)


def _linked(link: Callable[[Path], Any]) -> Change:
    def change(opened: h5py.File, other: Path) -> None:
        del opened[KERNEL]
        opened[KERNEL] = link(other)

    return change


def _unlimited_virtual(opened: h5py.File, other: Path) -> None:
    """The shape of this data set is known only after its parts were opened."""
    del opened[KERNEL]
    layout = h5py.VirtualLayout((3, 8), np.float32, maxshape=(None, 8))
    source = h5py.VirtualSource(other, "secret", (3, 8), maxshape=(None, 8))
    layout[0 : h5py.h5s.UNLIMITED, :] = source[0 : h5py.h5s.UNLIMITED, :]
    opened.create_virtual_dataset(KERNEL, layout)


def _elsewhere(opened: h5py.File, other: Path) -> None:
    del opened[KERNEL]
    opened.create_dataset(KERNEL, (3, 8), np.float32, external=[(str(other), 0, h5py.h5f.UNLIMITED)])


def _created(**options: Any) -> Change:
    def change(opened: h5py.File, other: Path) -> None:
        del opened[KERNEL]
        opened.create_dataset(KERNEL, **options)

    return change


def _group_of_itself(opened: h5py.File, other: Path) -> None:
    opened["model_weights/rnn/again"] = opened["model_weights"]


def _deep(opened: h5py.File, other: Path) -> None:
    opened.create_group("/".join(["model_weights/rnn", *["a"] * 40]))


def _group(opened: h5py.File, other: Path) -> None:
    del opened[KERNEL]
    opened.create_group(KERNEL)


def _numbers_for_names(opened: h5py.File, other: Path) -> None:
    opened["model_weights/rnn"].attrs["weight_names"] = [1, 2]


CHANGES: dict[str, tuple[Change, str]] = {
    "link to another file": (_linked(lambda other: h5py.ExternalLink(other, "/secret")), "is a link to another"),
    "link within the file": (_linked(lambda _: h5py.SoftLink("/model_weights/rnn/bias")), "is a link to another"),
    "links in a circle": (_linked(lambda _: h5py.SoftLink(f"/{KERNEL}")), "is a link to another"),
    "group within itself": (_group_of_itself, "is a second name of another object"),
    "deep groups": (_deep, "groups within 32 others"),
    "virtual data set": (_virtual, "is made of parts of other files"),
    "virtual data set of any size": (_unlimited_virtual, "is made of parts of other files"),
    "numbers in another file": (_elsewhere, "has its numbers in another file"),
    "compressed": (_created(data=np.zeros((4000, 4000), np.float32), compression="gzip"), "is compressed or in chunks"),
    "chunks that are not in the file": (
        _created(shape=(1 << 40, 8), dtype="f4", chunks=(1024, 8)),
        "is compressed or in chunks",
    ),
    "shape without numbers in the file": (_created(shape=(1 << 40, 8), dtype="f4"), "the file has fewer numbers"),
    "no numbers": (_created(shape=(0, 8), dtype="f4"), r"has the shape \(0, 8\), which has no numbers"),
    "text": (_created(data=["a", "b"]), "weights are floating-point numbers"),
    "references": (_created(shape=(2,), dtype=h5py.ref_dtype), "weights are floating-point numbers"),
    "integers": (_created(data=np.ones((3, 8), np.int8)), "weights are floating-point numbers"),
    "records": (_created(data=np.zeros(4, [("a", "f4"), ("b", "f4")])), "weights are floating-point numbers"),
    "wrong shape": (
        _created(data=np.ones((4, 8), np.float32)),
        r"its kernels have the shapes \(4, 8\) and \(2, 8\): for 3 inputs",
    ),
    "too many axes": (_created(data=np.ones((3, 8, 1), np.float32)), "its kernels have the shapes"),
    "group in place of a tensor": (_group, "lists the tensor"),
    "numbers in place of names": (_numbers_for_names, "and texts are needed"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_data_set_that_is_no_plain_tensor_is_refused(tmp_path: Path, name: str) -> None:
    other = tmp_path / "other.h5"
    with h5py.File(other, "w") as opened:
        opened["secret"] = np.full((3, 8), 0.5, np.float32)
    file = written(tmp_path)
    change, message = CHANGES[name]
    with h5py.File(file, "r+") as opened:
        change(opened, other)
    refused(file, message)


def damaged_text(file: Path, at: int, value: bytes) -> None:
    """Change a reference to a text: its length, 4 bytes before the place of its bytes, or the place."""
    content = file.read_bytes()
    place = content.index(struct.pack("<Q", content.index(b"GCOL")), content.index(b"model_config")) + at
    file.write_bytes(content[:place] + value + content[place + len(value) :])


def test_text_of_any_length_takes_no_memory(tmp_path: Path) -> None:
    """HDF5 allocates the length before it looks at the text."""
    file = written(tmp_path)
    damaged_text(file, -4, struct.pack("<I", 0xFFFFFFF0))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(file, "the texts of .* cannot be read")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB


def test_text_whose_reading_does_not_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdf5, "__name__", "tests.importers.keras.endless")
    refused(written(tmp_path), r"the texts of .* cannot be read \(it takes too much time or memory\)")


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, number: float) -> None:
    refused(written(tmp_path, kernel=np.full((3, 8), number, np.float32)), "weights are finite numbers")


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9, 0.99])
def test_truncated_file_is_refused(tmp_path: Path, kept: float) -> None:
    for file, message in ((written(tmp_path), "is not a complete HDF5 file"), (archive(tmp_path), "is not a complete")):
        content = file.read_bytes()
        file.write_bytes(content[: int(kept * len(content))])
        refused(file, message)


def test_compressed_archive_is_refused_before_it_expands(tmp_path: Path) -> None:
    file = archive(tmp_path)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr("config.json", bytes(200 << 20))
    refused(file, "is compressed or a link")


def test_archive_with_a_link_is_refused(tmp_path: Path) -> None:
    file = archive(tmp_path)
    link = zipfile.ZipInfo("config.json")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(file, "w") as opened:
        opened.writestr(link, "/etc/passwd")
    refused(file, "is compressed or a link")


def test_files_of_an_archive_are_never_unpacked(tmp_path: Path) -> None:
    file = archive(tmp_path, **{"../outside": b"x", "/outside": b"x"})
    before = sorted(tmp_path.rglob("*"))
    read(file)
    assert sorted(tmp_path.rglob("*")) == before


def test_archive_with_two_files_of_one_name_is_refused(tmp_path: Path) -> None:
    file = archive(tmp_path)
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(file, "a") as opened:
        opened.writestr("config.json", b"{}")
    refused(file, r"has 2 files config\.json")


def test_archive_without_a_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.keras"
    with zipfile.ZipFile(file, "w") as opened:
        opened.writestr("notes.txt", b"x")
    refused(file, r"has 0 files config\.json, and a \.keras archive has one\. It has notes\.txt")


def _sequential(*layers: Any) -> dict[str, Any]:
    return {"class_name": "Sequential", "config": {"name": "model", "layers": list(layers)}}


ARCHITECTURES: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "is not the JSON that Keras writes"),
    "deep JSON": ("[" * 100_000, "is not the JSON that Keras writes"),
    "a list": ([], "is not as Keras writes it"),
    "a number": (3, "is not as Keras writes it"),
    "no layers": (_sequential(), "has no layers"),
    "many layers": (_sequential(*[1] * 2000), "or more than 1000"),
    "a layer without a name": (_sequential({"class_name": "Dense", "config": {}}), "is not as Keras writes it"),
    "models within models": ("nested", "within more than 8 others"),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    architecture, message = ARCHITECTURES[name]
    if architecture == "nested":
        architecture = SEQUENTIAL
        for _ in range(10):
            architecture = _sequential(architecture)
    refused(written(tmp_path, architecture), message)


def _functional(layers: list[Any], output: str) -> dict[str, Any]:
    start = {"class_name": "InputLayer", "name": "x", "config": {"batch_shape": [None, None, 3]}, "inbound_nodes": []}
    return {
        "class_name": "Functional",
        "config": {
            "name": "model",
            "layers": [start, *layers],
            "input_layers": [["x", 0, 0]],
            "output_layers": [[output, 0, 0]],
        },
    }


def _layer(name: str, kind: str, *inputs: Any, **config: Any) -> dict[str, Any]:
    return {"class_name": kind, "name": name, "config": config, "inbound_nodes": [[[*one, {}] for one in inputs]]}


def _doubled(count: int) -> dict[str, Any]:
    """Each layer joins the output of the previous layer to itself."""
    names = ["x", *(f"join{index}" for index in range(count))]
    layers = [_layer(name, "Concatenate", (below, 0, 0), (below, 0, 0)) for below, name in pairwise(names)]
    return _functional(layers, names[-1])


def _called_within(depth: int) -> dict[str, Any]:
    """Each model calls its inner model ten times."""
    inner = _functional([_layer("y", "Activation", ("x", 0, 0), activation="tanh")], "y")
    for _ in range(depth):
        calls = [[[["x", 0, 0, {}]]], *([[["inner", number, 0, {}]]] for number in range(9))]
        layer = {**inner, "name": "inner", "inbound_nodes": [call[0] for call in calls]}
        inner = _functional([layer], "inner")
        inner["config"]["output_layers"] = [["inner", 9, 0]]
    return inner


GRAPHS: dict[str, tuple[dict[str, Any], str]] = {
    "a cycle": (
        _functional([_layer("a", "Add", ("x", 0, 0), ("b", 0, 0)), _layer("b", "Add", ("a", 0, 0), ("x", 0, 0))], "b"),
        "has a cycle",
    ),
    "a layer that is not there": (_functional([_layer("a", "Add", ("gone", 0, 0))], "a"), "has no call 0 of a layer gone"),
    "an output that is not there": (_functional([_layer("a", "Add", ("x", 0, 5))], "a"), "and number 5 is used"),
    "two layers of one name": (_functional([_layer("a", "Add", ("x", 0, 0))] * 2, "a"), "two layers named a"),
    "columns that double": (_doubled(40), "columns, and the limit is 1048576"),
    "models that call models": (_called_within(8), "more than 1000 calls"),
    "a huge window": (_functional([_layer("a", "MaxPooling1D", ("x", 0, 0), pool_size=10**30)], "a"), "its window covers"),
    "an infinite number": (
        _functional([_layer("a", "Rescaling", ("x", 0, 0), scale=float("inf"))], "a"),
        "its option scale is inf",
    ),
    "text for a number": (
        _functional([_layer("a", "MaxPooling1D", ("x", 0, 0), pool_size="2")], "a"),
        "its option pool_size is '2'",
    ),
    "a missing option": (_functional([_layer("a", "MaxPooling1D", ("x", 0, 0))], "a"), "it has no option pool_size"),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    architecture, message = GRAPHS[name]
    refused(written(tmp_path, architecture), message)


@pytest.mark.parametrize("name", ["cudnn_gru.h5", "hard_sigmoid.keras"])
def test_file_with_changed_bytes_is_imported_or_refused(tmp_path: Path, name: str) -> None:
    content = (CHECKPOINTS / name).read_bytes()
    random = np.random.default_rng(0)
    for _ in range(20):
        changed = bytearray(content)
        for place in random.integers(len(content) if random.random() < 0.5 else 4096, size=random.integers(1, 9)):
            changed[place] = random.integers(256)
        file = tmp_path / name
        file.write_bytes(changed)
        with suppress(ImportRefused):
            read(file)
