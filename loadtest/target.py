"""The address of a server, and the bytes of its requests."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

JSON = "Content-Type: application/json"


class Target(NamedTuple):
    """The address of an HTTP server, the path of the requests, and whether the server speaks TLS."""

    host: str
    port: int
    path: str
    tls: bool = False

    @classmethod
    def of(cls, url: str, path: str) -> Target:
        """Parse an http:// or https:// address. Raises ValueError for anything else."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url} is not an address of the form http://host:port or https://host:port")
        tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if tls else 80), path, tls)

    def request(self, body: bytes, *headers: str) -> bytes:
        """Return the bytes of one POST. The body is JSON unless `headers` has another content type."""
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"Host: {self.host}",
            *(headers or (JSON,)),
            f"Content-Length: {len(body)}",
            "",
            "",
        ]
        return "\r\n".join(lines).encode() + body
