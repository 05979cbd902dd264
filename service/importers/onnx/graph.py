"""Interprets a graph: each node computes a constant, or a signal that records the meaning of a tensor."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from service.importers.chain.nodes import origins_of
from service.importers.chain.reading import Reading
from service.importers.chain.settling import weights_below
from service.importers.chain.signal import Signal
from service.importers.chain.values import Constant, Value
from service.importers.draft import UNFIT, Array, ImportRefused, Original, named_in_refusals, refusing
from service.importers.onnx.budget import Budget, number_count, stored
from service.importers.onnx.file import Tensors
from service.importers.onnx.folding import FOLDED, fold
from service.importers.onnx.operation import Operation, attribute_value
from service.importers.onnx.operators import OF_CONSTANTS, OPERATORS
from service.importers.onnx.original import original
from service.importers.onnx.readings import InputPlan

DOMAINS = ("", "ai.onnx")
OPSETS = range(7, 27)
MOST_NODES = 10_000
"""Nodes of a graph and its branches. No more than some hundred layers can be imported, each of some nodes."""
MALFORMED = (*UNFIT, AttributeError, RecursionError)
"""Exceptions for attributes and names with another type or size than ONNX defines."""
DEEPEST_BRANCH = 8
"""If nodes within If nodes."""
FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)


class Graph:
    """The graph of a model, which can be interpreted for several readings of its inputs."""

    def __init__(self, model: ModelProto, tensors: Tensors) -> None:
        graph = model.graph
        self.opset = _opset(model)
        count = _node_count(graph)
        if count > MOST_NODES:
            raise ImportRefused(f"the graph has more than {MOST_NODES} nodes, and no model of as many layers can be imported")
        if not graph.output:
            raise ImportRefused("the graph has no output: export the model again")
        if any(function.domain in DOMAINS for function in model.functions):
            raise ImportRefused("the file redefines operators of ONNX: export the model again")
        _check_names(graph)
        self._model = model
        self._graph = graph
        self._tensors = tensors
        self._initializers = {tensor.name: tensor for tensor in graph.initializer}
        self._constants: dict[str, Constant] = {}
        self.budget = Budget(sum(map(number_count, graph.initializer)), "graph")

    @property
    def inputs(self) -> list[ValueInfoProto]:
        """The inputs that have no values in the file."""
        return [info for info in self._graph.input if info.name not in self._initializers]

    @property
    def outputs(self) -> list[str]:
        return [info.name for info in self._graph.output]

    @property
    def weights(self) -> list[str]:
        """The names of the tensors of floats."""
        return [tensor.name for tensor in self._initializers.values() if tensor.data_type in FLOATS]

    def original(self, plan: InputPlan, steps: int | None) -> Original | None:
        """Return what runs the graph for its first output, or None. steps: the only length that it takes, or None."""
        nodes = _needed(self._graph, self.outputs[:1])
        names = set[str]().union(*map(_read_names, nodes))
        return original(self._model, nodes, names, self._tensors, plan, steps)

    def interpret(self, inputs: Mapping[str, Value], reading: Reading) -> Signal:
        """Return the first output; raises ImportRefused if a node cannot be imported."""
        values = dict(inputs)
        output = self.outputs[0]
        self._run(self._graph, values, reading, [output], depth=0)
        result = values.get(output)
        if not isinstance(result, Signal):
            raise ImportRefused(f"the output {output} does not depend on the sequence")
        return result

    def _run(
        self, graph: GraphProto, values: MutableMapping[str, Value], reading: Reading, outputs: Sequence[str], *, depth: int
    ) -> None:
        """Compute the outputs, and every name on the way to them."""
        for node in _needed(graph, outputs):
            with named_in_refusals(_label(node)), refusing(UNFIT, "its attributes do not fit its inputs", "export it again"):
                inputs = [self._value(name, values) if name else None for name in node.input]
                if node.op_type == "If":
                    results = self._branch(node, inputs, values, reading, depth + 1)
                else:
                    results = self._results(node, inputs, reading)
            values.update({name: result for name, result in zip(node.output, results, strict=False) if name})
            reading.progress += 1

    def _value(self, name: str, values: Mapping[str, Value]) -> Value:
        """Return the value of a name. Initializers are read when a node needs them."""
        if name in values:
            return values[name]
        if name not in self._initializers:
            raise ImportRefused(f"its input {name} is computed after it, or not at all: export the model again")
        if name not in self._constants:
            self._constants[name] = Constant(self._tensors.array(self._initializers[name]), frozenset([name]))
        return self._constants[name]

    def _results(self, node: NodeProto, inputs: list[Value | None], reading: Reading) -> Sequence[Value]:
        if node.domain not in DOMAINS:
            raise ImportRefused(f"it is an operator of {node.domain}: only those of ONNX itself can be imported")
        if node.op_type == "Constant":
            return [Constant(_number(node))]
        for value in inputs:
            self.budget.spend(_cost(value))
        depends = any(value is not None and not isinstance(value, Constant) for value in inputs)
        if not depends and node.op_type in FOLDED:
            constants = [value if isinstance(value, Constant) else None for value in inputs]
            origins = origins_of(value for value in constants if value is not None)
            arrays = fold(node, [None if value is None else value.array for value in constants], self.opset)
            self.budget.spend(sum(array.size for array in arrays))
            return [Constant(array, origins) for array in arrays]
        if node.op_type not in OPERATORS or not (depends or node.op_type in OF_CONSTANTS):
            raise ImportRefused(
                "operators of this type cannot be imported: `seqserve import --layers onnx` lists the operators that can"
            )
        result = OPERATORS[node.op_type](Operation(node, inputs, reading))
        return result if isinstance(result, Sequence) else [result]

    def _branch(
        self, node: NodeProto, inputs: Sequence[Value | None], values: MutableMapping[str, Value], reading: Reading, depth: int
    ) -> Sequence[Value]:
        """Run the branch of an If that its constant condition chooses. It sees the names around it."""
        condition = inputs[0] if inputs else None
        if not isinstance(condition, Constant) or condition.array.size != 1:
            raise ImportRefused("its condition depends on the input")
        if depth > DEEPEST_BRANCH:
            raise ImportRefused(f"it is within {DEEPEST_BRANCH} others")
        chosen = "then_branch" if bool(condition.array) else "else_branch"
        branch = next((attribute.g for attribute in node.attribute if attribute.name == chosen), None)
        if branch is None:
            raise ImportRefused(f"it has no {chosen}")
        constants = {tensor.name: Constant(self._tensors.array(tensor)) for tensor in branch.initializer}
        inner: ChainMap[str, Value] = ChainMap(dict(constants), values)
        outputs = [info.name for info in branch.output]
        self._run(branch, inner, reading, outputs, depth=depth)
        return [self._value(name, inner) for name in outputs]


def _cost(value: Value | None) -> int:
    """Return how many numbers an operator may copy because of an input."""
    if isinstance(value, Constant):
        return stored(value.array)
    return sum(weights_below(part) for part in value.parts) if isinstance(value, Signal) else 0


def _label(node: NodeProto) -> str:
    return f"{node.op_type} node {node.name or next(iter(node.output), '')}"


def _node_count(graph: GraphProto) -> int:
    """Return the number of nodes with those in branches, or more than the limit if there are."""
    graphs, count = [graph], 0
    while graphs and count <= MOST_NODES:
        nodes = graphs.pop().node
        count += len(nodes)
        graphs += [attribute.g for node in nodes[:MOST_NODES] for attribute in node.attribute if attribute.HasField("g")]
    return count


def _check_names(graph: GraphProto) -> None:
    """Raise ImportRefused if a name has two values, or is no text."""
    names = {tensor.name for tensor in graph.initializer} | {info.name for info in graph.input}
    for name in (*names, *(info.name for info in graph.output), *(name for node in graph.node for name in node.input)):
        if not isinstance(name, str):  # protobuf returns bytes for a name that is not UTF-8
            raise ImportRefused(f"the name {name!r} is not UTF-8: export the model again")
    for name in (name for node in graph.node for name in node.output if name):
        if name in names:
            raise ImportRefused(f"the name {name} has several values: export the model again")
        names.add(name)


def _opset(model: ModelProto) -> int:
    version = next((entry.version for entry in model.opset_import if entry.domain in DOMAINS), 1)
    if version not in OPSETS:
        raise ImportRefused(f"the model has opset {version}: export it with an opset from {OPSETS.start} to {OPSETS.stop - 1}")
    return version


def _number(node: NodeProto) -> Array:
    """Return the number or numbers of a Constant."""
    for attribute in node.attribute:
        if attribute.name == "value":
            return np.asarray(attribute_value(attribute))
        if attribute.name in ("value_float", "value_floats", "value_int", "value_ints"):
            return np.array(attribute_value(attribute), np.float32 if "float" in attribute.name else np.int64)
    raise ImportRefused("its value is no tensor of numbers")


def _needed(graph: GraphProto, outputs: Sequence[str]) -> list[NodeProto]:
    """Return the nodes on which outputs depend, in the order of the graph."""
    names, needed = set(outputs), []
    for node in reversed(graph.node):
        if not names.isdisjoint(node.output):
            names |= _read_names(node)
            needed.append(node)
    return needed[::-1]


def _read_names(node: NodeProto) -> set[str]:
    """Return the names that a node reads, those within its branches included."""
    inner = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    names = set(node.input) | {info.name for graph in inner for info in graph.output}
    return names.union(*(_read_names(each) for graph in inner for each in graph.node))
