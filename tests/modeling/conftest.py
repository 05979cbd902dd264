"""Fixtures: a model folder that tests may break."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.modeling.spec import ModelSpec
from tests import models


@pytest.fixture
def model(tmp_path: Path) -> ModelSpec:
    return models.words(tmp_path)


@pytest.fixture
def folder(tmp_path: Path, model: ModelSpec) -> Path:
    return tmp_path / model.name / "1"
