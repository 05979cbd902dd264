"""The models folder: which versions are served, under which names, and which files have changed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from pathlib import Path

import msgspec
import pytest

from service.errors import ModelError
from service.ipc.messages.models import Manifest
from service.modeling.spec import ALIASES, MODEL
from service.supervisor.repository import MAX_HUNG_READS, POLICY, FolderReader, Repository, choose, keep_unchanged
from tests import models


def write_policy(root: Path, text: str, name: str = "words") -> None:
    (root / name / POLICY).write_text(text)


def versions(root: Path, policy: str | None = None) -> list[str]:
    return [model_version.version for model_version in Repository(root).read("words", policy)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for version in (1, 2, 10):
        models.words(tmp_path, version=version, seed=version)
    return tmp_path


@pytest.mark.parametrize(
    ("policy", "served"),
    [
        ("all", ["1", "2", "10"]),
        ("latest", ["10"]),
        ("latest:2", ["2", "10"]),
        ("latest:9", ["1", "2", "10"]),
        ("1", ["1"]),
        ("10,1,1", ["1", "10"]),
    ],
)
def test_policy_chooses_versions(policy: str, served: list[str]) -> None:
    assert choose(policy, ["1", "2", "10"]) == served
    with pytest.raises(ModelError, match="selects version 3, which does not exist: choose from 1, 2"):
        choose("2,3", ["1", "2"])


def test_client_policy_precedes_the_model_s_and_the_service_s(root: Path) -> None:
    [model_version] = Repository(root, "latest").read("words")
    assert (model_version.name, model_version.version, Path(model_version.folder)) == ("words", "10", root / "words" / "10")
    assert msgspec.json.decode(model_version.spec)["head"]["labels"] == list(models.LABELS)
    write_policy(root, 'serve = "latest:2"')
    assert [model_version.version for model_version in Repository(root, "latest").read("words")] == ["2", "10"]
    assert versions(root, "1") == ["1"]


@pytest.mark.parametrize("text", ['serve = "newest"', "serve = 2", 'serve = "all"\nalso = 1', "serve ="])
def test_invalid_policy_names_its_file(root: Path, text: str) -> None:
    write_policy(root, text)
    with pytest.raises(ModelError, match=POLICY):
        versions(root)


def test_alias_names_a_model_or_a_version(root: Path) -> None:
    """The alias of the service names its only model, unless the folder has that alias. In a manifest its version must be served."""
    (root / ALIASES).write_text('any = "words"\nstable = "words/2"')
    assert Repository(root).manifest().aliases == {"any": "words", "stable": "words/2"}
    assert Repository(root, alias="stable").aliases() == Repository(root, "latest").aliases() == Repository(root).aliases()
    with pytest.raises(ModelError, match="stable stands for 'words/2', and words has the versions 10"):
        Repository(root, "latest").manifest()
    (root / ALIASES).unlink()
    assert Repository(root, alias="my-service").manifest().aliases == {"my-service": "words"}
    assert Repository(root / "words", alias="my-service").readable_manifest().aliases == {"my-service": "words"}
    assert Repository(root, alias="words").manifest().aliases == {}
    with pytest.raises(ModelError, match="SEQSERVE_ALIAS is 'my service'"):
        Repository(root, alias="my service").manifest()
    models.words(root, "verbs")
    assert Repository(root, alias="my-service").manifest().aliases == {}, "two models"


def test_unchanged_version_is_not_loaded_again(root: Path) -> None:
    repository = Repository(root)
    before = repository.read("words")
    again = repository.read("words")
    assert not {model_version.generation for model_version in before} & {model_version.generation for model_version in again}
    served = {(model_version.name, model_version.version): model_version for model_version in before}
    assert keep_unchanged(again, served) == before
    models.words(root, version=2, seed=5)
    now = keep_unchanged(repository.read("words"), served)
    assert [model_version in before for model_version in now] == [True, False, True]


def test_replaced_weights_of_a_served_version_are_detected(root: Path) -> None:
    repository = Repository(root, "latest")
    [model_version] = repository.read("words")
    repository.check(model_version)
    weights = root / "words" / "10" / "weights.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + b"!")
    with pytest.raises(ModelError, match="does not have the digest"):
        repository.check(model_version)
    weights.write_bytes(content)
    repository.check(model_version)
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(ModelError, match="not a regular file"):
        repository.check(model_version)


def test_fingerprints_change_with_files_and_aliases(root: Path) -> None:
    repository = Repository(root)
    before = repository.fingerprints()
    assert repository.fingerprints() == before
    (root / ALIASES).write_text('any = "words"')
    write_policy(root, 'serve = "all"')
    after = repository.fingerprints()
    assert before.keys() == after.keys() == {"", "words"}
    assert all(before[name] != after[name] for name in after)


@pytest.mark.parametrize("name", ["words", "nobody", "../words", "words/1", "", ".", "words\0"])
def test_only_folder_names_are_model_names(root: Path, name: str) -> None:
    assert Repository(root).has(name) == (name == "words")


def test_folder_of_one_model_can_be_the_models_folder(root: Path) -> None:
    """As after a platform has downloaded the content of one model's folder."""
    folder = root.rename(root.parent / "not a name") / "words"
    write_policy(folder.parent, 'serve = "latest:2"')
    repository = Repository(folder)
    served = [(each.name, each.version, Path(each.folder)) for each in repository.manifest().model_versions]
    assert served == [("words", version, folder / version) for version in ("2", "10")]
    assert repository.readable_manifest().unavailable == []
    assert (repository.listing(), repository.has("words")) == ({"words": ["1", "2", "10"]}, True)
    assert repository.fingerprints().keys() == {"", "words"}


def test_folder_of_one_version_can_be_the_models_folder(root: Path) -> None:
    folder = root / "words" / "10"
    repository = Repository(folder)
    [model_version] = repository.manifest().model_versions
    assert (model_version.name, model_version.version, Path(model_version.folder)) == ("words", "1", folder)
    assert repository.read("words", "latest")[0].spec == model_version.spec
    repository.check(model_version)
    for text, reason in (("name = [", "Expected|Invalid|Unclosed"), ('name = "../x"', "use letters")):
        (folder / MODEL).write_text(text)
        with pytest.raises(ModelError, match=reason):
            Repository(root / "words").readable_manifest()


@pytest.mark.parametrize("file", [ALIASES, f"words/{POLICY}", f"words/10/{MODEL}"])
def test_fifo_is_not_read(root: Path, file: str) -> None:
    (root / file).unlink(missing_ok=True)
    os.mkfifo(root / file)
    with pytest.raises(ModelError, match="not a regular file"):
        Repository(root).manifest()


def test_folder_with_a_name_that_is_no_text_is_listed(root: Path) -> None:
    """The manifest is sent to the other processes as JSON."""
    (root / os.fsdecode(b"b\xffd")).mkdir()
    manifest = msgspec.json.decode(msgspec.json.encode(Repository(root).readable_manifest()), type=Manifest)
    [entry] = manifest.unavailable
    assert (entry.name, len(manifest.model_versions)) == ("b\\xffd", 3) and "rename the folder" in entry.reason


def test_hung_reads_are_abandoned_and_limited() -> None:
    stall, started = threading.Event(), 0

    def hang() -> None:
        nonlocal started
        started += 1
        stall.wait()

    def fail() -> None:
        raise ModelError("broken")

    async def run() -> None:
        reader = FolderReader()
        with pytest.raises(ModelError, match="broken"):
            await reader.run(fail, 60)
        for number in range(MAX_HUNG_READS + 2):
            with pytest.raises(TimeoutError):
                await reader.run(hang, 0.01)
            if number == 0:
                assert await reader.run(lambda: "read", 60) == "read"
        while started < MAX_HUNG_READS:
            await asyncio.sleep(0.001)
        assert started == MAX_HUNG_READS
        stall.set()
        while True:  # until the threads have ended
            with contextlib.suppress(TimeoutError):
                assert await reader.run(lambda: "read", 60) == "read"
                return
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 60))
