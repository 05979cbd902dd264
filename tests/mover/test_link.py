"""Links between movers: both sides prove that they know a secret, and every frame is authenticated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from service.access import peer_keys
from service.access.peer_keys import PeerKeys
from service.ipc.messages import ForgetEnd, Goodbye, ListSessions
from service.mover.handshake import ACCEPTOR, DIALER, GREETING_BYTES, FrameSeal, Handshake, NotAPeer
from service.mover.link import Link, accept, dial
from service.settings import Settings

ONE, OTHER = "0123456789abcdef", "fedcba9876543210"
MAX_BYTES = 1 << 16


def keys(folder: Path, name: str, *copies: Path) -> tuple[Path, PeerKeys]:
    """Return a key file with one new secret, or with the lines of other files, and its secrets."""
    file = folder / name
    if copies:
        file.write_text("".join(copy.read_text() for copy in copies))
    else:
        peer_keys.create(file)
    return file, PeerKeys(Settings(peer_keys=str(file)))


def shake(dialing: PeerKeys, accepting: PeerKeys, certificates: tuple[bytes, bytes] = (b"", b"")) -> tuple[FrameSeal, ...]:
    """Run a handshake. Return the seals of the dialer and of the acceptor. certificates: as the dialer and the acceptor see them."""
    dialer, acceptor = Handshake(dialing, ONE, DIALER), Handshake(accepting, OTHER, ACCEPTOR)
    acceptor.greeted(dialer.greeting, certificates[1])
    dialer.greeted(acceptor.greeting, certificates[0])
    of_dialer = dialer.check(acceptor.proof())
    of_acceptor = acceptor.check(dialer.proof())
    assert (dialer.peer, acceptor.peer) == (OTHER, ONE)
    return (*of_dialer, *of_acceptor)


def test_both_sides_know_the_secret(tmp_path: Path) -> None:
    _, secret = keys(tmp_path, "keys")
    sending, receiving, answering, hearing = shake(secret, secret)
    for content in (b"first", b"second"):
        hearing.check(content, sending.next(content))
        receiving.check(content, answering.next(content))


def test_other_secret_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotAPeer, match="SEQSERVE_PEER_KEYS"):
        shake(keys(tmp_path, "one")[1], keys(tmp_path, "other")[1])


def test_secrets_are_replaced_one_replica_after_the_other(tmp_path: Path) -> None:
    old, old_keys = keys(tmp_path, "old")
    new, new_keys = keys(tmp_path, "new")
    _, both_old = keys(tmp_path, "both-old", old, new)
    _, both_new = keys(tmp_path, "both-new", new, old)
    for pair in ((old_keys, both_old), (both_old, both_new), (both_new, both_old), (both_new, new_keys)):
        sending, _, _, hearing = shake(*pair)
        hearing.check(b"x", sending.next(b"x"))
    with pytest.raises(NotAPeer):
        shake(old_keys, new_keys)


def test_certificate_of_another_in_between_is_refused(tmp_path: Path) -> None:
    _, secret = keys(tmp_path, "keys")
    with pytest.raises(NotAPeer):
        shake(secret, secret, certificates=(b"of the man in the middle", b"of the acceptor"))


def test_proof_is_not_valid_twice_or_in_the_other_direction(tmp_path: Path) -> None:
    _, secret = keys(tmp_path, "keys")
    dialer, acceptor = Handshake(secret, ONE, DIALER), Handshake(secret, OTHER, ACCEPTOR)
    dialer.greeted(acceptor.greeting, b"")
    acceptor.greeted(dialer.greeting, b"")
    again = Handshake(secret, ONE, DIALER)
    again.greeted(acceptor.greeting, b"")
    with pytest.raises(NotAPeer):
        again.check(acceptor.proof())
    with pytest.raises(NotAPeer):
        dialer.check(dialer.proof())


@pytest.mark.parametrize("greeting", [b"", bytes(GREETING_BYTES), b"GET / HTTP/1.1\r\n".ljust(GREETING_BYTES, b"x")])
def test_other_protocols_are_refused(tmp_path: Path, greeting: bytes) -> None:
    with pytest.raises(NotAPeer):
        Handshake(keys(tmp_path, "keys")[1], ONE, ACCEPTOR).greeted(greeting, b"")


def test_frames_count_once_and_in_their_order() -> None:
    sealing, checking = FrameSeal(b"key"), FrameSeal(b"key")
    first, second = sealing.next(b"first"), sealing.next(b"second")
    with pytest.raises(NotAPeer):
        checking.check(b"second", second)
    checking = FrameSeal(b"key")
    checking.check(b"first", first)
    with pytest.raises(NotAPeer):
        checking.check(b"first", first)


@asynccontextmanager
async def linked(secret: PeerKeys, serve: Callable[[Link], object]) -> AsyncIterator[Link]:
    """Yield a link to a listening side, which passes its own link to `serve`."""

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = await accept(reader, writer, secret, OTHER, b"", MAX_BYTES)
        running = asyncio.ensure_future(link.run(lambda _, frame: received.put_nowait(frame), lambda: True))
        serve(link)
        await running

    received: asyncio.Queue[object] = asyncio.Queue()
    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    link = await dial("127.0.0.1", server.sockets[0].getsockname()[1], secret, ONE, None, MAX_BYTES)
    link.received = received  # type: ignore[attr-defined]
    try:
        yield link
    finally:
        link.close()
        server.close()
        await asyncio.sleep(0.05)


def test_messages_pass_with_their_bytes(tmp_path: Path) -> None:
    async def run() -> None:
        served: list[Link] = []
        async with linked(keys(tmp_path, "keys")[1], served.append) as link:
            link.send(ForgetEnd("a"), b"tail")
            link.send(Goodbye())
            async with asyncio.timeout(30):
                first = await link.received.get()  # type: ignore[attr-defined]
                second = await link.received.get()  # type: ignore[attr-defined]
            assert (first.message, bytes(first.tail), second.message) == (ForgetEnd("a"), b"tail", Goodbye())
            assert served[0].peer == ONE and link.peer == OTHER

    asyncio.run(run())


def test_frame_above_the_limit_ends_the_link(tmp_path: Path) -> None:
    async def run() -> None:
        served: list[Link] = []
        async with linked(keys(tmp_path, "keys")[1], served.append) as link:
            ended = asyncio.ensure_future(link.run(lambda *_: None, lambda: True))
            link.send(ListSessions(), bytes(MAX_BYTES + (1 << 20)))
            async with asyncio.timeout(30):
                await ended
            assert not link.open and not served[0].open

    # The accepting side raises NotAPeer, which asyncio reports for the task of a connection.
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)
    try:
        loop.run_until_complete(run())
    finally:
        loop.close()
