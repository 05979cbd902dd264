"""Every route of HTTP as its own description has it: whatever that allows is answered, refused by name, and never by a fault of ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import checks

from service.errors import STATUS, InferenceFailed
from service.frontend import app
from service.frontend.catalog import Catalog
from service.frontend.dispatch.dispatcher import Dispatcher
from service.frontend.inference import Frontend, Supervised
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
    """What a server says of its routes, which is known before one runs."""
    metrics = Metrics()
    engines = Dispatcher(metrics, 1, lambda: None)
    frontend = Frontend(Settings(), Catalog([], {}), engines, metrics, Log("frontend"), cast(Supervised, None))
    return app.build(frontend).openapi()


schema = schemathesis.openapi.from_dict(description())


@pytest.fixture(scope="module")
def server(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One of its own, whose sessions and models are anybody's."""
    with serving(models_folder, tmp_path_factory.mktemp("log")) as running:
        yield running
        eventually(lambda: running.metric("seqserve_requests_in_flight") == 0, 5)
        assert not running.events("bug") and not running.events("server said")
        assert running.metric("seqserve_process_restarts_total") == 0


@schema.parametrize()
@settings(
    max_examples=15,
    derandomize=True,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_whatever_a_route_may_be_sent_has_an_answer_that_it_describes(case: Any, server: Server) -> None:
    answers = [case.call_and_validate(base_url=server.address, checks=[*CHECKS, checks.negative_data_rejection])]
    if not case.path.endswith("unload"):
        # What is made up hardly ever names a model that there is.
        for place in (case.path_parameters, case.query, case.body):
            if isinstance(place, dict):
                place.update({name: value for name, value in KNOWN.items() if name in place})
        answers.append(case.call_and_validate(base_url=server.address, checks=CHECKS))
    assert all(answer.status_code != STATUS[InferenceFailed].http for answer in answers)


def test_the_description_is_that_of_a_server(server: Server) -> None:
    assert server.client.get("/openapi.json").json() == description()
