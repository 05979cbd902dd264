"""Model folders round trip, and every way in which one can be broken is refused by name."""

from __future__ import annotations

import hashlib
import math
import tomllib
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from kernels.contract import STORAGE
from service.errors import ModelError
from service.modeling import store
from service.modeling.spec import ClassifyHead, ModelSpec, SRULayer, read
from tests import models

BIAS = "layers.1.0.backward.bias"


def refusal(folder: Path, model: ModelSpec, content: bytes) -> str:
    """What is said of a weights file whose digest is right and whose content is not."""
    (folder / "weights.safetensors").write_bytes(content)
    signed = {**model.sha256, "weights.safetensors": hashlib.sha256(content).hexdigest()}
    with pytest.raises(ModelError) as caught:
        store.read_arrays(folder, model.model_copy(update={"sha256": signed}))
    return str(caught.value).removeprefix(str(folder / "weights.safetensors")).removeprefix(": ")


@pytest.mark.parametrize("precision", list(STORAGE))
def test_a_model_reads_back_as_it_was_written(tmp_path: Path, model: ModelSpec, precision: str) -> None:
    wanted = model.model_copy(update={"precision": precision})
    given = models.weights(model, seed=5)
    folder = tmp_path / precision / model.name / "1"
    written = store.write(folder, wanted, given, card="made up")
    assert read(folder) == written
    arrays = store.read_arrays(folder, written)
    assert arrays.keys() == given.keys()
    assert all(torch.equal(arrays[name], given[name].to(STORAGE[precision])) for name in given)


@pytest.mark.parametrize("name", models.OF_EVERY_HEAD)
def test_a_model_of_any_layers_and_head_reads_back_as_it_was_written(tmp_path: Path, name: str) -> None:
    written = models.OF_EVERY_HEAD[name](tmp_path)
    folder = tmp_path / name / "1"
    assert read(folder) == written
    arrays = store.read_arrays(folder, written)
    assert {name: tuple(array.shape) for name, array in arrays.items()} == written.tensors()


@pytest.mark.parametrize("scale", [1.0, -0.0, 1e-7, 1e22, 1.7976931348623157e308])
def test_a_number_with_a_point_reads_back_as_it_was_written(tmp_path: Path, scale: float) -> None:
    sru = {"kind": "sru", "hidden": 4, "scale": scale}
    written = models.made_up(tmp_path, "scaled", models.IDS, models.EMBEDDING, sru, head={"kind": "span"})
    again = read(tmp_path / "scaled" / "1").layers[1]
    assert again == written.layers[1]
    assert isinstance(again, SRULayer) and math.copysign(1, again.scale) == math.copysign(1, scale)


def test_an_sru_s_layer_norm_is_read_back_with_its_tensors(tmp_path: Path) -> None:
    sru = {"kind": "sru", "hidden": 4, "depth": 2, "layer_norm": "after"}
    written = models.made_up(tmp_path, "normalised", models.IDS, models.EMBEDDING, sru, head={"kind": "span"})
    folder = tmp_path / "normalised" / "1"
    assert read(folder) == written
    assert store.read_arrays(folder, written)["layers.1.1.norm"].shape == (2, 4)


def test_weights_that_are_no_contiguous_arrays_are_written_as_their_values(tmp_path: Path, model: ModelSpec) -> None:
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
@settings(max_examples=60, deadline=None)
def test_the_toml_that_write_makes_reads_back_equal_whatever_the_characters(
    tmp_path_factory: pytest.TempPathFactory, labels: list[str], description: str
) -> None:
    root = tmp_path_factory.mktemp("odd")
    model = models.words(root)
    head = ClassifyHead(kind="classify", pool="mean", labels=tuple(labels))
    odd = model.model_copy(update={"head": head, "description": description})
    folder = root / "odd" / model.name / "1"
    written = store.write(folder, odd, models.weights(odd), card=description)
    assert read(folder) == written


def test_the_toml_that_write_makes_has_the_digest_of_every_file_that_is_read(folder: Path) -> None:
    said = tomllib.loads((folder / "model.toml").read_text())["sha256"]
    assert said == {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("weights.safetensors", "tokenizer.json")
    }


def test_a_wrong_digest_is_refused(folder: Path, model: ModelSpec) -> None:
    file = folder / "weights.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ModelError, match=r"weights.safetensors does not have the digest in model.toml"):
        store.read_arrays(folder, model)


def test_a_missing_digest_is_refused_with_the_way_out(folder: Path, model: ModelSpec) -> None:
    unsigned = model.model_copy(update={"sha256": {}})
    with pytest.raises(ModelError) as caught:
        store.read_arrays(folder, unsigned)
    said = "sha256 has no entry for weights.safetensors: add the digest that sha256sum prints"
    assert str(caught.value) == f"{folder / 'model.toml'}: {said}"


def test_a_missing_file_is_refused(folder: Path, model: ModelSpec) -> None:
    (folder / "weights.safetensors").unlink()
    with pytest.raises(ModelError, match=r"weights.safetensors cannot be read: No such file"):
        store.read_arrays(folder, model)


@pytest.mark.parametrize("kept", [0, 7, 8, 100, -1])
def test_a_truncated_file_is_refused(folder: Path, model: ModelSpec, kept: int) -> None:
    content = (folder / "weights.safetensors").read_bytes()[:kept]
    assert "is not a whole safetensors file" in refusal(folder, model, content)


@given(st.binary(max_size=64) | st.binary(max_size=64).map(lambda header: len(header).to_bytes(8, "little") + header))
@settings(max_examples=50, deadline=None)
def test_a_file_of_any_other_bytes_is_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    root = tmp_path_factory.mktemp("bytes")
    model = models.words(root)
    assert refusal(root / model.name / "1", model, content)


def changed(model: ModelSpec, changes: dict[str, Tensor | None]) -> bytes:
    """The weights with some of them replaced, or left out."""
    arrays: dict[str, Tensor | None] = {**models.weights(model), **changes}
    return save({name: array for name, array in arrays.items() if array is not None})


def test_a_missing_tensor_is_refused_by_name_and_shape(folder: Path, model: ModelSpec) -> None:
    said = refusal(folder, model, changed(model, {BIAS: None}))
    assert said == f"the tensor {BIAS} of shape (20,) is missing"


def test_an_extra_tensor_is_refused_by_name(folder: Path, model: ModelSpec) -> None:
    said = refusal(folder, model, changed(model, {"layers.9.weight": torch.zeros(3)}))
    assert said == "the tensor layers.9.weight belongs to no layer of model.toml"


def test_a_wrong_shape_is_refused_with_both_shapes(folder: Path, model: ModelSpec) -> None:
    said = refusal(folder, model, changed(model, {BIAS: torch.zeros(21)}))
    assert said == f"{BIAS} has the shape (21,) and model.toml asks for (20,)"


def test_a_wrong_dtype_is_refused_with_both_dtypes(folder: Path, model: ModelSpec) -> None:
    said = refusal(folder, model, changed(model, {BIAS: torch.zeros(20, dtype=torch.float16)}))
    assert said == f"{BIAS} is torch.float16 and the precision in model.toml is float32"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(folder: Path, model: ModelSpec, value: float) -> None:
    said = refusal(folder, model, changed(model, {BIAS: torch.tensor([0.0] * 19 + [value])}))
    assert said == f"{BIAS} has values that are not finite"


def test_weights_too_large_for_the_precision_are_not_written(tmp_path: Path, model: ModelSpec) -> None:
    half = model.model_copy(update={"precision": "float16"})
    folder = tmp_path / "half" / model.name / "1"
    with pytest.raises(ModelError, match="has values that are not finite"):
        store.write(folder, half, {**models.weights(model), BIAS: torch.full((20,), 1e5)}, card="made up")
    assert not folder.exists()
