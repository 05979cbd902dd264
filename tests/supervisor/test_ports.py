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
    """Return the addresses on which a socket accepts connections. Another process may have its port number on the other address."""
    accepting = set()
    listening.settimeout(1)
    for host in BOTH:
        try:
            with (
                closing(socket.create_connection((host, listening.getsockname()[1]), LIMIT_SECONDS)),
                closing(listening.accept()[0]),
            ):
                accepting.add(host)
        except OSError:
            continue
    return accepting


@pytest.mark.parametrize("host", sorted(BOTH))
def test_an_address_is_listened_on_alone(host: str) -> None:
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("IPv6 is missing")
    settings = Settings(host=host, port=0, grpc_port=0, admin_port=0, health_port=0)
    with closing(ports.open_sockets(settings)) as sockets:
        here = [sockets.http, sockets.grpc, sockets.admin, sockets.health]
        for listening, address in zip(here, ports.addresses(sockets, settings), strict=True):
            assert listening is not None and reached(listening) == {host}
            shown = f"[{host}]" if ":" in host else host
            assert address == f"{shown}:{listening.getsockname()[1]}"
    assert sockets.health is not None
    sockets.health.close()
    fewer = Settings(port=0, grpc_port="off")
    with closing(ports.open_sockets(fewer)) as sockets:
        assert {*sockets[1:], *ports.addresses(sockets, fewer)[1:]} == {None}


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_grpc_accepts_both_families_on_a_wildcard_address(host: str) -> None:
    settings = Settings(host=host, port=0, grpc_port=0)
    with closing(ports.open_sockets(settings)) as sockets:
        assert sockets.grpc is not None
        assert reached(sockets.grpc) == (BOTH if socket.has_dualstack_ipv6() else {"127.0.0.1"})
        address = ports.addresses(sockets, settings).grpc
        if host:
            assert address is not None and address.rpartition(":")[0].strip("[]") == host


def test_port_in_use_is_refused_with_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name in ("port", "grpc_port", "admin_port"):
            settings = Settings.model_validate({"port": 0, "grpc_port": 0, name: port})
            with pytest.raises(StartError, match=f"cannot listen on 127.0.0.1 port {port}: .*--{name.replace('_', '-')}"):
                ports.open_sockets(settings)
