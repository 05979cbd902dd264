"""JSON bodies with and without raw tensors after the JSON, and requests with raw values that have a template."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from service.errors import InvalidInput, InvalidRequest, ServiceError, TooLarge
from service.frontend.oip.json import encode_response, parse_raw_sequence, parse_request, response_pieces
from service.frontend.oip.limits import MAX_PARTS
from service.frontend.oip.templates import MAX_TEMPLATES, TemplateKey, Templates
from service.frontend.oip.tensors import BYTES, from_list
from service.frontend.oip.types import InferResponse
from service.frontend.run.catalog import Catalog
from service.frontend.run.validation import PackedInputs
from service.settings import Settings
from tests import models
from tests.frontend.oip.harness import integers, tensor

TEXT: dict[str, Any] = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["how far is the sea ?"]}
VALID: dict[str, Any] = {"inputs": [TEXT]}
NUMBER = b'{"inputs": [{"name": "ids", "datatype": "FP32", "shape": [1], "data": [%s]}]}'
BROKEN = [b"", b"{", b'{"x":' + b"[" * 100_000, b'{"inputs": [{"name": "\xff"}]}', b'{"id": "\\ud800"}', NUMBER % b"NaN"]


def parse(document: Any, tail: bytes = b"") -> Any:
    """Parse a document, with raw bytes after it."""
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    return parse_request(data + tail, len(data) if tail else None, "words", "")


def binary(size: Any) -> dict[str, Any]:
    return {"name": "ids", "datatype": "INT32", "shape": [2], "parameters": {"binary_data_size": size}}


def asking(**parameters: Any) -> dict[str, Any]:
    return {**VALID, "outputs": [{"name": "score", "parameters": parameters}]}


TWO_IDS = struct.pack("<2i", 3, 4)
INVALID: list[tuple[Any, bytes, type[ServiceError], str | None, str]] = [
    *((data, b"", InvalidRequest, None, "JSON") for data in [*BROKEN, json.dumps(VALID).encode() + b"x"]),
    *((data, b"", InvalidRequest, None, "not an object") for data in (b"null", b"3", b"[]", b'"inputs"')),
    ({}, b"", InvalidInput, "inputs", "missing"),
    ({"inputs": {}}, b"", InvalidInput, "inputs", "expected `array`"),
    ({"inputs": [3]}, b"", InvalidInput, "inputs[0]", "expected `object`"),
    ({"inputs": [{**TEXT, "name": 3}]}, b"", InvalidInput, "inputs[0].name", "expected `str`"),
    ({"inputs": [{"datatype": "BYTES", "shape": [1], "data": ["a"]}]}, b"", InvalidInput, "inputs[0].name", "missing"),
    ({"inputs": [{**TEXT, "shape": [1.5]}]}, b"", InvalidInput, "inputs[0].shape[0]", "expected `int`"),
    ({"inputs": [{**TEXT, "shape": [2]}]}, b"", InvalidInput, "text", "has 1 values"),
    ({"inputs": [{**TEXT, "parameters": {"binary_data_size": 4}}]}, b"", InvalidInput, "text", "send exactly one of them"),
    ({"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1]}]}, b"", InvalidInput, "x", "send exactly one of them"),
    (asking(binary_data=1), b"", InvalidInput, "score.parameters.binary_data", "true or false"),
    (asking(classification="2"), b"", InvalidInput, "score.parameters.classification", "a string"),
    ({**VALID, "parameters": {"binary_data_output": 1}}, b"", InvalidInput, "parameters.binary_data_output", "true or false"),
    ({**VALID, "id": 7}, b"", InvalidInput, "id", "expected `str"),
    *(({"inputs": [binary(size)]}, TWO_IDS, InvalidInput, "ids", "") for size in (-1, 7, 9, 2**70, 8.0, "8", True)),
    ({"inputs": [binary(8), binary(1)]}, TWO_IDS, InvalidInput, "ids", "0 bytes remain"),
    ({"inputs": [binary(8)]}, TWO_IDS + bytes(4), InvalidRequest, None, "12 bytes follow the JSON, but the inputs have 8"),
    *(({**VALID, part: [TEXT] * (MAX_PARTS + 1)}, b"", TooLarge, part, str(MAX_PARTS)) for part in ("inputs", "outputs")),
    ({**VALID, "parameters": dict.fromkeys(map(str, range(65)))}, b"", TooLarge, "parameters", str(MAX_PARTS)),
    ({"inputs": [{**TEXT, "parameters": dict.fromkeys(map(str, range(65)))}]}, b"", TooLarge, "parameters", str(MAX_PARTS)),
]


@pytest.mark.parametrize(("document", "tail", "error", "field", "text"), INVALID, ids=range(len(INVALID)))
def test_invalid_body_is_rejected(document: Any, tail: bytes, error: type[ServiceError], field: str | None, text: str) -> None:
    with pytest.raises(ServiceError) as raised:
        parse(document, tail)
    assert (type(raised.value), raised.value.field) == (error, field), raised.value.message
    assert text in raised.value.message


def test_raw_tensors_follow_in_the_order_of_the_inputs() -> None:
    lengths = {"name": "lengths", "datatype": "INT64", "shape": [1], "parameters": {"binary_data_size": 8}}
    outputs = [{"name": "score", "parameters": {"binary_data": False}}, {"name": "label"}]
    document = {"inputs": [lengths, TEXT, binary(8)], "outputs": outputs, "parameters": {"binary_data_output": True}}
    request, inputs = parse({**document, "id": "ü"}, struct.pack("<q", 1) + TWO_IDS)
    assert [input.values if input.datatype == BYTES else input.values.tolist() for input in inputs.tensors] == [
        *([1], [b"how far is the sea ?"], [3, 4])
    ]
    assert (request.id, [output.name for output in request.outputs]) == ("ü", ["score", "label"])
    assert [request.is_raw(name) for name in ("score", "label", "scores")] == [False, True, True]
    assert [parse(asking(binary_data=True))[0].is_raw(name) for name in ("score", "label")] == [True, False]
    with pytest.raises(InvalidRequest, match="is 3, but the body has 2 bytes"):
        parse_request(b"{}", 3, "words", "")


def test_raw_sequence_has_the_type_of_the_model(catalog: Catalog) -> None:
    for model, data, shape, values in (
        ("words", b"how far", (1,), [b"how far"]),
        ("speller", struct.pack("<3i", 1, 2, 3), (3,), [1, 2, 3]),
        ("forecaster", struct.pack("<6f", *range(6)), (2, 3), [[0, 1, 2], [3, 4, 5]]),
    ):
        request, inputs = parse_raw_sequence(data, catalog.find(model, None).spec, model, "1")
        [input] = inputs.tensors
        assert (request.model, request.version, input.shape, request.is_raw("any")) == (model, "1", shape, True)
        assert (input.values if isinstance(input.values, list) else input.values.tolist()) == values
        for broken in (b"", data[:-1]) if model != "words" else ():
            with pytest.raises(InvalidInput):
                parse_raw_sequence(broken, catalog.find(model, None).spec, model, "1")


def test_response_is_json_with_the_raw_outputs_after_it() -> None:
    """At once, and in pieces. Numbers have the shortest decimals."""
    label, scores = from_list("label", BYTES, [1, 1], ["ä\n"]), tensor("scores", [[0.1, 0.7, 1e-9]])
    response = InferResponse("words", "1", "ü", {}, [label, integers("ids", [[3, 4]]), scores])
    start = b'{"model_name":"words","model_version":"1","outputs":['
    outputs = [
        b'{"name":"label","datatype":"BYTES","shape":[1,1],"data":["\xc3\xa4\\n"]}',
        b'{"name":"ids","datatype":"INT32","shape":[1,2],"parameters":{"binary_data_size":8}}',
        b'{"name":"scores","datatype":"FP32","shape":[1,3],"data":[0.1,0.7,1e-9]}',
    ]
    header = start + b",".join(outputs) + b'],"id":"\xc3\xbc"}'
    assert encode_response(response, "ids".__eq__) == (header + TWO_IDS, len(header))
    pieces = response_pieces(response, "ids".__eq__)
    assert (b"".join(pieces.json), pieces.tail) == (header, [TWO_IDS])
    whole, length = encode_response(response, "none".__eq__)
    assert length is None and b"".join(response_pieces(response, "none".__eq__).json) == whole


# Templates. tests/frontend/test_hot_path.py compares the replies.

FLAT = {"name": "ids", "datatype": "INT32", "shape": [3], "parameters": {"binary_data_size": 12}}
SCORES = {"name": "scores", "parameters": {"binary_data": True}}
THREE_IDS, FAR = struct.pack("<3i", 1, 2, 3), b"\x08\0\0\0how  far"


def remember(
    templates: Templates,
    catalog: Catalog,
    document: dict[str, Any],
    path: str = "/infer",
    tail: bytes = b"",
) -> TemplateKey:
    key = (path, json.dumps(document).encode())
    request, inputs = parse(document, tail or THREE_IDS)
    templates.remember(key, request, inputs, catalog.find("words", None), [3])
    return key


def test_template_has_the_size_of_its_values(catalog: Catalog) -> None:
    templates = Templates(catalog, Settings())
    template = templates.find(remember(templates, catalog, {"inputs": [FLAT], "outputs": [SCORES]}))
    assert template is not None
    assert template.fits(THREE_IDS) and not template.fits(THREE_IDS[:-1])
    assert template.pack(THREE_IDS) == PackedInputs([3], THREE_IDS)
    assert template.pack(struct.pack("<3i", 1, -1, 3)) is None
    assert template.response_size == 4 * len(models.LABELS)
    text_template = templates.find(
        remember(templates, catalog, {"inputs": [{**FLAT, "name": "text", "datatype": "BYTES", "shape": [1]}]}, tail=FAR)
    )
    assert text_template is not None and text_template.fits(FAR) and not text_template.fits(b"\x07" + FAR[1:]), (
        "the element has a size too"
    )
    lengths = {"name": "lengths", "datatype": "INT32", "shape": [1], "data": [3]}
    assert templates.find(remember(templates, catalog, {"inputs": [FLAT, lengths]})) is None


def test_templates_are_limited_and_end_when_the_served_models_change(catalog: Catalog) -> None:
    copy = Catalog(catalog.served, {})
    templates = Templates(copy, Settings())
    keys = [remember(templates, copy, {"inputs": [FLAT]}, str(number)) for number in range(MAX_TEMPLATES + 2)]
    assert sum(templates.find(key) is not None for key in keys) == 2
    copy.serve([model.key for model in copy.served], {})
    assert templates.find(keys[-1]) is None
