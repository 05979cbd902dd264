"""The harness of the tests that run without a server."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from service.frontend.catalog import Catalog, ServedModel
from service.frontend.dispatch.dispatcher import Dispatcher
from service.frontend.inference import Frontend, SupervisorClient
from service.log import Log
from service.metrics import Metrics
from service.modeling.tokenizer import Tokenizer
from tests import models
from tests.frontend.oip.harness import SETTINGS, FakeDispatcher, InferHarness


@pytest.fixture(scope="package")
def harness(tmp_path_factory: pytest.TempPathFactory) -> InferHarness:
    """A frontend that serves one model for each kind of head; two of them accept sessions."""
    root: Path = tmp_path_factory.mktemp("models")
    specs = [make(root) for make in models.OF_EVERY_HEAD.values()]
    served = [
        ServedModel(spec, "1", Tokenizer.read(root / spec.name / "1", spec) if spec.input.kind == "text" else None)
        for spec in specs
    ]
    catalog = Catalog(served, {"alias": "words"})
    dispatcher = FakeDispatcher(catalog, streams=["forecaster", "speller"])
    frontend = Frontend(
        SETTINGS, catalog, cast(Dispatcher, dispatcher), Metrics(), Log("frontend"), cast(SupervisorClient, None)
    )
    return InferHarness(frontend, dispatcher)
