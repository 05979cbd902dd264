"""Frontends in this process, which many tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from service.access.keys import create
from service.access.refused_keys import RefusedKeys
from service.access.scopes import KEY_SCOPES, Scope
from service.frontend.run.catalog import Catalog, ServedModel
from service.modeling import spec as specs
from service.modeling.tokenizer import Tokenizer
from tests import models
from tests.frontend.http2.peer import ClockLoop, Peer
from tests.frontend.in_process import InProcess, in_process
from tests.frontend.oip.harness import InferHarness, fake_frontend
from tests.serving import Server, serving

BODY_BYTES = 2 << 20
"""The largest body that the frontends below accept."""


@pytest.fixture(scope="session")
def local(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    """A frontend with the default settings, and the models words and sensors."""
    with in_process(models_folder, tmp_path_factory.mktemp("log"), max_body_bytes=BODY_BYTES) as running:
        yield running


@pytest.fixture(scope="session")
def heads_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder with a model for each kind of head, an accumulator, and sensors."""
    root = tmp_path_factory.mktemp("heads")
    for make in (*models.OF_EVERY_HEAD.values(), models.sensors):
        make(root)
    models.accumulator(root, max_steps=300_000)
    return root


@pytest.fixture(scope="session")
def heads(heads_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    """A frontend that logs every request, with a model for each kind of head."""
    with in_process(heads_folder, tmp_path_factory.mktemp("log"), access_log_rate=1, max_body_bytes=BODY_BYTES) as running:
        yield running


@pytest.fixture(scope="session")
def every_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder with each kind of head twice: as in `heads_folder`, and over layers that take sequences without steps."""
    root = tmp_path_factory.mktemp("every-head")
    for make in models.OF_EVERY_HEAD.values():
        make(root)
    models.sensors(root, hidden=4)
    gru = {"kind": "gru", "hidden": 4, "depth": 2, "bidirectional": True}
    learned = {"kind": "lstm", "hidden": 3, "learned_start": True}
    conv = {"kind": "conv", "filters": 5, "width": 3, "pads": [2, 2]}
    dense = [{"width": 6, "activation": "softplus"}]
    pools = ("last", "first", "last_step", "mean", "max", "sum", "attention")
    heads: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "classes": (gru, {"kind": "classify", "pool": pools, "labels": models.LABELS, "dense": dense}),
        "numbers": (learned, {"kind": "regress", "pool": "last", "outputs": 2, "activation": "sigmoid"}),
        "tags": (conv, {"kind": "tag", "labels": models.LABELS}),
        "tokens": (learned, {"kind": "next", "top": 3}),
        "vectors": (conv, {"kind": "embed", "pool": ["max", "mean"], "normalize": True}),
        "steps": (gru, {"kind": "sequence"}),
        "spans": (gru, {"kind": "span"}),
        "windows": ({**conv, "pads": [0, 1]}, {"kind": "regress", "pool": "max"}),
    }
    for name, (layer, head) in heads.items():
        models.made_up(root, name, models.IDS, models.EMBEDDING, layer, head=head)
    return root


@pytest.fixture(scope="session")
def heads_server(every_head: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The real service with the models of `every_head`."""
    with serving(every_head, tmp_path_factory.mktemp("log")) as running:
        yield running


@pytest.fixture(scope="session")
def catalog(heads_folder: Path) -> Catalog:
    """One model for each kind of head. alias: another name of words."""
    served = []
    for name in models.OF_EVERY_HEAD:
        spec = specs.read(heads_folder / name / "1")
        served.append(
            ServedModel(spec, "1", Tokenizer.read(heads_folder / name / "1", spec) if spec.input.kind == "text" else None)
        )
    return Catalog(served, {"alias": "words"})


@pytest.fixture
def harness(catalog: Catalog) -> InferHarness:
    return InferHarness(fake_frontend(catalog, max_inputs=8))


@pytest.fixture
def loop() -> Iterator[ClockLoop]:
    loop = ClockLoop()
    yield loop
    loop.close()


@pytest.fixture
def peer(loop: ClockLoop) -> Peer:
    return Peer(loop)


class Guarded(NamedTuple):
    """A frontend with keys: a token for each scope, tokens of tenants with quotas, and the file."""

    local: InProcess
    scoped: dict[Scope, str]
    tenants: dict[str, str]
    file: Path

    @property
    def address(self) -> str:
        return self.local.address

    def send(self, method: str, path: str, token: str | None, **options: Any) -> httpx.Response:
        return self.local.client.request(method, path, headers=bearer(token), **options)

    def infer(self, token: str | None, **options: Any) -> httpx.Response:
        return self.send("POST", "/infer", token, json={"model": "words", "inputs": ["how far is the sea ?"], **options})

    def chunk(self, token: str, id: str, **options: Any) -> httpx.Response:
        """Send three steps of a session."""
        body = {"model": "sensors", "inputs": [[[1, 2, 3]] * 3], "session": id, **options}
        return self.send("POST", "/infer", token, json=body)


class AtOnce(RefusedKeys):
    """Answers to wrong keys do not wait."""

    def delay(self, peer: str) -> float:
        return 0.0


def bearer(token: str | None) -> dict[str, str]:
    return {} if token is None else {"authorization": f"Bearer {token}"}


@pytest.fixture(scope="session")
def guarded(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A frontend with keys, traces, and refusals that do not wait."""
    scratch = tmp_path_factory.mktemp("keys")
    file = scratch / "keys.toml"
    scoped = {scope: create(file, f"only-{scope}", [scope], "scoped") for scope in KEY_SCOPES}
    limits: dict[str, dict[str, float]] = {
        **{name: {"max_priority": 1} for name in ("sales", "support")},
        "few": {"max_sessions": 2},
        "slow": {"max_requests_per_second": 1},
        "small": {"max_bytes_per_second": 20},
        "single": {"max_sequences_in_flight": 1},
    }
    tenants = {name: create(file, name, [Scope.INFER, Scope.SESSION], name, **each) for name, each in limits.items()}
    with in_process(models_folder, scratch, keys=str(file), debug=True) as local:
        local.frontend.access.refused_keys = AtOnce()
        yield Guarded(local, scoped, tenants, file)
