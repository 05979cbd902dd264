"""The load test: callers of several kinds, each with seeded traffic of its own, on whatever models a server serves.

By hand, with locust's web page: `locust -f loadtest/locustfile.py --host http://127.0.0.1:8000`.
Kinds of which no model is served are left out.
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from locust import FastHttpUser, events, stats, task
from locust.argument_parser import LocustArgumentParser
from locust.contrib.fasthttp import ResponseContextManager
from locust.env import Environment
from locust.exception import StopTest

from loadtest import discovery, journal
from loadtest.callers import Reply
from loadtest.load import RETRY_SECONDS, reason
from loadtest.servers import ROOT
from loadtest.traffic import Traffic

REQUESTS = 100
"""So many different requests each caller makes before its first, and sends in turn."""
PATIENCE_SECONDS = (0.0005, 0.003)
"""An impatient caller waits this long for an answer, each of them longer or shorter."""
PAUSE_SECONDS = (0.02, 0.1)
"""And so long before it asks again."""
HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}

# What locust's own page and report show. Unasked, it rounds times to whole milliseconds and draws a point every five seconds.
stats.bucket_response_time = lambda ms: float(f"{ms:.3g}")  # type: ignore[assignment, return-value]
stats.PERCENTILES_TO_CHART = [0.5, 0.9, 0.99]
stats.PERCENTILES_TO_STATISTICS = [0.9, 0.99]
stats.HISTORY_STATS_INTERVAL_SEC = 1

logger = logging.getLogger("loadtest")


class Caller(FastHttpUser):
    """Asks, waits for the answer, asks again; its requests depend on nothing but the seed and its number."""

    abstract = True
    kinds: ClassVar[tuple[str, ...]] = ("text", "ids")
    """The kinds of input that it can send."""
    inputs = 1
    models: ClassVar[list[tuple[dict[str, Any], list[str]]]] = []
    """What it asks, as GET /models describes it, with the words of text models; set when a test starts."""
    numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, environment: Environment) -> None:
        assert environment.parsed_options is not None
        self.random = random.Random(f"{environment.parsed_options.seed} {next(self.numbers)}")
        self.network_timeout = self.patience_seconds()
        super().__init__(environment)
        traffic = [Traffic(model, words, self.random.getrandbits(32)) for model, words in self.models]
        sources = itertools.islice(itertools.cycle(traffic), REQUESTS)
        self.requests = itertools.cycle([json.dumps(source.body(self.inputs)) for source in sources])

    def context(self) -> dict[str, str]:
        """What locust tells the listeners of each request."""
        return {"kind": type(self).__name__}

    def patience_seconds(self) -> float:
        return FastHttpUser.network_timeout

    @task
    def ask(self) -> None:
        with self.client.post(
            "/infer", data=next(self.requests), headers=HEADERS, name=type(self).__name__, catch_response=True
        ) as answer:
            self.judge(answer)

    def judge(self, answer: ResponseContextManager) -> None:
        """Say of an answer why it is none."""
        fault = _fault(answer)
        if answer.status_code not in (0, 200):
            answer.failure(reason(Reply(answer.status_code, answer.content)))
        elif fault is not None:
            answer.failure(type(fault).__name__)
            time.sleep(RETRY_SECONDS)
        elif (outputs := _outputs(answer.content)) != self.inputs:
            answer.failure(f"{outputs} outputs for {self.inputs} inputs")


class OneText(Caller):
    """The caller of most services: one question at a time."""

    weight = 3


class BatchOfTen(Caller):
    """Has collected ten texts before it asks."""

    inputs = 10


class FloatFeatures(Caller):
    """Sends rows of numbers, as from sensors."""

    kinds = ("features",)


class ImpatientCaller(Caller):
    """Closes the connection when its answer takes longer than its patience, which is short. That it did so is no failure."""

    inputs = 10

    def patience_seconds(self) -> float:
        return self.random.uniform(*PATIENCE_SECONDS)

    def wait_time(self) -> float:
        return self.random.uniform(*PAUSE_SECONDS)

    def judge(self, answer: ResponseContextManager) -> None:
        if isinstance(_fault(answer), TimeoutError):
            answer.request_meta |= {"name": f"{type(self).__name__} {journal.HUNG_UP}", "response_time": None}
            answer.success()
        else:
            super().judge(answer)


def add_options(parser: LocustArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="Of the traffic")
    parser.add_argument("--models", type=Path, default=ROOT / "models", help="Folder with the words of the text models")
    parser.add_argument("--journal", type=Path, include_in_web_ui=False, help="Where to write a line for every request")


def look_around(environment: Environment, **_: Any) -> None:
    """Ask the server what it serves, and leave out the callers who would have nothing to ask."""
    assert environment.parsed_options is not None
    try:
        models = discovery.served(environment.host or "").values()
    except discovery.NoServer as fault:
        environment.process_exit_code = 2
        raise StopTest(str(fault)) from None
    served = [(model, discovery.words(environment.parsed_options.models, model)) for model in models]
    for kind in [one for one in environment.user_classes if issubclass(one, Caller)]:
        kind.models = [(model, words) for model, words in served if model["input"]["kind"] in kind.kinds]
        if not kind.models:
            environment.user_classes.remove(kind)
            logger.warning("%s is left out: no model here takes %s", kind.__name__, " or ".join(kind.kinds))
    if not environment.user_classes:
        environment.process_exit_code = 2
        raise StopTest(f"{environment.host} serves no model that anybody here could ask")
    Caller.numbers = itertools.count()


def keep_journal(environment: Environment, **_: Any) -> None:
    """Write every request down, when a file is named."""
    assert environment.parsed_options is not None
    if environment.parsed_options.journal is None:
        return
    writer = journal.Writer(environment.parsed_options.journal)

    def note(response_time: float | None, exception: Exception | None, context: dict[str, str], **_: Any) -> None:
        if response_time is None:
            writer.write(context["kind"], math.nan, journal.HUNG_UP)
        elif exception is None:
            writer.write(context["kind"], response_time, journal.ANSWERED)
        else:
            writer.write(context["kind"], response_time, str(exception))

    environment.events.request.add_listener(note)
    environment.events.quit.add_listener(lambda **_: writer.close())


def _fault(answer: ResponseContextManager) -> Exception | None:
    """What went wrong with the connection; the client wraps it."""
    fault: Exception | None = answer.request_meta["exception"]
    return getattr(fault, "original", fault)


def _outputs(answer: bytes) -> int:
    """How many outputs there are in the body of an answer."""
    try:
        return len(json.loads(answer)["outputs"])
    except (ValueError, KeyError, TypeError):
        return 0


def settle(**_: Any) -> None:
    """What there is now stays: collecting it over and over would stop all callers for tens of milliseconds each time."""
    gc.collect()
    gc.freeze()


events.init_command_line_parser.add_listener(add_options)
events.test_start.add_listener(look_around)
events.test_start.add_listener(settle)
events.init.add_listener(keep_journal)
