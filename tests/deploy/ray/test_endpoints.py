"""Envoy's files and the peers file name the replicas that reported, and change at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from deploy.ray.endpoints import Registry, Replica, clusters_of, eds, eds_file, move_into_place, peers, with_eds

FIRST, SECOND = (Replica(f"http://10.0.0.{n}:4000", f"10.0.0.{n}:4001", f"10.0.0.{n}:4002", seen=100.0) for n in (1, 2))
ENVOY = """
static_resources:
  listeners: [{name: http}]
  clusters:
    - {name: sessions, type: STRICT_DNS, lb_policy: RING_HASH, load_assignment: {cluster_name: replicas}, dns_refresh_rate: 1s}
    - {name: grpc_sessions, type: STRICT_DNS, lb_policy: RING_HASH, load_assignment: {cluster_name: replicas}}
"""


def registry() -> Registry:
    made = Registry(made=90.0)
    made.report("b", SECOND)
    made.report("a", FIRST)
    return made


def endpoints(replicas: dict[str, Replica], port: str = "http") -> list[dict[str, Any]]:
    [resource] = json.loads(eds(replicas, "sessions", port))["resources"]
    assert resource["cluster_name"] == "sessions"
    [group] = resource["endpoints"]
    found: list[dict[str, Any]] = group["lb_endpoints"]
    return found


def ports(replicas: dict[str, Replica], port: str) -> list[tuple[str, int]]:
    addresses = [each["endpoint"]["address"]["socket_address"] for each in endpoints(replicas, port)]
    return [(address["address"], address["port_value"]) for address in addresses]


def test_endpoints_have_the_ports_of_their_cluster() -> None:
    replicas = registry().view(100.0).replicas
    assert ports(replicas, "http") == [("10.0.0.1", 4000), ("10.0.0.2", 4000)]
    assert ports(replicas, "grpc") == [("10.0.0.1", 4001), ("10.0.0.2", 4001)]


def test_health_and_hash_are_the_same_for_both_protocols() -> None:
    for port in ("http", "grpc"):
        first, second = endpoints(registry().view(100.0).replicas, port)
        assert first["endpoint"]["health_check_config"] == {"port_value": 4000}
        assert [each["metadata"]["filter_metadata"]["envoy.lb"]["hash_key"] for each in (first, second)] == ["a", "b"]


def test_draining_replica_takes_no_traffic_but_stays_a_peer() -> None:
    made = registry()
    made.drain("a")
    made.drain("unknown")
    replicas = made.view(100.0).replicas
    assert ports(replicas, "http") == [("10.0.0.2", 4000)]
    assert peers(replicas.values()) == "10.0.0.1:4002\n10.0.0.2:4002\n"
    made.remove("a")
    assert list(made.view(100.0).replicas) == ["b"]


def test_starting_replica_is_a_peer_before_it_takes_traffic() -> None:
    """Otherwise replicas could begin the same session, because they do not know each other yet."""
    made = registry()
    made.report("c", Replica("", "", "10.0.0.3:4002", seen=100.0))
    view = made.view(100.0)
    assert ports(view.replicas, "http") == [("10.0.0.1", 4000), ("10.0.0.2", 4000)]
    assert peers(view.replicas.values()).splitlines() == ["10.0.0.1:4002", "10.0.0.2:4002", "10.0.0.3:4002"]
    made.drain("a")
    view = made.view(100.0)
    assert (view.serving_besides("c"), view.serving_besides("a"), view.serving_besides("b")) == (2, 1, 1)


def test_silent_replica_is_forgotten() -> None:
    made = registry()
    made.report("a", Replica("http://10.0.0.1:4000", "", seen=125.0))
    assert list(made.view(129.0).replicas) == ["a", "b"]
    assert list(made.view(131.0).replicas) == ["a"]


def test_replicas_without_a_port_for_others_are_no_peers() -> None:
    assert peers([Replica("http://10.0.0.1:4000", "")]) == ""


def test_configuration_changes_only_the_source_of_endpoints() -> None:
    bootstrap = yaml.safe_load(ENVOY)
    written = with_eds(bootstrap, Path("/files"))
    assert clusters_of(bootstrap) == {"sessions": "http", "grpc_sessions": "grpc"}
    assert written["static_resources"]["listeners"] == bootstrap["static_resources"]["listeners"]
    first, second = written["static_resources"]["clusters"]
    assert first.keys() == second.keys() == {"name", "type", "lb_policy", "eds_cluster_config", "circuit_breakers"}
    assert first["type"] == "EDS"
    assert second["eds_cluster_config"]["eds_config"]["path_config_source"]["path"] == f"/files/{eds_file('grpc_sessions')}"
    assert bootstrap["static_resources"]["clusters"][0]["type"] == "STRICT_DNS"


def test_new_registry_removes_no_replica_before_all_could_report() -> None:
    """The directory restarts empty. Envoy keeps the replicas that it knows until each has had the time to report again."""
    known = registry().view(100.0).replicas
    restarted = Registry(made=200.0)
    third = Replica("http://10.0.0.3:4000", "", seen=201.0)
    restarted.report("c", third)
    assert restarted.view(201.0).merged(known) == known | {"c": third}
    assert restarted.view(211.0).merged(known) == {"c": third}


def test_own_limit_of_retries_stays() -> None:
    bootstrap = yaml.safe_load(ENVOY)
    bootstrap["static_resources"]["clusters"][0]["circuit_breakers"] = {"thresholds": [{"max_retries": 7}]}
    first, second = with_eds(bootstrap, Path("/files"))["static_resources"]["clusters"]
    assert first["circuit_breakers"] == {"thresholds": [{"max_retries": 7}]}
    assert second["circuit_breakers"]["thresholds"][0]["max_retries"] > 100


def test_file_is_moved_into_place_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "peers"
    assert move_into_place(file, "one")
    before = file.stat().st_ino
    assert not move_into_place(file, "one") and file.stat().st_ino == before
    assert move_into_place(file, "two") and file.read_text() == "two"
    assert list(tmp_path.iterdir()) == [file]
