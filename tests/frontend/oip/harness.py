"""A frontend whose dispatcher records requests and replies with fixed arrays, and helpers that build tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, cast

import numpy as np
import pytest

from service.errors import ServiceError
from service.frontend.dispatch.dispatcher import Dispatcher
from service.frontend.oip.infer import build_request, build_response
from service.frontend.oip.inputs import InputTensors
from service.frontend.oip.parameters import session_id
from service.frontend.oip.tensors import BYTES, DATATYPES, Tensor, decode, encode, from_list
from service.frontend.oip.types import InferRequest, InferResponse, RequestedOutput
from service.frontend.run.catalog import Catalog
from service.frontend.run.frontend import Frontend, SupervisorClient
from service.ipc.messages.inference import Answer, LoadedModel, Request
from service.log import Log
from service.metrics import Metrics
from service.settings import Settings

SEQUENCES = [[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[7.0, 8.0, 9.0]], [[1.5, 2.5, 3.5], [0.0, -1.0, 2.0], [3.0, 3.0, 3.0]]]
IDS = [[1, 2], [3], [4, 5, 6]]
LENGTHS = [2, 1, 3]
OFFSETS = [0, *accumulate(LENGTHS)]
ANSWERS: dict[str, dict[str, list[list[float]]]] = {
    "words": {"scores": [[0.25, 0.5, 0.25], [0.5, 0.25, 0.25], [0.125, 0.125, 0.75]]},
    "forecaster": {"scores": [[1, 2], [3, 4], [5, 6]]},
    "tagger": {"scores": [[0.5], [0.25], [0.75], [1.0], [0.5], [0.5]], "picks": [[0], [1], [2], [0], [1], [2]]},
    "reader": {"scores": [[0.5], [0.25], [0.75]], "picks": [[0, 1], [0, 0], [1, 2]]},
    "speller": {"scores": [[0.4, 0.3, 0.2, 0.1]] * 3, "picks": [[7, 5, 1, 0], [1, 2, 3, 4], [4, 3, 2, 1]]},
    "embedder": {"embedding": [[1.0] * 8, [0.5] * 8, [0.25] * 8]},
    "halver": {"sequence": [[1, 2, 3, 4, 5]] * 6},
}
"""The engine's arrays for three sequences of LENGTHS steps, by model."""


class Pending(NamedTuple):
    """A request that the dispatcher below answers soon."""

    done: bool = False


class FakeDispatcher:
    """Records requests and replies with ANSWERS. streams: names of the models that accept sessions."""

    def __init__(self, catalog: Catalog, streams: Sequence[str] = ()) -> None:
        self.requests: list[tuple[Request, bytes]] = []
        self.cancelled: list[Pending] = []
        self.held = False
        """Whether requests of the hot path wait for ever."""
        self.ready = True
        self.steps = 0
        self.answers = ANSWERS
        self.models = [
            LoadedModel(model.spec.name, model.version, "cpu", [], model.spec.name in streams, generation=model.generation)
            for model in catalog.served
        ]

    def answer(self, request: Request, tail: bytes | memoryview) -> tuple[Answer, bytes]:
        self.requests.append((request, bytes(tail)))
        count = len(request.lengths)
        steps, shapes, data = LENGTHS[:count], {}, b""
        for name, dtype in (("scores", "f4"), ("picks", "i4"), ("embedding", "f4"), ("sequence", "f4")):
            if name in self.answers[request.model]:
                per_step = name == "sequence" or request.model == "tagger"
                array = np.array(self.answers[request.model][name][: sum(steps) if per_step else count], dtype)
                shapes[name], data = array.shape, data + array.tobytes()
        return Answer(**cast(Any, shapes), steps=steps, session_steps=self.steps), data

    def send(self, request: Request, tail: bytes, receiver: Any, on_end: Callable[[], None] | None = None) -> Pending:
        """Start a request of the hot path."""
        answer = self.answer(request, tail)

        def end() -> None:
            if on_end is not None:
                on_end()
            receiver.answered(*answer)

        if not self.held:
            asyncio.get_running_loop().call_soon(end)
        return Pending()

    def cancel(self, pending: Pending) -> None:
        self.cancelled.append(pending)


def fake_frontend(catalog: Catalog, streams: Sequence[str] = ("forecaster", "speller"), **settings: Any) -> Frontend:
    """Return a frontend with a fake dispatcher. streams: names of the models that accept sessions."""
    dispatcher, supervisor = cast(Dispatcher, FakeDispatcher(catalog, streams)), cast(SupervisorClient, None)
    return Frontend(Settings(**settings), catalog, dispatcher, Metrics(), Log("frontend"), supervisor)


class InferHarness(NamedTuple):
    """A frontend with a fake dispatcher."""

    frontend: Frontend

    @property
    def dispatcher(self) -> FakeDispatcher:
        return cast(FakeDispatcher, self.frontend.dispatcher)

    def infer(
        self, model: str, *inputs: Tensor, outputs: Sequence[RequestedOutput] = (), version: str = "", **parameters: Any
    ) -> InferResponse:
        """Run one request that arrived at time 100."""
        frontend, tensors, session = self.frontend, InputTensors(inputs), session_id(parameters)
        request = InferRequest(model, version, "7", parameters, list(outputs), tensors.values_name, tensors.ragged)
        served = frontend.catalog.find(model, version or None)
        message, data = build_request(request, tensors, session, served, frontend.settings, 100.0)
        return build_response(request, served, *self.dispatcher.answer(message, data))

    def engine_request(self, model: str, *inputs: Tensor, **options: Any) -> tuple[Request, Any]:
        """Run one request and return the request to the engine and the values after it."""
        self.infer(model, *inputs, **options)
        request, tail = self.dispatcher.requests[-1]
        features = self.frontend.catalog.index[model]["1"].spec.input.features
        if features is None:
            return request, np.frombuffer(tail, "i4").tolist()
        return request, np.frombuffer(tail, "f4").reshape(-1, features).tolist()

    def check_refused(self, error: type[ServiceError], field: str, text: str, *inputs: Any, **options: Any) -> None:
        """Check the error of a request, and that the request does not reach the engine."""
        before = len(self.dispatcher.requests)
        with pytest.raises(ServiceError) as raised:
            self.infer(*inputs, **options)
        assert (type(raised.value), raised.value.field) == (error, field), raised.value.message
        assert text in raised.value.message
        assert len(self.dispatcher.requests) == before, "the engine received the request"


def tensor(name: str, values: Any, datatype: str = "FP32") -> Tensor:
    """Return a tensor, decoded from the bytes that a client would send."""
    if datatype == BYTES:
        return from_list(name, BYTES, np.array(values, object).shape, list(np.array(values, object).ravel()))
    array = np.array(values, np.float32 if datatype == "BF16" else DATATYPES[datatype].dtype)
    return decode(name, datatype, array.shape, encode(Tensor(name, datatype, array.shape, array)))


def integers(name: str, values: Any, datatype: str = "INT32") -> Tensor:
    return tensor(name, values, datatype)


def three_sequences(model: str) -> list[Tensor]:
    """Return inputs of a model: three padded sequences of LENGTHS steps."""
    if model in ("forecaster", "halver"):
        width = 3 if model == "forecaster" else 2
        lengths = integers("lengths", LENGTHS if model == "forecaster" else [3, 3, 3])
        return [tensor("inputs", np.ones((3, 3, width))), lengths]
    return [integers("ids", np.ones((3, 3))), integers("lengths", LENGTHS if model != "embedder" else [3, 3, 3])]


def values(response: InferResponse) -> dict[str, Any]:
    """Return the values of all outputs by name."""
    return {
        output.name: output.values if isinstance(output.values, list) else output.values.tolist() for output in response.outputs
    }


TWO_IDS = integers("ids", [1, 2])
