"""Mixed traffic for a server with any models. A seed determines the requests, no request occurs twice, and every status is checked.

Requests come in rounds with the same sizes in the same order, so that no round needs more memory at once than the rounds before.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import uvloop

from loadtest import traffic
from loadtest.target import Target
from service.modeling import spec
from service.settings import Settings
from tests.callers import Caller

ROUND = 1_000
"""Requests in a round. The next round starts after all replies, so the server holds nothing in between."""
SEVERAL, MOST_INPUTS = 0.15, 8
"""Share of requests with more than one input, and the most inputs of such a request."""
SHORTEST, LONGEST, ANY_LENGTH = 0.05, 0.02, 0.05
"""Shares of inputs of the shortest, the longest and any length that the model takes. The rest is as long as questions are."""
MOST_STEPS = 512
"""With longer inputs, the memory would depend on how many of them happen to run at once."""
FOR_VECTORS, BAD, IMPATIENT = 0.1, 0.02, 0.01
"""Shares of the requests in mixed traffic."""
IMPATIENCE_SECONDS = 0.003
"""An impatient client disconnects within this time if it has no reply."""
PATIENCE_SECONDS = 90.0
"""How long the other clients wait. A reply that takes longer is lost."""

AfterRound = Callable[[int], object]
"""Called between rounds with the number of requests so far."""
Body = dict[str, Any]
Spoil = Callable[[Body, int], Body | str]
SPOILT: Sequence[tuple[int, Spoil]] = (
    (400, lambda *_: "no object"),
    (400, lambda body, _: body | {"inputs": []}),
    (400, lambda body, _: body | {"inputs": [*body["inputs"], None]}),
    (400, lambda body, number: body | {f"option-{number}": True}),
    (404, lambda body, number: body | {"model": f"nobody-{number}"}),
    (413, lambda body, _: body | {"inputs": body["inputs"][:1] * (Settings().max_inputs + 1)}),
)
"""Functions that make a body invalid, each with the status of the reply. The number makes a body unique."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, the expected status, and how long its client waits."""

    body: bytes
    status: int = 200
    patience_seconds: float = PATIENCE_SECONDS

    @property
    def impatient(self) -> bool:
        return self.patience_seconds < PATIENCE_SECONDS


class Source(traffic.Traffic):
    """Inputs for the model in a folder, from the shortest to the longest that it takes, at most MOST_STEPS."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.spec = spec.read(folder)
        tokenizer, shape = folder / spec.TOKENIZER, self.spec.input.model_dump()
        model = {"name": self.spec.name, "version": folder.name, "input": shape, "min_steps": self.spec.min_steps}
        super().__init__(model, traffic.words(tokenizer.read_text()) if tokenizer.is_file() else (), seed)
        self._longest = min(self._longest, MOST_STEPS)

    def steps(self) -> int:
        """Return the length of the next input."""
        among = (self._shortest, self._longest, self._random.randint(self._shortest, self._longest), super().steps())
        shares = (SHORTEST, LONGEST, ANY_LENGTH, 1 - SHORTEST - LONGEST - ANY_LENGTH)
        return self._random.choices(among, shares)[0]

    def vectors(self) -> list[str]:
        """Return everything that `return` may name."""
        there = {"embedding": self.spec.has_embedding, "sequence": self.spec.has_steps}
        return [name for name, has in there.items() if has]


@dataclass(frozen=True, slots=True)
class Plan:
    """A request without its content."""

    source: Source
    lengths: Sequence[int]
    options: Body
    status: int = 200
    spoil: Spoil = lambda body, _: body
    patience_seconds: float = PATIENCE_SECONDS

    def asked(self, number: int) -> Asked:
        """Return the request with this number and new content."""
        inputs = [self.source.input(steps) for steps in self.lengths]
        body = self.spoil(self.source.body(0) | {"inputs": inputs} | self.options, number)
        return Asked(json.dumps(body).encode(), self.status, self.patience_seconds)


def plain(models: Path, seed: int = 0) -> Iterator[Asked]:
    """Yield requests without options for every model in the folder, without end."""
    return _asked(_plans(models, random.Random(seed)))


def mixed(models: Path, seed: int = 0) -> Iterator[Asked]:
    """Yield requests as `plain` does, mixed with requests for vectors, invalid requests, and clients that disconnect."""
    chance = random.Random(seed)
    return _asked([_varied(plan, chance) for plan in _plans(models, chance)])


def send(url: str, requests: Iterator[Asked], *, rounds: int, callers: int, after_round: AfterRound = lambda _: None) -> None:
    """Send rounds of requests over `callers` connections. Fails at the first reply with an unexpected status."""
    uvloop.run(_send(Target.of(url, "/infer"), requests, rounds, callers, after_round))


async def _send(target: Target, requests: Iterator[Asked], rounds: int, callers: int, after_round: AfterRound) -> None:
    lines = [_Line(target) for _ in range(callers)]
    try:
        for number in range(1, rounds + 1):
            async with asyncio.TaskGroup() as asking:
                one_round = islice(requests, ROUND)
                for line in lines:
                    asking.create_task(line.ask_each(one_round))
            after_round(number * ROUND)
    except* AssertionError as wrong:
        raise wrong.exceptions[0] from None
    finally:
        for line in lines:
            line.close()


class _Line:
    """A client with one connection, which it reopens when the server has closed it."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._caller: Caller | None = None

    async def ask_each(self, requests: Iterator[Asked]) -> None:
        """Send requests in sequence. Several clients may share the iterator."""
        for asked in requests:
            await self._ask(asked)

    def close(self) -> None:
        if self._caller is not None:
            self._caller.hang_up()

    async def _ask(self, asked: Asked) -> None:
        if self._caller is None or not self._caller.connected:
            self._caller = await Caller.connect(self._target)
        try:
            async with asyncio.timeout(asked.patience_seconds):
                reply = await self._caller.ask(self._target.request(asked.body))
        except TimeoutError:
            assert asked.impatient, f"no answer to {asked.body!r:.300}"
            self._caller.hang_up()
        else:
            said = f"{reply.status} {reply.body!r:.300}, not {asked.status}, to {asked.body!r:.300}"
            assert reply.status == asked.status, said


def _asked(plans: Sequence[Plan]) -> Iterator[Asked]:
    """Yield the requests of a round of plans repeatedly."""
    return (plans[number % len(plans)].asked(number) for number in count())


def _plans(models: Path, chance: random.Random) -> list[Plan]:
    """Return the plans of a round."""
    folders = [folder for versions in spec.find_models(models).values() for folder in versions.values()]
    sources = [Source(folder, chance.getrandbits(32)) for folder in folders]
    return [_plan(chance.choice(sources), chance) for _ in range(ROUND)]


def _plan(source: Source, chance: random.Random) -> Plan:
    inputs = chance.randint(2, MOST_INPUTS) if chance.random() < SEVERAL else 1
    return Plan(source, [source.steps() for _ in range(inputs)], {})


def _varied(plan: Plan, chance: random.Random) -> Plan:
    status, spoil = chance.choice(SPOILT)
    among = (
        replace(plan, options={"return": plan.source.vectors()}),
        replace(plan, status=status, spoil=spoil),
        replace(plan, patience_seconds=chance.uniform(0, IMPATIENCE_SECONDS)),
        plan,
    )
    return chance.choices(among, (FOR_VECTORS, BAD, IMPATIENT, 1 - FOR_VECTORS - BAD - IMPATIENT))[0]
