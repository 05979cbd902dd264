"""Imports of SRU and QRNN layers: the `sru` package itself, and the published equations of the QRNN packages in their layout."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from service.importers.draft import ImportRefused
from tests.importers.importing import FEATURES, expected, import_file, random_features, randomize, save

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the package compiles CUDA kernels where it can
    import sru

HIDDEN = 5


class OverRows(nn.Module):
    """An SRU of the package over one row."""

    def __init__(self, inputs: int, depth: int, **options: Any) -> None:
        super().__init__()
        self.encoder = sru.SRU(inputs, HIDDEN, num_layers=depth, **options)

    def forward(self, row: Tensor) -> Mapping[str, Tensor]:
        steps, _ = self.encoder(row[:, None])
        return {"sequence": steps[:, 0]}


def random_sru(inputs: int, depth: int, **options: Any) -> OverRows:
    """Return an SRU with random weights. Its scale is a constant, and so are the cell's weights in version 1."""
    model = OverRows(inputs, depth, **options)
    scales = [cell.scale_x.clone() for cell in model.encoder.rnn_lst]
    randomize(model)
    for cell, scale in zip(model.encoder.rnn_lst, scales, strict=True):
        cell.scale_x.copy_(scale)
        if options.get("v1"):
            cell.weight_c.data.zero_()
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inputs", [FEATURES, HIDDEN])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(
    "options, keys",
    [
        ({}, {}),
        ({"v1": True}, {}),
        ({"use_tanh": True}, {"activation": '"tanh"'}),
        ({"has_skip_term": False}, {"skip": "false"}),
        ({"rescale": True, "highway_bias": -1.0}, {}),
        ({"layer_norm": True}, {}),
        ({"layer_norm": True, "normalize_after": True}, {"layer_norm": '"after"'}),
        ({"projection_size": 2}, {}),
        ({"projection_size": 4}, {}),
    ],
    ids=str,
)
def test_sru_package(tmp_path: Path, inputs: int, bidirectional: bool, options: dict[str, Any], keys: dict[str, str]) -> None:
    model = random_sru(inputs, 3, bidirectional=bidirectional, **options)
    recipe = '[[layers]]\nkind = "sru"\nfrom = "encoder"\n' + f"bidirectional = {str(bidirectional).lower()}\n"
    recipe += "".join(f"{name} = {value}\n" for name, value in keys.items())
    import_file(tmp_path, save(tmp_path, model), check=expected(model, random_features(features=inputs)), recipe=recipe)


@pytest.mark.filterwarnings("ignore")
def test_sru_without_a_recipe(tmp_path: Path) -> None:
    model = random_sru(FEATURES, 2)
    report = import_file(tmp_path, save(tmp_path, model), check=expected(model, random_features()))
    assert (
        "note: encoder.rnn_lst: one direction and no activation of the cell were assumed, which the file does not say" in report
    )


@pytest.mark.filterwarnings("ignore")
def test_sru_with_a_projection_of_its_own_is_refused(tmp_path: Path) -> None:
    model = random_sru(FEATURES, 2, proj_input_to_hidden_first=True)
    with pytest.raises(ImportRefused, match=r"encoder\.input_to_hidden is a module of its own within the SRU"):
        import_file(tmp_path, save(tmp_path, model), recipe='[[layers]]\nkind = "sru"\nfrom = "encoder"')


class QRNNLayer(nn.Module):
    """One layer of Salesforce's and fastai's QRNN: a linear layer over this step and the one before, newest first, blocks z f o.

    f is the gate of the new value: c = f z + (1 - f) c.
    """

    def __init__(self, inputs: int, window: int, *, output_gate: bool) -> None:
        super().__init__()
        self.window, self.output_gate = window, output_gate
        self.linear = nn.Linear(window * inputs, (3 if output_gate else 2) * HIDDEN)

    def forward(self, row: Tensor) -> Tensor:
        before = torch.cat((torch.zeros_like(row[:1]), row[:-1]))
        seen = torch.cat((row, before), 1) if self.window == 2 else row
        z, f, *o = self.linear(seen).chunk(3 if self.output_gate else 2, 1)
        cell, steps = torch.zeros(HIDDEN), []
        for t in range(len(row)):
            forget = f[t].sigmoid()
            cell = forget * z[t].tanh() + (1 - forget) * cell
            steps.append(o[0][t].sigmoid() * cell if o else cell)
        return torch.stack(steps)


@pytest.mark.parametrize("output_gate", [True, False])
@pytest.mark.parametrize("window", [1, 2])
def test_qrnn_packages(tmp_path: Path, window: int, output_gate: bool) -> None:
    class QRNN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = [FEATURES, HIDDEN, HIDDEN]
            self.layers = nn.ModuleList(QRNNLayer(inputs, window, output_gate=output_gate) for inputs in widths)

        def forward(self, row: Tensor) -> Mapping[str, Tensor]:
            for layer in self.layers:
                row = layer(row)
            return {"sequence": row}

    model = randomize(QRNN())
    pooling = "fo" if output_gate else "f"
    recipe = f'[[layers]]\nkind = "qrnn"\nfrom = "layers"\nwindow = {window}\npooling = "{pooling}"'
    import_file(tmp_path, save(tmp_path, model), check=expected(model, random_features()), recipe=recipe)
