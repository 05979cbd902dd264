"""Runs models in this process, without a server: `seqserve infer`, benchmarks and tests."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from service.cores import compute_threads, usable_cores
from service.engine import build
from service.engine.execution.device_engine import DeviceEngine
from service.engine.internal_errors import InternalErrors
from service.errors import ServiceError
from service.frontend import head_outputs, validation
from service.frontend.catalog import build_catalog
from service.ipc.messages import Answer
from service.log import Log
from service.metrics import Metrics
from service.settings import Settings
from service.supervisor.repository import Repository


def build_engine(settings: Settings, metrics: Metrics) -> DeviceEngine:
    """Build an engine on the first device with every model loaded, each with generation 0; raises StartError."""
    versions = Repository(settings.models, settings.versions).manifest().model_versions
    versions = [msgspec.structs.replace(version, generation=0) for version in versions]
    return build.build_engine(versions, settings, metrics, Log("engine"), threads=_compute_threads(settings))


def infer(settings: Settings, name: str, texts: list[str]) -> list[dict[str, Any]]:
    """Return one output per text, from the first device; raises the error that the HTTP API would return."""
    metrics, log = Metrics(), Log("infer")
    manifest = Repository(settings.models, settings.versions).manifest()
    model = build_catalog(manifest, log, strict=True).find(name, None)
    versions = [version for version in manifest.model_versions if version.key == model.key]
    engine = build.build_engine(versions, settings, metrics, log, threads=_compute_threads(settings))
    batcher = build.build_batcher(settings, engine, metrics, InternalErrors(log, metrics))
    lengths, data = validation.pack_inputs(texts, head_outputs.input_field, model, settings)
    options = validation.Options(validation.requested_returns((), model.spec), settings.default_deadline_ms)
    request = validation.engine_request(lengths, options, model, time.monotonic())
    replies: list[tuple[Answer, list[bytes]]] = []
    errors: list[ServiceError] = []
    batcher.submit(request, bytes(data), lambda *reply: replies.append(reply), errors.append)
    while not replies and not errors:
        batcher.step()
    if errors:
        raise errors[0]
    answer, parts = replies[0]
    outputs: list[dict[str, Any]] = msgspec.json.decode(model.writer.write(answer, b"".join(parts)))
    return outputs


def _compute_threads(settings: Settings) -> int:
    """Return the threads of the engine. One core stays free for the caller."""
    return compute_threads(usable_cores(), 1, len(settings.devices))
