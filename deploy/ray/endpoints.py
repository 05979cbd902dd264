"""The replicas that take traffic themselves, as files for Envoy and for the replicas. Knows no Ray.

Envoy reads the endpoints of each cluster from a file (EDS) whenever another file is moved over it. The peers file names the same replicas,
and those that drain: sessions still leave them. The service reads it again every few seconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ASSIGNMENT = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
ENVOY_FILE = "envoy.json"
RETRIES = {"thresholds": [{"max_retries": 1024}]}
"""Without a limit of its own, a cluster of Envoy sends three requests again at a time, and the others fail with their replica."""
DISCOVERY = {"type", "load_assignment", "dns_lookup_family", "dns_refresh_rate", "respect_dns_ttl", "dns_failure_refresh_rate"}
"""Fields of a cluster that say where its endpoints come from."""
SETTLED_SECONDS = 10.0
"""Longer than a few health checks."""
FORGOTTEN_SECONDS = 30.0
"""A replica that has not reported for so long is gone with its node. Its health check reports every few seconds."""


@dataclass(frozen=True, slots=True)
class Replica:
    """url: of its HTTP port, empty while it takes no traffic yet; grpc, peer: host and port of its ports for gRPC and for other replicas;
    seen: when it last reported.
    """

    url: str
    grpc: str
    peer: str = ""
    draining: bool = False
    seen: float = 0.0


@dataclass(frozen=True, slots=True)
class View:
    """The replicas by id. settled: whether every replica has had the time to report since the registry was made."""

    settled: bool
    replicas: dict[str, Replica]

    def merged(self, known: Mapping[str, Replica]) -> dict[str, Replica]:
        """Return the replicas, and before the registry is settled also those that were known: a new registry has lost them."""
        return self.replicas if self.settled else {**known, **self.replicas}

    def serving_besides(self, id: str) -> int:
        """Return how many other replicas take or took traffic, and so may have sessions."""
        return sum(bool(replica.url) for other, replica in self.replicas.items() if other != id)


@dataclass(slots=True)
class Registry:
    """The replicas that have reported, by id. made: when this registry was made."""

    made: float
    _replicas: dict[str, Replica] = field(default_factory=dict)

    def report(self, id: str, replica: Replica) -> None:
        self._replicas[id] = replica

    def drain(self, id: str) -> None:
        if id in self._replicas:
            self._replicas[id] = replace(self._replicas[id], draining=True)

    def remove(self, id: str) -> None:
        self._replicas.pop(id, None)

    def view(self, now: float) -> View:
        """Return the replicas that reported lately, in the order of their ids. A draining one reports no more and stays until removed."""
        self._replicas = {
            id: replica
            for id, replica in self._replicas.items()
            if now - replica.seen < FORGOTTEN_SECONDS * (1 + replica.draining)
        }
        return View(now - self.made > SETTLED_SECONDS, dict(sorted(self._replicas.items())))


def eds(replicas: Mapping[str, Replica], cluster: str, port: str) -> str:
    """Return Envoy's file of the endpoints of one cluster. port: which port of the replicas it gets, "http" or "grpc".

    The hash key of a replica is its id, so that a session has the same replica over HTTP and over gRPC.
    """
    endpoints = [_endpoint(id, replica, port) for id, replica in replicas.items() if replica.url and not replica.draining]
    resource = {"@type": ASSIGNMENT, "cluster_name": cluster, "endpoints": [{"lb_endpoints": endpoints}]}
    return json.dumps({"resources": [resource]}, indent=1)


def eds_file(cluster: str) -> str:
    """Return the name of the file of one cluster: Envoy takes one from each file."""
    return f"endpoints-{cluster}.json"


def _endpoint(id: str, replica: Replica, port: str) -> dict[str, Any]:
    http = urlsplit(replica.url)
    address = http if port == "http" else urlsplit(f"//{replica.grpc}")
    return {
        "endpoint": {
            "address": {"socket_address": {"address": address.hostname, "port_value": address.port}},
            "health_check_config": {"port_value": http.port},
        },
        "metadata": {"filter_metadata": {"envoy.lb": {"hash_key": id}}},
    }


def peers(replicas: Iterable[Replica]) -> str:
    """Return the file that SEQSERVE_PEERS=file:PATH names: HOST:PORT of each replica on a line.

    Those that drain still have sessions. Those that start could begin one as soon as they take traffic.
    """
    return "".join(f"{replica.peer}\n" for replica in replicas if replica.peer)


def with_eds(bootstrap: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return Envoy's configuration with the endpoints of every cluster from its file in `folder`; all else stays as it is,
    except a missing limit of retries.
    """
    resources = dict(bootstrap["static_resources"])
    resources["clusters"] = [_with_eds(cluster, folder) for cluster in resources["clusters"]]
    node = {"node": {"id": "seqserve", "cluster": "seqserve"}}
    return {**node, **bootstrap, "static_resources": resources}


def _with_eds(cluster: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    source = {"resource_api_version": "V3", "path_config_source": {"path": str(folder / eds_file(cluster["name"]))}}
    kept = {name: value for name, value in cluster.items() if name not in DISCOVERY}
    return {"circuit_breakers": RETRIES} | kept | {"type": "EDS", "eds_cluster_config": {"eds_config": source}}


def clusters_of(bootstrap: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the clusters with the port that each gets: gRPC if its name says so, otherwise HTTP."""
    names = [cluster["name"] for cluster in bootstrap["static_resources"]["clusters"]]
    return {name: "grpc" if "grpc" in name else "http" for name in names}


def move_into_place(path: Path, text: str) -> bool:
    """Replace a file at once if its content differs: readers see the old file or the new one. Returns whether it changed."""
    if path.exists() and path.read_text() == text:
        return False
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text)
    new.replace(path)
    return True
