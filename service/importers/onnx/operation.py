"""Defines a node of a graph with its inputs, which the functions that translate operators receive."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import AttributeProto, NodeProto, TensorProto, helper

from service.importers.chain.functions import shortest
from service.importers.chain.nodes import origins_of
from service.importers.chain.reading import Reading
from service.importers.chain.signal import Signal
from service.importers.chain.values import Constant, Value
from service.importers.draft import Array, ImportRefused
from service.importers.onnx.file import inline_array

Axes = list[int]
LISTS = (AttributeProto.INTS, AttributeProto.STRINGS)


@dataclass(slots=True)
class Operation:
    """A node of a graph.

    inputs: their values, with None for inputs that the node leaves out; title: the name in messages of an operation that is no node.
    """

    node: NodeProto
    inputs: list[Value | None]
    reading: Reading
    title: str = ""
    attributes: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.attributes = {attribute.name: attribute_value(attribute) for attribute in self.node.attribute}

    @property
    def label(self) -> str:
        """The node as messages name it."""
        if self.title:
            return self.title
        name = self.node.name or next(iter(self.node.output), "")
        return f"{self.node.op_type} {name}"

    @property
    def origins(self) -> frozenset[str]:
        """The initializers among the inputs."""
        return origins_of(value for value in self.inputs if isinstance(value, Constant))

    @property
    def signal(self) -> Signal:
        """The first input, as a tensor that depends on the sequence."""
        value = self.inputs[0] if self.inputs else None
        if not isinstance(value, Signal):
            raise ImportRefused("its first input does not depend on the sequence as tensors of a model do")
        return value

    def has(self, index: int) -> bool:
        return index < len(self.inputs) and self.inputs[index] is not None

    def constant(self, index: int, name: str) -> Array:
        """Return an input that must be constant."""
        value = self.inputs[index] if index < len(self.inputs) else None
        if not isinstance(value, Constant):
            raise ImportRefused(f"its input {name} is not constant: a model has fixed weights and shapes")
        return value.array

    def weights(self, index: int, name: str) -> Array:
        """Return an input of constant weights."""
        array = self.constant(index, name)
        if array.dtype.kind in "iub" or not array.size:
            raise ImportRefused(
                f"its input {name} has the type {array.dtype} and the shape {array.shape}, which are no weights"
            )
        return array.astype(np.float32 if array.dtype.itemsize <= 4 else np.float64, copy=False)

    def optional_weights(self, index: int, name: str, size: int) -> Array:
        """Return an input of constant weights, or zeros if the node leaves it out."""
        return self.weights(index, name) if self.has(index) else np.zeros(size)

    def integers(self, index: int, name: str) -> Axes:
        """Return an input of a list of constant integers."""
        return [int(number) for number in self.constant(index, name).ravel()]

    def axes(self, rank: int) -> Axes | None:
        """Return the axes of a node, or None if it has none. They are an attribute in old graphs and an input in new graphs."""
        given = self.attributes.get("axes")
        if given is None and self.has(1):
            given = self.integers(1, "axes")
        return None if given is None else [checked_axis(axis, rank) for axis in given]

    def refuse_options(self, **allowed: object) -> None:
        """Raise ImportRefused for attributes with another value than the allowed value."""
        for name, value in allowed.items():
            if self.attributes.get(name, value) != value:
                raise ImportRefused(f"its option {name} is {self.attributes[name]}, and only {value} can be imported")


def checked_axis(axis: int, rank: int) -> int:
    """Return an axis counted from the start; raises ImportRefused if the tensor does not have it."""
    if not -rank <= axis < rank:
        raise ImportRefused(f"it has the axis {axis}, and its input has {rank} axes")
    return axis % rank


def attribute_value(attribute: AttributeProto) -> Any:
    """Return the value of an attribute, with text as str and a tensor as an array."""
    value = helper.get_attribute_value(attribute)
    if isinstance(value, TensorProto):
        return inline_array(value)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if attribute.type in (AttributeProto.FLOAT, AttributeProto.FLOATS):
        return shortest(value) if attribute.type == AttributeProto.FLOAT else [shortest(item) for item in value]
    if attribute.type in LISTS:
        return [item.decode(errors="replace") if isinstance(item, bytes) else item for item in value]
    return value
