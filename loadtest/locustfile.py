"""Mixed traffic on a running server: texts, token ids, sessions, and the Open Inference Protocol.

To use locust's web page: `locust -f loadtest/locustfile.py --host http://127.0.0.1:8000`.
Each kind of user sends to all models that it can use, in turn. It is skipped when the server has none.
"""

from __future__ import annotations

import itertools
import logging
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import gevent
from locust import FastHttpUser, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopTest
from locust.runners import Runner

from loadtest import discovery
from loadtest.generator.readers import refusal
from loadtest.servers import MODELS
from loadtest.traffic import Traffic
from service.settings import CLIENT_KEY

CHUNKS = 10
"""Chunks of a session."""
logger = logging.getLogger("loadtest")


class Client(FastHttpUser):
    """Sends a request, waits for the answer, and repeats."""

    abstract = True
    insecure = False
    models: ClassVar[Iterator[Traffic]]
    """The inputs of one model after the other; set when a test starts."""
    count = 1
    """Inputs of a request."""
    texts = True
    """Whether it sends texts, and needs the words of a model. Otherwise it sends token ids or numbers."""

    @classmethod
    def can_use(cls, model: dict[str, Any]) -> bool:
        """Return whether it can send to a model, as GET /models describes it."""
        return bool(model["input"]["kind"] == "text")

    @task
    def run_task(self) -> None:
        self.ask()

    def ask(self) -> None:
        """Send the next request."""
        self.post(next(self.models).body(self.count))

    def post(self, body: dict[str, Any], path: str = "/infer") -> None:
        """Send a request. The reason of a failure is the status and the error code."""
        with self.client.post(path, json=body, name=type(self).__name__, catch_response=True) as response:
            if response.status_code not in (0, 200):
                response.failure(refusal(response.status_code, response.content))


class OneText(Client):
    """Sends one text at a time, like most clients."""

    weight = 3


class TenTexts(Client):
    """Sends ten texts in a request."""

    count = 10


class TokenIds(Client):
    """Sends the token ids of one text."""

    texts = False

    @classmethod
    def can_use(cls, model: dict[str, Any]) -> bool:
        return model["input"]["kind"] in ("text", "ids")


class Session(Client):
    """Sends the chunks of one session after the other, like a sensor."""

    texts = False

    @classmethod
    def can_use(cls, model: dict[str, Any]) -> bool:
        return bool(model.get("streams") and model["input"]["kind"] != "text")

    def ask(self) -> None:
        model, name = next(self.models), f"load-{uuid.uuid4().hex}"
        for number in range(1, CHUNKS + 1):
            self.post(model.body() | {"session": name, "end": number == CHUNKS})


class OpenInference(Client):
    """Sends one text as a tensor of the Open Inference Protocol."""

    def ask(self) -> None:
        model = next(self.models)
        tensor = {"name": "text", "shape": [1, 1], "datatype": "BYTES", "data": [model.input()]}
        self.post({"inputs": [tensor]}, f"/v2/models/{model.name}/infer")


def add_options(parser: LocustArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="Seed of the traffic")
    parser.add_argument("--models", type=Path, default=MODELS, help="Folder with the words of the text models")
    parser.add_argument("--seconds", type=int, include_in_web_ui=False, help="Duration from when all users have started")
    parser.add_argument("--key-file", type=Path, include_in_web_ui=False, help=f"File with the key, instead of {CLIENT_KEY}")
    parser.add_argument("--ca", type=Path, include_in_web_ui=False, help="Authority of the server's certificate")


def discover_models(environment: Environment, **_: Any) -> None:
    """Assign the server's models to the kinds of user, and remove the kinds without a model. All users send the same key."""
    options = environment.parsed_options
    assert options is not None
    try:
        access = discovery.access_of(options)
        served = discovery.served(environment.host or "", access).values()
    except discovery.CannotMeasure as error:
        environment.process_exit_code = 2
        raise StopTest(str(error)) from None
    Client.default_headers = access.headers
    Client.ssl_context_factory = staticmethod(lambda **_: access.tls())
    words = {model["name"]: discovery.words(options.models, model) for model in served}
    for kind in [user for user in environment.user_classes if issubclass(user, Client)]:
        usable = [model for model in served if kind.can_use(model) and (words[model["name"]] or not kind.texts)]
        inputs = [Traffic(model, words[model["name"]] if kind.texts else (), options.seed) for model in usable]
        kind.models = itertools.cycle(inputs)
        if not inputs:
            environment.user_classes.remove(kind)
            logger.warning("%s is skipped: the server has no model for it, or --models does not have its words", kind.__name__)


def end_after_seconds(environment: Environment, runner: Runner, **_: Any) -> None:
    """End the test --seconds after all users have started. Locust's --run-time also counts the time that this takes."""
    assert environment.parsed_options is not None
    if (seconds := environment.parsed_options.seconds) is not None:
        environment.events.spawning_complete.add_listener(lambda **_: gevent.spawn_later(seconds, runner.quit))


events.init_command_line_parser.add_listener(add_options)
events.test_start.add_listener(discover_models)
events.init.add_listener(end_after_seconds)
