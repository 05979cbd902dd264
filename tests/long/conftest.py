"""Shared fixtures of the long tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models with `sensors`, so small that its device or its frontend is the limit."""
    root = tmp_path_factory.mktemp("models")
    models.sensors(root, hidden=8)
    return root
