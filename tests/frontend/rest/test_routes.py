"""The routes other than inference: tokens, models and their cards, access, traces, and the page of the API."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
from fastapi import APIRouter, FastAPI
from starlette.routing import Route
from tokenizers import Tokenizer as Library
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from service import __version__
from service.access.scopes import Scope
from service.errors import Unavailable
from service.frontend.rest import openapi, tokens
from service.frontend.rest.tokens import _tokens
from service.frontend.run.catalog import MAX_CARD_BYTES
from service.modeling.spec import CARD
from service.modeling.tokenizer import Tokenizer
from tests import models
from tests.frontend.conftest import Guarded
from tests.frontend.in_process import InProcess, in_process
from tests.frontend.oip.harness import InferHarness
from tests.models import WORDS


def test_text_is_split_into_the_steps_that_the_model_sees(local: InProcess) -> None:
    text = "how  far,\tis 𝒳 it?"
    body = {"model": "words", "inputs": [text, "", [1, 2, 9, 500]], "version": 1}
    answer = local.client.post("/tokens", json=body).json()
    assert (answer["model"], answer["version"]) == ("words", "1")
    first, empty, ids = answer["outputs"]
    assert first["tokens"] == ["how", "far", ",", "is", "𝒳", "it", "?"]
    assert first["tokens"] == [text[begin:end] for begin, end in first["offsets"]]
    assert first["ids"] == [WORDS.index(token) if token in WORDS else 0 for token in first["tokens"]]
    assert empty == {"ids": [], "tokens": [], "offsets": []}
    assert ids == {"ids": [1, 2, 9, 500], "tokens": ["how", "far", "?", ""]}
    library = Library(WordLevel({"[CLS]": 0, "sea": 1, "[UNK]": 2}, unk_token="[UNK]"))
    library.pre_tokenizer = Whitespace()
    library.post_processor = TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 0)])
    named = _tokens(Tokenizer(library.to_str().encode()), "sea", "inputs[0]")
    assert named == {"ids": [0, 1], "tokens": ["[CLS]", "sea"], "offsets": [(0, 0), (0, 3)]}, "an added token covers nothing"


def test_requests_for_tokens_run_one_at_a_time(local: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads of Python would delay every callback of the event loop."""
    split, running, most = tokens._tokens_of_all, list[int](), list[int]()

    def count(*arguments: Any) -> list[dict[str, Any]]:
        running.append(1)
        most.append(len(running))
        time.sleep(0.02)
        running.pop()
        return split(*arguments)

    monkeypatch.setattr(tokens, "_tokens_of_all", count)
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: local.client.post("/tokens", json={"model": "words", "inputs": ["sea"]}), range(8)))
    assert {reply.status_code for reply in replies} == {200} and max(most) == 1


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        *(({"inputs": inputs}, 400, "inputs") for inputs in ([], [[-1]], [[1 << 31]], [[1.5]], [None])),
        *(({"inputs": ["a"], name: value}, 400, name) for name, value in (("other", 1), ("model", "sensors"))),
        *(({"inputs": ["a"], name: value}, 404, name) for name, value in (("version", 9), ("model", "unknown"))),
        *(({"inputs": inputs}, 413, field) for inputs, field in ((["a"] * 65, "inputs"), (["a" * (1 << 17)], ""))),
    ],
)
def test_wrong_request_for_tokens_names_its_field(body: dict[str, Any], status: int, field: str, local: InProcess) -> None:
    answer = local.client.post("/tokens", json={"model": "words", **body})
    assert (answer.status_code, (answer.json().get("field") or "").split("[")[0]) == (status, field), answer.text


def test_models_have_layers_labels_aliases_and_cards(tmp_path: Path, local: InProcess) -> None:
    root, hostile = tmp_path / "models", b"# A <script>alert(1)</script> \xff card\n"
    for version in (1, 2, 3):
        models.words(root, version=version)
    (root / "aliases.toml").write_text('latest = "words"\nfirst = "words/1"\nstable = "words"\n')
    (root / "words" / "1" / CARD).write_bytes(hostile)
    (root / "words" / "2" / CARD).write_bytes(b"x" * (2 * MAX_CARD_BYTES))
    (root / "words" / "3" / CARD).unlink()
    with in_process(root, tmp_path) as other:
        listed = other.client.get("/models").json()["models"]
        cards = [other.client.get(f"/models/words/card{query}") for query in ("?version=1", "?version=2", "")]
    assert [model["aliases"] for model in listed] == [["latest", "first", "stable"], ["latest", "stable"], ["latest", "stable"]]
    assert listed[0]["head"]["labels"] == list(models.LABELS)
    assert listed[0]["layers"] == [{"kind": "embedding", "width": 6}, {"kind": "lstm", "hidden": 5, "bidirectional": True}]
    assert [card.content for card in cards] == [hostile, b"x" * MAX_CARD_BYTES, b""]
    assert cards[0].headers["content-type"] == "text/markdown; charset=utf-8"
    for path, status in (("unknown/card", 404), ("words/card?version=9", 404), ("words/card?other=1", 400)):
        assert local.client.get(f"/models/{path}").status_code == status, path
    assert local.client.get("/models/..%2f..%2fetc/card").status_code == 404


def test_caller_is_named_with_its_scopes(local: InProcess, guarded: Guarded) -> None:
    assert local.client.get("/access").json() == {
        "caller": "local",
        "needs_key": False,
        "scopes": sorted(Scope),
        "version": __version__,
        "grpc_port": int(local.grpc.rpartition(":")[2]),
    }
    answer = guarded.send("GET", "/access", None).json()
    assert answer["needs_key"] is True and answer["scopes"] == [Scope.PUBLIC]
    for scope, key in guarded.scoped.items():
        answer = guarded.send("GET", "/access", key).json()
        assert answer["caller"] == f"only-{scope}" and not answer["needs_key"]
        assert set(answer["scopes"]) == {Scope.PUBLIC, scope, *([Scope.STATE] if scope is Scope.SESSION else [])}


def test_socket_takes_a_key_as_a_subprotocol(local: InProcess, guarded: Guarded) -> None:
    def opened(service: InProcess | Guarded, *offered: str, **headers: str) -> Any:
        url = service.address.replace("http", "ws") + "/stream?model=sensors"
        return connect(url, subprotocols=list(map(Subprotocol, offered)), additional_headers=headers, proxy=None)

    session, infer = (f"seqserve.key.{guarded.scoped[scope]}" for scope in (Scope.SESSION, Scope.INFER))
    with opened(guarded, "seqserve", session) as socket:
        assert socket.subprotocol == "seqserve", "the key is not repeated"
        socket.send('{"input": [[1, 2, 3]]}')
        assert '"outputs"' in str(socket.recv())
    wrong = {"authorization": "Bearer wrong"}
    for key, headers, status in (("none", {}, 401), ("seqserve.key.wrong", {}, 401), (infer, {}, 403), (session, wrong, 401)):
        with pytest.raises(InvalidStatus) as refused:
            opened(guarded, "seqserve", key, **headers)
        assert refused.value.response.status_code == status, "the header decides if there are both"
    for offered, chosen in ((["other", "seqserve"], "seqserve"), (["other"], None)):
        with opened(local, *offered) as socket:
            assert socket.subprotocol == chosen


def test_description_of_the_api_is_written_once() -> None:
    """Every client may ask for it, without a key."""
    app = FastAPI(openapi_url=None)
    with patch.object(app, "openapi", return_value={"paths": {}}) as generate:
        openapi.describe(app, APIRouter(), with_keys=False)
        endpoint = cast(Route, app.routes[-1]).endpoint
        replies = [asyncio.run(endpoint(None)) for _ in range(2)]
    assert [reply.body for reply in replies] == [b'{"paths":{}}'] * 2
    generate.assert_called_once()


def test_trace_needs_the_setting_and_valid_parameters(local: InProcess, guarded: Guarded) -> None:
    """tests/frontend/dispatch/test_calls.py plays the engines."""
    answer = local.client.post("/debug/trace")
    assert (answer.status_code, answer.json()["code"]) == (404, "unknown_route")
    assert "SEQSERVE_DEBUG" in answer.json()["error"] and "--debug" in answer.json()["error"]
    assert "/debug/trace" not in local.client.get("/openapi.json").json()["paths"]
    for name, value in (("batches", 0), ("batches", 1001), ("batches", "many"), ("seconds", 61), ("batch", 5)):
        answer = guarded.send("POST", "/debug/trace", guarded.scoped[Scope.DEBUG], params={name: value})
        assert (answer.status_code, answer.json()["field"]) == (400, name)


def test_framework_answers_nothing_by_itself(models_folder: Path, tmp_path: Path) -> None:
    """Each answer to a strange request is an error of the service. A preflight passes the checks of the request that follows it."""
    asks, page = {"access-control-request-method": "POST"}, {"origin": "http://page.example"}
    with in_process(models_folder, tmp_path, allowed_origins="http://page.example") as local:
        for method, path, headers, status in (
            *(("GET", path, {}, 404) for path in ("/models/", "/healthz/", "/docs/oauth2-redirect", "/redoc")),
            *(("POST", path, {}, 404) for path in ("/infer/", "/v2/models/words/infer/")),
            *((method, "/infer", {}, 405) for method in ("OPTIONS", "TRACE", "GET")),
            ("GET", "/models", {"origin": "http://["}, 403),
            ("OPTIONS", "/infer", asks | {"origin": "http://other.example"}, 403),
            ("OPTIONS", "/infer", asks | page | {"host": "other.example"}, 403),
            ("OPTIONS", "/infer", page | {"access-control-request-method": "PATCH"}, 403),
        ):
            answer = local.client.request(method, path, headers=headers)
            assert (answer.status_code, set(answer.json())) == (status, {"error", "code"}), (method, path, headers)
        allowed = local.client.options("/infer", headers=asks | page)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, page["origin"])
        file = local.client.get("/docs/swagger-ui.css", headers={"range": "bytes=0-0,2-2"})
        assert file.status_code == 200 and len(file.content) > 10_000
        assert local.client.get("/docs/swagger-ui.css", headers={"if-none-match": file.headers["etag"]}).status_code == 304


def test_page_of_the_api_comes_from_the_service(local: InProcess) -> None:
    """Its policy allows the files that it loads, and it needs no other host."""
    page = local.client.get("/docs")
    assert "//" not in re.sub(r"<!--.*?-->|<script>.*?</script>", "", page.text, flags=re.DOTALL), "no address of another host"
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(loaded) == 3 and all(local.client.get(path).status_code == 200 for path in loaded)
    [script] = re.findall(r"<script>(.*?)</script>", page.text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert (policy["script-src"], policy["default-src"]) == (f"'self' 'sha256-{digest}'", "'none'")
    assert page.headers["x-frame-options"] == "DENY"
    for name in ("__init__.py", "..%2f__init__.py", "main.py", "%2e%2e"):
        assert local.client.get(f"/docs/{name}").status_code == 404


def test_readiness_says_why_requests_are_refused(harness: InferHarness) -> None:
    harness.frontend.check_ready()
    harness.dispatcher.ready = False
    with pytest.raises(Unavailable, match="no engine is ready"):
        harness.frontend.check_ready()
    harness.frontend.draining = True
    with pytest.raises(Unavailable, match="the service is shutting down"):
        harness.frontend.check_ready()
