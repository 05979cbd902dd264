"""Mutated HTTP requests, several on one connection, and the check of the replies."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from service.errors import BY_CODE, STATUS, InferenceFailed
from tests.long.fuzz.wire.conversation import TOKENS, Conversation, Judgement, mutated

MOST_REQUESTS = 6
"""Requests on one connection."""
LAST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
"""Ends a connection whose requests can be read. Its reply is not counted."""
LIVE = b'\r\n\r\n{"live":true}'
METHODS = [*b"GET POST PUT DELETE HEAD OPTIONS PATCH TRACE CONNECT BREW get".split(), b""]
VERSIONS = [*b"HTTP/1.1 HTTP/1.0 HTTP/2.0 HTTP/0.9 HTTP/1.2 HTTP/1.10 HTTPS/1.1 ICY/1.1 http/1.1".split(), b""]
PATHS = [
    *b"""
/ /infer /tokens /models /models/words/card /v2 /v2/health/ready /v2/models/stats /readyz /v2/models/words /metrics /stream * /%ff%fe
/v2/models/words/versions/1/infer /v2/models/words/config /v2/models/nobody/ready /models/..%2f..%2fetc%2fpasswd/card
/v2/models/..%2f/ready //v2 /v2/../infer /infer;x=1 /INFER /infer/ http://elsewhere/infer /sessions/x/state /v2/repository/index
/debug/trace /v2/systemsharedmemory/region/a/register /v2/trace/setting /openapi.json?x=%00
""".split(),
    *(b"/sessions/" + b"y" * 300 + b"/state", b"/infer?" + b"q" * 400),
]
HEADERS = [
    *b"""Content-Length: 5|Content-Length: -1|Content-Length: 0x10|Content-Length: 18446744073709551616|Content-Length: 4, 4|TE: trailers
Transfer-Encoding: chunked|Transfer-Encoding: xchunked|Transfer-Encoding: gzip, chunked|Content-Encoding: gzip|Content-Encoding: br
Content-Type: text/plain|Content-Type: application/octet-stream|Expect: 100-continue|Expect: 200-ok|Connection: close|Upgrade: h2c
Connection: Upgrade|Upgrade: websocket|Host: localhost:99999|Host: elsewhere|Host:| folded: yes|Colonless|: nameless|Cookie: a=b
Inference-Header-Content-Length: 5|Inference-Header-Content-Length: 99999999999|Inference-Header-Content-Length: +5|Range: bytes=0-
Authorization: Bearer wrong|Authorization: Basic dTpw|Authorization:|Origin: https://elsewhere.example|Seqserve-Session: ../x
traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01|traceparent: ff-0-0-0|X-Forwarded-For: 10.0.0.1
X-HTTP-Method-Override: DELETE|X-Original-URL: /debug/trace""".replace(b"\n", b"|").split(b"|"),
    *(b"X\0Y: 1", b"X-\xff: \xfe", b"X-Request-Id: \x1b[31m", b"X-Request-Id: " + b"i" * 500, b"X: " + b"h" * 3000),
    b"Seqserve-Session: " + b"s" * 300,
]
ROWS = [[0.5, -1.0, 2.0], [0.25, 3.0, -0.5]]
_HEAD = re.compile(rb"HTTP/1\.1 (\d{3}) [A-Z][A-Za-z' -]*\r\n((?:[a-z0-9-]+: [^\r\n]*\r\n)*)\r\n")
_LENGTH = re.compile(rb"(?m)^content-length: (\d+)\r$")
_JSON = re.compile(rb"(?m)^content-type: application/json\r$")


@dataclass(frozen=True, slots=True)
class Seed:
    """A request that the service answers, before it is mutated."""

    method: bytes
    path: bytes
    body: bytes = b""
    headers: tuple[bytes, ...] = ()


def _post(path: str, body: object, *headers: bytes) -> Seed:
    return Seed(b"POST", path.encode(), body if isinstance(body, bytes) else json.dumps(body).encode(), headers)


def _binary() -> Seed:
    raw = b"\0\0\x80\x3f" * 6
    tensor = {"name": "inputs", "datatype": "FP32", "shape": [2, 3], "parameters": {"binary_data_size": len(raw)}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return _post("/v2/models/sensors/infer", head + raw, b"Inference-Header-Content-Length: %d" % len(head))


def _oip(name: str, datatype: str, shape: Sequence[int], data: Sequence[Any], **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": name, "datatype": datatype, "shape": shape, "data": data}], **more}


WORDS = {"model": "words", "inputs": ["how far is the sea"]}
FLAT = _oip("inputs", "FP32", [2, 3], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], parameters={"timeout": 30_000_000})
SEEDS = (
    _post("/infer", WORDS),
    _post("/infer", WORDS | {"inputs": ["how far", "who was first ?"], "return": ["embedding"], "deadline_ms": 30_000}),
    _post("/infer", {"model": "sensors", "inputs": [ROWS], "priority": "high"}),
    _post("/infer", {"model": "reader", "inputs": [[1, 2, 3, 11]], "top": 2}),
    _post("/infer", {"model": "speller", "inputs": [[1, 2, 3]], "session": "fuzzed", "start": True, "end": True}),
    _post("/infer", {"model": "speller", "inputs": [[4, 5]], "session": "open"}),
    _post("/infer", WORDS | {"model": "tagger"}),
    _post("/tokens", WORDS),
    _post("/v2/models/words/infer", _oip("text", "BYTES", [1], ["how far"], id="7", outputs=[{"name": "scores"}])),
    _post("/v2/models/sensors/infer", FLAT),
    _post("/v2/models/reader/versions/1/infer", _oip("ids", "INT64", [3], [1, 2, 3])),
    _post("/v2/models/sensors/infer", gzip.compress(json.dumps(FLAT).encode()), b"Content-Encoding: gzip"),
    _binary(),
    _post("/v2/repository/index", {"ready": True}),
    _post("/v2/repository/models/nobody/load", {"parameters": {}}),
    _post("/sessions/fuzzed/fork", {"to": "copy"}),
    Seed(b"PUT", b"/sessions/fuzzed/state", b"\x93NUMPY\x01\0" + bytes(60)),
    *(Seed(b"GET", path) for path in (b"/sessions/fuzzed/state", b"/models", b"/v2/models/words/versions/1")),
    Seed(b"DELETE", b"/sessions/fuzzed"),
)


class HttpSource:
    """Makes connections with mutated requests."""

    def __init__(self, key: str) -> None:
        """key: a valid key of the service."""
        self._usual = (b"Host: localhost", b"Authorization: Bearer " + key.encode())

    def conversation(self, chance: random.Random) -> Conversation:
        count = chance.randint(1, MOST_REQUESTS)
        data = b"".join(self._request(chance) for _ in range(count))
        return Conversation(data + LAST, _judge)

    def _request(self, chance: random.Random) -> bytes:
        seed, way = chance.choice(SEEDS), chance.random()
        if way < 0.08:
            return self._message(seed.method, seed.path, seed.headers, seed.body)
        if way < 0.2:
            return mutated(self._message(seed.method, seed.path, seed.headers, seed.body), chance)
        if way < 0.6:
            return self._message(seed.method, seed.path, seed.headers, mutated(seed.body, chance))
        if way < 0.85:
            return self._unusual_head(seed, chance)
        if way < 0.97:
            return self._chunked(seed, chance)
        return chance.randbytes(chance.randint(1, 400)) + b"\r\n\r\n"

    def _unusual_head(self, seed: Seed, chance: random.Random) -> bytes:
        """Return a request with another line, path or headers than the seed."""
        method, path, version, headers = seed.method, seed.path, b"HTTP/1.1", [*seed.headers]
        for _ in range(chance.randint(1, 3)):
            way = chance.random()
            if way < 0.15:
                method = chance.choice(METHODS)
            elif way < 0.45:
                path = chance.choice(PATHS) if chance.random() < 0.5 else mutated(path, chance)
            elif way < 0.5:
                version = chance.choice(VERSIONS)
            elif way < 0.85:
                headers.insert(chance.randint(0, len(headers)), chance.choice(HEADERS))
            else:
                headers.append(chance.choice(TOKENS) + b": " + chance.choice(TOKENS))
        return self._message(method, path, headers, seed.body, version)

    def _message(
        self, method: bytes, path: bytes, headers: Sequence[bytes], body: bytes, version: bytes = b"HTTP/1.1"
    ) -> bytes:
        length = (b"Content-Length: %d" % len(body),) if body or method == b"POST" else ()
        return b"\r\n".join((b"%b %b %b" % (method, path, version), *self._usual, *headers, *length, b"", body))

    def _chunked(self, seed: Seed, chance: random.Random) -> bytes:
        """Return a request whose body comes in chunks, some of which lie about their size."""
        body, chunks = seed.body, bytearray()
        while body:
            size = chance.randint(1, len(body))
            told = size if chance.random() < 0.95 else chance.choice((0, size + 1, max(0, size - 1), 1 << 63, 1 << 40))
            chunks += b"%x%b\r\n%b\r\n" % (told, chance.choice((b"", b"", b"", b";name=value", b" ")), body[:size])
            body = body[size:]
        ends = *(b"0\r\n\r\n",) * 3, b"0\r\nTrailer: x\r\n\r\n", b"00000000000000000000\r\n\r\n", b"-1\r\n\r\n"
        chunks += chance.choice(ends)
        line = b"%b %b HTTP/1.1" % (seed.method, seed.path)
        return b"\r\n".join((line, *self._usual, *seed.headers, b"Transfer-Encoding: chunked", b"", bytes(chunks)))


def _judge(received: bytes) -> Judgement:
    """Return the statuses of all replies except the reply to LAST, and their faults."""
    judgement = Judgement()
    at = 0
    while at < len(received):
        head = _HEAD.match(received, at)
        if head is None:
            judgement.faults.append(f"no reply of HTTP/1.1: {received[at : at + 200]!r}")
            break
        status, at = int(head[1]), head.end()
        if 100 <= status < 200 or status == 204:
            continue
        length = _LENGTH.search(head[2])
        if length is None:
            judgement.faults.append(f"a reply without Content-Length: {head[0]!r}")
            break
        body = received[at : at + int(length[1])]
        if body.startswith(b"HTTP/1.1 ") or (not body and int(length[1])):
            # The reply to HEAD, which only tells the length of the body.
            judgement.replies[str(status)] += 1
            continue
        at += len(body)
        if len(body) < int(length[1]) and status != 101:
            judgement.faults.append(f"a reply that ends early: {head[0] + body[:200]!r}")
        judgement.replies[str(status)] += 1
        fault = reply_fault(status, body, is_json=_JSON.search(head[2]) is not None)
        if fault is not None:
            judgement.faults.append(fault)
    if received.endswith(LIVE):
        judgement.replies["200"] -= 1
    return judgement


def reply_fault(status: int, body: bytes, *, is_json: bool) -> str | None:
    """Return the fault of a reply, if any."""
    if status >= 400:
        return error_fault(body, status)
    if is_json:
        try:
            json.loads(body, parse_constant=_refuse)
        except ValueError as error:
            return f"status {status} with a body that is not JSON: {error}: {body[:200]!r}"
    return None


def error_fault(body: bytes, status: int | None = None) -> str | None:
    """Return the fault of an error's body: it must have a known code, the status of this code, and no failure of the service."""
    try:
        error = json.loads(body)
        kind = BY_CODE[error["code"]]
        message = error["error"]
    except (ValueError, KeyError, TypeError):
        return f"an error without a known code: {status} {body[:300]!r}"
    if kind is InferenceFailed:
        return f"the service failed: {body[:300]!r}"
    if status is not None and STATUS[kind].http != status:
        return f"the code of another status than {status}: {body[:300]!r}"
    return None if isinstance(message, str) and message else f"an error without a message: {body[:300]!r}"


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
