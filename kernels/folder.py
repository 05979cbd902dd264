"""The folder in which compiled kernels are kept, for GPUs and for CPUs.

Machine code in this folder runs in this process. So each file begins with a digest under a key that only this user can read, and
nothing is read from a folder of another user.
"""

from __future__ import annotations

import hmac
import os
import pwd
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

CACHE, DEFAULT_CACHE = "SEQSERVE_CACHE", "~/.cache/seqserve"
"""The environment variable that names the folder of compiled kernels, and the folder if it is not set."""
KEY, KEY_FOLDER = "kernels.key", ".config/seqserve"
"""The file with the key, and its folder in the home of this user."""
DIGEST_BYTES = 32
MAX_BYTES = 64 << 20


def set_cache_folder(folder: Path) -> None:
    """Use this folder of compiled kernels from now on."""
    os.environ[CACHE] = str(folder)


def cache_folder() -> Path | None:
    """Return the folder of compiled kernels, which SEQSERVE_CACHE names, or None if nothing can be kept there. Creates it if needed."""
    path = _own_folder()
    if path is None:
        return None
    with suppress(OSError):
        path.mkdir(parents=True, exist_ok=True)
    return path if os.access(path, os.W_OK) and _key(path) else None


def read_kept(name: str) -> bytes:
    """Return the content of a file of the folder, or nothing unless `keep` has written it as this user, under this name and unchanged."""
    folder = _own_folder()
    if folder is None:
        return b""
    kept, key = _read(folder / name), _key(folder)
    content = kept[DIGEST_BYTES:]
    return content if key and hmac.compare_digest(kept[:DIGEST_BYTES], _digest(key, name, content)) else b""


def keep(name: str, content: bytes) -> None:
    """Write a file of the folder, atomically. Without a folder or disk space nothing is kept."""
    folder = cache_folder()
    if folder is not None:
        _write(folder / name, _digest(_key(folder), name, content) + content)


def _own_folder() -> Path | None:
    """Return the folder of compiled kernels, which may be missing or read-only; None if it is in the home of a user without a home, or
    belongs to a user who is neither this user nor root."""
    try:
        path = Path(os.environ.get(CACHE, DEFAULT_CACHE)).expanduser()
        return path if not path.exists() or path.stat().st_uid in (0, os.geteuid()) else None
    except (RuntimeError, OSError):
        return None


def _key(folder: Path) -> bytes:
    """Return this user's key, a new one if there is none; empty if it cannot be written. A user without a home, as in an image, has it in
    the folder of compiled kernels."""
    with suppress(KeyError, OSError):
        home = Path(pwd.getpwuid(os.geteuid()).pw_dir)  # SEQSERVE_CACHE and HOME may come from others
        folder = home / KEY_FOLDER if home.stat().st_uid == os.geteuid() else folder
    if not _read(folder / KEY):
        _write(folder / KEY, secrets.token_bytes(DIGEST_BYTES))
    return _read(folder / KEY)


def _digest(key: bytes, name: str, content: bytes) -> bytes:
    return hmac.digest(key, name.encode() + b"\0" + content, "sha256")


def _read(path: Path) -> bytes:
    """Return the content of a file that only this user can read and write, or nothing."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    with suppress(OSError), os.fdopen(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        is_private = status.st_uid == os.geteuid() and not status.st_mode & 0o077
        if is_private and stat.S_ISREG(status.st_mode) and status.st_size <= MAX_BYTES:
            return file.read(MAX_BYTES)
    return b""


def _write(path: Path, content: bytes) -> None:
    """Write a file that only this user can read and write, at once or not at all."""
    with suppress(OSError):  # also of the end of the temporary file, which has another name by then
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent) as file:
            file.write(content)
            file.flush()
            Path(file.name).replace(path)
