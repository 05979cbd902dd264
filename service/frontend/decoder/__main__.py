"""`python -m service.frontend.decoder`: a decoder. Its frontend starts it and writes its ProcessConfig to standard input."""

from __future__ import annotations

import asyncio
import gc
import os

from service.frontend.decoder.worker import Decoder
from service.ipc.async_channel import AsyncChannel
from service.ipc.channel import Frame
from service.ipc.process_config import ProcessConfig, freeze_heap
from service.log import Log


async def main() -> None:
    """Decode bodies until the frontend closes the channel."""
    config = ProcessConfig.read()
    decoder = Decoder(config.read_settings(), Log("decoder"))
    freeze_heap()
    gc.disable()  # collections during a parse find no garbage, and take three times as long as the parse itself

    def handle(frame: Frame) -> None:
        reply = decoder.handle(frame)
        if reply is not None:
            channel.send(reply)
        else:
            gc.collect()

    channel = AsyncChannel(config.open_control(), handle, on_close=lambda: os._exit(0))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
