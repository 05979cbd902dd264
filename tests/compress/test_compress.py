"""`seqserve compress`: the new version, its card, and every error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from service import compress, local
from service.compress.comparison import compare
from service.errors import ModelError
from service.modeling import spec, store
from service.modeling.spec import CARD, WEIGHTS, ModelSpec
from service.settings import load
from tests import models

TEXTS = ["near how far is the sea ?", "far:distance who was first", "2 how far was the first sea", "near was ?"]


def settings(root: Path) -> Any:
    return load({"models": root}, {})


def convert(root: Path, model: str, precision: str, **options: Any) -> tuple[Path, str]:
    return compress.compress(settings(root), model, precision, **options)


@pytest.mark.parametrize(
    "name, precision, chooses", [("words", "int8", True), ("forecaster", "bfloat16", False), ("tagger", "float16", True)]
)
def test_model_becomes_a_new_version(tmp_path: Path, name: str, precision: str, chooses: bool) -> None:
    before = models.OF_EVERY_HEAD[name](tmp_path)
    folder, section = convert(tmp_path, name, precision)
    assert folder == tmp_path / name / "2"
    after = spec.read(folder)
    assert after == before.model_copy(update={"precision": precision, "sha256": after.sha256})
    assert (folder / CARD).read_text() == f"made up\n\n{section}"
    assert sorted(path.name for path in folder.parent.iterdir()) == ["1", "2"], "no temporary folder is left"
    given, arrays = (store.read_arrays(folder.parent / number, each) for number, each in (("1", before), ("2", after)))
    assert all((arrays[name].float() - given[name]).abs().max() <= given[name].abs().max() / 200 for name in given)
    sizes = [(folder.parent / number / WEIGHTS).stat().st_size for number in ("1", "2")]
    assert f"| bytes of the weights | {sizes[0]:,} | {sizes[1]:,} |" in section
    assert "256 sequences of random" in section and "(seed 0)" in section and "accuracy" not in section
    assert ("best answer" in section) == chooses and "differ by" in section


def test_texts_measure_the_accuracy(root: Path) -> None:
    data = root.parent / "texts.txt"
    data.write_text("\n".join([*TEXTS, "", ""]))
    right = [local.infer(settings(root), "words", [text.split(" ", 1)[1]])[0]["label"] for text in TEXTS]
    labels = ["near", "far", "unknown", "near"]
    accuracy = sum(map(str.__eq__, right, labels)) / len(labels)
    _, section = convert(root, "words", "int8", data=data)
    assert "answered 4 texts of texts.txt," in section and "random" not in section
    assert f"| accuracy | {100 * accuracy:.1f} % |" in section
    data.write_bytes("near où est the sea".encode("latin-1"))
    assert "answered 1 text of texts.txt," in convert(root, "words", "float16", data=data, version=1)[1]


def test_section_counts_what_changed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The written weights are replaced by weights that always answer the first label, with certainty."""
    read_arrays = store.read_arrays

    def read(folder: Path, described: ModelSpec) -> dict[str, torch.Tensor]:
        arrays = read_arrays(folder, described)
        if described.precision == "int8":
            arrays["head.weight"].zero_()
            arrays["head.bias"].copy_(torch.tensor([100.0, 0.0, 0.0]))
        return arrays

    monkeypatch.setattr(store, "read_arrays", read)
    data = root.parent / "one-text.txt"
    data.write_text("far how far is the sea ?\n")
    scores = local.infer(settings(root), "words", ["how far is the sea ?"])[0]["scores"]
    _, section = convert(root, "words", "int8", data=data)
    differences = [1 - scores["near"], scores["far"], scores["unknown"]]
    assert f"The best answer is the same for {100.0 * (max(scores.values()) == scores['near']):.1f} % of them." in section
    measured = re.search(r"differ by (\S+) at most and by (\S+) on average", section)
    assert measured is not None
    found = [float(number) for number in measured.groups()]
    assert found == pytest.approx([max(differences), sum(differences) / 3], rel=0.06)


def test_card_has_one_section(root: Path) -> None:
    """A version made of a converted version has its own section, and the rest of the card is unchanged."""
    card = root / "words" / "1" / CARD
    card.write_text("# words\n\n## Data\n\nMade up.\n")
    convert(root, "words", "bfloat16")
    (root / "words" / "2" / CARD).write_text((root / "words" / "2" / CARD).read_text() + "\n## Terms\n\nNone.\n")
    folder, section = convert(root, "words", "int8")
    assert (folder / CARD).read_text() == f"# words\n\n## Data\n\nMade up.\n\n## Terms\n\nNone.\n\n{section}"
    (root / "words" / "3" / CARD).unlink()
    folder, section = convert(root, "words", "float16")
    assert (folder / CARD).read_text() == section


def test_name_and_version_are_chosen(root: Path) -> None:
    models.words(root, version=3, seed=3)
    newest, _ = convert(root, "words", "float16")
    older, section = convert(root, "words", "float16", version=1, name="small")
    assert (newest, older) == (root / "words" / "4", root / "small" / "1") and "version 1 of words" in section
    assert list(spec.find_models(root)) == ["small", "words"]
    for folder, seed in ((newest, 3), (older, 0)):
        written = spec.read(folder)
        assert written.name == folder.parent.name
        bias = store.read_arrays(folder, written)["head.bias"]
        assert torch.equal(bias, models.weights(spec.read(root / "words" / "1"), seed=seed)["head.bias"].half())


def test_version_of_an_embedded_model_goes_to_a_folder_of_the_user(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "aliases.toml").write_text('question = "words"\n')
    monkeypatch.setenv("HOME", str(root.parent))
    default = settings(root)
    default.model_fields_set.remove("models")
    for version in "12":
        folder, _ = compress.compress(default, "question", "float16")
        assert folder == root.parent / ".local" / "share" / "seqserve" / "models" / "words" / version
    assert [path.name for path in (root / "words").iterdir()] == ["1"]


@pytest.mark.parametrize(
    "model, options, message",
    [
        ("other", {}, "has no model 'other': the models are tagger, words"),
        ("words", {"version": 7}, "words has no version 7: the versions are 1"),
        ("words", {"precision": "float32"}, "has the precision float32 already"),
        ("words", {"name": "words"}, "words exists in"),
        ("words", {"name": "question"}, "question exists in"),
        ("words", {"name": "../words"}, "'../words' is not a name of a model"),
        ("words", {"data": None}, "nowhere.txt cannot be read: No such file"),
        ("words", {"data": " \n"}, "has no lines"),
        (
            "words",
            {"data": "near how\nnearby how"},
            "line 2: 'nearby' is no label of the model: the labels are near, far, unknown",
        ),
        ("words", {"data": "3 how far"}, "line 1: '3' is no label of the model"),
        ("words", {"data": "near"}, "line 1 has 0 tokens and words takes 1 to 64"),
        ("words", {"data": "near " + "how " * 65}, "line 1 has 65 tokens and words takes 1 to 64"),
        ("tagger", {"data": "near ?"}, "--data needs a model that classifies texts, and tagger does not: leave --data out"),
    ],
    ids=str,
)
def test_refusal_changes_nothing(root: Path, model: str, options: dict[str, Any], message: str) -> None:
    models.tagger(root)
    (root / "aliases.toml").write_text('question = "words"\n')
    if "data" in options:
        file = root.parent / ("nowhere.txt" if options["data"] is None else "texts.txt")
        if options["data"] is not None:
            file.write_text(options["data"])
        options = {**options, "data": file}
    before = sorted(root.rglob("*"))
    with pytest.raises(ModelError) as caught:
        convert(root, model, **{"precision": "int8", **options})
    assert message in str(caught.value) and sorted(root.rglob("*")) == before


def test_interrupted_conversion_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        assert any(path.name.startswith(".") for path in root.iterdir()), "the version is written before it is compared"
        assert list(spec.find_models(root)["words"]) == ["1"], "and is no version yet"
        raise KeyboardInterrupt

    monkeypatch.setattr("service.compress.compare", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(root, "words", "int8")
    assert [path.relative_to(root) for path in root.glob("*/*")] == [Path("words", "1")]


def test_version_that_appears_meanwhile_is_kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*arguments: Any) -> Any:
        models.words(root, version=2, seed=9)
        return compare(*arguments)

    monkeypatch.setattr("service.compress.compare", slow)
    with pytest.raises(ModelError, match="cannot be written"):
        convert(root, "words", "int8")
    assert spec.read(root / "words" / "2").precision == "float32"
