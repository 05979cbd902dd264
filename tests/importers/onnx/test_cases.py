"""Every tested option: the graph imports and computes the same as in ONNX Runtime, or it is refused with the reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from service.importers.draft import ImportRefused
from tests.importers.onnx.case import Case
from tests.importers.onnx.cases import CASES
from tests.importers.onnx.graphs import assert_imports, imported


@pytest.mark.parametrize("case", [case for case in CASES if not case.refused], ids=str)
def test_imported_model_computes_the_same(case: Case, tmp_path: Path) -> None:
    assert_imports(case.graph(), tmp_path, axes=case.axes, reference=case.reference, lengths=case.lengths)


@pytest.mark.parametrize("case", [case for case in CASES if case.refused], ids=str)
def test_refused_graph_names_the_reason(case: Case, tmp_path: Path) -> None:
    with pytest.raises(ImportRefused, match=re.escape(case.refused)):
        imported(case.graph(), tmp_path)
