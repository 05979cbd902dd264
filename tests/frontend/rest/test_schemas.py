"""What callers may say of sessions and on streams, without a server."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.errors import InvalidInput, InvalidRequest, ServiceError, TooLarge, UnknownModel
from service.frontend.rest import schemas
from service.frontend.served_model import ModelIndex, ServedModel, find
from service.ipc.messages import Request
from service.modeling.spec import ModelSpec
from service.settings import Settings
from tests import models

GOOD_NAMES = ["a", "7", "x" * 128, "a b", "user/7?&%", '"', "stream", "~!"]
WRONG_NAMES = ["", " ", " a", "a ", "x" * 129, "a\n", "\ta", "ä", "a\x00", "a\x7f", "stream:", "stream:7"]
SETTINGS = Settings()


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> ModelIndex:
    root: Path = tmp_path_factory.mktemp("models")
    return {
        spec.name: {"1": ServedModel(spec, "1", None)} for spec in (models.sensors(root, max_steps=50), models.speller(root))
    }


def asked(catalog: ModelIndex, body: schemas.InferBody) -> tuple[Request, bytes]:
    return schemas.sequences(body, find(catalog, body.model, body.version), SETTINGS, arrived=100.0)


def infer(catalog: ModelIndex, **options: Any) -> Request:
    return asked(catalog, schemas.InferBody.model_validate({"model": "speller", "inputs": [[1, 2]], **options}))[0]


def opened(catalog: ModelIndex, query: str, session: str = "stream:1") -> schemas.ChunkBody:
    items = [(name, value) for name, _, value in (part.partition("=") for part in query.split("&"))]
    asked = schemas.StreamQuery.parse(items)
    return schemas.stream_body(asked, session, find(catalog, asked.model, asked.version).spec, SETTINGS)


def refused(error: ServiceError, kind: type[ServiceError], field: str | None, *parts: str) -> None:
    assert (type(error), error.field) == (kind, field), error.message
    for part in parts:
        assert part in error.message


def test_what_is_said_of_a_session_reaches_the_engine(catalog: ModelIndex) -> None:
    plain = infer(catalog)
    assert (plain.session, plain.session_starts, plain.session_ends) == (None, None, False)
    for start in (None, True, False):
        said = infer(catalog, session="s", start=start, end=True)
        assert (said.session, said.session_starts, said.session_ends) == ("s", start, True)


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_a_session_is_named_in_printable_ascii(catalog: ModelIndex, name: str) -> None:
    assert infer(catalog, session=name).session == schemas.session_id(name) == name
    assert re.search(str(schemas.SESSION_SCHEMA["pattern"]), name)


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_another_name_is_refused_on_every_door(catalog: ModelIndex, name: str) -> None:
    for said in (
        lambda: infer(catalog, session=name),
        lambda: schemas.session_id(name),
        lambda: schemas.ForkBody.parse(f'{{"session": "{name}"}}' if name.isprintable() and name != '"' else '{"session": ""}'),
        lambda: schemas.StreamQuery.parse([("model", "speller"), ("session", name)]),
    ):
        with pytest.raises(InvalidInput, match="1 to 128 printable ASCII") as raised:
            said()
        assert raised.value.field == "session"


@pytest.mark.parametrize(
    "options, field, part",
    [
        ({"start": True}, "start", "name one with session"),
        ({"start": False}, "start", "name one with session"),
        ({"end": True}, "end", "name one with session"),
        ({"end": False}, "end", "name one with session"),
        ({"session": "s", "inputs": [[1], [2]]}, "inputs", "one by one"),
    ],
)
def test_what_can_be_said_of_one_chunk_of_one_session_only_is_refused_otherwise(
    catalog: ModelIndex, options: dict[str, Any], field: str, part: str
) -> None:
    with pytest.raises(InvalidInput, match=part) as raised:
        infer(catalog, **options)
    assert raised.value.field == field


def test_a_start_that_is_null_is_left_out(catalog: ModelIndex) -> None:
    assert infer(catalog, start=None).session is None


def test_a_socket_s_query_holds_for_all_its_chunks(catalog: ModelIndex) -> None:
    body = opened(catalog, "model=speller&version=1&deadline_ms=250&priority=-3&return=embedding,sequence")
    request, tail = asked(catalog, body.chunk(schemas.Message(input=[3, 4], end=True), goes_on=False))
    assert (request.model, request.version, request.priority, request.deadline) == ("speller", "1", -3, 100.25)
    assert (request.session, request.session_starts, request.session_ends) == ("stream:1", None, True)
    assert request.returns.embedding and request.returns.sequence
    assert tail == struct.pack("<2i", 3, 4)


def test_what_is_returned_may_be_said_again_and_again(catalog: ModelIndex) -> None:
    assert opened(catalog, "model=sensors&return=embedding&return=sequence").returns == ["embedding", "sequence"]


@pytest.mark.parametrize(
    "goes_on, said, start", [(False, None, None), (True, None, False), (True, True, True), (False, False, False)]
)
def test_a_chunk_goes_on_with_what_has_begun_unless_it_says_otherwise(
    catalog: ModelIndex, goes_on: bool, said: bool | None, start: bool | None
) -> None:
    body = opened(catalog, "model=speller")
    request, _ = asked(catalog, body.chunk(schemas.Message(input=[1], start=said), goes_on=goes_on))
    assert request.session_starts is start


@pytest.mark.parametrize(
    "query, kind, field, part",
    [
        ("version=1", InvalidInput, "model", "needs model"),
        ("model=nobody", UnknownModel, "model", "sensors"),
        ("model=speller&version=7", UnknownModel, "version", "served are 1"),
        ("model=speller&x=1", InvalidInput, "x", "known are model, version, session, return, deadline_ms, priority"),
        ("model=speller&return=all", InvalidInput, "return", "all"),
        ("model=speller&deadline_ms=0", InvalidInput, "deadline_ms", "greater than 0"),
        ("model=speller&deadline_ms=nan", InvalidInput, "deadline_ms", "nan"),
        ("model=speller&deadline_ms=60001", InvalidInput, "deadline_ms", "SEQSERVE_MAX_DEADLINE_MS"),
        ("model=speller&priority=11", InvalidInput, "priority", "less than or equal to 10"),
    ],
)
def test_a_query_that_no_chunk_could_have_is_refused(
    catalog: ModelIndex, query: str, kind: type[ServiceError], field: str, part: str
) -> None:
    with pytest.raises(kind) as raised:
        opened(catalog, query)
    refused(raised.value, kind, field, part)


@pytest.mark.parametrize(
    "text, kind, field, part",
    [
        ("", InvalidRequest, None, "the message is not JSON"),
        ("{", InvalidRequest, None, "the message is not JSON"),
        ("[1, 2]", InvalidRequest, None, '{"input": ...}'),
        ("{}", InvalidInput, "input", "missing"),
        ('{"inputs": [[1]]}', InvalidInput, "input", "missing"),
        ('{"input": [1], "session": "s"}', InvalidInput, "session", "known are input, start, end"),
        ('{"input": [1], "end": 1}', InvalidInput, "end", "boolean"),
        ('{"input": [1], "start": "yes"}', InvalidInput, "start", "boolean"),
    ],
)
def test_a_message_that_is_none_is_refused(text: str, kind: type[ServiceError], field: str | None, part: str) -> None:
    with pytest.raises(kind) as raised:
        schemas.Message.read({"type": "websocket.receive", "text": text})
    refused(raised.value, kind, field, part)


def raw(catalog: ModelIndex, model: str, data: bytes) -> tuple[Request, bytes]:
    message = schemas.Message.read({"type": "websocket.receive", "bytes": data})
    return asked(catalog, opened(catalog, f"model={model}").chunk(message, goes_on=False))


def test_bytes_are_what_the_same_numbers_are_in_json(catalog: ModelIndex) -> None:
    rows = [[0.5, -2.0, 3e38], [0.0, 1e-40, -0.0]]
    request, tail = raw(catalog, "sensors", np.array(rows, "<f4").tobytes())
    same, same_tail = asked(catalog, opened(catalog, "model=sensors").chunk(schemas.Message(input=rows), goes_on=False))
    assert (request.lengths, tail) == (same.lengths, same_tail) == ([2], np.array(rows, np.float32).tobytes())
    request, tail = raw(catalog, "speller", struct.pack("<3i", 0, 11, 7))
    same, same_tail = asked(catalog, opened(catalog, "model=speller").chunk(schemas.Message(input=[0, 11, 7]), goes_on=False))
    assert (request.lengths, tail) == (same.lengths, same_tail)


@pytest.mark.parametrize(
    "model, data, kind, field, part",
    [
        ("sensors", b"", InvalidInput, "input", "at least one step"),
        ("speller", b"", InvalidInput, "input", "at least one step"),
        ("sensors", bytes(13), InvalidInput, "input", "13 bytes and a step of sensors has 12"),
        ("sensors", bytes(4), InvalidInput, "input", "send whole steps"),
        ("speller", bytes(6), InvalidInput, "input", "6 bytes and a step of speller has 4"),
        ("sensors", bytes(12 * 51), TooLarge, "input", "51 steps"),
        ("speller", bytes(4 * 65), TooLarge, "input", "65 steps"),
        ("sensors", struct.pack("<6f", 1, 2, 3, 4, np.nan, 6), InvalidInput, "input[1][1]", "nan"),
        ("sensors", struct.pack("<3f", 1, 2, -np.inf), InvalidInput, "input[0][2]", "finite float32"),
        ("speller", struct.pack("<2i", 3, 12), InvalidInput, "input[1]", "from 0 to 11"),
        ("speller", struct.pack("<2i", -1, 3), InvalidInput, "input[0]", "-1 and the token ids"),
        ("speller", struct.pack("<i", -(2**31)), InvalidInput, "input[0]", "from 0 to 11"),
    ],
)
def test_bytes_are_validated_as_json_is(
    catalog: ModelIndex, model: str, data: bytes, kind: type[ServiceError], field: str, part: str
) -> None:
    with pytest.raises(kind) as raised:
        raw(catalog, model, data)
    refused(raised.value, kind, field, part)


def test_a_fault_in_a_chunk_is_found_under_the_name_that_the_message_has_for_it(catalog: ModelIndex) -> None:
    body = opened(catalog, "model=speller")
    with pytest.raises(InvalidInput) as raised:
        asked(catalog, body.chunk(schemas.Message(input=[1, 99]), goes_on=True))
    refused(raised.value, InvalidInput, "input[1]", "from 0 to 11")


def test_specs_of_the_tests_take_chunks(catalog: ModelIndex) -> None:
    """What is said of chunks above would be refused in an engine otherwise."""
    specs: list[ModelSpec] = [versions["1"].spec for versions in catalog.values()]
    assert [spec.min_steps for spec in specs] == [1, 1]
