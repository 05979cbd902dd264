"""Models with every kind of head behind a real server: documented fields, and values equal to a direct computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels.ragged import Ragged
from service.frontend.head_outputs import InferOutput
from service.ipc.messages import FEATURES, IDS
from service.modeling import spec as specs
from service.modeling import store
from service.modeling.encoder import Encoder, Encoding
from service.modeling.spec import ModelSpec
from service.modeling.tokenizer import Tokenizer
from tests import models
from tests.frontend.in_process import InProcess
from tests.models import LABELS, WORDS
from tests.serving import Server

CPU = torch.device("cpu")
LENGTHS = [5, 3, 17, 4]


@dataclass(frozen=True, slots=True)
class Direct:
    """A model without a server."""

    spec: ModelSpec
    encoder: Encoder
    tokenizer: Tokenizer | None

    def __call__(self, value: Any) -> Encoding:
        """Run the model on one input, in the form that a client sends."""
        if isinstance(value, str):
            assert self.tokenizer is not None
            value = np.frombuffer(self.tokenizer.packed_ids(value, "value"), "<i4").tolist()
        array = np.array(value, IDS if self.spec.input.features is None else FEATURES)
        return self.encoder(Ragged(torch.from_numpy(array), torch.tensor([0, len(array)])), sequence=True)

    def inputs(self, lengths: Sequence[int]) -> list[Any]:
        """Return random inputs of these lengths, in the form that a client sends."""
        random = np.random.default_rng(len(self.spec.name))
        shape = self.spec.input
        if shape.features is not None:
            return [random.normal(size=(steps, shape.features)).round(3).tolist() for steps in lengths]
        ids = [random.integers(shape.vocabulary or 0, size=steps).tolist() for steps in lengths]
        return ids if self.tokenizer is None else [" ".join(word_of(id) for id in row) for row in ids]


def word_of(id: int) -> str:
    """Return the word of a token id; the unknown id gets a word that is not in the vocabulary."""
    return WORDS[id] if id else "moon"


@pytest.fixture(scope="module")
def direct(every_head: Path) -> Mapping[str, Direct]:
    def read(name: str) -> Direct:
        version = every_head / name / "1"
        model = specs.read(version)
        tokenizer = Tokenizer.read(version, model) if model.input.kind == "text" else None
        return Direct(model, Encoder(model, store.read_arrays(version, model), CPU), tokenizer)

    return {name: read(name) for name in models.OF_EVERY_HEAD}


def near(values: Any) -> Any:
    return pytest.approx(values, abs=1e-5, rel=1e-5)


def vectors(output: dict[str, Any], encoding: Encoding) -> None:
    """Check the vectors in an output against the direct computation."""
    if "embedding" in output:
        assert encoding.head_output.embedding is not None
        assert output["embedding"] == near(encoding.head_output.embedding[0].tolist())
    if "sequence" in output:
        assert encoding.sequence is not None
        assert len(output["sequence"]) == len(encoding.sequence)
        for step, expected in zip(output["sequence"], encoding.sequence.tolist(), strict=True):
            assert step == near(expected)


def words(output: dict[str, Any], encoding: Encoding, steps: int) -> None:
    assert encoding.head_output.scores is not None
    scores = encoding.head_output.scores[0]
    assert output["label"] == LABELS[int(scores.argmax())]
    assert list(output["scores"]) == list(LABELS)
    assert list(output["scores"].values()) == near(scores.tolist())
    assert output["score"] == output["scores"][output["label"]]


def forecaster(output: dict[str, Any], encoding: Encoding, steps: int) -> None:
    assert encoding.head_output.scores is not None
    assert len(output["value"]) == 2
    assert output["value"] == near(encoding.head_output.scores[0].tolist())


def tagger(output: dict[str, Any], encoding: Encoding, steps: int) -> None:
    assert encoding.head_output.scores is not None and encoding.head_output.picks is not None
    assert len(output["labels"]) == len(output["scores"]) == steps
    assert output["labels"] == [LABELS[pick] for pick in encoding.head_output.picks[:, 0]]
    assert output["scores"] == near(encoding.head_output.scores[:, 0].tolist())


def reader(output: dict[str, Any], encoding: Encoding, steps: int) -> None:
    assert encoding.head_output.scores is not None and encoding.head_output.picks is not None
    assert 0 <= output["start"] <= output["end"] < steps
    assert [output["start"], output["end"]] == encoding.head_output.picks[0].tolist()
    assert output["score"] == near(float(encoding.head_output.scores[0, 0]))


def speller(output: dict[str, Any], encoding: Encoding, steps: int) -> None:
    assert encoding.head_output.scores is not None and encoding.head_output.picks is not None
    assert len(output["ids"]) == len(output["scores"]) == 4
    assert output["ids"] == encoding.head_output.picks[0].tolist()
    assert output["scores"] == near(encoding.head_output.scores[0].tolist())
    assert output["scores"] == sorted(output["scores"], reverse=True)


def embedder(output: dict[str, Any], encoding: Encoding, steps: int) -> None:
    assert len(output["embedding"]) == 8
    assert float(np.linalg.norm(output["embedding"])) == near(1.0)


def halver(output: dict[str, Any], encoding: Encoding, steps: int) -> None:
    assert [len(step) for step in output["sequence"]] == [5] * ((steps - 1) // 2)


AGREES: dict[str, Callable[[dict[str, Any], Encoding, int], None]] = {
    check.__name__: check for check in (words, forecaster, tagger, reader, speller, embedder, halver)
}
FIELDS = {
    "words": {"label", "score", "scores"},
    "forecaster": {"value"},
    "tagger": {"labels", "scores"},
    "reader": {"start", "end", "score"},
    "speller": {"ids", "scores"},
    "embedder": {"embedding"},
    "halver": {"sequence"},
}
HAS = {
    "words": {"embedding", "sequence"},
    "forecaster": {"embedding", "sequence"},
    "tagger": {"sequence"},
    "reader": {"sequence"},
    "speller": {"embedding", "sequence"},
    "embedder": {"embedding"},
    "halver": {"sequence"},
}


def infer(server: Server, name: str, inputs: list[Any], **options: Any) -> list[dict[str, Any]]:
    answer = server.infer(name, inputs, **options)
    assert answer.status_code == 200, answer.text
    outputs: list[dict[str, Any]] = answer.json()["outputs"]
    assert len(outputs) == len(inputs)
    return outputs


@pytest.mark.parametrize("name", models.OF_EVERY_HEAD)
def test_outputs_equal_the_direct_computation(heads_server: Server, direct: Mapping[str, Direct], name: str) -> None:
    """In a batch and alone, with the fields that are documented, and with the vectors that a request asks for."""
    inputs = direct[name].inputs(LENGTHS)
    together = infer(heads_server, name, inputs)
    extended = infer(heads_server, name, inputs, **{"return": sorted(HAS[name])})
    alone = [infer(heads_server, name, [value])[0] for value in inputs]
    for output, more, single, value, steps in zip(together, extended, alone, inputs, LENGTHS, strict=True):
        encoding = direct[name](value)
        assert set(output) == FIELDS[name] and set(more) == FIELDS[name] | HAS[name]
        assert InferOutput.model_validate(output).model_dump(exclude_none=True) == output
        for each in (output, more, single):
            AGREES[name](each, encoding, steps)
            vectors(each, encoding)


def test_return_of_missing_vectors_is_refused(heads: InProcess, direct: Mapping[str, Direct]) -> None:
    for name, missing in [(name, {"embedding", "sequence"} - has) for name, has in HAS.items() if len(has) == 1]:
        [vector] = missing
        answer = heads.infer(name, direct[name].inputs([4]), **{"return": [vector]})
        assert (answer.status_code, answer.json()["code"], answer.json()["field"]) == (400, "invalid_input", "return")
        assert answer.json()["error"] == f"{name} has no {vector} to return: leave {vector} out of return"


@pytest.mark.parametrize("name", ["halver", "embedder"])
def test_too_short_sequence_is_refused_with_the_minimum(heads: InProcess, direct: Mapping[str, Direct], name: str) -> None:
    for steps in (1, 2):
        answer = heads.infer(name, direct[name].inputs([4, steps]))
        assert (answer.status_code, answer.json()["code"], answer.json()["field"]) == (400, "invalid_input", "inputs[1]")
        assert answer.json()["error"] == f"inputs[1] has {steps} steps and {name} needs at least 3: send a longer sequence"


def test_models_are_listed_with_their_heads(heads: InProcess) -> None:
    listed = {model["name"]: model for model in heads.client.get("/models").json()["models"]}
    kinds = ["classify", "regress", "tag", "span", "next", "embed", "sequence"]
    assert {name: listed[name]["head"]["kind"] for name in models.OF_EVERY_HEAD} == dict(
        zip(models.OF_EVERY_HEAD, kinds, strict=True)
    )
    assert all(listed[name]["ready"] for name in models.OF_EVERY_HEAD)
