"""The Helm chart: what Helm makes of the shipped sets of values, and the values that it refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.package_chart import CHART, LIMITS, OWNED
from service import __version__
from service.settings import Settings
from tests.deploy.kubernetes import checks
from tests.deploy.kubernetes.checks import container, one
from tests.deploy.kubernetes.tools import (
    EXAMPLES,
    MINIMAL,
    ROOT,
    examples,
    objects_of,
    render,
    rendered_examples,
    validated_examples,
)

KEYS = {"access": {"keys": {"secret": "seqserve-keys"}}}


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_renders_without_complaints(example: str) -> None:
    rendered = rendered_examples()[example]
    assert "error" not in rendered, rendered
    assert rendered["lint"] == []
    assert "port 8000" in rendered["notes"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_objects_match_their_schemas(example: str) -> None:
    assert [errors for errors in validated_examples()[example] if errors] == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_objects_mean_what_they_should(example: str) -> None:
    assert checks.faults(objects_of(example)) == []


def test_examples_have_every_kind_of_object() -> None:
    kinds = {each["kind"] for example in EXAMPLES for each in objects_of(example)}
    assert kinds == {
        *("ConfigMap", "Deployment", "HorizontalPodAutoscaler", "NetworkPolicy", "PodDisruptionBudget"),
        *("PrometheusRule", "ScaledObject", "Service", "ServiceMonitor"),
    }
    assert {each["kind"] for each in objects_of("minimal")} == {"Deployment", "Service"}


REFUSED: dict[str, Any] = {
    "set access.keys.secret to a Secret with a file of keys, or access.insecure=true": {},
    "set models.claim.name": {**KEYS, "models": {"from": "claim"}},
    "set models.imageVolume.reference": {**KEYS, "models": {"from": "imageVolume"}},
    "set models.init.image": {**KEYS, "models": {"from": "init"}},
    "no rollout could replace a pod": {**KEYS, "rollout": {"maxSurge": 0}},
    "minReplicas is larger": {**KEYS, "autoscaling": {"minReplicas": 9}},
    "set monitor.key.secret": {**KEYS, "monitor": {"enabled": True}},
    "set it in settings": {**KEYS, "extraEnv": [{"name": "SEQSERVE_PORT", "value": "1"}]},
    "leaves out the IP addresses of pods": {
        "access": {**KEYS["access"], "allowedHosts": ["example.com"]},
        "monitor": {"enabled": True, "key": {"secret": "prometheus"}},
    },
    "sessions are saved in one of both": {**KEYS, "sessionStore": {"claim": {"name": "saved"}, "redis": {"secret": "redis"}}},
    "set gpu.count=1 and raise replicas": {**KEYS, "gpu": {"enabled": True, "resource": "nvidia.com/mig-1g.10gb", "count": 2}},
    # by the schema
    "replica": {**KEYS, "replica": 3},
    "max_batch_sequence": {**KEYS, "settings": {"max_batch_sequence": 3}},
    "lame_duck_seconds": {**KEYS, "settings": {"lame_duck_seconds": 3}},
    "max_waiting": {**KEYS, "settings": {"max_waiting": "many"}},
    "autoscaling/by|autoscaling.by": {**KEYS, "autoscaling": {"by": "both"}},
    "adminPort": {**KEYS, "adminPort": 8001},
    "healthPort": {**KEYS, "healthPort": 8001},
    "count": {**KEYS, "gpu": {"count": 1.5}},
    "digest": {**KEYS, "image": {"digest": "latest"}},
}


def test_impossible_values_are_refused() -> None:
    replies = render(REFUSED)
    accepted = {words: reply for words, reply in replies.items() if not re.search(words, reply.get("error", ""))}
    assert accepted == {}


def test_settings_of_every_type_arrive_unchanged() -> None:
    """Helm reads numbers as floats, and would write large numbers with an exponent."""
    given = {
        "max_body_bytes": 33554432,
        "max_model_bytes": 67108864,
        "batch_budget_ms": 2.5,
        "debug": True,
        "versions": "latest:2",
    }
    rendered = render({"given": {**MINIMAL, "settings": given}})["given"]
    read = checks.settings(rendered["objects"])
    assert {name: getattr(read, name) for name in given} == given


@pytest.mark.parametrize(("tls", "scheme"), [("", "HTTP"), ("certificate", "HTTPS")])
def test_probes_use_the_main_port_without_a_health_port(tls: str, scheme: str) -> None:
    objects = render({"main": {**MINIMAL, "healthPort": 0, "tls": {"secret": tls}}})["main"]["objects"]
    probe = container(objects)["livenessProbe"]["httpGet"]
    assert (probe["port"], probe["scheme"]) == ("http", scheme)
    assert checks.settings(objects).health_port == "off" and checks.metrics_port(objects) == "http"
    assert not checks.faults(objects)


def test_default_values_are_those_of_the_service() -> None:
    values, service = yaml.safe_load((CHART / "values.yaml").read_text()), Settings()
    timing = values["timing"]
    assert (timing["start"], timing["lameDuck"], timing["drain"]) == (
        service.start_seconds,
        service.lame_duck_seconds,
        service.drain_seconds,
    )
    replies = render({"hpa": {**MINIMAL, "autoscaling": {"by": "hpa", "sessionPercent": 100}}})["hpa"]
    [*_, sessions] = one(replies["objects"], "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert int(sessions["pods"]["target"]["averageValue"]) == service.max_sessions


def test_schema_describes_only_what_exists() -> None:
    assert Settings.model_fields.keys() >= OWNED
    assert {name.rpartition(".")[2] for name in LIMITS} <= set(names(yaml.safe_load((CHART / "values.yaml").read_text())))


def names(values: Any) -> Iterator[str]:
    """Yield the name of each value of the chart."""
    for name, value in values.items():
        yield name
        yield from names(value) if isinstance(value, dict) else ()


def test_chart_has_the_version_of_the_service() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == __version__


@pytest.mark.parametrize("name, source", [("rules.yml", "rules.yml"), ("dashboard.json", "grafana/dashboards/seqserve.json")])
def test_chart_holds_no_copy_of_shipped_files(name: str, source: str) -> None:
    """Links, which Helm follows when it renders or packages the chart."""
    link = CHART / "files" / name
    assert link.is_symlink() and not Path(link.readlink()).is_absolute()
    assert link.resolve() == ROOT / "deploy" / source


def test_examples_are_described() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    assert [name for name in examples() if name != "minimal" and f"examples/{name}.yaml" not in page] == []


def test_prometheus_adapter_serves_the_metrics_of_the_autoscaler() -> None:
    [shown] = re.findall(r"```yaml\n(rules:.+?)```", (ROOT / "docs" / "kubernetes.md").read_text(), re.DOTALL)
    rules = yaml.safe_load(shown)["rules"]
    served = {rule.get("name", {}).get("as") or re.match(r"\w+", rule["seriesQuery"])[0] for rule in rules}  # type: ignore[index]
    metrics = one(objects_of("mig"), "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert served == {each["pods"]["metric"]["name"] for each in metrics}
