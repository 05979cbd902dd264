"""The page of imports matches the tests."""

from __future__ import annotations

from tests.importers.table import PAGE, page


def test_page_of_imported_layers_is_current() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.importers.table"
