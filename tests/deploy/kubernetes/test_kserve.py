"""The objects for KServe: their schemas, and KServe's use of their ports and names."""

from __future__ import annotations

from typing import Any

import pytest

from service.settings import Settings, load
from tests.deploy.kubernetes.tools import Object, kserve_objects, validate
from tests.deploy.test_containers import instructions

NAME = "question-type"
"""Name of the InferenceService, which differs from the name of the model."""
MOUNT = "/mnt/models"
"""Where KServe puts the content of a storage URI."""


def runtimes() -> dict[str, Object]:
    return {each["metadata"]["name"]: each for each in kserve_objects().values() if each["kind"] == "ClusterServingRuntime"}


def inference_services() -> list[Object]:
    return [each for each in kserve_objects().values() if each["kind"] == "InferenceService"]


def container(runtime: Object) -> Object:
    found: Object = runtime["spec"]["containers"][0]
    return found


def environment(runtime: Object) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container(runtime)["env"]}


def arguments(runtime: Object, name: str) -> list[str]:
    """Return the arguments as KServe fills them in."""
    return [argument.replace("{{.Name}}", name) for argument in container(runtime)["args"]]


def test_objects_match_the_schemas_of_kserve() -> None:
    objects = kserve_objects()
    assert len(objects) == 5
    assert dict(zip(objects, validate(list(objects.values())), strict=True)) == {name: [] for name in objects}


def _copy(made: Any) -> Any:
    if isinstance(made, dict):
        return {key: _copy(value) for key, value in made.items()}
    return [_copy(value) for value in made] if isinstance(made, list) else made


@pytest.mark.parametrize("name", ["seqserve", "seqserve-knative", "seqserve-knative-grpc"])
def test_runtime_starts_the_service_that_kserve_expects(name: str) -> None:
    runtime = runtimes()[name]
    has, read = container(runtime), load({}, environment(runtime))
    assert has["name"] == "kserve-container"
    assert (str(read.models), read.host, read.insecure, read.allowed_hosts) == (MOUNT, "0.0.0.0", True, "*")
    assert read.replicated
    assert arguments(runtime, NAME) == ["serve", f"--alias={NAME}"]
    assert has["securityContext"]["runAsUser"] == int(instructions("USER")[-1].split(":")[0])
    assert has["securityContext"]["readOnlyRootFilesystem"] and "/tmp" in {each["mountPath"] for each in has["volumeMounts"]}
    assert {each["name"] for each in has["volumeMounts"]} == {each["name"] for each in runtime["spec"]["volumes"]}
    assert runtime["spec"]["annotations"] == {
        "prometheus.kserve.io/port": str(read.port),
        "prometheus.kserve.io/path": "/metrics",
    }


def test_ports_are_declared_as_each_mode_needs_them() -> None:
    """In Standard mode REST goes to the first port, and gRPC to a port with grpc or h2c in its name. Knative takes one port."""
    ports = {
        name: [(port["name"], port["containerPort"]) for port in container(runtime)["ports"]]
        for name, runtime in runtimes().items()
    }
    http, grpc = Settings().port, Settings().grpc_port
    assert ports == {
        "seqserve": [("http1", http), ("grpc", grpc)],
        "seqserve-knative": [("http1", http)],
        "seqserve-knative-grpc": [("h2c", grpc)],
    }
    protocols = {name: runtime["spec"]["protocolVersions"] for name, runtime in runtimes().items()}
    assert protocols == {"seqserve": ["v2", "grpc-v2"], "seqserve-knative": ["v2"], "seqserve-knative-grpc": ["grpc-v2"]}


def test_only_one_runtime_is_chosen_by_the_format() -> None:
    formats = {name: runtime["spec"]["supportedModelFormats"] for name, runtime in runtimes().items()}
    assert [name for name, [each] in formats.items() if each["autoSelect"]] == ["seqserve"]


@pytest.mark.parametrize(
    "service", inference_services(), ids=lambda each: each["metadata"]["annotations"]["serving.kserve.io/deploymentMode"]
)
def test_service_names_a_runtime_of_its_mode(service: Object) -> None:
    predictor, mode = service["spec"]["predictor"], service["metadata"]["annotations"]["serving.kserve.io/deploymentMode"]
    model, runtime = predictor["model"], runtimes()[predictor["model"]["runtime"]]
    assert model["modelFormat"]["name"] in {each["name"] for each in runtime["spec"]["supportedModelFormats"]}
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    assert ("knative" in model["runtime"]) == (mode == "Knative")
    # Knative refuses it, unless a flag of the cluster allows it.
    expected = {"fsGroup": int(instructions("USER")[-1].split(":")[1])} if mode == "Standard" else {}
    assert predictor.get("securityContext", {}) == expected
    limits = Settings()
    grace = predictor["terminationGracePeriodSeconds"] if mode == "Standard" else predictor["timeout"]
    assert grace >= limits.lame_duck_seconds + limits.drain_seconds + 5


def test_keda_divides_a_sum() -> None:
    [scaled] = [each["spec"]["predictor"] for each in inference_services() if "autoScaling" in each["spec"]["predictor"]]
    busy, backlog = (each["external"]["metric"]["query"] for each in scaled["autoScaling"]["metrics"])
    assert busy.startswith("sum(max by (pod) (rate(seqserve_device_busy_seconds_total{")
    assert backlog.startswith("sum(max by (pod) (max_over_time(seqserve_backlog_seconds{")
