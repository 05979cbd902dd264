"""Links in the models folder of a running service: nothing outside of the folder is read or served."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.modeling import spec
from tests import models
from tests.reloading import answered, load
from tests.serving import Server, serving

SECRET = "the secret outside"


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path, Path]]:
    """A server, its models folder, and a folder next to it with a model and a secret."""
    scratch = tmp_path_factory.mktemp("links")
    root, outside = scratch / "models", scratch / "outside"
    models.words(root)
    models.words(outside, seed=1)
    (outside / "secret").write_text(SECRET)
    with serving(root, scratch, strict="0") as server:
        yield server, root, outside


@pytest.mark.parametrize("name", [spec.MODEL, spec.WEIGHTS, spec.TOKENIZER])
def test_version_with_a_linked_file_is_refused(linked: tuple[Server, Path, Path], name: str) -> None:
    server, root, outside = linked
    folder = root / "words" / "2"
    shutil.copytree(root / "words" / "1", folder)
    (folder / name).unlink()
    (folder / name).symlink_to(outside / "words" / "1" / name)
    assert "out of the models folder" in load(server, "words", status=400)["error"]
    shutil.rmtree(folder)
    load(server, "words")
    assert answered(server)[0] == "1"


def test_linked_model_is_refused_and_others_are_served(linked: tuple[Server, Path, Path]) -> None:
    server, root, outside = linked
    (root / "other").symlink_to(outside / "words")
    assert load(server, "other", status=400)["error"]
    assert answered(server)[0] == "1"
    (root / "other").unlink()


@pytest.mark.parametrize("make", ["link", "fifo"])
def test_card_that_is_no_file_of_the_folder_is_not_served(linked: tuple[Server, Path, Path], make: str) -> None:
    """A model is served without its card. A FIFO does not hold up the frontend."""
    server, root, outside = linked
    folder = root / "words" / "3"
    shutil.copytree(root / "words" / "1", folder)
    (folder / spec.CARD).unlink()
    if make == "link":
        (folder / spec.CARD).symlink_to(outside / "secret")
    else:
        os.mkfifo(folder / spec.CARD)
    load(server, "words")
    assert answered(server)[0] == "3"
    for path in ("/models", "/models/words", "/models/words/card", "/v2/models/words/versions/3"):
        assert SECRET not in server.client.get(path).text
    shutil.rmtree(folder)
    load(server, "words")


def test_link_within_the_folder_is_served(linked: tuple[Server, Path, Path]) -> None:
    server, root, _ = linked
    (root / "words" / "4").symlink_to("1")
    load(server, "words")
    assert answered(server)[0] == "4"
    (root / "words" / "4").unlink()
    load(server, "words")
