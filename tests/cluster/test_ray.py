"""The service on a Ray cluster of three nodes, in both modes: sticky sessions, a node that dies under load, and scaling by backlog.

With peers, the sessions move when that changes the number of replicas. With its state in Redis, the head may end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from loadtest.servers import free_ports
from service.access import keys, peer_keys
from service.access.scopes import Scope
from tests import models
from tests.accumulator import AccumulatorSession
from tests.cluster.ray_clients import CLIENTS, Outcomes, bearer, rounds_of_chunks, send_chunks, stateless_load
from tests.cluster.ray_cluster import ROOT, SETTINGS, RayCluster, ray_cluster, traffic
from tests.mover.redis_server import running_redis
from tests.proxies import arguments, running
from tests.serving import eventually

ENVOY = ROOT / "deploy" / "proxies" / "envoy.yaml"
SESSIONS, CHUNKS = 60, 5
LOADED_SECONDS = 4.0
TWO: dict[str, Any] = {"min_replicas": 2, "max_replicas": 2}
BACKLOG: dict[str, Any] = {"min_replicas": 1, "max_replicas": 3, "backlog_seconds": 0.001}
"""Options that scale to three replicas under more than a millisecond of work for each replica, and to one replica without a load."""


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
    with ray_cluster(accumulator, tmp_path / "ray.log", direct=direct, **BACKLOG) as cluster:
        cluster.await_running(1)
        [url] = cluster.call("urls") if direct else [cluster.url]
        with stateless_load(url, clients=8, steps=8000) as outcomes:
            cluster.await_running(3)
        cluster.await_running(1)
    assert outcomes.counts.keys() == {"200"}


def test_sessions_move_when_replicas_are_added_and_removed(accumulator: Path, tmp_path: Path) -> None:
    """The backlog scales one replica to three, and then back to one, while the clients of all sessions send chunks through Envoy."""
    files = {name: str(tmp_path / name) for name in ("peer-keys", "keys.toml", "key")}
    peer_keys.create(Path(files["peer-keys"]))
    key = keys.create(Path(files["keys.toml"]), "everything", [Scope.INFER, Scope.SESSION, Scope.METRICS], "tenant")
    Path(files["key"]).write_text(f"{key}\n")
    secured = {"SEQSERVE_INSECURE": "false", "SEQSERVE_KEYS": files["keys.toml"], "SEQSERVE_PEER_KEYS": files["peer-keys"]}
    options = BACKLOG | {"direct": True, "peers": True, "key_file": files["key"]}
    with ray_cluster(accumulator, tmp_path / "ray.log", SETTINGS | secured, **options) as cluster:
        cluster.await_running(1)
        sessions = [AccumulatorSession(f"moving {number}") for number in range(SESSIONS)]
        with through_envoy(cluster, tmp_path) as url, rounds_of_chunks(url, sessions, key) as rounds:
            eventually(lambda: rounds.count > 2)
            with stateless_load(url, clients=8, steps=8000, key=key) as outcomes:
                eventually(lambda: traffic_meets_all(cluster, 3, key), 120)
                cluster.await_running(3)
                spread = eventually(lambda: counts_of(cluster, "seqserve_sessions", 3, key))
            cluster.await_running(1)
            eventually(lambda: counts_of(cluster, "seqserve_sessions", 1, key) == [SESSIONS])
            before = rounds.count
            eventually(lambda: rounds.count > before + 2)
            [taken] = counts_of(cluster, "seqserve_sessions_moved_in_total", 1, key)
    print(f"{rounds.count} rounds, at last {spread} sessions on three replicas; the last one took {taken}; {outcomes.counts}")
    assert rounds.faults == []
    assert outcomes.counts.keys() == {"200"}
    assert taken >= SESSIONS - max(spread) > 0


def test_killed_head_fails_no_request_and_comes_back(accumulator: Path, tmp_path: Path) -> None:
    """The proxy on the other node answers while there is no head. The new head finds the replicas, and all sums are right."""
    sessions = [AccumulatorSession(f"lasting {number}") for number in range(SESSIONS)]
    with running_redis(tmp_path) as redis, ray_cluster(accumulator, tmp_path / "ray.log", redis=redis, **TWO) as cluster:
        cluster.await_running(2)
        eventually(lambda: ready(cluster.url), 120)
        with stateless_load(cluster.url) as outcomes, rounds_of_chunks(cluster.url, sessions) as rounds:

            def go_on() -> tuple[int, int]:
                answered, count = outcomes.answered, rounds.count
                eventually(lambda: outcomes.answered > answered + 50 and rounds.count > count + 1)
                return outcomes.answered - answered, rounds.count - count

            go_on()
            killed = cluster.call("kill_head")
            without = go_on()
            cluster.call("start_head")
            cluster.await_running(2)
            go_on()
    print(f"{killed} processes killed; without a head {without} answers and rounds; {outcomes.counts}, {rounds.count} rounds")
    assert outcomes.counts.keys() == {"200"}
    assert rounds.faults == []


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=30, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def traffic_meets_all(cluster: RayCluster, replicas: int, key: str) -> bool:
    """Return whether this number of replicas takes traffic. Each replica knows all others: otherwise it would restart their sessions."""
    urls = cluster.call("urls")
    known = [metric_of(url, key, "seqserve_peers", state="reachable") for url in urls]
    assert all(count >= len(urls) - 1 for count in known), known
    return len(urls) == replicas


def counts_of(cluster: RayCluster, metric: str, replicas: int, key: str) -> list[int]:
    """Return a metric of each replica that takes traffic, all above 0. Empty if there are fewer, or a replica has just ended."""
    try:
        counts = [metric_of(url, key, metric) for url in cluster.call("urls")]
    except httpx.TransportError:
        return []
    return counts if len(counts) == replicas and all(counts) else []


def metric_of(url: str, key: str, name: str, **labels: str) -> int:
    """Return a metric of a replica, 0 without a value."""
    answer = httpx.get(f"{url}/metrics", headers=bearer(key), timeout=30, trust_env=False)
    answer.raise_for_status()
    families = text_string_to_metric_families(answer.text)
    samples = (sample for family in families for sample in family.samples if sample.name == name)
    return sum(int(sample.value) for sample in samples if labels.items() <= sample.labels.items())


def check_only_requests_in_flight_failed(outcomes: Outcomes, killed: float, dead: float) -> None:
    """Check that at most two requests of each client failed, and none that Envoy could have sent to another replica.

    Processes of a node end in sequence. A client may have had a request on its way to a frontend, and the next in the backlog of
    the port, which stays open until the supervisor has ended as well.
    """
    print(
        f"{outcomes.counts}, node killed within {dead - killed:.3f} s, failed after {[end - killed for _, end in outcomes.failed]}"
    )
    assert len(outcomes.failed) <= 2 * CLIENTS
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
