"""Sequences without steps: their answers, and the insertion of their rows into an engine's answer.

No engine computes them. An engine publishes the answer to such a sequence with the model, and gets only the other sequences of a request.
"""

from __future__ import annotations

import time
from math import prod
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from service.errors import ServiceError
from service.frontend.dispatch.connection import Answered, Receiver
from service.ipc.blocks import answer_arrays
from service.ipc.messages.inference import FEATURES, Answer, AnswerWithoutSteps, Request

Array = NDArray[Any]
NO_ROW = np.empty((0, 0))


class EmptyRows:
    """Receives the answer to the sequences with steps of a request, adds the rows of empty sequences, and passes it on."""

    def __init__(self, request: Request, data: bytes | memoryview, known: AnswerWithoutSteps, receiver: Receiver) -> None:
        """request, data: with all sequences; known: the answer to a sequence without steps."""
        self._request = request
        self._has_steps = np.array(request.lengths) > 0
        self._known = dict(answer_arrays(known.answer, known.data))
        self._values, self._states = _split_states(request, data, prod(known.answer.state))
        self._receiver = receiver

    def rest(self) -> tuple[Request, bytes | memoryview]:
        """Return the request without its sequences that have no steps. It may have none left."""
        lengths = [steps for steps in self._request.lengths if steps]
        request = msgspec.structs.replace(self._request, lengths=lengths)
        if self._states is None:
            return request, self._values
        states = self._states[self._has_steps].tobytes()
        return msgspec.structs.replace(request, state_bytes=len(states)), b"".join((self._values, states))

    def alone(self) -> Answered:
        """Return the answer to the request if no sequence has steps."""
        returns = self._request.returns
        wanted = {"embedding": returns.embedding, "sequence": returns.sequence, "state": returns.state}
        shapes: dict[str, Any] = {name: (0, row.shape[1]) for name, row in self._known.items() if wanted.get(name, True)}
        return self._filled(Answer(**shapes, ready=time.monotonic()), b"")

    def answered(self, answer: Answer, data: bytes | memoryview) -> None:
        self._receiver.answered(*self._filled(answer, data))

    def failed(self, error: ServiceError) -> None:
        self._receiver.failed(error)

    def _filled(self, answer: Answer, data: bytes | memoryview) -> Answered:
        """Return an answer with the rows that it lacks. Arrays with a line per step lack none."""
        count = len(self._has_steps)
        steps = np.zeros(count, int)
        steps[self._has_steps] = answer.steps
        shapes, parts = {}, []
        for name, array in answer_arrays(answer, data):
            known = self._known.get(name, NO_ROW)
            if len(known):
                whole = np.empty((count, known.shape[1]), known.dtype)
                whole[self._has_steps], whole[~self._has_steps] = array, self._start_states(known) if name == "state" else known
                array = whole
            shapes[name] = array.shape
            parts.append(array.tobytes())
        return Answered(msgspec.structs.replace(answer, **shapes, steps=steps.tolist()), b"".join(parts))

    def _start_states(self, usual: Array) -> Array:
        """Return the states from which the sequences without steps start. They are also the final states."""
        if self._states is None:
            return usual
        given = self._states[~self._has_steps]
        return np.where(np.isnan(given), usual, given)


def _split_states(request: Request, data: bytes | memoryview, numbers: int) -> tuple[bytes | memoryview, Array | None]:
    """Return the values of a request, and the states that it brings, (sequences, numbers), or None."""
    if not request.initial:
        return data, None
    end = len(data) - request.state_bytes
    return data[:end], np.frombuffer(data, FEATURES, offset=end).reshape(-1, numbers)
