"""10,000 requests on each path of errors, each path alone: no process grows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import uvloop
from websockets.asyncio.client import connect

from loadtest import oip_requests
from loadtest.target import Target
from service.settings import Settings
from tests import models
from tests.callers import Caller, GrpcCaller
from tests.serving import Server, eventually, serving
from tests.steady import processes, resident_bytes

REQUESTS, WARM_UP = 10_000, 2_000
CALLERS = 16
LIMIT_BYTES = 4 << 20
SETTINGS = {"max_body_bytes": "100000", "session_idle_seconds": "3600"}
Build = Callable[[Target, int], bytes]


class ErrorPath(NamedTuple):
    """Requests that end with an error. build: returns the request with a number. code: of the error; empty if the client hangs up."""

    build: Build
    code: str
    path: str = "/infer"


def json_of(**body: object) -> Build:
    """Build a request to /infer with this body; `{}` in a text stands for the number of the request."""
    text = json.dumps({"model": "words", "inputs": ["how far"]} | body)
    return lambda target, number: target.request(text.replace("{}", str(number)).encode())


def head(text: str) -> Build:
    """Build a request with this head."""
    return lambda target, number: text.format(number, host=target.host).replace("\n", "\r\n").encode() + b"\r\n\r\n"


HTTP = {
    "no JSON": ErrorPath(lambda target, number: target.request(b'{"model": ["' + str(number).encode()), "invalid_request"),
    "no object": ErrorPath(lambda target, number: target.request(str(number).encode()), "invalid_request"),
    "an unknown option": ErrorPath(json_of(**{"option-{}": 1}), "invalid_input"),
    "a wrong type": ErrorPath(json_of(inputs="{}"), "invalid_input"),
    "an unknown model": ErrorPath(json_of(model="nobody-{}"), "unknown_model"),
    "too many inputs": ErrorPath(json_of(inputs=["far {}"] * (Settings().max_inputs + 1)), "too_large"),
    "a huge body": ErrorPath(head("POST /infer HTTP/1.1\nHost: {host}\nContent-Length: 200000{}"), "too_large"),
    "a huge head": ErrorPath(head("GET /{} HTTP/1.1\nHost: {host}\nx: " + "x" * 100_000), "headers_too_large"),
    "no HTTP": ErrorPath(head("GET /{} HTTP/9.9\nHost: {host}"), "invalid_request"),
    "an unknown path": ErrorPath(head("GET /nothing/{} HTTP/1.1\nHost: {host}"), "unknown_route"),
    "a wrong method": ErrorPath(head("DELETE /infer?{} HTTP/1.1\nHost: {host}"), "method_not_allowed"),
    "another host": ErrorPath(head("GET /models HTTP/1.1\nHost: host-{}.example"), "forbidden"),
    "another encoding": ErrorPath(
        lambda target, number: target.request(b"{}", f"Content-Encoding: x-{number}"), "unsupported_media"
    ),
    "a deadline": ErrorPath(json_of(deadline_ms=0.001, inputs=["{}"]), "deadline_exceeded"),
    "an unknown session": ErrorPath(json_of(model="speller", inputs=[[1]], session="{}", start=False), "unknown_session"),
    "another number of steps": ErrorPath(json_of(model="speller", inputs=[[1]], session="mine", steps=77), "session_conflict"),
    "no sessions": ErrorPath(json_of(session="{}"), "invalid_input"),
    "an invalid state": ErrorPath(
        head("PUT /sessions/{}/state HTTP/1.1\nHost: {host}\nContent-Type: application/octet-stream\nContent-Length: 0"),
        "invalid_request",
    ),
    "invalid tensors": ErrorPath(
        lambda target, number: target.request(b'{"inputs": [{"name": "x%d"}]}' % number), "invalid", "/v2/models/words/infer"
    ),
    "clients that hang up": ErrorPath(json_of(model="slow", inputs=[[[0.5, 0.5, 0.5]] * 100]), ""),
}


async def send(server: Server, errors: ErrorPath, numbers: Iterator[int]) -> None:
    target = Target.of(server.address, errors.path)

    async def send_some() -> None:
        caller = await Caller.connect(target)
        for number in numbers:
            if not caller.connected:
                caller = await Caller.connect(target)
            asked = asyncio.ensure_future(caller.ask(errors.build(target, number)))
            if not errors.code:
                await asyncio.sleep(0.001)
                caller.hang_up()
                asked.cancel()
                continue
            reply = await asked
            code = json.loads(reply.body).get("code", "") or reply.body.decode()
            assert reply.status >= 400 and errors.code in code, (reply, number)
        caller.hang_up()

    await asyncio.gather(*[send_some() for _ in range(CALLERS)])


async def send_calls(server: Server, _: ErrorPath, numbers: Iterator[int]) -> None:
    """Make gRPC calls for models that do not exist."""

    async def send_some() -> None:
        caller = GrpcCaller(server.grpc, oip_requests.PATH)
        for number in numbers:
            message = oip_requests.METHOD.request_type(model_name=f"nobody-{number}")
            assert json.loads((await caller.ask(message.SerializeToString())).body)["code"] == "NOT_FOUND"
        caller.hang_up()
        await caller._closing

    await asyncio.gather(*[send_some() for _ in range(CALLERS)])


async def send_messages(server: Server, _: ErrorPath, numbers: Iterator[int]) -> None:
    """Send invalid messages on WebSockets."""

    async def send_some() -> None:
        address = server.address.replace("http", "ws", 1)
        async with connect(f"{address}/stream?model=speller", proxy=None) as stream:
            for number in numbers:
                await stream.send(f'{{"input": "{number}"}}')
                assert json.loads(await stream.recv())["code"] == "invalid_input"

    await asyncio.gather(*[send_some() for _ in range(CALLERS)])


NOTHING = ErrorPath(lambda *_: b"", "")
PATHS = {name: (send, path) for name, path in HTTP.items()} | {
    "gRPC": (send_calls, NOTHING),
    "WebSocket": (send_messages, NOTHING),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    models.words(root)
    models.speller(root)
    models.sensors(root, "slow")
    return root


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(folder, tmp_path_factory.mktemp("log"), "--device", "cpu", **SETTINGS) as running:
        yield running


def grown(server: Server, name: str) -> dict[str, int]:
    """Return how many bytes each process has gained in REQUESTS errors of one kind, after a warm-up."""
    send_some, path = PATHS[name]
    uvloop.run(send_some(server, path, iter(range(WARM_UP))))
    before = {process: resident_bytes(pid) for process, pid in processes(server).items()}
    uvloop.run(send_some(server, path, iter(range(WARM_UP, WARM_UP + REQUESTS))))
    eventually(lambda: server.metric("seqserve_requests_in_flight") == 0)
    assert processes(server).keys() == before.keys()
    return {process: resident_bytes(pid) - before[process] for process, pid in processes(server).items()}


@pytest.mark.parametrize("name", PATHS)
def test_10_000_errors_of_one_kind_do_not_grow_memory(server: Server, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "another number of steps":
        assert server.infer("speller", [[1]], session="mine").status_code == 200
    bytes_gained = grown(server, name)
    with capsys.disabled():
        print(f"\n{name}, MiB:", ", ".join(f"{process} {size / 2**20:.2f}" for process, size in bytes_gained.items()))
    assert max(bytes_gained.values()) <= LIMIT_BYTES
    assert not server.events("bug")
