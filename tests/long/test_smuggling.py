"""A proxy and the service agree where each request ends, whatever a client sends.

A client sends an ambiguous request through a proxy, and another client sends a marker, which the proxy writes to the same connection if
it can. A relay between proxy and service records the responses of the service: a smuggled request would cause an additional response,
or would take the place of the marker. Each proxy keeps one connection to the service and forwards as much as it can.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from loadtest.servers import free_ports
from tests import proxies
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

TRANSFER_ENCODINGS = (
    *(
        "Transfer-Encoding: chunked",
        "Transfer-Encoding : chunked",
        "Transfer-Encoding:\tchunked",
        "Transfer-Encoding: chunked ",
    ),
    *("TRANSFER-ENCODING: CHUNKED", "Transfer_Encoding: chunked", "Transfer-Encoding: xchunked", "Transfer-Encoding: identity"),
    *("Transfer-Encoding: chunked, identity", "Transfer-Encoding: gzip, chunked", 'Transfer-Encoding: "chunked"'),
    *("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", "Transfer-Encoding: identity\r\nTransfer-Encoding: chunked"),
    *("Transfer-Encoding: ,chunked", "Transfer-Encoding: \x0bchunked", "Transfer-Encoding:\r\n chunked"),
    *("X: y\r\n Transfer-Encoding: chunked", " Transfer-Encoding: chunked", "Transfer-Encoding: chunked\0"),
    *("X: y\nTransfer-Encoding: chunked", "X: y\rTransfer-Encoding: chunked"),
)
N = len(BODY)
LENGTHS = (
    *(f"Content-Length: {N}\r\nContent-Length: 0", f"Content-Length: 0\r\nContent-Length: {N}"),
    *(
        f"Content-Length: {N}\r\nContent-Length: {N}",
        f"Content-Length: {N}, {N}",
        f"Content-Length: +{N}",
        f"Content-Length: -{N}",
    ),
    *(f"Content-Length: 0x{N:x}", f"Content-Length: 000{N}", f"Content-Length: {N // 10} {N % 10}", f"Content-Length : {N}"),
    *("Content-Length:", f"Content-Length: {(1 << 64) + N}", f"Content_Length: {N}", f"Content-Length:\r\n {N}"),
    f"Content-Length: {N}\nX: y",
)
CHUNK_BODIES = (
    *(CHUNKED.replace(b"\r\n", end, 1) for end in (b";a=b\r\n", b';a="\r\n', b";a\n0\r\n", b" \r\n")),
    *(start + CHUNKED for start in (b" ", b"0x", b"+", b"0000", b"1" + b"0" * (16 - len(b"%x" % N)), b"\r\n")),
    *(CHUNKED.replace(b"\r\n", end) for end in (b"\n", b"\r")),
    *(CHUNKED.replace(b"}\r\n", end) for end in (b"}xx\r\n", b"}")),
    *(CHUNKED[:-2] + end for end in (b"X: y\r\n\r\n", b"Content-Length: 500\r\n\r\n", b"\n")),
    CHUNKED.replace(b"0\r\n\r\n", b"-0\r\n\r\n"),
)
TARGETS = (
    *(
        "http://a/infer",
        "http://b/infer",
        "/infer%20HTTP/1.1%0d%0a%0d%0aGET%20/healthz",
        "/infer HTTP/1.1 x",
        "*",
        "/x/../infer",
    ),
    "/infer#x",
)
BEFORE_LENGTH = (
    *("Connection: Content-Length", "Host: b", "Expect: 100-continue", "Expect: x", "X Y: z", "X"),
    *(f"{UPGRADE}{name}" for name in ("websocket", "h2c", "x")),
)
"""Header lines in front of a correct length."""
HARMLESS = post(LENGTH, BODY)
ATTACKS: tuple[bytes, ...] = (
    *(HARMLESS, post(CHUNKS, CHUNKED)),
    *(post(f"{LENGTH}{line}\r\n", CHUNKED + SMUGGLED) for line in TRANSFER_ENCODINGS),
    *(post(f"{line}\r\n{LENGTH}", b"0\r\n\r\n" + OPEN) for line in TRANSFER_ENCODINGS),
    *(post(f"{line}\r\n", CHUNKED + SMUGGLED) for line in TRANSFER_ENCODINGS),
    *(post(f"{line}\r\n", BODY + SMUGGLED) for line in LENGTHS),
    *(post(CHUNKS, body + SMUGGLED) for body in CHUNK_BODIES),
    *(post(LENGTH, BODY + SMUGGLED, target) for target in TARGETS),
    *(post(f"{line}\r\n{LENGTH}", BODY + SMUGGLED) for line in BEFORE_LENGTH),
    *(post(f"{UPGRADE}{name}\r\n{CHUNKS}", CHUNKED + SMUGGLED) for name in ("websocket", "h2c", "x")),
    post(f"X: y\n\n{LENGTH}", BODY + SMUGGLED),
    post(f"Connection: Transfer-Encoding\r\n{CHUNKS}", CHUNKED + SMUGGLED),
    post(f"{UPGRADE}websocket\r\nContent-Length: {len(SMUGGLED)}\r\n", SMUGGLED, "/stream"),
    post(LENGTH, BODY + SMUGGLED).replace(b"POST", b"GET", 1),
    b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED,
    post(f"Connection: keep-alive\r\n{CHUNKS}", CHUNKED + SMUGGLED, version="1.0"),
    post(f"Connection: keep-alive\r\n{LENGTH}", BODY + SMUGGLED, version="1.0"),
    post(LENGTH, BODY + SMUGGLED, version="1.2"),
    post(LENGTH, b"").replace(b"\r\n", b"\n") + BODY + SMUGGLED,
    post(LENGTH, b"").replace(b"a\r\n", b"a\r\r\n") + BODY + SMUGGLED,
    b"\r\n\r\n" + post(LENGTH, BODY + SMUGGLED),
    post("Content-Length: 500\r\n", BODY),
)


# The proxies.

NGINX = """
daemon off;
user root;
worker_processes 1;
pid {scratch}/pid;
error_log {scratch}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {scratch}/body;
    proxy_temp_path {scratch}/proxy;
    fastcgi_temp_path {scratch}/fastcgi;
    uwsgi_temp_path {scratch}/uwsgi;
    scgi_temp_path {scratch}/scgi;
    ignore_invalid_headers off;
    underscores_in_headers on;
    map $http_upgrade $connection_upgrade {{ default upgrade; '' ''; }}
    upstream service {{ server 127.0.0.1:{service}; keepalive 1; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://service;
            proxy_http_version 1.1;
            proxy_request_buffering off;
            proxy_next_upstream off;
            proxy_set_header Host $http_host;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection $connection_upgrade;
        }}
    }}
}}
"""
HAPROXY = """
global
    nbthread 1
defaults
    mode http
    timeout connect 5s
    timeout client 30s
    timeout server 30s
    retries 0
    http-reuse always
    option accept-invalid-http-request
frontend clients
    bind 127.0.0.1:{port}
    default_backend service
backend service
    option accept-invalid-http-response
    server service 127.0.0.1:{service}
"""


ENVOY = """
static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: clients
          codec_type: HTTP1
          upgrade_configs: [{{upgrade_type: websocket}}]
          route_config:
            virtual_hosts: [{{name: all, domains: ["*"], routes: [{{match: {{prefix: /}}, route: {{cluster: service}}}}]}}]
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
  clusters:
  - name: service
    type: STATIC
    load_assignment:
      cluster_name: service
      endpoints:
      - lb_endpoints: [{{endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {service}}}}}}}}}]
"""
CONFIGURATIONS = {"nginx.conf": NGINX, "haproxy.conf": HAPROXY, "envoy.yaml": ENVOY}


# The relay.


class Relay:
    """Forwards connections to a port of this machine."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.recordings: list[bytearray] = []
        """The bytes that the service has sent on each connection."""
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                self.recordings.append(bytearray())
                threading.Thread(target=self._serve, args=(client, self.recordings[-1]), daemon=True).start()

    def _serve(self, client: socket.socket, recording: bytearray) -> None:
        with client, socket.create_connection(("127.0.0.1", self._target)) as server:
            returning = threading.Thread(target=_pump, args=(server, client, recording), daemon=True)
            returning.start()
            _pump(client, server, bytearray())
            returning.join()


def _pump(source: socket.socket, sink: socket.socket, record: bytearray) -> None:
    """Forward bytes until the end of the source, and record them before they can have an effect."""
    with suppress(OSError):
        while data := source.recv(1 << 16):
            record += data
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@dataclass(frozen=True)
class Response:
    """A response. json: whether it comes from the service, whose errors are JSON too, and not from a proxy."""

    status: int
    json: bool
    body: bytes


def responses(data: bytes) -> list[Response]:
    """Return the complete responses in the bytes of a connection, up to a switch to another protocol."""
    found = []
    while (end := data.find(b"\r\n\r\n")) >= 0:
        head, data = data[:end].lower(), data[end + 4 :]
        status = int(head.split(b" ", 2)[1])
        if status == 100:
            continue
        body, data = _body(head, data)
        found.append(Response(status, b"\r\ncontent-type: application/json" in head, body))
        if status == 101:
            break
    return found


def _body(head: bytes, data: bytes) -> tuple[bytes, bytes]:
    """Return the body of a response and the bytes after it."""
    if b"\r\ntransfer-encoding: chunked" in head:
        body = b""
        while size := int(data.split(b"\r\n", 1)[0] or b"0", 16):
            start = data.index(b"\r\n") + 2
            body, data = body + data[start : start + size], data[start + size + 2 :]
        return body, data.partition(b"\r\n\r\n")[2]
    length = re.search(rb"\r\ncontent-length: (\d+)", head)
    size = int(length[1]) if length else 0
    return data[:size], data[size:]


# The tests.


@pytest.fixture(scope="module")
def server(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(models_folder, tmp_path_factory.mktemp("log"), idle_seconds="600") as running:
        yield running


@pytest.fixture(scope="module")
def relay(server: Server) -> Iterator[Relay]:
    made = Relay(int(server.address.rpartition(":")[2]))
    yield made
    made.close()


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def port(request: pytest.FixtureRequest, relay: Relay, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a proxy in front of the relay."""
    name, scratch, listening = request.param.partition(".")[0], tmp_path_factory.mktemp("proxy"), free_ports(1)[0]
    file = scratch / request.param
    file.write_text(CONFIGURATIONS[request.param].format(port=listening, service=relay.port, scratch=scratch))
    with proxies.running(name, proxies.arguments(name, file), listening, scratch):
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
    return Counter(response for recording in relay.recordings for response in responses(bytes(recording)))


def from_service(found: list[Response]) -> list[Response]:
    """Return the responses that are not a proxy's own."""
    return [response for response in found if response.json or response.status == 101]


@pytest.mark.parametrize("together", [True, False], ids=["together", "apart"])
@pytest.mark.parametrize("attack", ATTACKS, ids=[f"{number}" for number in range(len(ATTACKS))])
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
        assert [response.status for response in exchange(port, HARMLESS, complete=bool)] == [200]
        send_marker(port)
    assert len(relay.recordings) <= connections + 1, "a proxy may replace a connection once"
