"""A model that cannot be served is listed with its reason, and the other models are served."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tritonclient import grpc as triton

from service.errors import ModelError
from service.modeling import spec
from service.supervisor.repository import Repository
from tests import models
from tests.planted import constants
from tests.reloading import TEXT, answered, load, unload
from tests.serving import Server, eventually, serving


def without_description(folder: Path) -> None:
    (folder / spec.MODEL).write_text("name = ")


def without_weights(folder: Path) -> None:
    (folder / spec.WEIGHTS).write_bytes(b"")


def without_tokenizer(folder: Path) -> None:
    (folder / spec.TOKENIZER).write_bytes(b"")


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "undescribed": (without_description, "undescribed/1/model.toml: "),
    "weightless": (without_weights, "weightless/1/weights.safetensors does not have the digest"),
    "mute": (without_tokenizer, "mute/1/tokenizer.json does not have the digest"),
}
"""The damage of a model, and the reason that is reported, by the name of the model."""
ALIASES = "".join(f'any-{name} = "{name}"\n' for name in DAMAGES) + 'pinned = "weightless/1"\n'


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server that started with a good model, a model for each kind of damage, and a model without versions."""
    folder = tmp_path_factory.mktemp("unavailable")
    root = folder / "models"
    models.words(root)
    for name, (damage, _) in DAMAGES.items():
        models.words(root, name)
        damage(root / name / "1")
    (root / "versionless").mkdir()
    (root / "not a name").mkdir()
    (root / spec.ALIASES).write_text(ALIASES)
    with serving(root, folder, "--frontends", "2", "--device", "cpu,cpu", strict="0") as server:
        yield server, root


@pytest.mark.parametrize("name", DAMAGES)
def test_bad_model_is_listed_with_its_reason(started: tuple[Server, Path], name: str) -> None:
    server, _ = started
    assert server.ready() and server.client.get("/v2/health/ready").status_code == 200
    assert answered(server)[0] == "1"
    listed = server.client.get("/models").json()
    assert {model["name"] for model in listed["models"]} == {"words"}
    [entry] = [entry for entry in listed["unavailable"] if entry["name"] == name]
    assert (entry["version"], entry["ready"]) == ("1", False)
    assert entry["reason"].startswith(DAMAGES[name][1]), "without the path of the models folder"
    [indexed] = [row for row in server.client.post("/v2/repository/index").json() if row["name"] == name]
    assert (indexed["version"], indexed["state"], indexed["reason"]) == ("1", "UNAVAILABLE", entry["reason"])
    assert any(event["model"] == name and event["reason"] == entry["reason"] for event in server.events("not served"))
    assert server.metric("seqserve_model_changes_total", outcome="invalid_model") == len(DAMAGES) + 2


def test_folder_without_a_model_is_listed_too(started: tuple[Server, Path]) -> None:
    server, _ = started
    listed = {entry["name"]: entry for entry in server.client.get("/models").json()["unavailable"]}
    assert "has no version folder" in listed["versionless"]["reason"] and listed["versionless"]["version"] is None
    assert "rename the folder" in listed["not a name"]["reason"]


@pytest.mark.parametrize("name", DAMAGES)
def test_request_for_a_bad_model_says_why(started: tuple[Server, Path], name: str) -> None:
    server, _ = started
    reason = DAMAGES[name][1]
    calls: list[dict[str, Any]] = [{"model": name}, {"model": name, "version": "1"}, {"model": f"any-{name}"}]
    for call in calls:
        reply = server.client.post("/infer", json={"inputs": [TEXT], **call})
        assert (reply.status_code, reply.json()["code"]) == (503, "unavailable")
        assert f"{name} version 1 cannot be served: {reason}" in reply.json()["error"]
    reply = server.client.get(f"/v2/models/{name}/ready")
    assert reply.status_code == 503 and reason in reply.json()["error"]
    assert server.client.get(f"/v2/models/{name}").status_code == 503
    assert server.infer(name, [TEXT], version="2").status_code == 404
    with closing(triton.InferenceServerClient(server.grpc)) as client:
        assert not client.is_model_ready(name) and client.is_model_ready("words")


def test_alias_of_one_version_says_why_too(started: tuple[Server, Path]) -> None:
    reply = started[0].infer("pinned", [TEXT])
    assert reply.status_code == 503 and "weightless version 1 cannot be served" in reply.json()["error"]


def test_repaired_model_is_served_after_a_load(started: tuple[Server, Path], tmp_path: Path) -> None:
    """The same files as before the damage count as a change."""
    server, root = started
    good = tmp_path / "good"
    models.words(good, "repaired")
    models.words(root, "repaired", seed=3)
    without_weights(root / "repaired" / "1")
    assert "does not have the digest" in load(server, "repaired", status=400)["error"]
    assert server.infer("repaired", [TEXT]).status_code == 503, "a failed load of a new model is remembered as well"
    shutil.copytree(good / "repaired", root / "repaired", dirs_exist_ok=True)
    load(server, "repaired")
    assert answered(server, "repaired")[0] == "1"
    assert "repaired" not in {entry["name"] for entry in server.client.get("/models").json()["unavailable"]}
    shutil.rmtree(root / "repaired")
    unload(server, "repaired")


def test_unloaded_bad_model_is_unknown(started: tuple[Server, Path]) -> None:
    server, root = started
    models.words(root, "given-up")
    without_tokenizer(root / "given-up" / "1")
    load(server, "given-up", status=400)
    assert server.infer("given-up", [TEXT]).status_code == 503
    unload(server, "given-up")
    assert server.infer("given-up", [TEXT]).status_code == 404
    shutil.rmtree(root / "given-up")


def test_polled_folder_is_served_when_it_is_repaired(tmp_path: Path) -> None:
    root = tmp_path / "models"
    models.words(root)
    models.words(root, "weightless")
    without_weights(root / "weightless" / "1")
    with (
        constants({"service.supervisor.reload.POLL_SECONDS": 0.1}),
        serving(root, tmp_path, reload="poll", strict="0") as server,
    ):
        assert server.infer("weightless", [TEXT]).status_code == 503
        models.words(root, "weightless")
        eventually(lambda: server.infer("weightless", [TEXT]).status_code == 200)


@pytest.mark.parametrize("name", DAMAGES)
def test_strict_start_ends_with_the_reason(tmp_path: Path, name: str) -> None:
    models.words(tmp_path / "models")
    models.words(tmp_path / "models", name)
    DAMAGES[name][0](tmp_path / "models" / name / "1")
    with pytest.raises(AssertionError, match=r"ended with 1:(.|\n)*" + DAMAGES[name][1]):
        Server(tmp_path / "models", tmp_path, "--strict", strict="0")


@pytest.mark.parametrize("name", DAMAGES)
def test_start_without_a_good_model_ends(tmp_path: Path, name: str) -> None:
    models.words(tmp_path / "models", name)
    DAMAGES[name][0](tmp_path / "models" / name / "1")
    with pytest.raises(AssertionError, match=r"ended with 1:(.|\n)*" + DAMAGES[name][1]):
        Server(tmp_path / "models", tmp_path, strict="0")


def test_good_versions_of_a_model_are_served(tmp_path: Path) -> None:
    for version in (1, 2):
        models.words(tmp_path, version=version)
    without_description(tmp_path / "words" / "2")
    (tmp_path / spec.ALIASES).write_text('newest = "words/2"')
    manifest = Repository(tmp_path).readable_manifest()
    assert [version.version for version in manifest.model_versions] == ["1"]
    assert [(entry.name, entry.version, entry.state) for entry in manifest.unavailable] == [("words", "2", "UNAVAILABLE")]
    assert manifest.aliases == {"newest": "words/2"}
    with pytest.raises(ModelError):
        Repository(tmp_path).manifest()


def test_alias_of_nothing_ends_the_start(tmp_path: Path) -> None:
    models.words(tmp_path)
    (tmp_path / spec.ALIASES).write_text('any = "nobody"')
    with pytest.raises(ModelError, match="which does not exist"):
        Repository(tmp_path).readable_manifest()
