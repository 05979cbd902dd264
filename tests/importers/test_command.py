"""`seqserve import` of graphs: as a user types it, and compared with the source by itself."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from service.cli import main
from service.errors import ModelError
from service.importers.command import known_layers
from service.importers.draft import ImportRefused
from service.importers.onnx import original
from service.modeling.npz import write_npz
from service.modeling.spec import find_models
from tests.importers import hostile
from tests.importers.importing import import_file
from tests.importers.onnx.graphs import FEATURES, Net

IMPORTING = Path(__file__).resolve().parent.parent.parent / "docs" / "importing.md"
Edit = Callable[[onnx.ModelProto], onnx.ModelProto | None]
ROWS = np.random.default_rng(5).normal(size=(3, 6, FEATURES)).astype(np.float32)


def graph(*, softmax: bool = True, fixed: int | None = None, batch: int | str = "batch") -> onnx.ModelProto:
    """Return a graph of a dense layer, the mean over time and a head."""
    net = Net((batch, fixed or "steps", FEATURES))
    pooled = net.add("ReduceMean", net.add("Tanh", net.dense("x", FEATURES, 5)), axes=[1], keepdims=0)
    scores = net.dense(pooled, 5, 4)
    return net.model(net.add("Softmax", scores) if softmax else scores)


def write(model: onnx.ModelProto, folder: Path) -> Path:
    file = folder / "model.onnx"
    file.write_bytes(model.SerializeToString())
    return file


def test_command_compares_with_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = graph()
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    write_npz(tmp_path / "io.npz", {"inputs": ROWS, "output": session.run(None, {"x": ROWS})[0]})
    file, models = write(model, tmp_path), tmp_path / "models"
    arguments = ["import", str(file), "--name", "mean", "--check", str(tmp_path / "io.npz"), "--models", str(models)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "| scores |" in printed and "The outputs agree for the samples in `io.npz`." in printed
    card = (models / "mean" / "1" / "card.md").read_text()
    assert "agree with those of the source within 1e-05 for the samples in `io.npz`" in card
    assert main([*arguments, "--tolerance", "1e-12"]) == 1
    assert "and --tolerance is 1e-12. Nothing was written" in capsys.readouterr().err
    assert [path.name for path in (models / "mean").iterdir()] == ["1"]


def test_models_go_to_a_folder_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The embedded models are part of the installation. The command that the report prints serves the folder."""
    monkeypatch.setenv("SEQSERVE_CACHE", str(Path("~/.cache/seqserve").expanduser()))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["import", str(write(graph(), tmp_path)), "--name", "mean"]) == 0
    printed, folder = capsys.readouterr().out, tmp_path / ".local" / "share" / "seqserve" / "models"
    assert f"\nServe it: seqserve serve --models {folder}\n" in printed and [*find_models(folder)] == ["mean"]
    with pytest.raises(SystemExit):
        main(["import", "--help"])
    assert "~/.local/share/seqserve/models" in capsys.readouterr().out


def test_graph_is_compared_with_onnxruntime_by_itself(tmp_path: Path) -> None:
    """Its weights may be in another file."""
    onnx.save(graph(), tmp_path / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    report = import_file(tmp_path, tmp_path / "model.onnx")
    compared = f"random sequences of 1, 2, 3, 5, 8, 13, 34 steps, for which ONNX Runtime {onnxruntime.__version__} computed"
    assert any(compared in line for line in report) and any(line.startswith("| scores |") for line in report)
    card = (tmp_path / "models" / "imported" / "1" / "card.md").read_text()
    assert f"agree with those of the source within 1e-05 for {compared}" in card


def one_length(batch: int | str) -> Edit:
    return lambda _: graph(fixed=9, batch=batch)


def huge_output(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1 << 24, 1 << 20]), "sizes"))
    model.graph.node.append(onnx.helper.make_node("ConstantOfShape", ["sizes"], ["huge"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("huge", onnx.TensorProto.FLOAT, None))


def of_branches(_: onnx.ModelProto) -> onnx.ModelProto:
    """Return a graph with weights that only a branch reads."""
    net = Net()
    y, factor, yes = net.dense("x", FEATURES, 5), net.positive(5), net.constant(np.array(True))
    scaled = onnx.helper.make_tensor_value_info("scaled", onnx.TensorProto.FLOAT, None)
    branch = onnx.helper.make_graph([onnx.helper.make_node("Mul", [y, factor], ["scaled"])], "branch", [], [scaled])
    return net.model(net.add("If", yes, then_branch=branch, else_branch=branch))


def of_half_precision(model: onnx.ModelProto) -> None:
    """Its own rounding is larger than the tolerance."""
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16


@pytest.mark.parametrize(
    "edit, message",
    [
        (one_length("batch"), "random sequences of 9 steps"),
        (one_length(4), "random sequences of 9 steps"),
        (huge_output, "The outputs agree for random sequences"),
        (of_branches, "The outputs agree for random sequences"),
        (of_half_precision, "because ONNX Runtime .* numbers of 16 bits"),
    ],
)
def test_report_says_what_was_compared(edit: Edit, message: str, tmp_path: Path) -> None:
    """Only imported nodes are run: another output of the graph would fill the memory."""
    model = graph()
    report = import_file(tmp_path, write(edit(model) or model, tmp_path))
    assert re.search(message, "\n".join(report))


@pytest.mark.parametrize(
    "recipe, output",
    [
        ("", "value"),
        ('[head]\nkind = "classify"\nlabels = ["a", "b", "c", "d"]', "logits"),
        ('head.kind = "embed"', "embedding"),
    ],
)
def test_head_of_a_recipe_is_compared_by_its_numbers(recipe: str, output: str, tmp_path: Path) -> None:
    report = import_file(tmp_path, write(graph(softmax=False), tmp_path), recipe=recipe)
    assert any(line.startswith(f"| {output} |") for line in report)


def test_recipe_that_changes_the_pool_is_not_compared(tmp_path: Path) -> None:
    report = import_file(tmp_path, write(graph(), tmp_path), recipe='head.pool = "max"')
    reason = "The outputs were not compared with those of the source, because the recipe changes the head (pool): add --check FILE.npz."
    assert reason in report
    model = tomllib.loads((tmp_path / "models" / "imported" / "1" / "model.toml").read_text())
    assert model["head"]["pool"] == "max"


@pytest.mark.parametrize("package", ["onnxruntime", "keras"])
def test_file_that_says_everything_needs_no_framework(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in a graph or an architecture is assumed: the model is written, and the report names what would compare it."""
    monkeypatch.setattr(original, "find_spec", dict[str, Any]().get)
    monkeypatch.setitem(sys.modules, "keras", None)
    file = (
        write(graph(), tmp_path)
        if package == "onnxruntime"
        else hostile.write(tmp_path, "model.keras", hostile.good("model.keras"))
    )
    report = import_file(tmp_path, file)
    reason = rf"because nothing that is installed runs the source \(install {package}.*\): add --check FILE.npz"
    assert re.search(reason, "\n".join(report))
    card = (tmp_path / "models" / "imported" / "1" / "card.md").read_text()
    assert "The outputs were not compared with those of the source." in card


@pytest.mark.parametrize("content, message", [("{", "Expecting property name"), (None, "No such file")])
def test_damaged_tokenizer_is_refused(content: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ModelError, match=f"tokenizer.json: .*{message}"):
        import_file(tmp_path, write(graph(), tmp_path), tokenizer=file)
    assert not (tmp_path / "models").exists()


def test_recipe_with_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImportRefused, match="a checkpoint of onnx says what its layers are"):
        import_file(tmp_path, write(graph(), tmp_path), recipe='[[layers]]\nkind = "dense"')


@pytest.mark.parametrize("format, name", [("keras", "LSTM"), ("onnx", "Conv"), ("torch_archive", "layer_norm")])
def test_layers_of_a_format_are_listed(format: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["import", "--layers", format])
    names = capsys.readouterr().out.split()
    assert exit.value.code == 0 and name in names and names == sorted(names, key=str.lower)


def test_page_names_layers_of_keras_that_are_imported() -> None:
    [row] = [line for line in IMPORTING.read_text().splitlines() if line.startswith("| Keras |")]
    named = set(re.findall(r"`(\w+)`", row.rpartition("|")[0].rpartition("|")[2]))
    assert named >= {"LSTM", "GRU"} and named <= set(known_layers("keras"))
