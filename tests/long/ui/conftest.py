"""One browser for all tests of the page, and one server with a model for every input and head."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from service.modeling import store
from service.modeling.spec import CARD, ModelSpec
from tests import models
from tests.long.ui.browser import DESKTOP, launched, watched
from tests.serving import Server, serving

HOSTILE = "<img src=x onerror=alert(1)>"
HOSTILE_CARD = f"""# {HOSTILE}

<script>alert(1)</script> [run](javascript:alert(1)) [site](https://example.org/a_(b) "title") ![x](http://example.org/x.png)
**{HOSTILE}** `</code><script>alert(1)</script>` <a href="javascript:alert(1)">link</a>

| a | {HOSTILE} |
|---|---|
| 1 | <svg onload=alert(1)> |

- {HOSTILE}
1. *one*

```
<iframe src="http://example.org"></iframe>
```
"""


def hostile(root: Path) -> ModelSpec:
    """Write a model whose labels, description and card try to run scripts and to load files of other hosts."""
    head = {"kind": "classify", "pool": "max", "labels": [HOSTILE, "</script><script>alert(2)</script>", "‮" + "long" * 30]}
    tables = {
        "name": "hostile",
        "description": HOSTILE * 3,
        "precision": "float32",
        "input": models.TEXT,
        "layers": (models.EMBEDDING, {"kind": "gru", "hidden": 5}),
        "head": head,
    }
    spec = ModelSpec.model_validate(tables)
    folder = root / "hostile" / "1"
    written = store.write(folder, spec, models.weights(spec), card=HOSTILE_CARD, tokenizer=models.tokenizer())
    assert (folder / CARD).read_text() == HOSTILE_CARD
    return written


def every_model(root: Path) -> Path:
    """Write a model for every head, and models that the page shows in another way."""
    gru = {"kind": "gru", "hidden": 5}
    several = {"kind": "classify", "pool": "max", "labels": ["up", "down"], "multi_label": True, "threshold": 0.99}
    series = {"kind": "features", "features": 2, "max_steps": 60}
    for make in (*models.OF_EVERY_HEAD.values(), hostile):
        make(root)
    models.sensors(root, hidden=16)
    models.made_up(root, "passages", models.TEXT, models.EMBEDDING, gru, head={"kind": "span"})
    models.made_up(root, "labeller", models.TEXT, models.EMBEDDING, gru, head={"kind": "tag", "labels": ["in", "out"]})
    models.made_up(root, "writer", models.TEXT, models.EMBEDDING, gru, head={"kind": "next", "top": 3})
    models.made_up(root, "topics", models.TEXT, models.EMBEDDING, gru, head=several)
    models.made_up(root, "pairs", models.IDS, models.EMBEDDING, gru, head={"kind": "embed", "pool": "last"})
    models.made_up(root, "series", series, gru, head={"kind": "regress", "pool": "last", "outputs": 2})
    models.made_up(root, "single", models.IDS, models.EMBEDDING, gru, head={"kind": "regress", "pool": "last"})
    return root


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """A browser that ends with the tests of this folder: its event loop runs in this thread, where other tests need their own."""
    with launched() as running:
        yield running


@pytest.fixture(scope="session")
def site_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return every_model(tmp_path_factory.mktemp("site-models"))


@pytest.fixture(scope="package")
def site(site_folder: Path, browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with every model, started only where there is a browser."""
    with serving(site_folder, tmp_path_factory.mktemp("log")) as server:
        yield server


@pytest.fixture(scope="module")
def shared_page(browser: Browser, site: Server) -> Iterator[tuple[Page, list[str]]]:
    with watched(browser, site, "/", scheme="light", size=DESKTOP) as (page, problems):
        page.wait_for_selector("#model-list button[aria-current]")
        yield page, problems


@pytest.fixture
def page(shared_page: tuple[Page, list[str]]) -> Iterator[Page]:
    """A page that the tests of a file share, with its list of models. A test finds it as earlier tests left it, except for the search."""
    page, problems = shared_page
    page.get_by_label("Find a model").fill("")
    yield page
    page.unroute_all()
    found, problems[:] = list(problems), []
    assert found == []
