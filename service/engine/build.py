"""Builds the parts of an engine process from settings: the device engine with its models, and the batcher in front of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from kernels.folder import set_cache_folder
from service.engine.batching.batcher import Batcher
from service.engine.batching.selection import SchedulerLimits
from service.engine.batching.session_table import SessionTable
from service.engine.batching.state_cache import StateCache
from service.engine.batching.stored_sessions import StoredSessions
from service.engine.execution.device import allow_tf32, available_bytes, use_device
from service.engine.execution.device_engine import DeviceEngine
from service.engine.execution.graph_capture import RunBetweenBatches
from service.engine.execution.served_models import LEAST_SLOTS, PreparedModel
from service.engine.internal_errors import InternalErrors
from service.engine.loading import report_load_error
from service.errors import ModelError, NoRoom, SettingsError
from service.ipc.messages.control import NotLoaded
from service.ipc.messages.models import ModelKey, ModelVersion
from service.ipc.session_journal import SessionJournal, journal_records
from service.log import Log
from service.metrics import Metrics
from service.modeling import spec, store
from service.modeling.encoder import Encoder
from service.settings import Settings

BATCH_BUDGET_MS = {"cuda": 0.5, "cpu": 5.0}
"""Default batch budget by device type."""


def build_engine(
    model_versions: Sequence[ModelVersion],
    settings: Settings,
    metrics: Metrics,
    log: Log,
    *,
    place: int = 0,
    threads: int,
    strict: bool = True,
    report: Callable[[NotLoaded], None] = lambda _: None,
    trial: Callable[[ModelKey], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> DeviceEngine:
    """Build the engine of device number `place` with these versions loaded and warmed up.

    threads: for the computation on a CPU. A version that cannot be loaded raises its error, or is logged, reported and left out unless
    `strict`. trial: the context in which a version is loaded, and then warmed up.
    """
    torch.set_num_threads(threads)
    set_cache_folder(settings.cache)
    device = named_device(settings.devices[place])
    use_device(device)
    allow_tf32(device, settings.tf32)
    encoders: dict[ModelKey, Encoder] = {}
    for version in model_versions:
        try:
            with trial(version.key):
                encoders[version.key] = _encoder(version, device)
        except Exception as error:
            if strict:
                raise
            reported = report_load_error(version, error, log)
            report(NotLoaded(version.key, reported.code, reported.message))
    fewest_slots = settings.state_slots or min(LEAST_SLOTS, settings.max_sessions)
    return DeviceEngine(
        encoders,
        metrics,
        device=device,
        max_batch_sequences=settings.max_batch_sequences,
        max_batch_tokens=settings.max_batch_tokens,
        slots=(fewest_slots, settings.state_slots or settings.max_sessions),
        place=place,
        resident=settings.resident,
        trial=trial,
    )


def build_batcher(
    settings: Settings,
    engine: DeviceEngine,
    metrics: Metrics,
    errors: InternalErrors,
    journal: SessionJournal | None = None,
) -> Batcher:
    """Build the queue and the sessions of an engine. Without a journal, session ids do not outlive this process."""
    budget_ms = settings.batch_budget_ms or BATCH_BUDGET_MS[engine.device.type]
    limits = SchedulerLimits(
        max_waiting=settings.max_waiting,
        max_batch_sequences=settings.max_batch_sequences,
        max_batch_tokens=settings.max_batch_tokens,
        batch_seconds=budget_ms / 1000,
    )
    journal = journal or SessionJournal(journal_records(settings))
    states = StateCache(engine, metrics)
    table = SessionTable(settings.max_sessions, settings.session_idle_seconds, journal, metrics, states)
    stored = None
    if settings.session_store:
        waiting, chunks = settings.max_waiting, settings.checkpoint_chunks
        stored = StoredSessions(table, time.monotonic, max_waiting=waiting, checkpoint_chunks=chunks)
    return Batcher(limits, engine, table, metrics, time.monotonic, errors, stored)


def prepare_model(
    settings: Settings, engine: DeviceEngine, version: ModelVersion, between_batches: RunBetweenBatches
) -> PreparedModel:
    """Prepare a version while the engine serves others; raises ModelError, or NoRoom when it does not fit."""

    def load() -> Encoder:
        encoder = _encoder(version, engine.device)
        if settings.max_model_bytes:
            _check_memory(version, encoder.weight_bytes(), settings.max_model_bytes - engine.weight_bytes)
        return encoder

    return engine.prepare(load, between_batches)


def _encoder(version: ModelVersion, device: torch.device) -> Encoder:
    """Read a version onto a device; raises ModelError, or NoRoom before it reads weights that do not fit."""
    _check_memory(version, _weights_bytes(version, device), available_bytes(device))
    folder = Path(version.folder)
    model = spec.read(folder, version.name)
    if model != spec.ModelSpec.model_validate_json(version.spec):
        raise ModelError(f"{folder / spec.MODEL} has changed since it was read: load the model again")
    return Encoder(model, store.read_arrays(folder, model), device)


def _weights_bytes(version: ModelVersion, device: torch.device) -> int:
    """Return the bytes that the weights of a version take on a device, without folded tables and copies that kernels pack."""
    model = spec.ModelSpec.model_validate_json(version.spec)
    bytes_per_value = 4 if device.type == "cpu" or model.precision == "float32" else 2
    return bytes_per_value * sum(math.prod(shape) for shape in model.tensors().values())


def _check_memory(version: ModelVersion, needed: int, free: int) -> None:
    if needed > free:
        raise NoRoom(
            f"{version.name} version {version.version} needs {needed} bytes in addition to the models already served, "
            f"and {max(0, free)} bytes are free: unload another version, or raise SEQSERVE_MAX_MODEL_BYTES if it is set"
        )


def named_device(name: str) -> torch.device:
    """Return the device of this name; raises SettingsError when torch cannot use it."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingsError(f"device is {name} and torch sees {torch.cuda.device_count()} GPUs: name another with --device")
    return device
