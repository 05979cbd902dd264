"""Builds ModelInferRequest messages: valid, refused and broken."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import Any

from service.frontend.oip.protobuf import METHODS

LIMIT = 1 << 16
"""Size limit of the frontends that get these messages."""
REQUEST = METHODS["ModelInfer"].request_type
QUESTION = b"how far is it"
FAR = b"\x03\0\0\0far"


def tensors(*inputs: tuple[str, str, list[int], bytes], model: str = "words", **fields: Any) -> Any:
    """Return a request with raw contents."""
    message = REQUEST(model_name=model, **fields)
    for name, datatype, shape, data in inputs:
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(data)
    return message


def text(*texts: bytes, **fields: Any) -> Any:
    return tensors(("text", "BYTES", [len(texts)], b"".join([len(one).to_bytes(4, "little") + one for one in texts])), **fields)


def ids(data: bytes, model: str = "speller", **fields: Any) -> Any:
    """Return a request with one sequence of ids."""
    return tensors(("ids", "INT32", [1, len(data) // 4], data), model=model, **fields)


def typed(name: str, datatype: str, shape: list[int], model: Any = "words", **contents: Any) -> Any:
    """Return a request with one input whose values are in typed contents."""
    input = REQUEST.InferInputTensor(name=name, datatype=datatype, shape=shape, contents=contents or None)
    return REQUEST(model_name=model, inputs=[input])


def with_parameters(message: Any, **parameters: Any) -> Any:
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    for name, value in parameters.items():
        setattr(message.parameters[name], kinds[type(value)], value)
    return message


def requesting(message: Any, *names: str, **parameters: int) -> Any:
    for name in names:
        with_parameters(message.outputs.add(name=name), **parameters)
    return message


def corpus() -> list[bytes]:
    """Return messages of every kind: valid, refused and broken."""
    shared = REQUEST(inputs=[{"name": "text", "parameters": {"shared_memory_region": {"string_param": "x"}}}])
    combined = REQUEST(inputs=[{"name": "x", "contents": {"int_contents": [1]}}], raw_input_contents=[QUESTION])
    zeros, lengths = bytes(36), ("lengths", "INT32", [3], struct.pack("<3i", 2, 1, 3))
    sessions = [
        {"sequence_id": id, **flag} for id in ("mine", 7) for flag in ({}, {"sequence_start": True}, {"sequence_end": True})
    ]
    messages = [
        *(text(QUESTION, id=id) for id in ("", "seven", "日本", "x" * 300)),
        *(text(QUESTION, model_version=version) for version in ("1", "9")),
        *(text(QUESTION, model=model) for model in ("nobody", "alias", "")),
        *(text(*texts) for texts in ([QUESTION, QUESTION, b""], [b"a"] * 9, [b"\xff\xfe"], [b"x" * 20_000], [b"x" * LIMIT])),
        *(tensors(("text", "BYTES", shape, FAR)) for shape in ([1, 1], [2, 2], [], [-1], [2**62])),
        *(tensors(("text", datatype, [1], bytes(4))) for datatype in ("BYTES", "FP32", "INT9")),
        *(ids(zeros[:12], model) for model in ("words", "reader", "speller", "embedder", "tagger")),
        *(ids(b"\xff" * 12), tensors(("ids", "INT32", [3, 3], zeros), lengths)),
        *(tensors(("inputs", datatype, [1, 2, 3], zeros[:24]), model="forecaster") for datatype in ("FP32", "FP16")),
        *(
            requesting(text(QUESTION), *names)
            for names in (["label"], ["scores", "label"], ["embedding"], ["x"], ["label"] * 40)
        ),
        requesting(text(QUESTION, QUESTION), "scores", classification=2),
        *(
            with_parameters(text(QUESTION), **each)
            for each in ({"priority": 1}, {"priority": -1}, {"timeout": 5_000_000}, {"x": "y"})
        ),
        *(with_parameters(ids(zeros[:12]), **each) for each in sessions),
        *(typed("text", "BYTES", [size], bytes_contents=[QUESTION]) for size in (1, 2)),
        *(typed("ids", "INT32", [1, 3], **{field: [1, 2, 3]}) for field in ("int_contents", "int64_contents")),
        *(REQUEST(model_name="words"), REQUEST(), shared, combined),
    ]
    valid = text(QUESTION).SerializeToString()
    others = [
        *(b"\xff\xff", valid[:-1], valid + b"\0", valid + b"\x3a\x00", b"\x32\x00" * 5000),
        *(valid + b"\x98\x06\x07", valid + b"\x0b\x0c"),  # an unknown field, a group
        *(b"\x0a\x02\xff\xfe" + valid, valid + b"\x0a\x07speller"),  # two names, one of them not UTF-8
        b"\x0a\x85\x80\x00words" + valid[7:],  # a size in more bytes than it needs
        b"\x2a\x08\x0a\x04text\x18\x01" + valid,  # a shape that is not packed
    ]
    return [*(message.SerializeToString() for message in messages), *others]


def mutated(count: int) -> Iterator[bytes]:
    """Yield small messages with a wrong byte."""
    chance, messages = random.Random(7), [data for data in corpus() if 0 < len(data) < 400]
    for _ in range(count):
        data = bytearray(chance.choice(messages))
        data[chance.randrange(len(data))] = chance.randrange(256)
        yield bytes(data)
