"""Exports models in tests, reads the files back, and compares both with the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.exporters.command import export_model
from service.importers.command import ImportRequest as ImportRequest
from service.importers.command import import_model
from service.modeling import store
from service.modeling.array_run import run_arrays
from service.modeling.encoder import Encoder
from service.modeling.spec import ModelSpec, read
from service.modeling.spec.activations import ConvActivation
from service.modeling.spec.layers import WindowLayer
from service.settings import Settings
from tests.exporters.cases import Case
from tests.modeling.random_models import random_arrays

Array = NDArray[Any]
LENGTHS = (7, 5, 12)
TOLERANCE = 1e-5


def write_case(folder: Path, case: Case, **changes: Any) -> ModelSpec:
    """Write the model of a case into folder/models."""
    spec = case.model(**changes)
    arrays = {name: array * 0.4 for name, array in random_arrays(spec).items()}
    return store.write(folder / "models" / spec.name / "1", spec, arrays, card="made up")


def export(folder: Path, format: str, suffix: str, name: str = "exported") -> tuple[Path, list[str]]:
    """Export a model of folder/models; return the file and the lines of the report."""
    file, lines = folder / f"exported{suffix}", list[str]()
    export_model(Settings(models=folder / "models"), name, None, format, file, lines.append)
    return file, lines


def import_back(folder: Path, file: Path) -> tuple[ModelSpec, dict[str, Tensor]]:
    """Import an exported file with its recipe; return the model and its tensors."""
    request = ImportRequest(file, "imported", recipe=Path(f"{file}.toml"))
    version = import_model(Settings(models=folder / "models"), request, list[str]().append)
    spec = read(version)
    return spec, store.read_arrays(version, spec)


def assert_round_trip(folder: Path, file: Path, spec: ModelSpec) -> None:
    """Assert that the exported file is read back as the same model, bit by bit."""
    imported, tensors = import_back(folder, file)
    assert comparable(imported) == comparable(spec)
    expected = store.read_arrays(folder / "models" / spec.name / "1", spec)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), name


def assert_same_answers(folder: Path, file: Path, spec: ModelSpec) -> None:
    """Assert that the exported file is read back as a model that computes the same, with other layers or numbers."""
    imported, _ = import_back(folder, file)
    assert comparable(imported) != comparable(spec)
    rows = random_rows(spec)
    for expected, actual in zip(main_answers(folder, spec, rows), main_answers(folder, imported, rows), strict=True):
        second = actual[-1:] if expected.shape == (1,) else actual  # of two labels
        np.testing.assert_allclose(second, expected, rtol=TOLERANCE, atol=TOLERANCE)


def comparable(spec: ModelSpec) -> dict[str, Any]:
    """Return the parts of a model that an export has to keep: padding as steps of zeros, and numbers in float32."""
    tables = spec.model_dump(exclude={"name", "description", "sha256"})
    del tables["input"]["max_steps"]
    for layer, table in zip(spec.layers, tables["layers"], strict=True):
        if isinstance(layer, WindowLayer) and not layer.pads_by_length:
            table |= {"padding": layer.padding_steps, "pads": None}
    rounded: dict[str, Any] = _rounded(tables)
    return rounded


def _rounded(value: Any, key: str = "") -> Any:
    if key.endswith("activation") and value != "identity":
        activation = ConvActivation.model_validate(value)
        return [activation.kind, *map(_rounded, activation.parameters)]
    if isinstance(value, dict):
        return {name: _rounded(item, name) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(np.float32(value)) if isinstance(value, float) else value


def random_rows(spec: ModelSpec, lengths: Sequence[int] = LENGTHS) -> list[Array]:
    random = np.random.default_rng(3)
    if spec.input.features is None:
        return [random.integers(0, spec.input.vocabulary or 0, length) for length in lengths]
    return [random.normal(size=(length, spec.input.features)).astype(np.float32) for length in lengths]


def main_answers(folder: Path, spec: ModelSpec, rows: Sequence[Array]) -> list[Array]:
    """Return the answer of the head for each row; for a span, the probabilities of each step as start and as end."""
    encoder = Encoder(spec, store.read_arrays(folder / "models" / spec.name / "1", spec), torch.device("cpu"))
    name = "ids" if spec.input.features is None else "inputs"
    outputs = run_arrays(encoder, {name: np.concatenate(list(rows)), "offsets": np.cumsum([0, *map(len, rows)])})
    answer = outputs[spec.head.main_output or "logits"]
    if spec.head.kind not in ("tag", "span", "sequence"):
        return list(answer)
    steps = np.split(answer, outputs["offsets"][1:-1])
    return [torch.from_numpy(one).softmax(0).numpy() for one in steps] if spec.head.kind == "span" else steps


def assert_answers(folder: Path, spec: ModelSpec, rows: Sequence[Array], found: Sequence[Array | Tensor]) -> None:
    """Assert that another framework computes the answer of the model for each row."""
    for expected, actual in zip(main_answers(folder, spec, rows), found, strict=True):
        np.testing.assert_allclose(np.asarray(actual), expected, rtol=TOLERANCE, atol=TOLERANCE)
