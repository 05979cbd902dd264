"""Clients of requests without a session: each answer must repeat the numbers of its request. Some clients hang up instead of waiting."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import torch

from loadtest.target import Target
from service.modeling import store
from service.modeling.spec import DenseLayer, ModelSpec, SequenceHead, SequenceInput
from tests.accumulator import Account
from tests.long.endurance.load import Tally
from tests.long.endurance.sessions import CHUNKS

HANGS_UP, HANGING_UP_SECONDS = 0.01, 0.02
SUMS, SEVERAL, MOST_INPUTS = 0.2, 0.1, 6
"""Shares of the requests for a sum, and of the others that have several inputs."""


def echo(root: Path) -> ModelSpec:
    """Write a model that answers every step with its own two numbers."""
    spec = ModelSpec(
        name="echo",
        precision="float32",
        input=SequenceInput(kind="features", features=2, max_steps=64),
        layers=(DenseLayer(kind="dense", width=2),),
        head=SequenceHead(kind="sequence"),
    )
    weights = {"layers.0.weight": torch.eye(2), "layers.0.bias": torch.zeros(2)}
    return store.write(root / "echo" / "1", spec, weights, card="made up")


class Output(msgspec.Struct):
    value: tuple[float, float] | None = None
    sequence: list[tuple[float, float]] | None = None


class Reply(msgspec.Struct):
    outputs: list[Output] = []
    code: str = ""
    error: str = ""


DECODER = msgspec.json.Decoder(Reply)


class RequestClient:
    """One client. Every request of `echo` has the numbers of the client and of the request; each is below 2^24, exact in float32."""

    def __init__(self, target: Target, number: int, tally: Tally, chance: random.Random) -> None:
        self._target = target
        self._own = number
        self._tally = tally
        self._chance = chance
        self._number = 0
        self._expected: list[Output] = []
        self.pause = self.leaves = 0.0

    def next_request(self, ending: bool) -> bytes | None:
        if ending:
            return None
        chance = self._chance
        self.leaves = chance.uniform(0, HANGING_UP_SECONDS) if chance.random() < HANGS_UP else 0.0
        if chance.random() < SUMS:
            values, sum, steps = chance.choice(CHUNKS)
            self._expected = [Output(value=(sum, steps))]
            return self._target.request(f'{{"model":"accumulator","inputs":[{values}]}}'.encode())
        inputs = []
        for _ in range(chance.randint(2, MOST_INPUTS) if chance.random() < SEVERAL else 1):
            self._number += 1
            inputs.append([(float(self._own), float(self._number))])
        self._expected = [Output(sequence=each) for each in inputs]
        return self._target.request(msgspec.json.encode({"model": "echo", "inputs": inputs}))

    def answered(self, status: int, body: bytes, sent: float) -> None:
        reply = DECODER.decode(body)
        told = [Output(value=Account.told(output.value)) if output.value is not None else output for output in reply.outputs]
        self._tally.counts["requests"] += 1
        if told != self._expected:
            self._tally.wrong(f"{reply.code or told}, not {self._expected} {reply.error}")

    def unanswered(self, reason: str) -> None:
        if self.leaves and not reason:
            self._tally.counts["hung up"] += 1
        else:
            self._tally.wrong(f"no answer: {reason}")
