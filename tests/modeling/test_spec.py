"""Valid and invalid model.toml files and model folders."""

from __future__ import annotations

import re
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
FEATURES = 'kind = "features"\nfeatures = 3'


def above(*layers: str, times: int = 1) -> str:
    """Return a description with further layers."""
    return GOOD.replace("[head]", "".join(f"[[layers]]\n{layer}\n\n" for layer in layers * times) + "[head]")


def version_folder(root: Path, toml: str, name: str = "words", version: str = "1") -> Path:
    folder = root / name / version
    folder.mkdir(parents=True)
    (folder / "model.toml").write_text(toml)
    return folder


def error_message(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        spec.read(folder)
    return str(caught.value)


@pytest.mark.parametrize(
    "old, new, key, hint",
    [
        ("pool", "pol", "head.pol", "unknown key: did you mean pool?"),
        ("width = 6", "width = 6\ndropout = 0.5", "layers.0.dropout", "unknown key: remove it or correct its name"),
        ("precision", "colour = 1\nprecision", "colour", "unknown key: remove it or correct its name"),
        ("hidden = 5", "", "layers.1.hidden", "this key is missing: add it"),
        ("max_steps = 64", "max_steps = 6.5", "input.max_steps", "valid integer"),
        ("vocabulary = 10", "", "input", "an input of kind 'ids' requires vocabulary"),
        ("vocabulary = 10", "vocabulary = 10\nfeatures = 3", "input", "an input of kind 'ids' has no features: remove it"),
        ('kind = "ids"', FEATURES, "input", "an input of kind 'features' has no vocabulary: remove it"),
        ('kind = "ids"', 'kind = "features"', "input", "an input of kind 'features' requires features"),
        ('kind = "ids"', 'kind = "ids"\nexample = "a"', "input", "an input of kind 'ids' has no example: remove it"),
        ('kind = "ids"', 'kind = "ids"\nnames = ["a"]', "input", "names has 1 different names and features is 0"),
        ('kind = "ids"', 'kind = "audio"', "input.kind", "'text', 'ids' or 'features'"),
        (
            'kind = "lstm"',
            'kind = "gnu"',
            "layers.1",
            "'embedding', 'rnn', 'lstm', 'gru', 'sru', 'qrnn', 'conv', 'pool', 'tcn'",
        ),
        ('kind = "classify"', 'kind = "guess"', "head", "'classify', 'regress', 'tag', 'span', 'next', 'embed', 'sequence'"),
        ('pool = "max"', 'pool = "min"', "head.pool", "'last', 'first', 'last_step', 'mean', 'max', 'sum' or 'attention'"),
        ('"far"', '"near"', "head", "labels must be unique"),
        ('["near", "far", "unknown"]', '["near"]', "head", "labels has one label, and softmax would always choose it"),
        ("float32", "float8", "precision", "'float32', 'float16', 'bfloat16' or 'int8'"),
        ('"words"', '"wo rds"', "name", "match pattern"),
        (EMBEDDING, "", "the whole file", "an input of kind 'ids' does not fit a first layer of kind 'lstm': text and ids"),
        ("[head]", EMBEDDING + "[head]", "the whole file", "an embedding can only be the first layer"),
        ('kind = "ids"\nvocabulary = 10', FEATURES, "the whole file", "does not fit a first layer of kind 'embedding'"),
        ("[head]", '[sha256]\n"weights.safetensors" = "12ab"\n[head]', "sha256.weights.safetensors", "match pattern"),
    ],
)
def test_invalid_file_error_names_file_key_and_hint(tmp_path: Path, old: str, new: str, key: str, hint: str) -> None:
    assert old in GOOD
    folder = version_folder(tmp_path, GOOD.replace(old, new))
    message = error_message(folder)
    assert any(line.startswith(f"{key}: ") and hint in line for line in message.split(f"{folder / 'model.toml'}: "))
    assert "Value error" not in message, "the text of the validation library"


def test_missing_file_error_lists_the_required_files(tmp_path: Path) -> None:
    folder = version_folder(tmp_path, GOOD)
    (folder / "model.toml").unlink()
    assert error_message(folder).startswith(f"{folder / 'model.toml'} is missing: a version folder needs model.toml, ")


@pytest.mark.parametrize("content", [b'name = "words', b"name = words", b'name = "w\xffrds"', b"name = 1\nname = 2"])
def test_invalid_toml_error_names_the_file(tmp_path: Path, content: bytes) -> None:
    folder = version_folder(tmp_path, GOOD)
    (folder / "model.toml").write_bytes(content)
    assert error_message(folder).startswith(f"{folder / 'model.toml'}: ")


@pytest.mark.parametrize(
    "content, reason",
    [
        ("x = " + "[" * 20_000, "nested too deeply"),
        ("a." * 500_000 + "a = 1", "a key has more than 100 parts"),
        ('\'a\' . "\\"".' * 100_000, "a key has more than 100 parts"),
        ('"\\' * 500_000, "Unescaped"),
        ("x = " + "9" * 5000, "Exceeds the limit"),
        (GOOD.replace("hidden = 5", "hidden = 0x" + "f" * 5000), "the value is too long to show"),
        (GOOD.replace("depth = 2", "depth = 1000000000"), "less than or equal to 64"),
        (GOOD.replace('"near"', str([*map(str, range(65_535))])[1:-1]), "at most 65536 items"),
        ("".join(f"key{number} = 1\n" for number in range(20_000)), "key10: unknown key"),
        (above('kind = "pool"\nreduce = "max"\nwidth = 65536\npads = [65535, 65535]'), "layers.2 needs 42959503360 numbers"),
        (above('kind = "pool"\nreduce = "max"\nwidth = 2\npads = [65535, 65535]', times=200), "layers.8 needs"),
        (above('kind = "conv"\nfilters = 1\nwidth = 65536\ndilation = 65536'), "layers.2 needs 42949017760 numbers"),
        (above('kind = "text_cnn"\nfilters = 1\nwidths = [65536]\npadding = 65535'), "layers.2 needs"),
        (
            above('kind = "dense"\nwidth = 16384', 'kind = "conv"\nfilters = 16384\nwidth = 2\ngroups = 16384'),
            "the groups become whole filters of 536870912 numbers",
        ),
    ],
)
def test_hostile_toml_is_refused_in_time(tmp_path: Path, content: str, reason: str) -> None:
    """Parsed without bounds, some of these would take hours, or all memory."""
    message = error_message(version_folder(tmp_path, content))
    assert re.search(reason, message) and len(message) < 20_000


def test_name_must_match_the_folder(tmp_path: Path) -> None:
    message = error_message(version_folder(tmp_path, GOOD, name="verbs"))
    assert "name is 'words' and the folder is 'verbs': use the same name for both" in message


def test_models_are_added_only_to_a_folder_of_models(tmp_path: Path) -> None:
    version_folder(tmp_path, GOOD)
    spec.require_models_folder(tmp_path)
    for folder in (tmp_path / "words", tmp_path / "words" / "1"):
        with pytest.raises(ModelError, match="is the folder of one model"):
            spec.require_models_folder(folder)


def test_versions_sort_numerically_without_hidden_folders(tmp_path: Path) -> None:
    for version in ("10", "9", "1"):
        version_folder(tmp_path, GOOD, version=version)
    (tmp_path / ".git").mkdir()
    (tmp_path / "words" / ".tmp").mkdir()
    (tmp_path / "README.md").write_text("no folder")
    models = spec.find_models(tmp_path)
    assert list(models) == ["words"]
    assert list(models["words"].items()) == [(version, tmp_path / "words" / version) for version in ("1", "9", "10")]


@pytest.mark.parametrize("other", ["003", "old", "0", "1.bak", "1234567890", "１", "lost+found"])
def test_folder_that_is_no_version_hides_no_version(tmp_path: Path, other: str) -> None:
    version_folder(tmp_path, GOOD, version=other)
    with pytest.raises(ModelError, match="has no version folder, named 1, 2 and so on"):
        spec.find_models(tmp_path)
    version_folder(tmp_path, GOOD)
    (tmp_path / "lost+found").mkdir()
    assert spec.find_models(tmp_path) == {"words": {"1": tmp_path / "words" / "1"}}


@pytest.mark.parametrize("name", ["wo rds", "_words", "wörter", "w" * 129])
def test_model_name_must_be_valid(tmp_path: Path, name: str) -> None:
    version_folder(tmp_path, GOOD, name=name)
    with pytest.raises(ModelError, match="rename the folder"):
        spec.find_models(tmp_path)


def test_model_without_version_error_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    with pytest.raises(ModelError) as caught:
        spec.find_models(tmp_path)
    assert str(caught.value).endswith(f"named 1, 2 and so on: put the model's files into {tmp_path / 'words' / '1'}")


def test_missing_models_folder_error_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere does not exist: create it, or name another folder with --models"):
        spec.find_models(tmp_path / "nowhere")
