"""Every tested option: the model imports and computes the same as in Keras, or it is refused with the reason."""

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
from tests.importers.keras.cases import CASES

ROOT = Path(__file__).resolve().parent.parent.parent.parent
PYTHON = ROOT / ".venv-sources" / "keras3" / "bin" / "python"
"""Python of the environment with Keras, which the Makefile creates."""
NUMBERED = list(enumerate(CASES))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model of every line, made by Keras."""
    if not PYTHON.exists():
        pytest.skip("needs Keras: make .venv-sources/keras3/installed")
    folder = tmp_path_factory.mktemp("keras")
    command: list[str | Path] = [PYTHON, "-m", "tests.importers.keras.make_checkpoints", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.mark.parametrize("index, case", [pair for pair in NUMBERED if not pair[1].refused], ids=str)
def test_imported_model_computes_the_same(checkpoints: Path, tmp_path: Path, index: int, case: Case) -> None:
    file = checkpoints / f"{index}{case.suffix}"
    samples = read_npz(checkpoints / f"{index}.npz")
    import_file(tmp_path, file, check={**samples, "output": comparable(read(file).head.table, samples["output"])})


@pytest.mark.parametrize("index, case", [pair for pair in NUMBERED if pair[1].refused], ids=str)
def test_refused_model_names_the_reason(checkpoints: Path, index: int, case: Case) -> None:
    with pytest.raises(ImportRefused, match=case.refused):
        read(checkpoints / f"{index}{case.suffix}")


def test_names_of_the_files_differ() -> None:
    assert len({str(case) for case in CASES}) == len(CASES)


def comparable(head: Mapping[str, Any], output: Any) -> Any:
    """Return an output of the source as the model answers it: one probability becomes two, for two labels."""
    is_binary = head["kind"] == "classify" and not head.get("multi_label") and output.shape[-1] == 1
    return np.concatenate([1 - output, output], axis=-1) if is_binary else output
