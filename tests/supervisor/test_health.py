"""The health port: its answers, its access rules and its refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from service.access.keys import create
from service.access.scopes import Scope
from service.log import Log
from service.metrics import Metrics, Snapshot
from service.settings import Settings
from service.supervisor import health
from service.supervisor.health import MAX_CONNECTIONS, HealthPort
from service.supervisor.ports import open_sockets

Scenario = Callable[[int], Awaitable[None]]


async def snapshot(timeout: float) -> Snapshot:
    return Metrics().snapshot()


def run(scenario: Scenario, ready: bool = True, **settings: str) -> None:
    """Run a scenario, which gets the port number of a health port."""
    given = Settings(port=0, grpc_port="off", health_port=0, **settings)  # type: ignore[arg-type]
    with_sockets = open_sockets(given)
    with_sockets.close()
    assert with_sockets.health is not None
    port = HealthPort(with_sockets.health, given, lambda: ready, snapshot, Log("test"))

    async def within() -> None:
        await port.open()
        try:
            await scenario(with_sockets.health.getsockname()[1])  # type: ignore[union-attr]
        finally:
            port.close()

    asyncio.run(within())


async def exchange(port: int, request: bytes) -> tuple[int, str, bytes]:
    """Return the status, the head and the body of the answer, after which the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        answer = await reader.read()
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(answer.split()[1]), head.decode().lower(), body


async def get(port: int, path: str, *lines: str) -> tuple[int, str, bytes]:
    return await exchange(port, "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode())


@pytest.mark.parametrize("ready", [True, False])
def test_checks_tell_live_from_ready_beside_metrics(ready: bool) -> None:
    async def scenario(port: int) -> None:
        assert await get(port, "/healthz?verbose") == (200, (await get(port, "/healthz"))[1], b'{"live":true}')
        status, head, body = await get(port, "/readyz")
        assert (status, json.loads(body).get("ready"), "retry-after: 1" in head) == (
            (200, True, False) if ready else (503, None, True)
        )
        status, head, body = await get(port, "/metrics")
        assert status == 200 and "text/plain" in head and b"seqserve_ready" in body
        status, head, body = await get(port, "/metrics", "Accept: application/openmetrics-text")
        assert status == 200 and "application/openmetrics-text" in head and body.endswith(b"# EOF\n")
        foreign = b"GET /metrics HTTP/1.1\r\nHost: example.com\r\n\r\n"
        assert (await exchange(port, foreign))[0] == 403, "a web page may point its own name at this machine"

    async def with_tls(port: int) -> None:
        assert [(await get(port, path))[0] for path in ("/healthz", "/metrics")] == [200, 404]

    run(scenario, ready)
    run(with_tls, tls_cert="certificate.pem")


@pytest.mark.parametrize(
    "request_line, status, code",
    [
        ("GET /infer HTTP/1.1", 404, "unknown_route"),
        ("GET //healthz HTTP/1.1", 404, "unknown_route"),
        ("POST /healthz HTTP/1.1", 405, "method_not_allowed"),
        ("DELETE /metrics HTTP/1.1", 405, "method_not_allowed"),
        ("\x00 nonsense", 400, "invalid_request"),
        (f"GET /{'a' * 20_000} HTTP/1.1", 400, "invalid_request"),
    ],
    ids=["path", "spelling", "method", "method of metrics", "no HTTP", "too long"],
)
def test_other_requests_are_refused(request_line: str, status: int, code: str) -> None:
    async def scenario(port: int) -> None:
        found, _, body = await exchange(port, f"{request_line}\r\nHost: localhost\r\n\r\n".encode())
        assert found == status, body
        assert set(json.loads(body)) == {"error", "code"} and json.loads(body)["code"] == code

    run(scenario)


def test_metrics_need_the_same_rights_as_elsewhere(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    scraper = create(keys, "prometheus", [Scope.METRICS], "operators")
    infers = create(keys, "app", [Scope.INFER], "operators")

    async def scenario(port: int) -> None:
        assert [(await get(port, path))[0] for path in ("/healthz", "/readyz", "/metrics")] == [200, 200, 401]
        assert (await get(port, "/metrics", f"Authorization: Bearer {infers}"))[0] == 403
        assert (await get(port, "/metrics", f"Authorization: Bearer {scraper}"))[0] == 200
        assert (await get(port, "/metrics", f"Authorization: Bearer {scraper}", "Origin: http://example.com"))[0] == 403
        added = create(keys, "later", [Scope.METRICS], "operators")
        assert (await get(port, "/metrics", f"Authorization: Bearer {added}"))[0] == 200
        keys.write_text("damaged")
        assert (await get(port, "/metrics", f"Authorization: Bearer {added}"))[0] == 200

    run(scenario, keys=str(keys))


def test_connections_are_few_and_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent clients at the limit do not refuse a probe: the oldest loses its connection."""

    async def scenario(port: int) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_CONNECTIONS)]
        assert (await get(port, "/healthz"))[0] == 200
        (oldest, _), (newest, writer) = silent[0], silent[-1]
        with pytest.raises((ConnectionError, EOFError)):
            await oldest.readexactly(1)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await newest.readline()).startswith(b"HTTP/1.1 200")
        monkeypatch.setattr(health, "REQUEST_SECONDS", 0.01)
        silent.append(await asyncio.open_connection("127.0.0.1", port))
        assert await silent[-1][0].read() == b"", "a silent connection ends in time"
        for _, writer in silent:
            writer.close()

    run(scenario)
