"""Decisions of earlier starts whether an embedding is folded, as files in the folder of compiled kernels.

Each decision is a separate file, written in one step. If several processes decide at once, the first writer wins, and the
others take over its decision.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

Circumstances = Mapping[str, str]
"""The conditions of a decision: weights, layer, device, versions."""
MAX_DECISIONS = 4096
"""Maximum number of files in the folder. Beyond it, the oldest files are removed, and their models are timed again."""


class _Decision(msgspec.Struct, forbid_unknown_fields=True):
    """The content of a file, as JSON."""

    circumstances: dict[str, str]
    folded: bool


class FoldMemory:
    """Reads and writes decisions in a folder, which may be absent, read-only or full: then nothing is remembered.

    `report_damage` is called with each file that is not a decision. The file is ignored, and replaced by the next decision.
    """

    def __init__(self, folder: Path, report_damage: Callable[[Path], None]) -> None:
        self._folder = folder
        self._report_damage = report_damage

    def recall(self, circumstances: Circumstances) -> bool | None:
        """Return whether the embedding was folded under these circumstances, or None if that is not known."""
        file = self._file(circumstances)
        try:
            decision = msgspec.json.decode(file.read_bytes(), type=_Decision)
        except OSError:
            return None
        except (msgspec.DecodeError, UnicodeDecodeError):
            decision = None
        if decision is None or decision.circumstances != circumstances:
            self._report_damage(file)
            return None
        return decision.folded

    def remember(self, circumstances: Circumstances, folded: bool) -> bool:
        """Remember a decision, and return it, or the decision of a process that was faster."""
        file = self._file(circumstances)
        partial = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(msgspec.json.encode(_Decision(dict(circumstances), folded)))
            try:
                os.link(partial, file)  # unlike a rename, it fails if the file exists
            except OSError:
                earlier = self.recall(circumstances)
                if earlier is not None:
                    return earlier
                partial.replace(file)
            self._remove_oldest()
        except OSError:
            pass  # the next start decides again
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
        return folded

    def _file(self, circumstances: Circumstances) -> Path:
        text = msgspec.json.encode(circumstances, order="sorted")
        return self._folder / f"{hashlib.sha256(text).hexdigest()}.json"

    def _remove_oldest(self) -> None:
        files = sorted(self._folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
        for file in files[:-MAX_DECISIONS]:
            file.unlink(missing_ok=True)
