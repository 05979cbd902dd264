"""Convolutional layers compared with torch.nn.Conv1d: the outputs of each row and their number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.ragged import Encoded, Outputs, Ragged
from service.errors import ModelError
from service.modeling import layer_builder
from service.modeling.layer_builder import NamedLayer
from service.modeling.spec import ConvLayer
from service.modeling.stored_weights import wrong_values
from tests.kernels import inputs
from tests.kernels.inputs import EVERYTHING, assert_close
from tests.modeling import reference_layers
from tests.modeling.reference_layers import Form

CPU = torch.device("cpu")
LENGTHS = [9, 1, 14, 3, 0, 2]
MAXIMUM = Outputs(max=True)
every_conv = pytest.mark.parametrize("form", [*reference_layers.CONVOLUTIONS, *reference_layers.TCNS], ids=str)
every_single_conv = pytest.mark.parametrize("form", reference_layers.CONVOLUTIONS, ids=str)
every_text_cnn = pytest.mark.parametrize("form", reference_layers.TEXT_CNNS, ids=str)


def features(lengths: list[int]) -> Ragged:
    return inputs.ragged(reference_layers.made_up_rows(lengths), lengths)


def encode(form: Form, x: Ragged, want: Outputs) -> Encoded:
    return layer_builder.build_layer(
        form.spec, reference_layers.FEATURES, form.reference(reference_layers.FEATURES).arrays(), CPU
    )(x, want)


@pytest.mark.parametrize(
    ("name", "tensor", "wrong"),
    [
        (
            "layers.0.norm",
            torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [1.0, -0.5]]),
            "a negative variance, -0.5 of map 1",
        ),
        ("layers.0.direction", torch.tensor([[[1.0, 0.0]], [[0.5, 0.0]]]), "is zero for map 1"),
        ("layers.1.0.1.direction", torch.zeros(2, 1, 3), "is zero for map 0"),
    ],
)
def test_norm_that_cannot_be_folded_is_refused(name: str, tensor: Tensor, wrong: str) -> None:
    message = wrong_values(name, tensor)
    assert message is not None and wrong in message


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("layers.0.norm", torch.zeros(4, 3)), ("layers.0.0.norm", -torch.ones(2, 3)), ("layers.0.direction", torch.ones(2, 1, 3))],
)
def test_norm_that_can_be_folded_is_accepted(name: str, tensor: Tensor) -> None:
    assert wrong_values(name, tensor) is None


def test_filters_that_overflow_with_their_norm_are_refused() -> None:
    """Requests would be blamed for values that are not finite."""
    layer = ConvLayer(kind="conv", filters=1, width=1, batch_norm=True)
    norm = torch.tensor([[3e38], [0.0], [0.0], [0.0]])
    arrays = {"filters": torch.ones(1, 2, 1), "bias": torch.zeros(1), "norm": norm}
    with pytest.raises(ModelError, match=r"layers\.0: with its norms folded in, the filters have values above the range"):
        layer_builder.build_parts([NamedLayer("layers.0", layer, 2, arrays)], CPU)


@every_conv
def test_convolution_agrees_with_torch_on_each_row(form: Form) -> None:
    reference, x = form.reference(reference_layers.FEATURES), features(LENGTHS)
    encoded = encode(form, x, EVERYTHING)
    assert encoded.last is not None and encoded.mean is not None and encoded.max is not None
    for row, (data, actual) in enumerate(zip(inputs.rows(x), inputs.steps_by_row(encoded, x), strict=True)):
        steps = reference(data.double()) if len(data) else actual.new_zeros(0, form.spec.outputs)
        assert actual.shape == steps.shape
        assert_close(actual, steps, steps=0)
        pools = (encoded.last[row], encoded.mean[row], encoded.max[row])
        expected = (steps[-1], steps.mean(0), steps.amax(0)) if len(steps) else [torch.zeros(form.spec.outputs)] * 3
        for one, other in zip(pools, expected, strict=True):
            assert_close(one, other, steps=len(data))


@pytest.mark.parametrize("dilation", [1, 3])
@pytest.mark.parametrize("width", [1, 2, 3, 6])
@pytest.mark.parametrize("padding", ["same", "causal"])
def test_padded_convolution_keeps_the_number_of_steps(padding: str, width: int, dilation: int) -> None:
    form, x = Form("conv", padding=padding, width=width, dilation=dilation), features(LENGTHS)
    encoded = encode(form, x, EVERYTHING)
    assert encoded.offsets is None
    assert [len(row) for row in inputs.steps_by_row(encoded, x)] == LENGTHS


@every_single_conv
def test_only_causal_convolutions_ignore_later_steps(form: Form) -> None:
    spec = form.spec
    assert isinstance(spec, ConvLayer)
    x = features([12])
    changed = Ragged(x.data.clone(), x.offsets)
    changed.data[7:] += 10.0
    before, after = encode(form, x, EVERYTHING).steps, encode(form, changed, EVERYTHING).steps
    assert before is not None and after is not None
    unseen = -(-7 // spec.stride)  # output steps whose current input step is before the change
    blind = spec.padding == "causal" or spec.width == 1
    assert bool((before[:unseen] == after[:unseen]).all()) == blind


@every_text_cnn
def test_text_cnn_agrees_with_torch_on_each_row(form: Form) -> None:
    x = features(LENGTHS[:4])
    encoded = encode(form, x, MAXIMUM)
    assert encoded.max is not None
    for row, data in enumerate(inputs.rows(x)):
        assert_close(encoded.max[row], form.reference(reference_layers.FEATURES)(data.double())[0], steps=0)


@every_text_cnn
def test_text_cnn_rows_are_independent_of_each_other(form: Form) -> None:
    x = features(LENGTHS)
    together = encode(form, x, MAXIMUM).max
    alone = [encode(form, inputs.joined([row]), MAXIMUM).max for row in inputs.rows(x)]
    assert together is not None
    for mine, one in zip(together, alone, strict=True):
        assert one is not None
        assert_close(mine, one[0], steps=0)


def test_filter_wider_than_its_row_outputs_zeros() -> None:
    form = Form("text_cnn", widths=(4, 1))
    encoded = encode(form, features([2, 4]), MAXIMUM)
    assert encoded.max is not None
    wide, narrow = encoded.max[:, : reference_layers.HIDDEN], encoded.max[:, reference_layers.HIDDEN :]
    assert not wide[0].any() and wide[1].any() and narrow[0].any()


def test_text_cnn_applies_the_linear_layer_of_the_head() -> None:
    form, x = Form("text_cnn"), features(LENGTHS)
    runnable = layer_builder.build_layer(
        form.spec, reference_layers.FEATURES, form.reference(reference_layers.FEATURES).arrays(), CPU
    )
    without = runnable(x, MAXIMUM)
    weight, bias = torch.randn(form.spec.outputs, 4), torch.randn(4)
    runnable.linear = weight, bias
    encoded = runnable(x, MAXIMUM)
    assert without.scores is None and without.max is not None and encoded.max is not None and encoded.scores is not None
    assert torch.equal(encoded.max, without.max)
    assert_close(encoded.scores, without.max.double() @ weight.double() + bias.double(), steps=0)
