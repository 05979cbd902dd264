"""`python -m service.store`: the store process. The supervisor starts it if the setting `session_store` is set, and writes its
ProcessConfig to standard input.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from service.errors import StartError
from service.ipc.async_channel import AsyncChannel
from service.ipc.channel import Channel, Frame, send_now
from service.ipc.heartbeat import Heartbeat
from service.ipc.messages.control import Attach, CollectMetrics, Failed, MetricsCollected, Ready
from service.ipc.messages.message import Done
from service.ipc.messages.store import FlushSessions
from service.ipc.process_config import ProcessConfig
from service.log import Log
from service.metrics import Metrics
from service.settings import Settings
from service.store.folder import FolderStore
from service.store.records import Store
from service.store.redis_store import RedisStore
from service.store.worker import StoreWorker

SWITCH_SECONDS = 0.0002


async def main() -> None:
    """Save and take sessions until the supervisor closes the control channel."""
    config = ProcessConfig.read()
    control, log, metrics, settings = config.open_control(), Log("store"), Metrics(), config.read_settings()
    metrics.observe_collections("store")
    ended, flushes = asyncio.Event(), set[asyncio.Task[None]]()
    try:
        worker = StoreWorker(open_store(settings, config.replica), len(settings.devices), metrics, log)
    except StartError as error:
        send_now(control, Failed(str(error)))
        return
    await worker.start()

    async def flush(id: int, seconds: float) -> None:
        await worker.flush(seconds)
        channel.send_message(MetricsCollected(metrics.snapshot()))
        channel.send_message(Done(), id)

    def handle(frame: Frame) -> None:
        match frame.message:
            case Attach():
                assert frame.attached is not None, "an Attach message carries a socket"
                worker.attach(Channel(frame.attached))
            case CollectMetrics():
                channel.send_message(MetricsCollected(metrics.snapshot()), frame.id)
            case FlushSessions(seconds=seconds):
                flushes.add(asyncio.ensure_future(flush(frame.id, seconds)))

    channel = AsyncChannel(control, handle, on_close=ended.set)
    Heartbeat(config.heartbeat).beat_from_loop()
    channel.send_message(Ready())
    await ended.wait()
    os._exit(0)  # a thread may still wait for the store


def open_store(settings: Settings, replica: str) -> Store:
    """Return the store of the setting `session_store`. replica: the id of this replica. Raises SettingsError."""
    # The last chunk of a session may come this long after its last save.
    keep_seconds = settings.session_idle_seconds * (settings.checkpoint_chunks + 1)
    if "://" in settings.session_store:
        return RedisStore(settings.session_store, replica, keep_seconds)
    return FolderStore(Path(settings.session_store), replica, keep_seconds)


if __name__ == "__main__":
    # The thread that changes the store gives up the interpreter at every system call, and would wait for it for 5 ms each time.
    sys.setswitchinterval(SWITCH_SECONDS)
    asyncio.run(main())
