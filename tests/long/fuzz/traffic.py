"""Hostile traffic: mutated HTTP requests, WebSocket frames and calls of gRPC, each connection from a seed, and the check of the replies."""

from __future__ import annotations

import gzip
import json
import random
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import hpack

from loadtest.oip_requests import PATH
from service.errors import BY_CODE, SERVICE_FAILED, STATUS, InferenceFailed
from service.frontend.oip.protobuf import METHODS, SERVICE
from tests.frontend.http2 import peer
from tests.long import floods

MOST_CHANGES, MOST_REQUESTS = 4, 6
"""Changes of one message, and messages on one connection."""
FLOODS, MOST_PARTS, MOST_FLOOD_BYTES = 0.02, 30, 1 << 16
"""Share of the connections with the beginning of a flood, and its size."""
TOKENS = [
    *b"""-1 0 1e400 NaN Infinity -0 9223372036854775808 99999999999999999999 1.5 +5 null true {} [] "" { [ ] } " , : \\u0000 \\ud800
%00 %2e%2e%2f ../../etc/passwd ..\\..\\boot.ini /etc/passwd %2e%2e/%2e%2e/etc/passwd ${jndi:ldap://127.0.0.1/a} chunked gzip""".split(),
    *(b"", b"\0", b"\r\n", b"\n", b"\r\n\r\n", b" ", b"\t", b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf0\x9f\x8c\x8a"),
    *(b"x" * 200, b"a" * 2000, b"\x80" * 17, b"\0\0\0\0\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"'; DROP TABLE"),
    *(b"[" * 40, b'{"a":' * 40),
]
"""Values that parsers tend to treat specially."""


@dataclass(slots=True)
class Judgement:
    """The replies on one connection by status, and their faults."""

    replies: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    texts: list[bytes] = field(default_factory=list)
    """The fields of header blocks, which came compressed."""

    def note(self, reply: str, fault: str | None = None) -> None:
        self.replies[reply] += 1
        self.faults += [fault] if fault else []


def never(received: bytes) -> bool:
    """Return that the client waits for the end of the connection."""
    return False


class Conversation(NamedTuple):
    """One connection.

    opening: the first bytes of the client; it waits for the head of the reply. data: its later bytes. judge: takes the received bytes.
    answered: returns whether the last request is answered, so that the client may close the connection; the default is that the service
    closes it.
    """

    data: bytes
    judge: Callable[[bytes], Judgement]
    answered: Callable[[bytes], bool] = never
    opening: bytes = b""


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Return the bytes with one or more changes, as attackers and broken clients make them."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, MOST_CHANGES)):
        if not changed:
            break
        at, other, token = chance.randrange(len(changed)), chance.randrange(len(changed)), chance.choice(TOKENS)
        match chance.randrange(8):
            case 0 | 1:
                changed[at] ^= 1 << chance.randrange(8)
            case 2:
                changed[at], changed[other] = changed[other], changed[at]
            case 3:
                del changed[at : at + chance.randint(1, 8)]
            case 4 | 5:
                changed[at:at] = token
            case 6:
                changed[at : at + len(token)] = token
            case _:
                changed[at:at] = changed[at : at + chance.randint(1, 64)] * chance.randint(1, 4)
    return bytes(changed)


def pieces(data: bytes, chance: random.Random) -> list[bytes]:
    """Return the bytes as a client sends them: mostly at once, sometimes in pieces."""
    cuts = sorted(chance.choices(range(len(data)), k=chance.randint(1, 12))) if data and chance.random() > 0.7 else []
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def _flood(chance: random.Random, *key: tuple[bytes, bytes], over_grpc: bool) -> bytes:
    """Return the beginning of a flood without the preface of HTTP/2."""
    kinds = [make for kind, (grpc, make) in floods.KINDS.items() if grpc is over_grpc and not kind.startswith("socket")]
    parts = islice(chance.choice(kinds)(*key), chance.randint(2, MOST_PARTS))
    return b"".join(parts)[:MOST_FLOOD_BYTES].removeprefix(floods.GREETING)


# HTTP: several requests on one connection.

LAST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
"""Ends a connection whose requests can be read. Its reply is not counted."""
LIVE = b'\r\n\r\n{"live":true}'
VERBS = [*b"GET POST PUT DELETE HEAD OPTIONS PATCH TRACE CONNECT BREW get".split(), b""]
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


class Seed(NamedTuple):
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


def http(key: str, chance: random.Random) -> Conversation:
    """Return a connection with mutated requests. key: a valid key of the service."""
    usual = (b"Host: localhost", b"Authorization: Bearer " + key.encode())
    requests = [_request(usual, chance) for _ in range(chance.randint(1, MOST_REQUESTS))]
    if chance.random() < FLOODS:
        requests.append(_flood(chance, over_grpc=False))
    return Conversation(b"".join(requests) + LAST, judge_http)


def _request(usual: Sequence[bytes], chance: random.Random) -> bytes:
    seed, way = chance.choice(SEEDS), chance.random()
    headers = [*usual, *seed.headers]
    if way < 0.08:
        return _message(seed, headers)
    if way < 0.2:
        return mutated(_message(seed, headers), chance)
    if way < 0.6:
        return _message(seed._replace(body=mutated(seed.body, chance)), headers)
    if way < 0.85:
        return _unusual_head(seed, headers, chance)
    if way < 0.97:
        return _chunked(seed, headers, chance)
    return chance.randbytes(chance.randint(1, 400)) + b"\r\n\r\n"


def _message(seed: Seed, headers: Sequence[bytes], version: bytes = b"HTTP/1.1") -> bytes:
    length = (b"Content-Length: %d" % len(seed.body),) if seed.body or seed.method == b"POST" else ()
    return b"\r\n".join((b"%b %b %b" % (seed.method, seed.path, version), *headers, *length, b"", seed.body))


def _unusual_head(seed: Seed, headers: list[bytes], chance: random.Random) -> bytes:
    """Return a request with another line, path or headers than the seed."""
    version = b"HTTP/1.1"
    for _ in range(chance.randint(1, 3)):
        way = chance.random()
        if way < 0.15:
            seed = seed._replace(method=chance.choice(VERBS))
        elif way < 0.45:
            seed = seed._replace(path=chance.choice(PATHS) if chance.random() < 0.5 else mutated(seed.path, chance))
        elif way < 0.5:
            version = chance.choice(VERSIONS)
        else:
            odd = chance.choice(TOKENS) + b": " + chance.choice(TOKENS)
            headers.insert(chance.randint(0, len(headers)), chance.choice(HEADERS) if way < 0.85 else odd)
    return _message(seed, headers, version)


def _chunked(seed: Seed, headers: Sequence[bytes], chance: random.Random) -> bytes:
    """Return a request whose body comes in chunks, some of which lie about their size."""
    body, chunks = seed.body, bytearray()
    while body:
        size = chance.randint(1, len(body))
        told = size if chance.random() < 0.95 else chance.choice((0, size + 1, max(0, size - 1), 1 << 63, 1 << 40))
        chunks += b"%x%b\r\n%b\r\n" % (told, chance.choice((b"", b"", b"", b";name=value", b" ")), body[:size])
        body = body[size:]
    chunks += chance.choice((b"0\r\n\r\n", b"0\r\n\r\n", b"0\r\nTrailer: x\r\n\r\n", b"0" * 20 + b"\r\n\r\n", b"-1\r\n\r\n"))
    line = b"%b %b HTTP/1.1" % (seed.method, seed.path)
    return b"\r\n".join((line, *headers, b"Transfer-Encoding: chunked", b"", bytes(chunks)))


def judge_http(received: bytes) -> Judgement:
    """Return the statuses of all replies except the reply to LAST, and their faults."""
    judgement, at = Judgement(), 0
    while at < len(received):
        head = _HEAD.match(received, at)
        length = head and _LENGTH.search(head[2])
        if head is None or (length is None and head[1] >= b"200" and head[1] != b"204"):
            judgement.faults.append(f"no reply of HTTP/1.1 with its length: {received[at : at + 200]!r}")
            break
        status, at = int(head[1]), head.end()
        if length is None:
            continue
        body = received[at : at + int(length[1])]
        if body.startswith(b"HTTP/1.1 ") or (not body and int(length[1])):
            judgement.note(str(status))  # the reply to HEAD, which only tells the length of the body
            continue
        at += len(body)
        judgement.note(str(status), reply_fault(status, body, is_json=_JSON.search(head[2]) is not None))
        if len(body) < int(length[1]):
            judgement.faults.append(f"a reply that ends early: {head[0] + body[:200]!r}")
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


# WebSockets.


# gRPC: several calls on one connection of HTTP/2.

LAST_STREAM = 9_999
LAST_CALL = f"/{SERVICE}/ServerLive".encode()
UNKNOWN = b"2"
INTERNAL_ERROR = 2
"""Of HTTP/2."""
METHOD_PATHS = (
    *(PATH.encode(),) * 6,
    *(f"/{SERVICE}/{name}".encode() for name in METHODS),
    *(b"/inference.GRPCInferenceService/Nothing", b"/grpc.health.v1.Health/Check", b"/", b"", b"x" * 2000, b"/../etc/passwd"),
)
FIELDS = (
    *((b"grpc-timeout", value) for value in (b"1S", b"0n", b"-1S", b"99999999H", b"1x", b"")),
    *((b"grpc-encoding", value) for value in (b"gzip", b"identity", b"br", b"")),
    *((b"content-type", value) for value in (b"application/grpc+proto", b"text/plain", b"application/grpc-web")),
    *((b"authorization", b"Bearer wrong"), (b"x-upper", b"\xff\xfe"), (b"traceparent", b"00-0-0-0"), (b"connection", b"close")),
    *((b":method", b"GET"), (b":path", b"/twice"), (b"te", b"gzip"), (b"content-length", b"3"), (b"x", b"y" * 5000)),
)


def _infer(model: str, name: str, datatype: str, shape: list[int], raw: bytes, **more: str) -> bytes:
    request = METHODS["ModelInfer"].request_type(model_name=model, raw_input_contents=[raw], **more)
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    serialised: bytes = request.SerializeToString()
    return serialised


CALLS = (
    _infer("sensors", "inputs", "FP32", [2, 3], struct.pack("<6f", 1, 2, 3, 4, 5, 6)),
    _infer("words", "text", "BYTES", [1], b"\x07\0\0\0how far"),
    _infer("reader", "ids", "INT64", [3], struct.pack("<3q", 1, 2, 3), id="fuzzed", model_version="1"),
    METHODS["ModelReady"].request_type(name="words").SerializeToString(),
    b"",
)


def grpc(key: str, chance: random.Random) -> Conversation:
    """Return a connection of HTTP/2 with mutated calls."""
    usual = [(b"te", b"trailers"), (b"content-type", b"application/grpc"), (b"authorization", b"Bearer " + key.encode())]
    count = chance.randint(1, MOST_REQUESTS)
    frames = [part for number in range(count) for part in _call(2 * number + 1, [*usual], chance)]
    if chance.random() < FLOODS:
        frames = [_flood(chance, usual[-1], over_grpc=True)]
    if chance.random() < 0.3:
        chance.shuffle(frames)
    if chance.random() < 0.5:
        frames.insert(chance.randint(0, len(frames)), _frame_of_no_call(chance))
    data = b"".join(frames)
    if chance.random() < 0.2:
        data = mutated(data, chance)
    start = peer.PREFACE + peer.settings((4, 1 << 20))
    last = peer.frame(peer.HEADERS, peer.END_HEADERS, LAST_STREAM, peer.block(*usual, path=LAST_CALL))
    last += peer.frame(peer.DATA, peer.END_STREAM, LAST_STREAM, bytes(5))
    return Conversation(start + data + last, judge_grpc, is_answered)


def _call(stream: int, fields: list[tuple[bytes, bytes]], chance: random.Random) -> Iterator[bytes]:
    if chance.random() < 0.3:
        fields.insert(chance.randint(0, len(fields)), chance.choice(FIELDS))
    block = peer.block(*fields, path=chance.choice(METHOD_PATHS))
    yield peer.frame(peer.HEADERS, peer.END_HEADERS, stream, mutated(block, chance) if chance.random() < 0.1 else block)
    message = chance.choice(CALLS)
    if chance.random() < 0.7:
        message = mutated(message, chance)
    size = len(message) if chance.random() < 0.95 else chance.choice((0, len(message) + 1, 1 << 31, 5))
    message = chance.choice((b"\0",) * 9 + (b"\1",)) + struct.pack(">I", size) + message
    cut = chance.randint(0, len(message)) if chance.random() < 0.2 else 0
    if cut:
        yield peer.frame(peer.DATA, 0, stream, message[:cut])
    yield peer.frame(peer.DATA, peer.END_STREAM if chance.random() < 0.95 else 0, stream, message[cut:])


def _frame_of_no_call(chance: random.Random) -> bytes:
    stream = chance.choice((0, 1, 3, 2, 77, 2**31 - 1))
    payload = chance.randbytes(chance.choice((0, 1, 4, 5, 6, 8, 12, 100)))
    frames = (
        peer.frame(chance.randrange(12), chance.randrange(256), stream, payload),
        peer.settings((chance.randrange(8), chance.choice((0, 1, 16_384, 2**31 - 1, 2**32 - 1)))),
        peer.window(stream, chance.choice((0, 1, 2**31 - 1))),
        peer.reset(stream or 1),
    )
    return chance.choice(frames)


def frames_of(received: bytes) -> Iterator[peer.Frame]:
    at = 0
    while len(received) - at >= 9:
        upper, lower, kind, flags, stream = struct.unpack_from(">BHBBI", received, at)
        end = at + 9 + (upper << 16 | lower)
        if end > len(received):
            return
        yield peer.Frame(kind, flags, stream, received[at + 9 : end])
        at = end


def is_answered(received: bytes) -> bool:
    """Return whether the last call is answered, or the connection ends."""
    return any(
        each.kind == peer.GOAWAY
        or (each.stream == LAST_STREAM and (each.kind == peer.RST_STREAM or each.flags & peer.END_STREAM))
        for each in frames_of(received)
    )


def judge_grpc(received: bytes) -> Judgement:
    judgement, decoder = Judgement(), hpack.Decoder()
    for each in frames_of(received):
        if each.kind == peer.HEADERS:
            try:
                fields = {bytes(name): bytes(value) for name, value in decoder.decode(each.payload, raw=True)}
            except hpack.HPACKError as error:
                judgement.faults.append(f"a header block that cannot be read: {error}")
                return judgement
            status, message = fields.get(b"grpc-status"), fields.get(b"grpc-message", b"")
            if status is not None and each.stream != LAST_STREAM:
                failed = status == UNKNOWN or SERVICE_FAILED.encode() in message
                judgement.note(f"grpc {status.decode()}", f"a call failed: {fields}" if failed else None)
            judgement.texts.append(b"\n".join(fields.values()))
        elif each.kind in (peer.RST_STREAM, peer.GOAWAY):
            name = "reset" if each.kind == peer.RST_STREAM else "goaway"
            failed = each.word == INTERNAL_ERROR
            judgement.note(f"{name} {each.word}", f"{name} for an internal error: {each.payload!r}" if failed else None)
    return judgement


SOURCES: dict[str, Callable[[str, random.Random], Conversation]] = {"http": http, "grpc": grpc}
"""Each makes one connection from a key of the service and a seeded chance."""
