"""The service on a Ray cluster of three nodes: sticky sessions, a node that dies under load, and scaling by backlog, in both modes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from loadtest.servers import free_ports
from tests import models
from tests.accumulator import AccumulatorSession
from tests.cluster.ray_clients import CLIENTS, Outcomes, send_chunks, stateless_load
from tests.cluster.ray_cluster import ROOT, RayCluster, ray_cluster, traffic
from tests.proxies import arguments, running
from tests.serving import eventually

ENVOY = ROOT / "deploy" / "proxies" / "envoy.yaml"
SESSIONS, CHUNKS = 60, 5
LOADED_SECONDS = 4.0


@pytest.fixture(scope="module")
def accumulator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder with the accumulator."""
    root = tmp_path_factory.mktemp("models")
    models.accumulator(root)
    return root


@pytest.fixture(params=["through Serve", "through Envoy"])
def way(request: pytest.FixtureRequest, accumulator: Path, tmp_path: Path) -> Iterator[tuple[RayCluster, str]]:
    """Three replicas, and the address at which clients reach them."""
    direct = request.param == "through Envoy"
    with ray_cluster(accumulator, tmp_path / "ray.log", min_replicas=3, max_replicas=3, direct=direct) as cluster:
        cluster.await_running(3)
        if not direct:
            yield cluster, cluster.url
            return
        with through_envoy(cluster, tmp_path) as url:
            yield cluster, url


def test_sessions_stick_and_a_killed_node_fails_no_other_requests(way: tuple[RayCluster, str]) -> None:
    cluster, url = way
    sessions = [AccumulatorSession(f"stick {number}") for number in range(SESSIONS)]
    assert send_chunks(url, sessions, CHUNKS) == []
    with stateless_load(url) as outcomes:
        eventually(lambda: outcomes.answered > 50)
        killed = time.monotonic()
        cluster.call("kill_node")
        dead = time.monotonic()
        time.sleep(LOADED_SECONDS)
    check_only_requests_in_flight_failed(outcomes, killed, dead)
    cluster.call("add_node")
    cluster.await_running(3)


@pytest.mark.parametrize("direct", [False, True], ids=["through Serve", "through Envoy"])
def test_backlog_starts_replicas_and_their_absence_ends_them(direct: bool, accumulator: Path, tmp_path: Path) -> None:
    """A load with more than a millisecond of work for each replica brings three, and its end brings one."""
    options = {"min_replicas": 1, "max_replicas": 3, "backlog_seconds": 0.001}
    with ray_cluster(accumulator, tmp_path / "ray.log", direct=direct, **options) as cluster:
        cluster.await_running(1)
        [url] = cluster.call("urls") if direct else [cluster.url]
        with stateless_load(url, clients=8, steps=8000) as outcomes:
            cluster.await_running(3)
        cluster.await_running(1)
    assert outcomes.counts.keys() == {"200"}


def check_only_requests_in_flight_failed(outcomes: Outcomes, killed: float, dead: float) -> None:
    """Check that at most one request of each client failed, and none that Envoy could have sent to another replica.

    Envoy has at most one connection to a replica for each client, so the death of a replica ends as many requests at most.
    """
    print(
        f"{outcomes.counts}, node killed within {dead - killed:.3f} s, failed after {[end - killed for _, end in outcomes.failed]}"
    )
    assert len(outcomes.failed) <= CLIENTS
    assert not [outcome for outcome in outcomes.counts if "connection failure" in outcome or "no healthy upstream" in outcome]
    assert outcomes.answered > 50


@contextmanager
def through_envoy(cluster: RayCluster, scratch: Path) -> Iterator[str]:
    """Run Envoy with the endpoints of the cluster. Yields its address once it sends to all replicas."""
    ports = free_ports(2)
    port, file = ports[0], scratch / "envoy.yaml"
    configuration = yaml.safe_load(ENVOY.read_text())
    for listener, number in zip(configuration["static_resources"]["listeners"], ports, strict=True):
        listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": number}
    file.write_text(yaml.safe_dump(configuration))
    with traffic(cluster, file, scratch) as written, running("envoy", arguments("envoy", written), port, scratch):
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: httpx.get(f"{url}/readyz", trust_env=False).status_code == 200)
        yield url
