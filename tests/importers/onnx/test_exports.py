"""Files of torch's exporters can be imported, and compute the same as the module of torch. tests/long has more modules."""

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
from tests.importers.onnx.graphs import TOLERANCE, answers, imported
from tests.importers.torch_models import REFUSED, Sample, named

BY_OLD_EXPORTER = named(
    *(
        "nn.LSTM: two layers, bidirectional",
        "nn.GRU: packed, two layers, bidirectional",
        "nn.RNN: learned initial states, bidirectional",
    ),
    *("nn.GRU: last step, batch_first=False", "nn.Conv2d: text CNN, amax", "nn.Conv1d: text CNN, adaptive_max_pool1d"),
    *("nn.Conv1d: TCN with parametrizations.weight_norm", "nn.Conv1d: causal, functional.glu", "stride and groups"),
    "attention pool by bmm",
)


def exported(sample: Sample, module: nn.Module, *, dynamo: bool = False) -> ModelProto:
    """Export a module with open numbers of sequences and steps, as the manual of torch says."""
    steps, batch = (0, 1) if sample.steps_first else (1, 0)
    names = ["x", "lengths"][: 1 + sample.lengths]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own exporters
        if dynamo:
            axes = ({batch: torch.export.Dim("batch"), steps: torch.export.Dim("steps")}, {0: torch.export.Dim("batch")})
            options: dict[str, Any] = {"dynamic_shapes": axes[: len(names)], "input_names": names, "verbose": False}
            return torch.onnx.export(module, sample.inputs(), dynamo=True, **options).model_proto  # type: ignore[union-attr]
        open_axes: dict[str, Any] = {"x": {batch: "batch", steps: "steps"}, "lengths": {0: "batch"}}
        content: Any = io.BytesIO()
        dynamic = {name: open_axes[name] for name in names}
        torch.onnx.export(module, sample.inputs(), content, dynamo=False, input_names=names, dynamic_axes=dynamic)
    return onnx.load_from_string(content.getvalue())


def assert_exports(sample: Sample, folder: Path, *, dynamo: bool = False) -> None:
    module = sample.module()
    draft = imported(exported(sample, module, dynamo=dynamo), folder)
    ours = answers(draft, [row.numpy() for row in sample.rows()])
    for answer, output in zip(ours, sample.answers(module), strict=True):
        np.testing.assert_allclose(answer.ravel(), draft.as_answer(output.numpy()).ravel(), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("sample", BY_OLD_EXPORTER, ids=str)
def test_file_of_the_old_exporter_imports(sample: Sample, tmp_path: Path) -> None:
    assert_exports(sample, tmp_path)


def test_activation_that_no_layer_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImportRefused, match="no activation of model"):
        imported(exported(REFUSED[0], REFUSED[0].module()), tmp_path)
