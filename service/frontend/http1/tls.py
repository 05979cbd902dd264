"""TLS of a frontend's ports: contexts for new connections, made again when the files change."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path

from service.access.modification import modification
from service.errors import SettingsError
from service.settings import Settings

HTTP_PROTOCOLS, GRPC_PROTOCOLS = ("http/1.1",), ("h2",)
"""The protocols that each port offers during the handshake (ALPN)."""
HANDSHAKE_SECONDS = 5.0
"""How long a client may take for a handshake: meanwhile its connection counts, and cannot be closed for a new connection."""


class TlsContexts:
    """The contexts of one frontend, both None without a certificate. Connections keep the context that they began with."""

    def __init__(self, settings: Settings) -> None:
        """Raises SettingsError for files that cannot be read, or that do not belong together."""
        self._settings = settings
        names = (settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        self._files = [Path(name) for name in names if name]
        self._read()

    def reload(self) -> bool:
        """Read the files again if they have changed. Returns whether they have.

        Raises SettingsError and keeps the contexts if the new files are not valid, for example because only the certificate is new yet.
        """
        if self._modifications() == self._read_at:
            return False
        self._read()
        return True

    def _read(self) -> None:
        read_at = self._modifications()
        self.http = build_context(self._settings, HTTP_PROTOCOLS)
        self.grpc = build_context(self._settings, GRPC_PROTOCOLS)
        self._read_at = read_at

    def _modifications(self) -> list[tuple[int, ...] | None]:
        return [modification(file) for file in self._files]


def build_context(settings: Settings, protocols: Sequence[str] = HTTP_PROTOCOLS) -> ssl.SSLContext | None:
    """Return the context of a port, None without a certificate. Raises SettingsError for files that are not valid.

    With `tls_client_ca`, clients need a certificate that this authority has signed.
    """
    if not settings.tls_cert:
        if settings.tls_key or settings.tls_client_ca:
            raise SettingsError("tls_key and tls_client_ca need tls_cert: set tls_cert to the file of the certificate")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(list(protocols))
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key or None, password=_no_password)
        if settings.tls_client_ca:
            context.load_verify_locations(settings.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = ", ".join(name for name in (settings.tls_cert, settings.tls_key, settings.tls_client_ca) if name)
        raise SettingsError(f"TLS cannot start with {files}: {error}") from None
    return context


def _no_password() -> str:
    """Raise for an encrypted key, instead of a question at the terminal."""
    raise ValueError("the key is encrypted: store it without a password")
