"""Further content of the files of Keras, and how weights are stored and named in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from service.importers.draft import ImportRefused
from service.importers.keras import read
from tests.importers.hostile import LSTM, SEQUENTIAL
from tests.importers.importing import import_file
from tests.importers.keras.test_hostile_files import written

BFLOAT16 = np.dtype("V2")


def kernel_of(file: Path) -> Any:
    return read(file).layers[0].arrays["0.forward.input"]


def weights_only(folder: Path) -> Path:
    """Write a .weights.h5 as Keras 3 does, without its architecture."""
    file = folder / "model.weights.h5"
    with h5py.File(file, "w") as opened:
        for number, shape in enumerate(((3, 8), (2, 8), (8,))):
            opened[f"layers/lstm/cell/vars/{number}"] = np.full(shape, 0.5, np.float32)
    return file


def copied(table: Any = SEQUENTIAL) -> tuple[Any, list[Any]]:
    """Return a copy of an architecture, and its layers."""
    copy = json.loads(json.dumps(table))
    return copy, copy["config"]["layers"]


@pytest.mark.parametrize("name", ["model.json", "config.json"])
def test_architecture_of_weights_is_in_a_file_beside_them(tmp_path: Path, name: str) -> None:
    file = weights_only(tmp_path)
    with pytest.raises(ImportRefused, match=r"write model\.to_json\(\) into model\.json beside it"):
        read(file)
    (tmp_path / name).write_text(json.dumps(SEQUENTIAL))
    draft = read(file)
    assert [part.table for part in draft.layers] == [{"kind": "lstm", "hidden": 2}]
    assert f"the architecture is that of {name}, because model.weights.h5 has weights only" in draft.notes


@pytest.mark.parametrize("content", ["[]", "{"])
def test_architecture_beside_weights_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.json").write_text(content)
    with pytest.raises(ImportRefused, match=r"model\.json is not"):
        read(weights_only(tmp_path))


def test_floats_of_any_size_are_read(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float32).reshape(3, 8)
    for dtype in ("<f4", ">f4", "<f2", "<f8", ">f8"):
        assert np.array_equal(kernel_of(written(tmp_path, kernel=values.astype(dtype))), values)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16).view(BFLOAT16)  # Keras writes bfloat16 as opaque bytes
    assert np.array_equal(kernel_of(written(tmp_path, kernel=bits)), values)


def test_names_of_many_weights_are_in_several_attributes(tmp_path: Path) -> None:
    file = written(tmp_path)
    with h5py.File(file, "r+") as opened:
        attributes = opened["model_weights/rnn"].attrs
        names = attributes["weight_names"]
        del attributes["weight_names"]
        attributes["weight_names0"], attributes["weight_names1"] = names[:2], names[2:]
    assert read(file).layers[0].table == {"kind": "lstm", "hidden": 2}


def test_list_of_layers_is_a_sequential_model_of_old_keras(tmp_path: Path) -> None:
    rnn = {**LSTM, "batch_input_shape": [None, None, 3]}
    old = {"class_name": "Sequential", "config": [{"class_name": "LSTM", "config": rnn}]}
    assert read(written(tmp_path, old)).input == {"kind": "features", "features": 3}


def test_model_that_was_not_built_is_refused(tmp_path: Path) -> None:
    unbuilt, layers = copied()
    del layers[0]
    with pytest.raises(ImportRefused, match="build the model before it is saved"):
        read(written(tmp_path, unbuilt))


def test_tensors_without_a_layer_are_reported_and_those_of_a_training_are_not(tmp_path: Path) -> None:
    file = written(tmp_path)
    with h5py.File(file, "r+") as opened:
        opened["model_weights/other/kernel"] = np.ones((2, 2), np.float32)
        opened["optimizer_weights/momentum"] = np.ones((2, 2), np.float32)
        opened["model_weights/rnn/seed_generator/state"] = np.ones(2, np.uint32)
    report = import_file(tmp_path, file)
    assert [line for line in report if "is not used" in line] == ["  model_weights/other/kernel is not used"]
    assert "  rnn (3 tensors) -> layers.0 (lstm)" in report


def test_number_of_steps_of_the_source_is_kept(tmp_path: Path) -> None:
    fixed, layers = copied()
    layers[0]["config"]["batch_shape"] = [None, 30, 3]
    draft = read(written(tmp_path, fixed))
    assert draft.input["max_steps"] == 30
    assert "the source takes sequences of 30 steps only, and the model sequences of any length" in draft.notes


def test_hard_sigmoid_is_that_of_the_version_in_the_file(tmp_path: Path) -> None:
    gates, layers = copied()
    layers[1]["config"]["recurrent_activation"] = "hard_sigmoid"
    slopes = {}
    for version in ("2.2.4-tf", "2.15.0", "3.0.1"):
        file = written(tmp_path, gates)
        with h5py.File(file, "r+") as opened:
            opened.attrs["keras_version"] = np.bytes_(version)
        slopes[version] = read(file).layers[0].table["gate_activation"]["alpha"]
    assert slopes == {"2.2.4-tf": 0.2, "2.15.0": 0.2, "3.0.1": 1 / 6}


def test_mask_is_named_where_a_layer_ignores_it(tmp_path: Path) -> None:
    masked, layers = copied()
    layers[1]["config"]["return_sequences"] = True
    layers.insert(1, {"class_name": "Masking", "config": {"name": "mask", "mask_value": -1.0}})
    layers.append({"class_name": "GlobalMaxPooling1D", "config": {"name": "pool"}})
    first, second = read(written(tmp_path, masked)).notes
    assert first.startswith("Masking mask: Keras skips every step whose features are all -1, and the model skips none")
    assert second.startswith("GlobalMaxPooling1D pool ignores the mask: in a batch with padding, Keras computes with padding")


def test_precision_and_dropout_of_the_source_are_reported(tmp_path: Path) -> None:
    layers = copied()[1]
    start, rnn = ({**layer, "name": layer["config"]["name"]} for layer in layers)
    rnn["config"]["dtype"] = {"class_name": "DTypePolicy", "config": {"name": "mixed_bfloat16"}}
    start["inbound_nodes"], rnn["inbound_nodes"] = [], [[["x", 0, 0, {"training": True}]]]
    config = {"name": "model", "layers": [start, rnn], "input_layers": [["x", 0, 0]], "output_layers": [["rnn", 0, 0]]}
    notes = read(written(tmp_path, {"class_name": "Functional", "config": config})).notes
    assert "the source computes in mixed_bfloat16, and the model in float32" in notes
    assert any(note.startswith("LSTM rnn is called with training=True") for note in notes)


def test_layer_of_texts_is_refused_with_the_way_out(tmp_path: Path) -> None:
    texts, layers = copied()
    layers.insert(1, {"class_name": "TextVectorization", "config": {"name": "words"}})
    with pytest.raises(ImportRefused, match=r"TextVectorization words: .* give its vocabulary with --tokenizer"):
        read(written(tmp_path, texts))


@pytest.mark.parametrize("groups", [0, 3])
def test_groups_that_do_not_fit_a_convolution_are_refused(tmp_path: Path, groups: int) -> None:
    convolved, layers = copied()
    config = {"name": "rnn", "filters": 4, "kernel_size": [2], "groups": groups}
    layers[1] = {"module": "keras.layers", "class_name": "Conv1D", "config": config}
    file = written(tmp_path, convolved, kernel=np.ones((2, 3, 4), np.float32), bias=np.ones(4, np.float32))
    with h5py.File(file, "r+") as opened:
        opened["model_weights/rnn"].attrs["weight_names"] = np.array(["kernel", "bias"], "S")
        del opened["model_weights/rnn/recurrent_kernel"]
    with pytest.raises(ImportRefused, match=f"for {groups} groups"):
        read(file)
