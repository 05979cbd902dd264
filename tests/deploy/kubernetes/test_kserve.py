"""The objects for KServe: their schemas, KServe's use of their ports and names, and models as its storage initializer leaves them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import tritonclient.grpc
from tritonclient.grpc import InferInput

from service.settings import Settings, load
from tests import models
from tests.deploy.kubernetes.tools import Object, kserve_objects, validate
from tests.deploy.test_containers import instructions
from tests.serving import Server, serving

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


def layout(kind: str, folder: Path) -> None:
    """Write read-only files as the storage initializer leaves them for each habit of naming a storage URI."""
    made = folder.parent / f"made-{kind}"
    models.words(made, "words", version=1, seed=1)
    if kind != "one version":
        models.words(made, "words", version=2, seed=2)
    source = {"models": made, "one model": made / "words", "one version": made / "words" / "1"}[kind]
    shutil.copytree(source, folder)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)


@contextmanager
def started(runtime: Object, folder: Path, scratch: Path) -> Iterator[Server]:
    """Start the service with the arguments and variables of a runtime, in another folder and on free ports."""
    variables = {name.removeprefix("SEQSERVE_").lower(): value for name, value in environment(runtime).items()}
    for name in ("port", "grpc_port", "models", "host"):
        del variables[name]
    with serving(folder, scratch, *arguments(runtime, NAME)[1:], **variables) as server:
        yield server


@pytest.mark.parametrize("kind", ["models", "one model", "one version"])
def test_model_answers_under_the_name_of_its_service(kind: str, tmp_path: Path) -> None:
    """And under its own, over HTTP and gRPC."""
    folder = tmp_path / "mnt"
    layout(kind, folder)
    body = {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["how far is the sea ?"]}]}
    with started(runtimes()["seqserve"], folder, tmp_path) as server:
        for name in (NAME, "words"):
            described = server.client.get(f"/v2/models/{name}")
            assert (described.status_code, described.json()["versions"]) == (
                200,
                ["1"] if kind == "one version" else ["1", "2"],
            )
            assert server.client.get(f"/v2/models/{name}/ready").status_code == 200
            answer = server.client.post(f"/v2/models/{name}/infer", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["outputs"][0]["shape"][0] == 1
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            assert client.is_model_ready(NAME)
            text = InferInput("text", [1], "BYTES")
            text.set_data_from_numpy(numpy.array([b"how far is the sea ?"], object))
            over_grpc = client.infer(NAME, [text]).get_response()
        assert [each.name for each in over_grpc.outputs] == [each["name"] for each in answer.json()["outputs"]]


def test_models_of_a_folder_answer_under_their_own_names(tmp_path: Path) -> None:
    """The name of the service does not select one of several models."""
    models.words(tmp_path / "mnt", "words")
    models.words(tmp_path / "mnt", "verbs")
    with started(runtimes()["seqserve"], tmp_path / "mnt", tmp_path) as server:
        paths = [f"/v2/models/{name}" for name in ("words", "verbs", NAME)]
        assert [server.client.get(path).status_code for path in paths] == [200, 200, 404]
