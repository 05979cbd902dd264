"""Every option of Keras, once: the model computes the same as in Keras, or is refused with the reason. tests/long has more of each."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.importers.draft import ImportRefused
from service.importers.keras import read
from service.modeling.npz import read_npz
from tests.importers.importing import import_file
from tests.importers.keras.builders import Case
from tests.importers.keras.make_checkpoints import CASES

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent.parent.parent
PYTHON = ROOT / ".venv-sources" / "keras3" / "bin" / "python"
"""Python of the environment with Keras, which the Makefile creates."""
KERAS_2 = Path(__file__).resolve().parent / "checkpoints"
"""Models of tf_keras 2.21.0 with samples of their outputs. Commit 3b52ca9 has the script that wrote them."""


def make_checkpoints(folder: Path, *arguments: str) -> Path:
    """Make the model of every case with Keras in a folder, and return the folder."""
    if not PYTHON.exists():
        pytest.skip("needs Keras: make .venv-sources/keras3/installed")
    command: list[str | Path] = [PYTHON, "-m", "tests.importers.keras.make_checkpoints", folder, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def assert_case(checkpoints: Path, folder: Path, index: int, case: Case) -> None:
    """Assert that a model imports and computes the same, or is refused with the reason."""
    file = checkpoints / f"{index}{case.suffix}"
    if not case.refused:
        assert_computes_the_same(file, checkpoints / f"{index}.npz", folder)
        return
    with pytest.raises(ImportRefused, match=case.refused):
        read(file)


def assert_computes_the_same(file: Path, outputs: Path, folder: Path) -> None:
    samples = read_npz(outputs)
    import_file(folder, file, check={**samples, "output": _comparable(read(file).head.table, samples["output"])})


def _comparable(head: Mapping[str, Any], output: Any) -> Any:
    """Return an output of the source as the model answers it: one probability becomes two, for two labels."""
    is_binary = head["kind"] == "classify" and not head.get("multi_label") and output.shape[-1] == 1
    return np.concatenate([1 - output, output], axis=-1) if is_binary else output


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoints(tmp_path_factory.mktemp("keras"))


@pytest.mark.parametrize("index, case", [(index, case) for index, case in enumerate(CASES) if not case.more], ids=str)
def test_model_computes_the_same_or_is_refused(checkpoints: Path, tmp_path: Path, index: int, case: Case) -> None:
    assert_case(checkpoints, tmp_path, index, case)


@pytest.mark.parametrize(
    "file", sorted(file for file in KERAS_2.iterdir() if file.suffix in (".h5", ".keras")), ids=lambda file: file.name
)
def test_checkpoint_of_keras_2_computes_the_same(tmp_path: Path, file: Path) -> None:
    assert_computes_the_same(file, file.with_name(f"{file.name}.npz"), tmp_path)
