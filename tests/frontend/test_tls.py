"""TLS on both ports: with curl, openssl and gRPC, with certificates of clients, and with changed files."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest
from websockets.sync.client import connect

from service.errors import SettingsError
from service.frontend.tls import TlsContexts, build_context
from service.settings import Settings
from tests.certificates import Authority
from tests.frontend.in_process import InProcess, in_process
from tests.frontend.oip.test_grpc import call, raw
from tests.serving import eventually

QUESTION = "how far is the sea ?"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def secured(models_folder: Path, authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    """A server with a certificate, which accepts clients without a certificate."""
    certificate, key = authority.sign("server")
    files: dict[str, Any] = {"tls_cert": str(certificate), "tls_key": str(key)}
    with in_process(models_folder, tmp_path_factory.mktemp("log"), **files) as server:
        server.client.close()
        with trusting(server, authority) as server.client:
            yield server


def trusting(server: InProcess, authority: Authority, **options: str) -> httpx.Client:
    context = ssl.create_default_context(cafile=str(authority.certificate))
    if options:
        context.load_cert_chain(options["certificate"], options["key"])
    return httpx.Client(base_url=server.address, timeout=30, trust_env=False, verify=context)


def test_http_and_sockets_over_tls(secured: InProcess, authority: Authority) -> None:
    assert secured.address.startswith("https://")
    answers = [secured.infer("words", [QUESTION]) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200] * 3
    large = secured.infer("sensors", [[[0.5, 1.0, 2.0]] * 20_000], **{"return": ["sequence"]})
    assert large.status_code == 200 and len(large.content) > 1 << 20
    assert secured.client.get("/readyz").status_code == 200
    context = ssl.create_default_context(cafile=str(authority.certificate))
    with connect(secured.address.replace("https", "wss") + "/stream?model=sensors", ssl=context, open_timeout=60) as stream:
        stream.send('{"input": [[1, 2, 3]]}')
        assert '"outputs"' in str(stream.recv())


def test_curl_and_openssl_trust_the_certificate(secured: InProcess, authority: Authority) -> None:
    body = '{"model": "words", "inputs": ["how far is the sea ?"]}'
    command = ["curl", "--silent", "--fail", "--cacert", str(authority.certificate), f"{secured.address}/infer"]
    command += ["--header", "Content-Type: application/json", "--data", body]
    assert '"outputs"' in subprocess.run(command, check=True, capture_output=True, text=True).stdout
    place = urlsplit(secured.address).netloc
    for version in ("-tls1_2", "-tls1_3"):
        command = ["openssl", "s_client", version, "-CAfile", str(authority.certificate), "-connect", place]
        shown = subprocess.run(command, input="", capture_output=True, text=True, timeout=30).stdout
        assert "Verify return code: 0 (ok)" in shown


def test_grpc_over_tls(secured: InProcess, authority: Authority) -> None:
    credentials = grpc.ssl_channel_credentials(authority.certificate.read_bytes())
    with grpc.secure_channel(secured.grpc, credentials) as channel:
        assert call(channel, raw("inputs", "FP32", [1, 1, 3], bytes(12))).outputs


def test_plain_text_and_old_versions_are_refused(secured: InProcess, authority: Authority) -> None:
    place = urlsplit(secured.address)
    with socket.create_connection((str(place.hostname), int(place.port or 0)), 30) as plain:
        plain.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert not plain.recv(1 << 16).startswith(b"HTTP")
    command = ["openssl", "s_client", "-tls1_1", "-cipher", "ALL:@SECLEVEL=0", "-connect", place.netloc]
    assert subprocess.run(command, input=b"", capture_output=True, timeout=30).returncode != 0
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{secured.address}/readyz", trust_env=False)
    with grpc.insecure_channel(secured.grpc) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert secured.infer("words", [QUESTION]).status_code == 200


def test_certificates_of_clients_and_changed_files(models_folder: Path, tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    certificate, key = authority.sign("server")
    own, own_key = authority.sign("client")
    foreign, foreign_key = other.sign("stranger")
    files: dict[str, Any] = {"tls_cert": str(certificate), "tls_key": str(key), "tls_client_ca": str(authority.certificate)}
    with in_process(models_folder, tmp_path, **files) as server:
        with trusting(server, authority, certificate=str(own), key=str(own_key)) as client:
            assert client.get("/readyz").status_code == 200
        credentials = grpc.ssl_channel_credentials(authority.certificate.read_bytes(), own_key.read_bytes(), own.read_bytes())
        with grpc.secure_channel(server.grpc, credentials) as channel:
            assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10)
        for options in ({}, {"certificate": str(foreign), "key": str(foreign_key)}):
            with trusting(server, authority, **options) as client, pytest.raises(httpx.TransportError):
                client.get("/readyz")

        def issuer_is(wanted: Authority) -> bool:
            context = ssl.create_default_context(cafile=str(wanted.certificate))
            context.load_cert_chain(own, own_key)
            try:
                return httpx.get(f"{server.address}/readyz", trust_env=False, verify=context).status_code == 200
            except httpx.TransportError:
                return False

        renewed, renewed_key = other.sign("renewed")
        shutil.copy(renewed, certificate)  # for a moment, the certificate and the key do not belong together
        shutil.copy(renewed_key, key)
        eventually(lambda: issuer_is(other))
        assert not issuer_is(authority)


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


def test_contexts_stay_until_all_files_are_new(authority: Authority, tmp_path: Path) -> None:
    certificate, key = (shutil.copy(file, tmp_path / file.name) for file in authority.sign("first"))
    contexts = TlsContexts(settings(tls_cert=certificate, tls_key=key))
    before = contexts.http
    assert not contexts.reload()
    newer, newer_key = authority.sign("second")
    shutil.copy(newer, certificate)
    with pytest.raises(SettingsError):
        contexts.reload()
    assert contexts.http is before
    shutil.copy(newer_key, key)
    assert contexts.reload()
    assert contexts.http is not before
