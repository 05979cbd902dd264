"""10,000 connections that pipeline, that close half or that are reset, in each phase of a request: every request is accounted for."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from itertools import zip_longest
from urllib.parse import urlsplit

import pytest
import uvloop

from loadtest.target import Target
from tests import models
from tests.accumulator import Account, at_rest
from tests.serving import Server, eventually, serving
from tests.steady import open_files, settled_open_files

CONNECTIONS, AT_ONCE = 10_000, 100
MOST_REQUESTS, MOST_STEPS = 8, 20
HALF, RESET = 0.25, 0.35
"""Shares of the connections whose client closes its side, and whose client aborts."""
OLD, EXPECT, GENERAL = 0.1, 0.1, 0.2
"""Shares of the requests with HTTP/1.0, with Expect: 100-continue, and on the general path."""
BREAK_OFF = struct.pack("ii", 1, 0)
"""SO_LINGER with which close() sends a reset."""
_REPLY = re.compile(rb"HTTP/1\.1 (\d{3}) .*?\r\n\r\n", re.DOTALL)


class Ledger:
    """The data that the clients sent and received. complete: requests whose last byte was sent. answers: right answers."""

    def __init__(self) -> None:
        self.complete = self.answers = 0
        self.faults: list[str] = []


def request(target: Target, values: list[int], chance: random.Random, *, last: bool) -> bytes:
    """Return a request for the sum of values. last: whether it is the last request of its connection, as with HTTP/1.0."""
    body = json.dumps({"model": "accumulator", "inputs": [[value + 1 for value in values]]}).encode()
    data = target.request(body)
    if last and chance.random() < OLD:
        data = data.replace(b"HTTP/1.1\r\n", b"HTTP/1.0\r\n", 1)
    elif chance.random() < EXPECT:
        data = data.replace(b"\r\n", b"\r\nExpect: 100-continue\r\n", 1)
    return data.replace(b"/infer ", b"/infer?general ", 1) if chance.random() < GENERAL else data


def answers(received: bytes) -> list[Account | int]:
    """Return the account in each answer, in the order of the answers, and the status of each error."""
    found: list[Account | int] = []
    heads = list(_REPLY.finditer(received))
    for head, following in zip_longest(heads, heads[1:]):
        body = received[head.end() : following.start() if following else None]
        if head[1] == b"200":
            with suppress(ValueError):  # an answer that is cut off
                found.append(Account.told(json.loads(body)["outputs"][0]["value"]))
        elif head[1] != b"100":
            found.append(int(head[1]))
    return found


async def talk(server: Server, chance: random.Random, ledger: Ledger) -> None:
    """Open one connection, and end it in one of the ways."""
    address, target = urlsplit(server.address), Target.of(server.address, "/infer")
    requests = [chance.choices((-1, 0, 1), k=chance.randint(1, MOST_STEPS)) for _ in range(chance.randint(1, MOST_REQUESTS))]
    data, ends = b"", []
    for number, values in enumerate(requests, start=1):
        data += request(target, values, chance, last=number == len(requests))
        ends.append(len(data))
    way = chance.random()
    sent = chance.randint(0, len(data)) if way < HALF + RESET else len(data)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    received = b""
    with suppress(OSError):
        writer.write(data[:sent])
        ledger.complete += sum(end <= sent for end in ends)
        if way < HALF:
            writer.write_eof()
            received = await reader.read(-1)
        elif way < HALF + RESET:
            await asyncio.sleep(chance.choice((0, 0, 0.001, 0.01)))
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, BREAK_OFF)
        else:
            while len(answers(received)) < len(requests) and (part := await reader.read(1 << 16)):
                received += part
    writer.close()
    expected = [Account().plus(values) for values in requests]
    told = answers(received)
    ledger.answers += len(told)
    if told != expected[: len(told)] or (way >= HALF + RESET and len(told) < len(expected)):
        ledger.faults.append(f"{told} and not {expected} to {data[:sent]!r:.300}, received {received[-300:]!r}")


async def _talk(server: Server, connections: int, ledger: Ledger, seed: int) -> None:
    chances = (random.Random(f"{seed} {number}") for number in range(connections))

    async def work() -> None:
        for chance in chances:
            await talk(server, chance, ledger)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work())


def ended(server: Server, connections: int) -> list[str]:
    """Open and end connections. Returns the faults."""
    before, files, ledger = at_rest(server), settled_open_files(server), Ledger()
    uvloop.run(_talk(server, connections, ledger, 0))
    counts = at_rest(server).since(before)
    eventually(lambda: open_files(server) == files)
    faults = ledger.faults[:5]
    if counts.in_flight or counts.accepted != counts.outcomes.total():
        faults.append(f"{counts.accepted} requests were accepted, and have the outcomes {counts.outcomes}")
    if not ledger.answers <= counts.outcomes["ok"] <= ledger.complete:
        faults.append(f"{ledger.answers} answers to {ledger.complete} complete requests, and the outcomes {counts.outcomes}")
    if set(counts.outcomes) - {"ok", "client_gone"}:
        faults.append(f"outcomes {counts.outcomes}")
    return faults


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("models")
    models.accumulator(root)
    # The connection of the server's own client stays: the descriptors are compared.
    with serving(root, tmp_path_factory.mktemp("log"), idle_seconds="600") as running:
        yield running


def test_10_000_connections_that_end_anyhow_are_accounted_for(server: Server) -> None:
    assert ended(server, CONNECTIONS) == []
    assert not server.events("bug") and not server.events("library warning")
