"""Opens the ports. All frontends accept from the same queue of each port: if a frontend hangs, the others continue."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from ipaddress import ip_address
from typing import Generic, NamedTuple, TypeVar

from service.errors import StartError
from service.settings import OFF, Settings

BACKLOG = 2048


P = TypeVar("P")


class Ports(NamedTuple, Generic[P]):
    """What belongs to each port of the service. grpc, admin, health: None without these ports. `health` is the supervisor's; the others
    are the frontends'.
    """

    http: P
    grpc: P | None
    admin: P | None
    health: P | None = None


class ListeningSockets(Ports[socket.socket]):
    """The socket of each port."""

    def close(self) -> None:
        """Close all but the health port, which answers until the service has ended."""
        for listening in self[:-1]:
            if listening is not None:
                listening.close()


Addresses = Ports[str]
"""Host and port of each listening socket."""


def open_sockets(settings: Settings) -> ListeningSockets:
    """Return the listening sockets; raises StartError."""
    host, family = settings.host, socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    ports = {"--host or --port": settings.port, "--admin-port": settings.admin_port, "--health-port": settings.health_port}
    with ExitStack() as on_error:
        http, admin, health = [
            None if port == OFF else on_error.enter_context(_listen(family, host, port, f"choose another with {flag}"))
            for flag, port in ports.items()
        ]
        assert http is not None, "this port cannot be off"
        grpc = on_error.enter_context(_open_grpc(host, settings.grpc_port)) if settings.grpc_port != OFF else None
        on_error.pop_all()
    return ListeningSockets(http, grpc, admin, health)


def addresses(sockets: ListeningSockets, settings: Settings) -> Addresses:
    """Return where clients find the service."""
    http, *others = sockets
    return Ports(
        _address(http, settings.host), *(None if other is None else _address(other, settings.host) for other in others)
    )


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
