"""Which addresses count as one client: limits for each address would not bound a client that has many of them."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv6Address, IPv6Network, ip_address

PREFIX_BITS = 64
"""IPv6 addresses with this common prefix count as one: one client may use all of them."""


@lru_cache(maxsize=1024)
def address_group(peer: str) -> str:
    """Return the group of an address: its network for IPv6, otherwise the address itself."""
    try:
        address = ip_address(peer)
    except ValueError:
        return peer
    if not isinstance(address, IPv6Address):
        return peer
    return str(address.ipv4_mapped or IPv6Network((int(address), PREFIX_BITS), strict=False))
