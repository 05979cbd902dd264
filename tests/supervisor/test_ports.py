"""The addresses on which the service listens."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from service.errors import StartError
from service.settings import Settings
from service.supervisor import ports
from tests.serving import LIMIT_SECONDS

BOTH = {"127.0.0.1", "::1"}


def reached(listening: socket.socket) -> set[str]:
    """Return the addresses on which a socket accepts connections."""
    accepting = set()
    for host in BOTH:
        try:
            with closing(socket.create_connection((host, listening.getsockname()[1]), LIMIT_SECONDS)):
                accepting.add(host)
        except OSError:
            continue
    return accepting


@pytest.mark.parametrize("host", sorted(BOTH))
def test_an_address_is_listened_on_alone(host: str) -> None:
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("IPv6 is missing")
    settings = Settings(host=host, port=0, grpc_port=0)
    for open_port in (ports.open_http, ports.open_grpc):
        with closing(open_port(settings)) as listening:
            assert reached(listening) == {host}
            shown = f"[{host}]" if ":" in host else host
            assert ports.address(listening, settings) == f"{shown}:{listening.getsockname()[1]}"


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_grpc_accepts_both_families_on_a_wildcard_address(host: str) -> None:
    settings = Settings(host=host, grpc_port=0)
    with closing(ports.open_grpc(settings)) as listening:
        assert reached(listening) == (BOTH if socket.has_dualstack_ipv6() else {"127.0.0.1"})
        if host:
            assert ports.address(listening, settings).rpartition(":")[0].strip("[]") == host


def test_port_in_use_is_refused_with_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"cannot listen on 127.0.0.1 port {port}: .*--port"):
            ports.open_http(Settings(port=port, grpc_port=0))
        with pytest.raises(StartError, match=f"cannot listen on 127.0.0.1 port {port}: .*--grpc-port"):
            ports.open_grpc(Settings(port=0, grpc_port=port))
