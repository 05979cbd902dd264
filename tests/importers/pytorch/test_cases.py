"""Every tested option: the state_dict imports and computes the same as torch, or it is refused with the reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from service.importers.draft import ImportRefused
from tests.importers.importing import expected, import_file, random_features, random_ids, save
from tests.importers.pytorch.cases import CASES, Case, random_module

pytestmark = [
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
    pytest.mark.filterwarnings("ignore:use_tanh = True is deprecated"),
]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("case", [case for case in CASES if not case.refused], ids=str)
def test_imported_model_computes_the_same(case: Case, tmp_path: Path) -> None:
    module = random_module(case)
    rows = random_ids(case.lengths) if case.ids else random_features(case.lengths, case.features)
    import_file(tmp_path, save(tmp_path, module), check=expected(module, rows), recipe=case.recipe)


@pytest.mark.parametrize("case", [case for case in CASES if case.refused], ids=str)
def test_refused_checkpoint_names_the_reason(case: Case, tmp_path: Path) -> None:
    with pytest.raises(ImportRefused, match=re.escape(case.refused)):
        import_file(tmp_path, save(tmp_path, random_module(case)), recipe=case.recipe)
