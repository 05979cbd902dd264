"""The load test: users of several kinds, each with its own seeded traffic, on all models of a server.

To use locust's web page: `locust -f loadtest/locustfile.py --host http://127.0.0.1:8000`.
A kind of user is skipped when the server has no model for it.
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import gevent
from locust import FastHttpUser, events, stats, task
from locust.argument_parser import LocustArgumentParser
from locust.contrib.fasthttp import ResponseContextManager
from locust.env import Environment
from locust.exception import StopTest
from locust.runners import Runner

from loadtest import discovery
from loadtest.generator.readers import refusal
from loadtest.servers import ROOT
from loadtest.traffic import Traffic
from service.settings import CLIENT_KEY

REQUESTS = 100
"""Distinct requests that each user prepares, and sends in a cycle."""
PATIENCE_SECONDS = (0.0005, 0.003)
"""Range of the timeouts of impatient users."""
PAUSE_SECONDS = (0.02, 0.1)
"""Range of the pauses of impatient users between requests."""
RETRY_SECONDS = 0.1
"""Pause of a user after a broken connection."""
CHUNKS = 10
"""Chunks of a session."""
HUNG_UP = "hung up"
HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}

# Locust's page and report. By default it rounds times to whole milliseconds and draws a point every five seconds.
stats.bucket_response_time = lambda ms: float(f"{ms:.3g}")  # type: ignore[assignment, return-value]
stats.PERCENTILES_TO_CHART = [0.5, 0.9, 0.99]
stats.PERCENTILES_TO_STATISTICS = [0.9, 0.99]
stats.HISTORY_STATS_INTERVAL_SEC = 1

logger = logging.getLogger("loadtest")


class LoadUser(FastHttpUser):
    """Sends a request, waits for the answer, and repeats. Its requests depend only on the seed and the number of the user."""

    abstract = True
    insecure = False
    kinds: ClassVar[tuple[str, ...]] = ("text", "ids")
    """Kinds of model input that it can send."""
    streaming = False
    """Whether it needs models that stream."""
    inputs = 1
    models: ClassVar[list[tuple[dict[str, Any], list[str]]]] = []
    """Descriptions from GET /models, with the words of text models; set when a test starts."""
    numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, environment: Environment) -> None:
        assert environment.parsed_options is not None
        self.random = random.Random(f"{environment.parsed_options.seed} {next(self.numbers)}")
        self.network_timeout = self.patience_seconds()
        super().__init__(environment)
        traffic = [Traffic(model, words, self.random.getrandbits(32)) for model, words in self.models]
        self.requests: Iterator[str] = itertools.cycle(
            [json.dumps(body) for body in itertools.islice(self.bodies(traffic), REQUESTS)]
        )

    def bodies(self, traffic: list[Traffic]) -> Iterator[dict[str, Any]]:
        """Yield the bodies of its requests, from each source in turn."""
        return (source.body(self.inputs) for source in itertools.cycle(traffic))

    @classmethod
    def can_use(cls, model: Mapping[str, Any]) -> bool:
        """Return whether it can send requests to a model, as GET /models describes it."""
        return model["input"]["kind"] in cls.kinds and (model.get("streams", False) or not cls.streaming)

    def patience_seconds(self) -> float:
        return FastHttpUser.network_timeout

    @task
    def ask(self) -> None:
        with self.client.post(
            "/infer", data=next(self.requests), headers=HEADERS, name=type(self).__name__, catch_response=True
        ) as response:
            self.judge(response)

    def judge(self, response: ResponseContextManager) -> None:
        """Mark a response as a failure, with the reason, unless it is an answer."""
        error = _connection_error(response)
        if response.status_code not in (0, 200):
            response.failure(refusal(response.status_code, response.content))
        elif error is not None:
            response.failure(type(error).__name__)
            time.sleep(RETRY_SECONDS)
        elif (outputs := _outputs(response.content)) != self.inputs:
            response.failure(f"{outputs} outputs for {self.inputs} inputs")


class OneText(LoadUser):
    """Sends one question at a time, like most clients."""

    weight = 3


class BatchOfTen(LoadUser):
    """Sends ten texts in a request."""

    inputs = 10


class FloatFeatures(LoadUser):
    """Sends rows of numbers, like sensors."""

    kinds = ("features",)


class SensorStream(LoadUser):
    """Sends sequences in chunks of a session, one session after the other."""

    kinds = ("features", "ids")
    streaming = True

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.sent = 0
        self.requests = self._counted(self.requests)

    def _counted(self, requests: Iterator[str]) -> Iterator[str]:
        for request in requests:
            self.sent += 1
            yield request

    def on_stop(self) -> None:
        """Send the rest of the session, so that no session stays open."""
        while self.sent % CHUNKS:
            self.ask()

    def bodies(self, traffic: list[Traffic]) -> Iterator[dict[str, Any]]:
        session = f"load-{self.random.getrandbits(64):x}"
        for source in itertools.cycle(traffic):
            for sent in range(1, CHUNKS + 1):
                yield source.body() | {"session": session, "end": sent == CHUNKS}


class ImpatientCaller(LoadUser):
    """Closes the connection when an answer exceeds its short timeout. This is not a failure."""

    inputs = 10

    def patience_seconds(self) -> float:
        return self.random.uniform(*PATIENCE_SECONDS)

    def wait_time(self) -> float:
        return self.random.uniform(*PAUSE_SECONDS)

    def judge(self, response: ResponseContextManager) -> None:
        if isinstance(_connection_error(response), TimeoutError):
            response.request_meta |= {"name": f"{type(self).__name__} {HUNG_UP}", "response_time": None}
            response.success()
        else:
            super().judge(response)


def add_options(parser: LocustArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="Seed of the traffic")
    parser.add_argument("--models", type=Path, default=ROOT / "models", help="Folder with the words of the text models")
    parser.add_argument("--seconds", type=int, include_in_web_ui=False, help="Duration from when all users have started")
    parser.add_argument(
        "--key-file", type=Path, include_in_web_ui=False, help=f"File with the key to send, instead of {CLIENT_KEY}"
    )
    parser.add_argument("--ca", type=Path, include_in_web_ui=False, help="Authority of the server's certificate")


def discover_models(environment: Environment, **_: Any) -> None:
    """Assign the server's models to the kinds of user, and remove the kinds without a model. All users send the same key."""
    assert environment.parsed_options is not None
    try:
        access = discovery.access_of(environment.parsed_options)
        models = discovery.served(environment.host or "", access).values()
    except discovery.CannotMeasure as error:
        environment.process_exit_code = 2
        raise StopTest(str(error)) from None
    LoadUser.default_headers = access.headers
    LoadUser.ssl_context_factory = staticmethod(lambda **_: access.tls())
    served = [(model, discovery.words(environment.parsed_options.models, model)) for model in models]
    for kind in [user for user in environment.user_classes if issubclass(user, LoadUser)]:
        kind.models = [(model, words) for model, words in served if kind.can_use(model)]
        if not kind.models:
            environment.user_classes.remove(kind)
            needed = f"{'that streams, ' if kind.streaming else ''}with input {' or '.join(kind.kinds)}"
            logger.warning("%s is skipped: the server has no model %s", kind.__name__, needed)
    if not environment.user_classes:
        environment.process_exit_code = 2
        raise StopTest(f"{environment.host} serves no model with an input that the load test can send")
    LoadUser.numbers = itertools.count()


def end_after_seconds(environment: Environment, runner: Runner, **_: Any) -> None:
    """End the test --seconds after all users have started. Locust's --run-time also counts the time that this takes."""
    assert environment.parsed_options is not None
    if (seconds := environment.parsed_options.seconds) is not None:
        environment.events.spawning_complete.add_listener(lambda **_: gevent.spawn_later(seconds, runner.quit))


def _connection_error(response: ResponseContextManager) -> Exception | None:
    """Return the error of the connection, without the client's wrapper."""
    error: Exception | None = response.request_meta["exception"]
    return getattr(error, "original", error)


def _outputs(body: bytes) -> int:
    """Return the number of outputs in a response."""
    try:
        return len(json.loads(body)["outputs"])
    except (ValueError, KeyError, TypeError):
        return 0


def freeze_objects(**_: Any) -> None:
    """Exclude existing objects from garbage collection, which would stop all users for tens of milliseconds each time."""
    gc.collect()
    gc.freeze()


events.init_command_line_parser.add_listener(add_options)
events.test_start.add_listener(discover_models)
events.test_start.add_listener(freeze_objects)
events.init.add_listener(end_after_seconds)
