"""States of recurrent layers in requests and answers, on a real server: over POST /infer, OIP's REST API and gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from kernels.ragged import Ragged
from service.modeling import store
from service.modeling.encoder import Encoder
from service.modeling.spec import ModelSpec
from tests import models
from tests.kernels.inputs import joined
from tests.serving import Server, serving

ROWS = {"kind": "features", "features": 3, "max_steps": 500}
REGRESS = {"kind": "regress", "pool": "last", "outputs": 2}
LAYERS: dict[str, list[dict[str, Any]]] = {
    "forward": [{"kind": "lstm", "hidden": 6, "depth": 2, "projection": 4}, {"kind": "gru", "hidden": 5}],
    "both": [{"kind": "lstm", "hidden": 6, "bidirectional": True}, {"kind": "rnn", "hidden": 3, "direction": "backward"}],
    "learned": [{"kind": "conv", "filters": 4, "width": 3}, {"kind": "gru", "hidden": 5, "learned_start": True}],
    "pooled": [{"kind": "sru", "hidden": 5}, {"kind": "pool", "reduce": "max", "width": 2}],
}
NUMBERS = np.random.default_rng(3)
SEQUENCES = [NUMBERS.normal(size=(steps, 3)).astype(np.float32) for steps in (9, 4, 40)]


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, ModelSpec]]:
    root = tmp_path_factory.mktemp("models")
    specs = {name: models.made_up(root, name, ROWS, *layers, head=REGRESS) for name, layers in LAYERS.items()}
    exponential = {"kind": "rnn", "hidden": 3, "activation": "exponential"}
    specs["unbounded"] = models.made_up(root, "unbounded", ROWS, exponential, head=REGRESS)
    specs["stateless"] = models.made_up(root, "stateless", ROWS, {"kind": "conv", "filters": 4, "width": 3}, head=REGRESS)
    return root, specs


@pytest.fixture(scope="module")
def server(specs: tuple[Path, dict[str, ModelSpec]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(specs[0], tmp_path_factory.mktemp("log"), batch_budget_ms="0.2", state_slots="4") as running:
        yield running


def run(root: Path, spec: ModelSpec, states: dict[str, np.ndarray[Any, Any]]) -> tuple[Any, dict[str, Any]]:
    """Return the values and the final states that the model computes alone."""
    encoder = Encoder(spec, store.read_arrays(root / spec.name / "1", spec), torch.device("cpu"))
    x: Ragged = joined([torch.from_numpy(rows) for rows in SEQUENCES])
    encoding, final = encoder.run_with_states(x, {name: torch.from_numpy(values) for name, values in states.items()})
    assert encoding.head_output.scores is not None
    return encoding.head_output.scores.numpy(), {name: values.numpy() for name, values in final.items()}


def made_up_states(spec: ModelSpec) -> dict[str, np.ndarray[Any, Any]]:
    chance = np.random.default_rng(5)
    return {name: chance.normal(size=(len(SEQUENCES), width)).astype(np.float32) for name, width in spec.states.items()}


@pytest.mark.parametrize("name", LAYERS)
def test_infer_starts_from_states_and_returns_them(server: Server, specs: tuple[Path, dict[str, ModelSpec]], name: str) -> None:
    root, spec = specs[0], specs[1][name]
    given = made_up_states(spec)
    states = [{key: values[row].tolist() for key, values in given.items()} for row in range(len(SEQUENCES))]
    inputs = [rows.tolist() for rows in SEQUENCES]
    for sent in (given, {}):
        options = {"states": states} if sent else {}
        outputs = server.infer(name, inputs, **options, **{"return": ["state"]}).json()["outputs"]
        values, final = run(root, spec, sent)
        np.testing.assert_allclose([output["value"] for output in outputs], values, rtol=1e-4, atol=1e-5)
        assert [list(output["state"]) for output in outputs] == [list(spec.states)] * len(SEQUENCES)
        for key, expected in final.items():
            np.testing.assert_allclose([output["state"][key] for output in outputs], expected, rtol=1e-4, atol=1e-5)
    assert server.infer(name, inputs, states=states).json()["outputs"][0].keys() == {"value"}


def test_states_of_one_answer_continue_in_the_next_request(server: Server) -> None:
    whole = server.infer("forward", [SEQUENCES[2].tolist()]).json()["outputs"][0]["value"]
    states: list[dict[str, Any]] = [{}]
    for begin, end in pairwise((0, 1, 17, 40)):
        [output] = server.infer("forward", [SEQUENCES[2][begin:end].tolist()], states=states, **{"return": ["state"]}).json()[
            "outputs"
        ]
        states = [output["state"]]
    assert output["value"] == pytest.approx(whole, abs=1e-6)


def test_sequence_starts_as_usual_from_states_that_it_lacks(server: Server, specs: tuple[Path, dict[str, ModelSpec]]) -> None:
    """A start that was learned is not zero."""
    inputs = [rows.tolist() for rows in SEQUENCES]
    plain = server.infer("learned", inputs).json()["outputs"]
    assert server.infer("learned", inputs, states=[{}, {}, {}]).json()["outputs"] == plain
    zeros = [{"layers.1.0.forward.hidden": [0.0] * 5}, {}, {}]
    mixed = server.infer("learned", inputs, states=zeros).json()["outputs"]
    assert mixed[0] != plain[0] and mixed[1:] == plain[1:]


@pytest.mark.parametrize(("protocol", "name"), [("rest", "forward"), ("grpc", "both")])
def test_clients_of_the_inference_protocol_send_and_get_states(
    server: Server, specs: tuple[Path, dict[str, ModelSpec]], protocol: str, name: str
) -> None:
    root, spec = specs[0], specs[1][name]
    library: Any = triton_http if protocol == "rest" else triton_grpc
    given = made_up_states(spec)
    packed = np.concatenate(SEQUENCES)[None]
    arrays = {"inputs": packed, "offsets": np.array([[0, 9, 13, 53]], np.int32)}
    arrays |= {f"state.{key}": values for key, values in given.items()}
    tensors = []
    for key, values in arrays.items():
        tensors.append(library.InferInput(key, values.shape, "INT32" if key == "offsets" else "FP32"))
        tensors[-1].set_data_from_numpy(values)
    names = ["value", *(f"state.{key}" for key in spec.states)]
    address = server.address.removeprefix("http://") if protocol == "rest" else server.grpc
    with library.InferenceServerClient(address) as client:
        for _ in range(2):  # the second time, the request may be known
            result = client.infer(name, tensors, outputs=[library.InferRequestedOutput(key) for key in names])
            values, final = run(root, spec, given)
            np.testing.assert_allclose(result.as_numpy("value"), values, rtol=1e-4, atol=1e-5)
            for key, expected in final.items():
                np.testing.assert_allclose(result.as_numpy(f"state.{key}"), expected, rtol=1e-4, atol=1e-5)
        listed = client.get_model_metadata(name)
        assert "state." not in str(listed), "some clients ask for every output that is listed"


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("stateless", {"return": ["state"]}, "stateless has no state to return"),
        ("stateless", {"states": [{}]}, "stateless has no states that a request may bring"),
        ("both", {"states": []}, "states has 0 entries and the request has 1 sequences"),
        (
            "both",
            {"states": [{"layers.0.hidden": []}]},
            "states[0] has layers.0.hidden, and the states of both are layers.0.0",
        ),
        (
            "both",
            {"states": [{"layers.1.0.backward.hidden": [1.0]}]},
            "states[0].layers.1.0.backward.hidden has 1 numbers: send 3",
        ),
        ("both", {"states": [{"layers.1.0.backward.hidden": [1, 2, 1e39]}]}, "send 3 finite float32 numbers"),
        ("both", {"states": [{"layers.1.0.backward.hidden": "zero"}]}, "send 3 numbers"),
        ("both", {"states": [{"layers.1.0.backward.hidden": [[1], 2, 3]}]}, "send 3 numbers"),
        ("both", {"states": {}}, "states"),
        ("forward", {"states": [{}], "session": "mine"}, "a session keeps its state itself"),
        ("forward", {"return": ["state"], "session": "mine"}, "a session keeps its state itself"),
    ],
    ids=str,
)
def test_wrong_states_are_refused(server: Server, name: str, options: dict[str, Any], message: str) -> None:
    reply = server.infer(name, [SEQUENCES[0].tolist()], **options)
    assert reply.status_code in (400, 422) and message in reply.json()["error"], reply.text


def test_state_that_is_not_finite_is_refused(server: Server) -> None:
    huge = [[[1e9, -1e9, 2e9]] * 9]  # an exponential overflows
    reply = server.infer("unbounded", huge, **{"return": ["state"]})
    assert reply.status_code == 400 and "not finite" in reply.json()["error"], reply.text


def test_slots_are_free_after_the_answers(server: Server) -> None:
    for _ in range(12):
        assert server.infer("both", [SEQUENCES[0].tolist()] * 8, **{"return": ["state"]}).status_code == 200
    assert server.metric("seqserve_state_slots_used", model="both") == 0
