"""The shipped configurations of proxies fit the service's own limits, and send no chunk twice. tests/cluster runs them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.frontend.session_header import SESSION_HEADER
from service.settings import Settings

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "proxies"
DEFAULTS = Settings()
DEADLINE_SECONDS = DEFAULTS.max_deadline_ms / 1000


def settings_of(file: str) -> str:
    """Return a file without its comments."""
    return "\n".join(line.partition("#")[0] for line in (FOLDER / file).read_text().splitlines())


def seconds(file: str, setting: str) -> list[float]:
    """Return the values of a time, in the order of the file."""
    units = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}
    found = re.findall(rf"\b{setting}:? +([0-9.]+)(ms|s|m|h)\b", settings_of(file))
    assert found, f"{file} sets no {setting}"
    return [float(value) * units[unit] for value, unit in found]


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("nginx.conf", ["proxy_read_timeout", "proxy_send_timeout", "grpc_read_timeout", "grpc_send_timeout"]),
        ("haproxy.cfg", ["timeout client", "timeout server", "timeout tunnel"]),
        ("envoy.yaml", ["stream_idle_timeout"]),
    ],
)
def test_proxies_wait_longer_than_the_longest_deadline(file: str, settings: list[str]) -> None:
    assert all(value > DEADLINE_SECONDS for setting in settings for value in seconds(file, setting))


@pytest.mark.parametrize(
    ("file", "setting"),
    [("nginx.conf", "keepalive_timeout"), ("haproxy.cfg", "pool-purge-delay"), ("envoy.yaml", "(?<!stream_)idle_timeout")],
)
def test_proxies_close_idle_connections_before_the_service(file: str, setting: str) -> None:
    assert all(value < DEFAULTS.idle_seconds for value in seconds(file, setting))


def test_nginx_takes_the_largest_body() -> None:
    http, grpc = re.findall(r"client_max_body_size (\w+);", settings_of("nginx.conf"))
    assert (http, grpc) == (f"{DEFAULTS.max_body_bytes >> 20}m", "0")


def test_only_refused_connections_are_retried() -> None:
    assert "non_idempotent" not in settings_of("nginx.conf")
    assert set(re.findall(r"next_upstream ([^;]+);", settings_of("nginx.conf"))) == {"error timeout"}
    assert re.findall(r"retry-on (.*)", settings_of("haproxy.cfg")) == ["conn-failure"]
    resources = yaml.safe_load((FOLDER / "envoy.yaml").read_text())["static_resources"]
    for manager in managers(resources):
        [host] = manager["route_config"]["virtual_hosts"]
        assert host["retry_policy"]["retry_on"] == "connect-failure" and host["retry_policy"]["retry_host_predicate"]
        assert not any("retry_policy" in route["route"] for route in host["routes"])


def managers(resources: dict[str, Any]) -> list[dict[str, Any]]:
    return [listener["filter_chains"][0]["filters"][0]["typed_config"] for listener in resources["listeners"]]


def test_files_have_the_same_replicas_in_every_group() -> None:
    names = ["seqserve-1", "seqserve-2", "seqserve-3"]
    for file in ("nginx.conf", "haproxy.cfg"):
        text = settings_of(file)
        assert re.findall(r"(seqserve-\d):800[01]", text) == 4 * names and SESSION_HEADER.replace("-", "_") in text.replace(
            "-", "_"
        )
    clusters = yaml.safe_load((FOLDER / "envoy.yaml").read_text())["static_resources"]["clusters"]
    assert len(clusters) == 4
    for cluster in clusters:
        [group] = cluster["load_assignment"]["endpoints"]
        addresses = [end["endpoint"]["address"]["socket_address"]["address"] for end in group["lb_endpoints"]]
        assert (
            addresses == names == [end["metadata"]["filter_metadata"]["envoy.lb"]["hash_key"] for end in group["lb_endpoints"]]
        )
        [check] = cluster["health_checks"]
        assert check["http_health_check"] == {"path": "/readyz"} and check["no_traffic_interval"] == check["interval"]
