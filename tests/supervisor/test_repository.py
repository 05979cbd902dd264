"""What the models folder says: which versions are served, under which names, and whether anything has changed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from service.errors import ModelError
from service.modeling.spec import ALIASES
from service.supervisor.repository import POLICY, Repository, chosen, renewed
from tests import models


def serve(root: Path, said: str, name: str = "words") -> None:
    (root / name / POLICY).write_text(said)


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
def test_a_policy_chooses_versions(policy: str, served: list[str]) -> None:
    assert chosen(policy, ["1", "2", "10"]) == served


def test_a_version_that_is_not_there_cannot_be_chosen() -> None:
    with pytest.raises(ModelError, match="version 3 is to be served and there is none: there are 1, 2"):
        chosen("2,3", ["1", "2"])


def test_a_model_s_own_policy_goes_before_that_of_the_service_and_a_caller_s_before_both(root: Path) -> None:
    assert [model_version.version for model_version in Repository(root, "latest").read("words")] == ["10"]
    serve(root, 'serve = "latest:2"')
    assert [model_version.version for model_version in Repository(root, "latest").read("words")] == ["2", "10"]
    assert versions(root, "1") == ["1"]


@pytest.mark.parametrize("said", ['serve = "newest"', "serve = 2", 'serve = "all"\nalso = 1', "serve ="])
def test_a_policy_that_is_none_is_named_with_its_file(root: Path, said: str) -> None:
    serve(root, said)
    with pytest.raises(ModelError, match=POLICY):
        versions(root)


def test_an_alias_stands_for_a_model_or_for_one_of_its_versions(root: Path) -> None:
    (root / ALIASES).write_text('any = "words"\nstable = "words/2"')
    assert Repository(root).manifest().aliases == {"any": "words", "stable": "words/2"}
    with pytest.raises(ModelError, match="stable stands for 'words/2', and words has the versions 10"):
        Repository(root, "latest").manifest()


def test_what_has_not_changed_is_what_is_served_already(root: Path) -> None:
    repository = Repository(root)
    before = repository.read("words")
    again = repository.read("words")
    assert not {model_version.generation for model_version in before} & {model_version.generation for model_version in again}
    served = {(model_version.name, model_version.version): model_version for model_version in before}
    assert renewed(again, served) == before
    models.words(root, version=2, seed=5)
    now = renewed(repository.read("words"), served)
    assert [model_version in before for model_version in now] == [True, False, True]


def test_files_that_were_exchanged_behind_a_model_s_back_are_found(root: Path) -> None:
    repository = Repository(root, "latest")
    [model_version] = repository.read("words")
    repository.check(model_version)
    weights = root / "words" / "10" / "weights.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + b"!")
    with pytest.raises(ModelError, match="does not have the digest"):
        repository.check(model_version)
    weights.write_bytes(whole)
    repository.check(model_version)


def test_an_alias_may_stand_for_what_is_not_served_now(root: Path) -> None:
    (root / ALIASES).write_text('old = "words/1"')
    assert Repository(root, "latest").aliases() == {"old": "words/1"}


def test_an_edition_has_all_that_a_front_needs_to_know_of_a_model(root: Path) -> None:
    [model_version] = Repository(root, "latest").read("words")
    assert (model_version.name, model_version.version, Path(model_version.folder)) == ("words", "10", root / "words" / "10")
    assert msgspec.json.decode(model_version.spec)["head"]["labels"] == list(models.LABELS)


def test_every_change_below_a_model_s_folder_and_of_the_aliases_is_seen(root: Path) -> None:
    repository = Repository(root)
    before = repository.fingerprints()
    assert repository.fingerprints() == before
    (root / ALIASES).write_text('any = "words"')
    serve(root, 'serve = "all"')
    after = repository.fingerprints()
    assert before.keys() == after.keys() == {"", "words"}
    assert all(before[name] != after[name] for name in after)


@pytest.mark.parametrize("name", ["words", "nobody", "../words", "words/1", "", ".", "words\0"])
def test_only_the_name_of_a_folder_in_the_models_folder_is_one(root: Path, name: str) -> None:
    assert Repository(root).has(name) == (name == "words")
