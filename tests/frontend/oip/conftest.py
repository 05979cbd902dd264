"""The harness of the tests that run without a server."""

from __future__ import annotations

import pytest

from service.frontend.catalog import Catalog
from tests import models
from tests.frontend.oip.harness import InferHarness, catalog_of, fake_frontend


@pytest.fixture(scope="session")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    """One model for each kind of head."""
    return catalog_of(tmp_path_factory.mktemp("models"), models.OF_EVERY_HEAD.values())


@pytest.fixture
def harness(catalog: Catalog) -> InferHarness:
    return InferHarness(fake_frontend(catalog, max_inputs=8))
