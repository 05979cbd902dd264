"""Every operator and option of ONNX, once: the graph computes the same as in ONNX Runtime, or is refused. tests/long has more of each."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto

from service.importers.onnx import read
from tests.importers.onnx import convolution_cases, recurrent_cases, step_cases
from tests.importers.onnx.graphs import Case, assert_case

CASES = (*recurrent_cases.CASES, *convolution_cases.CASES, *step_cases.CASES)


@pytest.mark.parametrize("case", [case for case in CASES if not case.more], ids=str)
def test_graph_computes_the_same_or_is_refused(case: Case, tmp_path: Path) -> None:
    assert_case(case, tmp_path)


def test_rounding_to_16_bits_is_reported(tmp_path: Path) -> None:
    operators = ("Cast", {"to": TensorProto.FLOAT16}), ("Cast", {"to": TensorProto.FLOAT})
    onnx.save(step_cases.steps("", *operators).graph(), tmp_path / "model.onnx")
    assert [
        note
        for note in read(tmp_path / "model.onnx").notes
        if note.endswith("rounds to 16 bits, and the model computes in float32")
    ]
