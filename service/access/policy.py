"""The checks of every request: its key, its Host and its Origin. Without keys, clients on this machine may do everything.

A web page may send requests to a service on the machine of its visitor. It may use the name of its own host if it controls the address of
that name. The browser then sends the Origin of the page, and the Host is that of the page: both must be allowed.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path

from service.access.caller import ANYBODY, LOCAL, Caller
from service.access.keys import KeyRing
from service.access.modification import modification
from service.errors import Forbidden, SettingsError, Unauthorized
from service.settings import Settings

LOOPBACK_NAMES = frozenset(("localhost", "127.0.0.1", "[::1]"))
ANY_HOST = "*"
BEARER = "bearer "


class AccessPolicy:
    """The rules of one service. `generation` changes with its keys: earlier decisions are then out of date."""

    def __init__(self, settings: Settings) -> None:
        """Raises SettingsError for a key file that cannot be read."""
        self._file = Path(settings.keys) if settings.keys else None
        self._modified = modification(self._file)  # before the read: a change during it is then read again
        self._keys = None if self._file is None else KeyRing.read(self._file)
        self._insecure = settings.insecure
        hosts = _listed(settings.allowed_hosts)
        # A page in a browser has no key.
        self._any_host = ANY_HOST in hosts or (self._keys is not None and not hosts)
        self._hosts = LOOPBACK_NAMES | hosts
        self.origins = _listed(settings.allowed_origins)
        """The origins that browsers may send requests from, besides the service's own."""
        self.generation = 0

    def identify(self, host: str, origin: str | None, authorization: str | None) -> Caller:
        """Return the caller of a request with these headers.

        Raises Unauthorized without a valid key, if the service has keys, and Forbidden for a host or an origin that is not allowed.
        """
        self.check_page(host, origin)
        return self._caller(host, authorization)

    def check_page(self, host: str, origin: str | None) -> None:
        """Raise Forbidden for a host or an origin that is not allowed."""
        if not self._any_host and _name(host) not in self._hosts:
            raise Forbidden("the Host of the request is not one of this service: add it to SEQSERVE_ALLOWED_HOSTS")
        if origin is None or origin.lower() in self.origins or origin.lower().partition("://")[2] == host.lower():
            return
        raise Forbidden("web pages of this Origin may not use the service: add it to SEQSERVE_ALLOWED_ORIGINS")

    def reload(self) -> bool:
        """Read the key file again if it has changed. Return whether it has; raises SettingsError and keeps the old keys if it cannot be
        read."""
        modified = modification(self._file)
        if self._file is None or modified == self._modified:
            return False
        self._modified = modified
        self._keys = KeyRing.read(self._file)
        self.generation += 1
        return True

    def current(self, caller: Caller) -> Caller | None:
        """Return a caller with the present rights of its key, None if the key was revoked."""
        return caller if self._keys is None else self._keys.current(caller.key)

    def _caller(self, host: str, authorization: str | None) -> Caller:
        if self._keys is None:
            # Such a service listens on loopback (`check_start`). A proxy there forwards requests of other clients, with their Host.
            return LOCAL if self._insecure or _name(host) in LOOPBACK_NAMES else ANYBODY
        if authorization is None:
            raise Unauthorized("the request has no key: send the header Authorization: Bearer KEY")
        scheme, token = authorization[: len(BEARER)], authorization[len(BEARER) :]
        caller = self._keys.find(token.strip()) if scheme.lower() == BEARER else None
        if caller is None:
            raise Unauthorized("the key is not valid: send the header Authorization: Bearer KEY with a key of this service")
        return caller


def check_start(settings: Settings) -> None:
    """Raise SettingsError for a service that others can reach and that has no keys, unless it is meant to be insecure."""
    if settings.keys:
        KeyRing.read(Path(settings.keys))
        return
    if not settings.insecure and not _is_loopback(settings.host):
        raise SettingsError(
            f"host is {settings.host}, which other machines may reach, and the service has no keys: set keys to a file of keys "
            "(seqserve key new NAME creates one), set insecure to serve everybody, or listen on 127.0.0.1"
        )


def _listed(names: str) -> set[str]:
    return {name.strip().lower() for name in names.split(",") if name.strip()}


def _name(host: str) -> str:
    """Return a Host header without its port, in lower case."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback
