"""GET /models describes the served models, and GET /models/{name}/card returns the card of a model."""

from __future__ import annotations

from pathlib import Path

from service.frontend.catalog import MAX_CARD_BYTES
from service.modeling.spec import CARD
from tests import models
from tests.frontend.in_process import InProcess, in_process


def test_models_have_layers_labels_aliases_and_cards(tmp_path: Path) -> None:
    root, hostile = tmp_path / "models", b"# A <script>alert(1)</script> \xff card\n"
    for version in (1, 2, 3):
        models.words(root, version=version)
    (root / "aliases.toml").write_text('latest = "words"\nfirst = "words/1"\nstable = "words"\n')
    (root / "words" / "1" / CARD).write_bytes(hostile)
    (root / "words" / "2" / CARD).write_bytes(b"x" * (2 * MAX_CARD_BYTES))
    (root / "words" / "3" / CARD).unlink()
    with in_process(root, tmp_path) as local:
        listed = local.client.get("/models").json()["models"]
        cards = [local.client.get(f"/models/words/card{query}") for query in ("?version=1", "?version=2", "")]
    assert [model["aliases"] for model in listed] == [["latest", "first", "stable"], ["latest", "stable"], ["latest", "stable"]]
    assert listed[0]["head"]["labels"] == list(models.LABELS)
    assert listed[0]["layers"] == [{"kind": "embedding", "width": 6}, {"kind": "lstm", "hidden": 5, "bidirectional": True}]
    assert [card.content for card in cards] == [hostile, b"x" * MAX_CARD_BYTES, b""]
    assert cards[0].headers["content-type"] == "text/markdown; charset=utf-8"


def test_card_of_an_unknown_model_is_an_error(local: InProcess) -> None:
    for path, status in (("unknown/card", 404), ("words/card?version=9", 404), ("words/card?other=1", 400)):
        assert local.client.get(f"/models/{path}").status_code == status, path
    assert local.client.get("/models/..%2f..%2fetc/card").status_code == 404
