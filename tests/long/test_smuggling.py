"""A proxy and the service agree where each request ends, whatever a client sends. `make test-all` runs this folder.

A client sends an ambiguous request through a proxy, and another client sends a marker, which the proxy writes to the same connection if
it can. A relay between proxy and service records the responses of the service: a smuggled request would cause an additional response,
or would take the place of the marker.
"""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from tests.long.proxies import proxy
from tests.long.relay import Relay, Response, responses
from tests.proxies import PROXIES
from tests.serving import LIMIT_SECONDS, Server, serving

PAUSE_SECONDS = 0.03
"""Pause between the parts of a request, which then arrive separately."""
SILENCE_SECONDS, MAX_SECONDS = 0.2, 10.0
"""How long a client waits for more responses when it has all responses of the service, and when it has not."""
markers = count()


def infer(model: str) -> bytes:
    return json.dumps({"model": model, "inputs": ["how far"]}).encode()


def post(headers: str, body: bytes, target: str = "/infer", version: str = "1.1") -> bytes:
    return f"POST {target} HTTP/{version}\r\nHost: localhost\r\n{headers}\r\n".encode() + body


BODY = infer("words")
SMUGGLED = post(f"Content-Length: {len(infer('smuggled'))}\r\n", infer("smuggled"))
OPEN = b"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n"
"""The beginning of a smuggled request, whose body would be the next request."""
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
LENGTH = f"Content-Length: {len(BODY)}\r\n"
CHUNKS = "Transfer-Encoding: chunked\r\n"
UPGRADE = "Connection: Upgrade\r\nUpgrade: "

TRANSFER_ENCODINGS = {
    "plain": "Transfer-Encoding: chunked",
    "space before the colon": "Transfer-Encoding : chunked",
    "tab": "Transfer-Encoding:\tchunked",
    "trailing space": "Transfer-Encoding: chunked ",
    "upper case": "TRANSFER-ENCODING: CHUNKED",
    "underscore": "Transfer_Encoding: chunked",
    "unknown coding": "Transfer-Encoding: xchunked",
    "identity": "Transfer-Encoding: identity",
    "two codings": "Transfer-Encoding: chunked, identity",
    "gzip": "Transfer-Encoding: gzip, chunked",
    "twice": "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    "contradiction": "Transfer-Encoding: identity\r\nTransfer-Encoding: chunked",
    "quoted": 'Transfer-Encoding: "chunked"',
    "comma": "Transfer-Encoding: ,chunked",
    "vertical tab": "Transfer-Encoding: \x0bchunked",
    "folded": "Transfer-Encoding:\r\n chunked",
    "folded away": "X: y\r\n Transfer-Encoding: chunked",
    "leading space": " Transfer-Encoding: chunked",
    "zero byte": "Transfer-Encoding: chunked\0",
    "bare LF before": "X: y\nTransfer-Encoding: chunked",
    "bare CR before": "X: y\rTransfer-Encoding: chunked",
}
LENGTHS = {
    "two": f"Content-Length: {len(BODY)}\r\nContent-Length: 0",
    "two, the other way": f"Content-Length: 0\r\nContent-Length: {len(BODY)}",
    "two equal": f"Content-Length: {len(BODY)}\r\nContent-Length: {len(BODY)}",
    "list": f"Content-Length: {len(BODY)}, {len(BODY)}",
    "plus": f"Content-Length: +{len(BODY)}",
    "minus": f"Content-Length: -{len(BODY)}",
    "hexadecimal": f"Content-Length: 0x{len(BODY):x}",
    "leading zeros": f"Content-Length: 000{len(BODY)}",
    "space inside": f"Content-Length: {len(BODY) // 10} {len(BODY) % 10}",
    "space before the colon": f"Content-Length : {len(BODY)}",
    "empty": "Content-Length:",
    "huge": f"Content-Length: {(1 << 64) + len(BODY)}",
    "underscore": f"Content_Length: {len(BODY)}",
    "folded": f"Content-Length:\r\n {len(BODY)}",
    "bare LF after": f"Content-Length: {len(BODY)}\nX: y",
}
CHUNK_BODIES = {
    "extension": CHUNKED.replace(b"\r\n", b";a=b\r\n", 1),
    "quoted extension": CHUNKED.replace(b"\r\n", b';a="\r\n', 1),
    "LF in an extension": CHUNKED.replace(b"\r\n", b";a\n0\r\n", 1),
    "space after the size": CHUNKED.replace(b"\r\n", b" \r\n", 1),
    "space before the size": b" " + CHUNKED,
    "0x": b"0x" + CHUNKED,
    "plus": b"+" + CHUNKED,
    "leading zeros": b"0000" + CHUNKED,
    "wraps at 64 bits": b"1" + b"0" * (16 - len(b"%x" % len(BODY))) + CHUNKED,
    "no size": b"\r\n" + CHUNKED,
    "LF line ends": CHUNKED.replace(b"\r\n", b"\n"),
    "CR line ends": CHUNKED.replace(b"\r\n", b"\r"),
    "too long": CHUNKED.replace(b"}\r\n", b"}xx\r\n"),
    "no end of the chunk": CHUNKED.replace(b"}\r\n", b"}"),
    "trailer": CHUNKED[:-2] + b"X: y\r\n\r\n",
    "length in a trailer": CHUNKED[:-2] + b"Content-Length: 500\r\n\r\n",
    "LF at the end": CHUNKED[:-2] + b"\n",
    "negative": CHUNKED.replace(b"0\r\n\r\n", b"-0\r\n\r\n"),
}
TARGETS = {
    "absolute": "http://a/infer",
    "absolute, other host": "http://b/infer",
    "with a request inside": "/infer%20HTTP/1.1%0d%0a%0d%0aGET%20/healthz",
    "with spaces": "/infer HTTP/1.1 x",
    "asterisk": "*",
    "dots": "/x/../infer",
    "fragment": "/infer#x",
}
ATTACKS: dict[str, bytes] = {
    "harmless": post(LENGTH, BODY),
    "harmless chunks": post(CHUNKS, CHUNKED),
    **{
        f"length and coding: {name}": post(f"{LENGTH}{line}\r\n", CHUNKED + SMUGGLED)
        for name, line in TRANSFER_ENCODINGS.items()
    },
    **{
        f"coding and length: {name}": post(f"{line}\r\n{LENGTH}", b"0\r\n\r\n" + OPEN)
        for name, line in TRANSFER_ENCODINGS.items()
    },
    **{f"coding: {name}": post(f"{line}\r\n", CHUNKED + SMUGGLED) for name, line in TRANSFER_ENCODINGS.items()},
    **{f"length: {name}": post(f"{line}\r\n", BODY + SMUGGLED) for name, line in LENGTHS.items()},
    **{f"chunks, {name}": post(CHUNKS, body + SMUGGLED) for name, body in CHUNK_BODIES.items()},
    **{f"target, {name}": post(LENGTH, BODY + SMUGGLED, target) for name, target in TARGETS.items()},
    **{f"upgrade to {name}": post(f"{UPGRADE}{name}\r\n{LENGTH}", BODY + SMUGGLED) for name in ("websocket", "h2c", "x")},
    **{
        f"upgrade to {name}, chunked": post(f"{UPGRADE}{name}\r\n{CHUNKS}", CHUNKED + SMUGGLED)
        for name in ("websocket", "h2c", "x")
    },
    "upgrade with a request as body": post(f"{UPGRADE}websocket\r\nContent-Length: {len(SMUGGLED)}\r\n", SMUGGLED, "/stream"),
    "GET with a body": post(LENGTH, BODY + SMUGGLED).replace(b"POST", b"GET", 1),
    "GET with a request as body": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(SMUGGLED)
    + SMUGGLED,
    "HTTP/1.0 with chunks": post(f"Connection: keep-alive\r\n{CHUNKS}", CHUNKED + SMUGGLED, version="1.0"),
    "HTTP/1.0 with a length": post(f"Connection: keep-alive\r\n{LENGTH}", BODY + SMUGGLED, version="1.0"),
    "other version": post(LENGTH, BODY + SMUGGLED, version="1.2"),
    "Connection names Content-Length": post(f"Connection: Content-Length\r\n{LENGTH}", BODY + SMUGGLED),
    "Connection names Transfer-Encoding": post(f"Connection: Transfer-Encoding\r\n{CHUNKS}", CHUNKED + SMUGGLED),
    "two hosts": post(f"Host: b\r\n{LENGTH}", BODY + SMUGGLED),
    "Expect": post(f"Expect: 100-continue\r\n{LENGTH}", BODY + SMUGGLED),
    "unknown Expect": post(f"Expect: x\r\n{LENGTH}", BODY + SMUGGLED),
    "LF line ends": post(LENGTH, b"").replace(b"\r\n", b"\n") + BODY + SMUGGLED,
    "LF LF in a header": post(f"X: y\n\n{LENGTH}", BODY + SMUGGLED),
    "CR CR LF": post(LENGTH, b"").replace(b"a\r\n", b"a\r\r\n") + BODY + SMUGGLED,
    "empty lines before": b"\r\n\r\n" + post(LENGTH, BODY + SMUGGLED),
    "space in a header's name": post(f"X Y: z\r\n{LENGTH}", BODY + SMUGGLED),
    "header without a colon": post(f"X\r\n{LENGTH}", BODY + SMUGGLED),
    "body that is too short": post("Content-Length: 500\r\n", BODY),
}


@pytest.fixture(scope="module")
def server(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(models_folder, tmp_path_factory.mktemp("log"), idle_seconds="600") as running:
        yield running


@pytest.fixture(scope="module")
def relay(server: Server) -> Iterator[Relay]:
    made = Relay(int(server.address.rpartition(":")[2]))
    yield made
    made.close()


@pytest.fixture(scope="module", params=PROXIES)
def port(request: pytest.FixtureRequest, relay: Relay, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with proxy(request.param, relay.port, tmp_path_factory.mktemp(request.param)) as listening:
        yield listening


def exchange(port: int, *parts: bytes, complete: Callable[[list[Response]], bool]) -> list[Response]:
    """Send bytes in parts. Return the responses that arrive until the connection ends or, after a silence, they are complete."""
    received, end = b"", time.monotonic() + MAX_SECONDS
    with socket.create_connection(("127.0.0.1", port), LIMIT_SECONDS) as client, suppress(ConnectionError):
        for part in parts:
            client.sendall(part)
            time.sleep(PAUSE_SECONDS)
        client.settimeout(SILENCE_SECONDS)
        while time.monotonic() < end:
            try:
                part = client.recv(1 << 16)
            except TimeoutError:
                if complete(responses(received)):
                    break
                continue
            if not part:
                break
            received += part
    return responses(received)


def send_marker(port: int) -> Response:
    """Send a request whose response names it, and check that it gets this response."""
    name = f"marker-{next(markers)}"
    body = infer(name)
    [response] = exchange(port, post(f"Content-Length: {len(body)}\r\nConnection: close\r\n", body), complete=bool)
    assert response.status == 404 and name.encode() in response.body, response
    return response


def given(relay: Relay) -> Counter[Response]:
    """Return all responses of the service so far."""
    return Counter(response for recording in relay.recordings for response in responses(bytes(recording.responses)))


def from_service(found: list[Response]) -> list[Response]:
    """Return the responses that are not a proxy's own."""
    return [response for response in found if response.json or response.status == 101]


@pytest.mark.parametrize("together", [True, False], ids=["together", "apart"])
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=[name.replace(" ", "-") for name in ATTACKS])
def test_proxy_and_service_agree_on_the_end_of_a_request(relay: Relay, port: int, attack: bytes, *, together: bool) -> None:
    """A proxy that gets head and body together may write a length in place of chunks."""
    send_marker(port)
    before = given(relay)
    head, end, body = attack.partition(b"\r\n\r\n")
    parts = [attack] if together else [head + end, body]
    found = exchange(port, *parts, complete=lambda found: Counter(from_service(found)) == given(relay) - before)
    delivered = from_service(found)
    delivered += [send_marker(port), send_marker(port)]
    assert given(relay) - before == Counter(delivered)


def test_requests_of_different_clients_share_a_connection(relay: Relay, port: int) -> None:
    """Otherwise nothing could be smuggled."""
    send_marker(port)
    connections = len(relay.recordings)
    for _ in range(5):
        assert [response.status for response in exchange(port, ATTACKS["harmless"], complete=bool)] == [200]
        send_marker(port)
    assert len(relay.recordings) <= connections + 1, "a proxy may replace a connection once"
