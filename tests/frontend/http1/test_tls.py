"""TLS on both ports: certificates of the server and of clients, and changed files."""

from __future__ import annotations

import shutil
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest
from websockets.sync.client import connect

from service.errors import SettingsError
from service.frontend.http1.tls import build_context
from service.settings import Settings
from tests.certificates import Authority
from tests.frontend.in_process import InProcess, in_process
from tests.serving import eventually

LIVE = "/grpc.health.v1.Health/Check"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other"), "other")


@pytest.fixture
def secured(models_folder: Path, authority: Authority, tmp_path: Path) -> Iterator[tuple[InProcess, dict[str, Any]]]:
    """A server that accepts only clients with a certificate of the authority, and its files."""
    certificate, key = (shutil.copy(file, tmp_path / file.name) for file in authority.sign("server"))
    files: dict[str, Any] = {"tls_cert": str(certificate), "tls_key": str(key), "tls_client_ca": str(authority.certificate)}
    with in_process(models_folder, tmp_path, **files) as server:
        yield server, files


def context_of(authority: Authority, *files: Path) -> ssl.SSLContext:
    """Return the context of a client that trusts an authority. files: its own certificate and key."""
    context = ssl.create_default_context(cafile=str(authority.certificate))
    if files:
        context.load_cert_chain(files[0], files[1])
    return context


def fetch(server: InProcess, context: ssl.SSLContext) -> int | None:
    """Return the status of a reply, or None without a connection."""
    try:
        return httpx.get(f"{server.address}/readyz", timeout=60, trust_env=False, verify=context).status_code
    except httpx.TransportError:
        return None


def test_ports_need_tls_with_the_right_certificates(
    secured: tuple[InProcess, dict[str, Any]], authority: Authority, other: Authority
) -> None:
    server, files = secured
    own, foreign = authority.sign("client"), other.sign("stranger")
    context = context_of(authority, *own)
    with httpx.Client(base_url=server.address, timeout=30, trust_env=False, verify=context) as client:
        body = {"model": "sensors", "inputs": [[[0.5, 1.0, 2.0]] * 20_000], "return": ["sequence"]}
        assert len(client.post("/infer", json=body).content) > 1 << 20
    with connect(server.address.replace("https", "wss") + "/stream?model=sensors", ssl=context, open_timeout=60) as stream:
        stream.send('{"input": [[1, 2, 3]]}')
        assert '"outputs"' in str(stream.recv())
    credentials = grpc.ssl_channel_credentials(authority.certificate.read_bytes(), own[1].read_bytes(), own[0].read_bytes())
    with grpc.secure_channel(server.grpc, credentials) as channel:
        assert channel.unary_unary(LIVE)(b"", timeout=60)
    assert [fetch(server, context_of(authority, *certificate)) for certificate in ((), foreign)] == [None, None]
    assert fetch(server, context_of(other, *own)) is None, "the client does not trust the server"
    place = urlsplit(server.address)
    with socket.create_connection((str(place.hostname), int(place.port or 0)), 30) as plain:
        plain.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert not plain.recv(1 << 16).startswith(b"HTTP")
    with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(LIVE)(b"", timeout=10)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    for new, file in zip(other.sign("renewed"), (files["tls_cert"], files["tls_key"]), strict=True):
        shutil.copy(new, file)  # for a moment, the certificate and the key do not belong together
    eventually(lambda: fetch(server, context_of(other, *own)) == 200)


def settings(**names: Path | str) -> Settings:
    return Settings(**{name: str(value) for name, value in names.items()})  # type: ignore[arg-type]


def test_files_that_cannot_serve_stop_the_start(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.sign("one")
    _, other_key = authority.sign("two")
    empty = tmp_path / "empty"
    empty.write_text("")
    assert build_context(Settings()) is None
    assert build_context(settings(tls_cert=certificate, tls_key=key)) is not None
    for names in (
        {"tls_key": key},
        {"tls_client_ca": authority.certificate},
        {"tls_cert": tmp_path / "missing", "tls_key": key},
        {"tls_cert": certificate},
        {"tls_cert": certificate, "tls_key": other_key},
        {"tls_cert": empty, "tls_key": key},
        {"tls_cert": certificate, "tls_key": key, "tls_client_ca": empty},
    ):
        with pytest.raises(SettingsError, match=r"tls_cert|TLS cannot start with"):
            build_context(settings(**names))
