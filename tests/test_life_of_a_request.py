"""The way of one POST /infer through a frontend and an engine, in this process: the modules and calls that it passes, and its forms.

docs/architecture.md tells the same way joint by joint. `pytest -s` prints the figures.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from itertools import pairwise
from operator import and_
from pathlib import Path
from types import FrameType
from typing import Any, cast
from unittest.mock import patch

import pytest
from websockets.sync.client import connect

from service.engine.build import build_batcher, build_engine
from service.engine.internal_errors import InternalErrors
from service.engine.loading import ModelLoader
from service.engine.trials import TrialReports
from service.engine.worker import Worker
from service.frontend.dispatch.dispatcher import Dispatcher
from service.ipc.channel import Channel, encode, pair
from service.ipc.heartbeat import Heartbeat
from service.ipc.messages.control import Attach
from service.log import Log
from service.metrics import Metrics
from service.settings import Settings
from service.supervisor.repository import Repository
from tests import models
from tests.frontend.in_process import InProcess, in_process

ROOT = Path(__file__).parent.parent
MOST_MODULES, MOST_CALLS, MOST_FORMS = 63, 390, 36
REPEATS = 5


class Trace:
    """The calls of functions of this project, as `file: function`, and the objects that they take and return."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.objects: dict[int, Any] = {}

    def note(self, frame: FrameType, event: str, value: Any) -> None:
        """Note a call or a return: a function for sys.setprofile."""
        file = frame.f_code.co_filename
        if event not in ("call", "return") or not file.startswith((f"{ROOT}/service", f"{ROOT}/kernels")):
            return
        if event == "call":
            self.calls.append(f"{Path(file).relative_to(ROOT)}: {frame.f_code.co_qualname}")
        for each in (value, *frame.f_locals.values()):
            if type(each).__module__.partition(".")[0] in ("service", "kernels"):
                self.objects[id(each)] = each

    def since(self, earlier: Trace) -> list[Any]:
        """Return the objects that an earlier trace does not have."""
        return [each for id, each in self.objects.items() if id not in earlier.objects]


class RealEngine:
    """An engine on the CPU in a thread, in the place of the stand-in."""

    def __init__(self, settings: Settings) -> None:
        metrics, log, (near, far) = Metrics(), Log("engine"), pair()
        self._supervisor, self._control, errors = Channel(near), Channel(far), InternalErrors(log, metrics)
        versions = Repository(settings.models).readable_manifest().model_versions
        engine = build_engine(versions, settings, metrics, log, threads=1)
        batcher = build_batcher(settings, engine, metrics, errors)
        loader = ModelLoader(engine, batcher, lambda *_: pytest.fail("nothing is loaded"), log)
        self.worker = Worker(
            self._control, Heartbeat(), batcher, engine, loader, TrialReports(self._control), 0, metrics, errors
        )
        self._trace: Callable[[FrameType, str, Any], None] | None = None
        self._follows = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def attach(self, dispatcher: Dispatcher) -> None:
        near, far = pair()
        self._supervisor.send(encode(Attach()), attached=far)
        self._supervisor.flush()
        far.close()
        dispatcher.attach(Channel(near))
        self._thread.start()

    def follow(self, trace: Trace | None) -> None:
        """Note the calls of the next loops in a trace. Returns when the engine waits for a request."""
        self._trace = None if trace is None else trace.note
        self._follows.clear()
        self._follows.wait()

    def close(self) -> None:
        self._supervisor.close()
        self._thread.join()
        for channel in (*self.worker._frontends, self._control):
            channel.close()

    def _run(self) -> None:
        while self._control.open:
            sys.setprofile(self._trace)
            self._follows.set()
            self.worker.run_once()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    root = tmp_path_factory.mktemp("models")
    models.words(root)
    models.forecaster(root)
    engine = RealEngine(Settings(models=root, device="cpu"))
    with (
        patch("tests.frontend.in_process.StandInEngine", lambda _: engine),
        in_process(root, tmp_path_factory.mktemp("log")) as running,
    ):
        yield running


@contextmanager
def following(service: InProcess) -> Iterator[Trace]:
    """Trace what the frontend and the engine do meanwhile."""
    trace, engine = Trace(), cast(Any, service.engine)
    engine.follow(trace)
    service.call(lambda: sys.setprofile(trace.note))
    yield trace
    service.call(lambda: sys.setprofile(None))
    engine.follow(None)


def traced(service: InProcess) -> Trace:
    """Return the trace of one request, from the bytes that arrive to the bytes that leave."""
    with following(service) as trace:
        assert service.client.post("/infer", json={"model": "words", "inputs": ["how far"]}).status_code == 200
    return trace


def test_request_passes_few_modules_and_calls(service: InProcess) -> None:
    """Only what occurs in each of several traces counts: an engine also works while it waits for a request."""
    traces = [traced(service) for _ in range(REPEATS)]
    calls = reduce(and_, (Counter(trace.calls) for trace in traces))
    forms = reduce(and_, ({type(each) for each in later.since(earlier)} for earlier, later in pairwise(traces)))
    modules = sorted({call.partition(":")[0] for call in calls})
    print(f"\n{len(modules)} modules, {calls.total()} calls, {len(forms)} forms", *modules, *forms, *calls, sep="\n")
    assert len(modules) <= MOST_MODULES and calls.total() <= MOST_CALLS and len(forms) <= MOST_FORMS


def joints(part: str) -> list[str]:
    """Return the functions that a part of the page names."""
    return re.findall(r"`((?:service|kernels)/[\w/]+\.py: \w[\w.]*)`", part)


def test_page_names_the_joints_of_a_request_and_a_chunk(service: InProcess) -> None:
    of_request, of_chunk = (ROOT / "docs/architecture.md").read_text().split("### The life of one chunk")
    assert len(joints(of_request)) >= 9 and not set(joints(of_request)) - set(traced(service).calls)
    url = f"{service.client.base_url}/stream?model=forecaster".replace("http", "ws", 1)
    with connect(url) as stream:
        for _ in range(2):
            with following(service) as trace:
                stream.send('{"input": [[0.5, 0.5, 0.5]]}')
                assert "outputs" in json.loads(stream.recv())
    assert len(joints(of_chunk)) >= 7 and not set(joints(of_chunk)) - set(trace.calls)
