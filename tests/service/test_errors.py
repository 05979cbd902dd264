"""One tree of errors, one table of its codes."""

from __future__ import annotations

import re

from service import errors
from service.errors import BY_CODE, STATUS, InvalidInput, ServiceError, StartError


def below(kind: type[Exception]) -> list[type[Exception]]:
    """Every class under `kind`, at any depth."""
    return [one for child in kind.__subclasses__() if child.__module__ == errors.__name__ for one in (child, *below(child))]


SERVICE_ERRORS = below(ServiceError)


def test_status_table_has_every_service_error_and_nothing_else() -> None:
    """So has the tree that the docstring draws. Errors of the start are not among them."""
    assert set(STATUS) == set(SERVICE_ERRORS)
    assert not set(below(StartError)) & set(STATUS)
    drawn = re.findall(r"[├└]── (\w+) ", errors.__doc__ or "")
    assert sorted(drawn) == sorted(kind.__name__ for kind in SERVICE_ERRORS)


def test_every_error_has_a_unique_code() -> None:
    codes = [kind.code for kind in STATUS]
    assert len(set(codes)) == len(codes)
    assert all("code" in vars(kind) for kind in STATUS)
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", code) for code in codes)
    assert all(BY_CODE[kind.code] is kind for kind in STATUS)


def test_error_carries_message_field_and_retry_after() -> None:
    error = InvalidInput("inputs[3] is empty", field="inputs[3]", retry_after=2)
    assert (str(error), error.message, error.field, error.retry_after) == (error.message, "inputs[3] is empty", "inputs[3]", 2)
