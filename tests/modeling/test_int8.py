"""Models in int8 and 16 bits: the content of their files, the arrays with which kernels are called, and every file that is rejected."""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from kernels.backend import Choice
from kernels.quantized import dequantize, quantize
from kernels.ragged import Encoded, Outputs, Ragged
from service.errors import ModelError
from service.modeling import store
from service.modeling.encoder import Encoder
from service.modeling.layers import KINDS
from service.modeling.spec import WEIGHTS, ModelSpec, read
from service.modeling.spec.layers import RecurrentLayer
from tests.kernels.families import cpu_backends
from tests.modeling.random_models import CPU, EVERY_LAYER, Form, batch, classifier, random_arrays, scores

BIAS, INPUT, SCALE = "layers.1.0.forward.bias", "layers.1.0.forward.input", "layers.1.0.forward.input.scale"
TOLERANCE = 0.05
"""Share of the largest output: several times the change by 8-bit activations, and less than the change by a wrong scale."""
MATRICES = {"input", "recurrent", "projection"}
RECURRENT = [
    *(Form("lstm"), Form("gru", reset_after=False), Form("gru", depth=2, bidirectional=True), Form("qrnn", window=3)),
    *(Form("sru", projection=2, depth=2, bidirectional=True), Form("qrnn", pooling="ifo", depth=2, bidirectional=True)),
]
every_recurrent_layer = pytest.mark.parametrize("form", RECURRENT, ids=str)
LENGTHS = [9, 5, 14, 7]


def written(root: Path, model: ModelSpec) -> tuple[Path, ModelSpec]:
    folder = root / "words" / "1"
    spec = model.model_copy(update={"precision": "int8"})
    return folder, store.write(folder, spec, random_arrays(model), card="made up")


@pytest.mark.parametrize("form", EVERY_LAYER, ids=str)
def test_matrices_are_stored_as_numbers_and_scales(tmp_path: Path, form: Form) -> None:
    model = classifier(form)
    folder, described = written(tmp_path, model)
    stored, originals = load((folder / WEIGHTS).read_bytes()), random_arrays(model)
    matrices = {name for name in originals if name.split(".")[-1] in ("weight", "filters", *MATRICES)}
    assert matrices == set(described.matrices())
    assert stored.keys() == originals.keys() | {f"{name}.scale" for name in matrices}
    assert {name for name, tensor in stored.items() if tensor.dtype == torch.int8} == matrices
    assert all(tensor.dtype == torch.float32 for name, tensor in stored.items() if name not in matrices)
    arrays = store.read_arrays(folder, read(folder))
    for name, array in originals.items():
        assert torch.equal(arrays[name], dequantize(*quantize(array)) if name in matrices else array)
        largest = array.abs().amax(tuple(range(array.dim() - 1)))
        assert ((arrays[name] - array).abs() <= 0.51 * largest / 127).all(), "no more than half of a step, and its rounding"


@pytest.mark.parametrize("form", [*RECURRENT, Form("conv"), Form("tcn"), Form("text_cnn")], ids=str)
def test_int8_model_is_close_to_its_weights_in_float32(tmp_path: Path, form: Form) -> None:
    model = classifier(form)
    folder, described = written(tmp_path, model)
    arrays = store.read_arrays(folder, described)
    int8, exact = Encoder(described, arrays, CPU)(batch(model, LENGTHS)), Encoder(model, arrays, CPU)(batch(model, LENGTHS))
    actual, expected = int8.head_output.embedding, exact.head_output.embedding
    assert actual is not None and expected is not None
    assert (actual - expected).abs().max() <= TOLERANCE * expected.abs().max()
    assert (scores(int8) - scores(exact)).abs().max() <= TOLERANCE


NOT_FINITE = f"{SCALE} has scales that are not finite, or too large"


@pytest.mark.parametrize(
    "name, tensor, message",
    [
        (INPUT, None, f"the tensor {INPUT} of shape (7, 20) is missing"),
        (SCALE, None, f"the tensor {SCALE} of shape (20,) is missing"),
        (f"{BIAS}.scale", torch.ones(20), f"the tensor {BIAS}.scale belongs to no layer of model.toml"),
        (SCALE, torch.ones(7), f"{SCALE} has shape (7,), model.toml requires (20,)"),
        (INPUT, torch.zeros(7, 20), f"{INPUT} is torch.float32, the precision int8 in model.toml requires torch.int8"),
        (SCALE, torch.ones(20).double(), f"{SCALE} is torch.float64, the precision int8 in model.toml requires torch.float32"),
        (SCALE, torch.tensor([1.0] * 19 + [-1e-9]), f"{SCALE} has negative scales"),
        (SCALE, torch.tensor([1.0] * 19 + [float("nan")]), NOT_FINITE),
        (SCALE, torch.tensor([1.0] * 19 + [1e37]), NOT_FINITE),
        (BIAS, torch.tensor([1.0] * 19 + [float("nan")]), f"{BIAS} has 1 values that are not finite, the first at [19]: nan"),
        (INPUT, torch.full((7, 20), -128, dtype=torch.int8), f"{INPUT} has numbers below -127"),
    ],
)
def test_wrong_tensor_error_names_it(tmp_path: Path, name: str, tensor: Tensor | None, message: str) -> None:
    folder, model = written(tmp_path, classifier(Form("lstm")))
    stored: dict[str, Tensor | None] = {**load((folder / WEIGHTS).read_bytes()), name: tensor}
    content = save({name: tensor for name, tensor in stored.items() if tensor is not None})
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(ModelError) as caught:
        store.read_arrays(folder, model.model_copy(update={"sha256": {WEIGHTS: hashlib.sha256(content).hexdigest()}}))
    assert str(caught.value).removeprefix(f"{folder / WEIGHTS}: ").startswith(message)


def recorded_weights(monkeypatch: pytest.MonkeyPatch, form: Form, backend: str, precision: str) -> list[Any]:
    """Return the weights with which the kernels of a model are called."""
    assert isinstance(form.spec, RecurrentLayer)
    if backend not in cpu_backends(form.kind):
        pytest.skip("the loops are not compiled")
    calls = list[Any]()
    chosen = next(each for each in import_module(f"kernels.{form.kind}").BACKENDS if each.name == backend)

    def run(x: Ragged, weights: Any, state: Any, *, want: Outputs, backend: str) -> Encoded:
        calls.append(weights)
        encoded: Encoded = chosen.run(x, weights, state, want=want)
        return encoded

    def both(x: Ragged, weights: Any, states: Any, *, want: Outputs, backend: str) -> Encoded:
        calls.extend(weights)
        encoded: Encoded = chosen.run_bidirectional(x, weights, states, want=want)
        return encoded

    family = SimpleNamespace(run=run, bidirectional=both, choice=lambda *_: Choice(chosen, ()), runs_levels=False)
    model = classifier(form, embedded=False)
    storage = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(precision, torch.float32)
    arrays = {name: array.to(storage) for name, array in random_arrays(model).items()}
    with monkeypatch.context() as patched:
        patched.setitem(KINDS, form.kind, replace(KINDS[form.kind], family=cast(Any, family)))
        Encoder(model.model_copy(update={"precision": precision}), arrays, CPU)(batch(model, LENGTHS))
    assert calls
    return calls


def dtypes(weights: Any) -> dict[str, torch.dtype]:
    values = {field.name: getattr(weights, field.name) for field in fields(weights)}
    return {name: value.dtype for name, value in values.items() if isinstance(value, Tensor)}


@every_recurrent_layer
def test_compiled_loops_get_bfloat16_matrices(monkeypatch: pytest.MonkeyPatch, form: Form) -> None:
    calls = recorded_weights(monkeypatch, form, "cpu", "bfloat16")
    for weights in calls:
        for name, dtype in dtypes(weights).items():
            assert dtype == (torch.bfloat16 if name in MATRICES else torch.float32), name


@pytest.mark.parametrize("backend, precision", [("framework", "bfloat16"), ("cpu", "float16"), ("framework", "int8")])
@every_recurrent_layer
def test_other_matrices_are_float32(monkeypatch: pytest.MonkeyPatch, form: Form, backend: str, precision: str) -> None:
    """Weights say whether they were int8."""
    calls = recorded_weights(monkeypatch, form, backend, precision)
    assert all(set(dtypes(weights).values()) == {torch.float32} for weights in calls)
    assert all(weights.int8 == (precision == "int8") for weights in calls)
