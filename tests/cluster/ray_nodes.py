"""A Ray cluster of three nodes on this machine, with the service in it. Runs in .venv-ray, which has no pytest.

It reads commands from standard input, one JSON list a line, and answers each with one JSON value a line: `Nodes` has the commands. The
end of the input ends the cluster.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import Any

import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster

from deploy.ray.app import Options, app
from deploy.ray.directory import directory

STORE_BYTES = 80 << 20


class Nodes:
    """Three nodes with room for one replica each. Serve's proxy runs on the first."""

    def __init__(self, port: int, options: dict[str, Any]) -> None:
        self._cluster = Cluster(initialize_head=True, head_node_args=self._node() | {"include_dashboard": False})
        for _ in range(2):
            self._cluster.add_node(**self._node())
        ray.init(address=self._cluster.address, namespace="seqserve", log_to_driver=False)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        serve.run(app(Options(max_replicas_per_node=1, num_cpus=1, **options)), name="seqserve", route_prefix="/")

    @staticmethod
    def _node() -> dict[str, Any]:
        return {"num_cpus": 1, "object_store_memory": STORE_BYTES}

    def address(self) -> str:
        return str(self._cluster.address)

    def replicas(self) -> dict[str, int]:
        """Return how many replicas are in each state."""
        states = serve.status().applications["seqserve"].deployments["seqserve"].replica_states
        return {str(getattr(state, "value", state)): count for state, count in states.items()}

    def urls(self) -> list[str]:
        """Return the servers that take traffic themselves."""
        return [replica.url for replica in ray.get(directory().view.remote()).replicas.values() if replica.url]

    def add_node(self) -> None:
        self._cluster.add_node(**self._node())

    def kill_node(self) -> int:
        """End all processes of a node at once, as if its machine failed. Not for the first node. Returns their number."""
        node = next(node for node in self._cluster.worker_nodes if self._has_server(node))
        processes = self._below(node)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._cluster.remove_node(node, allow_graceful=False)
        return len(processes)

    def close(self) -> None:
        """End every process of the cluster at once: an orderly end of three nodes takes minutes on two cores."""
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    @classmethod
    def _has_server(cls, node: Any) -> bool:
        return any({"service", "serve"} <= set(process.cmdline()) for process in cls._below(node))

    @staticmethod
    def _below(node: Any) -> list[psutil.Process]:
        """Return a node's raylet and all processes that it started: workers, with the replica, and below it the servers."""
        [raylet] = node.all_processes["raylet"]
        top = psutil.Process(raylet.process.pid)
        return [top, *top.children(recursive=True)]


def main() -> None:
    # Ray's processes inherit the standard output and write to it at any time, so the answers have a separate pipe.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    port, options = json.loads(sys.argv[1])
    nodes = Nodes(port, options)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(nodes, name)(*arguments)), file=answers, flush=True)
    nodes.close()
    os._exit(0)


if __name__ == "__main__":
    main()
