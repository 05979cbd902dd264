"""`seqserve export`, as a user types it."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest
import torch

from service.cli import main
from service.modeling import spec, store
from tests import models
from tests.exporters.cases import CASES, Case
from tests.exporters.exporting import assert_round_trip, comparable, export, import_back, write_case

LSTM = Case(
    "lstm",
    "with a head",
    ({"kind": "embedding", "width": 4}, {"kind": "lstm", "hidden": 5, "depth": 11}),
    {"kind": "classify", "pool": "last", "labels": ["a", "b"]},
)
EXPORTING = Path(__file__).resolve().parent.parent.parent / "docs" / "exporting.md"


def run(*arguments: str | Path) -> int:
    return main([str(argument) for argument in arguments])


def test_model_of_texts_comes_back_with_its_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command that the export prints imports the same model."""
    root, file = tmp_path / "models", tmp_path / "words.pt"
    written = models.words(root)
    assert run("export", "words", "--models", root, "--format", "pytorch", "--out", file) == 0
    printed = capsys.readouterr().out.splitlines()
    files = [file, tmp_path / "words.pt.toml", tmp_path / "words.pt.tokenizer.json"]
    command = f"import {file} --name words --recipe {files[1]} --tokenizer {files[2]}"
    assert printed == [*(f"{one} is complete." for one in files), f"Read it back: seqserve {command}"]
    assert run(*command.split(), "--models", root) == 0
    back = spec.read(root / "words" / "2")
    assert comparable(back) == comparable(written) and back.input.max_steps == written.input.max_steps
    assert back.sha256["weights.safetensors"] == written.sha256["weights.safetensors"]


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "int8"])
def test_low_precisions_come_back(tmp_path: Path, precision: str) -> None:
    """int8 weights as the float32 numbers with which the model computes."""
    written = write_case(tmp_path, LSTM, precision=precision, fold="never")
    for format, suffix in (("pytorch", ".safetensors"), ("onnx", ".onnx")):
        file, lines = export(tmp_path, format, suffix)
        if precision != "int8":
            assert_round_trip(tmp_path, file, written)
            continue
        assert "note: its int8 matrices are written as float32, each number times its scale" in lines
        back, tensors = import_back(tmp_path, file)
        assert comparable(back) == {**comparable(written), "precision": "float32"}
        for name, tensor in store.read_arrays(tmp_path / "models" / written.name / "1", written).items():
            assert torch.equal(tensors[name], tensor)


def test_name_and_version_choose_what_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An alias stands for a model or a version, in the folder or in SEQSERVE_ALIAS, as other commands take it."""
    root, out = tmp_path / "models", ("--format", "pytorch", "--out", tmp_path / "words.pt")
    for version in (1, 2):
        models.words(root, version=version, seed=version)
    (root / "aliases.toml").write_text('any = "words"\nold = "words/1"\n')
    monkeypatch.setenv("SEQSERVE_ALIAS", "served")
    for name, seed in (("words --version 1", 1), ("words", 2), ("any", 2), ("old", 1), ("served", 2)):
        assert run("export", *name.split(), "--models", root, *out) == 0
        expected = models.weights(spec.read(root / "words" / str(seed)), seed)
        assert torch.equal(torch.load(out[-1], weights_only=True)["layers.0.weight"], expected["layers.0.weight"])
    assert "--name words " in capsys.readouterr().out
    for name, versions in (("words", "1, 2"), ("old", "1")):
        assert run("export", name, "--version", "3", "--models", root, *out) == 1
        assert f"{name} has no version 3: the versions are {versions}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("other", "--format", "pytorch", "--out", "a.pt"), "has no model 'other': the models are words"),
        (("words", "--format", "pytorch", "--out", "a.h5"), "a.h5 is no name of a file for pytorch: let it end in .pt or"),
        (("words", "--format", "onnx", "--out", "a.pt"), "a.pt is no name of a file for onnx: let it end in .onnx"),
        (("words", "--format", "pytorch", "--out", "no/a.pt"), "a.pt cannot be written: No such file or directory"),
    ],
)
def test_wrong_arguments_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    models.words(tmp_path / "models")
    *others, out = arguments
    assert run("export", *others, tmp_path / out, "--models", tmp_path / "models") == 1
    assert message in capsys.readouterr().err


def test_export_to_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_half(file: Path, content: bytes) -> None:
        file.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    models.words(tmp_path / "models")
    monkeypatch.setattr(Path, "write_bytes", write_half)
    assert run("export", "words", "--models", tmp_path / "models", "--format", "pytorch", "--out", tmp_path / "words.pt") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["models"]


@pytest.mark.parametrize("column, format", [(1, "pytorch"), (2, "onnx")])
def test_page_names_what_a_format_refuses(column: int, format: str) -> None:
    """The row of a layer has a word of each refused option, or "all"; other layers have no row."""
    rows = [line.strip("| ").split("|") for line in EXPORTING.read_text().splitlines() if line.startswith("| `")]
    cells = {layer: row[column] for row in rows if len(row) == 3 for layer in re.findall(r"`(\w+)`", row[0])}
    for case in CASES:
        if format in case.refused:
            words = {*re.findall(r"\w+", case.option), "all"}
            assert words & set(re.findall(r"\w+", cells[case.part])), case
