"""`python -m service.frontend`: a frontend process. The supervisor starts it and writes its ProcessConfig to standard input."""

from __future__ import annotations

import socket

from service.errors import StartError
from service.frontend.dispatch.dispatcher import Dispatcher, channel_limit
from service.frontend.guards.connection_share import ConnectionShare
from service.frontend.http1.listener import SharedPort
from service.frontend.run.catalog import build_catalog
from service.frontend.run.control import Control
from service.frontend.run.frontend import Frontend
from service.frontend.server import serve
from service.ipc.connection_counts import ConnectionCounts, Port
from service.ipc.heartbeat import Heartbeat
from service.ipc.process_config import ProcessConfig, freeze_heap
from service.ipc.quota_counts import QuotaCounts
from service.ipc.suspect_turns import SuspectTurns
from service.ipc.trace_socket import TraceWriter
from service.log import Log
from service.metrics import Metrics
from service.modeling.spec.files import confined
from service.settings import Settings


def main() -> None:
    """Serve clients until SIGTERM, then drain."""
    config = ProcessConfig.read()
    settings = config.read_settings()
    with confined(settings.models):
        _run(config, settings)


def _run(config: ProcessConfig, settings: Settings) -> None:
    metrics = Metrics()
    control = Control(config.open_control(), Heartbeat(config.heartbeat), on_change=freeze_heap)
    log = Log("frontend")
    try:
        catalog = build_catalog(config.manifest, log, strict=config.strict, report=control.not_loaded)
    except StartError as error:
        control.failed(str(error))
        return
    turns = SuspectTurns(config.suspects)
    dispatcher = Dispatcher(metrics, channel_limit(settings), control.ready, len(settings.devices), turns=turns)
    quotas = QuotaCounts.open(config.quotas, config.place)
    traces = TraceWriter(config.traces) if config.traces >= 0 else None
    frontend = Frontend(settings, catalog, dispatcher, metrics, log, control, quotas, traces)
    metrics.observe_collections("frontend")
    counts = ConnectionCounts(config.connections)

    def shared_port(port: Port, descriptor: int) -> SharedPort:
        return SharedPort(socket.socket(fileno=descriptor), ConnectionShare(counts.on_port(port), config.place))

    http = shared_port(Port.HTTP, config.http)
    grpc = shared_port(Port.GRPC, config.grpc) if config.grpc >= 0 else None
    admin = shared_port(Port.ADMIN, config.admin) if config.admin >= 0 else None
    serve(frontend, control, http, grpc, admin, is_restart=config.is_restart)


if __name__ == "__main__":
    main()
