"""The only place that builds things. Each process builds its own and closes it in reverse order.

`python -m service.app front|engine` is how the supervisor starts a child, which reads what it needs to know from its standard
input.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.errors import ModelError, ServiceError, SettingsError, StartError
from service.lifeline import DEVICE_LOST, Birth, Journal, Pulse, journal_records, tell
from service.logs import Log
from service.metrics import Metrics
from service.sequence import ModelKey
from service.settings import Settings
from service.zoo import spec

if TYPE_CHECKING:
    import torch

    from service.batching.batcher import Batcher
    from service.engine.engine import Engine
    from service.faces.wire import Served

# A front never loads torch and an engine never loads a web framework, so that each starts fast and stays small:
# this is the one module whose functions import what they build.


TURN_BUDGET_MS = {"cuda": 0.5, "cpu": 5.0}
"""Unless the settings say otherwise."""
Catalog = dict[str, dict[str, tuple[Path, spec.ModelSpec]]]
"""Folder and spec of every model, by name and version, versions rising."""


def catalog(root: Path) -> Catalog:
    """Every model under `root`, read and checked; raises ModelError."""
    found = spec.find(root)
    if not found:
        raise ModelError(f"models folder {root} has no model: put one there, or name another folder with --models")
    return {
        name: {version: (folder, spec.read(folder)) for version, folder in versions.items()} for name, versions in found.items()
    }


def run_front() -> None:
    """A front process, from birth to drain."""
    import socket

    from service.faces import http
    from service.faces.calls import Front
    from service.faces.engines import Engines
    from service.front import Control, serve

    birth = Birth.read()
    settings, metrics = birth.read_settings(), Metrics()
    control = Control(birth.open_control())
    try:
        served = _served(settings.models)
    except StartError as fault:
        control.failed(str(fault))
        return
    engines = Engines(metrics, settings.channel_bytes, control.ready, len(settings.devices))
    front = Front(settings, served, engines, metrics, Log("front"), control)
    application = http.build(front)
    _settle()
    serve(application, front, control, socket.socket(fileno=birth.listening))


def run_engine() -> None:
    """An engine process, from birth to the supervisor's end of file."""
    from service.channel import Kind
    from service.engine.device import DeviceLost
    from service.sequence import Hello
    from service.worker import Worker

    birth = Birth.read()
    settings, metrics = birth.read_settings(), Metrics()
    control, pulse = birth.open_control(), Pulse(birth.pulse)
    log = Log(f"engine-{birth.place}")
    try:
        engine = build_engine(settings, metrics, place=birth.place)
    except StartError as fault:
        tell(control, Kind.FAILED, str(fault))
        return
    hello = Hello(engine.loaded(), birth.place)
    for one in hello.models:
        log.info("loaded", model=one.name, version=one.version, device=one.device, backends=one.backends)
    journal = Journal(journal_records(settings), birth.journal)
    worker = Worker(control, pulse, build_batcher(settings, engine, metrics, log, journal), engine, hello, metrics)
    _settle()
    try:
        worker.run()
    except DeviceLost as lost:
        log.error("device lost", error=str(lost))
        # At once: nothing that was computed may leave any more, and what torch holds cannot be given back.
        os._exit(DEVICE_LOST)


def build_engine(settings: Settings, metrics: Metrics, only: str | None = None, *, place: int = 0) -> Engine:
    """The engine of this place, with every model, or only the named one, loaded and warm; raises StartError."""
    import torch

    from kernels import compile as compiler
    from service.engine.device import hold
    from service.engine.engine import Engine
    from service.zoo import store
    from service.zoo.encoder import Encoder

    torch.set_num_threads(compute_threads(len(os.sched_getaffinity(0)), settings))
    compiler.keep_in(settings.cache)
    device = _device(settings.devices[place])
    hold(device)
    encoders = {
        ModelKey(name, version): Encoder(model, store.read_arrays(folder, model), device, settings.fold_limit_bytes)
        for name, versions in catalog(settings.models).items()
        for version, (folder, model) in versions.items()
        if only in (None, name)
    }
    return Engine(
        encoders,
        metrics,
        max_turn_rows=settings.max_turn_rows,
        max_turn_tokens=settings.max_turn_tokens,
        slots=settings.slots,
    )


def compute_threads(cores: int, settings: Settings) -> int:
    """Those of one engine: the cores that the fronts leave are shared by the engines."""
    return max(1, (cores - settings.fronts) // len(settings.devices))


def answer(settings: Settings, name: str, texts: list[str]) -> list[dict[str, Any]]:
    """Answer texts in this process, on the first device, without a server; raises what the HTTP door would have said."""
    from service.faces import answers, wire
    from service.sequence import Answer

    model = wire.served(_served(settings.models), name, None)
    metrics = Metrics()
    engine = build_engine(settings, metrics, only=model.spec.name)
    batcher = build_batcher(settings, engine, metrics, Log("infer"))
    request, data = wire.sequences(wire.InferBody(model=name, inputs=texts), model, settings, time.monotonic())
    replies: list[tuple[Answer, list[bytes]]] = []
    errors: list[ServiceError] = []
    batcher.submit(request, data, lambda *reply: replies.append(reply), errors.append)
    while not replies and not errors:
        batcher.step()
    if errors:
        raise errors[0]
    shapes, arrays = replies[0]
    return answers.outputs(model.spec, shapes, b"".join(arrays))


def _settle() -> None:
    """What is built by now lives as long as the process: the collector would stop it for 30 ms and more to look at it all again."""
    gc.collect()
    gc.freeze()
    # Once more, or the collector would still count them, and let the garbage of 100,000 requests pile up before it looks at any of it.
    gc.collect()


def build_batcher(settings: Settings, engine: Engine, metrics: Metrics, log: Log, journal: Journal | None = None) -> Batcher:
    """The queue and the sessions of an engine; without a journal, these are forgotten with it."""
    from service.batching.batcher import Batcher
    from service.batching.scheduler import Limits
    from service.batching.sessions import Sessions

    budget_ms = settings.turn_budget_ms or TURN_BUDGET_MS[engine.device.type]
    limits = Limits(
        max_waiting=settings.max_waiting,
        max_turn_rows=settings.max_turn_rows,
        max_turn_tokens=settings.max_turn_tokens,
        turn_seconds=budget_ms / 1000,
        continuous=settings.batching == "continuous",
    )
    kept = journal or Journal(journal_records(settings))
    sessions = Sessions(settings.max_sessions, settings.session_idle_seconds, kept, metrics)
    return Batcher(limits, engine, sessions, metrics, time.monotonic, log)


def _served(root: Path) -> dict[str, dict[str, Served]]:
    """Every model as a face sees it, tokenizers loaded, under its name and its aliases."""
    from service.faces.wire import Served
    from service.zoo.text import Tokenizer

    models = {
        name: {
            version: Served(model, version, Tokenizer.read(folder, model) if model.input.kind == "text" else None)
            for version, (folder, model) in versions.items()
        }
        for name, versions in catalog(root).items()
    }
    return models | {alias: models[name] for alias, name in spec.aliases(root, models).items()}


def _device(wanted: str) -> torch.device:
    """The device that `wanted` names; raises SettingsError when torch cannot use it."""
    import torch

    if wanted == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingsError(f"device is {wanted} and torch sees {torch.cuda.device_count()} GPUs: name another with --device")
    return device


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    {"front": run_front, "engine": run_engine}[sys.argv[1]]()


if __name__ == "__main__":
    main()
