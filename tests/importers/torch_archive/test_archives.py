"""Programs of torch.export and TorchScript can be imported, and compute the same as the module of torch."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from service.importers.draft import ImportRefused
from service.importers.torch_archive import read
from tests.importers.importing import import_file
from tests.importers.torch_archive.archives import assert_imports, write
from tests.importers.torch_archive.cases import BY_NUMBERS, EXPORTED, TRACED, refused_activation
from tests.importers.torch_archive.scripted import REFUSED as REFUSED_SCRIPT
from tests.importers.torch_archive.scripted import SCRIPTED, WithState
from tests.importers.torch_models import RECURRENT, REFUSED, Sample

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


@pytest.mark.parametrize("sample", EXPORTED, ids=str)
def test_program_of_torch_export_imports(sample: Sample, tmp_path: Path) -> None:
    assert_imports(sample, tmp_path, "export")


@pytest.mark.parametrize("sample", TRACED, ids=str)
def test_traced_module_imports(sample: Sample, tmp_path: Path) -> None:
    assert_imports(sample, tmp_path, "trace")


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("sample", SCRIPTED, ids=str)
def test_scripted_module_imports(sample: Sample, frozen: bool, tmp_path: Path) -> None:
    assert_imports(sample, tmp_path, "freeze" if frozen else "script")


@pytest.mark.parametrize("sample", REFUSED, ids=str)
def test_activation_that_no_layer_has_is_refused(sample: Sample, tmp_path: Path) -> None:
    with pytest.raises(ImportRefused, match=refused_activation(sample)):
        read(write(sample, sample.module(), tmp_path, "trace"))


def test_branch_by_numbers_of_the_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImportRefused, match=BY_NUMBERS):
        read(write(REFUSED_SCRIPT, REFUSED_SCRIPT.module(), tmp_path, "script"))


def test_code_that_reads_a_state_is_not_run(tmp_path: Path) -> None:
    sample = Sample("torch.jit.script", "__setstate__", WithState)
    with pytest.raises(ImportRefused, match=r"__setstate__ of its own, which is code, and is not run"):
        read(write(sample, WithState(), tmp_path, "script"))


@pytest.mark.parametrize("how", ["export", "trace"])
def test_import_compares_with_the_archive_itself(how: str, tmp_path: Path) -> None:
    sample = RECURRENT[0]
    report = import_file(tmp_path, write(sample, sample.module(), tmp_path, how))
    assert any(f"torch {torch.__version__} computed the outputs of the source" in line for line in report)
    card = (tmp_path / "models" / "imported" / "1" / "card.md").read_text()
    assert "| scores |" in card and "agree with those of the source within 1e-05 for random sequences of" in card


def test_static_shapes_import_for_their_length(tmp_path: Path) -> None:
    """A program that was exported without dynamic shapes takes one length and one size of batch."""
    sample = RECURRENT[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(sample.module(), sample.inputs()), tmp_path / "model.pt2")
    report = import_file(tmp_path, tmp_path / "model.pt2")
    assert "note: the program takes sequences of 16 steps only, and the model sequences of any length" in report
    assert any("random sequences of 16 steps" in line for line in report)
