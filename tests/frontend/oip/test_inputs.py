"""Input tensors in every accepted form become the same engine request, and invalid inputs are rejected by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from service.errors import InvalidInput, TooLarge, UnknownModel
from service.frontend.oip.tensors import BYTES, Tensor
from tests.frontend.oip.harness import IDS, LENGTHS, OFFSETS, SEQUENCES, InferHarness, integers, padded, tensor

PACKED = [step for row in SEQUENCES for step in row]
PACKED_IDS = [id for row in IDS for id in row]


@pytest.mark.parametrize("integer", ["INT32", "INT64"])
@pytest.mark.parametrize("datatype", ["FP32", "FP16", "BF16", "FP64"])
def test_features_in_every_form_are_packed_without_padding(harness: InferHarness, datatype: str, integer: str) -> None:
    with_padding = tensor("inputs", padded(SEQUENCES, [np.nan] * 3), datatype)
    for inputs in (
        (with_padding, integers("lengths", LENGTHS, integer)),
        (with_padding, integers("lengths", [[length] for length in LENGTHS], integer)),
        (tensor("inputs", PACKED, datatype), integers("offsets", OFFSETS, integer)),
        (tensor("inputs", [PACKED], datatype), integers("offsets", [OFFSETS], integer)),
    ):
        request, values = harness.engine_request("forecaster", *inputs)
        assert (request.lengths, values) == (LENGTHS, PACKED)


@pytest.mark.parametrize("integer", ["INT32", "INT64"])
def test_ids_in_every_form_are_packed_without_padding(harness: InferHarness, integer: str) -> None:
    for inputs in (
        (integers("ids", padded(IDS, -1), integer), integers("lengths", LENGTHS)),
        (integers("ids", PACKED_IDS, integer), integers("offsets", OFFSETS)),
        (integers("ids", [PACKED_IDS], integer), integers("offsets", [OFFSETS])),
    ):
        for model in ("speller", "words"):
            request, values = harness.engine_request(model, *inputs)
            assert (request.lengths, values) == (LENGTHS, PACKED_IDS)


def test_single_sequence_needs_no_lengths(harness: InferHarness) -> None:
    for values in (SEQUENCES[0], [SEQUENCES[0]]):
        assert harness.engine_request("forecaster", tensor("inputs", values))[0].lengths == [2]
    for ids in ([1, 2], [[1, 2]]):
        assert harness.engine_request("speller", integers("ids", ids))[0].lengths == [2]
    assert harness.engine_request("speller", integers("ids", [[1, 2], [3, 4]]))[0].lengths == [2, 2]


@pytest.mark.parametrize("texts", [["how far", "sea", "is the sea"], [["how far"], ["sea"], ["is the sea"]]])
def test_texts_become_token_ids(harness: InferHarness, texts: Any) -> None:
    request, ids = harness.engine_request("words", tensor("text", texts, BYTES))
    assert (request.lengths, ids) == (LENGTHS, [1, 2, 5, 3, 4, 5])


INVALID: list[tuple[str, list[Tensor], str, str]] = [
    ("forecaster", [], "inputs", "is missing"),
    ("speller", [], "ids", "is missing"),
    ("words", [], "text", "requires text or ids"),
    ("words", [integers("lengths", [1])], "text", "is missing"),
    ("words", [integers("ids", [1]), tensor("text", ["how"], BYTES)], "ids", "and text cannot be combined: send only one"),
    ("words", [integers("ids", [1]), integers("ids", [1])], "ids", "is sent twice"),
    ("words", [integers("idz", [1])], "idz", "its inputs are text, ids, lengths, offsets"),
    ("speller", [tensor("text", ["how"], BYTES)], "text", "its inputs are ids, lengths, offsets"),
    ("speller", [tensor("ids", [1.0])], "ids", "INT32 or INT64"),
    ("speller", [integers("ids", [1], "UINT8")], "ids", "is UINT8"),
    ("forecaster", [integers("inputs", [[1, 2, 3]])], "inputs", "is INT32"),
    ("words", [integers("text", [1])], "text", "BYTES"),
    ("speller", [integers("ids", [1]), tensor("lengths", [1.0])], "lengths", "INT32 or INT64"),
    ("forecaster", [tensor("inputs", [1, 2, 3])], "inputs", "[steps, 3] or [sequences, steps, 3]"),
    ("forecaster", [tensor("inputs", [[1, 2]])], "inputs", "[1, 2]"),
    ("forecaster", [tensor("inputs", [[[[1, 2, 3]]]])], "inputs", "[1, 1, 1, 3]"),
    ("speller", [integers("ids", [[[1]]])], "ids", "[steps] or [sequences, steps]"),
    ("forecaster", [tensor("inputs", [[[1, 2, 3], [1, np.inf, 3]]])], "inputs[0][1][1]", "inf"),
    ("forecaster", [tensor("inputs", [[1, 2, 1e300]], "FP64")], "inputs[0][0][2]", "1e+300"),
    ("forecaster", [tensor("inputs", [[1, 2, np.inf]], "FP16")], "inputs[0][0][2]", "is inf"),
    ("forecaster", [tensor("inputs", [[1, -np.inf, 2]], "BF16")], "inputs[0][0][1]", "is -inf"),
    ("forecaster", [tensor("inputs", [*PACKED[:5], [0, 0, np.nan]]), integers("offsets", OFFSETS)], "inputs[2][2][2]", "nan"),
    ("speller", [integers("ids", padded([[1, 2], [99]], 0)), integers("lengths", [2, 1])], "ids[1][0]", "99 and the token ids"),
    ("speller", [integers("ids", [2**40], "INT64")], "ids[0][0]", str(2**40)),
    ("speller", [integers("ids", [-1])], "ids[0][0]", "from 0 to 11"),
    (
        "speller",
        [integers("ids", [[1, 2]]), integers("lengths", [1]), integers("offsets", [0, 2])],
        "lengths",
        "and offsets cannot be combined",
    ),
    ("speller", [integers("ids", [[1, 2]]), integers("lengths", [1, 2])], "lengths", "send the shape [1] or [1, 1]"),
    ("speller", [integers("ids", [[1, 2]]), integers("lengths", [-1])], "lengths[0]", "is -1"),
    ("reader", [integers("ids", [[1, 2]]), integers("lengths", [0])], "ids[0]", "needs at least 1"),
    ("speller", [integers("ids", [[1, 2]] * 2), integers("lengths", [2, 3])], "lengths[1]", "between 0 and 2"),
    ("speller", [integers("ids", [[1, 2]]), integers("lengths", [-(2**63)], "INT64")], "lengths[0]", str(-(2**63))),
    ("speller", [integers("ids", [1, 2]), integers("offsets", [0])], "offsets", "[sequences + 1]"),
    ("speller", [integers("ids", [1, 2]), integers("offsets", [[0], [2]])], "offsets", "[sequences + 1]"),
    ("speller", [integers("ids", [1, 2]), integers("offsets", [[[0, 2]]])], "offsets", "[sequences + 1]"),
    ("speller", [integers("ids", [1, 2]), integers("offsets", [1, 2])], "offsets", "from 1 to 2"),
    ("speller", [integers("ids", [1, 2]), integers("offsets", [0, 3])], "offsets", "has 2 steps"),
    ("reader", [integers("ids", [1, 2]), integers("offsets", [0, 1, 1, 2])], "ids[1]", "needs at least 1"),
    (
        "speller",
        [integers("ids", [1, 2]), integers("offsets", [0, 2, 1, 2])],
        "offsets[2]",
        "is 1, but its sequence starts at 2",
    ),
    ("speller", [integers("ids", [1, 2]), integers("offsets", [0, 2**62, -(2**62), 2], "INT64")], "offsets[2]", "starts at"),
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
    nine_sequences = [(integers("ids", [[1]] * 9), "ids"), (tensor("text", ["how"] * 9, BYTES), "text")]
    for tensor_of_nine, field in nine_sequences:
        harness.check_refused(TooLarge, field, "SEQSERVE_MAX_INPUTS is 8", "words", tensor_of_nine)
    harness.check_refused(TooLarge, "ids", "9 inputs", "words", integers("ids", [1] * 9), integers("offsets", range(10)))
    with_a_long_sequence = (integers("ids", [[1] * 65] * 2), integers("lengths", [1, 65]))
    harness.check_refused(TooLarge, "ids[1]", "at most 64", "words", *with_a_long_sequence)
    harness.check_refused(TooLarge, "text[0]", "65 steps", "words", tensor("text", ["how " * 65], BYTES))
    harness.check_refused(UnknownModel, "model", "unknown model nobody", "nobody", integers("ids", [1]))
    harness.check_refused(UnknownModel, "version", "no version 9", "words", integers("ids", [1]), version="9")
