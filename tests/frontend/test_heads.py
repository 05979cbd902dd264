"""Models with every kind of head behind a real server: each answer has the values of the model that is computed directly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels.ragged import Ragged
from service.frontend.head_outputs import InferOutput, OutputWriter
from service.ipc.messages import FEATURES, IDS, Answer
from service.modeling import spec as specs
from service.modeling import store
from service.modeling.encoder import Encoder
from service.modeling.spec import ModelSpec
from tests import models
from tests.frontend.in_process import InProcess
from tests.models import WORDS
from tests.serving import Server, nearly_equal

LENGTHS = [5, 3, 17, 4]
VECTORS = {
    **{name: ["embedding", "sequence"] for name in ("words", "forecaster", "speller")},
    **{name: ["sequence"] for name in ("tagger", "reader", "halver")},
    "embedder": ["embedding"],
}
"""The vectors that an answer of each model may have."""


def random_inputs(spec: ModelSpec) -> list[Any]:
    random = np.random.default_rng(len(spec.name))
    if spec.input.features is not None:
        return [random.normal(size=(steps, spec.input.features)).round(3).tolist() for steps in LENGTHS]
    return [random.integers(1, spec.input.vocabulary or 0, size=steps).tolist() for steps in LENGTHS]


def computed(spec: ModelSpec, encoder: Encoder, value: Any) -> Any:
    """Return the output for one input, with all vectors."""
    array = torch.from_numpy(np.array(value, IDS if spec.input.features is None else FEATURES))
    encoding = encoder(Ragged(array, torch.tensor([0, len(array)])), sequence=True)
    known = {name: getattr(encoding.head_output, name) for name in ("scores", "picks", "embedding")}
    arrays = {name: array.numpy() for name, array in (known | {"sequence": encoding.sequence}).items() if array is not None}
    shapes: dict[str, Any] = {name: array.shape for name, array in arrays.items()}
    steps = len(array) if encoding.sequence is None else len(encoding.sequence)
    data = b"".join(array.astype(IDS if name == "picks" else FEATURES).tobytes() for name, array in arrays.items())
    return json.loads(OutputWriter(spec).write(Answer(**shapes, steps=[steps]), data))[0]


@pytest.mark.parametrize("name", models.OF_EVERY_HEAD)
def test_outputs_equal_the_direct_computation(heads_server: Server, every_head: Path, name: str) -> None:
    """In a batch, with the vectors that the request asks for, and alone."""
    version = every_head / name / "1"
    spec = specs.read(version)
    encoder = Encoder(spec, store.read_arrays(version, spec), torch.device("cpu"))
    inputs = random_inputs(spec)
    expected = [computed(spec, encoder, value) for value in inputs]
    if name == "words":
        inputs = [" ".join(WORDS[id] for id in row) for row in inputs]
    outputs = heads_server.infer(name, inputs, **{"return": VECTORS[name]}).json()["outputs"]
    assert nearly_equal(outputs, expected)
    [alone] = heads_server.infer(name, inputs[:1]).json()["outputs"]
    assert InferOutput.model_validate(alone).model_dump(exclude_none=True) == alone
    assert nearly_equal(alone, {field: value for field, value in outputs[0].items() if field in alone})
    assert name in ("embedder", "halver") or not alone.keys() & {"embedding", "sequence"}


def test_inputs_and_vectors_that_a_model_lacks_are_refused(heads: InProcess, heads_folder: Path) -> None:
    for name, has in VECTORS.items():
        for vector in {"embedding", "sequence"} - set(has):
            inputs = random_inputs(specs.read(heads_folder / name / "1"))
            answer = heads.infer(name, inputs, **{"return": [vector]})
            assert (answer.status_code, answer.json()["field"]) == (400, "return")
            assert answer.json()["error"] == f"{name} has no {vector} to return: leave {vector} out of return"
    long, short, *_ = random_inputs(specs.read(heads_folder / "halver" / "1"))
    answer = heads.infer("halver", [long, short[:2]])
    assert (answer.status_code, answer.json()["field"]) == (400, "inputs[1]")
    assert answer.json()["error"] == "inputs[1] has 2 steps and halver needs at least 3: send a longer sequence"
