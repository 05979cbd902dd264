"""A model is compared with Keras itself where that is installed, unless the file may have code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from service.importers.draft import ImportRefused
from service.importers.keras import read
from service.importers.keras.original import _has_only_keras
from tests.importers.hostile import SEQUENTIAL, good, write
from tests.importers.importing import import_file


def install(monkeypatch: pytest.MonkeyPatch, answer: Callable[[Any], Any], version: str = "3.15.1") -> None:
    """Make `keras` a module with models that return this answer to a batch."""

    class Model:
        layers = ()

        def __init__(self, path: Path, *, compile: bool, safe_mode: bool) -> None:
            assert safe_mode and not compile

        def __call__(self, batch: Any, *, training: bool) -> Any:
            assert not training
            return answer(batch)

    models, ops = SimpleNamespace(load_model=Model), SimpleNamespace(convert_to_numpy=np.asarray)
    monkeypatch.setitem(sys.modules, "keras", SimpleNamespace(__version__=version, models=models, ops=ops))


def lstm_of_ones(batch: Any) -> Any:
    """The model in the archive: every weight is 1."""
    hidden, cell = np.zeros((2, len(batch), 2))
    for step in batch.swapaxes(0, 1):
        gates = step.sum(axis=1, keepdims=True) + hidden.sum(axis=1, keepdims=True) + 1.0
        cell = (cell + np.tanh(gates)) / (1 + np.exp(-gates))
        hidden = np.tanh(cell) / (1 + np.exp(-gates))
    return hidden


def test_import_compares_with_keras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras 2 does not run a model of Keras 3."""
    file = write(tmp_path, "model.keras", good("model.keras"))
    install(monkeypatch, lambda batch: lstm_of_ones(batch) + 0.1)
    with pytest.raises(ImportRefused, match=r"the largest difference is 0\.1"):
        import_file(tmp_path, file)
    assert not (tmp_path / "models").exists()
    install(monkeypatch, lstm_of_ones)
    assert any("for which Keras 3.15.1 computed the outputs of the source" in line for line in import_file(tmp_path, file))
    install(monkeypatch, lstm_of_ones, version="2.15.0")
    assert read(file).original is None


@pytest.mark.parametrize(
    "part",
    [
        {"module": "os", "class_name": "system", "config": {}},
        {"module": "kerasmodel", "class_name": "Zeros"},
        {"class_name": "__lambda__", "config": {"value": "4wEAAA=="}},
        {"class_name": "function", "config": "doubled"},
        {"class_name": "Zeros", "registered_name": "mine>Zeros"},
    ],
    ids=str,
)
def test_architecture_with_other_classes_is_not_given_to_keras(part: Any) -> None:
    assert _has_only_keras(SEQUENTIAL)
    assert not _has_only_keras({**SEQUENTIAL, "config": {"layers": [{"initializer": part}]}})
