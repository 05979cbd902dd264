"""Programs of torch.export and TorchScript compute the same as the module of torch when they are imported. tests/long has more."""

from __future__ import annotations

import warnings
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from service.importers.draft import ImportRefused
from service.importers.torch_archive import read
from tests.importers.importing import import_file
from tests.importers.onnx.graphs import TOLERANCE, answers
from tests.importers.torch_archive.scripted import REFUSED as REFUSED_SCRIPT
from tests.importers.torch_archive.scripted import SCRIPTED, EverySecond, TwoSteps, WithState
from tests.importers.torch_models import ACTIVATED, RECURRENT, REFUSED, Sample, named

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")]
TRACED = [
    *named(
        *("nn.LSTM: two layers, bidirectional", "nn.GRU: without bias, bidirectional", "nn.RNN: initial states of zeros"),
        *("nn.LSTM: learned initial states, bidirectional", "nn.GRU: packed, batch_first=False", 'nn.RNN: nonlinearity="relu"'),
        *("nn.LSTM: packed, two layers, bidirectional", "nn.LSTM: proj_size=2, bidirectional"),
        "nn.GRU: last step, batch_first=False",
        *("nn.Conv1d: text CNN with padding", "nn.Conv1d: text CNN, adaptive_max_pool1d", "nn.Conv2d: text CNN, amax"),
        *("nn.Conv1d: TCN with nn.utils.weight_norm", "nn.Conv1d: causal, functional.glu", "stride and groups"),
        *("attention pool by sum", "attention pool by bmm, linear"),
    ),
    *ACTIVATED,
]
EXPORTED = named(
    *("nn.LSTM: two layers, bidirectional", "nn.RNN: learned initial states, bidirectional", 'nn.RNN: nonlinearity="relu"'),
    *("nn.Conv2d: text CNN", "nn.Conv1d: TCN with parametrizations.weight_norm", "nn.Conv1d: causal, functional.glu"),
)
"""torch.export takes long, so that it exports fewer."""


def write(sample: Sample, module: nn.Module, folder: Path, how: str) -> Path:
    """Save a module. how: export, trace, script, or freeze after it was scripted."""
    file = folder / ("model.pt2" if how == "export" else "model.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own exporters
        if how == "export":
            axes = [{0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}, {0: torch.export.Dim.AUTO}]
            program = torch.export.export(module, sample.inputs(), dynamic_shapes=tuple(axes[: 1 + sample.lengths]))
            torch.export.save(program, file)
        else:
            traced = how == "trace"
            script: Any = torch.jit.trace(module, sample.inputs()) if traced else torch.jit.script(module)  # type: ignore[no-untyped-call]
            torch.jit.save(torch.jit.freeze(script) if how == "freeze" else script, file)
    return file


def assert_imports(sample: Sample, folder: Path, how: str) -> None:
    """Assert that the imported model and the archive itself give the answers of the module."""
    module = sample.module()
    draft = read(write(sample, module, folder, how))
    assert draft.original is not None
    rows = [row.numpy() for row in sample.rows()]
    expected = sample.answers(module)
    for row, answer, output in zip(rows, answers(draft, rows), expected, strict=True):
        np.testing.assert_allclose(answer.ravel(), draft.as_answer(output.numpy()).ravel(), rtol=TOLERANCE, atol=TOLERANCE)
        if draft.original.steps is None:
            np.testing.assert_allclose(draft.original.run(row).ravel(), output.numpy().ravel(), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("sample", EXPORTED, ids=str)
def test_program_of_torch_export_imports(sample: Sample, tmp_path: Path) -> None:
    assert_imports(sample, tmp_path, "export")


@pytest.mark.parametrize("sample", TRACED, ids=str)
def test_traced_module_imports(sample: Sample, tmp_path: Path) -> None:
    assert_imports(sample, tmp_path, "trace")


@pytest.mark.parametrize("sample, how", [*zip(SCRIPTED, cycle(("script", "freeze")), strict=False)], ids=str)
def test_scripted_module_imports(sample: Sample, how: str, tmp_path: Path) -> None:
    assert_imports(sample, tmp_path, how)


@pytest.mark.parametrize(
    "sample, how, message",
    [
        (REFUSED[0], "trace", "no activation of model.toml"),
        (REFUSED[-1], "trace", "operators of this name cannot be imported"),
        (REFUSED_SCRIPT, "script", "it works on the axis of batch"),
        (Sample("two steps", TwoSteps), "trace", "only 1 can be imported"),
        (Sample("every second step", EverySecond), "script", "takes some of the steps"),
        (Sample("__setstate__", WithState), "script", r"__setstate__ of its own, which is code, and is not run"),
    ],
    ids=str,
)
def test_module_that_no_layers_compute_is_refused(sample: Sample, how: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ImportRefused, match=message):
        read(write(sample, sample.build(), tmp_path, how))


def test_import_compares_with_the_archive_itself(tmp_path: Path) -> None:
    report = import_file(tmp_path, write(RECURRENT[0], RECURRENT[0].module(), tmp_path, "trace"))
    assert any(f"torch {torch.__version__} computed the outputs of the source" in line for line in report)


def test_static_shapes_import_for_their_length(tmp_path: Path) -> None:
    """A program that was exported without dynamic shapes takes one length and one size of batch."""
    sample = RECURRENT[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(sample.module(), sample.inputs()), tmp_path / "model.pt2")
    report = import_file(tmp_path, tmp_path / "model.pt2")
    assert "note: the program takes sequences of 16 steps only, and the model sequences of any length" in report
    assert any("random sequences of 16 steps" in line for line in report)
