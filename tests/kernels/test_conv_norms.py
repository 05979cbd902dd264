"""Norms folded into filters, compared with torch's modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d
from torch.nn.utils.parametrizations import weight_norm

from kernels.conv.norms import fold_batch_norm, fold_weight_norm
from tests.kernels.inputs import assert_close

WIDTH, INPUTS, MAPS = 3, 7, 5
STORAGES = [torch.float32, torch.float16, torch.bfloat16]
every_storage = pytest.mark.parametrize("storage", STORAGES, ids=str)


def made_up(*shapes: tuple[int, ...], storage: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(storage) for shape in shapes]


def a_norm(maps: int = MAPS) -> Tensor:
    """Return gain, offset and mean with both signs, and a positive variance."""
    [norm] = made_up((4, maps))
    norm[3] = norm[3].abs() + 0.1
    return norm


def torch_batch_norm(norm: Tensor, epsilon: float | None = None) -> torch.nn.BatchNorm1d:
    """Return torch's batch norm, by default with torch's epsilon."""
    module = torch.nn.BatchNorm1d(norm.shape[1]).double().eval()
    module.eps = module.eps if epsilon is None else epsilon
    names = ("weight", "bias", "running_mean", "running_var")
    module.load_state_dict({**module.state_dict(), **dict(zip(names, norm.double(), strict=True))})
    return module.requires_grad_(False)


def test_weight_norm_agrees_with_torch() -> None:
    direction, magnitude = made_up((WIDTH, INPUTS, MAPS), (MAPS,))
    module = weight_norm(torch.nn.Conv1d(INPUTS, MAPS, WIDTH).double()).requires_grad_(False)
    module.get_parameter("parametrizations.weight.original0").copy_(magnitude[:, None, None])
    module.get_parameter("parametrizations.weight.original1").copy_(direction.permute(2, 1, 0))
    filters = fold_weight_norm(direction, magnitude)
    assert_close(filters, module.weight.permute(2, 1, 0), steps=0)


def test_weight_norm_depends_on_direction_and_magnitude_only() -> None:
    direction, magnitude = made_up((WIDTH, INPUTS, MAPS), (MAPS,))
    filters = fold_weight_norm(direction, magnitude)
    assert_close(filters.double().square().sum((0, 1)).sqrt(), magnitude.abs(), steps=0)
    assert_close(fold_weight_norm(direction * torch.tensor([0.1, 3.0, 1.0, 70.0, 9.0]), magnitude), filters, steps=0)


@pytest.mark.parametrize("epsilon", [1e-5, 0.1])
def test_batch_norm_agrees_with_torch(epsilon: float) -> None:
    filters, bias, x = made_up((WIDTH, INPUTS, MAPS), (MAPS,), (2, INPUTS, 11))
    norm, x = a_norm(), x.double()
    expected = torch_batch_norm(norm, epsilon)(conv1d(x, filters.double().permute(2, 1, 0), bias.double()))
    folded, shifted = fold_batch_norm(filters, bias, norm, epsilon)
    assert_close(conv1d(x, folded.double().permute(2, 1, 0), shifted.double()), expected, steps=INPUTS * WIDTH)


def test_epsilon_of_batch_norm_is_that_of_torch() -> None:
    filters, bias = made_up((WIDTH, INPUTS, MAPS), (MAPS,))
    norm = a_norm()
    norm[3] = 1e-6  # so that epsilon dominates the denominator
    folded, _ = fold_batch_norm(filters, bias, norm)
    scale = torch_batch_norm(norm)(torch.ones(1, MAPS).double()) - torch_batch_norm(norm)(torch.zeros(1, MAPS).double())
    torch.testing.assert_close(folded.double(), filters.double() * scale, rtol=1e-5, atol=0.0)


@every_storage
def test_norms_are_computed_in_float32_and_rounded_once(storage: torch.dtype) -> None:
    filters, magnitude, bias = made_up((WIDTH, INPUTS, MAPS), (MAPS,), (MAPS,), storage=storage)
    norm = a_norm().to(storage)
    given = fold_weight_norm(filters, magnitude), *fold_batch_norm(filters, bias, norm)
    exact = fold_weight_norm(filters.float(), magnitude.float()), *fold_batch_norm(filters.float(), bias.float(), norm.float())
    for one, wide in zip(given, exact, strict=True):
        assert one.dtype == storage
        assert torch.equal(one, wide.to(storage))


def test_weight_norm_is_folded_before_batch_norm() -> None:
    direction, magnitude, bias, x = made_up((WIDTH, INPUTS, MAPS), (MAPS,), (MAPS,), (1, INPUTS, 9))
    norm = a_norm()
    filters, shifted = fold_batch_norm(fold_weight_norm(direction, magnitude), bias, norm)
    length = direction.double().square().sum((0, 1)).sqrt()
    plain = conv1d(x.double(), (direction.double() * magnitude.double() / length).permute(2, 1, 0), bias.double())
    folded = conv1d(x.double(), filters.double().permute(2, 1, 0), shifted.double())
    assert_close(folded, torch_batch_norm(norm)(plain), steps=INPUTS * WIDTH)
