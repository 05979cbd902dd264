"""Opens the ports. All frontends accept from the same queue of each port: if a frontend hangs, the others continue."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from ipaddress import ip_address
from typing import NamedTuple

from service.errors import StartError
from service.settings import OFF, Settings

BACKLOG = 2048


class ListeningSockets(NamedTuple):
    """The sockets of the service. grpc, admin, health: None without these ports. `health` is the supervisor's; the others are the
    frontends'.
    """

    http: socket.socket
    grpc: socket.socket | None
    admin: socket.socket | None
    health: socket.socket | None = None

    def close(self) -> None:
        """Close all but the health port, which answers until the service has ended."""
        for listening in self[:-1]:
            if listening is not None:
                listening.close()


class Addresses(NamedTuple):
    """Host and port of each listening socket for clients. grpc, admin, health: None without these ports."""

    http: str
    grpc: str | None
    admin: str | None
    health: str | None = None


def open_sockets(settings: Settings) -> ListeningSockets:
    """Return the listening sockets; raises StartError."""
    with ExitStack() as on_error:
        http = on_error.enter_context(_open_http(settings.host, settings.port, "choose another with --host or --port"))
        grpc = on_error.enter_context(_open_grpc(settings.host, settings.grpc_port)) if settings.grpc_port != OFF else None
        admin = None
        if settings.admin_port != OFF:
            admin = on_error.enter_context(_open_http(settings.host, settings.admin_port, "choose another with --admin-port"))
        health = None
        if settings.health_port != OFF:
            health = _open_http(settings.host, settings.health_port, "choose another with --health-port")
        on_error.pop_all()
    return ListeningSockets(http, grpc, admin, health)


def addresses(sockets: ListeningSockets, settings: Settings) -> Addresses:
    """Return where clients find the service."""
    http, grpc, admin, health = sockets
    return Addresses(
        _address(http, settings.host),
        None if grpc is None else _address(grpc, settings.host),
        None if admin is None else _address(admin, settings.host),
        None if health is None else _address(health, settings.host),
    )


def _open_http(host: str, port: int, way_out: str) -> socket.socket:
    return _listen(socket.AF_INET6 if ":" in host else socket.AF_INET, host, port, way_out)


def _open_grpc(host: str, port: int) -> socket.socket:
    """Return the listening gRPC socket, which accepts IPv4 and IPv6 on a wildcard address; raises StartError."""
    way_out = "choose another with --grpc-port, or disable gRPC with --grpc-port off"
    dual = _is_wildcard(host) and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in host else socket.AF_INET
    return _listen(family, host, port, way_out, dual=dual)


def _address(listening: socket.socket, named: str) -> str:
    """Return host and port of a listening socket. named: the host in the settings."""
    host, port = listening.getsockname()[:2]
    if host == "::":
        host = named or host  # of both families
    return f"{f'[{host}]' if ':' in host else host}:{port}"


def _is_wildcard(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return host == ""


def _listen(family: socket.AddressFamily, host: str, port: int, way_out: str, *, dual: bool = False) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family is socket.AF_INET6:
        listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if dual else 1)
    try:
        listening.bind(("::" if dual else host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise StartError(f"cannot listen on {host} port {port}: {error.strerror}; {way_out}") from error
    return listening
