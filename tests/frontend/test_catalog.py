"""What a front finds by a name: what is served, what an alias stands for, and what sessions may have begun with."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.errors import UnknownModel
from service.frontend.catalog import Catalog, read, unless_known
from service.frontend.served_model import ServedModel
from service.ipc.messages import ModelKey
from service.modeling.spec import ModelSpec
from service.supervisor.repository import Repository
from tests import models


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return models.words(tmp_path_factory.mktemp("models"))


def served(spec: ModelSpec, *versions: int) -> list[ServedModel]:
    """Each of the generation that its number is."""
    return [ServedModel(spec, str(version), None, version) for version in versions]


def test_a_name_finds_the_newest_and_an_alias_what_it_stands_for(spec: ModelSpec) -> None:
    found = Catalog(served(spec, 1, 2, 10), {"any": "words", "stable": "words/2", "gone": "words/3", "nobody": "others"})
    assert [found.find("words", version).version for version in (None, "1", 2)] == ["10", "1", "2"]
    assert [found.find(alias, None).version for alias in ("any", "stable")] == ["10", "2"]
    assert sorted(found.catalog) == ["any", "stable", "words"]
    assert [one.version for one in found.served] == ["1", "2", "10"]
    with pytest.raises(UnknownModel):
        found.find("stable", "10")


def test_what_is_no_longer_served_is_found_by_who_goes_on_with_it_until_it_is_forgotten(spec: ModelSpec) -> None:
    first, second = served(spec, 1, 2)
    found = Catalog([first], {"stable": "words/1"})
    found.add(second)
    assert found.others(first.key) and found.find("words", None) is first, "it is known, and not yet served"
    assert found.serve([second.key], {"stable": "words/1"}) == [first.key]
    assert found.find("words", None) is second
    assert unless_known(found, "words", None) == (second, None)
    for name, version in (("words", "1"), ("stable", None)):
        retired, unknown = unless_known(found, name, version)
        assert retired is first and isinstance(unknown, UnknownModel)
    found.forget(first.key)
    with pytest.raises(UnknownModel):
        unless_known(found, "words", "1")
    assert first.key not in found and second.key in found


def test_of_several_that_had_one_number_the_last_is_found(spec: ModelSpec) -> None:
    old, new = ServedModel(spec, "1", None, 3), ServedModel(spec, "1", None, 8)
    found = Catalog([old, new], {})
    assert found.serve([], {}) == [new.key]
    assert found.retired("words", None) is new
    assert found.retired("words", "2") is None


def test_what_is_to_be_served_and_is_not_known_is_gone_without(spec: ModelSpec) -> None:
    found = Catalog(served(spec, 1), {})
    assert found.serve([ModelKey("words", "1", 1), ModelKey("words", "2", 2)], {}) == []
    assert found.find("words", None).version == "1"


def test_an_edition_is_read_with_the_tokenizer_that_its_spec_names(tmp_path: Path) -> None:
    models.words(tmp_path)
    [model_version] = Repository(tmp_path).read("words")
    one = read(model_version)
    assert one.key == model_version.key and one.tokenizer is not None
    assert one.tokenizer.ids("how far", "inputs[0]") == [1, 2]
