"""Mixed traffic for a server with any models. A seed determines the requests, no request occurs twice, and every status is checked.

Requests come in rounds with the same sizes in the same order, so that no round needs more memory at once than the rounds before.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
IMPATIENCE_SECONDS, PATIENCE_SECONDS = 0.003, 90.0
"""An impatient client disconnects within the first time if it has no reply. A reply that takes longer than the second is lost."""

Body = dict[str, Any]
SPOILT: Sequence[tuple[int, Callable[[Body, int], Body | str]]] = (
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


def plan(source: Source, chance: random.Random, *, varied: bool) -> Callable[[int], Asked]:
    """Return a function of a number that returns a request with this number and new content, and always the same sizes.

    varied: it may ask for vectors, be invalid, or have a client that disconnects.
    """
    lengths = [source.steps() for _ in range(chance.randint(2, MOST_INPUTS) if chance.random() < SEVERAL else 1)]
    options: Body = {}
    status, patience_seconds = 200, PATIENCE_SECONDS
    spoil: Callable[[Body, int], Body | str] = lambda body, _: body  # noqa: E731
    way = chance.random() if varied else 1.0
    if way < FOR_VECTORS:
        there = {"embedding": source.spec.has_embedding, "sequence": source.spec.has_steps}
        options = {"return": [name for name, has in there.items() if has]}
    elif way < FOR_VECTORS + BAD:
        status, spoil = chance.choice(SPOILT)
    elif way < FOR_VECTORS + BAD + IMPATIENT:
        patience_seconds = chance.uniform(0, IMPATIENCE_SECONDS)

    def asked(number: int) -> Asked:
        body = source.body(0) | {"inputs": list(map(source.input, lengths))} | options
        return Asked(json.dumps(spoil(body, number)).encode(), status, patience_seconds)

    return asked


def mixed(models: Path, seed: int = 0, *, varied: bool = True) -> Iterator[Asked]:
    """Yield requests for every model in the folder, without end: the requests of a round of plans repeatedly.

    varied: also requests for vectors, invalid requests, and clients that disconnect.
    """
    chance = random.Random(seed)
    folders = [folder for versions in spec.find_models(models).values() for folder in versions.values()]
    sources = [Source(folder, chance.getrandbits(32)) for folder in folders]
    plans = [plan(chance.choice(sources), chance, varied=varied) for _ in range(ROUND)]
    return (plans[number % ROUND](number) for number in count())


def send(
    url: str, requests: Iterator[Asked], *, rounds: int, callers: int, after_round: Callable[[int], object] = lambda _: None
) -> None:
    """Send rounds of requests over `callers` connections. Fails at the first reply with an unexpected status.

    after_round: called between rounds with the number of requests so far.
    """
    uvloop.run(_send(Target.of(url, "/infer"), requests, rounds, callers, after_round))


async def _send(
    target: Target, requests: Iterator[Asked], rounds: int, callers: int, after_round: Callable[[int], object]
) -> None:
    free: list[Caller] = []

    async def ask_each(some: Iterator[Asked]) -> None:
        """Send requests in sequence on one connection, which is reopened when the server has closed it."""
        caller = free.pop() if free else await Caller.connect(target)
        for asked in some:
            if not caller.connected:
                caller = await Caller.connect(target)
            try:
                async with asyncio.timeout(asked.patience_seconds):
                    reply = await caller.ask(target.request(asked.body))
            except TimeoutError:
                assert asked.patience_seconds < PATIENCE_SECONDS, f"no answer to {asked.body!r:.300}"
                caller.hang_up()
            else:
                found = f"{reply.status} {reply.body!r:.300}, not {asked.status}, to {asked.body!r:.300}"
                assert reply.status == asked.status, found
        free.append(caller)

    try:
        for number in range(1, rounds + 1):
            one_round = islice(requests, ROUND)
            async with asyncio.TaskGroup() as asking:
                for _ in range(callers):
                    asking.create_task(ask_each(one_round))
            after_round(number * ROUND)
    except* AssertionError as wrong:
        raise wrong.exceptions[0] from None
    finally:
        for caller in free:
            caller.hang_up()
