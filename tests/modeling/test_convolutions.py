"""Convolutional layers beside torch.nn.Conv1d: what comes out of each row, and how many steps."""

from __future__ import annotations

import pytest
import torch

from kernels.contract import Encoded, Outputs, Ragged
from service.modeling import layers
from service.modeling.spec import ConvLayer
from tests.kernels import inputs
from tests.kernels.inputs import EVERYTHING, assert_close
from tests.modeling import baselines
from tests.modeling.baselines import Form

CPU = torch.device("cpu")
LENGTHS = [9, 1, 14, 3, 0, 2]
MAXIMUM = Outputs(max=True)
every_conv = pytest.mark.parametrize("form", [*baselines.CONVOLUTIONS, *baselines.TCNS], ids=str)
every_single_conv = pytest.mark.parametrize("form", baselines.CONVOLUTIONS, ids=str)
every_text_cnn = pytest.mark.parametrize("form", baselines.TEXT_CNNS, ids=str)


def features(lengths: list[int]) -> Ragged:
    return inputs.ragged(baselines.made_up_rows(lengths), lengths)


def encode(form: Form, x: Ragged, want: Outputs) -> Encoded:
    return layers.build(form.spec, baselines.FEATURES, form.peer(baselines.FEATURES).arrays(), CPU)(x, want)


@every_conv
def test_a_convolutional_layer_is_its_plain_peer_on_each_row(form: Form) -> None:
    peer, x = form.peer(baselines.FEATURES), features(LENGTHS)
    encoded = encode(form, x, EVERYTHING)
    assert encoded.last is not None and encoded.mean is not None and encoded.max is not None
    for row, (data, ours) in enumerate(zip(inputs.rows(x), inputs.steps_by_row(encoded, x), strict=True)):
        steps = peer(data.double()) if len(data) else ours.new_zeros(0, form.spec.outputs)
        assert ours.shape == steps.shape
        assert_close(ours, steps, steps=0)
        pools = (encoded.last[row], encoded.mean[row], encoded.max[row])
        expected = (steps[-1], steps.mean(0), steps.amax(0)) if len(steps) else [torch.zeros(form.spec.outputs)] * 3
        for one, other in zip(pools, expected, strict=True):
            assert_close(one, other, steps=len(data))


@pytest.mark.parametrize("dilation", [1, 3])
@pytest.mark.parametrize("width", [1, 2, 3, 6])
@pytest.mark.parametrize("padding", ["same", "causal"])
def test_a_padded_convolution_gives_a_step_for_every_step(padding: str, width: int, dilation: int) -> None:
    form, x = Form("conv", padding=padding, width=width, dilation=dilation), features(LENGTHS)
    encoded = encode(form, x, EVERYTHING)
    assert encoded.offsets is None
    assert [len(row) for row in inputs.steps_by_row(encoded, x)] == LENGTHS


@every_single_conv
def test_a_causal_convolution_alone_sees_no_step_to_come(form: Form) -> None:
    spec = form.spec
    assert isinstance(spec, ConvLayer)
    x = features([12])
    changed = Ragged(x.data.clone(), x.offsets)
    changed.data[7:] += 10.0
    before, after = encode(form, x, EVERYTHING).steps, encode(form, changed, EVERYTHING).steps
    assert before is not None and after is not None
    unseen = -(-7 // spec.stride)  # the steps out whose present step in is before the change
    blind = spec.padding == "causal" or spec.width == 1
    assert bool((before[:unseen] == after[:unseen]).all()) == blind


@every_text_cnn
def test_a_text_cnn_is_the_plain_one_on_each_row(form: Form) -> None:
    x = features(LENGTHS[:4])
    encoded = encode(form, x, MAXIMUM)
    assert encoded.max is not None
    for row, data in enumerate(inputs.rows(x)):
        assert_close(encoded.max[row], form.peer(baselines.FEATURES)(data.double())[0], steps=0)


@every_text_cnn
def test_what_a_text_cnn_gives_of_a_row_does_not_depend_on_its_neighbours(form: Form) -> None:
    x = features(LENGTHS)
    together = encode(form, x, MAXIMUM).max
    alone = [encode(form, inputs.joined([row]), MAXIMUM).max for row in inputs.rows(x)]
    assert together is not None
    for mine, one in zip(together, alone, strict=True):
        assert one is not None
        assert_close(mine, one[0], steps=0)


def test_a_filter_wider_than_its_row_gives_zeros_and_the_others_what_they_saw() -> None:
    form = Form("text_cnn", widths=(4, 1))
    encoded = encode(form, features([2, 4]), MAXIMUM)
    assert encoded.max is not None
    wide, narrow = encoded.max[:, : baselines.HIDDEN], encoded.max[:, baselines.HIDDEN :]
    assert not wide[0].any() and wide[1].any() and narrow[0].any()


def test_a_text_cnn_that_is_given_the_head_s_linear_layer_gives_its_scores_too() -> None:
    form, x = Form("text_cnn"), features(LENGTHS)
    runs = layers.build(form.spec, baselines.FEATURES, form.peer(baselines.FEATURES).arrays(), CPU)
    without = runs(x, MAXIMUM)
    weight, bias = torch.randn(form.spec.outputs, 4), torch.randn(4)
    runs.linear = weight, bias
    encoded = runs(x, MAXIMUM)
    assert without.scores is None and without.max is not None and encoded.max is not None and encoded.scores is not None
    assert torch.equal(encoded.max, without.max)
    assert_close(encoded.scores, without.max.double() @ weight.double() + bias.double(), steps=0)
