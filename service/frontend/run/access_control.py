"""Who may use a frontend: keys, refused keys, secrets of states, certificates, and the streams that are open with a key."""

from __future__ import annotations

from collections.abc import Callable

from service.access.policy import AccessPolicy
from service.access.refused_keys import RefusedKeys
from service.access.state_keys import StateKeys
from service.errors import SettingsError
from service.frontend.guards.open_streams import OpenStreams
from service.frontend.http1.tls import TlsContexts
from service.log import Log
from service.settings import Settings


class AccessControl:
    """The access to one frontend."""

    def __init__(self, settings: Settings) -> None:
        self.policy = AccessPolicy(settings)
        self.refused_keys = RefusedKeys()
        self.state_keys = StateKeys(settings)
        self.tls = TlsContexts(settings)
        self.streams = OpenStreams(self.policy)

    def reload_keys(self, log: Log) -> bool:
        """Take over a changed key file. Return whether the keys have changed: the rights of open streams are then not checked yet."""
        return _reload("keys", self.policy.reload, log)

    def reload_secrets(self, log: Log) -> None:
        """Take over changed certificates and secrets of states."""
        _reload("certificates", self.tls.reload, log)
        _reload("state keys", self.state_keys.reload, log)


def _reload(name: str, reload: Callable[[], bool], log: Log) -> bool:
    """Take over changed files. While they are not valid, everything stays as it was."""
    try:
        changed = reload()
    except SettingsError as error:
        log.capped("error", f"{name} not reloaded", error=str(error))
        return False
    if changed:
        log.info(f"{name} reloaded")
    return changed
