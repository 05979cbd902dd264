"""Messages between the supervisor and its child processes."""

from __future__ import annotations

from service.ipc.messages.message import Message, Reply
from service.ipc.messages.models import IndexEntry, Manifest, ModelKey, ModelVersion
from service.metrics import Snapshot


class Attach(Message, frozen=True):
    """The socket that comes with this frame is a channel to a process of another kind. store: to the session store, not to a frontend."""

    store: bool = False


class Ready(Message, frozen=True):
    """The child is ready to serve."""


class Failed(Message, frozen=True):
    """The child cannot start."""

    reason: str


class NotLoaded(Message, frozen=True):
    """The child starts without a model version, for this reason. `code` is that of the error."""

    key: ModelKey
    code: str
    reason: str


class Drain(Message, frozen=True):
    """The service is about to stop: report not ready."""


class CollectMetrics(Message, frozen=True):
    """Call to any child: return its metrics. The reply is MetricsCollected."""


class PrepareModel(Message, frozen=True):
    """Call to any child: make a model version ready to serve."""

    model_version: ModelVersion


class ServeModels(Message, frozen=True):
    """Call to a frontend: route requests by this manifest from now on."""

    manifest: Manifest


class CloseModel(Message, frozen=True):
    """Call to an engine: unload a version once nothing uses it. Its sessions may continue for `seconds`."""

    key: ModelKey
    seconds: float


class ForgetModel(Message, frozen=True):
    """To a frontend: no process has this version any longer."""

    key: ModelKey


class ScrapeMetrics(Message, frozen=True):
    """Call to the supervisor: return the metrics of all processes. The reply is MetricsCollected."""


class ListModels(Message, frozen=True):
    """Call to the supervisor: return every version in the models folder. The reply is ModelsListed."""


MAX_POLICY_CHARACTERS = 1000
"""Longest version policy of a LoadModel message."""


class LoadModel(Message, frozen=True):
    """Call to the supervisor: serve the current content of a model's folder, versions chosen by `policy` or by the folder's own policy."""

    name: str
    policy: str | None = None


class UnloadModel(Message, frozen=True):
    """Call to the supervisor: stop serving a model."""

    name: str


class MetricsCollected(Reply, frozen=True):
    """Metrics of one process, or of all."""

    snapshot: Snapshot


class ModelsListed(Reply, frozen=True):
    """Every version in the models folder."""

    entries: list[IndexEntry]
