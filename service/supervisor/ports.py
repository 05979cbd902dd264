"""Opens the ports. All frontends accept from the same queue of each port: if a frontend hangs, the others continue."""

from __future__ import annotations

import socket
from ipaddress import ip_address

from service.errors import StartError
from service.settings import Settings

BACKLOG = 2048


def open_http(settings: Settings) -> socket.socket:
    """Return the listening HTTP socket; raises StartError."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    return _listen(family, settings.host, settings.port, "choose another with --host or --port")


def open_grpc(settings: Settings) -> socket.socket:
    """Return the listening gRPC socket, which accepts IPv4 and IPv6 on a wildcard address; raises StartError."""
    way_out = "choose another with --grpc-port, or disable gRPC with SEQSERVE_GRPC=0"
    dual = _is_wildcard(settings.host) and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in settings.host else socket.AF_INET
    return _listen(family, settings.host, settings.grpc_port, way_out, dual=dual)


def address(listening: socket.socket, settings: Settings) -> str:
    """Return host and port of a listening socket for clients."""
    host, port = listening.getsockname()[:2]
    if host == "::":
        host = settings.host or host  # of both families
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
