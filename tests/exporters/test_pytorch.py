"""Exports of state_dicts: torch's own modules take their names and shapes, and the importer reads the same model back, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from service.exporters.model import ExportRefused
from tests.exporters.cases import CASES, VOCABULARY, Case
from tests.exporters.exporting import assert_round_trip, export, write_case
from tests.modeling.random_models import FEATURES
from tests.sru_package import SRU


def conv() -> list[nn.Module]:
    module: Any = parametrizations.weight_norm(nn.Conv1d(FEATURES, 6, 3))
    module.norm = nn.BatchNorm1d(6)
    return [module]


EMBEDDED = {"kind": "embedding", "width": 4}, {"kind": "lstm", "hidden": 5, "depth": 11, "bidirectional": True, "projection": 2}
MODULES: dict[str, tuple[Any, Callable[[], list[nn.Module]]]] = {
    "lstm": (EMBEDDED, lambda: [nn.Embedding(VOCABULARY, 4), nn.LSTM(4, 5, 11, bidirectional=True, proj_size=2)]),
    "conv": (({"kind": "conv", "filters": 6, "width": 3, "batch_norm": True, "weight_norm": True},), conv),
    "dense": (
        ({"kind": "layer_norm"}, {"kind": "dense", "width": 4}),
        lambda: [nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 4)],
    ),
    "sru": (({"kind": "sru", "hidden": 5, "depth": 2},), lambda: [SRU(FEATURES, 5, 2)]),
}


@pytest.mark.parametrize("layers, modules", MODULES.values(), ids=MODULES)
def test_state_dict_loads_into_modules_as_the_documentation_shows(tmp_path: Path, layers: Any, modules: Any) -> None:
    """Without this project."""
    write_case(tmp_path, Case("several", "layers", layers))
    file, _ = export(tmp_path, "pytorch", ".pt")
    module: Any = nn.Module()
    module.layers = nn.ModuleList(modules())
    module.load_state_dict(torch.load(file, weights_only=True))


def assert_case(case: Case, folder: Path) -> None:
    """Assert that a model is read back as it was, or is refused with the reason."""
    spec = write_case(folder, case)
    if "pytorch" not in case.refused:
        file, _ = export(folder, "pytorch", ".safetensors" if len(case.option) % 2 else ".pt")
        assert_round_trip(folder, file, spec)
        return
    with pytest.raises(ExportRefused, match=rf"^layers\.\d+ \({case.layers[-1]['kind']}\): .*{case.refused['pytorch']}"):
        export(folder, "pytorch", ".pt")
    assert [path.name for path in folder.iterdir()] == ["models"]


@pytest.mark.parametrize("case", [case for case in CASES if not case.more], ids=str)
def test_model_comes_back_or_is_refused(case: Case, tmp_path: Path) -> None:
    assert_case(case, tmp_path)
