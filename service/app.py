"""The only place that builds things. Each process builds its own and closes it in reverse order.

`python -m service.app front|engine` is how the supervisor starts a child, which reads what it needs to know from its standard
input.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from service.errors import ModelError, NoRoom, ServiceError, SettingsError, StartError
from service.ipc.messages import Edition, Manifest, ModelKey
from service.ipc.process_config import DEVICE_LOST, Birth, Journal, Pulse, journal_records, tell
from service.log import Log
from service.metrics import Metrics
from service.modeling import spec
from service.settings import Settings
from service.supervisor.repository import Repository

if TYPE_CHECKING:
    import torch

    from service.engine.batching.batcher import Batcher
    from service.engine.execution.cuda_graph_runner import Between
    from service.engine.execution.device_engine import Engine, Prepared
    from service.frontend.catalog import Models
    from service.modeling.encoder import Encoder

# A front never loads torch and an engine never loads a web framework, so that each starts fast and stays small:
# this is the one module whose functions import what they build.


T = TypeVar("T")
TURN_BUDGET_MS = {"cuda": 0.5, "cpu": 5.0}
"""Unless the settings say otherwise."""


def run_front() -> None:
    """A front process, from birth to drain."""
    import socket

    from service.frontend import app
    from service.frontend.dispatch.dispatcher import Engines
    from service.frontend.inference import Front
    from service.frontend.server import Control, serve

    birth = Birth.read()
    settings, metrics = birth.read_settings(), Metrics()
    control = Control(birth.open_control())
    log = Log("front")
    try:
        models = _models(birth.manifest, log, strict=birth.strict)
    except StartError as fault:
        control.failed(str(fault))
        return
    engines = Engines(metrics, settings.channel_bytes, control.ready, len(settings.devices))
    front = Front(settings, models, engines, metrics, log, control)
    application = app.build(front)
    _settle()
    serve(application, front, control, socket.socket(fileno=birth.listening), birth.grpc, follows=not birth.strict)


def run_engine() -> None:
    """An engine process, from birth to the supervisor's end of file."""
    from service.engine.execution.device import DeviceLost
    from service.engine.loading import Models
    from service.engine.worker import Worker
    from service.ipc.channel import Kind

    birth = Birth.read()
    settings, metrics = birth.read_settings(), Metrics()
    control, pulse = birth.open_control(), Pulse(birth.pulse)
    log = Log(f"engine-{birth.place}")
    try:
        engine = engine_of(birth.manifest.editions, settings, metrics, log, place=birth.place, strict=birth.strict)
    except StartError as fault:
        tell(control, Kind.FAILED, str(fault))
        return
    for one in engine.loaded():
        log.info("loaded", model=one.name, version=one.version, device=one.device, backends=one.backends)
    batcher = build_batcher(settings, engine, metrics, log, Journal(journal_records(settings), birth.journal))
    models = Models(engine, batcher, partial(_prepared, settings, engine), log)
    worker = Worker(control, pulse, batcher, engine, models, birth.place, metrics)
    _settle()
    try:
        worker.run()
    except DeviceLost as lost:
        log.error("device lost", error=str(lost))
        # At once: nothing that was computed may leave any more, and what torch holds cannot be given back.
        os._exit(DEVICE_LOST)


def build_engine(settings: Settings, metrics: Metrics) -> Engine:
    """An engine on the first device with every model loaded and warm, each of generation 0; raises StartError."""
    editions = Repository(settings.models, settings.versions).manifest().editions
    return engine_of([msgspec.structs.replace(one, generation=0) for one in editions], settings, metrics, Log("engine"))


def engine_of(
    editions: Sequence[Edition], settings: Settings, metrics: Metrics, log: Log, *, place: int = 0, strict: bool = True
) -> Engine:
    """The engine of this place with these loaded and warm; one that cannot be raises StartError or, unless `strict`, is gone without."""
    import torch

    from kernels import compile as compiler
    from service.engine.execution.device import hold
    from service.engine.execution.device_engine import Engine

    torch.set_num_threads(compute_threads(len(os.sched_getaffinity(0)), settings))
    compiler.keep_in(settings.cache)
    device = _device(settings.devices[place])
    hold(device)
    encoders = dict(_all_of(editions, lambda edition: _encoder(edition, device, settings), log, strict=strict))
    return Engine(
        encoders,
        metrics,
        device=device,
        max_turn_rows=settings.max_turn_rows,
        max_turn_tokens=settings.max_turn_tokens,
        slots=settings.slots,
    )


def _prepared(settings: Settings, engine: Engine, edition: Edition, between_turns: Between) -> Prepared:
    """An edition made ready beside what an engine serves; raises ModelError, or NoRoom when it does not fit."""
    from service.engine.execution.device import available_bytes

    def make() -> Encoder:
        _check_room(edition, _weights_bytes(edition), available_bytes(engine.device))
        encoder = _encoder(edition, engine.device, settings)
        if settings.max_model_bytes:
            _check_room(edition, encoder.weight_bytes(), settings.max_model_bytes - engine.weight_bytes)
        return encoder

    return engine.prepared(make, between_turns)


def _encoder(edition: Edition, device: torch.device, settings: Settings) -> Encoder:
    from service.modeling import store
    from service.modeling.encoder import Encoder

    folder = Path(edition.folder)
    model = spec.read(folder)
    if model != spec.ModelSpec.model_validate_json(edition.spec):
        raise ModelError(f"{folder / spec.MODEL} has changed since it was read: load the model again")
    return Encoder(model, store.read_arrays(folder, model), device, settings.fold_limit_bytes)


def _weights_bytes(edition: Edition) -> int:
    file = Path(edition.folder) / spec.WEIGHTS
    try:
        return file.stat().st_size
    except OSError as fault:
        raise ModelError(f"{file} cannot be read: {fault.strerror}") from fault


def _check_room(edition: Edition, needed: int, left: int) -> None:
    if needed > left:
        raise NoRoom(
            f"{edition.name} version {edition.version} needs {needed} bytes beside what is served, and {max(0, left)} are left: "
            "unload another version, or raise SEQSERVE_MAX_MODEL_BYTES if that is set"
        )


def _all_of(
    editions: Iterable[Edition], make: Callable[[Edition], T], log: Log, *, strict: bool
) -> Iterator[tuple[ModelKey, T]]:
    """What is made of each; one of which nothing can be made is gone without, unless `strict`."""
    for edition in editions:
        try:
            yield edition.key, make(edition)
        except ModelError as fault:
            if strict:
                raise
            log.error("not loaded", model=edition.name, version=edition.version, error=str(fault))


def compute_threads(cores: int, settings: Settings) -> int:
    """Those of one engine: the cores that the fronts leave are shared by the engines."""
    return max(1, (cores - settings.fronts) // len(settings.devices))


def answer(settings: Settings, name: str, texts: list[str]) -> list[dict[str, Any]]:
    """Answer texts in this process, on the first device, without a server; raises what the HTTP door would have said."""
    from service.frontend import head_outputs
    from service.frontend.rest import schemas
    from service.ipc.messages import Answer

    manifest = Repository(settings.models, settings.versions).manifest()
    model = _models(manifest, Log("infer"), strict=True).find(name, None)
    metrics, log = Metrics(), Log("infer")
    engine = engine_of([edition for edition in manifest.editions if edition.key == model.key], settings, metrics, log)
    batcher = build_batcher(settings, engine, metrics, log)
    request, data = schemas.sequences(schemas.InferBody(model=name, inputs=texts), model, settings, time.monotonic())
    replies: list[tuple[Answer, list[bytes]]] = []
    errors: list[ServiceError] = []
    batcher.submit(request, data, lambda *reply: replies.append(reply), errors.append)
    while not replies and not errors:
        batcher.step()
    if errors:
        raise errors[0]
    shapes, arrays = replies[0]
    return head_outputs.outputs(model.spec, shapes, b"".join(arrays))


def _settle() -> None:
    """What is built by now lives as long as the process: the collector would stop it for 30 ms and more to look at it all again."""
    gc.collect()
    gc.freeze()
    # Once more, or the collector would still count them, and let the garbage of 100,000 requests pile up before it looks at any of it.
    gc.collect()


def build_batcher(settings: Settings, engine: Engine, metrics: Metrics, log: Log, journal: Journal | None = None) -> Batcher:
    """The queue and the sessions of an engine; without a journal, these are forgotten with it."""
    from service.engine.batching.batcher import Batcher
    from service.engine.batching.scheduler import Limits
    from service.engine.batching.sessions import Sessions

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


def _models(manifest: Manifest, log: Log, *, strict: bool) -> Models:
    """What a front serves, tokenizers loaded; raises ModelError, or, unless `strict`, goes without what cannot be served."""
    from service.frontend import catalog
    from service.frontend.catalog import Models

    return Models(dict(_all_of(manifest.editions, catalog.read, log, strict=strict)).values(), manifest.aliases)


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
