"""Every option of a state_dict, once: the model computes the same as torch, or is refused with the reason. tests/long has more."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from service.importers.draft import ImportRefused
from tests.importers.importing import expected, import_file, random_features, random_ids, save
from tests.importers.pytorch.cases import CASES, Case, random_module

NO_WARNINGS = [
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
    pytest.mark.filterwarnings("ignore:use_tanh = True is deprecated"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
pytestmark = NO_WARNINGS


def assert_case(case: Case, folder: Path) -> None:
    """Assert that a checkpoint imports and computes the same as its module, or is refused with the reason."""
    module = random_module(case)
    file = save(folder, module)
    if case.refused:
        with pytest.raises(ImportRefused, match=re.escape(case.refused)):
            import_file(folder, file, recipe=case.recipe)
        return
    rows = random_ids(case.lengths) if case.ids else random_features(case.lengths, case.features)
    import_file(folder, file, check=expected(partial(case.run, module), rows), recipe=case.recipe)


@pytest.mark.parametrize("case", [case for case in CASES if not case.more], ids=str)
def test_checkpoint_computes_the_same_or_is_refused(case: Case, tmp_path: Path) -> None:
    assert_case(case, tmp_path)
