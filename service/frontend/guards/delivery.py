"""How much of a connection's data the client's system has received, as the kernel knows it.

A write buffer alone hides this: the kernel takes more from it only when a third of the kernel's buffer is free, perhaps a megabyte. A
client that reads a small reply each second frees a megabyte in an hour.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import NamedTuple

_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)
_TCP_INFO_BYTES, _ACKNOWLEDGED, _UNSENT = 192, (120, struct.Struct("=Q")), (144, struct.Struct("=I"))
"""The size of Linux's struct tcp_info, and where tcpi_bytes_acked and tcpi_notsent_bytes are in it."""


class Delivery(NamedTuple):
    """acknowledged_bytes: received by the client's system since the connection began. unsent_bytes: wait in the kernel for room there."""

    acknowledged_bytes: int
    unsent_bytes: int


def delivery(transport: asyncio.BaseTransport) -> Delivery | None:
    """Return how far a connection has delivered its bytes. None if the system does not tell."""
    connection = transport.get_extra_info("socket")
    if _TCP_INFO is None or connection is None:
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return None
    (acknowledged_at, acknowledged), (unsent_at, unsent) = _ACKNOWLEDGED, _UNSENT
    if len(info) < unsent_at + unsent.size:
        return None
    return Delivery(*acknowledged.unpack_from(info, acknowledged_at), *unsent.unpack_from(info, unsent_at))
