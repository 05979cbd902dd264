"""Validation of /infer, /stream and the session routes, without a server."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.errors import InvalidInput, InvalidRequest, ServiceError, TooLarge, UnknownModel
from service.frontend.rest.chunks import ChunkBody, ChunkOptions, DecodedChunk, StreamQuery, resolve_start
from service.frontend.rest.infer import engine_request, pack_inputs, parse_body
from service.frontend.rest.sessions import ForkBody
from service.frontend.run.catalog import Catalog, ServedModel
from service.frontend.run.head_outputs import input_field
from service.frontend.run.validation import SESSION_ID_SCHEMA, check_session_id
from service.ipc.messages.inference import Request
from service.settings import Settings
from tests import models

SETTINGS = Settings()
DEADLINES = (("0", "greater than 0"), ("nan", "nan"), ("60001", "SEQSERVE_MAX_DEADLINE_MS"))


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    root: Path = tmp_path_factory.mktemp("models")
    specs = (models.sensors(root, max_steps=50), models.speller(root))
    return Catalog([ServedModel(spec, "1", None) for spec in specs], {})


def infer(catalog: Catalog, **options: Any) -> Request:
    body = parse_body(json.dumps({"model": "speller", "inputs": [[1, 2]], **options}).encode(), None)
    model = catalog.find(body.model, body.version)
    return engine_request(body, pack_inputs(body, model, SETTINGS), model, SETTINGS, 100.0, input_field)[0]


def parse_query(catalog: Catalog, query: str) -> StreamQuery:
    items = [(name, value) for name, _, value in (part.partition("=") for part in query.split("&"))]
    stream = StreamQuery.parse(items)
    stream.check_options(catalog.find(stream.model, stream.version).spec, SETTINGS)
    return stream


def chunk_request(
    catalog: Catalog, query: str, chunk: ChunkBody, *, start: bool | None = None
) -> tuple[Request, bytes | memoryview]:
    """Return the engine's request for a chunk."""
    parsed = parse_query(catalog, query)
    options = ChunkOptions(parsed, "stream:1", SETTINGS)
    decoded = DecodedChunk(*options.decoded, chunk.input, start, chunk.end, chunk.steps)
    return options.request(decoded, catalog.find(parsed.model, parsed.version), 100.0, None)


def test_session_fields_reach_the_engine(catalog: Catalog) -> None:
    plain = infer(catalog, start=None)
    assert (plain.session, plain.session_starts, plain.session_ends) == (None, None, False)
    for start in (None, True, False):
        request = infer(catalog, session="s", start=start, end=True)
        assert (request.session, request.session_starts, request.session_ends) == ("s", start, True)


@pytest.mark.parametrize("name", ["a", "7", "x" * 128, "a b", "user/7?&%", '"', "stream", "~!"])
def test_printable_ascii_is_a_valid_session_id(catalog: Catalog, name: str) -> None:
    assert infer(catalog, session=name).session == check_session_id(name) == name
    assert re.search(str(SESSION_ID_SCHEMA["pattern"]), name)


@pytest.mark.parametrize("name", ["", " ", " a", "a ", "x" * 129, "a\n", "\ta", "ä", "a\x00", "a\x7f", "stream:", "stream:7"])
def test_other_session_ids_are_refused_by_every_route(catalog: Catalog, name: str) -> None:
    for parse in (
        lambda: infer(catalog, session=name),
        lambda: check_session_id(name),
        lambda: ForkBody.parse(json.dumps({"session": name}).encode()),
        lambda: StreamQuery.parse([("model", "speller"), ("session", name)]),
    ):
        with pytest.raises(InvalidInput, match="1 to 128 printable ASCII") as raised:
            parse()
        assert raised.value.field == "session"


@pytest.mark.parametrize(
    "options", [{"start": True}, {"start": False}, {"end": True}, {"end": False}, {"inputs": [[1], [2]], "session": "s"}]
)
def test_session_fields_require_one_session_and_one_input(catalog: Catalog, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="one by one" if "session" in options else "requires session") as raised:
        infer(catalog, **options)
    assert raised.value.field == next(iter(options))


def test_query_applies_to_the_chunks_of_a_socket(catalog: Catalog) -> None:
    query = "model=speller&version=1&deadline_ms=250&priority=-3&return=embedding,sequence"
    request, tail = chunk_request(catalog, query, ChunkBody([3, 4], end=True))
    assert (request.model, request.version, request.priority, request.deadline) == ("speller", "1", -3, 100.25)
    assert (request.session, request.session_starts, request.session_ends) == ("stream:1", None, True)
    assert request.returns.embedding and request.returns.sequence
    assert tail == struct.pack("<2i", 3, 4)
    request, _ = chunk_request(catalog, "model=speller", ChunkBody([3]), start=False)
    assert (request.exactly, request.session_starts, request.session_ends) == (False, False, False)
    assert parse_query(catalog, "model=sensors&return=embedding&return=sequence").returns == ["embedding", "sequence"]


@pytest.mark.parametrize(
    "begun, requested, start", [(False, None, None), (True, None, False), (True, True, True), (False, False, False)]
)
def test_chunk_continues_a_begun_session_unless_it_has_start(begun: bool, requested: bool | None, start: bool | None) -> None:
    assert resolve_start(requested, begun=begun) is start


Refusal = tuple[type[ServiceError], str | None, str]


def check(error: ServiceError, refusal: Refusal) -> None:
    kind, field, part = refusal
    assert (type(error), error.field) == (kind, field), error.message
    assert part in error.message


@pytest.mark.parametrize(
    "query, refusal",
    [
        ("version=1", (InvalidInput, "model", "needs model")),
        ("model=nobody", (UnknownModel, "model", "sensors")),
        ("model=speller&version=7", (UnknownModel, "version", "served are 1")),
        ("model=speller&x=1", (InvalidInput, "x", "parameters are model, version, session, return, deadline_ms, priority")),
        ("model=speller&return=all", (InvalidInput, "return", "all")),
        *((f"model=speller&deadline_ms={value}", (InvalidInput, "deadline_ms", part)) for value, part in DEADLINES),
        ("model=speller&priority=11", (InvalidInput, "priority", "less than or equal to 10")),
    ],
)
def test_invalid_query_is_refused(catalog: Catalog, query: str, refusal: Refusal) -> None:
    with pytest.raises(refusal[0]) as raised:
        parse_query(catalog, query)
    check(raised.value, refusal)


@pytest.mark.parametrize(
    "text, refusal",
    [
        *((text, (InvalidRequest, None, "the message is not JSON")) for text in ("", "{")),
        ("[1, 2]", (InvalidRequest, None, '{"input": ...}')),
        *((text, (InvalidInput, "input", "missing")) for text in ("{}", '{"inputs": [[1]]}')),
        ('{"input": [1], "session": "s"}', (InvalidInput, "session", "known fields are input, start, end")),
        *((f'{{"input": [1], "{name}": 1}}', (InvalidInput, name, "boolean")) for name in ("start", "end")),
    ],
)
def test_invalid_message_is_refused(text: str, refusal: Refusal) -> None:
    with pytest.raises(refusal[0]) as raised:
        ChunkBody.parse(text.encode())
    check(raised.value, refusal)


def raw(catalog: Catalog, model: str, data: bytes) -> tuple[Request, bytes | memoryview]:
    return chunk_request(catalog, f"model={model}", ChunkBody(data))


@pytest.mark.parametrize("model, values", [("sensors", [[0.5, -3e38, 3e38], [0.0, 1e-40, -0.0]]), ("speller", [0, 11, 7])])
def test_binary_chunk_equals_the_same_numbers_in_json(catalog: Catalog, model: str, values: list[Any]) -> None:
    data = np.array(values, "<f4" if model == "sensors" else "<i4").tobytes()
    request, tail = raw(catalog, model, data)
    same, same_tail = chunk_request(catalog, f"model={model}", ChunkBody(values))
    assert (request.lengths, tail) == (same.lengths, same_tail) == ([len(values)], data)


@pytest.mark.parametrize(
    "model, data, refusal",
    [
        *((model, b"", (InvalidInput, "input", "at least one step")) for model in ("sensors", "speller")),
        ("sensors", bytes(13), (InvalidInput, "input", "13 bytes and a step of sensors has 12: send whole steps")),
        *((model, bytes(size), (TooLarge, "input", "steps")) for model, size in (("sensors", 12 * 51), ("speller", 4 * 65))),
        ("sensors", struct.pack("<6f", 1, 2, 3, 4, np.nan, 6), (InvalidInput, "input[1][1]", "nan")),
        ("sensors", struct.pack("<3f", 1, 2, -np.inf), (InvalidInput, "input[0][2]", "finite float32")),
        ("speller", struct.pack("<2i", 3, 12), (InvalidInput, "input[1]", "from 0 to 11")),
        ("speller", struct.pack("<2i", -1, 3), (InvalidInput, "input[0]", "-1 and the token ids")),
        ("speller", struct.pack("<i", -(2**31)), (InvalidInput, "input[0]", "from 0 to 11")),
    ],
)
def test_binary_chunk_is_validated(catalog: Catalog, model: str, data: bytes, refusal: Refusal) -> None:
    with pytest.raises(refusal[0]) as raised:
        raw(catalog, model, data)
    check(raised.value, refusal)
