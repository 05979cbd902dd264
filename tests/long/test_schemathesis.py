"""Requests generated from the OpenAPI document: every route replies as the document says, and never with an internal error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import checks

from service.errors import STATUS, InferenceFailed
from service.frontend.dispatch.dispatcher import Dispatcher
from service.frontend.rest.app import build_app
from service.frontend.run.catalog import Catalog
from service.frontend.run.frontend import Frontend, SupervisorClient
from service.log import Log
from service.metrics import Metrics
from service.settings import Settings
from tests.serving import Server, eventually, serving

CHECKS = (
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.unsupported_method,
    checks.allow_header_conformance,
)
KNOWN = {"name": "words", "version": "1", "model": "words", "inputs": ["how far is the sea ?"]}


def description() -> dict[str, Any]:
    """Return the OpenAPI document, which needs no running server."""
    metrics = Metrics()
    engines = Dispatcher(metrics, 1, lambda: None)
    frontend = Frontend(Settings(), Catalog([], {}), engines, metrics, Log("frontend"), cast(SupervisorClient, None))
    return build_app(frontend).openapi()


def strict() -> dict[str, Any]:
    """Return the document without what any request may get, so that every other status has to be named."""
    document = description()
    for operation in (one for path in document["paths"].values() for one in path.values()):
        del operation["responses"]["default"]
    return document


schema = schemathesis.openapi.from_dict(strict())


@pytest.fixture(scope="module")
def server(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A separate server: the generated requests change its sessions and models."""
    with serving(models_folder, tmp_path_factory.mktemp("log")) as running:
        yield running
        eventually(lambda: running.metric("seqserve_requests_in_flight") == 0, 5)
        assert not running.events("bug") and not running.events("library warning")
        assert running.metric("seqserve_process_restarts_total") == 0


@schema.parametrize()
@settings(
    max_examples=15,
    derandomize=True,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_generated_requests_get_documented_replies(case: Any, server: Server) -> None:
    answers = [case.call_and_validate(base_url=server.address, checks=[*CHECKS, checks.negative_data_rejection])]
    if not case.path.endswith("unload"):
        # A generated name is hardly ever the name of a model.
        for place in (case.path_parameters, case.query, case.body):
            if isinstance(place, dict):
                place.update({name: value for name, value in KNOWN.items() if name in place})
        answers.append(case.call_and_validate(base_url=server.address, checks=CHECKS))
    assert all(answer.status_code != STATUS[InferenceFailed].http for answer in answers)


def test_server_publishes_the_same_document(server: Server) -> None:
    assert server.client.get("/openapi.json").json() == description()
