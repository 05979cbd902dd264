"""Models in int8: the content of their files, the arrays read from them, and every file that is rejected."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from kernels.quantized import dequantize, quantize
from service.errors import ModelError
from service.modeling import store
from service.modeling.encoder import Encoder
from service.modeling.spec import WEIGHTS, ModelSpec, read
from tests.modeling.reference_layers import EVERY_LAYER, Form
from tests.modeling.reference_model import ReferenceModel, reference_model
from tests.modeling.test_encoder import CPU, batch, scores

BIAS, INPUT, SCALE = "layers.1.0.forward.bias", "layers.1.0.forward.input", "layers.1.0.forward.input.scale"
TOLERANCE = 0.05
"""Share of the largest output: several times the change by 8-bit activations, and less than the change by a wrong scale."""
every_layer = pytest.mark.parametrize("form", EVERY_LAYER, ids=str)


def written(root: Path, model: ReferenceModel) -> tuple[Path, ModelSpec]:
    folder = root / "reference" / "1"
    return folder, store.write(folder, model.spec("int8"), model.arrays(), card="made up")


def rewritten(tmp_path: Path, changes: dict[str, Tensor | None]) -> str:
    """Return the error of an int8 file with some tensors replaced, or removed."""
    folder, model = written(tmp_path, reference_model())
    stored: dict[str, Tensor | None] = {**load((folder / WEIGHTS).read_bytes()), **changes}
    content = save({name: tensor for name, tensor in stored.items() if tensor is not None})
    (folder / WEIGHTS).write_bytes(content)
    signed = model.model_copy(update={"sha256": {WEIGHTS: hashlib.sha256(content).hexdigest()}})
    with pytest.raises(ModelError) as caught:
        store.read_arrays(folder, signed)
    return str(caught.value).removeprefix(f"{folder / WEIGHTS}: ")


@every_layer
def test_matrices_are_stored_as_numbers_and_scales(tmp_path: Path, form: Form) -> None:
    model = reference_model(form)
    folder, described = written(tmp_path, model)
    stored, arrays = load((folder / WEIGHTS).read_bytes()), model.arrays()
    matrices = {name for name in arrays if name.split(".")[-1] in ("weight", "input", "recurrent", "projection", "filters")}
    assert stored.keys() == arrays.keys() | {f"{name}.scale" for name in matrices}
    assert {name for name, tensor in stored.items() if tensor.dtype == torch.int8} == matrices
    assert all(tensor.dtype == torch.float32 for name, tensor in stored.items() if name not in matrices)
    assert all(stored[f"{name}.scale"].shape == arrays[name].shape[-1:] for name in matrices)
    assert matrices == set(described.matrices())


@every_layer
def test_arrays_are_numbers_times_their_scales(tmp_path: Path, form: Form) -> None:
    model = reference_model(form)
    folder, described = written(tmp_path, model)
    arrays, originals = store.read_arrays(folder, read(folder)), model.arrays()
    assert {name: tuple(array.shape) for name, array in arrays.items()} == described.tensors()
    for name, array in originals.items():
        expected = dequantize(*quantize(array)) if name in described.matrices() else array
        assert torch.equal(arrays[name], expected)
        largest = array.abs().amax(tuple(range(array.dim() - 1)))
        assert ((arrays[name] - array).abs() <= 0.51 * largest / 127).all(), "no more than half of a step, and its rounding"


@every_layer
def test_writing_what_was_read_gives_the_same_bytes(tmp_path: Path, form: Form) -> None:
    folder, described = written(tmp_path, reference_model(form))
    again = tmp_path / "again" / "reference" / "1"
    rewritten = store.write(again, described, store.read_arrays(folder, described), card="made up")
    assert rewritten == described
    assert (again / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()


def test_quantizing_twice_changes_nothing() -> None:
    """Numbers and scales survive, whatever the last bits of the scales are."""
    weight = torch.randn(5, 20_000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-34, 37, 20_000)
    numbers, scales = quantize(weight)
    assert numbers.abs().amax(0).eq(127).all()
    again, scales_again = quantize(dequantize(numbers, scales))
    assert torch.equal(again, numbers) and torch.equal(scales_again, scales)


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1e-37])
def test_column_without_a_normal_scale_becomes_zeros(value: float) -> None:
    numbers, scales = quantize(torch.tensor([[value, 1.0], [-value, -2.0]]))
    assert numbers.tolist() == [[0, 64], [0, -127]]
    assert scales[0] == 0 and scales[1] == pytest.approx(2 / 127, rel=2**-8)


@every_layer
def test_int8_model_is_close_to_its_weights_in_float32(tmp_path: Path, form: Form) -> None:
    model = reference_model(form)
    folder, described = written(tmp_path, model)
    arrays = store.read_arrays(folder, described)
    int8, exact = Encoder(described, arrays, CPU)(batch(model)), Encoder(model.spec(), arrays, CPU)(batch(model))
    actual, expected = int8.head_output.embedding, exact.head_output.embedding
    assert actual is not None and expected is not None
    assert (actual - expected).abs().max() <= TOLERANCE * expected.abs().max()
    assert (scores(int8) - scores(exact)).abs().max() <= TOLERANCE


@pytest.mark.parametrize(
    "name, tensor, message",
    [
        (INPUT, None, f"the tensor {INPUT} of shape (7, 20) is missing"),
        (SCALE, None, f"the tensor {SCALE} of shape (20,) is missing"),
        (f"{BIAS}.scale", torch.ones(20), f"the tensor {BIAS}.scale belongs to no layer of model.toml"),
        (SCALE, torch.ones(7), f"{SCALE} has shape (7,), model.toml requires (20,)"),
        (INPUT, torch.zeros(7, 20), f"{INPUT} is torch.float32, the precision int8 in model.toml requires torch.int8"),
        (BIAS, torch.zeros(20).half(), f"{BIAS} is torch.float16, the precision int8 in model.toml requires torch.float32"),
        (SCALE, torch.ones(20).double(), f"{SCALE} is torch.float64, the precision int8 in model.toml requires torch.float32"),
        (SCALE, torch.tensor([1.0] * 19 + [-1e-9]), f"{SCALE} has negative scales"),
        (SCALE, torch.tensor([1.0] * 19 + [float("nan")]), f"{SCALE} has scales that are not finite, or too large"),
        (SCALE, torch.tensor([1.0] * 19 + [float("inf")]), f"{SCALE} has scales that are not finite, or too large"),
        (SCALE, torch.tensor([1.0] * 19 + [1e37]), f"{SCALE} has scales that are not finite, or too large"),
        (BIAS, torch.tensor([1.0] * 19 + [float("nan")]), f"{BIAS} has 1 values that are not finite, the first at [19]: nan"),
        (INPUT, torch.full((7, 20), -128, dtype=torch.int8), f"{INPUT} has numbers below -127"),
    ],
)
def test_wrong_tensor_error_names_it(tmp_path: Path, name: str, tensor: Tensor | None, message: str) -> None:
    assert rewritten(tmp_path, {name: tensor}).startswith(message)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_not_written(tmp_path: Path, value: float) -> None:
    model = reference_model()
    given = model.arrays()
    given[INPUT] = given[INPUT].clone()
    given[INPUT][3, 4] = value
    with pytest.raises(ModelError, match=r"forward.input.scale has scales that are not finite"):
        store.write(tmp_path / "reference" / "1", model.spec("int8"), given, card="made up")
    assert not (tmp_path / "reference").exists()
