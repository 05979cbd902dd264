"""A Ray cluster on this machine, with the service in it. Runs in .venv-ray, which has no pytest.

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
    """Three nodes with room for one replica each, and Serve's proxy on the first.

    With `spared_head`, there are two nodes with a proxy each, and only the second has room for replicas, for two: the head may end.
    """

    def __init__(self, port: int, spared_head: bool, options: dict[str, Any]) -> None:
        self._head = self._node(0 if spared_head else 1) | {"include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=self._head)
        for cpus in [2] if spared_head else [1, 1]:
            self._cluster.add_node(**self._node(cpus))
        self._connect()
        location = "EveryNode" if spared_head else "HeadOnly"
        serve.start(proxy_location=location, http_options={"host": "127.0.0.1", "port": port})
        most = None if spared_head else 1
        serve.run(app(Options(max_replicas_per_node=most, num_cpus=1, **options)), name="seqserve", route_prefix="/")

    def _connect(self) -> None:
        ray.init(address=self._cluster.address, namespace="seqserve", log_to_driver=False)

    @staticmethod
    def _node(cpus: int = 1) -> dict[str, Any]:
        return {"num_cpus": cpus, "object_store_memory": STORE_BYTES}

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
        self._kill(node, processes)
        return len(processes)

    def kill_head(self) -> int:
        """End all processes of the first node at once. Returns their number. Only `start_head` may follow."""
        ray.shutdown()  # this process uses the head's raylet
        head = self._cluster.head_node
        others = [psutil.Process(other.process.pid) for name in head.all_processes for other in head.all_processes[name]]
        processes = [*others, *self._below(head)]
        self._head["gcs_server_port"] = int(self.address().rpartition(":")[2])
        self._kill(head, processes)
        return len(set(processes))

    def start_head(self) -> None:
        """Start the first node again, with the same address."""
        self._cluster.add_node(**self._head)
        self._connect()

    def _kill(self, node: Any, processes: list[psutil.Process]) -> None:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._cluster.remove_node(node, allow_graceful=False)

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
    nodes = Nodes(*json.loads(sys.argv[1]))
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(nodes, name)(*arguments)), file=answers, flush=True)
    nodes.close()
    os._exit(0)


if __name__ == "__main__":
    main()
