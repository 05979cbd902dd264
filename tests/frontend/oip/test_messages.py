"""ModelInfer messages: the scan before they are read, the conversion by protobuf, and reading and writing by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpc_tools import protoc
from tritonclient.grpc import model_config_pb2, service_pb2

from service.errors import InvalidRequest, ServiceError, TooLarge
from service.frontend.grpc.messages import ClassifyWriter, read_request, split_head, write_response
from service.frontend.oip import protobuf, wire
from service.frontend.oip.infer import build_response
from service.frontend.oip.inputs import InputTensors
from service.frontend.oip.limits import MAX_PARTS
from service.frontend.oip.protobuf import CONTENTS_FIELDS, METHODS, POOL
from service.frontend.oip.tensors import encode
from service.frontend.oip.types import InferRequest
from service.frontend.run.catalog import Catalog
from service.ipc.messages.inference import Answer
from service.modeling.spec.heads import ClassifyHead
from tests.frontend.oip.harness import InferHarness, three_sequences
from tests.frontend.oip.messages import QUESTION, REQUEST, corpus, mutated, requesting, tensors, text, typed, with_parameters

FOLDER, FILE = Path(protobuf.__file__).parent, POOL.FindFileByName("inference.proto")


def test_compiled_file_is_up_to_date(tmp_path: Path) -> None:
    compiled = tmp_path / "inference.binpb"
    arguments = ["", f"--proto_path={FOLDER}", f"--descriptor_set_out={compiled}", "inference.proto"]
    assert protoc.main(arguments) == 0
    assert compiled.read_bytes() == (FOLDER / "inference.binpb").read_bytes(), "run make proto"


def fields_of(messages: Any) -> dict[tuple[str, str], tuple[Any, ...]]:
    """Return number, type and label of all fields of messages and of the messages in them, by name."""
    fields = {}
    for message in messages:
        fields.update({(message.name, field.name): (field.number, field.type, field.label) for field in message.fields})
        fields.update(fields_of(message.nested_types))
    return fields


def test_messages_are_those_of_the_client() -> None:
    """Methods, fields, and values of enumerations have the names, numbers and types of the client's own file."""

    def numbers(kind: Any) -> dict[str, int]:
        return {value.name: value.number for value in kind.values}

    def methods(file: Any) -> set[tuple[Any, ...]]:
        methods = file.services_by_name["GRPCInferenceService"].methods
        return {(each.name, each.input_type.name, each.output_type.name, each.server_streaming) for each in methods}

    client, types = service_pb2.DESCRIPTOR, model_config_pb2.DESCRIPTOR
    known = fields_of([*client.message_types_by_name.values(), *types.message_types_by_name.values()])
    own = fields_of(FILE.message_types_by_name.values())
    others = {name: field for name, field in own.items() if known.get(name) != field}
    assert not others
    for name, kind in FILE.enum_types_by_name.items():
        assert numbers(kind) == numbers(types.enum_types_by_name[name])
    assert methods(FILE) == methods(client)


def converted(message: Any) -> InferRequest:
    return protobuf.infer_request(METHODS["ModelInfer"].parse(message.SerializeToString()))


def test_typed_contents_are_read_by_datatype() -> None:
    samples: dict[str, Any] = {"BOOL": True, "BYTES": b"words"}
    for datatype, field in CONTENTS_FIELDS.items():
        value = samples.get(datatype, 7)
        [tensor] = converted(typed("x", datatype, [1], **{field: [value]})).inputs
        assert (tensor.name, tensor.datatype, list(tensor.values)) == ("x", datatype, [value])


TYPED = {"name": "x", "datatype": "FP32", "shape": [1], "contents": {"fp32_contents": [1]}}
SHARED = {"name": "x", "parameters": {"shared_memory_region": {"string_param": "mine"}}}
MANY: dict[str, Any] = {f"p{number}": 1 for number in range(MAX_PARTS + 1)}
INVALID: list[tuple[Any, str, str]] = [
    (typed("x", "FP32", [1]), "x", "0 values"),
    (typed("x", "FP32", [1], fp64_contents=[1]), "x", "0 values"),
    (typed("x", "FP33", [1], fp64_contents=[1]), "x", "FP33"),
    (typed("x", "FP16", [1], fp32_contents=[1]), "x", "only as raw bytes"),
    (typed("x", "INT8", [1], int_contents=[300]), "x", "cannot hold"),
    (REQUEST(inputs=[TYPED], raw_input_contents=[b""]), "x", "has contents, but the request has raw_input_contents too"),
    (REQUEST(inputs=[{"name": "x"}], raw_input_contents=[b"", b""]), "raw_input_contents", "2 entries for 1 inputs"),
    (REQUEST(parameters={"priority": {}}), "parameters.priority", "has no value"),
    (REQUEST(inputs=[SHARED]), "x", "send the tensor's data"),
    (with_parameters(REQUEST(), **MANY), "parameters", str(MAX_PARTS)),
    (requesting(REQUEST(), "x", **MANY), "parameters", str(MAX_PARTS)),
    (REQUEST(inputs=[{"name": "x"}] * (MAX_PARTS + 1)), "inputs", str(MAX_PARTS)),
    (REQUEST(raw_input_contents=[b""] * (MAX_PARTS + 1)), "raw_input_contents", str(MAX_PARTS)),
]


@pytest.mark.parametrize(("message", "field", "text"), INVALID, ids=range(len(INVALID)))
def test_invalid_message_is_rejected_by_name(message: Any, field: str, text: str) -> None:
    with pytest.raises(ServiceError) as raised:
        converted(message)
    assert raised.value.field == field and text in raised.value.message


def result(read: Any, data: bytes) -> Any:
    """Return all parts of a request, or its error."""
    try:
        request = read(data)
    except ServiceError as error:
        return type(error), error.field, error.message
    if request is None:
        return None
    inputs = [(tensor.name, tensor.datatype, tensor.shape, encode(tensor)) for tensor in request.inputs]
    return request.model, request.version, request.id, request.parameters, request.outputs, inputs


def test_messages_read_by_hand_are_read_as_by_protobuf() -> None:
    """Also with a wrong byte. Unusual messages are left to protobuf."""
    messages = [*corpus(), *mutated(3000)]
    by_hand = [result(read_request, data) for data in messages]
    for data, actual in zip(messages, by_hand, strict=True):
        if actual is not None:
            assert actual == result(lambda data: protobuf.infer_request(METHODS["ModelInfer"].parse(data)), data), data
    assert sum(actual is not None for actual in by_hand) > 300

    def is_by_hand(message: Any) -> bool:
        return read_request(message.SerializeToString()) is not None

    assert is_by_hand(requesting(text(QUESTION, id="1", model_version="2"), "label"))
    assert is_by_hand(tensors(("x", "INT8", [200, 1], bytes(200))))
    assert not is_by_hand(with_parameters(text(QUESTION), priority=1))
    assert not is_by_hand(requesting(text(QUESTION), *["label"] * 14))


def test_answers_are_written_as_by_protobuf(harness: InferHarness, catalog: Catalog) -> None:
    """Those of one tick together: they have different numbers of sequences."""
    for name in ("words", "tagger", "speller", "halver"):
        response = harness.infer(name, *three_sequences(name))
        assert write_response(response) == protobuf.infer_response(response).SerializeToString()
    model = catalog.find("words", None)
    assert isinstance(model.spec.head, ClassifyHead)
    scores = np.random.default_rng(7).random((26, 3), np.float32)
    parts = [("a", scores[:2]), ("", scores[2:3]), ("c" * 200, scores[3:])]
    answers = [(id, Answer(scores=part.shape, steps=[1] * len(part)), part.tobytes()) for id, part in parts]
    writer = ClassifyWriter(model, model.spec.head)
    for written, (id, answer, data) in zip(writer.write_all(answers) or [], answers, strict=True):
        response = build_response(InferRequest("words", "", id, {}, [], []), InputTensors([]), model, answer, data)
        assert written == write_response(response) == protobuf.infer_response(response).SerializeToString()
    infinite = np.array([[1, np.inf, 0]], np.float32).tobytes()
    assert writer.write_all([("", Answer(scores=(1, 3), steps=[1]), infinite)]) is None
    plain, of_session = (Answer(scores=(1, 3), steps=[1], session_steps=steps) for steps in (0, 1))
    assert [writer.accepts(*each) for each in ((plain, bytes(12)), (plain, bytes(24)), (of_session, bytes(12)))] == [
        *(True, False, False)
    ]


def test_head_of_a_message_has_neither_id_nor_values() -> None:
    plain, named = text(QUESTION).SerializeToString(), text(QUESTION, id="seven").SerializeToString()
    without, parts = split_head(plain), split_head(named)
    assert without is not None and parts is not None
    assert (without.key, without.id) == (parts.key, "")
    assert (parts.id, bytes(parts.values)) == ("seven", len(QUESTION).to_bytes(4, "little") + QUESTION)
    assert without.key + bytes(without.values) == plain
    longer = split_head(text(QUESTION * 20).SerializeToString())
    assert longer is not None and longer.key != without.key  # a form has a size
    two_ids = REQUEST(id="six").SerializeToString() + named
    others = [named[:-1], named + named[:2], named + REQUEST(id="eight").SerializeToString(), two_ids, b"", b"\x08\x01" + named]
    others += [named.replace(b"seven", b"sev\xffn"), text(QUESTION, model="m" * 2000).SerializeToString(), b"\xba\x00" + named]
    assert [split_head(message) for message in others] == [None] * len(others)


# The scan.

TAGS = {"parameters": b"\x22\0", "inputs": b"\x2a\0", "outputs": b"\x32\0", "raw_input_contents": b"\x3a\0"}


def test_split_message_is_the_message() -> None:
    whole = with_parameters(REQUEST(model_name="m", id="ä" * 40), a=2.5)
    for index in range(5):
        whole.inputs.add(name=f"x{index}", shape=[1, 300])
        whole.raw_input_contents.append(bytes([index]) * index * 100)
    data = whole.SerializeToString() + b"\xfd\x7f\1\2\3\4" + b"\xf9\x7f" + bytes(8) + b"\xf8\x7f\x80\1"  # unknown fields
    split = wire.split(data)
    assert [bytes(raw) for raw in split.raw_contents] == list(whole.raw_input_contents)
    assert (wire.request_id(data), wire.structured_bytes(data)) == (whole.id, len(split.message))
    del whole.raw_input_contents[:]
    rest = REQUEST.FromString(split.message)
    assert (rest.inputs, rest.parameters["a"], rest.id) == (whole.inputs, whole.parameters["a"], whole.id)
    assert (wire.request_id(data[:-1]), wire.structured_bytes(data[:-1])) == ("", 0), "not a message"


def test_message_of_many_parts_is_refused() -> None:
    for field, tag in TAGS.items():
        wire.split(tag * MAX_PARTS)
        with pytest.raises(TooLarge) as raised:
            wire.split(tag * (MAX_PARTS + 1))
        assert raised.value.field == field
    with pytest.raises(TooLarge):
        wire.split(b"\xf8\x7f\0" * 1000)  # unknown fields


@pytest.mark.parametrize("data", [b"\x2a\xff\xff\xff\xff\x0f", b"\x2a\x05", b"\x80" * 12, b"\x2b", b"\x0d\0", b"\x09\0\0"])
def test_broken_message_is_refused_as_by_the_library(data: bytes) -> None:
    with pytest.raises(wire.NotAMessage):
        wire.split(data)
    with pytest.raises(InvalidRequest, match=r"not a valid inference\.ModelInferRequest"):
        METHODS["ModelInfer"].parse(data)
