"""`python -m service.mover`: the mover. The supervisor starts it, if there are peers or checkpoints, and writes its ProcessConfig to
standard input.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Any

from service.errors import StartError
from service.ipc.async_channel import AsyncChannel
from service.ipc.channel import Channel, Frame, send_now
from service.ipc.heartbeat import Heartbeat
from service.ipc.messages import Attach, CollectMetrics, Done, Drain, Failed, HandOver, MetricsCollected, Ready
from service.ipc.process_config import ProcessConfig
from service.log import Log
from service.metrics import Metrics
from service.mover.checkpoint_writer import open_writer
from service.mover.mover import Mover


async def main() -> None:
    """Move sessions until the supervisor closes the control channel."""
    config = ProcessConfig.read()
    control, log, metrics, settings = config.open_control(), Log("mover"), Metrics(), config.read_settings()
    metrics.observe_collections("mover")
    ended, running = asyncio.Event(), set[asyncio.Task[None]]()
    try:
        mover = Mover(settings, config.replica, metrics, log, open_writer(settings, metrics, log))
        await mover.start(config.peers)
    except StartError as error:
        send_now(control, Failed(str(error)))
        return

    def start(work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        running.add(task)
        task.add_done_callback(running.discard)

    async def hand_over(id: int, seconds: float) -> None:
        await mover.hand_over(seconds)
        channel.send_message(MetricsCollected(metrics.snapshot()))
        channel.send_message(Done(), id)

    def handle(frame: Frame) -> None:
        match frame.message:
            case Attach():
                assert frame.attached is not None, "an Attach message carries a socket"
                mover.attach(Channel(frame.attached))
            case CollectMetrics():
                channel.send_message(MetricsCollected(metrics.snapshot()), frame.id)
            case Drain():
                mover.drain()
            case HandOver(seconds=seconds):
                start(hand_over(frame.id, seconds))

    channel = AsyncChannel(control, handle, on_close=ended.set)
    Heartbeat(config.heartbeat).beat_from_loop()
    channel.send_message(Ready())
    await ended.wait()
    mover.close()
    os._exit(0)  # a thread may still wait for the store


if __name__ == "__main__":
    asyncio.run(main())
