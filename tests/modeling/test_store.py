"""Model folders round trip, and every broken folder is rejected with an error that names the defect."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from kernels.ragged import STORAGE
from service.errors import ModelError
from service.modeling import store
from service.modeling.spec import ModelSpec, read
from service.modeling.spec.heads import ClassifyHead
from tests import models

BIAS = "layers.1.0.backward.bias"


def read_error(folder: Path, model: ModelSpec, content: bytes) -> str:
    """Return the error of a weights file with a correct digest and wrong content."""
    (folder / "weights.safetensors").write_bytes(content)
    signed = {**model.sha256, "weights.safetensors": hashlib.sha256(content).hexdigest()}
    with pytest.raises(ModelError) as caught:
        store.read_arrays(folder, model.model_copy(update={"sha256": signed}))
    return str(caught.value).removeprefix(str(folder / "weights.safetensors")).removeprefix(": ")


@pytest.mark.parametrize("precision", list(STORAGE))
def test_model_round_trips(tmp_path: Path, model: ModelSpec, precision: str) -> None:
    wanted = model.model_copy(update={"precision": precision})
    given = models.weights(model, seed=5)
    folder = tmp_path / precision / model.name / "1"
    written = store.write(folder, wanted, given, card="made up")
    assert read(folder) == written
    arrays = store.read_arrays(folder, written)
    assert arrays.keys() == given.keys()
    assert all(torch.equal(arrays[name], given[name].to(STORAGE[precision])) for name in given)


@pytest.mark.parametrize("name", models.OF_EVERY_HEAD)
def test_every_layer_and_head_round_trips(tmp_path: Path, name: str) -> None:
    written = models.OF_EVERY_HEAD[name](tmp_path)
    folder = tmp_path / name / "1"
    assert read(folder) == written
    arrays = store.read_arrays(folder, written)
    assert {name: tuple(array.shape) for name, array in arrays.items()} == written.tensors()


def test_non_contiguous_weights_are_written(tmp_path: Path, model: ModelSpec) -> None:
    given = {name: array.repeat_interleave(2, dim=-1)[..., ::2] for name, array in models.weights(model).items()}
    assert not any(array.is_contiguous() for array in given.values())
    folder = tmp_path / "strided" / model.name / "1"
    arrays = store.read_arrays(folder, store.write(folder, model, given, card="made up"))
    assert all(torch.equal(arrays[name], given[name]) for name in given)


@given(
    labels=st.lists(st.text(), min_size=2, max_size=5, unique=True),
    description=st.text() | st.sampled_from(['"""', "\\", "a\nb\r\nc\td\0", "\x7f\x85\u2028", "'''", "# no comment", "é 🙂"]),
)
@example(labels=["a", "b\x7f"], description="")
@settings(max_examples=12)
def test_toml_round_trips_any_characters(tmp_path_factory: pytest.TempPathFactory, labels: list[str], description: str) -> None:
    root = tmp_path_factory.mktemp("odd")
    model = models.words(root)
    head = ClassifyHead(kind="classify", pool=("mean",), labels=tuple(labels))
    odd = model.model_copy(update={"head": head, "description": description})
    folder = root / "odd" / model.name / "1"
    written = store.write(folder, odd, models.weights(odd), card=description)
    assert read(folder) == written


def test_file_without_its_digest_is_rejected(folder: Path, model: ModelSpec) -> None:
    unsigned = model.model_copy(update={"sha256": {}})
    with pytest.raises(ModelError) as caught:
        store.read_arrays(folder, unsigned)
    message = "sha256 has no entry for weights.safetensors: add the digest that sha256sum prints"
    assert str(caught.value) == f"{folder / 'model.toml'}: {message}"
    file = folder / "weights.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ModelError, match=r"weights.safetensors does not have the digest in model.toml"):
        store.read_arrays(folder, model)
    file.unlink()
    with pytest.raises(ModelError, match=r"weights.safetensors cannot be read: No such file"):
        store.read_arrays(folder, model)


@pytest.mark.parametrize("kept", [0, 7, 8, 100, -1])
def test_truncated_file_is_rejected(folder: Path, model: ModelSpec, kept: int) -> None:
    content = (folder / "weights.safetensors").read_bytes()[:kept]
    assert "is not a complete safetensors file" in read_error(folder, model, content)


@pytest.mark.parametrize(
    "name, tensor, message",
    [
        (BIAS, None, f"the tensor {BIAS} of shape (20,) is missing"),
        ("layers.9.weight", torch.zeros(3), "the tensor layers.9.weight belongs to no layer of model.toml"),
        (BIAS, torch.zeros(21), f"{BIAS} has shape (21,), model.toml requires (20,)"),
        (BIAS, torch.zeros(20).half(), f"{BIAS} is torch.float16, the precision float32 in model.toml requires torch.float32"),
        (BIAS, torch.tensor([0.0] * 19 + [float("nan")]), f"{BIAS} has 1 values that are not finite, the first at [19]: nan"),
        (BIAS, torch.tensor([0.0] * 19 + [-float("inf")]), f"{BIAS} has 1 values that are not finite, the first at [19]: -inf"),
    ],
    ids=str,
)
def test_wrong_tensor_error_names_it(folder: Path, model: ModelSpec, name: str, tensor: Tensor | None, message: str) -> None:
    arrays: dict[str, Tensor | None] = {**models.weights(model), name: tensor}
    content = save({name: array for name, array in arrays.items() if array is not None})
    assert read_error(folder, model, content) == message


def test_weights_that_overflow_the_precision_are_rejected(tmp_path: Path, model: ModelSpec) -> None:
    half = model.model_copy(update={"precision": "float16"})
    folder = tmp_path / "half" / model.name / "1"
    with pytest.raises(ModelError, match="has 20 values that are not finite"):
        store.write(folder, half, {**models.weights(model), BIAS: torch.full((20,), 1e5)}, card="made up")
    assert not folder.exists()
