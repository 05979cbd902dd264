"""An authenticated connection between the movers of two replicas."""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import Callable

from service.access.peer_keys import PeerKeys
from service.errors import InvalidRequest
from service.ipc.channel import Frame, decode, encode
from service.ipc.messages import Message, Ping
from service.mover.handshake import ACCEPTOR, DIALER, GREETING_BYTES, MAC_BYTES, PROOF_BYTES, FrameSeal, Handshake, NotAPeer

HANDSHAKE_SECONDS = 3.0
PING_SECONDS = 0.5
SILENT_SECONDS = 3.0
"""A replica that sends nothing for this time counts as unreachable. The connection ends."""
MAX_UNSENT_BYTES = 256 << 20
"""A connection with more bytes that wait to be sent ends: the other side does not read."""
OVERHEAD_BYTES = 128 << 10
"""Of a frame, besides the state in it."""
_LENGTH = struct.Struct("<I")


class Link:
    """A connection after its handshake. `run` reads until it ends."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        peer: str,
        seals: tuple[FrameSeal, FrameSeal],
        max_bytes: int,
        *,
        dialed: bool,
    ) -> None:
        """max_bytes: of a state. dialed: whether this side opened the connection."""
        self._reader = reader
        self._writer = writer
        self._sealing, self._checking = seals
        self._max_bytes = max_bytes + OVERHEAD_BYTES
        self.peer = peer
        self.dialed = dialed
        self.ready = False
        """Whether the other replica takes over sessions."""
        self.open = True

    def send(self, message: Message, tail: bytes | memoryview = b"") -> None:
        """Queue a message. It is lost if the connection ends before it has left."""
        if not self.open:
            return
        content = encode(message, tail=(tail,))
        self._writer.write(b"".join((_LENGTH.pack(len(content)), self._sealing.next(content), content)))
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.close()

    async def run(self, handle: Callable[[Link, Frame], None], is_ready: Callable[[], bool]) -> None:
        """Pass every message to `handle` until the connection ends, or the other side is silent. is_ready: for the pings of this side.

        Raises NotAPeer for a frame that the other side has not sealed.
        """
        pinging = asyncio.ensure_future(self._ping(is_ready))
        try:
            while self.open:
                async with asyncio.timeout(SILENT_SECONDS):
                    frame = await self._read()
                if isinstance(frame.message, Ping):
                    self.ready = frame.message.ready
                else:
                    handle(self, frame)
        except (OSError, EOFError, TimeoutError):
            pass
        finally:
            pinging.cancel()
            self.close()

    def close(self) -> None:
        self.open = False
        self._writer.close()

    async def flush(self) -> None:
        """Wait until what was sent has left this process."""
        try:
            await self._writer.drain()
        except OSError:
            self.close()

    async def _ping(self, is_ready: Callable[[], bool]) -> None:
        while True:
            self.send(Ping(is_ready()))
            await asyncio.sleep(PING_SECONDS)

    async def _read(self) -> Frame:
        [length] = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        if length > self._max_bytes:
            raise NotAPeer(f"its frame has {length} bytes and at most {self._max_bytes} are allowed (SEQSERVE_MAX_BODY_BYTES)")
        mac = await self._reader.readexactly(MAC_BYTES)
        content = await self._reader.readexactly(length)
        self._checking.check(content, mac)
        try:
            return decode(content)
        except (ValueError, InvalidRequest) as error:
            raise NotAPeer(str(error)) from None


async def accept(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: PeerKeys, replica: str, certificate: bytes, max_bytes: int
) -> Link:
    """Return the link of a connection that another replica has opened. Raises NotAPeer, OSError, EOFError or TimeoutError."""
    shake = Handshake(keys, replica, ACCEPTOR)
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        shake.greeted(await reader.readexactly(GREETING_BYTES), certificate)
        writer.write(shake.greeting + shake.proof())
        seals = shake.check(await reader.readexactly(PROOF_BYTES))
    return Link(reader, writer, shake.peer, seals, max_bytes, dialed=False)


async def dial(host: str, port: int, keys: PeerKeys, replica: str, tls: ssl.SSLContext | None, max_bytes: int) -> Link:
    """Return a link to the replica at an address. Raises NotAPeer, OSError, EOFError or TimeoutError."""
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        reader, writer = await asyncio.open_connection(host, port, ssl=tls, server_hostname="" if tls else None)
        try:
            shake = Handshake(keys, replica, DIALER)
            writer.write(shake.greeting)
            encrypted = writer.get_extra_info("ssl_object")
            certificate = encrypted.getpeercert(binary_form=True) if encrypted else b""
            shake.greeted(await reader.readexactly(GREETING_BYTES), certificate)
            seals = shake.check(await reader.readexactly(PROOF_BYTES))
            writer.write(shake.proof())
        except BaseException:
            writer.close()
            raise
    return Link(reader, writer, shake.peer, seals, max_bytes, dialed=True)
