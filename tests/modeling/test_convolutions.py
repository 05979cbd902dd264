"""Convolutional layers: padding, causality, text CNNs, and norms that are folded into filters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.ragged import Outputs, Ragged
from service.errors import ModelError
from service.modeling import layer_builder
from service.modeling.layer_builder import NamedLayer
from service.modeling.spec.layers import ConvLayer
from service.modeling.stored_weights import wrong_values
from tests.kernels.inputs import EVERYTHING
from tests.modeling.random_models import CONVOLUTIONS, CPU, HIDDEN, Form
from tests.modeling.test_layers import features

LENGTHS = [9, 1, 14, 3, 0, 2]
MAXIMUM = Outputs(max=True)


@pytest.mark.parametrize(
    "name, tensor, wrong",
    [
        ("layers.0.norm", [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [1.0, -0.5]], "a negative variance, -0.5 of map 1"),
        ("layers.0.direction", [[[1.0, 0.0]], [[0.5, 0.0]]], "is zero for map 1"),
        ("layers.1.0.1.direction", [[[0.0] * 3], [[0.0] * 3]], "is zero for map 0"),
        ("layers.0.norm", [[0.0] * 3] * 4, None),
        ("layers.0.0.norm", [[-1.0] * 3] * 2, None),
        ("layers.0.direction", [[[1.0] * 3], [[1.0] * 3]], None),
    ],
)
def test_norm_is_refused_if_it_cannot_be_folded(name: str, tensor: list[Tensor], wrong: str | None) -> None:
    message = wrong_values(name, torch.tensor(tensor))
    assert message is None if wrong is None else wrong in (message or "")


def test_filters_that_overflow_with_their_norm_are_refused() -> None:
    """Requests would be blamed for values that are not finite."""
    layer = ConvLayer(kind="conv", filters=1, width=1, batch_norm=True)
    norm = torch.tensor([[3e38], [0.0], [0.0], [0.0]])
    arrays = {"filters": torch.ones(1, 2, 1), "bias": torch.zeros(1), "norm": norm}
    with pytest.raises(ModelError, match=r"layers\.0: with its norms folded in, the filters have values above the range"):
        layer_builder.build_parts([NamedLayer("layers.0", layer, 2, arrays)], CPU)


@pytest.mark.parametrize("form", CONVOLUTIONS, ids=str)
def test_only_causal_convolutions_ignore_later_steps(form: Form) -> None:
    spec, x = form.spec, features(lengths=[12])
    assert isinstance(spec, ConvLayer)
    changed = Ragged(x.data.clone(), x.offsets)
    changed.data[7:] += 10.0
    before, after = (form.built()(each, EVERYTHING).steps for each in (x, changed))
    assert before is not None and after is not None
    unseen = -(-7 // spec.stride)  # output steps whose current input step is before the change
    blind = spec.padding == "causal" or spec.width == 1
    assert bool((before[:unseen] == after[:unseen]).all()) == blind


def test_filter_wider_than_its_row_outputs_zeros() -> None:
    encoded = Form("text_cnn", widths=(4, 1)).built()(features(lengths=[2, 4]), MAXIMUM)
    assert encoded.max is not None
    wide, narrow = encoded.max[:, :HIDDEN], encoded.max[:, HIDDEN:]
    assert not wide[0].any() and wide[1].any() and narrow[0].any()
