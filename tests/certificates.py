"""Certificates of tests, made with the openssl command."""

from __future__ import annotations

import subprocess
from pathlib import Path


class Authority:
    """A certificate authority, in files that the openssl command made."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self.certificate, self._key = folder / f"{name}.crt", folder / f"{name}.key"
        self._openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30"),
            *("-subj", f"/CN={name}", "-keyout", str(self._key), "-out", str(self.certificate)),
        )

    def sign(self, name: str, days: int = 30) -> tuple[Path, Path]:
        """Return a new certificate for this machine and its key. days: until it expires."""
        certificate, key, request = (self._folder / f"{name}.{suffix}" for suffix in ("crt", "key", "csr"))
        self._openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(request)),
        )
        self._openssl(
            *("x509", "-req", "-in", str(request), "-CA", str(self.certificate), "-CAkey", str(self._key), "-CAcreateserial"),
            *("-copy_extensions", "copy", "-days", str(days), "-out", str(certificate)),
        )
        return certificate, key

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)
