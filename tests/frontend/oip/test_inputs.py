"""Inputs in every form and parameters become the same engine request, and invalid ones are rejected by name."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import numpy as np
import pytest

from service.errors import InvalidInput, TooLarge, UnknownModel, Unsupported
from service.frontend.oip.parameters import check_no_shared_memory, requested_output
from service.frontend.oip.tensors import BYTES, Tensor
from service.frontend.oip.types import RequestedOutput
from tests.frontend.oip.harness import IDS, LENGTHS, OFFSETS, SEQUENCES, TWO_IDS, InferHarness, integers, tensor

PACKED = [step for row in SEQUENCES for step in row]
PADDED = [[*row, *[[np.nan] * 3] * (3 - len(row))] for row in SEQUENCES]
PACKED_IDS = [id for row in IDS for id in row]
PADDED_IDS = [[*row, *[-1] * (3 - len(row))] for row in IDS]
COLUMN = [[length] for length in LENGTHS]
TEXTS = ["how far", "sea", "is the sea"]
VALID: list[tuple[str, list[Tensor], list[int], Any]] = [
    ("forecaster", [tensor("inputs", PADDED), integers("lengths", LENGTHS)], LENGTHS, PACKED),
    ("forecaster", [tensor("inputs", PADDED, "FP16"), integers("lengths", COLUMN, "INT64")], LENGTHS, PACKED),
    ("forecaster", [tensor("inputs", PACKED, "BF16"), integers("offsets", OFFSETS, "INT64")], LENGTHS, PACKED),
    ("forecaster", [tensor("inputs", [PACKED], "FP64"), integers("offsets", [OFFSETS])], LENGTHS, PACKED),
    ("forecaster", [tensor("inputs", SEQUENCES[0])], [2], SEQUENCES[0]),
    ("forecaster", [tensor("inputs", [SEQUENCES[0]])], [2], SEQUENCES[0]),
    ("speller", [integers("ids", PADDED_IDS), integers("lengths", LENGTHS)], LENGTHS, PACKED_IDS),
    ("words", [integers("ids", PACKED_IDS, "INT64"), integers("offsets", OFFSETS)], LENGTHS, PACKED_IDS),
    ("speller", [integers("ids", [PACKED_IDS]), integers("offsets", [OFFSETS])], LENGTHS, PACKED_IDS),
    ("speller", [integers("ids", [1, 2])], [2], [1, 2]),
    ("speller", [integers("ids", [[1, 2], [3, 4]])], [2, 2], [1, 2, 3, 4]),
    ("speller", [integers("ids", [[1, 2], [3, 4]]), integers("lengths", [0, 2])], [0, 2], [3, 4]),
    ("words", [tensor("text", TEXTS, BYTES)], LENGTHS, [1, 2, 5, 3, 4, 5]),
    ("words", [tensor("text", [[text] for text in TEXTS], BYTES)], LENGTHS, [1, 2, 5, 3, 4, 5]),
]


@pytest.mark.parametrize(("model", "inputs", "lengths", "packed"), VALID, ids=range(len(VALID)))
def test_inputs_in_every_form_are_packed_without_padding(
    harness: InferHarness, model: str, inputs: list[Tensor], lengths: list[int], packed: Any
) -> None:
    request, values = harness.engine_request(model, *inputs)
    assert (request.lengths, values) == (lengths, packed)


ONE_TWO, TWO = integers("ids", [[1, 2]]), integers("ids", [1, 2])
INVALID: list[tuple[str, list[Tensor], str, str]] = [
    ("forecaster", [], "inputs", "is missing"),
    ("words", [integers("lengths", [1])], "text", "requires text or ids"),
    ("words", [integers("ids", [1]), tensor("text", ["how"], BYTES)], "ids", "and text cannot be combined: send only one"),
    ("words", [integers("ids", [1]), integers("ids", [1])], "ids", "is sent twice"),
    ("words", [integers("idz", [1])], "idz", "its inputs are text, ids, lengths, offsets"),
    ("speller", [tensor("text", ["how"], BYTES)], "text", "its inputs are ids, lengths, offsets"),
    ("speller", [integers("ids", [1], "UINT8")], "ids", "is UINT8: send it as INT32 or INT64"),
    ("forecaster", [integers("inputs", [[1, 2, 3]])], "inputs", "is INT32"),
    ("words", [integers("text", [1])], "text", "BYTES"),
    ("speller", [integers("ids", [1]), tensor("lengths", [1.0])], "lengths", "INT32 or INT64"),
    ("forecaster", [tensor("inputs", [1, 2, 3])], "inputs", "[steps, 3] or [sequences, steps, 3]"),
    ("forecaster", [tensor("inputs", [[1, 2]])], "inputs", "[1, 2]"),
    ("forecaster", [tensor("inputs", [[[[1, 2, 3]]]])], "inputs", "[1, 1, 1, 3]"),
    ("speller", [integers("ids", [[[1]]])], "ids", "[steps] or [sequences, steps]"),
    ("forecaster", [tensor("inputs", [[[1, 2, 3], [1, np.inf, 3]]])], "inputs[0][1][1]", "inf"),
    ("forecaster", [tensor("inputs", [[1, 2, 1e300]], "FP64")], "inputs[0][0][2]", "1e+300"),
    ("forecaster", [tensor("inputs", [*PACKED[:5], [0, 0, np.nan]]), integers("offsets", OFFSETS)], "inputs[2][2][2]", "nan"),
    ("speller", [integers("ids", [[1, 2], [99, 0]]), integers("lengths", [2, 1])], "ids[1][0]", "99 and the token ids"),
    ("speller", [integers("ids", [2**40], "INT64")], "ids[0][0]", str(2**40)),
    ("speller", [integers("ids", [-1])], "ids[0][0]", "from 0 to 11"),
    ("speller", [ONE_TWO, integers("lengths", [1]), integers("offsets", [0, 2])], "lengths", "and offsets cannot be combined"),
    ("speller", [ONE_TWO, integers("lengths", [1, 2])], "lengths", "send the shape [1] or [1, 1]"),
    ("speller", [ONE_TWO, integers("lengths", [-1])], "lengths[0]", "is -1"),
    ("speller", [integers("ids", [[1, 2]] * 2), integers("lengths", [2, 3])], "lengths[1]", "between 0 and 2"),
    ("speller", [ONE_TWO, integers("lengths", [-(2**63)], "INT64")], "lengths[0]", str(-(2**63))),
    ("speller", [TWO, integers("offsets", [0])], "offsets", "[sequences + 1]"),
    ("speller", [TWO, integers("offsets", [[0], [2]])], "offsets", "[sequences + 1]"),
    ("speller", [TWO, integers("offsets", [1, 2])], "offsets", "from 1 to 2"),
    ("speller", [TWO, integers("offsets", [0, 3])], "offsets", "has 2 steps"),
    ("reader", [TWO, integers("offsets", [0, 1, 1, 2])], "ids[1]", "needs at least 1"),
    ("speller", [TWO, integers("offsets", [0, 2, 1, 2])], "offsets[2]", "is 1, but its sequence starts at 2"),
    ("speller", [TWO, integers("offsets", [0, 2**62, -(2**62), 2], "INT64")], "offsets[2]", "starts at"),
    ("speller", [integers("ids", [[1], [2]]), integers("offsets", [0, 2])], "ids", "has 2 sequences"),
    ("words", [tensor("text", ["how"], BYTES), integers("lengths", [1])], "lengths", "leave it out"),
    ("words", [tensor("text", ["how"], BYTES), integers("offsets", [0, 1])], "offsets", "leave it out"),
    ("words", [tensor("text", [["how", "far"]], BYTES)], "text", "[sequences] or [sequences, 1]"),
    ("embedder", [tensor("text", ["how far is", ""], BYTES)], "text[1]", "no words"),
    ("words", [tensor("text", [b"how \xff"], BYTES)], "text[0]", "not UTF-8 at byte 4"),
    ("embedder", [integers("ids", [1])], "ids[0]", "at least 3"),
]


@pytest.mark.parametrize(("model", "inputs", "field", "text"), INVALID, ids=range(len(INVALID)))
def test_invalid_inputs_are_rejected_by_name(
    harness: InferHarness, model: str, inputs: list[Tensor], field: str, text: str
) -> None:
    harness.check_refused(InvalidInput, field, text, model, *inputs)


def test_limits_of_infer_apply(harness: InferHarness) -> None:
    for of_nine in (integers("ids", [[1]] * 9), tensor("text", ["how"] * 9, BYTES)):
        harness.check_refused(TooLarge, of_nine.name, "SEQSERVE_MAX_INPUTS is 8", "words", of_nine)
    harness.check_refused(TooLarge, "ids", "9 inputs", "words", integers("ids", [1] * 9), integers("offsets", range(10)))
    with_a_long_sequence = (integers("ids", [[1] * 65] * 2), integers("lengths", [1, 65]))
    harness.check_refused(TooLarge, "ids[1]", "at most 64", "words", *with_a_long_sequence)
    harness.check_refused(TooLarge, "text[0]", "65 steps", "words", tensor("text", ["how " * 65], BYTES))
    harness.check_refused(UnknownModel, "model", "unknown model nobody", "nobody", integers("ids", [1]))
    harness.check_refused(UnknownModel, "version", "no version 9", "words", integers("ids", [1]), version="9")


# Parameters.


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


def test_smaller_priority_is_more_urgent_and_timeout_a_deadline(harness: InferHarness) -> None:
    expected = {0: 0, 1: 10, 2: 9, 11: 0, 12: -1, 21: -10, 22: -10, 2**40: -10}
    requests = {value: harness.engine_request("speller", TWO_IDS, priority=value)[0] for value in expected}
    assert {value: request.priority for value, request in requests.items()} == expected
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


INVALID_PARAMETERS: list[tuple[dict[str, Any], str, str]] = [
    ({"sequence_id": -1}, "parameters.sequence_id", "-1"),
    ({"sequence_id": 1.5}, "parameters.sequence_id", "1.5"),
    *(({"sequence_id": value}, "parameters.sequence_id", text) for value, text in ((True, "true"), (False, "false"))),
    ({"sequence_id": [1]}, "parameters.sequence_id", "a list"),
    ({"sequence_id": " a"}, "parameters.sequence_id", "1 to 128 printable"),
    ({"sequence_id": "stream:1"}, "parameters.sequence_id", "must not begin"),
    ({"sequence_id": 1, "sequence_start": 1}, "parameters.sequence_start", "true or false"),
    ({"sequence_id": 1, "sequence_end": "yes"}, "parameters.sequence_end", "a string"),
    ({"sequence_start": True}, "parameters.sequence_start", "requires sequence_id"),
    ({"sequence_end": True}, "parameters.sequence_end", "send sequence_id, or leave sequence_end out"),
    ({"priority": -1}, "parameters.priority", "-1"),
    ({"priority": 1.0}, "parameters.priority", "a whole number"),
    ({"timeout": -1}, "parameters.timeout", "microseconds"),
    ({"timeout": "1"}, "parameters.timeout", "a string"),
    ({"timeout": 60_000_001}, "parameters.timeout", "SEQSERVE_MAX_DEADLINE_MS is 60000"),
]


@pytest.mark.parametrize(("parameters", "field", "text"), INVALID_PARAMETERS, ids=range(len(INVALID_PARAMETERS)))
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
