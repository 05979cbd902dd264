"""Opens the store that the settings name."""

from __future__ import annotations

from pathlib import Path

from service.settings import Settings
from service.store.folder import FolderStore
from service.store.records import Store
from service.store.redis_store import RedisStore


def open_store(settings: Settings, replica: str) -> Store:
    """Return the store of the setting `session_store`. replica: the id of this replica. Raises SettingsError."""
    # The last chunk of a session may come this long after its last save.
    keep_seconds = settings.session_idle_seconds * (settings.checkpoint_chunks + 1)
    if "://" in settings.session_store:
        return RedisStore(settings.session_store, replica, keep_seconds)
    return FolderStore(Path(settings.session_store), replica, keep_seconds)
