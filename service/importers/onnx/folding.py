"""Computes values that do not depend on an input: shapes, slices of weights, masks. Every graph is bounded in size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from onnx import NodeProto, TensorProto, helper
from onnx.reference import ReferenceEvaluator

from service.importers.draft import Array, ImportRefused
from service.importers.onnx.budget import LARGEST, stored

ELEMENTWISE = (
    *("Abs", "Add", "And", "Cast", "Ceil", "Clip", "Div", "Equal", "Exp", "Floor", "Greater", "GreaterOrEqual", "Identity"),
    *("Less", "LessOrEqual", "Log", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Pow", "Reciprocal", "Relu", "Sigmoid"),
    *("Sqrt", "Sub", "Tanh", "Where"),
)
SHAPING = (
    *("Concat", "Flatten", "Gather", "GatherElements", "ReduceL2", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum"),
    *("Reshape", "ScatterElements", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"),
)
GROWING = ("Range", "Tile")
FOLDED = frozenset((*ELEMENTWISE, *SHAPING, *GROWING))


def fold(node: NodeProto, inputs: Sequence[Array | None], opset: int) -> list[Array]:
    """Return the outputs of a node with constant inputs; raises ImportRefused if that cannot be computed."""
    arrays = [array for array in inputs if array is not None]
    largest = max([LARGEST, *map(stored, arrays)])
    try:
        if _size(node, arrays) > largest:
            raise ImportRefused(f"it computes a constant of more than {largest} numbers")
        with np.errstate(all="ignore"):
            outputs = evaluator(node, inputs, opset)(inputs)
    except ImportRefused:
        raise
    except Exception as error:  # the evaluator raises whatever NumPy and its own checks raise
        raise ImportRefused(f"its constant inputs do not fit it: {error}") from error
    return [np.asarray(output) for output in outputs]


def _size(node: NodeProto, arrays: Sequence[Array]) -> int:
    """Return how many numbers the outputs of a node have at most."""
    if node.op_type in ELEMENTWISE:
        return math.prod(np.broadcast_shapes(*(array.shape for array in arrays)))
    if node.op_type == "Range":
        start, limit, delta = (float(array.item()) for array in arrays)
        return math.ceil(max(0.0, (limit - start) / delta)) if delta else LARGEST + 1
    if node.op_type == "Tile":
        return arrays[0].size * math.prod(int(count) for count in arrays[1])
    if node.op_type in ("Gather", "GatherElements"):
        return max(1, arrays[0].size) * max(1, arrays[1].size)
    return sum(array.size for array in arrays)


def evaluator(node: NodeProto, inputs: Sequence[object], opset: int) -> Callable[[Sequence[Array | None]], list[Array]]:
    """Return what computes the outputs of a node as ONNX defines them. inputs: None for inputs that the node leaves out."""
    names = [name for name, value in zip(node.input, inputs, strict=True) if value is not None]
    values = [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in dict.fromkeys(names)]
    outputs = [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in node.output if name]
    graph = helper.make_graph([node], "constant", values, outputs)
    model = ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)]))

    def evaluate(arrays: Sequence[Array | None]) -> list[Array]:
        return list(model.run(None, dict(zip(names, (array for array in arrays if array is not None), strict=True))))

    return evaluate
