"""Files of torch's exporters can be imported, and compute the same as the module of torch."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto
from torch import nn

from service.importers.draft import ImportRefused
from tests.importers.importing import import_file
from tests.importers.onnx.export_cases import BY_NEW_EXPORTER, BY_OLD_EXPORTER, NOT_EXPRESSIBLE
from tests.importers.onnx.graphs import TOLERANCE, answers, imported
from tests.importers.torch_models import PACKED, RECURRENT, REFUSED, Sample


def exported(sample: Sample, module: nn.Module, *, dynamo: bool) -> ModelProto:
    """Export a module with open numbers of sequences and steps, as the manual of torch says."""
    steps, batch = (0, 1) if sample.steps_first else (1, 0)
    names = ["x", "lengths"][: 1 + sample.lengths]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own exporters
        if dynamo:
            axes = ({batch: torch.export.Dim("batch"), steps: torch.export.Dim("steps")}, {0: torch.export.Dim("batch")})
            program = torch.onnx.export(
                module, sample.inputs(), dynamo=True, dynamic_shapes=axes[: len(names)], input_names=names, verbose=False
            )
            assert program is not None
            return program.model_proto
        named: dict[str, Any] = {"x": {batch: "batch", steps: "steps"}, "lengths": {0: "batch"}}
        content: Any = io.BytesIO()
        torch.onnx.export(
            module,
            sample.inputs(),
            content,
            dynamo=False,
            input_names=names,
            dynamic_axes={name: named[name] for name in names},
        )
    return onnx.load_from_string(content.getvalue())


def assert_exports(sample: Sample, folder: Path, *, dynamo: bool) -> None:
    module = sample.module()
    draft = imported(exported(sample, module, dynamo=dynamo), folder)
    ours = answers(draft, [row.numpy() for row in sample.rows()])
    for answer, output in zip(ours, sample.answers(module), strict=True):
        np.testing.assert_allclose(answer.ravel(), draft.as_answer(output.numpy()).ravel(), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("sample", BY_OLD_EXPORTER, ids=str)
def test_file_of_the_old_exporter_imports(sample: Sample, tmp_path: Path) -> None:
    assert_exports(sample, tmp_path, dynamo=False)


@pytest.mark.parametrize("sample", BY_NEW_EXPORTER, ids=str)
def test_file_of_the_new_exporter_imports(sample: Sample, tmp_path: Path) -> None:
    assert_exports(sample, tmp_path, dynamo=True)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("sample", [RECURRENT[0], PACKED[0], PACKED[3]], ids=str)
def test_file_of_one_length_and_batch_imports(sample: Sample, batch: int, tmp_path: Path) -> None:
    """Without dynamic axes, a file takes the shape with which it was exported. The import compares it with ONNX Runtime."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(sample.module(), sample.inputs([9] * batch), str(tmp_path / "model.onnx"), dynamo=False)
    report = import_file(tmp_path, tmp_path / "model.onnx")
    assert any("The outputs agree for random sequences of 9 steps" in line for line in report)


@pytest.mark.parametrize("sample", REFUSED, ids=str)
def test_activation_that_no_layer_has_is_refused(sample: Sample, tmp_path: Path) -> None:
    with pytest.raises(ImportRefused, match="no activation of model"):
        imported(exported(sample, sample.module(), dynamo=False), tmp_path)


@pytest.mark.parametrize("sample, refused", NOT_EXPRESSIBLE, ids=str)
def test_wrong_file_of_the_new_exporter_is_refused(sample: Sample, refused: str, tmp_path: Path) -> None:
    with pytest.raises(ImportRefused, match=refused):
        imported(exported(sample, sample.module(), dynamo=True), tmp_path)
