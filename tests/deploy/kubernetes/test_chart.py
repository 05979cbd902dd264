"""The Helm chart: Helm's result for the shipped sets of values, and a planted fault for each check of its meaning."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.package_chart import CHART, LIMITS, OWNED
from service import __version__
from service.settings import Settings
from tests.deploy.kubernetes import checks
from tests.deploy.kubernetes.checks import container, main_service, of_kind, one, pod
from tests.deploy.kubernetes.tools import (
    EXAMPLES,
    MINIMAL,
    ROOT,
    Object,
    examples,
    objects_of,
    render,
    rendered_examples,
    validate,
    validated_examples,
)

Plant = Callable[[list[Object]], Any]
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


SCHEMA_FAULTS: dict[str, tuple[str, Callable[[Object], Any]]] = {
    "Deployment": ("sessions", lambda each: each["spec"]["strategy"]["rollingUpdate"].update(maxUnavailabel=0)),
    "Service": ("sessions", lambda each: each["spec"].update(publishNotReadyAdresses=True)),
    "PodDisruptionBudget": ("sessions", lambda each: each["spec"].update(maxUnavailable=[1])),
    "HorizontalPodAutoscaler": ("mig", lambda each: each["spec"]["metrics"][0].update(pod={})),
    "NetworkPolicy": ("sessions", lambda each: each["spec"]["ingress"][0].update(port=[])),
    "ConfigMap": ("gpu", lambda each: each["data"].update(number=1)),
    "ServiceMonitor": ("sessions", lambda each: each["spec"]["endpoints"][0].update(prot="http")),
    "PrometheusRule": ("sessions", lambda each: each["spec"]["groups"][0]["rules"][0].update(expression="up")),
    "ScaledObject": ("gpu", lambda each: each["spec"].update(minReplicas=1)),
}


def test_schema_of_each_kind_finds_a_planted_fault() -> None:
    planted = []
    for kind, (example, plant) in SCHEMA_FAULTS.items():
        planted.append(of_kind(objects_of(example), kind)[0])
        plant(planted[-1])
    assert [kind for kind, errors in zip(SCHEMA_FAULTS, validate(planted), strict=True) if not errors] == []


def variable(objects: list[Object], name: str, value: str) -> list[Object]:
    """Set a variable of the container, and return the others."""
    others = [each for each in container(objects)["env"] if each["name"] != name]
    container(objects)["env"] = [*others, {"name": name, "value": value}]
    return others


def without(objects: list[Object], kind: str, part: str, place: int) -> None:
    del one(objects, kind)["spec"][part][place]


def mount(objects: list[Object], path: str) -> Object:
    found: list[Object] = [each for each in container(objects)["volumeMounts"] if each["mountPath"] == path]
    return found[0]


FAULTS: dict[str, tuple[str, Plant]] = {
    # expected words of the fault: example, and how it is planted there
    "is there 2 times": ("cpu", lambda objects: objects.append(main_service(objects))),
    "longer than 63 characters": ("cpu", lambda objects: main_service(objects)["metadata"].update(name="s" * 64)),
    "Service .* selects no pod": ("cpu", lambda objects: main_service(objects)["spec"]["selector"].update(app="other")),
    "Deployment .* selects no pod": (
        "cpu",
        lambda objects: pod(objects)["metadata"]["labels"].pop("app.kubernetes.io/instance"),
    ),
    "PodDisruptionBudget .* selects no pod": (
        "cpu",
        lambda objects: one(objects, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"].update(
            {"app.kubernetes.io/name": "other"}
        ),
    ),
    "NetworkPolicy .* selects no pod": ("cpu", lambda objects: one(objects, "NetworkPolicy")["spec"].update(podSelector={})),
    "counts other pods": (
        "cpu",
        lambda objects: pod(objects)["spec"]["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"].update(
            app="other"
        ),
    ),
    "the service listens on": ("cpu", lambda objects: variable(objects, "SEQSERVE_GRPC_PORT", "9001")),
    "readinessProbe names the port web": (
        "cpu",
        lambda objects: container(objects)["readinessProbe"]["httpGet"].update(port="web"),
    ),
    "Service names the port web": ("cpu", lambda objects: main_service(objects)["spec"]["ports"][0].update(targetPort="web")),
    "NetworkPolicy names the port web": (
        "cpu",
        lambda objects: one(objects, "NetworkPolicy")["spec"]["ingress"][0]["ports"][0].update(port="web"),
    ),
    "livenessProbe asks /readyz": (
        "cpu",
        lambda objects: container(objects)["livenessProbe"]["httpGet"].update(path="/readyz"),
    ),
    "readinessProbe asks /healthz": (
        "cpu",
        lambda objects: container(objects)["readinessProbe"]["httpGet"].update(path="/healthz"),
    ),
    "speaks HTTPS,": ("sessions", lambda objects: container(objects)["startupProbe"]["httpGet"].update(scheme="HTTPS")),
    "waits behind the requests of clients": (
        "sessions",
        lambda objects: container(objects)["startupProbe"]["httpGet"].update(port="http", scheme="HTTPS"),
    ),
    "the startup probe gives up after": ("gpu", lambda objects: container(objects)["startupProbe"].update(failureThreshold=30)),
    "progressDeadlineSeconds is shorter": (
        "gpu",
        lambda objects: one(objects, "Deployment")["spec"].update(progressDeadlineSeconds=200),
    ),
    "a stop may take 83 s": ("sessions", lambda objects: pod(objects)["spec"].update(terminationGracePeriodSeconds=82)),
    "and a stop may take 44 s": (
        "cpu",
        lambda objects: [
            variable(objects, "SEQSERVE_DRAIN_SECONDS", "31"),
            pod(objects)["spec"].update(terminationGracePeriodSeconds=43),
        ],
    ),
    "neither add nor remove": (
        "cpu",
        lambda objects: one(objects, "Deployment")["spec"]["strategy"]["rollingUpdate"].update(maxSurge=0),
    ),
    "is set twice": ("cpu", lambda objects: container(objects)["env"].append({"name": "SEQSERVE_PORT", "value": "8000"})),
    "enableServiceLinks is not false": ("cpu", lambda objects: pod(objects)["spec"].pop("enableServiceLinks")),
    "unknown setting SEQSERVE_MAX_BATCH": ("gpu", lambda objects: variable(objects, "SEQSERVE_MAX_BATCH", "3")),
    "which no probe reaches": ("cpu", lambda objects: variable(objects, "SEQSERVE_HOST", "127.0.0.1")),
    "neither keys nor consent": ("cpu", lambda objects: variable(objects, "SEQSERVE_INSECURE", "false")),
    "leaves out the addresses of pods": (
        "sessions",
        lambda objects: variable(objects, "SEQSERVE_ALLOWED_HOSTS", "example.com"),
    ),
    "the volume kernels does not exist": ("gpu", lambda objects: mount(objects, "/var/cache/seqserve").update(name="kernels")),
    "the volume keys is not mounted": (
        "gpu",
        lambda objects: container(objects)["volumeMounts"].remove(mount(objects, "/etc/seqserve/keys")),
    ),
    "the image has them elsewhere": ("gpu", lambda objects: variable(objects, "SEQSERVE_MODELS", "/data")),
    "and no volume is mounted there": ("gpu", lambda objects: variable(objects, "SEQSERVE_KEYS", "/keys.toml")),
    "which is no volume that can be written": (
        "gpu",
        lambda objects: mount(objects, "/var/lib/seqserve/sessions").update(readOnly=True),
    ),
    "the service reads nothing there": (
        "sessions",
        lambda objects: mount(objects, "/etc/seqserve/tls").update(mountPath="/tls"),
    ),
    "/models can be written": ("gpu", lambda objects: mount(objects, "/models").pop("readOnly")),
    "the root file system can be written": (
        "cpu",
        lambda objects: container(objects)["securityContext"].pop("readOnlyRootFilesystem"),
    ),
    "writes to /tmp": ("cpu", lambda objects: container(objects)["volumeMounts"].remove(mount(objects, "/tmp"))),
    "writes to /var/cache/seqserve": (
        "mig",
        lambda objects: container(objects)["volumeMounts"].remove(mount(objects, "/var/cache/seqserve")),
    ),
    "image's user 10001:10001": ("cpu", lambda objects: pod(objects)["spec"]["securityContext"].update(runAsUser=1000)),
    "readable for the image's group": ("cpu", lambda objects: pod(objects)["spec"]["securityContext"].pop("fsGroup")),
    "may have privileges": ("cpu", lambda objects: container(objects)["securityContext"].pop("capabilities")),
    "token of the cluster": ("cpu", lambda objects: pod(objects)["spec"].update(automountServiceAccountToken=True)),
    "can block the drain of a node for ever": (
        "cpu",
        lambda objects: one(objects, "PodDisruptionBudget")["spec"].update(maxUnavailable=0),
    ),
    "block the drain": ("cpu", lambda objects: one(objects, "PodDisruptionBudget")["spec"].update(minAvailable=2)),
    "never becomes ready blocks": (
        "cpu",
        lambda objects: one(objects, "PodDisruptionBudget")["spec"].pop("unhealthyPodEvictionPolicy"),
    ),
    "two autoscalers": ("mig", lambda objects: objects.append(one(objects_of("gpu"), "ScaledObject"))),
    "an autoscaler both set the replicas": ("gpu", lambda objects: one(objects, "Deployment")["spec"].update(replicas=2)),
    "or neither does": ("cpu", lambda objects: one(objects, "Deployment")["spec"].pop("replicas")),
    "scales another Deployment": (
        "gpu",
        lambda objects: one(objects, "ScaledObject")["spec"]["scaleTargetRef"].update(name="other"),
    ),
    "goes from 9 to 6": ("gpu", lambda objects: one(objects, "ScaledObject")["spec"].update(minReplicaCount=9)),
    "reads seqserve_backlog, which": (
        "mig",
        lambda objects: one(objects, "HorizontalPodAutoscaler")["spec"]["metrics"][0]["pods"]["metric"].update(
            name="seqserve_backlog"
        ),
    ),
    r"the autoscaler reads \['seqserve_device_busy_seconds_total', 'seqserve_sessions'\]": (
        "mig",
        lambda objects: without(objects, "HorizontalPodAutoscaler", "metrics", 1),
    ),
    "is no sum": (
        "gpu",
        lambda objects: one(objects, "ScaledObject")["spec"]["triggers"][2]["metadata"].update(
            query='avg(seqserve_sessions{service="x"})'
        ),
    ),
    "reads other Services": (
        "gpu",
        lambda objects: one(objects, "ScaledObject")["spec"]["triggers"][2]["metadata"].update(
            query="sum(seqserve_sessions{})"
        ),
    ),
    "and a pod has 1024 places": (
        "mig",
        lambda objects: one(objects, "HorizontalPodAutoscaler")["spec"]["metrics"][2]["pods"]["target"].update(
            averageValue="2457"
        ),
    ),
    "which has no metrics": (
        "sessions",
        lambda objects: one(objects, "ServiceMonitor")["spec"]["endpoints"][0].update(port="http"),
    ),
    "the rules select another": ("sessions", lambda objects: one(objects, "ServiceMonitor")["spec"].pop("jobLabel")),
    "does not speak as the service": (
        "sessions",
        lambda objects: one(objects, "ServiceMonitor")["spec"]["endpoints"][0].pop("scheme"),
    ),
    "Prometheus has none": ("gpu", lambda objects: one(objects, "ServiceMonitor")["spec"]["endpoints"][0].pop("authorization")),
    "has other rules": ("gpu", lambda objects: one(objects, "PrometheusRule")["spec"]["groups"][0]["rules"].pop()),
    "has another dashboard": ("gpu", lambda objects: one(objects, "ConfigMap")["data"].update({"seqserve.json": "{}"})),
    "clients do not reach both ports": (
        "cpu",
        lambda objects: one(objects, "NetworkPolicy")["spec"]["ingress"][0]["ports"].pop(),
    ),
    "pods do not reach DNS": ("cpu", lambda objects: one(objects, "NetworkPolicy")["spec"]["egress"][0]["ports"].pop()),
    "Prometheus does not reach the metrics": ("cpu", lambda objects: without(objects, "NetworkPolicy", "ingress", 1)),
    "everybody reaches the admin port": (
        "sessions",
        lambda objects: one(objects, "NetworkPolicy")["spec"]["ingress"][1].pop("from"),
    ),
    "everybody reaches the health port": (
        "cpu",
        lambda objects: one(objects, "NetworkPolicy")["spec"]["ingress"][1].pop("from"),
    ),
    "one of several replicas": ("cpu", lambda objects: variable(objects, "SEQSERVE_REPLICATED", "false")),
    "and the engines are on cuda:0,cuda:1": (
        "gpu-without-spare",
        lambda objects: container(objects)["resources"]["limits"].update({"nvidia.com/gpu": 1}),
    ),
    "requests of GPUs differ": (
        "gpu-without-spare",
        lambda objects: container(objects)["resources"]["requests"].update({"nvidia.com/gpu": 1}),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_finds_a_planted_fault(fault: str) -> None:
    example, plant = FAULTS[fault]
    objects = objects_of(example)
    plant(objects)
    found = checks.faults(objects)
    assert any(re.search(fault, each) for each in found), found


def test_every_check_has_a_planted_fault() -> None:
    found = set()
    for example, plant in FAULTS.values():
        objects = objects_of(example)
        plant(objects)
        found |= {function.__name__ for function in checks.CHECKS if _finds(function, objects)}
    assert found == {function.__name__ for function in checks.CHECKS}


def _finds(function: checks.Check, objects: list[Object]) -> bool:
    try:
        return bool(function(objects))
    except Exception:  # another check finds this fault
        return False


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


def test_make_installs_what_these_tests_need() -> None:
    dry = subprocess.run(["make", "--dry-run", "--always-make", "test"], cwd=ROOT, capture_output=True, text=True)
    assert "tests/deploy/kubernetes/requirements.txt" in dry.stdout
