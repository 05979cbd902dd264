"""What a state_dict does not say is a question until a recipe says it or samples of the source prove it; the rest is read right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from service.cli import main
from service.importers.draft import ImportQuestion
from service.modeling import spec
from tests.importers.importing import (
    FEATURES,
    VOCABULARY,
    expected,
    import_file,
    layer,
    random_features,
    random_ids,
    randomize,
    save,
)
from tests.importers.pytorch.cases import SEQUENCE, Case, OverRows, Tagger, random_module
from tests.importers.torch_models import HIDDEN, LABELS

LAYERS = layer("embedding", "embedding") + layer("lstm", "rnn")
OPTIMIZER = {"state": {0: {"exp_avg": torch.ones(3, 3)}}, "param_groups": [{"lr": 0.1}]}


def tagger(**others: nn.Module) -> Any:
    model = Tagger("LSTM")
    for name, module in others.items():
        model.add_module(name, module)
    return randomize(model)


def write(folder: Path, content: Any) -> Path:
    torch.save(content, folder / "weights.pt")
    return folder / "weights.pt"


def assert_asks(folder: Path, file: Path, *words: str, **options: Any) -> str:
    """Assert that an import writes nothing and asks a question with these words; return the recipe in it."""
    with pytest.raises(ImportQuestion) as question:
        import_file(folder, file, **options)
    assert [word for word in words if word not in str(question.value)] == [] and not (folder / "models").exists()
    return str(question.value).partition("corrected:\n")[2]


@pytest.mark.parametrize(
    "module, words",
    [
        (nn.RMSNorm(HIDDEN), "- module: layer_norm, epsilon = 1e-05; RMSNorm"),
        (nn.GroupNorm(1, HIDDEN), "GroupNorm"),
        (nn.InstanceNorm1d(HIDDEN, affine=True), "InstanceNorm"),
        (nn.BatchNorm1d(HIDDEN, track_running_stats=False), "batch norm without statistics"),
        (nn.BatchNorm1d(HIDDEN), "- module: batch_norm, epsilon = 1e-05"),
        (nn.PReLU(), "PReLU"),
        (nn.RNN(HIDDEN, HIDDEN), '- module: rnn, activation = "tanh"; relu'),
        (nn.ConvTranspose1d(HIDDEN, HIDDEN, 3), "- module: conv, stride = 1, dilation = 1"),
        (nn.ConvTranspose1d(HIDDEN, 6, 3), "module has the tensors weight (5, 6, 3), bias (6,)"),
        (nn.Conv2d(2, HIDDEN, (3, 2)), "module has the tensors weight (5, 2, 3, 2)"),
    ],
)
def test_module_that_looks_like_another_is_asked_for(tmp_path: Path, module: nn.Module, words: str) -> None:
    assert_asks(tmp_path, save(tmp_path, tagger(module=module)), words, "--recipe")


@pytest.mark.parametrize("suffix, order", [(".pt", "second > first"), (".safetensors", "first > second")])
def test_order_and_sums_of_layers_are_asked_for(tmp_path: Path, suffix: str, order: str) -> None:
    """Names are in alphabetical order in a file of safetensors. Samples show that these layers are residual."""
    model, file = nn.ModuleDict({name: nn.LSTM(HIDDEN, HIDDEN) for name in ("second", "first")}), tmp_path / f"weights{suffix}"

    def run(row: Tensor) -> dict[str, Tensor]:
        row = row + model["second"](row)[0]
        return {"sequence": row + model["first"](row)[0]}

    (torch.save if suffix == ".pt" else save_file)(randomize(model).state_dict(), file)
    assert_asks(tmp_path, file, f"- {order}: layers in this order", "residual", "--check FILE.npz")
    assert_asks(tmp_path, file, "the largest difference is", check=expected(run, random_features(features=HIDDEN)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("both", [False, True])
def test_options_of_sru_are_asked_for(tmp_path: Path, both: bool) -> None:
    """The older package has no weights of the cell."""
    model = random_module(Case("", lambda: OverRows(FEATURES, 2, bidirectional=both, use_tanh=True, v1=True)))
    state = {name: array for name, array in model.state_dict().items() if not name.endswith(("weight_c", "scale_x"))}
    file = write(tmp_path, state)
    recipe = assert_asks(tmp_path, file, 'bidirectional = false, activation = "identity"')
    assert_asks(tmp_path, file, "its shapes tell neither", recipe=layer("sru", "encoder", bidirectional=both))
    recipe = recipe.replace("identity", "tanh").replace("bidirectional = false", f"bidirectional = {str(both).lower()}")
    import_file(tmp_path, file, recipe=recipe, check=expected(model, random_features()))


def test_recipe_samples_or_flag_answer(tmp_path: Path) -> None:
    """Outputs of every step prove no head, and short sequences nothing. The weights of a loss and lone numbers are no layer."""
    file = write(tmp_path, {"teacher": {"a": torch.ones(2)}, "student": {"a": torch.ones(2)}})
    assert main(["import", str(file), "--name", "model", "--models", str(tmp_path / "models")]) == 2
    assert_asks(tmp_path, file, "weights at teacher, student: add --weights NAME", weights="other")
    model = tagger(criterion=nn.CrossEntropyLoss(torch.ones(LABELS)))
    model.similarity = nn.Parameter(torch.ones(1))
    file, check = save(tmp_path, model), expected(model, random_ids())
    texts = "- criterion: weights of a loss", "- similarity: numbers that no layer needs", "- head.kind: ", "- head.pool: "
    recipe = assert_asks(tmp_path, file, *texts)
    steps = {name: check[name] for name in ("ids", "offsets", "sequence")}
    for given in ("", LAYERS + '[head]\nfrom = "classifier"\n'):
        assert_asks(tmp_path, file, "- head.kind: ", recipe=given, check=steps)
    assert_asks(tmp_path, file, "- head.kind: ", check={name: array for name, array in check.items() if name != "scores"})
    assert_asks(tmp_path, file, "no sequence in check.npz has two steps", check=expected(model, random_ids([1, 1])))
    assert any(line.startswith('assumed: head.kind: "classify"') for line in import_file(tmp_path, file, assume=True))
    assert '- head.kind: "classify"' in (tmp_path / "models" / "imported" / "1" / "card.md").read_text()
    (tmp_path / "labels.txt").write_text("far\nnear\n\nunknown\n")
    import_file(tmp_path, file, check=check, labels=tmp_path / "labels.txt", max_steps=77)
    imported = spec.read(tmp_path / "models" / "imported" / "2")
    assert (getattr(imported.head, "labels", ()), imported.input.max_steps) == (("far", "near", "unknown"), 77)
    for answers in ({"check": check}, {"recipe": recipe}, {"recipe": 'head = {kind = "tag"}', "check": steps}):
        assert "  criterion.weight is not used" in import_file(tmp_path, file, **answers)


def dropped(model: Any, place: str) -> dict[str, Tensor]:
    """Return tensors with a weight before its dropout, and a copy after it, as wrappers for weight drops have them."""
    state = {name.replace("rnn.", "rnn.module."): value for name, value in model.state_dict().items()}
    raw = state["rnn.module.weight_hh_l0"]
    return {f"{place}.weight_hh_l0_raw": raw, **state, "rnn.module.weight_hh_l0": raw * 0}


def normed(norm: Callable[..., Any], dim: int | None, model: Any) -> dict[str, Tensor]:
    norm(model.rnn, "weight_hh_l0", dim)
    return randomize(model).state_dict()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "build, weights",
    [
        (lambda model: {"loss": torch.ones(()), "optimizer": OPTIMIZER, "model": model.state_dict()}, None),
        (lambda model: dict(model.named_parameters()), None),
        (lambda model: {"teacher": tagger().state_dict(), "student": model.state_dict()}, "student"),
        (lambda model: {name: part.state_dict() for name, part in model.named_children()}, "embedding,rnn,classifier"),
        *((partial(dropped, place=place), None) for place in ("rnn", "rnn.module")),
        *((partial(normed, nn.utils.weight_norm, dim), None) for dim in (0, None)),
        (partial(normed, parametrizations.weight_norm, 0), None),
        (lambda model: {name: torch._neg_view(-tensor) for name, tensor in model.state_dict().items()}, None),
    ],
)
def test_weights_are_read_as_they_compute(tmp_path: Path, build: Callable[[Any], Any], weights: str | None) -> None:
    model = tagger()
    import_file(tmp_path, write(tmp_path, build(model)), weights=weights, check=expected(model, random_ids()))


def test_tied_embedding_is_read(tmp_path: Path) -> None:
    model = tagger(classifier=nn.Linear(4, VOCABULARY), rnn=nn.LSTM(4, 4))
    model.classifier.weight = model.embedding.weight
    save_model(model, str(tmp_path / "weights.safetensors"))
    check = {name: array for name, array in expected(model, random_ids()).items() if name != "scores"}
    import_file(tmp_path, tmp_path / "weights.safetensors", check=check, recipe='head.kind = "next"')


def test_tensor_that_a_layer_lacks_is_never_ignored(tmp_path: Path) -> None:
    assert_asks(
        tmp_path, write(tmp_path, {"fc.weight_raw": torch.ones(2, 3)}), "fc has the tensors weight_raw (2, 3), which no"
    )
    file = write(tmp_path, {**tagger().state_dict(), "rnn.weight_ci": torch.ones(HIDDEN)})
    assert_asks(tmp_path, file, "weight_ci (5,), which no layer is known to have")
    with pytest.raises(Exception, match="no layer is known to have all of them"):
        import_file(tmp_path, file, recipe=LAYERS + SEQUENCE)


@pytest.mark.parametrize("score", [nn.Linear(HIDDEN, 1), nn.Sequential(nn.Linear(HIDDEN, 4), nn.Tanh(), nn.Linear(4, 1))])
def test_linear_score_is_an_attention(tmp_path: Path, score: nn.Module) -> None:
    model = tagger(score=score)

    def run(ids: Tensor) -> dict[str, Tensor]:
        steps = model(ids)["sequence"]
        return {"logits": model.classifier((model.score(steps).softmax(0) * steps).sum(0))}

    file, head = save(tmp_path, model), LAYERS + '[head]\nkind = "classify"\nfrom = "classifier"\nattention_from = '
    assert_asks(tmp_path, file, "classifier make no attention pool", recipe=head + '"classifier"')
    import_file(tmp_path, file, recipe=head + '"score"', check=expected(run, random_ids()))
