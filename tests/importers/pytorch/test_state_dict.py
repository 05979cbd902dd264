"""Imports of state_dicts of torch, compared with torch itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from service.importers.draft import ImportRefused
from service.modeling import spec
from tests.importers.importing import (
    FEATURES,
    VOCABULARY,
    expected,
    import_file,
    random_features,
    random_ids,
    randomize,
    save,
)

HIDDEN, WIDTH, LABELS = 5, 4, 3
Outputs = Mapping[str, Tensor]


class Tagger(nn.Module):
    """An embedding, a recurrent layer and a linear layer over its last output, as most text classifiers are written."""

    def __init__(self, kind: Callable[..., nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = kind(WIDTH, HIDDEN, **options)
        width = (options.get("proj_size") or HIDDEN) * (1 + self.rnn.bidirectional)
        self.classifier = nn.Linear(width, LABELS)

    def forward(self, ids: Tensor) -> Outputs:
        steps, state = self.rnn(self.embedding(ids))
        hidden = state[0] if isinstance(state, tuple) else state
        last = torch.cat(tuple(hidden[-(1 + self.rnn.bidirectional) :]))
        outputs = {"sequence": steps, "logits": self.classifier(last), "scores": self.classifier(last).softmax(0)}
        for name, values in (("hidden", hidden), ("cell", state[1] if isinstance(state, tuple) else ())):
            for place, value in enumerate(values):
                level, backward = divmod(place, 1 + self.rnn.bidirectional)
                outputs[f"final.layers.1.{level}.{'backward' if backward else 'forward'}.{name}"] = value
        return outputs


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("depth, bidirectional", [(1, False), (1, True), (3, False), (2, True)])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"proj_size": 2}], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda kind: kind.__name__)
def test_recurrent_layers(
    tmp_path: Path, kind: type[nn.RNNBase], options: dict[str, Any], depth: int, bidirectional: bool
) -> None:
    if "proj_size" in options and kind is not nn.LSTM:
        pytest.skip("torch has projections of LSTMs only")
    model = randomize(Tagger(kind, num_layers=depth, bidirectional=bidirectional, **options))
    report = import_file(tmp_path, save(tmp_path, model), check=expected(model, random_ids()))
    assert f"  rnn ({len(model.rnn.state_dict())} tensors) -> layers.1 ({kind.__name__.lower()})" in report  # type: ignore[union-attr]
    card = (tmp_path / "models" / "imported" / "1" / "card.md").read_text()
    assert "| logits |" in card and "agree with those of the source within 1e-05" in card


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell], ids=lambda kind: kind.__name__)
def test_cells_are_layers_of_one_level(tmp_path: Path, kind: Callable[..., nn.RNNCellBase]) -> None:
    cell = randomize(kind(FEATURES, HIDDEN))

    def run(row: Tensor) -> Outputs:
        state: Any = None
        steps = []
        for x in row:
            state = cell(x[None], state)
            steps.append(state[0] if isinstance(state, tuple) else state)
        return {"sequence": torch.cat(steps)}

    import_file(tmp_path, save(tmp_path, nn.ModuleDict({"cell": cell})), check=expected(run, random_features()))


@pytest.mark.parametrize("two_dimensions", [False, True])
def test_text_cnn(tmp_path: Path, two_dimensions: bool) -> None:
    class TextCNN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            shapes = [(1, HIDDEN, (width, WIDTH)) for width in (2, 3, 1)]
            if two_dimensions:
                self.convs = nn.ModuleList(nn.Conv2d(*shape) for shape in shapes)
            else:
                self.convs = nn.ModuleList(nn.Conv1d(WIDTH, HIDDEN, width) for width in (2, 3, 1))
            self.hidden = nn.Linear(3 * HIDDEN, 6)
            self.fc = nn.Linear(6, LABELS)

        def forward(self, ids: Tensor) -> Outputs:
            x = self.embed(ids)[None]
            x = x[None] if two_dimensions else x.transpose(1, 2)
            maps = [torch.relu(conv(x)).flatten(2).amax(2) for conv in self.convs]
            return {"logits": self.fc(torch.relu(self.hidden(torch.cat(maps, 1))))[0]}

    model = randomize(TextCNN())
    report = import_file(tmp_path, save(tmp_path, model), check=expected(model, random_ids([9, 3, 4])))
    assert any(line.startswith("note: hidden: relu was assumed") for line in report)


def old_weight_norm(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(module)


@pytest.mark.parametrize("norm", [lambda module: module, old_weight_norm, parametrizations.weight_norm])
def test_tcn(tmp_path: Path, norm: Callable[[nn.Module], nn.Module]) -> None:
    """As locuslab/TCN writes it: each block has its convolutions under two names."""

    class Block(nn.Module):
        def __init__(self, inputs: int, dilation: int) -> None:
            super().__init__()
            self.left = 2 * dilation
            self.conv1 = norm(nn.Conv1d(inputs, HIDDEN, 3, dilation=dilation))
            self.conv2 = norm(nn.Conv1d(HIDDEN, HIDDEN, 3, dilation=dilation))
            self.net = nn.Sequential(self.conv1, nn.ReLU(), self.conv2, nn.ReLU())
            self.downsample = nn.Conv1d(inputs, HIDDEN, 1) if inputs != HIDDEN else None

        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.conv1(functional.pad(x, (self.left, 0))))
            y = torch.relu(self.conv2(functional.pad(y, (self.left, 0))))
            return torch.relu(y + (x if self.downsample is None else self.downsample(x)))

    class TCN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(Block(FEATURES, 1), Block(HIDDEN, 2), Block(HIDDEN, 4))
            self.linear = nn.Linear(HIDDEN, LABELS)

        def forward(self, row: Tensor) -> Outputs:
            steps = self.network(row.T[None])[0].T
            return {"sequence": steps, "logits": self.linear(steps[-1])}

    model = randomize(TCN())
    import_file(tmp_path, save(tmp_path, model), check=expected(model, random_features()))


def test_recipe_says_what_the_file_does_not(tmp_path: Path) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front = nn.Conv1d(FEATURES, 6, 3, stride=2, groups=3)
            self.front_norm = nn.BatchNorm1d(6, eps=0.01)
            self.rnn = nn.GRU(6, HIDDEN, bidirectional=True)
            self.norm = nn.LayerNorm(2 * HIDDEN)
            self.auxiliary = nn.Linear(7, 7)
            self.first = nn.Linear(4 * HIDDEN, 6)
            self.out = nn.Linear(6, 2)

        def forward(self, row: Tensor) -> Outputs:
            x = functional.elu(self.front_norm(self.front(functional.pad(row.T, (1, 2))[None])))[0].T
            steps = self.norm(self.rnn(x)[0])
            vector = torch.tanh(self.first(torch.cat((steps.amax(0), steps.mean(0)))))
            return {"sequence": steps, "value": functional.softplus(self.out(vector)), "embedding": vector}

    model = randomize(Encoder())
    recipe = """
        description = "An encoder"
        input.max_steps = 99
        [[layers]]
        kind = "conv"
        from = "front"
        norm_from = "front_norm"
        pads = [1, 2]
        stride = 2
        groups = 3
        epsilon = 0.01
        activation = "elu"
        [[layers]]
        kind = "gru"
        from = "rnn"
        [[layers]]
        kind = "layer_norm"
        from = "norm"
        [head]
        kind = "regress"
        pool = ["max", "mean"]
        activation = "softplus"
        from = "out"
        [[head.dense]]
        from = "first"
        activation = "tanh"
    """
    rows = random_features()
    report = import_file(tmp_path, save(tmp_path, model), check=expected(model, rows), recipe=recipe)
    assert "  auxiliary.weight is not used" in report and "  auxiliary.bias is not used" in report
    imported = spec.read(tmp_path / "models" / "imported" / "1")
    assert (imported.description, imported.input.max_steps, imported.input.features) == ("An encoder", 99, FEATURES)


@pytest.mark.parametrize("form", ["plain", "nested", "safetensors", "half", "double"])
def test_files_that_hold_a_state_dict(tmp_path: Path, form: str) -> None:
    model = randomize(Tagger(nn.LSTM))
    if form in ("half", "double"):
        model = randomize(model.half().float() if form == "half" else model)
    state = {name: value.half() if form == "half" else value for name, value in model.state_dict().items()}
    state = {name: value.double() if form == "double" else value for name, value in state.items()}
    file = tmp_path / f"weights.{'safetensors' if form == 'safetensors' else 'pt'}"
    if form == "safetensors":
        save_file(state, file)
    else:
        torch.save({"epoch": 3, "optimizer": {}, "state_dict": state} if form == "nested" else state, file)
    model.load_state_dict({name: value.float() for name, value in state.items()})
    import_file(tmp_path, file, check=expected(model, random_ids()))


def test_next_import_writes_the_next_version(tmp_path: Path) -> None:
    file = save(tmp_path, randomize(Tagger(nn.GRU)))
    for version in ("1", "2"):
        assert import_file(tmp_path, file)[-1] == f"{tmp_path / 'models' / 'imported' / version} is complete."
    assert not [path for path in (tmp_path / "models").iterdir() if path.name.startswith(".")]


def test_difference_above_the_tolerance_writes_nothing(tmp_path: Path) -> None:
    model = randomize(Tagger(nn.LSTM))
    check = expected(model, random_ids())
    check["logits"] = check["logits"] + 0.5
    with pytest.raises(ImportRefused, match=r"logits: the largest difference is 0\.5, and --tolerance is 1e-05"):
        import_file(tmp_path, save(tmp_path, model), check=check)
    assert not (tmp_path / "models").exists()
    assert import_file(tmp_path, tmp_path / "weights.pt", check=check, tolerance=0.6)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"logits": None, "scores": None, "sequence": None},
            "the file has no expected outputs: add any of embedding, sequence, logits",
        ),
        ({"answer": torch.zeros(3)}, "the file has the output 'answer', which the model lacks"),
        (
            {"logits": torch.zeros(3, 4)},
            r"the output 'logits' has the shape \(3, 4\) in the file, and the model computes \(3, 3\)",
        ),
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
    model = randomize(Tagger(nn.LSTM))
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
        (
            '[[layers]]\nkind = "lstm"\nfrom = "encoder"',
            "no tensor starts with 'encoder': the modules are embedding, rnn, classifier",
        ),
        ('[[layers]]\nkind = "gru"\nfrom = "rnn"', "rnn is a lstm, and the recipe says otherwise"),
        ('[head]\nlabels = ["a", "b"]', r"head.weight has the shape \(5, 3\) in the checkpoint, and the model needs \(5, 2\)"),
        ('[head]\npool = "best"', "head.pool: the value is 'best'"),
        ('precision = "int8"', "import in float32, then run seqserve quantize"),
        ("input.max_steps = 0", "input.max_steps"),
    ],
    ids=str,
)
def test_wrong_recipe_is_refused(tmp_path: Path, recipe: str, message: str) -> None:
    with pytest.raises(ImportRefused, match=message):
        import_file(tmp_path, save(tmp_path, randomize(Tagger(nn.LSTM))), recipe=recipe)
    assert not (tmp_path / "models").exists()
