"""Imports of state_dicts of torch, compared with torch itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from service.importers.draft import ImportRefused
from service.modeling import spec
from tests.importers.importing import FEATURES, expected, import_file, layer, random_features, random_ids, randomize, save
from tests.importers.pytorch.cases import Tagger
from tests.importers.torch_models import HIDDEN

Outputs = Mapping[str, Tensor]


def test_recipe_says_what_the_file_does_not(tmp_path: Path) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front, self.front_norm = nn.Conv1d(FEATURES, 6, 3, stride=2, groups=3), nn.BatchNorm1d(6, eps=0.01)
            self.rnn, self.norm = nn.GRU(6, HIDDEN, bidirectional=True), nn.LayerNorm(2 * HIDDEN)
            self.auxiliary = nn.Linear(7, 7)
            self.first, self.out = nn.Linear(4 * HIDDEN, 6), nn.Linear(6, 2)

        def forward(self, row: Tensor) -> Outputs:
            x = functional.elu(self.front_norm(self.front(functional.pad(row.T, (1, 2))[None])))[0].T
            steps = self.norm(self.rnn(x)[0])
            vector = torch.tanh(self.first(torch.cat((steps.amax(0), steps.mean(0)))))
            return {"sequence": steps, "value": functional.softplus(self.out(vector)), "embedding": vector}

    model = randomize(Encoder())
    dense = '[[head.dense]]\nfrom = "first"\nactivation = "tanh"\n'
    head = '[head]\nkind = "regress"\npool = ["max", "mean"]\nactivation = "softplus"\nfrom = "out"\n'
    conv = {"norm_from": '"front_norm"', "pads": [1, 2], "stride": 2, "groups": 3, "epsilon": 0.01, "activation": '"elu"'}
    layers = layer("conv", "front", **conv) + layer("gru", "rnn") + layer("layer_norm", "norm")
    recipe = 'description = "An encoder"\ninput.max_steps = 99\n' + layers + head + dense
    rows = random_features()
    report = import_file(tmp_path, save(tmp_path, model), check=expected(model, rows), recipe=recipe)
    assert "  auxiliary.weight is not used" in report and "  auxiliary.bias is not used" in report
    imported = spec.read(tmp_path / "models" / "imported" / "1")
    assert (imported.description, imported.input.max_steps, imported.input.features) == ("An encoder", 99, FEATURES)


@pytest.mark.parametrize("form", ["nested", "safetensors", "half", "double", "before 1.6"])
def test_files_that_hold_a_state_dict(tmp_path: Path, form: str) -> None:
    model = randomize(Tagger("LSTM"))
    dtype = {"half": torch.float16, "double": torch.float64}.get(form, torch.float32)
    state = {name: value.to(dtype) for name, value in model.state_dict().items()}
    file = tmp_path / f"weights.{'safetensors' if form == 'safetensors' else 'pt'}"
    if form == "safetensors":
        save_file(state, file)
    else:
        content = {"epoch": 3, "optimizer": {}, "state_dict": state} if form == "nested" else state
        torch.save(content, file, _use_new_zipfile_serialization=form != "before 1.6")
    model.load_state_dict({name: value.float() for name, value in state.items()})
    for version in ("1", "2"):
        report = import_file(tmp_path, file, check=expected(model, random_ids()))
        folder = tmp_path / "models"
        assert report[-2:] == [f"{folder / 'imported' / version} is complete.", f"Serve it: seqserve serve --models {folder}"]
    assert not [path for path in (tmp_path / "models").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict.fromkeys(("logits", "scores", "sequence")),
            "the file has no expected outputs: add any of embedding, sequence, logits",
        ),
        ({"answer": torch.zeros(3)}, "the file has the output 'answer', which the model lacks"),
        ({"logits": torch.zeros(3, 4)}, r"the output 'logits' has the shape \(3, 4\) in the file, .* computes \(3, 3\)"),
        ({"logits": torch.full((3, 3), torch.nan)}, "the output 'logits' has values in the file that are not finite"),
        ({"ids": None}, "have no 'ids', which imported takes"),
        ({"ids": torch.full((14,), 17)}, "'ids' has ids from 17 to 17, and the vocabulary of imported ends at 16"),
        ({"offsets": torch.tensor([0, 9])}, "'offsets' must rise from 0 to the 14 steps of 'ids'"),
        ({"state.layers.1.0.forward.hidden": torch.zeros(3, 4)}, r"has the shape \(3, 4\), expected \(3, 5\)"),
        ({"state.layers.2.hidden": torch.zeros(3, 5)}, "no recurrent layer has the state 'layers.2.hidden'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_check_is_refused(tmp_path: Path, change: dict[str, Tensor | None], message: str) -> None:
    model = randomize(Tagger("LSTM"))
    check = {name: values for name, values in expected(model, random_ids()).items() if not name.startswith("final.")}
    check = {name: values for name, values in {**check, **change}.items() if values is not None}
    with pytest.raises(Exception, match=message):
        import_file(tmp_path, save(tmp_path, model), check=check)


@pytest.mark.parametrize(
    "recipe, message",
    [
        ("layers = 3", r"write layers as \[\[layers\]\]"),
        ("[[layers]", "recipe.toml"),
        ('[[layers]]\nkind = "lstn"', "layers.0 of the recipe has the kind 'lstn'"),
        ('[[layers]]\nkind = "lstm"', "layers.0 of the recipe needs `from`"),
        ('[[layers]]\nkind = "lstm"\nfrom = "no"', "no tensor starts with 'no': the modules are embedding, rnn, classifier"),
        ('[[layers]]\nkind = "gru"\nfrom = "rnn"', "rnn is a lstm, and the recipe says otherwise"),
        (
            '[head]\nlabels = ["a", "b"]',
            r"head.weight \(of classifier.weight, classifier.bias\) has the shape \(5, 3\) in the checkpoint, and the model needs \(5, 2\)",
        ),
        ('[head]\npool = "best"', "head.pool: the value is 'best'"),
        ('precision = "int8"', "import in float32, then run seqserve compress"),
        ("input.max_steps = 0", "input.max_steps"),
    ],
    ids=str,
)
def test_wrong_recipe_is_refused(tmp_path: Path, recipe: str, message: str) -> None:
    with pytest.raises(ImportRefused, match=message):
        import_file(tmp_path, save(tmp_path, randomize(Tagger("LSTM"))), recipe=recipe)
    assert not (tmp_path / "models").exists()
