"""Exports of state_dicts: PyTorch computes the same with its own modules, and the importer reads the same model back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from service.exporters.model import ExportRefused
from service.modeling.spec import ModelSpec
from tests.exporters.cases import CASES, Case
from tests.exporters.exporting import assert_answers, assert_round_trip, export, random_rows, write_case
from tests.exporters.torch_modules import Exported

TAKEN = [case for case in CASES if "pytorch" not in case.refused]
REFUSED = [case for case in CASES if "pytorch" in case.refused]


def loaded(spec: ModelSpec, file: Path) -> Exported:
    """Return modules with the weights of a file. They need every weight."""
    module = Exported(spec)
    module.load_state_dict(load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True))
    return module.float().eval()


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.filterwarnings("ignore:.*:UserWarning:sru")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("case", TAKEN, ids=str)
def test_modules_of_torch_compute_the_same(tmp_path: Path, case: Case) -> None:
    spec = write_case(tmp_path, case)
    file, _ = export(tmp_path, "pytorch", ".safetensors" if len(case.option) % 2 else ".pt")
    module, rows = loaded(spec, file), random_rows(spec)
    with torch.no_grad():
        assert_answers(tmp_path, spec, rows, [module(torch.from_numpy(row)) for row in rows])
    assert_round_trip(tmp_path, file, spec)


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_torch_does_not_compute_is_refused(tmp_path: Path, case: Case) -> None:
    write_case(tmp_path, case)
    with pytest.raises(ExportRefused, match=rf"^layers\.\d+ \({case.layers[-1]['kind']}\): .*{case.refused['pytorch']}"):
        export(tmp_path, "pytorch", ".pt")
    assert [path.name for path in tmp_path.iterdir()] == ["models"]
