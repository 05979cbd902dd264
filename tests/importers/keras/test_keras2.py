"""Checkpoints that Keras 2 wrote are imported and compute the same as there."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.importers.keras import read
from service.modeling.npz import read_npz
from tests.importers.importing import import_file
from tests.importers.keras.keras2_cases import CASES
from tests.importers.keras.test_cases import comparable

CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"


@pytest.mark.parametrize("name", CASES)
def test_imported_model_computes_the_same(tmp_path: Path, name: str) -> None:
    file = CHECKPOINTS / name
    samples = read_npz(CHECKPOINTS / f"{name}.npz")
    import_file(tmp_path, file, check={**samples, "output": comparable(read(file).head.table, samples["output"])})
