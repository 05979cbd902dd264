"""The hot path and the general path return the same bytes for the same requests, however these arrive."""

from __future__ import annotations

import json
import re
import socket
import struct
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.frontend.in_process import InProcess
from tests.frontend.oip.test_json import INVALID
from tests.frontend.rest.test_infer import NOT_JSON, WRONG
from tests.serving import LIMIT_SECONDS, Service

HOT = b"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GENERAL_HEADER = b"TE: trailers\r\n"
"""A header that makes any request unusual, and that no endpoint reads."""


def request(body: bytes, *, head: bytes = HOT, length: int | None = None) -> bytes:
    return head + b"Content-Length: %d\r\n\r\n%b" % (len(body) if length is None else length, body)


def through_the_general_path(message: bytes) -> bytes:
    """Return the request with the header that sends it to the general path."""
    line, rest = message.split(b"\r\n", 1)
    return line + b"\r\n" + GENERAL_HEADER + rest


def exchange(server: Service, *pieces: bytes, replies: int = 1) -> bytes:
    """Send each piece in a separate write, and return all replies without their dates and ids."""
    address = urlsplit(server.address)
    with socket.create_connection((address.hostname, address.port), LIMIT_SECONDS) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            client.sendall(piece)
        data = b""
        while count_replies(data) < replies:
            part = client.recv(1 << 16)
            if not part:
                break
            data += part
    return re.sub(rb"(date|x-request-id): [^\r]*\r\n", b"", data)


def count_replies(data: bytes) -> int:
    """Return the number of complete replies, each with its Content-Length; interim replies do not count."""
    count = 0
    while (end := data.find(b"\r\n\r\n")) >= 0:
        length = re.search(rb"content-length: (\d+)", data[:end])
        size = int(length[1]) if length else 0
        if len(data) < end + 4 + size:
            break
        data, count = data[end + 4 + size :], count + (length is not None)
    return count


def bodies() -> list[bytes]:
    """Return valid, refused and broken bodies of POST /infer."""
    texts = ["how far is it ?", "How FAR, is 12 it?!", "日本 é", "a\tb\nc", "[UNK] far", "", "   ", "x" * 3000]
    options: list[dict[str, Any]] = [{"inputs": each} for each in (*([text] for text in texts), texts[:3], [[1, 2, 3]], [[]])]
    options += [{"version": version} for version in ("1", 1, "7", 1.0, None)]
    options += [{"return": names} for names in (["embedding"], ["sequence"], ["embedding", "sequence"], [])]
    options += [{"deadline_ms": 1e3}, {"priority": -10}, {"session": "s", "end": True}, {"start": None}, {"model": "nothing"}]
    valid = [json.dumps({"model": "words", "inputs": ["how far"], **option}).encode() for option in options]
    broken = [b'\xef\xbb\xbf{"model":"words","inputs":["a"]}', b'{"model":"words","inputs":["a"],"inputs":["how"]}']
    broken += [b'{"model":"words","inputs":[NaN]}', b'{"model":"words","inputs":["how"]} x']
    spaced = b' {"model":"words","inputs":["how"]}\r\n '
    return [*valid, *(json.dumps(body).encode() for body, _, _ in WRONG), *NOT_JSON, *broken, spaced]


def oip_messages() -> list[bytes]:
    """Return inference requests of the Open Inference Protocol: JSON and binary, valid and refused."""
    ids = {"name": "ids", "datatype": "INT32", "shape": [3]}
    full = {**ids, "data": [1, 2, 3]}
    documents: list[Any] = [
        *({"inputs": [full], **more} for more in ({}, {"id": "seven"}, {"outputs": [{"name": "scores"}]})),
        *({"inputs": [full], "outputs": [{"name": "scores", "parameters": {name: 2}}]} for name in ("classification", "other")),
        {"inputs": [full], "outputs": [{"name": "scores", "parameters": {"binary_data": True}}]},
        {"inputs": [full], "parameters": {"sequence_id": "a", "sequence_start": True, "sequence_end": True}},
        *(document for document, tail, *_ in INVALID if isinstance(document, dict) and not tail),
    ]
    messages = []
    for path in ("words/infer", "words/versions/1/infer", "words/versions/9/infer", "nothing/infer", "words/infer?x=1"):
        head = b"POST /v2/models/%b HTTP/1.1\r\nHost: localhost\r\n" % path.encode()
        messages += [request(json.dumps(document).encode(), head=head) for document in documents]
        binary = json.dumps({"inputs": [{**ids, "parameters": {"binary_data_size": 12}}]}).encode()
        sized = head + b"Inference-Header-Content-Length: %d\r\n" % len(binary)
        messages += [request(binary + values, head=sized) for values in (struct.pack("<3i", 1, 2, 3), b"\1\0\0\0")]
        messages.append(request(b"how far", head=head + b"Inference-Header-Content-Length: 0\r\n"))
    return messages


def binary_message(model: str, document: dict[str, Any], values: bytes, headers: bytes = b"") -> bytes:
    """Return an inference request with raw values. document: the JSON, without the size of the values."""
    document = {**document, "inputs": [{**document["inputs"][0], "parameters": {"binary_data_size": len(values)}}]}
    text = json.dumps(document).encode()
    head = b"POST /v2/models/%b/infer HTTP/1.1\r\nHost: localhost\r\n%b" % (model.encode(), headers)
    return request(text + values, head=head + b"Inference-Header-Content-Length: %d\r\n" % len(text))


def repeated_messages() -> list[bytes]:
    """Return binary requests whose JSON occurs before, with other values, with wrong values and with other headers."""

    def raw(name: str) -> dict[str, Any]:
        return {"name": name, "parameters": {"binary_data": True}}

    everything = {"parameters": {"binary_data_output": True}}
    requested: list[dict[str, Any]] = [
        *({}, everything),
        *({"outputs": [raw(name)]} for name in ("scores", "embedding", "sequence")),
        *({"outputs": [raw("scores"), other]} for other in (raw("label"), raw("scores"))),
        *(
            {"outputs": [{"name": "scores", **each}]}
            for each in ({}, {"parameters": {"binary_data": True, "classification": 2}})
        ),
        {"outputs": [raw("scores")], "id": "seven"},
        {"outputs": [raw("scores")], "parameters": {"priority": 1, "timeout": 60_000_000}},
    ]
    ids = {"name": "ids", "datatype": "INT32"}
    valid, two = struct.pack("<3i", 1, 2, 3), struct.pack("<6i", 1, 2, 3, 3, 2, 1)
    messages = []
    for options in requested:
        flat = {"inputs": [{**ids, "shape": [3]}], **options}
        rows = [valid, *(struct.pack("<3i", 3, id, 0) for id in (1, -1, 1 << 20, -(1 << 31))), valid[:-1], valid + b"\0", b""]
        messages += [binary_message("words", flat, values) for values in rows]
        messages.append(binary_message("words", flat, valid, b"Accept-Encoding: gzip\r\n"))
        messages.append(binary_message("words", {"inputs": [{**ids, "shape": [2, 3]}], **options}, two))
    wide = {"inputs": [{**ids, "shape": [400]}], "outputs": [raw("scores")]}
    messages += [binary_message("words", wide, struct.pack("<400i", *[id] * 400)) for id in (1, 2, -1)]
    text = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1]}], "outputs": [raw("scores")]}
    elements = (b"how far", b"far how", b"how \xff\xff", b"       ", "日é ".encode())
    messages += [binary_message("words", text, struct.pack("<I", 7) + element) for element in (*elements, b"how fars")]
    steps = {"inputs": [{"name": "inputs", "datatype": "FP32", "shape": [4, 3]}]}
    numbers = [struct.pack("<12f", *[value] * 12) for value in (1.0, 2.0, float("nan"), float("inf"), 3e38)]
    return [*messages, *(binary_message("sensors", steps | everything, values) for values in numbers)]


def test_remembered_json_gets_the_same_bytes_as_json_that_is_read(local: InProcess) -> None:
    messages = repeated_messages()
    general = [exchange(local, through_the_general_path(message)) for message in messages]
    assert sum(reply.startswith(b"HTTP/1.1 200") for reply in general) > 30
    for _ in range(2):
        for message, reply in zip(messages, general, strict=True):
            assert exchange(local, message) == reply, message


def test_both_paths_return_the_same_bytes(local: InProcess) -> None:
    for message in [*map(request, bodies()), *oip_messages()]:
        hot, general = exchange(local, message), exchange(local, through_the_general_path(message))
        assert hot == general, message


def session_messages(session: str) -> list[bytes]:
    """Return requests to sessions in an order that lets most of them fail or succeed because of the state of the session."""
    row = [0.25, -2.0, 3.0]
    chunks: list[dict[str, Any]] = [
        *({"start": False}, {}, {"inputs": [[row] * 3]}, {"start": None, "return": ["embedding", "sequence"]}),
        *({"inputs": [[[1.0]]]}, {"inputs": [[row], [row]]}, {"inputs": [[]]}),
        *({"version": "9"}, {"model": "nothing"}, {"model": "words", "inputs": ["how far"]}),
        *({"start": True}, {"start": 1}, {"end": None}, {"end": False}),
        *({"session": wrong} for wrong in (session + "\n", "stream:7", "", 5)),
        *({"start": False, "end": True}, {"start": False}),
    ]
    bodies = [{"model": "sensors", "inputs": [[row]], "session": session, **chunk} for chunk in chunks]
    messages = [request(json.dumps(body).encode()) for body in bodies]
    tensor = {"name": "inputs", "datatype": "FP32", "shape": [1, 1, 3]}
    for flags in ({"sequence_start": False}, {"sequence_start": True}, {}, {"sequence_end": "yes"}, {"sequence_end": True}, {}):
        document = {"inputs": [tensor], "parameters": {"sequence_id": session, "priority": 3, **flags}}
        messages.append(binary_message("sensors", document, struct.pack("<3f", *row)))
    return messages


def test_sessions_get_the_same_bytes_on_both_paths(local: InProcess) -> None:
    hot = [exchange(local, message) for message in session_messages("hot-hot")]
    general = [exchange(local, through_the_general_path(message)) for message in session_messages("general")]
    assert hot == [reply.replace(b"general", b"hot-hot") for reply in general]
    steps = [int(match[1]) for reply in hot if (match := re.search(rb'steps":(\d+)', reply))]
    assert steps == [1, 4, 5, 1, 2, 3, 1, 2, 3]


def test_reply_does_not_depend_on_where_the_bytes_are_cut(local: InProcess) -> None:
    message = request(b'{"model": "words", "inputs": ["how far is it ?"]}')
    whole = exchange(local, message)
    assert whole.startswith(b"HTTP/1.1 200 OK")
    for cut in range(1, len(message), 7):
        assert exchange(local, message[:cut], message[cut:]) == whole


def test_pipelined_requests_are_answered_in_order(local: InProcess) -> None:
    texts = ["how", "far", "is", "it"]
    bodies = [json.dumps({"model": "words", "inputs": texts[:count]}).encode() for count in (1, 2, 3, 4)]
    hot = [request(body) for body in bodies]
    general = [through_the_general_path(message) for message in hot]
    replies = b"".join(exchange(local, message) for message in hot)
    for order in (hot, general, [general[0], hot[1], general[2], hot[3]], [hot[0], general[1], general[2], hot[3]]):
        stream = b"".join(order)
        assert exchange(local, stream, replies=4) == replies
        assert exchange(local, *[stream[at : at + 97] for at in range(0, len(stream), 97)], replies=4) == replies


INFER = b"POST /infer HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "message",
    [
        b"GARBAGE\r\n\r\n",
        *(INFER.replace(b"1.1", b"1.0") + line + b"Content-Length: 2\r\n\r\n{}" for line in (b"", b"Connection: close\r\n")),
        INFER + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        *(INFER + b"Content-%b\r\nContent-Length: 2\r\n\r\n{}" % line for line in (b"Encoding: gzip", b"Type: text/plain")),
        INFER + b"Content-Length: 2\r\nContent-Type: application/vnd.x+json\r\n\r\n{}",
        *(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path for path in (b"/healthz", b"/infer")),
        *(INFER.replace(b"/infer", path) + b"Content-Length: 2\r\n\r\n{}" for path in (b"/elsewhere", b"/infer?x")),
    ],
)
def test_unusual_request_is_answered_and_the_next_hot_one_too(local: InProcess, message: bytes) -> None:
    """After a reply of the general path without a close, the connection is ready for the hot path."""
    alone = exchange(local, message)
    hot = request(b'{"model": "words", "inputs": ["how far"]}')
    assert re.match(rb"HTTP/1\.[01] [2-5]\d\d ", alone)
    if b"connection: close" not in alone:
        assert exchange(local, message, hot, replies=2) == alone + exchange(local, hot)
        assert exchange(local, message + hot, replies=2) == alone + exchange(local, hot)
    assert exchange(local, hot + message, replies=2) == exchange(local, hot) + alone


def test_expect_100_continue_gets_its_interim_reply(local: InProcess) -> None:
    body = b'{"model": "words", "inputs": ["how far"]}'
    data = exchange(local, request(body, head=HOT + b"Expect: 100-continue\r\n"))
    assert data.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")


def test_counts_are_those_of_the_general_path(local: InProcess) -> None:
    """Every request is counted once in every stage, on both paths."""
    good, refused = (request(b'{"model": "words", "inputs": [%b]}' % text) for text in (b'"how far"', b"5"))
    names = ("seqserve_requests_total", "seqserve_requests_accepted_total", "seqserve_stage_seconds_count")
    counts = [[local.metric(name) for name in names]]
    for messages in ((good, good, refused), map(through_the_general_path, (good, good, refused))):
        for message in messages:
            exchange(local, message)
        counts.append([local.metric(name) for name in names])
    hot, general = ([one - other for one, other in zip(after, before, strict=True)] for before, after in pairwise(counts))
    assert hot == general and hot[:2] == [3, 3]
    assert local.metric("seqserve_requests_in_flight") == 0
