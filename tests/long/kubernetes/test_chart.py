"""The Helm chart: schemas and meaning of its objects, and the values that it refuses; the pods of the runtimes for KServe."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from service.settings import Settings, load
from tests.deploy.shipped import DEPLOY, ROOT, instructions
from tests.long.kubernetes.checks import CHECKS, Rendered
from tests.long.kubernetes.tools import EXAMPLES, MINIMAL, Object, render, rendered_examples, validate

KINDS = {"ConfigMap", "Deployment", "HorizontalPodAutoscaler", "NetworkPolicy", "PodDisruptionBudget"}
KINDS |= {"PrometheusRule", "ScaledObject", "Service", "ServiceMonitor"}
KEYS = {"access": {"keys": {"secret": "seqserve-keys"}}}
MONITOR = {"enabled": True, "key": {"secret": "prometheus"}}
REFUSED: dict[str, Any] = {
    "set access.keys.secret to a Secret with a file of keys, or access.insecure=true": {},
    "set models.claim.name": {**KEYS, "models": {"from": "claim"}},
    "set models.imageVolume.reference": {**KEYS, "models": {"from": "imageVolume"}},
    "set models.init.image": {**KEYS, "models": {"from": "init"}},
    "no rollout could replace a pod": {**KEYS, "rollout": {"maxSurge": 0}},
    "minReplicas is larger": {**KEYS, "autoscaling": {"minReplicas": 9}},
    "set monitor.key.secret": {**KEYS, "monitor": {"enabled": True}},
    "set it in settings": {**KEYS, "extraEnv": [{"name": "SEQSERVE_PORT", "value": "1"}]},
    "leaves out the IP addresses of pods": {"access": {**KEYS["access"], "allowedHosts": ["example.com"]}, "monitor": MONITOR},
    "sessions are saved in one of both": {**KEYS, "sessionStore": {"claim": {"name": "saved"}, "redis": {"secret": "redis"}}},
    "set gpu.count=1 and raise replicas": {**KEYS, "gpu": {"enabled": True, "resource": "nvidia.com/mig-1g.10gb", "count": 2}},
    # by the schema
    "max_batch_sequence": {**KEYS, "settings": {"max_batch_sequence": 3}},
    "lame_duck_seconds": {**KEYS, "settings": {"lame_duck_seconds": 3}},
    "max_waiting": {**KEYS, "settings": {"max_waiting": "many"}},
    "autoscaling/by|autoscaling.by": {**KEYS, "autoscaling": {"by": "both"}},
    "healthPort": {**KEYS, "healthPort": 8001},
}


@pytest.mark.parametrize("example", EXAMPLES)
def test_objects_mean_what_they_should(example: str) -> None:
    for check in CHECKS:
        check(Rendered(rendered_examples()[example]["objects"]))


def test_examples_render_and_match_their_schemas() -> None:
    objects = [each for reply in rendered_examples().values() for each in reply["objects"]]
    assert [errors for errors in validate(objects) if errors] == []
    assert {each["kind"] for each in objects} == KINDS
    assert {each["kind"] for each in rendered_examples()["minimal"]["objects"]} == {"Deployment", "Service"}
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    for name, reply in rendered_examples().items():
        assert reply["lint"] == [] and "port 8000" in reply["notes"], name
        assert name == "minimal" or f"examples/{name}.yaml" in page


def test_impossible_values_are_refused() -> None:
    replies = render(REFUSED)
    assert {text: reply for text, reply in replies.items() if not re.search(text, reply.get("error", ""))} == {}


def test_settings_of_every_type_arrive_unchanged() -> None:
    """Helm reads numbers as floats, and would write large numbers with an exponent. Without a health port, probes use the main port."""
    given = {"max_body_bytes": 33554432, "batch_budget_ms": 2.5, "debug": True, "versions": "latest:2"}
    tls = {"healthPort": 0, "tls": {"secret": "certificate"}}
    replies = render({"given": {**MINIMAL, "settings": given}, "tls": {**MINIMAL, **tls}})
    read = Rendered(replies["given"]["objects"]).settings
    assert {name: getattr(read, name) for name in given} == given
    for check in CHECKS:
        check(Rendered(replies["tls"]["objects"]))


# The objects for KServe.


def kserve(kind: str) -> list[Object]:
    """Return the shipped objects of a kind."""
    files = sorted((DEPLOY / "kserve").glob("*.yaml"))
    return [each for file in files for each in yaml.safe_load_all(file.read_text()) if each["kind"] == kind]


def test_runtimes_start_the_service_that_kserve_expects() -> None:
    """REST goes to the first port, and gRPC to a port with grpc or h2c in its name. Knative takes one port."""
    http, grpc = Settings().port, Settings().grpc_port
    ports = dict[str, Any]()
    for runtime in kserve("ClusterServingRuntime"):
        spec, name = runtime["spec"], runtime["metadata"]["name"]
        [has] = spec["containers"]
        read = load({}, {each["name"]: each["value"] for each in has["env"]})
        assert (str(read.models), read.host, read.insecure, read.allowed_hosts) == ("/mnt/models", "0.0.0.0", True, "*")
        assert read.replicated and (has["name"], has["args"]) == ("kserve-container", ["serve", "--alias={{.Name}}"])
        assert has["securityContext"]["runAsUser"] == int(instructions("USER")[-1].split(":")[0])
        metrics_port = read.port if read.health_port == "off" else read.health_port
        assert spec["annotations"]["prometheus.kserve.io/port"] == str(metrics_port)
        assert spec["supportedModelFormats"][0]["autoSelect"] == (name == "seqserve")
        ports[name] = [(port["name"], port["containerPort"]) for port in has["ports"]]
    assert ports.pop("seqserve") == [("http1", http), ("grpc", grpc)]
    assert ports == {"seqserve-knative": [("http1", http)], "seqserve-knative-grpc": [("h2c", grpc)]}


def test_services_name_a_runtime_of_their_mode_and_wait_for_the_drain() -> None:
    limits, runtimes = Settings(), {each["metadata"]["name"]: each["spec"] for each in kserve("ClusterServingRuntime")}
    pods = [{"containers": each["containers"], "volumes": each["volumes"]} for each in runtimes.values()]
    objects = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "runtime"}, "spec": pod} for pod in pods]
    assert [errors for errors in validate(objects) if errors] == []
    for service in kserve("InferenceService"):
        predictor, annotations = service["spec"]["predictor"], service["metadata"]["annotations"]
        model, knative = predictor["model"], annotations["serving.kserve.io/deploymentMode"] == "Knative"
        assert model["protocolVersion"] in runtimes[model["runtime"]]["protocolVersions"]
        assert ("knative" in model["runtime"]) == knative
        grace = predictor["timeout" if knative else "terminationGracePeriodSeconds"]
        assert grace >= limits.lame_duck_seconds + limits.drain_seconds + 5
        for metric in predictor.get("autoScaling", {}).get("metrics", ()):
            assert metric["external"]["metric"]["query"].startswith("sum(max by (pod) ("), "KEDA divides a sum"
