"""The actor at which replicas report their ports. It survives drivers, and Ray restarts it with its node."""

from __future__ import annotations

import time
from typing import Any

import ray

from deploy.ray.endpoints import Registry, Replica, View

NAME, NAMESPACE = "seqserve-directory", "seqserve"


class Directory:
    """After a restart it is empty: the replicas' next health checks fill it again."""

    def __init__(self) -> None:
        self._registry = Registry(made=time.monotonic())

    def report(self, id: str, url: str, grpc: str, peer: str) -> View:
        """Note a replica. Returns all replicas."""
        self._registry.report(id, Replica(url, grpc, peer, seen=time.monotonic()))
        return self.view()

    def drain(self, id: str) -> None:
        self._registry.drain(id)

    def remove(self, id: str) -> None:
        self._registry.remove(id)

    def view(self) -> View:
        return self._registry.view(time.monotonic())


def directory() -> Any:
    """Return the handle of the actor. The first call makes it, on the head node: the loss of another node does not concern it."""
    actor = ray.remote(Directory)
    return actor.options(
        name=NAME,
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        max_restarts=-1,
        num_cpus=0,
        resources={"node:__internal_head__": 0.001},
    ).remote()
