"""The tensors of a model in the Open Inference Protocol, as its spec describes them."""

from __future__ import annotations

from typing import NamedTuple

from service.modeling.spec import ClassifyHead, EmbedHead, ModelSpec, NextHead, RegressHead, SequenceHead, SpanHead, TagHead

BYTES = "BYTES"
"""The datatype of strings."""
LENGTHS, OFFSETS = "lengths", "offsets"
STATE = "state."
"""Prefix of the tensors of the states of recurrent layers: inputs to start from them, outputs to get them."""


class TensorMetadata(NamedTuple):
    """An input or output tensor of a model. dims: the dimensions of one sequence; -1 accepts any size."""

    name: str
    datatype: str
    dims: tuple[int, ...]


def inputs(spec: ModelSpec) -> list[TensorMetadata]:
    """Return the input that every request to a model needs, unless it sends one of `other_inputs` instead.

    The metadata lists no other: load generators send every input that it lists, or refuse to start without a shape of each.
    """
    if spec.input.features is not None:
        return [TensorMetadata("inputs", "FP32", (-1, spec.input.features))]
    return [TensorMetadata("text", BYTES, (1,)) if spec.input.kind == "text" else TensorMetadata("ids", "INT32", (-1,))]


def other_inputs(spec: ModelSpec) -> list[str]:
    """Return the names of the inputs that a request may also have: ids instead of a text, the layout of its sequences, states."""
    return [*(["ids"] if spec.input.kind == "text" else []), LENGTHS, OFFSETS, *(tensor.name for tensor in state_tensors(spec))]


def outputs(spec: ModelSpec) -> list[TensorMetadata]:
    """Return the outputs of a model: the head's outputs, then the outputs that a request must name to receive them."""
    head = head_outputs(spec)
    extra = [TensorMetadata("embedding", "FP32", (spec.embedding_width,))] if spec.has_embedding else []
    if spec.has_steps:
        layout = [TensorMetadata(LENGTHS, "INT32", (1,)), TensorMetadata(OFFSETS, "INT32", (-1,))]
        extra += [TensorMetadata("sequence", "FP32", (-1, spec.output_width)), *layout]
    return [*head, *(tensor for tensor in extra if tensor not in head)]


def state_tensors(spec: ModelSpec) -> list[TensorMetadata]:
    """Return the tensors of a model's states. A request may send them as inputs and ask for them as outputs.

    They are not part of the metadata: some clients ask for every output that it lists.
    """
    return [TensorMetadata(f"{STATE}{name}", "FP32", (width,)) for name, width in spec.states.items()]


def head_outputs(spec: ModelSpec) -> list[TensorMetadata]:
    """Return the outputs of a model's head."""
    match spec.head:
        case ClassifyHead(labels=labels):
            return [
                TensorMetadata("label", BYTES, (1,)),
                TensorMetadata("score", "FP32", (1,)),
                TensorMetadata("scores", "FP32", (len(labels),)),
            ]
        case RegressHead(outputs=count):
            return [TensorMetadata("value", "FP32", (count,))]
        case TagHead():
            return [TensorMetadata("labels", BYTES, (-1,)), TensorMetadata("scores", "FP32", (-1,))]
        case SpanHead():
            return [
                TensorMetadata("start", "INT32", (1,)),
                TensorMetadata("end", "INT32", (1,)),
                TensorMetadata("score", "FP32", (1,)),
            ]
        case NextHead(top=top):
            return [TensorMetadata("ids", "INT32", (top,)), TensorMetadata("scores", "FP32", (top,))]
        case EmbedHead():
            return [TensorMetadata("embedding", "FP32", (spec.embedding_width,))]
        case SequenceHead():
            return [TensorMetadata("sequence", "FP32", (-1, spec.output_width))]


class TensorNames(NamedTuple):
    """The names of the tensors that a request may send, and ask for. They are looked up for each request."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @classmethod
    def of(cls, spec: ModelSpec) -> TensorNames:
        required, returned = inputs(spec), (*outputs(spec), *state_tensors(spec))
        return cls((*(each.name for each in required), *other_inputs(spec)), tuple([each.name for each in returned]))
