"""The full matrix of imports: the options of each kind of layer that `make test` leaves out, for each format."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.importers import torch_models
from tests.importers.keras import test_cases as keras_cases
from tests.importers.keras.builders import Case as KerasCase
from tests.importers.keras.make_checkpoints import CASES as KERAS_CASES
from tests.importers.onnx import test_cases as onnx_cases
from tests.importers.onnx import test_exports as onnx_exports
from tests.importers.onnx.graphs import Case as Graph
from tests.importers.onnx.graphs import assert_case as assert_graph
from tests.importers.pytorch import test_cases as state_dicts
from tests.importers.pytorch.cases import CASES as STATE_DICTS
from tests.importers.pytorch.cases import Case as StateDict
from tests.importers.tensorflow1 import test_cases as variables
from tests.importers.torch_archive import test_archives as archives
from tests.importers.torch_archive.scripted import SCRIPTED
from tests.importers.torch_models import Sample, named

pytestmark = state_dicts.NO_WARNINGS
MODULES = [*torch_models.RECURRENT, *torch_models.PACKED, *torch_models.OTHERS, *torch_models.ACTIVATED]
"""Modules that both exporters of graphs and torch.jit.trace take."""
MORE_EXPORTED = named(
    *("nn.LSTM: proj_size=2", "nn.GRU: tags, bidirectional", "nn.GRU: every step, batch_first=False", "nn.Conv1d: text CNN"),
    *("attention pool by sum", "ELU(alpha=0.5)"),
)


@pytest.mark.parametrize("case", [case for case in onnx_cases.CASES if case.more], ids=str)
def test_graph(case: Graph, tmp_path: Path) -> None:
    assert_graph(case, tmp_path)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return keras_cases.make_checkpoints(tmp_path_factory.mktemp("keras"), "more")


@pytest.mark.parametrize("index, case", [pair for pair in enumerate(KERAS_CASES) if pair[1].more], ids=str)
def test_model_of_keras(checkpoints: Path, tmp_path: Path, index: int, case: KerasCase) -> None:
    keras_cases.assert_case(checkpoints, tmp_path, index, case)


@pytest.mark.parametrize("case", [case for case in STATE_DICTS if case.more], ids=str)
def test_state_dict(case: StateDict, tmp_path: Path) -> None:
    state_dicts.assert_case(case, tmp_path)


@pytest.mark.parametrize("file", sorted(variables.CHECKPOINTS.glob("[A-Z]*.npz")), ids=lambda file: file.stem)
def test_variables_of_tensorflow(file: Path, tmp_path: Path) -> None:
    variables.assert_computes_the_same(file.stem, tmp_path)


@pytest.mark.parametrize("sample", MODULES, ids=str)
def test_graph_of_the_old_exporter(sample: Sample, tmp_path: Path) -> None:
    onnx_exports.assert_exports(sample, tmp_path)


@pytest.mark.parametrize(
    "sample",
    named("nn.LSTM: two layers, bidirectional", "nn.Conv1d: TCN with nn.utils.weight_norm", "nn.Conv2d: text CNN"),
    ids=str,
)
def test_graph_of_the_new_exporter(sample: Sample, tmp_path: Path) -> None:
    """torch.onnx.export with dynamo takes seconds for each."""
    onnx_exports.assert_exports(sample, tmp_path, dynamo=True)


@pytest.mark.parametrize("sample", [*MODULES, *torch_models.PROJECTED], ids=str)
def test_traced_module(sample: Sample, tmp_path: Path) -> None:
    archives.assert_imports(sample, tmp_path, "trace")


@pytest.mark.parametrize("sample", MORE_EXPORTED, ids=str)
def test_program_of_torch_export(sample: Sample, tmp_path: Path) -> None:
    archives.assert_imports(sample, tmp_path, "export")


@pytest.mark.parametrize("how", ["script", "freeze"])
@pytest.mark.parametrize("sample", SCRIPTED, ids=str)
def test_scripted_module(sample: Sample, how: str, tmp_path: Path) -> None:
    archives.assert_imports(sample, tmp_path, how)
