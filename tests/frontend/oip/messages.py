"""Builds ModelInferRequest messages: valid, refused and broken."""

from __future__ import annotations

from typing import Any

import numpy as np

from service.frontend.oip.protobuf import METHODS

LIMIT = 1 << 16
"""Size limit of the frontends that get these messages."""
REQUEST = METHODS["ModelInfer"].request_type
QUESTION = b"how far is it"
FAR = b"\x03\0\0\0far"
ROWS = np.ones((1, 2, 3), "f4").tobytes()


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


def typed(name: str, datatype: str, shape: list[int], model: str = "words", **contents: Any) -> Any:
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
    """Return messages of every kind."""
    shared, empty, both = text(QUESTION), text(QUESTION), typed("text", "BYTES", [1], bytes_contents=[QUESTION])
    shared.inputs[0].parameters["shared_memory_region"].string_param = "x"
    empty.parameters["priority"].SetInParent()
    both.raw_input_contents.append(QUESTION)
    three = ("ids", "INT32", [1, 3], bytes(12))
    shapes: list[tuple[str, list[int], bytes]] = [
        *(("BYTES", [1, 1], FAR), ("BYTES", [2, 2], FAR * 4), ("BYTES", [1], b"\x09\0\0\0far"), ("BYTES", [1], b"")),
        *(("BYTES", [], FAR), ("BYTES", [-1], FAR), ("BYTES", [2**62], FAR), ("INT9", [1], b"far"), ("FP32", [1], bytes(4))),
    ]
    parameters: list[dict[str, Any]] = [
        *({"priority": 1}, {"priority": -1}, {"timeout": 5_000_000}, {"timeout": 10**12}, {"timeout": "soon"}),
        *({"sequence_start": True}, {"sequence_id": 1.5}, {"sequence_id": 0}, {"unknown": "x"}),
    ]
    sessions = [
        {"sequence_id": id, **flag} for id in ("mine", 7) for flag in ({}, {"sequence_start": True}, {"sequence_end": True})
    ]
    messages = [
        *(
            text(QUESTION, **fields)
            for fields in ({}, {"id": "seven"}, {"id": "日本", "model_version": "1"}, {"id": "x" * 300})
        ),
        *(text(QUESTION, model_version="9"), text(QUESTION, QUESTION, b""), text(*[b"a"] * 9)),
        *(text(QUESTION, model=model) for model in ("nobody", "alias", "")),
        *(text(b"\xff\xfe"), text(b"x" * 20_000)),
        *(tensors(("text", *shape)) for shape in shapes),
        *(tensors(("text", "BYTES", [1], FAR), second) for second in (three, ("text", "BYTES", [1], FAR))),
        *(tensors((name, "BYTES", [1], FAR)) for name in ("other", "x" * 300)),
        *(ids(bytes(12), model) for model in ("words", "reader", "speller", "embedder", "tagger")),
        *(ids(b"\xff" * 12), tensors(("ids", "INT64", [1, 2], bytes(16)))),
        tensors(("ids", "INT32", [3, 3], bytes(36)), ("lengths", "INT32", [3], b"\2\0\0\0\1\0\0\0\3\0\0\0")),
        tensors(("ids", "INT32", [1, 6], bytes(24)), ("offsets", "INT32", [4], b"\0\0\0\0\2\0\0\0\3\0\0\0\6\0\0\0")),
        *(
            tensors(("inputs", "FP32", shape, data), model="forecaster")
            for shape, data in (([1, 2, 3], ROWS), ([2, 3], b"\xff" * 24))
        ),
        *(tensors(("inputs", datatype, [1, 2, 3], bytes(12)), model="forecaster") for datatype in ("FP16", "BF16")),
        *(
            requesting(text(QUESTION), *names)
            for names in (["label"], ["scores", "label"], ["embedding"], ["x"], ["label"] * 40)
        ),
        requesting(text(QUESTION, QUESTION), "scores", classification=2),
        *(with_parameters(text(QUESTION), **each) for each in parameters),
        *(with_parameters(ids(bytes(12)), **each) for each in sessions),
        with_parameters(tensors(("ids", "INT32", [2, 3], bytes(24)), model="speller"), sequence_id="mine"),
        *(typed("text", "BYTES", [size], bytes_contents=[QUESTION]) for size in (1, 2)),
        *(typed("ids", "INT32", [1, 3], **{field: [1, 2, 3]}) for field in ("int_contents", "int64_contents")),
        *(typed("inputs", datatype, [1, 1, 3], "forecaster", fp32_contents=[1, 2, 3]) for datatype in ("FP32", "FP16")),
        *(REQUEST(model_name="words"), REQUEST(), shared, empty, both),
    ]
    valid = text(QUESTION).SerializeToString()
    broken = [
        *(b"\xff\xff", valid[:-1], valid + b"\0", valid + b"\x0a", valid + b"\x3a\x00"),
        *(valid + b"\x98\x06\x07", valid + b"\x0b\x0c"),  # an unknown field, a group
        *(
            b"\x0a\x02\xff\xfe" + valid,
            valid + b"\x0a\x07speller",
            valid + b"\x0a\x09speller",
        ),  # two names, one of them not UTF-8
        b"\x0a\x85\x80\x00words" + valid[7:],  # a size in more bytes than it needs
        b"\x2a\x08\x0a\x04text\x18\x01" + valid,  # a shape that is not packed
        text(b"x" * LIMIT).SerializeToString(),
        b"\x32\x00" * 5000,
    ]
    return [*(message.SerializeToString() for message in messages), *broken]
