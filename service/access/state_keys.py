"""The file of secrets that sign exported session states."""

from __future__ import annotations

from pathlib import Path

from service.access import secret_file
from service.access.secret_file import SecretFile, SecretKind
from service.settings import Settings

KIND = SecretKind("state key file", "seqserve state-key new", "session states")


class StateKeys(SecretFile):
    """The secrets of one service, or none without the setting `state_keys`."""

    def __init__(self, settings: Settings) -> None:
        """Raises SettingsError for a file that cannot be read or has a wrong secret."""
        super().__init__(settings.state_keys, KIND)


def create(file: Path) -> int:
    """Append a new secret to a file, as `secret_file.create` does."""
    return secret_file.create(file, KIND)
