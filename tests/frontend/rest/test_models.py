"""GET /models describes the served models, and GET /models/{name}/card returns the card of a model."""

from __future__ import annotations

from pathlib import Path

from service.frontend.catalog import MAX_CARD_BYTES
from service.modeling.spec import CARD
from tests import models
from tests.frontend.in_process import InProcess, in_process


def test_list_has_layers_labels_and_aliases(tmp_path: Path) -> None:
    root = tmp_path / "models"
    models.words(root, version=1)
    models.words(root, version=2)
    (root / "aliases.toml").write_text('latest = "words"\nfirst = "words/1"\nstable = "words"\n')
    with in_process(root, tmp_path) as local:
        first, second = local.client.get("/models").json()["models"]
    assert [first["aliases"], second["aliases"]] == [["latest", "first", "stable"], ["latest", "stable"]]
    assert first["head"]["labels"] == list(models.LABELS)
    assert first["layers"] == [{"kind": "embedding", "width": 6}, {"kind": "lstm", "hidden": 5, "bidirectional": True}]


def test_card_is_returned_as_it_is(tmp_path: Path) -> None:
    root = tmp_path / "models"
    for version in (1, 2, 3):
        models.words(root, version=version)
    hostile = b"# A <script>alert(1)</script> \xff card\n"
    (root / "words" / "1" / CARD).write_bytes(hostile)
    (root / "words" / "2" / CARD).write_bytes(b"x" * (2 * MAX_CARD_BYTES))
    (root / "words" / "3" / CARD).unlink()
    with in_process(root, tmp_path) as local:
        first = local.client.get("/models/words/card", params={"version": "1"})
        assert first.content == hostile
        assert first.headers["content-type"] == "text/markdown; charset=utf-8"
        assert first.headers["x-content-type-options"] == "nosniff"
        assert len(local.client.get("/models/words/card?version=2").content) == MAX_CARD_BYTES
        newest = local.client.get("/models/words/card")
        assert (newest.status_code, newest.content) == (200, b"")


def test_card_of_an_unknown_model_is_an_error(local: InProcess) -> None:
    for path, status in (("unknown/card", 404), ("words/card?version=9", 404), ("words/card?other=1", 400)):
        assert local.client.get(f"/models/{path}").status_code == status, path
    assert local.client.get("/models/..%2f..%2fetc/card").status_code == 404
