"""ModelInfer messages: reading of requests, and writing of responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from google.protobuf.message import DecodeError
from grpc_tools import protoc
from tritonclient.grpc import model_config_pb2, service_pb2

from service.errors import InvalidRequest, ServiceError, TooLarge
from service.frontend.grpc.messages import ClassifyWriter, read_request, response_parts, split_request
from service.frontend.oip import protobuf
from service.frontend.oip.infer import build_response
from service.frontend.oip.inputs import InputTensors
from service.frontend.oip.limits import MAX_PARTS
from service.frontend.oip.protobuf import METHODS, POOL
from service.frontend.oip.tensors import DATATYPES, encode
from service.frontend.oip.types import InferRequest
from service.frontend.run.catalog import Catalog
from service.ipc.messages.inference import Answer
from service.modeling.spec.heads import ClassifyHead
from tests.frontend.oip.harness import InferHarness, three_sequences
from tests.frontend.oip.messages import QUESTION, REQUEST, mutated, requesting, text, typed, with_parameters

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


def converted(message: Any) -> tuple[InferRequest, InputTensors]:
    return read_request(split_request(message.SerializeToString()))


def test_typed_contents_are_read_by_datatype() -> None:
    samples: dict[str, Any] = {"BOOL": True, "BYTES": b"words"}
    for datatype, field in [(name, each.contents) for name, each in DATATYPES.items() if each.contents]:
        value = samples.get(datatype, 7)
        [tensor] = converted(typed("x", datatype, [1], **{field: [value]}))[1].tensors
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


def test_head_of_a_message_is_read_once_for_all_values() -> None:
    """Also with an id, parameters, and requested outputs."""
    message = requesting(with_parameters(text(QUESTION, id="1", model_version="2"), priority=1), "label")
    for id, question in (("1", QUESTION), ("", b"who"), ("ä", b"")):
        message.id, message.raw_input_contents[0] = id, len(question).to_bytes(4, "little") + question
        request, inputs = converted(message)
        assert (request.model, request.version, request.id, request.parameters) == ("words", "2", id, {"priority": 1})
        assert [output.name for output in request.outputs] == ["label"] and inputs.tensors[0].values == [question]


def test_message_with_a_wrong_byte_is_read_or_refused() -> None:
    """It is never read if the library refuses it."""
    read = 0
    for data in mutated(3000):
        try:
            read_request(split_request(data))
            read += 1
            METHODS["ModelInfer"].parse(data)
        except DecodeError as error:
            raise AssertionError(data) from error
        except ServiceError as error:
            assert error.message
    assert read > 300


def test_response_is_written_as_by_the_library(harness: InferHarness) -> None:
    for name in ("words", "tagger", "speller", "halver"):
        response = msgspec.structs.replace(harness.infer(name, *three_sequences(name)), parameters={"sequence_steps": 7})
        data = b"".join(response_parts(response))
        message = METHODS["ModelInfer"].response_type.FromString(data)
        assert message.SerializeToString() == data
        assert (message.model_name, message.model_version, message.id) == (name, "1", "7")
        assert message.parameters["sequence_steps"].int64_param == 7
        described = [(output.name, output.datatype, tuple(output.shape)) for output in message.outputs]
        assert described == [(tensor.name, tensor.datatype, tensor.shape) for tensor in response.outputs]
        assert list(message.raw_output_contents) == [bytes(encode(tensor)) for tensor in response.outputs]


def test_classes_are_written_together_as_alone(catalog: Catalog) -> None:
    """Those of one tick: they have different numbers of sequences."""
    model = catalog.find("words", None)
    assert isinstance(model.spec.head, ClassifyHead)
    scores = np.random.default_rng(7).random((26, 3), np.float32)
    parts = [("a", scores[:2]), ("", scores[2:3]), ("c" * 200, scores[3:])]
    answers = [(id, Answer(scores=part.shape, steps=[1] * len(part)), part.tobytes()) for id, part in parts]
    writer = ClassifyWriter(model, model.spec.head)
    for written, (id, answer, data) in zip(writer.write_all(answers) or [], answers, strict=True):
        response = build_response(InferRequest("words", "", id, {}, [], "text"), model, answer, data)
        assert written == b"".join(response_parts(response))
    infinite = np.array([[1, np.inf, 0]], np.float32).tobytes()
    plain, of_session = (Answer(scores=(1, 3), steps=[1], session_steps=steps) for steps in (0, 1))
    for answer, data in ((plain, infinite), (plain, bytes(24)), (of_session, bytes(12))):
        assert writer.write_all([("", answer, data)]) is None


# Requests in parts.

TAGS = {"parameters": b"\x22\0", "inputs": b"\x2a\0", "outputs": b"\x32\0", "raw_input_contents": b"\x3a\0"}


def test_head_of_a_message_has_neither_id_nor_values() -> None:
    plain, named = text(QUESTION).SerializeToString(), text(QUESTION, id="seven").SerializeToString()
    without, parts = split_request(plain), split_request(named)
    assert (without.head, without.id, parts.id) == (parts.head, "", "seven")
    assert [bytes(values) for values in parts.contents] == [len(QUESTION).to_bytes(4, "little") + QUESTION]
    assert split_request(REQUEST(id="six").SerializeToString() + named).id == "seven", "the last id counts"


def test_split_message_is_the_message() -> None:
    whole = with_parameters(REQUEST(model_name="m", id="ä" * 40), a=2.5)
    for index in range(5):
        whole.inputs.add(name=f"x{index}", shape=[1, 300])
        whole.raw_input_contents.append(bytes([index]) * index * 100)
    unknown = b"\xfd\x7f\1\2\3\4" + b"\xf9\x7f" + bytes(8) + b"\xf8\x7f\x80\1" + b"\x0b\x3a\0\x0c"
    parts = split_request(whole.SerializeToString() + unknown)
    assert [bytes(raw) for raw in parts.contents] == list(whole.raw_input_contents)
    rest = REQUEST.FromString(parts.head)
    assert (rest.inputs, rest.parameters["a"], parts.id) == (whole.inputs, whole.parameters["a"], whole.id)
    assert not rest.raw_input_contents and parts.head.endswith(unknown)


def test_message_of_many_parts_is_refused() -> None:
    """Its id is known."""
    named = REQUEST(id="seven").SerializeToString()
    for field, tag in TAGS.items():
        assert split_request(tag * MAX_PARTS).refusal is None
        for count in (MAX_PARTS + 1, 5000):
            parts = split_request(named + tag * count)
            assert parts.id == "seven" and parts.refusal is not None and parts.refusal.field == field
            with pytest.raises(TooLarge):
                read_request(parts)
    assert "fields" in str(split_request(b"\xf8\x7f\0" * 1000).refusal), "unknown fields"


@pytest.mark.parametrize(
    "data", [b"\x2a\xff\xff\xff\xff\x0f", b"\x2a\x05", b"\x80" * 12, b"\x2b", b"\x0d\0", b"\x09\0\0", b"\x1a\1\xff", b"\xba"]
)
def test_broken_message_is_refused(data: bytes) -> None:
    for broken in (data, text(QUESTION).SerializeToString() + data):
        with pytest.raises(InvalidRequest, match=r"not a valid inference\.ModelInferRequest"):
            read_request(split_request(broken))
