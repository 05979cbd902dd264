"""Parameters of requests and tensors become the service's options, and invalid parameters are rejected by name."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from service.errors import InvalidInput, Unsupported
from service.frontend.oip.parameters import check_no_shared_memory, requested_output
from service.frontend.oip.types import RequestedOutput
from tests.frontend.oip.harness import TWO_IDS, InferHarness, integers


def test_sequence_id_names_a_session(harness: InferHarness) -> None:
    for parameters, session in (
        ({}, (None, None, False)),
        ({"sequence_id": 0, "sequence_start": False, "sequence_end": False}, (None, None, False)),
        ({"sequence_id": ""}, (None, None, False)),
        ({"sequence_id": 7}, ("7", False, False)),
        ({"sequence_id": 2**64 - 1, "sequence_start": True}, (str(2**64 - 1), True, False)),
        ({"sequence_id": "a b", "sequence_start": False, "sequence_end": True}, ("a b", False, True)),
    ):
        request, _ = harness.engine_request("speller", TWO_IDS, **cast(Any, parameters))
        assert (request.session, request.session_starts, request.session_ends) == session


def test_smaller_priority_is_more_urgent(harness: InferHarness) -> None:
    expected = {0: 0, 1: 10, 2: 9, 11: 0, 12: -1, 21: -10, 22: -10, 2**40: -10}
    requests = {value: harness.engine_request("speller", TWO_IDS, priority=value)[0] for value in expected}
    assert {value: request.priority for value, request in requests.items()} == expected


def test_timeout_is_a_deadline_in_microseconds(harness: InferHarness) -> None:
    assert harness.engine_request("speller", TWO_IDS, timeout=250_000)[0].deadline == 100.25
    for parameters in ({}, {"timeout": 0}):
        deadline = harness.engine_request("speller", TWO_IDS, **parameters)[0].deadline
        assert deadline == 100.0 + harness.frontend.settings.default_deadline_ms / 1000


def test_unknown_parameters_are_ignored(harness: InferHarness) -> None:
    """A request without a priority has the usual one, and only a request for a version is exact."""
    unknown = {"triton_enable_empty_final_response": True, "headers": "x", "binary_data_output": True, "colour": "red"}
    without, with_unknown = (harness.engine_request("speller", TWO_IDS, **options)[0] for options in ({}, unknown))
    assert msgspec.structs.replace(with_unknown, sent=without.sent) == without
    assert (without.priority, without.exactly) == (0, False)
    assert harness.engine_request("speller", TWO_IDS, version="1")[0].exactly is True


INVALID: list[tuple[dict[str, Any], str, str]] = [
    ({"sequence_id": -1}, "parameters.sequence_id", "-1"),
    ({"sequence_id": 1.5}, "parameters.sequence_id", "1.5"),
    ({"sequence_id": True}, "parameters.sequence_id", "true"),
    ({"sequence_id": False}, "parameters.sequence_id", "false"),
    ({"sequence_id": [1]}, "parameters.sequence_id", "a list"),
    ({"sequence_id": " a"}, "parameters.sequence_id", "1 to 128 printable"),
    ({"sequence_id": "stream:1"}, "parameters.sequence_id", "must not begin"),
    ({"sequence_id": 1, "sequence_start": 1}, "parameters.sequence_start", "true or false"),
    ({"sequence_id": 1, "sequence_end": "yes"}, "parameters.sequence_end", "a string"),
    ({"sequence_start": True}, "parameters.sequence_start", "requires sequence_id"),
    ({"sequence_end": True}, "parameters.sequence_end", "send sequence_id, or leave sequence_end out"),
    ({"priority": -1}, "parameters.priority", "-1"),
    ({"priority": 1.0}, "parameters.priority", "a whole number"),
    ({"priority": True}, "parameters.priority", "true"),
    ({"timeout": -1}, "parameters.timeout", "microseconds"),
    ({"timeout": "1"}, "parameters.timeout", "a string"),
    ({"timeout": 60_000_001}, "parameters.timeout", "SEQSERVE_MAX_DEADLINE_MS is 60000"),
]


@pytest.mark.parametrize(("parameters", "field", "text"), INVALID, ids=range(len(INVALID)))
def test_invalid_parameters_are_rejected_by_name(
    harness: InferHarness, parameters: dict[str, Any], field: str, text: str
) -> None:
    harness.check_refused(InvalidInput, field, text, "speller", TWO_IDS, **parameters)


def test_session_takes_one_sequence_per_request(harness: InferHarness) -> None:
    two = integers("ids", [[1], [2]])
    harness.check_refused(InvalidInput, "parameters.sequence_id", "one by one", "speller", two, sequence_id=7)


def test_output_parameters_are_read() -> None:
    for parameters, classes in (({}, 0), ({"classification": 0}, 0), ({"classification": 3, "binary_data": True}, 3)):
        assert requested_output("scores", parameters) == RequestedOutput("scores", classes)
    for value in (-1, 1.5, "2", True):
        with pytest.raises(InvalidInput) as raised:
            requested_output("scores", {"classification": value})
        assert raised.value.field == "scores.parameters.classification"


def test_shared_memory_is_unsupported() -> None:
    for check in (requested_output, check_no_shared_memory):
        with pytest.raises(Unsupported, match="send the tensor's data") as raised:
            check("scores", {"shared_memory_region": "mine", "shared_memory_byte_size": 4})
        assert raised.value.field == "scores"
