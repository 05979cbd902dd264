"""Variables of TensorFlow 1 are imported and compute the same as there, or are refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.importers.draft import ImportQuestion, ImportRefused
from service.modeling.npz import read_npz
from tests.importers.importing import import_file, layer

CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"
"""Variables of cells of tensorflow.compat.v1 2.21.0 with samples of their outputs. Commit 3b52ca9 has the script that wrote them."""
SEQUENCE = '[head]\nkind = "sequence"\n'
RECIPES = {
    "forget_bias": layer("lstm", "rnn", forget_bias=0.0) + SEQUENCE,
    "classifier": 'head.kind = "classify"',
    "tagger": layer("embedding", "words") + layer("gru", "bidirectional_rnn") + layer("dense", "tags") + SEQUENCE,
}
IN_SHORT = (
    *("BasicRNNCell_both", "BasicLSTMCell", "LSTMCell_levels", "GRUCell", "CudnnCompatibleLSTMCell"),
    *("CudnnCompatibleGRUCell_stack", "peepholes", "projection", *RECIPES),
)
Variables = dict[str, Any]


def assert_computes_the_same(name: str, folder: Path) -> None:
    samples = read_npz(CHECKPOINTS / f"samples_{name}.npz")
    output = "logits" if name == "classifier" else "output"
    check = {**{key: array for key, array in samples.items() if key != "output"}, output: samples["output"]}
    import_file(folder, CHECKPOINTS / f"{name}.npz", check=check, recipe=RECIPES.get(name, SEQUENCE))


@pytest.mark.parametrize("name", IN_SHORT)
def test_imported_model_computes_the_same(tmp_path: Path, name: str) -> None:
    assert_computes_the_same(name, tmp_path)


def cell(place: str, inputs: int = 3, units: int = 3) -> Variables:
    """Return the variables of a GRU."""
    shapes = {
        "gates/kernel": (inputs + units, 2 * units),
        "gates/bias": (2 * units,),
        "candidate/kernel": (inputs + units, units),
        "candidate/bias": (units,),
    }
    return {f"{place}/{name}": np.ones(shape, np.float32) for name, shape in shapes.items()}


STACKS = [f"bidirectional_rnn/{way}/multi_rnn_cell/cell_{level}/gru_cell" for way in ("fw", "bw") for level in (0, 1)]
NEEDS_RECIPE = r"write a recipe with \[\[layers\]\]"
RNN = cell("rnn/gru_cell")
WRONG: dict[str, tuple[Variables, str]] = {
    "a recurrent layer twice": ({**cell("first/rnn/gru_cell"), **cell("second/rnn/gru_cell")}, NEEDS_RECIPE),
    "directions in separate stacks": (
        {name: array for place in STACKS for name, array in cell(place).items()},
        "are not joined at every level",
    ),
    "a convolution": ({"conv/kernel": np.ones((3, 3, 3), np.float32), **RNN}, NEEDS_RECIPE),
    "a missing variable": (
        {name: array for name, array in RNN.items() if not name.endswith("candidate/bias")},
        "a gru_cell has no variable candidate/bias",
    ),
    **{
        message: ({**RNN, f"rnn/gru_cell/{name}": array}, message)
        for name, array, message in (
            ("gates/kernel", np.full((6, 6), np.nan, np.float32), "has values that are not finite"),
            ("gates/kernel", np.ones((6, 0), np.float32), "has no numbers"),
            ("gates/kernel", np.ones((6, 6), np.int64), "weights are floating-point numbers"),
            ("gates/kernel", np.ones((6, 5), np.float32), r"layers\.0\.0\.forward\.input .* has the shape"),
            ("candidate/kernel", np.ones((7, 3), np.float32), "its variables do not fit together"),
            ("candidate/bias", np.ones((), np.float32), "variables do not fit together"),
        )
    },
}


@pytest.mark.parametrize("variables, message", WRONG.values(), ids=WRONG)
def test_wrong_variables_are_refused_with_the_reason(tmp_path: Path, variables: Variables, message: str) -> None:
    np.savez(tmp_path / "weights.npz", **variables)
    with pytest.raises(ImportRefused, match=message):
        import_file(tmp_path, tmp_path / "weights.npz")


def test_variables_of_a_training_are_left_out(tmp_path: Path) -> None:
    slots = {f"{name}/Adam_1": array for name, array in RNN.items()}
    np.savez(tmp_path / "weights.npz", **RNN, **slots, global_step=np.array(7), beta1_power=np.array(0.9, np.float32))
    report = import_file(tmp_path, tmp_path / "weights.npz")
    assert not [line for line in report if "is not used" in line]


def test_recipe_without_from_lists_the_layers(tmp_path: Path) -> None:
    np.savez(tmp_path / "weights.npz", **cell("encoder/rnn/gru_cell"))
    with pytest.raises(ImportRefused, match="a gru layer of the recipe needs `from`: the layers are encoder"):
        import_file(tmp_path, tmp_path / "weights.npz", recipe='[[layers]]\nkind = "gru"\n')


@pytest.mark.parametrize("name, others", [("BasicLSTMCell", "forget_bias = 1.0"), ("classifier", "layers in this order")])
def test_what_variables_do_not_say_is_asked_for(tmp_path: Path, name: str, others: str) -> None:
    """The question ends with a recipe, which answers it."""
    with pytest.raises(ImportQuestion) as question:
        import_file(tmp_path, CHECKPOINTS / f"{name}.npz")
    assert others in str(question.value)
    import_file(tmp_path, CHECKPOINTS / f"{name}.npz", recipe=str(question.value).partition("corrected:\n")[2])
    import_file(tmp_path, CHECKPOINTS / "CudnnCompatibleLSTMCell.npz")
