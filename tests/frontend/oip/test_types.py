"""The Open Inference Protocol below both of its faces: what the engine is asked, and what is made of its answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import pytest

from service.errors import InvalidInput, ServiceError, TooLarge, UnknownModel, Unsupported
from service.frontend.catalog import Catalog
from service.frontend.dispatch.dispatcher import Dispatcher
from service.frontend.inference import Frontend, Supervised, counted
from service.frontend.oip import metadata as oip_models
from service.frontend.oip import types
from service.frontend.oip.outputs import Wanted
from service.frontend.oip.tensors import BYTES, DATATYPES, Tensor, decode, encode, listed
from service.frontend.oip.types import InferRequest, InferResponse
from service.frontend.served_model import ServedModel
from service.ipc.messages import Answer, LoadedModel, Request
from service.log import Log
from service.metrics import Metrics
from service.modeling.tokenizer import Tokenizer
from service.settings import Settings
from tests import models

SETTINGS = Settings(max_inputs=8)
ROWS = [[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[7.0, 8.0, 9.0]], [[1.5, 2.5, 3.5], [0.0, -1.0, 2.0], [3.0, 3.0, 3.0]]]
IDS = [[1, 2], [3], [4, 5, 6]]
LENGTHS = [2, 1, 3]
ANSWERS: dict[str, dict[str, list[list[float]]]] = {
    "words": {"scores": [[0.25, 0.5, 0.25], [0.5, 0.25, 0.25], [0.125, 0.125, 0.75]]},
    "forecaster": {"scores": [[1, 2], [3, 4], [5, 6]]},
    "tagger": {"scores": [[0.5], [0.25], [0.75], [1.0], [0.5], [0.5]], "picks": [[0], [1], [2], [0], [1], [2]]},
    "reader": {"scores": [[0.5], [0.25], [0.75]], "picks": [[0, 1], [0, 0], [1, 2]]},
    "speller": {"scores": [[0.4, 0.3, 0.2, 0.1]] * 3, "picks": [[7, 5, 1, 0], [1, 2, 3, 4], [4, 3, 2, 1]]},
    "embedder": {"embedding": [[1.0] * 8, [0.5] * 8, [0.25] * 8]},
    "halver": {"sequence": [[1, 2, 3, 4, 5]] * 6},
}
"""What an engine might say of three sequences of LENGTHS steps."""


class MadeUp:
    """Engines that keep what they are asked and give what they are told to. streams: names of models that take chunks."""

    def __init__(self, known: Catalog, streams: Sequence[str] = ()) -> None:
        self.asked: list[tuple[Request, bytes]] = []
        self.ready = True
        self.steps = 0
        self.answers = ANSWERS
        self.models = [
            LoadedModel(one.spec.name, one.version, "cpu", [], 0, one.spec.name in streams, generation=one.generation)
            for one in known.served
        ]

    async def submit(self, request: Request, tail: bytes) -> tuple[Answer, bytes]:
        self.asked.append((request, tail))
        rows = len(request.lengths)
        steps, shapes, data = LENGTHS[:rows], {}, b""
        for name, dtype in (("scores", "f4"), ("picks", "i4"), ("embedding", "f4"), ("sequence", "f4")):
            if name in self.answers[request.model]:
                per_step = name == "sequence" or request.model == "tagger"
                array = np.array(self.answers[request.model][name][: sum(steps) if per_step else rows], dtype)
                shapes[name], data = array.shape, data + array.tobytes()
        return Answer(**cast(Any, shapes), steps=steps, session_steps=self.steps), data


class House(NamedTuple):
    frontend: Frontend
    engines: MadeUp

    def infer(
        self, model: str, *inputs: Tensor, outputs: Sequence[Wanted] = (), version: str = "", **parameters: Any
    ) -> InferResponse:
        request = InferRequest(model, version, "7", parameters, list(inputs), list(outputs))

        async def asked() -> InferResponse:
            with counted(self.frontend.metrics, 100.0) as call:
                return await types.infer(self.frontend, call, request)

        return asyncio.run(asked())

    def asked(self, model: str, *inputs: Tensor, **options: Any) -> tuple[Request, Any]:
        """The engine's request, and the values behind it."""
        self.infer(model, *inputs, **options)
        request, tail = self.engines.asked[-1]
        features = self.frontend.catalog[model]["1"].spec.input.features
        return request, np.frombuffer(tail, "i4").tolist() if features is None else np.frombuffer(tail, "f4").reshape(
            -1, features
        ).tolist()


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    root: Path = tmp_path_factory.mktemp("models")
    specs = [made(root) for made in models.OF_EVERY_HEAD.values()]
    served = [
        ServedModel(spec, "1", Tokenizer.read(root / spec.name / "1", spec) if spec.input.kind == "text" else None)
        for spec in specs
    ]
    known = Catalog(served, {"alias": "words"})
    engines = MadeUp(known, streams=["forecaster", "speller"])
    frontend = Frontend(SETTINGS, known, cast(Dispatcher, engines), Metrics(), Log("frontend"), cast(Supervised, None))
    return House(frontend, engines)


def tensor(name: str, values: Any, datatype: str = "FP32") -> Tensor:
    """By way of the bytes that a client would send."""
    if datatype == BYTES:
        return listed(name, BYTES, np.array(values, object).shape, list(np.array(values, object).ravel()))
    array = np.array(values, np.float32 if datatype == "BF16" else DATATYPES[datatype])
    return decode(name, datatype, array.shape, encode(Tensor(name, datatype, array.shape, array)))


def ints(name: str, values: Any, datatype: str = "INT32") -> Tensor:
    return tensor(name, values, datatype)


def padded(rows: Sequence[Sequence[Any]], filler: Any) -> list[list[Any]]:
    longest = max(len(row) for row in rows)
    return [[*row, *[filler] * (longest - len(row))] for row in rows]


def refused(house: House, kind: type[ServiceError], field: str, part: str, *asked: Any, **options: Any) -> None:
    before = len(house.engines.asked)
    with pytest.raises(ServiceError) as raised:
        house.infer(*asked, **options)
    error = raised.value
    assert (type(error), error.field) == (kind, field), error.message
    assert part in error.message
    assert len(house.engines.asked) == before, "the engine heard nothing of it"


# What the engine is asked.

FLAT = [step for row in ROWS for step in row]
OFFSETS = [0, *accumulate(LENGTHS)]


@pytest.mark.parametrize("whole", ["INT32", "INT64"])
@pytest.mark.parametrize("datatype", ["FP32", "FP16", "BF16", "FP64"])
def test_rows_lie_end_to_end_without_padding_however_they_came(house: House, datatype: str, whole: str) -> None:
    filled = tensor("inputs", padded(ROWS, [np.nan] * 3), datatype)
    for form in (
        (filled, ints("lengths", LENGTHS, whole)),
        (filled, ints("lengths", [[length] for length in LENGTHS], whole)),
        (tensor("inputs", FLAT, datatype), ints("offsets", OFFSETS, whole)),
        (tensor("inputs", [FLAT], datatype), ints("offsets", [OFFSETS], whole)),
    ):
        request, values = house.asked("forecaster", *form)
        assert (request.lengths, values) == (LENGTHS, FLAT)


@pytest.mark.parametrize("whole", ["INT32", "INT64"])
def test_ids_lie_end_to_end_without_padding_however_they_came(house: House, whole: str) -> None:
    flat = [id for row in IDS for id in row]
    for form in (
        (ints("ids", padded(IDS, -1), whole), ints("lengths", LENGTHS)),
        (ints("ids", flat, whole), ints("offsets", OFFSETS)),
        (ints("ids", [flat], whole), ints("offsets", [OFFSETS])),
    ):
        for model in ("speller", "words"):
            request, values = house.asked(model, *form)
            assert (request.lengths, values) == (LENGTHS, flat)


def test_one_row_needs_no_lengths_and_no_dimension_of_rows(house: House) -> None:
    for values in (ROWS[0], [ROWS[0]]):
        assert house.asked("forecaster", tensor("inputs", values))[0].lengths == [2]
    for ids in ([1, 2], [[1, 2]]):
        assert house.asked("speller", ints("ids", ids))[0].lengths == [2]
    assert house.asked("speller", ints("ids", [[1, 2], [3, 4]]))[0].lengths == [2, 2]


@pytest.mark.parametrize("texts", [["how far", "sea", "is the sea"], [["how far"], ["sea"], ["is the sea"]]])
def test_texts_become_the_ids_of_their_words(house: House, texts: Any) -> None:
    request, ids = house.asked("words", tensor("text", texts, BYTES))
    assert (request.lengths, ids) == (LENGTHS, [1, 2, 5, 3, 4, 5])


WRONG: list[tuple[str, list[Tensor], str, str]] = [
    ("forecaster", [], "inputs", "is missing"),
    ("speller", [], "ids", "is missing"),
    ("words", [], "text", "text or ids"),
    ("words", [ints("lengths", [1])], "text", "is missing"),
    ("words", [ints("ids", [1]), tensor("text", ["how"], BYTES)], "ids", "send one of them"),
    ("words", [ints("ids", [1]), ints("ids", [1])], "ids", "given twice"),
    ("words", [ints("idz", [1])], "idz", "known are text, ids, lengths, offsets"),
    ("speller", [tensor("text", ["how"], BYTES)], "text", "known are ids, lengths, offsets"),
    ("speller", [tensor("ids", [1.0])], "ids", "INT32 or INT64"),
    ("speller", [ints("ids", [1], "UINT8")], "ids", "is UINT8"),
    ("forecaster", [ints("inputs", [[1, 2, 3]])], "inputs", "is INT32"),
    ("words", [ints("text", [1])], "text", "BYTES"),
    ("speller", [ints("ids", [1]), tensor("lengths", [1.0])], "lengths", "INT32 or INT64"),
    ("forecaster", [tensor("inputs", [1, 2, 3])], "inputs", "[steps, 3] or [rows, steps, 3]"),
    ("forecaster", [tensor("inputs", [[1, 2]])], "inputs", "[1, 2]"),
    ("forecaster", [tensor("inputs", [[[[1, 2, 3]]]])], "inputs", "[1, 1, 1, 3]"),
    ("speller", [ints("ids", [[[1]]])], "ids", "[steps] or [rows, steps]"),
    ("forecaster", [tensor("inputs", [[[1, 2, 3], [1, np.inf, 3]]])], "inputs[0][1][1]", "inf"),
    ("forecaster", [tensor("inputs", [[1, 2, 1e300]], "FP64")], "inputs[0][0][2]", "1e+300"),
    ("forecaster", [tensor("inputs", [*FLAT[:5], [0, 0, np.nan]]), ints("offsets", OFFSETS)], "inputs[2][2][2]", "nan"),
    ("speller", [ints("ids", padded([[1, 2], [99]], 0)), ints("lengths", [2, 1])], "ids[1][0]", "99 and the token ids"),
    ("speller", [ints("ids", [2**40], "INT64")], "ids[0][0]", str(2**40)),
    ("speller", [ints("ids", [-1])], "ids[0][0]", "from 0 to 11"),
    ("speller", [ints("ids", [[1, 2]]), ints("lengths", [1]), ints("offsets", [0, 2])], "lengths", "both given"),
    ("speller", [ints("ids", [[1, 2]]), ints("lengths", [1, 2])], "lengths", "send [1] or [1, 1]"),
    ("speller", [ints("ids", [[1, 2]]), ints("lengths", [0])], "lengths[0]", "is 0"),
    ("speller", [ints("ids", [[1, 2]] * 2), ints("lengths", [2, 3])], "lengths[1]", "from 1 to 2"),
    ("speller", [ints("ids", [[1, 2]]), ints("lengths", [-(2**63)], "INT64")], "lengths[0]", str(-(2**63))),
    ("speller", [ints("ids", [1, 2]), ints("offsets", [0])], "offsets", "[rows + 1]"),
    ("speller", [ints("ids", [1, 2]), ints("offsets", [[0], [2]])], "offsets", "[rows + 1]"),
    ("speller", [ints("ids", [1, 2]), ints("offsets", [[[0, 2]]])], "offsets", "[rows + 1]"),
    ("speller", [ints("ids", [1, 2]), ints("offsets", [1, 2])], "offsets", "from 1 to 2"),
    ("speller", [ints("ids", [1, 2]), ints("offsets", [0, 3])], "offsets", "has 2 steps"),
    ("speller", [ints("ids", [1, 2]), ints("offsets", [0, 1, 1, 2])], "offsets[2]", "at least one step"),
    ("speller", [ints("ids", [1, 2]), ints("offsets", [0, 2, 1, 2])], "offsets[2]", "is 1 and the row begins at 2"),
    ("speller", [ints("ids", [1, 2]), ints("offsets", [0, 2**62, -(2**62), 2], "INT64")], "offsets[2]", "begins at"),
    ("speller", [ints("ids", [[1], [2]]), ints("offsets", [0, 2])], "ids", "has 2 rows"),
    ("words", [tensor("text", ["how"], BYTES), ints("lengths", [1])], "lengths", "leave it out"),
    ("words", [tensor("text", ["how"], BYTES), ints("offsets", [0, 1])], "offsets", "leave it out"),
    ("words", [tensor("text", [["how", "far"]], BYTES)], "text", "[rows] or [rows, 1]"),
    ("words", [tensor("text", ["how", ""], BYTES)], "text[1]", "no words"),
    ("words", [tensor("text", [b"how \xff"], BYTES)], "text[0]", "not UTF-8 at byte 4"),
    ("embedder", [ints("ids", [1])], "ids[0]", "at least 3"),
]


@pytest.mark.parametrize(("model", "inputs", "field", "part"), WRONG, ids=range(len(WRONG)))
def test_inputs_that_cannot_be_are_refused_by_name(
    house: House, model: str, inputs: list[Tensor], field: str, part: str
) -> None:
    refused(house, InvalidInput, field, part, model, *inputs)


def test_limits_hold_as_on_every_door(house: House) -> None:
    many = [
        (ints("ids", [[1]] * 9), "ids"),
        (tensor("text", ["how"] * 9, BYTES), "text"),
    ]
    for given, field in many:
        refused(house, TooLarge, field, "SEQSERVE_MAX_INPUTS is 8", "words", given)
    refused(house, TooLarge, "ids", "9 inputs", "words", ints("ids", [1] * 9), ints("offsets", range(10)))
    refused(house, TooLarge, "ids[1]", "at most 64", "words", ints("ids", [[1] * 65] * 2), ints("lengths", [1, 65]))
    refused(house, TooLarge, "text[0]", "65 steps", "words", tensor("text", ["how " * 65], BYTES))
    refused(house, UnknownModel, "model", "unknown model nobody", "nobody", ints("ids", [1]))
    refused(house, UnknownModel, "version", "no version 9", "words", ints("ids", [1]), version="9")


# Parameters.

ONE = ints("ids", [1, 2])


@pytest.mark.parametrize(
    ("said", "session", "starts", "ends"),
    [
        ({}, None, None, False),
        ({"sequence_id": 0, "sequence_start": False, "sequence_end": False}, None, None, False),
        ({"sequence_id": ""}, None, None, False),
        ({"sequence_id": 7}, "7", False, False),
        ({"sequence_id": 2**64 - 1, "sequence_start": True}, str(2**64 - 1), True, False),
        ({"sequence_id": "a b", "sequence_start": False, "sequence_end": True}, "a b", False, True),
    ],
)
def test_a_sequence_is_a_session(
    house: House, said: dict[str, Any], session: str | None, starts: bool | None, ends: bool
) -> None:
    request, _ = house.asked("speller", ONE, **said)
    assert (request.session, request.session_starts, request.session_ends) == (session, starts, ends)


@pytest.mark.parametrize(
    ("said", "ours"), [(None, 0), (0, 0), (1, 10), (2, 9), (11, 0), (12, -1), (21, -10), (22, -10), (2**40, -10)]
)
def test_a_smaller_priority_is_more_urgent(house: House, said: int | None, ours: int) -> None:
    assert house.asked("speller", ONE, **({} if said is None else {"priority": said}))[0].priority == ours


def test_a_timeout_is_a_deadline_in_microseconds(house: House) -> None:
    assert house.asked("speller", ONE, timeout=250_000)[0].deadline == 100.25
    for said in ({}, {"timeout": 0}):
        assert house.asked("speller", ONE, **said)[0].deadline == 100.0 + SETTINGS.default_deadline_ms / 1000


def test_other_parameters_are_ignored(house: House) -> None:
    others = {"triton_enable_empty_final_response": True, "headers": "x", "binary_data_output": True, "colour": "red"}
    plain, told = house.asked("speller", ONE)[0], house.asked("speller", ONE, **others)[0]
    assert msgspec.structs.replace(told, sent=plain.sent) == plain


def test_the_version_that_is_named_is_meant_exactly(house: House) -> None:
    assert [house.asked("speller", ONE, version=version)[0].exactly for version in ("", "1")] == [False, True]


WRONG_PARAMETERS: list[tuple[dict[str, Any], str, str]] = [
    ({"sequence_id": -1}, "parameters.sequence_id", "-1"),
    ({"sequence_id": 1.5}, "parameters.sequence_id", "1.5"),
    ({"sequence_id": True}, "parameters.sequence_id", "true"),
    ({"sequence_id": False}, "parameters.sequence_id", "false"),
    ({"sequence_id": [1]}, "parameters.sequence_id", "a list"),
    ({"sequence_id": " a"}, "parameters.sequence_id", "1 to 128 printable"),
    ({"sequence_id": "stream:1"}, "parameters.sequence_id", "must not begin"),
    ({"sequence_id": 1, "sequence_start": 1}, "parameters.sequence_start", "true or false"),
    ({"sequence_id": 1, "sequence_end": "yes"}, "parameters.sequence_end", "a string"),
    ({"sequence_start": True}, "parameters.sequence_start", "none is named"),
    ({"sequence_end": True}, "parameters.sequence_end", "name one with sequence_id"),
    ({"priority": -1}, "parameters.priority", "-1"),
    ({"priority": 1.0}, "parameters.priority", "a whole number"),
    ({"priority": True}, "parameters.priority", "true"),
    ({"timeout": -1}, "parameters.timeout", "microseconds"),
    ({"timeout": "1"}, "parameters.timeout", "a string"),
    ({"timeout": 60_000_001}, "parameters.timeout", "SEQSERVE_MAX_DEADLINE_MS is 60000"),
]


@pytest.mark.parametrize(("said", "field", "part"), WRONG_PARAMETERS, ids=range(len(WRONG_PARAMETERS)))
def test_parameters_that_cannot_be_are_refused_by_name(house: House, said: dict[str, Any], field: str, part: str) -> None:
    refused(house, InvalidInput, field, part, "speller", ONE, **said)


def test_a_sequence_takes_one_row_at_a_time(house: House) -> None:
    two = ints("ids", [[1], [2]])
    refused(house, InvalidInput, "parameters.sequence_id", "one by one", "speller", two, sequence_id=7)


# What is made of an answer.


def given(model: str) -> list[Tensor]:
    """Three rows of LENGTHS steps, padded."""
    if model in ("forecaster", "halver"):
        width = 3 if model == "forecaster" else 2
        lengths = ints("lengths", LENGTHS if model == "forecaster" else [3, 3, 3])
        return [tensor("inputs", np.ones((3, 3, width))), lengths]
    return [ints("ids", np.ones((3, 3))), ints("lengths", LENGTHS if model != "embedder" else [3, 3, 3])]


def said(response: InferResponse) -> dict[str, Any]:
    return {one.name: one.values if isinstance(one.values, list) else one.values.tolist() for one in response.outputs}


def test_each_head_says_its_own_outputs_row_by_row(house: House) -> None:
    words = house.infer("words", *given("words"))
    assert (words.model, words.version, words.id, words.parameters) == ("words", "1", "7", {})
    assert [one.name for one in words.outputs] == ["label", "score", "scores"]
    assert said(words)["label"] == [b"far", b"near", b"unknown"]
    assert said(words)["score"] == [[0.5], [0.5], [0.75]]
    assert said(words)["scores"] == ANSWERS["words"]["scores"]
    assert said(house.infer("forecaster", *given("forecaster"))) == {"value": ANSWERS["forecaster"]["scores"]}
    reader = said(house.infer("reader", *given("reader")))
    assert reader == {"start": [[0], [0], [1]], "end": [[1], [0], [2]], "score": [[0.5], [0.25], [0.75]]}
    assert said(house.infer("speller", *given("speller")))["ids"] == ANSWERS["speller"]["picks"]
    assert said(house.infer("embedder", *given("embedder"))) == {"embedding": ANSWERS["embedder"]["embedding"]}


def test_what_is_said_of_every_step_is_padded_beside_the_lengths(house: House) -> None:
    tagged = said(house.infer("tagger", *given("tagger")))
    assert tagged["labels"] == [*(b"near", b"far", b""), *(b"unknown", b"", b""), *(b"near", b"far", b"unknown")]
    assert tagged["scores"] == [[0.5, 0.25, 0], [0.75, 0, 0], [1.0, 0.5, 0.5]]
    assert tagged["lengths"] == [[2], [1], [3]]
    halved = house.infer("halver", *given("halver"))
    assert [one.shape for one in halved.outputs] == [(3, 3, 5), (3, 1)], "an encoder may give fewer steps than it takes"


def test_a_ragged_request_has_a_ragged_answer(house: House) -> None:
    tagged = house.infer("tagger", ints("ids", [1] * 6), ints("offsets", OFFSETS))
    assert said(tagged)["labels"] == [b"near", b"far", b"unknown", b"near", b"far", b"unknown"]
    assert {one.name: one.shape for one in tagged.outputs} == {"labels": (1, 6), "scores": (1, 6), "offsets": (1, 4)}
    assert said(tagged)["offsets"] == [OFFSETS]


@pytest.mark.parametrize(
    "inputs", [given("tagger"), [ints("ids", [1] * 6), ints("offsets", OFFSETS)]], ids=["padded", "ragged"]
)
def test_lengths_and_offsets_are_both_given_to_who_wants_all_that_there_is(house: House, inputs: list[Tensor]) -> None:
    tagged = said(house.infer("tagger", *inputs, outputs=[Wanted("labels"), Wanted("lengths"), Wanted("offsets")]))
    assert tagged["lengths"] == [[2], [1], [3]]
    assert tagged["offsets"] == [OFFSETS]


def test_outputs_come_as_they_are_named_in_that_order(house: House) -> None:
    named = house.infer("words", *given("words"), outputs=[Wanted("scores"), Wanted("label")])
    assert [one.name for one in named.outputs] == ["scores", "label"]
    house.infer("words", *given("words"))
    assert house.engines.asked[-1][0].returns.embedding is False


def test_classes_are_said_best_first(house: House) -> None:
    [two] = house.infer("words", *given("words"), outputs=[Wanted("scores", 2)]).outputs
    assert (two.datatype, two.shape) == (BYTES, (3, 2))
    assert two.values == [b"0.5:1:far", b"0.25:0:near", b"0.5:0:near", b"0.25:1:far", b"0.75:2:unknown", b"0.125:0:near"]
    [all_of_them] = house.infer("words", *given("words"), outputs=[Wanted("scores", 2**40)]).outputs
    assert all_of_them.shape == (3, 3)


@pytest.mark.parametrize(
    ("model", "outputs", "part"),
    [
        ("words", [Wanted("logits")], "known are label, score, scores, embedding, sequence, lengths"),
        ("words", [Wanted("score"), Wanted("score")], "named twice"),
        ("words", [Wanted("label", 2)], "has no classes"),
        ("speller", [Wanted("scores", 2)], "has no classes"),
        ("embedder", [Wanted("sequence")], "known are embedding"),
        ("words", [Wanted("lengths")], "those of sequence"),
        ("words", [Wanted("offsets")], "those of sequence"),
    ],
)
def test_outputs_that_there_are_not_are_refused(house: House, model: str, outputs: list[Wanted], part: str) -> None:
    refused(house, InvalidInput, "outputs", part, model, *given(model), outputs=outputs)


def test_values_that_are_not_finite_are_refused_by_the_row(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house.engines, "answers", {"forecaster": {"scores": [[1, 2], [3, np.inf], [5, 6]]}})
    with pytest.raises(InvalidInput, match="not finite") as raised:
        house.infer("forecaster", *given("forecaster"))
    assert raised.value.field == "inputs[1]"


def test_an_answer_is_not_padded_without_bound(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.frontend.oip.outputs.PADDED_BYTES", 35)
    with pytest.raises(TooLarge, match="36 bytes when it is padded and 35 is the most"):
        house.infer("tagger", *given("tagger"))
    assert house.infer("tagger", ints("ids", [1] * 6), ints("offsets", OFFSETS)).outputs


def test_a_sequence_s_answer_says_how_far_it_is(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house.engines, "steps", 12)
    assert house.infer("speller", ONE, sequence_id=7).parameters == {"sequence_steps": 12}


def test_what_is_asked_is_counted_once_and_timed_by_stage(house: House) -> None:
    def counts() -> list[float]:
        metrics = house.frontend.metrics
        stages = [
            sum(metrics.stage_seconds.values.get(("speller", "1", stage), [0])[:-1]) for stage in ("parse", "encode", "total")
        ]
        return [metrics.requests.values.get(("speller", "1", "ok"), [0])[0], *stages]

    before = counts()
    house.infer("speller", ONE)
    assert counts() == [count + 1 for count in before]


@pytest.mark.parametrize(
    ("parameters", "wanted"), [({}, 0), ({"classification": 0}, 0), ({"classification": 3, "binary_data": True}, 3)]
)
def test_an_output_s_parameters_are_read(parameters: dict[str, Any], wanted: int) -> None:
    assert types.wanted("scores", parameters) == Wanted("scores", wanted)


@pytest.mark.parametrize("value", [-1, 1.5, "2", True])
def test_an_output_s_parameters_that_cannot_be_are_refused(value: Any) -> None:
    with pytest.raises(InvalidInput) as raised:
        types.wanted("scores", {"classification": value})
    assert raised.value.field == "scores.parameters.classification"


def test_shared_memory_is_refused_for_what_it_is() -> None:
    for read in (types.wanted, types.check_place):
        with pytest.raises(Unsupported, match="send the tensor's data") as raised:
            read("scores", {"shared_memory_region": "mine", "shared_memory_byte_size": 4})
        assert raised.value.field == "scores"


# What is said of models.


@pytest.mark.parametrize("name", models.OF_EVERY_HEAD)
def test_metadata_configuration_and_answers_agree(house: House, name: str) -> None:
    metadata, config = (said(house.frontend, name, "") for said in (oip_models.model_metadata, oip_models.model_config))
    assert (metadata["name"], metadata["versions"], metadata["platform"]) == (name, ["1"], "seqserve")
    assert config["max_batch_size"] == SETTINGS.max_inputs
    for described, configured in ((metadata["inputs"], config["input"]), (metadata["outputs"], config["output"])):
        assert [one["name"] for one in described] == [one["name"] for one in configured]
        assert [one["shape"] for one in described] == [[-1, *one["dims"]] for one in configured]
        assert [one["data_type"].removeprefix("TYPE_").replace("STRING", BYTES) for one in configured] == [
            one["datatype"] for one in described
        ]
    described = {one["name"]: one for one in metadata["outputs"]}
    for output in house.infer(name, *given(name)).outputs:
        assert output.datatype == described[output.name]["datatype"]
        for size, declared in zip(output.shape, described[output.name]["shape"], strict=True):
            assert declared in (-1, size)


def test_inputs_that_may_be_left_out_are_optional(house: House) -> None:
    def optional(name: str) -> list[str]:
        return [one["name"] for one in oip_models.model_config(house.frontend, name, "1")["input"] if one["optional"]]

    assert optional("words") == ["ids", "lengths", "offsets"]
    assert optional("speller") == optional("forecaster") == ["lengths", "offsets"]


def test_a_model_that_streams_has_sequences(house: House) -> None:
    streams, whole = (oip_models.model_config(house.frontend, name, "") for name in ("forecaster", "words"))
    assert streams["sequence_batching"] == {"max_sequence_idle_microseconds": 60_000_000}
    assert "dynamic_batching" not in streams
    assert whole["dynamic_batching"] == {}
    assert "sequence_batching" not in whole


def test_a_model_is_ready_when_an_engine_has_it(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    assert oip_models.ready(house.frontend, "words", "") and oip_models.ready(house.frontend, "alias", "1")
    monkeypatch.setattr(house.engines, "models", house.engines.models[1:])
    assert not oip_models.ready(house.frontend, "words", "1")
    monkeypatch.setattr(house.engines, "ready", False)
    assert not oip_models.ready(house.frontend, "forecaster", "")
    for name, version in (("nobody", ""), ("words", "2")):
        with pytest.raises(UnknownModel):
            oip_models.ready(house.frontend, name, version)


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ({}, None),
        ({"version_policy": {"all": {}}}, "all"),
        ({"version_policy": {"latest": {"num_versions": 2}}}, "latest:2"),
        ({"version_policy": {"specific": {"versions": [1, 3]}}}, "1,3"),
    ],
)
def test_a_policy_is_read_from_a_configuration(config: dict[str, Any], rule: str | None) -> None:
    assert oip_models.policy({"config": json.dumps(config), "unload_dependents": False}) == rule


def test_without_a_configuration_there_is_no_policy() -> None:
    assert oip_models.policy({}) is None


@pytest.mark.parametrize(
    "config",
    [
        *("", "[]", "{", "7", "null", 7, None, "[" * 100_000, '{"version_policy": 1}', '{"version_policy": {}}'),
        *('{"version_policy": {"all": 1}}', '{"version_policy": {"all": {"x": 1}}}', '{"version_policy": {"latest": {}}}'),
        '{"version_policy": {"latest": {"num_versions": 0}}}',
        '{"version_policy": {"latest": {"num_versions": true}}}',
        '{"version_policy": {"latest": {"num_versions": 10000}}}',
        '{"version_policy": {"specific": {"versions": []}}}',
        '{"version_policy": {"specific": {"versions": ["1"]}}}',
        '{"version_policy": {"specific": {"versions": [0]}}}',
        '{"version_policy": {"all": {}, "latest": {"num_versions": 1}}}',
    ],
)
def test_a_configuration_that_cannot_be_is_refused(config: Any) -> None:
    with pytest.raises(InvalidInput) as raised:
        oip_models.policy({"config": config})
    assert raised.value.field == "parameters.config"


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"config": '{"max_batch_size": 8}'}, "parameters.config"),
        ({"config": '{"version_policy": {"all": {}}, "name": "x"}'}, "parameters.config"),
        ({"file:1/model.onnx": "AAAA"}, "parameters.file:1/model.onnx"),
    ],
)
def test_what_only_a_model_s_folder_says_is_unsupported(parameters: dict[str, Any], field: str) -> None:
    with pytest.raises(Unsupported) as raised:
        oip_models.policy(parameters)
    assert raised.value.field == field


def test_the_service_says_who_it_is() -> None:
    metadata = oip_models.server_metadata()
    assert (metadata["name"], set(metadata)) == ("seqserve", {"name", "version", "extensions"})
    assert {"statistics", "model_repository", "sequence(string_id)"} < set(metadata["extensions"])
