"""The mover's loop: connects its engines, the other replicas and the store of checkpoints to the protocol."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress
from functools import partial
from pathlib import Path

from service.access.modification import modification
from service.access.peer_keys import PeerKeys
from service.errors import EngineLost, ServiceError, SettingsError
from service.ipc import messages
from service.ipc.async_channel import AsyncChannel
from service.ipc.channel import Channel, Frame, encode
from service.ipc.messages import Message
from service.ipc.rpc import Rpc
from service.ipc.session_placement import engine_of_session
from service.log import Log
from service.metrics import Metrics
from service.mover import hand_over
from service.mover.checkpoint_store import Checkpoint
from service.mover.checkpoint_writer import CheckpointWriter
from service.mover.peers import Peers
from service.mover.protocol import MoverProtocol
from service.mover.search import RETRY_SECONDS, Search
from service.settings import Settings

LIST_SECONDS = 1.0
"""How long an engine may take to list its sessions."""
KEYS_SECONDS = 1.0
"""Interval at which the peer key file and the certificate are read again if they have changed."""


class Engine:
    """The channel to one engine."""

    def __init__(self, mover: Mover, channel: Channel) -> None:
        self._mover = mover
        self._channel = AsyncChannel(channel, self._handle, self._lose)
        self.rpc = Rpc(self._channel.send, "an engine")
        self.place: int | None = None

    def send(self, message: Message, tail: bytes | memoryview = b"") -> None:
        """Send a message to the engine."""
        self._channel.send(encode(message, tail=(tail,)))

    def _handle(self, frame: Frame) -> None:
        if isinstance(frame.message, messages.EngineStatus):
            self.place = frame.message.place
        elif not self.rpc.handle_reply(frame):
            self._mover.handle_engine(frame)

    def _lose(self) -> None:
        self.rpc.close(EngineLost("the engine ended"))
        self._mover.lose_engine(self)


class Mover:
    """The mover of one replica."""

    def __init__(self, settings: Settings, replica: str, metrics: Metrics, log: Log, writer: CheckpointWriter | None) -> None:
        """writer: of checkpoints, None without a store. Raises SettingsError."""
        self._settings = settings
        self._replica = replica
        self._metrics = metrics
        self._log = log
        self._engines: list[Engine] = []
        self._draining = False
        self._keys = PeerKeys(settings)
        self._protocol = MoverProtocol(replica, self._to_engine, self._to_peer, settings.peer_seconds)
        self._writer = writer
        if writer is not None:
            self._protocol.find_checkpoint = partial(self._find_checkpoint, writer)
        self._peers: Peers | None = None
        self._server: asyncio.Server | None = None
        self._tls: ssl.SSLContext | None = None
        """The context of the peer port. Replicas prove themselves by their secrets, so they need no certificate of a client."""
        self._certificate = b""
        self._certificate_modified: tuple[int, int] | None = None
        self._timer: asyncio.TimerHandle | None = None
        if settings.peers:
            self._peers = Peers(
                settings.peers,
                self._keys,
                replica,
                settings.max_body_bytes,
                log,
                self._update_peers,
                self._handle_peer,
                lambda: not self._draining and bool(self._engines),
            )

    async def start(self, listening: int) -> None:
        """Accept connections of other replicas, and connect to them. listening: the descriptor of the port, -1 without peers."""
        if self._peers is None:
            return
        await self._listen(listening)
        self._peers.start(_outgoing_context() if self._settings.tls_cert else None)
        self._reload_keys()

    def attach(self, channel: Channel) -> None:
        """Add an engine."""
        self._engines.append(Engine(self, channel))

    def drain(self) -> None:
        """Take over no more sessions: this replica is about to end."""
        self._draining = True

    async def hand_over(self, seconds: float) -> None:
        """Give all sessions to other replicas, and save the checkpoints that wait."""
        taken = left = 0
        if self._peers is not None:
            peers = self._peers
            taken, left = await hand_over.hand_over(
                seconds,
                self._sessions,
                peers.ready,
                lambda: bool(peers.membership.known),
                lambda taker, offered: peers.send(taker, offered),
                self._replica,
            )
            if not left:
                for peer in peers.membership.reachable:
                    peers.send(peer, messages.Goodbye())
            await peers.flush()
        if self._writer is not None:
            await self._sessions(save=True)
            await self._writer.flush()
        if taken or left:
            hand_over.report(taken, left, self._metrics, self._log)

    def close(self) -> None:
        """Close all connections."""
        if self._peers is not None:
            self._peers.close()
        if self._server is not None:
            self._server.close()

    # Engines.

    def handle_engine(self, frame: Frame) -> None:
        """Handle a message of an engine."""
        message = frame.message
        if isinstance(message, messages.SaveCheckpoint | messages.DropCheckpoint):
            if self._writer is not None:
                self._writer.add(message, bytes(frame.tail))
            return
        self._protocol.from_engine(message, frame.tail, self._now())
        self._tick_soon()

    def lose_engine(self, engine: Engine) -> None:
        """An engine has ended."""
        self._engines.remove(engine)
        self._protocol.engine_ended()

    def _to_engine(self, session: str, message: Message, tail: bytes | memoryview) -> None:
        place = engine_of_session(session, len(self._settings.devices))
        for engine in self._engines:
            if engine.place == place:
                engine.send(message, tail)

    async def _sessions(self, *, save: bool = False) -> list[str]:
        """Return the names of the open sessions of all engines. An engine that does not answer has none."""
        names: list[str] = []
        for engine in list(self._engines):
            with suppress(ServiceError):
                reply, _ = await engine.rpc.call(messages.ListSessions(save), messages.SessionsListed, timeout=LIST_SECONDS)
                names += reply.sessions
        return names

    def _find_checkpoint(self, writer: CheckpointWriter, search: Search) -> None:
        def found(checkpoint: Checkpoint | None, failed: bool) -> None:
            begun, state = (0, None) if checkpoint is None else (checkpoint.begun, checkpoint.state)
            self._protocol.restored(search, begun, state, failed=failed)

        writer.find(search.session, found)

    # Other replicas.

    def _to_peer(self, peer: str, message: Message, tail: bytes | memoryview) -> None:
        if self._peers is not None:
            self._peers.send(peer, message, tail)

    def _handle_peer(self, peer: str, frame: Frame) -> None:
        self._protocol.from_peer(peer, frame.message, frame.tail, self._now())
        self._tick_soon()

    def _update_peers(self) -> None:
        assert self._peers is not None
        members = self._peers.membership
        reachable, known = members.reachable, members.known
        self._metrics.peers.set(len(reachable), "reachable")
        self._metrics.peers.set(len(known - reachable), "unreachable")
        self._protocol.peers_changed(reachable, known, members.gone, complete=members.complete, now=self._now())

    async def _listen(self, listening: int) -> None:
        """Accept connections. Raises SettingsError for a certificate that is not valid."""
        peers = self._peers
        assert peers is not None
        self._read_certificate()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await peers.accept(reader, writer, self._certificate)

        self._server = await asyncio.start_server(accept, sock=socket.socket(fileno=listening), ssl=self._tls)

    def _read_certificate(self) -> None:
        """Read the certificate again if it has changed: the context shows it in new connections."""
        modified = modification(Path(self._settings.tls_cert)) if self._settings.tls_cert else None
        if modified == self._certificate_modified:
            return
        if self._tls is None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.minimum_version = ssl.TLSVersion.TLSv1_3
        certificate = _certificate(Path(self._settings.tls_cert))
        try:
            self._tls.load_cert_chain(self._settings.tls_cert, self._settings.tls_key or None)
        except (OSError, ValueError) as error:
            raise SettingsError(f"TLS cannot start with {self._settings.tls_cert}: {error}") from None
        self._certificate, self._certificate_modified = certificate, modified

    def _reload_keys(self) -> None:
        try:
            if self._keys.reload():
                self._log.info("peer keys reloaded")
        except SettingsError as error:
            self._log.capped("error", "peer keys not reloaded", error=str(error))
        try:
            self._read_certificate()
        except SettingsError as error:
            self._log.capped("error", "certificates not reloaded", error=str(error))
        asyncio.get_running_loop().call_later(KEYS_SECONDS, self._reload_keys)

    # Time.

    def _tick_soon(self) -> None:
        if self._timer is None and self._protocol.searching:
            self._timer = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._protocol.tick(self._now())
        self._tick_soon()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _outgoing_context() -> ssl.SSLContext:
    """Return the context of connections to other replicas. The proof of the other side covers its certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _certificate(file: Path) -> bytes:
    """Return the first certificate of a PEM file, as the other side receives it. Raises SettingsError."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    try:
        text = file.read_text()
        return ssl.PEM_cert_to_DER_cert(text[text.index(begin) : text.index(end) + len(end)] + "\n")
    except (OSError, ValueError) as error:
        raise SettingsError(f"{file} has no certificate: {error}") from None
