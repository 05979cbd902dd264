"""Exports of ONNX graphs: ONNX Runtime computes the same, also for padded batches, and the importer reads the model back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from service.exporters.model import ExportRefused
from service.modeling.spec import ModelSpec
from tests.exporters.cases import CASES, CHANGED, Case
from tests.exporters.exporting import (
    Array,
    assert_answers,
    assert_round_trip,
    assert_same_answers,
    export,
    random_rows,
    write_case,
)

PADDING = 9
"""An id and a feature that would change every answer that reads it."""


def run(file: Path, spec: ModelSpec, rows: Sequence[Array]) -> list[Array]:
    """Return the answers of a graph for rows: as one padded batch where the graph takes batches."""
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    if session.get_inputs()[0].shape[0] == 1:
        outputs = [session.run(None, {names[0]: row[None]})[0][0] for row in rows]
    else:
        padded = np.full((len(rows), max(map(len, rows)) + 2, *rows[0].shape[1:]), PADDING, rows[0].dtype)
        for index, row in enumerate(rows):
            padded[index, : len(row)] = row
        lengths = {name: np.array([len(row) for row in rows], np.int32) for name in names[1:]}
        outputs = list(session.run(None, {names[0]: padded, **lengths})[0])
        outputs = [one[: len(row)] if one.ndim == 2 else one for one, row in zip(outputs, rows, strict=True)]
    if spec.head.kind == "span":
        return [np.exp(one) / np.exp(one).sum(0) for one in outputs]
    return outputs


def assert_case(case: Case, folder: Path) -> None:
    """Assert that ONNX Runtime computes the same, and that the importer reads the model back, or that it is refused with the reason."""
    spec = write_case(folder, case)
    if "onnx" not in case.refused:
        file, lines = export(folder, "onnx", ".onnx")
        rows = random_rows(spec)
        if spec.takes_empty and "takes one sequence" not in "".join(lines):
            rows.insert(1, rows[0][:0])
        assert_answers(folder, spec, rows, run(file, spec, rows))
        (assert_same_answers if str(case) in CHANGED else assert_round_trip)(folder, file, spec)
        return
    with pytest.raises(ExportRefused, match=rf"^layers\.\d+ \({case.layers[-1]['kind']}\): .*{case.refused['onnx']}"):
        export(folder, "onnx", ".onnx")
    assert [path.name for path in folder.iterdir()] == ["models"]


@pytest.mark.parametrize("case", [case for case in CASES if not case.more], ids=str)
def test_onnx_runtime_computes_the_same_or_the_model_is_refused(case: Case, tmp_path: Path) -> None:
    assert_case(case, tmp_path)


@pytest.mark.parametrize(
    "layers, takes_batches",
    [
        (({"kind": "lstm", "hidden": 2}, {"kind": "conv", "filters": 3, "width": 4}), True),
        (({"kind": "conv", "filters": 3, "width": 3, "stride": 2}, {"kind": "gru", "hidden": 2}), False),
        (({"kind": "pool", "reduce": "max", "width": 2}, {"kind": "dense", "width": 2}), False),
    ],
)
def test_graph_that_keeps_the_steps_takes_batches(
    tmp_path: Path, layers: tuple[dict[str, object], ...], takes_batches: bool
) -> None:
    head = {"kind": "embed", "pool": ["attention", "max", "mean", "sum", "first", "last_step"]}
    spec = write_case(tmp_path, Case("several", "layers", layers, head))
    file, lines = export(tmp_path, "onnx", ".onnx")
    assert any("takes one sequence" in line for line in lines) != takes_batches
    rows = random_rows(spec)
    assert_answers(tmp_path, spec, rows, run(file, spec, rows))
    assert_round_trip(tmp_path, file, spec)
