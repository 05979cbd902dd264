"""100,000 requests with ids beyond the vocabulary, lengths that lie and shapes that do not exist: each is refused before the device."""

from __future__ import annotations

import asyncio
import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from loadtest.oip_requests import PATH
from loadtest.target import JSON, Target
from service.frontend.oip.protobuf import METHODS
from tests import models
from tests.callers import Caller, GrpcCaller
from tests.serving import Server, serving
from tests.steady import processes

CASES = 100_000
CALLERS = 16
VOCABULARY, LONGEST = 12, 64
"""Sizes of the model `reader`."""
GRPC = 0.1
"""Share of the cases that come over gRPC."""
IMPOSSIBLE_IDS: tuple[Any, ...] = (
    -1,
    VOCABULARY,
    2**31 - 1,
    2**31,
    2**32,
    2**63 - 1,
    -(2**31),
    -(2**63),
    10**30,
    1.5,
    None,
    True,
    "1",
    [1],
    {},
)
IMPOSSIBLE_RAW = (-1, VOCABULARY, 2**31 - 1, -(2**31), 2**32, 2**63 - 1, -(2**63))
IMPOSSIBLE_SIZES = (-1, -(2**63), 2**31, 2**32 + 1, 2**60 + 2, 2**63 - 1)
Request = tuple[str, bytes, tuple[str, ...]]
"""The path, the body and the headers of a request; without a path, a message of gRPC."""


def ids(chance: random.Random, least: int = 1, most: int = LONGEST) -> list[Any]:
    return [chance.randrange(VOCABULARY) for _ in range(chance.randint(least, most))]


def spoilt(chance: random.Random, values: tuple[Any, ...]) -> list[Any]:
    """Return ids with an impossible id among them."""
    made = ids(chance)
    made[chance.randrange(len(made))] = chance.choice(values)
    return made


def infer(inputs: Any, **more: Any) -> Request:
    return "/infer", json.dumps({"model": "reader", "inputs": inputs} | more).encode(), (JSON,)


def oip(*tensors: dict[str, Any]) -> Request:
    return "/v2/models/reader/infer", json.dumps({"inputs": tensors}).encode(), (JSON,)


def tensor(data: list[Any], shape: list[Any], name: str = "ids", datatype: str = "INT64") -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def raw(chance: random.Random) -> tuple[bytes, list[int], str]:
    """Return raw ids with an impossible id among them, or with a size that does not fit the shape."""
    if chance.random() < 0.5:
        values = spoilt(chance, IMPOSSIBLE_RAW)
        return struct.pack(f"<{len(values)}q", *values), [len(values)], "INT64"
    values = ids(chance)
    data = struct.pack(f"<{len(values)}i", *values)
    size = chance.choice((len(values) + 1, len(values) - 1 or 2, chance.choice(IMPOSSIBLE_SIZES[:2])))
    return data, [size], "INT32"


def binary(chance: random.Random) -> Request:
    data, shape, datatype = raw(chance)
    told = len(data) if chance.random() < 0.7 else chance.choice((len(data) + 8, 0, -1, 2**63))
    ids = {"name": "ids", "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": told}}
    head = json.dumps({"inputs": [ids]}).encode()
    return "/v2/models/reader/infer", head + data, (f"Inference-Header-Content-Length: {len(head)}",)


def lengths(chance: random.Random) -> Request:
    """Return sequences with lengths, or bounds, that do not fit them."""
    count, steps = chance.randint(1, 4), chance.randint(1, 16)
    values = tensor([chance.randrange(VOCABULARY) for _ in range(count * steps)], [count, steps])
    if chance.random() < 0.5:
        wrong = [chance.randint(1, steps) for _ in range(count)]
        wrong[chance.randrange(count)] = chance.choice((-1, steps + 1, 2**31, 2**63 - 1, -(2**63)))
        return oip(values, tensor(wrong, [count], "lengths"))
    packed = values | {"shape": [count * steps]}
    bounds = chance.choice(
        ([0, count * steps + 1], [1, count * steps], [0, 2**40, count * steps], [-1, count * steps], [0], [])
    )
    return oip(packed, tensor(bounds, [len(bounds)], "offsets"))


def shape(chance: random.Random) -> Request:
    data = ids(chance)
    return oip(
        tensor(data, chance.choice(([size], [1, size], [size, size]) if (size := chance.choice(IMPOSSIBLE_SIZES)) else ()))
    )


def features(chance: random.Random) -> Request:
    rows: list[Any] = [[chance.random() for _ in range(3)] for _ in range(chance.randint(1, 8))]
    wrong = chance.choice(([1, 2], [1, 2, 3, 4], [], [1e39, 0, 0], [1, None, 2], [1, "2", 3], 5, None, [[1, 2, 3]]))
    rows[chance.randrange(len(rows))] = wrong
    return "/infer", json.dumps({"model": "forecaster", "inputs": [rows]}).encode(), (JSON,)


def too_long(chance: random.Random) -> Request:
    return infer([ids(chance), ids(chance, LONGEST + 1, chance.choice((LONGEST + 1, 1_000)))])


HTTP_CASES: tuple[Callable[[random.Random], Request], ...] = (
    lambda chance: infer([ids(chance), spoilt(chance, IMPOSSIBLE_IDS)]),
    lambda chance: infer([ids(chance)] * chance.choice((65, 200))),
    lambda chance: infer(chance.choice(([], None, {}, 5, [None], [5], ids(chance)))),
    lambda chance: oip(tensor(made := spoilt(chance, IMPOSSIBLE_IDS), [len(made)])),
    binary,
    lengths,
    shape,
    features,
    too_long,
)


def message(chance: random.Random) -> bytes:
    data, shape, datatype = raw(chance)
    request = METHODS["ModelInfer"].request_type(model_name="reader", raw_input_contents=[data])
    request.inputs.add(name="ids", datatype=datatype, shape=shape)
    serialised: bytes = request.SerializeToString()
    return serialised


class Account:
    """The cases that were sent, and the cases that were not refused."""

    def __init__(self) -> None:
        self.sent = 0
        self.faults: list[str] = []


async def _send(server: Server, cases: int, account: Account) -> None:
    async def work(seed: int) -> None:
        chance = random.Random(seed)
        http = await Caller.connect(Target.of(server.address, "/"))
        calls = GrpcCaller(server.grpc, PATH)
        while account.sent < cases:
            account.sent += 1
            if chance.random() < GRPC:
                request: Any = message(chance)
                reply = await calls.ask(request)
                refused = reply.status == 3 or reply.status == 8  # INVALID_ARGUMENT, RESOURCE_EXHAUSTED
            else:
                path, body, headers = request = chance.choice(HTTP_CASES)(chance)
                target = Target.of(server.address, path)
                if not http.connected:  # the reply to a request that is too large closes the connection
                    http = await Caller.connect(target)
                reply = await http.ask(target.request(body, *headers))
                refused = reply.status in (400, 413)
            if not refused:
                account.faults.append(f"{request!r:.500} got {reply!r:.300}")
        http.hang_up()
        calls.hang_up()
        await calls._closing

    async with asyncio.TaskGroup() as group:
        for seed in range(CALLERS):
            group.create_task(work(seed))


def refusals(server: Server, cases: int) -> list[str]:
    """Send cases, and return the faults: cases that were not refused, and the batches that they cost the device."""
    account, batches, before = Account(), server.metric("seqserve_batches_total"), processes(server)
    uvloop.run(_send(server, cases, account))
    faults = account.faults
    if (ran := server.metric("seqserve_batches_total") - batches) > 0:
        faults.append(f"the device ran {ran:.0f} batches")
    if processes(server) != before:
        faults.append("a process was replaced")
    return faults


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    models.reader(root)
    models.forecaster(root)
    return root


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(folder, tmp_path_factory.mktemp("log")) as running:
        yield running


def test_impossible_inputs_are_refused_before_the_device(server: Server) -> None:
    assert refusals(server, CASES)[:5] == []
    assert server.infer("reader", [[1, 2, 3]]).status_code == 200
