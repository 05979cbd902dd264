"""The engine process, from its ProcessConfig to its end."""

from __future__ import annotations

import os
from functools import partial
from threading import Thread

from service.engine.build import build_batcher, build_engine, prepare_model
from service.engine.execution.device import DeviceLost
from service.engine.internal_errors import InternalErrors
from service.engine.kernel_compiler import compile_in_background
from service.engine.loading import ModelLoader
from service.engine.trials import TrialReports
from service.engine.worker import Worker
from service.errors import NoRoom, StartError
from service.ipc.channel import send_now
from service.ipc.heartbeat import Heartbeat
from service.ipc.messages.control import Failed
from service.ipc.process_config import DEVICE_LOST, ProcessConfig, freeze_heap, use_huge_pages
from service.ipc.session_journal import SessionJournal, journal_records
from service.log import Log
from service.metrics import Metrics
from service.modeling.spec.files import confined
from service.settings import Settings


def run(config: ProcessConfig) -> None:
    """Load the models, then run batches until the supervisor closes the control channel."""
    settings = config.read_settings()
    with confined(settings.models):
        _run(config, settings)


def _run(config: ProcessConfig, settings: Settings) -> None:
    metrics = Metrics()
    control, heartbeat = config.open_control(), Heartbeat(config.heartbeat)
    trials = TrialReports(control)
    log = Log(f"engine-{config.place}")
    try:
        engine = build_engine(
            config.manifest.model_versions,
            settings,
            metrics,
            log,
            place=config.place,
            threads=config.compute_threads,
            strict=config.strict,
            report=partial(send_now, control),
            trial=trials.load,
        )
    except (StartError, NoRoom) as error:
        send_now(control, Failed(str(error)))
        return
    if engine.device.type == "cpu" and config.place == 0:
        compile_in_background(log)
    for model in engine.loaded():
        log.info("loaded", model=model.name, version=model.version, device=model.device, backends=model.backends)
    journal = SessionJournal(journal_records(settings), config.journal)
    errors = InternalErrors(log, metrics)
    batcher = build_batcher(settings, engine, metrics, errors, journal)
    models = ModelLoader(engine, batcher, partial(prepare_model, settings, engine), log, on_open=freeze_heap)
    worker = Worker(control, heartbeat, batcher, engine, models, trials, config.place, metrics, errors)
    freeze_heap()
    Thread(target=use_huge_pages, name="huge-pages", daemon=True).start()  # with torch's memory it takes up to a second
    metrics.observe_collections("engine")
    try:
        worker.run()
        engine.end_resident()
    except DeviceLost as error:
        log.error("device lost", error=str(error))
        # Exit at once: no result computed on this device may leave the process, and torch cannot release its memory.
        os._exit(DEVICE_LOST)
