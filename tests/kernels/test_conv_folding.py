"""Norms folded into filters, beside torch's own modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d
from torch.nn.utils.parametrizations import weight_norm

from kernels.conv.folding import fold_batch_norm, fold_weight_norm
from tests.kernels.inputs import assert_close

WIDTH, INPUTS, MAPS = 3, 7, 5
STORAGES = [torch.float32, torch.float16, torch.bfloat16]
every_storage = pytest.mark.parametrize("storage", STORAGES, ids=str)


def made_up(*shapes: tuple[int, ...], storage: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(storage) for shape in shapes]


def a_norm(maps: int = MAPS) -> Tensor:
    """Gain, offset and mean of both signs, and a variance."""
    [norm] = made_up((4, maps))
    norm[3] = norm[3].abs() + 0.1
    return norm


def torch_batch_norm(norm: Tensor, epsilon: float | None = None) -> torch.nn.BatchNorm1d:
    """With torch's own epsilon where none is given."""
    module = torch.nn.BatchNorm1d(norm.shape[1]).double().eval()
    module.eps = module.eps if epsilon is None else epsilon
    names = ("weight", "bias", "running_mean", "running_var")
    module.load_state_dict({**module.state_dict(), **dict(zip(names, norm.double(), strict=True))})
    return module.requires_grad_(False)


def test_a_folded_weight_norm_gives_torch_s_filters() -> None:
    direction, magnitude = made_up((WIDTH, INPUTS, MAPS), (MAPS,))
    module = weight_norm(torch.nn.Conv1d(INPUTS, MAPS, WIDTH).double()).requires_grad_(False)
    module.get_parameter("parametrizations.weight.original0").copy_(magnitude[:, None, None])
    module.get_parameter("parametrizations.weight.original1").copy_(direction.permute(2, 1, 0))
    filters = fold_weight_norm(direction, magnitude)
    assert_close(filters, module.weight.permute(2, 1, 0), steps=0)


def test_the_length_of_the_direction_does_not_matter_and_each_map_has_the_length_of_its_magnitude() -> None:
    direction, magnitude = made_up((WIDTH, INPUTS, MAPS), (MAPS,))
    filters = fold_weight_norm(direction, magnitude)
    assert_close(filters.double().square().sum((0, 1)).sqrt(), magnitude.abs(), steps=0)
    assert_close(fold_weight_norm(direction * torch.tensor([0.1, 3.0, 1.0, 70.0, 9.0]), magnitude), filters, steps=0)


@pytest.mark.parametrize("epsilon", [1e-5, 0.1])
def test_a_folded_batch_norm_gives_what_torch_s_gives_after_the_convolution(epsilon: float) -> None:
    filters, bias, x = made_up((WIDTH, INPUTS, MAPS), (MAPS,), (2, INPUTS, 11))
    norm, x = a_norm(), x.double()
    expected = torch_batch_norm(norm, epsilon)(conv1d(x, filters.double().permute(2, 1, 0), bias.double()))
    folded, shifted = fold_batch_norm(filters, bias, norm, epsilon)
    assert_close(conv1d(x, folded.double().permute(2, 1, 0), shifted.double()), expected, steps=INPUTS * WIDTH)


def test_the_epsilon_of_a_batch_norm_is_torch_s() -> None:
    filters, bias = made_up((WIDTH, INPUTS, MAPS), (MAPS,))
    norm = a_norm()
    norm[3] = 1e-6  # so that the epsilon is most of what is divided by
    folded, _ = fold_batch_norm(filters, bias, norm)
    scale = torch_batch_norm(norm)(torch.ones(1, MAPS).double()) - torch_batch_norm(norm)(torch.zeros(1, MAPS).double())
    torch.testing.assert_close(folded.double(), filters.double() * scale, rtol=1e-5, atol=0.0)


@every_storage
def test_both_norms_are_computed_in_float32_and_rounded_once_to_the_dtype_of_the_filters(storage: torch.dtype) -> None:
    filters, magnitude, bias = made_up((WIDTH, INPUTS, MAPS), (MAPS,), (MAPS,), storage=storage)
    norm = a_norm().to(storage)
    given = fold_weight_norm(filters, magnitude), *fold_batch_norm(filters, bias, norm)
    exact = fold_weight_norm(filters.float(), magnitude.float()), *fold_batch_norm(filters.float(), bias.float(), norm.float())
    for one, wide in zip(given, exact, strict=True):
        assert one.dtype == storage
        assert torch.equal(one, wide.to(storage))


def test_of_both_norms_the_weight_norm_comes_first() -> None:
    direction, magnitude, bias, x = made_up((WIDTH, INPUTS, MAPS), (MAPS,), (MAPS,), (1, INPUTS, 9))
    norm = a_norm()
    filters, shifted = fold_batch_norm(fold_weight_norm(direction, magnitude), bias, norm)
    length = direction.double().square().sum((0, 1)).sqrt()
    plain = conv1d(x.double(), (direction.double() * magnitude.double() / length).permute(2, 1, 0), bias.double())
    folded = conv1d(x.double(), filters.double().permute(2, 1, 0), shifted.double())
    assert_close(folded, torch_batch_norm(norm)(plain), steps=INPUTS * WIDTH)
