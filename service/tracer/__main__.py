"""`python -m service.tracer`: the tracer. The supervisor starts it, if traces are sent, and writes its ProcessConfig to standard input."""

from __future__ import annotations

import asyncio
import logging
import os

from service.ipc.async_channel import AsyncChannel
from service.ipc.channel import Frame, send_now
from service.ipc.heartbeat import Heartbeat
from service.ipc.messages.control import CollectMetrics, Failed, MetricsCollected, Ready
from service.ipc.process_config import ProcessConfig
from service.ipc.trace_socket import TraceReader
from service.log import Log, LogHandler
from service.metrics import Metrics

READ_SECONDS = 0.1
"""Time between two reads. A reader that waited for each packet would cost the frontends a wake-up for each."""
NICENESS = 10
"""Frontends and engines run first."""
FLUSH_SECONDS = 2.0
"""How long the last spans may take when the service ends."""


async def main() -> None:
    """Export spans until the supervisor closes the control channel, then the remaining spans."""
    config = ProcessConfig.read()
    control, log, metrics = config.open_control(), Log("tracer"), Metrics()
    try:
        from service.tracer.exporter import open_exporter, service_resource
        from service.tracer.spans import SpanMaker
        from service.tracer.worker import Tracer
    except ImportError as error:
        packages = "pip install 'seqserve[trace]'"
        send_now(control, Failed(f"SEQSERVE_TRACE_ENDPOINT needs packages that are not installed ({error.name}): {packages}"))
        return
    logging.getLogger("opentelemetry").addHandler(LogHandler(log))
    metrics.observe_collections("tracer")
    tracer = Tracer(SpanMaker(service_resource()), open_exporter(config.read_settings()), metrics, log)
    reader, ended = TraceReader(config.traces), asyncio.Event()

    def handle(frame: Frame) -> None:
        if isinstance(frame.message, CollectMetrics):
            channel.send_message(MetricsCollected(metrics.snapshot()), frame.id)

    channel = AsyncChannel(control, handle, on_close=ended.set)

    def read() -> None:
        tracer.add(list(reader.read()))
        asyncio.get_running_loop().call_later(READ_SECONDS, read)

    read()
    os.nice(NICENESS)
    Heartbeat(config.heartbeat).beat_from_loop()
    channel.send_message(Ready())
    running = asyncio.ensure_future(tracer.run())
    await ended.wait()
    tracer.add(list(reader.read()))
    tracer.stop()
    await asyncio.wait([running], timeout=FLUSH_SECONDS)
    os._exit(0)  # a thread may still wait for the receiver


if __name__ == "__main__":
    asyncio.run(main())
