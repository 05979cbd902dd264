"""A million mutated weight files: each is refused, or loaded bit by bit. `python -m tests.long.weight_files` takes another seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.modeling.spec import ModelSpec
from tests import models
from tests.long.weight_files import SIZE, run
from tests.steady import resident_bytes

FEW = 5_000
LIMIT_BYTES = 64 << 20


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return models.words(tmp_path)


@pytest.fixture
def folder(tmp_path: Path, spec: ModelSpec) -> Path:
    return tmp_path / spec.name / "1"


def test_million_mutated_files_are_refused_or_loaded_bit_by_bit(
    folder: Path, spec: ModelSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    run(folder, spec, FEW, seed=1)
    before = resident_bytes("self")
    report = run(folder, spec, SIZE)
    grown = resident_bytes("self") - before
    with capsys.disabled():
        print(f"\n{report.loaded} loaded, {report.refused.total()} refused, the slowest took {report.slowest:.3f} s")
    assert report.wrong == []
    assert report.loaded + report.refused.total() == SIZE
    assert min(report.loaded, report.refused.total()) > SIZE // 20
    assert grown <= LIMIT_BYTES
