"""What a model.toml may say, and what is said of one that may not be served."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.errors import ModelError
from service.modeling import spec

GOOD = """
name = "words"
precision = "float32"

[input]
kind = "ids"
vocabulary = 10
max_steps = 64

[[layers]]
kind = "embedding"
width = 6

[[layers]]
kind = "lstm"
hidden = 5
bidirectional = true
depth = 2

[head]
kind = "classify"
pool = "max"
labels = ["near", "far", "unknown"]
"""
EMBEDDING = '[[layers]]\nkind = "embedding"\nwidth = 6\n'
LSTM = '[[layers]]\nkind = "lstm"\nhidden = 5\nbidirectional = true\ndepth = 2\n'
FEATURES = 'kind = "features"\nfeatures = 3'


def version_folder(root: Path, toml: str, name: str = "words", version: str = "1") -> Path:
    folder = root / name / version
    folder.mkdir(parents=True)
    (folder / "model.toml").write_text(toml)
    return folder


def complaint(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        spec.read(folder)
    return str(caught.value)


def test_a_good_file_is_read_whole(tmp_path: Path) -> None:
    model = spec.read(version_folder(tmp_path, GOOD))
    assert model.input.vocabulary == 10 and model.input.features is None
    assert [layer.kind for layer in model.layers] == ["embedding", "lstm"]
    assert isinstance(model.head, spec.ClassifyHead)
    assert model.head.labels == ("near", "far", "unknown")
    assert model.layers[-1].outputs == 10
    assert model.min_steps == 1 and model.has_steps and model.has_embedding
    assert model.description == "" and model.sha256 == {}


def test_every_tensor_has_the_shape_that_follows_from_the_layers(tmp_path: Path) -> None:
    shapes = spec.read(version_folder(tmp_path, GOOD)).tensors()
    assert shapes.pop("layers.0.weight") == (10, 6)
    assert shapes.pop("head.weight") == (10, 3)
    assert shapes.pop("head.bias") == (3,)
    for level, inputs in ((0, 6), (1, 10)):
        for direction in ("forward", "backward"):
            assert shapes.pop(f"layers.1.{level}.{direction}.input") == (inputs, 20)
            assert shapes.pop(f"layers.1.{level}.{direction}.recurrent") == (5, 20)
            assert shapes.pop(f"layers.1.{level}.{direction}.bias") == (20,)
    assert not shapes


@pytest.mark.parametrize(
    "old, new, key, way_out",
    [
        ("pool", "pol", "head.pol", "unknown key: remove it or correct its name"),
        ("width = 6", "width = 6\ndropout = 0.5", "layers.0.dropout", "unknown key: remove it or correct its name"),
        ("hidden = 5", "hiden = 5", "layers.1.hiden", "unknown key: remove it or correct its name"),
        ("precision", "colour = 1\nprecision", "colour", "unknown key: remove it or correct its name"),
        ("hidden = 5", "", "layers.1.hidden", "Field required"),
        ("hidden = 5", "hidden = 0", "layers.1.hidden", "greater than 0"),
        ("hidden = 5", "hidden = true", "layers.1.hidden", "valid integer"),
        ("max_steps = 64", "", "input.max_steps", "Field required"),
        ("max_steps = 64", "max_steps = 6.5", "input.max_steps", "valid integer"),
        ("vocabulary = 10", "", "input", "an input of kind 'ids' needs vocabulary"),
        ("vocabulary = 10", "vocabulary = 10\nfeatures = 3", "input", "an input of kind 'ids' has no features: remove it"),
        ('kind = "ids"', FEATURES, "input", "an input of kind 'features' has no vocabulary: remove it"),
        ('kind = "ids"', 'kind = "features"', "input", "an input of kind 'features' needs features"),
        ('kind = "ids"', 'kind = "audio"', "input.kind", "'text', 'ids' or 'features'"),
        ('kind = "lstm"', 'kind = "gnu"', "layers.1", "'embedding', 'lstm', 'gru', 'sru', 'qrnn', 'conv', 'tcn', 'text_cnn'"),
        ('kind = "classify"', 'kind = "guess"', "head", "'classify', 'regress', 'tag', 'span', 'next', 'embed', 'sequence'"),
        ('kind = "lstm"', 'kind = "sru"\nscale = "a"', "layers.1.scale", "valid number"),
        ('kind = "classify"', 'kind = "tag"', "head.pool", "unknown key: remove it or correct its name"),
        ('pool = "max"', 'pool = "min"', "head.pool", "'last', 'mean' or 'max'"),
        ('"far"', '"near"', "head", "labels must differ from each other"),
        ('["near", "far", "unknown"]', '["near"]', "head.labels", "at least 2 items"),
        ("float32", "float8", "precision", "'float32', 'float16' or 'bfloat16'"),
        ('"words"', '"wo rds"', "name", "match pattern"),
        (EMBEDDING, "", "the whole file", "an input of kind 'ids' and a first layer of kind 'lstm' do not fit together"),
        (LSTM, "", "the whole file", "an encoder needs a layer after its embedding"),
        (LSTM, LSTM + EMBEDDING, "the whole file", "an embedding can only be the first layer"),
        ('kind = "ids"\nvocabulary = 10', FEATURES, "the whole file", "first layer of kind 'embedding' do not fit together"),
        ("[head]", '[sha256]\n"weights.safetensors" = "12ab"\n[head]', "sha256.weights.safetensors", "match pattern"),
    ],
)
def test_a_wrong_file_is_refused_naming_file_key_and_way_out(
    tmp_path: Path, old: str, new: str, key: str, way_out: str
) -> None:
    assert old in GOOD
    folder = version_folder(tmp_path, GOOD.replace(old, new))
    said = complaint(folder)
    assert any(one.startswith(f"{key}: ") and way_out in one for one in said.split(f"{folder / 'model.toml'}: "))


@pytest.mark.parametrize("old, new", [("vocabulary = 10", ""), ('"far"', '"near"'), (LSTM, "")])
def test_a_complaint_has_no_words_of_the_validating_library(tmp_path: Path, old: str, new: str) -> None:
    assert "Value error" not in complaint(version_folder(tmp_path, GOOD.replace(old, new)))


def test_every_wrong_key_is_named_at_once(tmp_path: Path) -> None:
    said = complaint(version_folder(tmp_path, GOOD.replace("hidden = 5", "hidden = 0").replace("pool", "pol")))
    assert "layers.1.hidden" in said and "head.pol" in said


def test_a_missing_file_is_refused_naming_what_a_version_needs(tmp_path: Path) -> None:
    folder = version_folder(tmp_path, GOOD)
    (folder / "model.toml").unlink()
    assert complaint(folder).startswith(f"{folder / 'model.toml'} is missing: a version folder needs model.toml, ")


@pytest.mark.parametrize("content", [b'name = "words', b"name = words", b'name = "w\xffrds"', b"name = 1\nname = 2"])
def test_what_is_not_toml_is_refused_naming_the_file(tmp_path: Path, content: bytes) -> None:
    folder = version_folder(tmp_path, GOOD)
    (folder / "model.toml").write_bytes(content)
    assert complaint(folder).startswith(f"{folder / 'model.toml'}: ")


def test_a_name_that_is_not_its_folder_s_is_refused_with_both(tmp_path: Path) -> None:
    said = complaint(version_folder(tmp_path, GOOD, name="verbs"))
    assert "name is 'words' and its folder is 'verbs': make them the same" in said


def test_versions_rise_as_numbers_and_hidden_folders_are_no_models(tmp_path: Path) -> None:
    for version in ("10", "9", "1"):
        version_folder(tmp_path, GOOD, version=version)
    (tmp_path / ".git").mkdir()
    (tmp_path / "words" / ".tmp").mkdir()
    (tmp_path / "README.md").write_text("no folder")
    found = spec.find(tmp_path)
    assert list(found) == ["words"]
    assert list(found["words"].items()) == [(version, tmp_path / "words" / version) for version in ("1", "9", "10")]


@pytest.mark.parametrize("version", ["003", "abc", "0", "-1", "1.0", "1234567890", "１"])
def test_a_version_folder_that_is_no_plain_whole_number_is_refused(tmp_path: Path, version: str) -> None:
    folder = version_folder(tmp_path, GOOD, version=version)
    with pytest.raises(ModelError) as caught:
        spec.find(tmp_path)
    assert str(caught.value) == f"{folder}: a version is a whole number from 1 without leading zeros: rename the folder"


@pytest.mark.parametrize("name", ["wo rds", "_words", "wörter", "w" * 129])
def test_a_model_folder_whose_name_cannot_be_served_is_refused(tmp_path: Path, name: str) -> None:
    version_folder(tmp_path, GOOD, name=name)
    with pytest.raises(ModelError, match="rename the folder"):
        spec.find(tmp_path)


def test_a_model_without_a_version_is_refused_with_the_folder_to_make(tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    with pytest.raises(ModelError) as caught:
        spec.find(tmp_path)
    assert str(caught.value).endswith(f"has no version folder: put the model's files into {tmp_path / 'words' / '1'}")


def test_a_missing_models_folder_is_refused_with_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere does not exist: name another with --models"):
        spec.find(tmp_path / "nowhere")
