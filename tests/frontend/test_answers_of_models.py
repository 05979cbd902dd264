"""Models behind a real server: each answer has the values of the model that is computed directly.

Every kind of head, sequences without steps, and states of recurrent layers in requests and answers, over every API.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from kernels.ragged import Ragged
from service.frontend.run.head_outputs import InferOutput, OutputWriter
from service.ipc.messages.inference import FEATURES, IDS, Answer
from service.modeling import spec as specs
from service.modeling import store
from service.modeling.encoder import Encoder
from service.modeling.spec import ModelSpec
from tests import models
from tests.kernels.inputs import joined
from tests.models import LABELS, WORDS
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


def direct_output(spec: ModelSpec, encoder: Encoder, value: Any) -> Any:
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
    expected = [direct_output(spec, encoder, value) for value in inputs]
    if name == "words":
        inputs = [" ".join(WORDS[id] for id in row) for row in inputs]
    outputs = heads_server.infer(name, inputs, **{"return": VECTORS[name]}).json()["outputs"]
    assert nearly_equal(outputs, expected)
    [alone] = heads_server.infer(name, inputs[:1]).json()["outputs"]
    assert InferOutput.model_validate(alone).model_dump(exclude_none=True) == alone
    assert nearly_equal(alone, {field: value for field, value in outputs[0].items() if field in alone})
    assert name in ("embedder", "halver") or not alone.keys() & {"embedding", "sequence"}


# Sequences without steps, among others and alone: the head over zeros, in their row of the answer.

IDS_OF = [[1, 2, 3], [], [4], []]
"""Sequences of token ids, two of them without steps."""


@pytest.fixture(scope="module")
def expected(every_head: Path) -> dict[str, Any]:
    """The outputs of models for a sequence without steps, computed from the weights of their heads."""

    def weights(name: str) -> dict[str, torch.Tensor]:
        version = every_head / name / "1"
        return store.read_arrays(version, specs.read(version))

    classes, numbers = weights("classes"), weights("numbers")
    vector = torch.nn.functional.softplus(classes["head.dense.0.bias"])
    scores = (vector @ classes["head.weight"] + classes["head.bias"]).softmax(0)
    best = int(scores.argmax())
    tokens, ids = weights("tokens")["head.bias"].softmax(0).topk(3)
    named = {"scores": dict(zip(LABELS, scores.tolist(), strict=True)), "score": float(scores[best])}
    return {
        "classes": {"label": LABELS[best], **named, "embedding": vector.tolist(), "sequence": []},
        "numbers": {"value": numbers["head.bias"].sigmoid().tolist()},
        "tags": {"labels": [], "scores": []},
        "tokens": {"ids": ids.tolist(), "scores": tokens.tolist()},
        "vectors": {"embedding": [0.0] * 10},
        "steps": {"sequence": []},
    }


def outputs(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    found: list[dict[str, Any]] = reply.json()["outputs"]
    return found


@pytest.mark.parametrize("name", ["classes", "numbers", "tags", "tokens", "vectors", "steps"])
def test_empty_rows_are_answered_among_others(heads_server: Server, expected: dict[str, Any], name: str) -> None:
    options: dict[str, Any] = {"return": ["embedding", "sequence"]} if name == "classes" else {}
    counted = heads_server.metric("seqserve_sequences_total", model=name)
    first, empty, second, other = outputs(heads_server.infer(name, IDS_OF, **options))
    assert nearly_equal(empty, expected[name]) and other == empty
    assert nearly_equal([first, second], outputs(heads_server.infer(name, [IDS_OF[0], IDS_OF[2]], **options)))
    assert heads_server.metric("seqserve_sequences_total", model=name) == counted + 6
    assert nearly_equal(outputs(heads_server.infer(name, [[]] * 3, **options)), [expected[name]] * 3)
    if name == "classes":
        texts = outputs(heads_server.infer("words", ["how far", "", "sea", "  "]))
        assert texts[1] == texts[3] == outputs(heads_server.infer("words", [[]]))[0] != texts[0], "a text without words"


def infer(server: Server, model: str, lengths: list[int], **ids: Any) -> dict[str, Any]:
    """Send token ids over the Open Inference Protocol, padded, or packed with offsets. Return the tensors of the answer by name."""
    name = "lengths" if len(ids["shape"]) == 2 else "offsets"
    tensors = [
        {"name": "ids", "datatype": "INT32", **ids},
        {"name": name, "datatype": "INT32", "shape": [len(lengths)], "data": lengths},
    ]
    reply = server.client.post(f"/v2/models/{model}/infer", json={"inputs": tensors})
    assert reply.status_code == 200, reply.text
    return {tensor["name"]: tensor for tensor in reply.json()["outputs"]}


def test_protocol_answers_empty_sequences(heads_server: Server) -> None:
    """This convolution of the model tags adds two steps to a row with steps."""
    padded = {"shape": [4, 3], "data": [1, 2, 3, *[0] * 3, 4, *[0] * 5]}
    packed = {"shape": [4], "data": [1, 2, 3, 4]}
    direct = [value for output in outputs(heads_server.infer("numbers", IDS_OF)) for value in output["value"]]
    for sizes, ids in (([3, 0, 1, 0], padded), ([0, 3, 3, 4, 4], packed)):
        assert nearly_equal(infer(heads_server, "numbers", sizes, **ids)["value"]["data"], direct)
    tags = infer(heads_server, "tags", [0, 3, 3, 4, 4], **packed)
    assert (tags["offsets"]["data"], tags["labels"]["shape"]) == ([0, 5, 5, 8, 8], [1, 8])
    tags = infer(heads_server, "tags", [3, 0, 1, 0], **padded)
    assert tags["lengths"]["data"] == [5, 0, 3, 0] and set(tags["labels"]["data"][5:10]) == {""}
    alone = {name: infer(heads_server, name, [0, 0], shape=[2, 1], data=[0, 0]) for name in ("numbers", "tags")}
    assert (alone["numbers"]["value"]["shape"], alone["tags"]["labels"]["shape"]) == ([2, 2], [2, 0])


@pytest.mark.parametrize(("name", "needed"), [("spans", 1), ("windows", 2)])
def test_model_that_needs_steps_names_the_row(heads_server: Server, name: str, needed: int) -> None:
    reply = heads_server.infer(name, [[1, 2], [], [3, 4]])
    assert (reply.status_code, reply.json()["field"]) == (400, "inputs[1]")
    assert reply.json()["error"] == f"inputs[1] has 0 steps and {name} needs at least {needed}: send a longer sequence"


# States in requests and answers.

NAME = "numbers"
"""A model whose start was learned, and is not zero."""
NUMBERS = np.random.default_rng(3)
SEQUENCES = [NUMBERS.integers(1, 10, steps).astype(np.int32) for steps in (9, 4, 40)]
INPUTS = [ids.tolist() for ids in SEQUENCES]
STATE = {"return": ["state"]}


@pytest.fixture(scope="module")
def states(every_head: Path) -> dict[str, Any]:
    """A state for each sequence."""
    widths = specs.read(every_head / NAME / "1").states
    return {name: NUMBERS.normal(size=(3, width)).astype(np.float32) for name, width in widths.items()}


@pytest.fixture(scope="module")
def computed(every_head: Path, states: dict[str, Any]) -> dict[str, Any]:
    """The values and the final states that the model computes alone."""
    spec = specs.read(every_head / NAME / "1")
    encoder = Encoder(spec, store.read_arrays(every_head / NAME / "1", spec), torch.device("cpu"))
    start = {name: torch.from_numpy(values) for name, values in states.items()}
    encoding, final = encoder.run_with_states(joined([torch.from_numpy(ids) for ids in SEQUENCES]), start)
    assert encoding.head_output.scores is not None
    return {"value": encoding.head_output.scores.numpy(), **{f"state.{name}": values.numpy() for name, values in final.items()}}


def test_infer_starts_from_states_and_returns_them(
    heads_server: Server, states: dict[str, Any], computed: dict[str, Any]
) -> None:
    sent = [{name: values[row].tolist() for name, values in states.items()} for row in range(3)]
    outputs = heads_server.infer(NAME, INPUTS, states=sent, **STATE).json()["outputs"]
    assert [output.keys() for output in outputs] == [{"value", "state"}] * 3
    found = {"value": [output["value"] for output in outputs]}
    found |= {f"state.{name}": [output["state"][name] for output in outputs] for name in states}
    assert nearly_equal(found, {name: values.tolist() for name, values in computed.items()})
    plain = heads_server.infer(NAME, INPUTS).json()["outputs"]
    assert nearly_equal(heads_server.infer(NAME, INPUTS, states=[{}, {}, sent[2]]).json()["outputs"][:2], plain[:2])
    assert plain != heads_server.infer(NAME, INPUTS, states=sent).json()["outputs"]
    assert heads_server.metric("seqserve_state_slots_used", model=NAME) == 0


@pytest.mark.parametrize("library", [triton_http, triton_grpc])
def test_clients_of_the_inference_protocol_send_and_get_states(
    heads_server: Server, states: dict[str, Any], computed: dict[str, Any], library: Any
) -> None:
    arrays = {"ids": np.concatenate(SEQUENCES)[None], "offsets": np.array([[0, 9, 13, 53]], np.int32)}
    tensors = []
    for key, values in (arrays | {f"state.{name}": values for name, values in states.items()}).items():
        tensors.append(library.InferInput(key, values.shape, "FP32" if values.dtype == np.float32 else "INT32"))
        tensors[-1].set_data_from_numpy(values)
    address = heads_server.address.removeprefix("http://") if library is triton_http else heads_server.grpc
    with library.InferenceServerClient(address) as client:
        for _ in range(2):  # the second time, the request may be known
            result = client.infer(NAME, tensors, outputs=[library.InferRequestedOutput(key) for key in computed])
            for key, expected in computed.items():
                np.testing.assert_allclose(result.as_numpy(key), expected, rtol=1e-4, atol=1e-5)
        assert "state." not in str(client.get_model_metadata(NAME)), "some clients ask for every output that is listed"


HIDDEN = "layers.1.0.forward.hidden"


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("tagger", {"return": ["sequence", "embedding"]}, "tagger has no embedding to return: leave embedding out of return"),
        ("embedder", {"return": ["sequence"]}, "embedder has no sequence to return"),
        ("tags", {"return": ["state"]}, "tags has no state to return"),
        ("tags", {"states": [{}]}, "tags has no states that a request may bring"),
        (NAME, {"states": []}, "states has 0 entries and the request has 1 sequences"),
        (NAME, {"states": [{"other": []}]}, f"states[0] has other, and the states of {NAME} are {HIDDEN}"),
        (NAME, {"states": [{HIDDEN: [1.0]}]}, f"states[0].{HIDDEN} has 1 numbers: send 3"),
        (NAME, {"states": [{HIDDEN: [1, 2, 1e39]}]}, "send 3 finite float32 numbers"),
        *((NAME, {"states": [{HIDDEN: value}]}, "send 3 numbers") for value in ("zero", [[1], 2, 3])),
        (NAME, {"states": [{}], "session": "mine"}, "a session keeps its state itself"),
        (NAME, {**STATE, "session": "mine"}, "a session keeps its state itself"),
    ],
    ids=str,
)
def test_states_and_vectors_that_a_model_lacks_are_refused(
    heads_server: Server, name: str, options: dict[str, Any], message: str
) -> None:
    reply = heads_server.infer(name, INPUTS[:1], **options)
    assert reply.status_code == 400 and message in reply.json()["error"], reply.text
