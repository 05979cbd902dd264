"""What the tests share: a folder of small models and one server over them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import models
from tests.serving import Server, serving

# The arrays are small, and threads that wait for each other cost more than they give.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """words over text, in two versions, and sensors over float features."""
    root = tmp_path_factory.mktemp("models")
    models.words(root, version=1, seed=1)
    models.words(root, version=2, seed=2)
    models.sensors(root)
    return root


@pytest.fixture(scope="session")
def server(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that tests share: they leave it as they found it."""
    with serving(models_folder, tmp_path_factory.mktemp("log")) as running:
        yield running
