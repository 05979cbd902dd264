"""Exports of .h5 files: Keras loads them and computes the same, and the importer reads the model back."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from service.exporters.model import ExportRefused
from service.modeling.npz import read_npz, write_npz
from service.modeling.spec import read
from tests.exporters.cases import CASES, Case
from tests.exporters.exporting import (
    Array,
    assert_answers,
    assert_round_trip,
    assert_same_answers,
    export,
    random_rows,
    write_case,
)
from tests.importers.keras.test_cases import PYTHON, ROOT

LENGTHS = (7, 12)
TAKEN = [case for case in CASES if "keras" not in case.refused]
REFUSED = [case for case in CASES if "keras" in case.refused]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the exported file of every case by its number, and the outputs of Keras; `number/models` has the model."""
    folder = tmp_path_factory.mktemp("keras")
    for number, case in enumerate(TAKEN):
        own = folder / str(number)
        spec = write_case(own, case)
        file, _ = export(own, "keras", ".h5")
        file.rename(folder / f"{number}.h5")
        Path(f"{file}.toml").rename(folder / f"{number}.h5.toml")
        write_npz(folder / f"{number}.rows.npz", {str(index): row for index, row in enumerate(random_rows(spec, LENGTHS))})
    done = subprocess.run([PYTHON, "-m", "tests.exporters.run_keras", folder], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.mark.parametrize("number, case", list(enumerate(TAKEN)), ids=str)
def test_keras_computes_the_same(exported: Path, number: int, case: Case) -> None:
    """The importer reads the model back as well."""
    own, file = exported / str(number), exported / f"{number}.h5"
    spec = read(own / "models" / "exported" / "1")
    answers = list(read_npz(exported / f"{number}.answers.npz").values())
    if spec.head.kind == "span":
        answers = [softmax_over_steps(one) for one in answers]
    assert_answers(own, spec, random_rows(spec, LENGTHS), answers)
    (assert_same_answers if "keras" in case.changed else assert_round_trip)(own, file, spec)


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_keras_does_not_compute_is_refused(tmp_path: Path, case: Case) -> None:
    write_case(tmp_path, case)
    place = rf"layers\.\d+ \({case.layers[-1]['kind']}\)|head \({case.head['kind']}\)"
    with pytest.raises(ExportRefused, match=rf"^({place}): .*{case.refused['keras']}"):
        export(tmp_path, "keras", ".h5")
    assert [path.name for path in tmp_path.iterdir()] == ["models"]


def softmax_over_steps(scores: Array) -> Array:
    exponentials: Array = np.exp(scores - scores.max(0))
    softmax: Array = exponentials / exponentials.sum(0)
    return softmax
