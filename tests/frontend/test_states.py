"""States of recurrent layers in requests and answers, on a real server: over POST /infer, OIP's REST API and gRPC."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from service.modeling import spec as specs
from service.modeling import store
from service.modeling.encoder import Encoder
from tests.kernels.inputs import joined
from tests.serving import Server, nearly_equal

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
def test_wrong_states_are_refused(heads_server: Server, name: str, options: dict[str, Any], message: str) -> None:
    reply = heads_server.infer(name, INPUTS[:1], **options)
    assert reply.status_code == 400 and message in reply.json()["error"], reply.text
