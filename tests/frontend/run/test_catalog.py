"""Versions that the catalog finds by name and alias: served versions, and retired versions for open sessions."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.errors import Unavailable, UnknownModel
from service.frontend.run.catalog import Catalog, ServedModel, build_catalog
from service.ipc.messages.models import IndexEntry, ModelKey
from service.log import Log
from service.modeling.spec import WEIGHTS, ModelSpec
from service.supervisor.repository import Repository
from tests import models


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return models.words(tmp_path_factory.mktemp("models"))


def served(spec: ModelSpec, *versions: int) -> list[ServedModel]:
    """Return these versions; the generation of each is its number."""
    return [ServedModel(spec, str(version), None, version) for version in versions]


def test_name_finds_the_newest_version_and_alias_its_target(spec: ModelSpec) -> None:
    catalog = Catalog(served(spec, 1, 2, 10), {"any": "words", "stable": "words/2", "gone": "words/3", "unknown": "others"})
    assert [catalog.find("words", version).version for version in (None, "1", 2)] == ["10", "1", "2"]
    assert [catalog.find(alias, None).version for alias in ("any", "stable")] == ["10", "2"]
    assert sorted(catalog.index) == ["any", "stable", "words"]
    assert [model.version for model in catalog.served] == ["1", "2", "10"]
    with pytest.raises(UnknownModel):
        catalog.find("stable", "10")


def test_version_that_cannot_be_served_is_named_with_the_reason(spec: ModelSpec) -> None:
    catalog = Catalog(served(spec, 1), {}, [IndexEntry("words", "2", "UNAVAILABLE", "its weights are damaged")])
    with pytest.raises(Unavailable, match="words version 2 cannot be served: its weights are damaged"):
        catalog.find("words", 2)


def test_error_names_similar_models_of_many(spec: ModelSpec) -> None:
    catalog = Catalog(served(spec, 1), {f"words-{number}": "words" for number in range(1000)})
    with pytest.raises(
        UnknownModel, match=r"^unknown model words-1234: did you mean words-\d+ or .*\? GET /models lists the 1001 names"
    ) as near:
        catalog.find("words-1234", None)
    assert len(near.value.message) < 200
    with pytest.raises(UnknownModel, match=r"^unknown model zzz: GET /models lists the 1001 names that are served$"):
        catalog.find("zzz", None)


def test_answer_is_counted_as_it_is_sent(tmp_path: Path) -> None:
    """A tagger returns a label and a score for each step, however many labels it has."""
    model = ServedModel(models.tagger(tmp_path), "1", None)
    width = model.spec.output_width
    assert [model.answer_numbers(7, sequence=asked) for asked in (False, True)] == [7 * 2, 7 * (2 + width)]


def test_model_is_served_although_its_weights_are_gone(tmp_path: Path) -> None:
    """The engines have read them."""
    models.words(tmp_path)
    manifest = Repository(tmp_path).readable_manifest()
    (tmp_path / "words" / "1" / WEIGHTS).unlink()
    assert build_catalog(manifest, Log("frontend"), strict=True).find("words", 1).weight_bytes == 0


def test_retired_version_is_found_for_sessions_until_forgotten(spec: ModelSpec) -> None:
    first, second = served(spec, 1, 2)
    catalog = Catalog([first], {"stable": "words/1"})
    catalog.add(second)
    assert catalog.has_other_versions(first.key) and catalog.find("words", None) is first, "a known version is not served yet"
    assert catalog.serve([second.key], {"stable": "words/1"}) == [first.key]
    assert catalog.find("words", None) is second
    assert catalog.find_or_retired("words", None) == (second, None)
    for name, version in (("words", "1"), ("stable", None)):
        retired, unknown = catalog.find_or_retired(name, version)
        assert retired is first and isinstance(unknown, UnknownModel)
    catalog.forget(first.key)
    with pytest.raises(UnknownModel):
        catalog.find_or_retired("words", "1")
    assert first.key not in catalog and second.key in catalog


def test_retired_version_is_that_of_the_last_generation(spec: ModelSpec) -> None:
    """Unknown versions are not served."""
    old, new = ServedModel(spec, "1", None, 3), ServedModel(spec, "1", None, 8)
    catalog = Catalog([old, new], {})
    assert catalog.serve([], {}) == [new.key]
    assert catalog.find_retired("words", None) is new
    assert catalog.find_retired("words", "2") is None
    catalog = Catalog(served(spec, 1), {})
    assert catalog.serve([ModelKey("words", "1", 1), ModelKey("words", "2", 2)], {}) == []
