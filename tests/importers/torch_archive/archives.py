"""Writes archives of torch in tests, and compares the imported models with the modules."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from service.importers.draft import Draft
from service.importers.torch_archive import read
from tests.importers.onnx.graphs import TOLERANCE, answers
from tests.importers.torch_models import Sample


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


def assert_imports(sample: Sample, folder: Path, how: str) -> Draft:
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
    return draft
