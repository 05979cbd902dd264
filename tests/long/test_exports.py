"""The full matrix of exports: the options that `make test` leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exporters import test_onnx, test_pytorch
from tests.exporters.cases import CASES, Case

pytestmark = pytest.mark.parametrize("case", [case for case in CASES if case.more], ids=str)


def test_state_dict(case: Case, tmp_path: Path) -> None:
    test_pytorch.assert_case(case, tmp_path)


def test_graph(case: Case, tmp_path: Path) -> None:
    test_onnx.assert_case(case, tmp_path)
