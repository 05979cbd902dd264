"""Makes small ONNX graphs with distinct random weights, and compares imported models with ONNX Runtime, sequence by sequence."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from service.importers.draft import Draft, ImportRefused
from service.importers.onnx import read
from service.modeling.array_run import run_arrays
from service.modeling.encoder import Encoder
from service.modeling.spec import ModelSpec

Array = NDArray[Any]
FEATURES, VOCABULARY = 3, 11
LENGTHS = (7, 3, 12, 5)
TOLERANCE = 1e-5
CHANNELS_FIRST = (0, 2, 1)
Operator = Callable[["Net", str], str] | tuple[Any, ...]
CPU = torch.device("cpu")
onnxruntime.set_default_logger_severity(3)  # warnings about unused initializers


@dataclass(frozen=True)
class Case:
    """A tested option.

    graph: returns a model that needs it; refused: words of the refusal, or empty if the graph imports; more: whether it runs only in
    tests/long; axes: where (batch, steps, features) are in its input; reference: whether ONNX Runtime cannot run it, and onnx.reference
    does; lengths: steps of the sequences with which it is compared.
    """

    name: str
    graph: Callable[[], ModelProto]
    refused: str = ""
    more: bool = False
    axes: Sequence[int] | None = None
    reference: bool = False
    lengths: Sequence[int] = LENGTHS

    def __str__(self) -> str:
        return self.name


class Net:
    """A graph in the making. Its input is x: (batch, steps, features) or (batch, steps) ids, unless `shape` says otherwise."""

    def __init__(self, shape: Sequence[int | str | None] | None = None, *, ids: bool = False, opset: int = 17) -> None:
        self.random = np.random.default_rng(0)
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[TensorProto] = []
        default = ("batch", "steps") if ids else ("batch", "steps", FEATURES)
        self.inputs = [helper.make_tensor_value_info("x", TensorProto.INT64 if ids else TensorProto.FLOAT, shape or default)]

    def add(self, operator: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        """Add a node; return its output, or the first of several: the others have the numbers 1, 2, ... after a dot."""
        name = f"{operator.lower()}_{len(self.nodes)}"
        names = [name, *(f"{name}.{number}" for number in range(1, outputs))]
        self.nodes.append(helper.make_node(operator, inputs, names, name=name, **attributes))
        return name

    def chain(self, x: str, *operators: Operator) -> str:
        """Add operators in a row; return the output of the last.

        Each is a function of the graph and the tensor before it, or (name, *operands, attributes): the tensor before it is the first
        operand unless "_" stands for it; "x" is the tensor before all of them, other texts are names; numbers and arrays are constants.
        """
        y = x
        for operator in operators:
            if callable(operator):
                y = operator(self, y)
                continue
            name, *operands = operator
            attributes = operands.pop() if operands and isinstance(operands[-1], dict) else {}
            places: dict[Any, str] = {"_": y, "x": x, None: ""}
            is_placed = any(isinstance(each, str) and each == "_" for each in operands)
            placed = operands if is_placed else ["_", *operands]
            named: list[Any] = [
                places.get(each, each) if isinstance(each, str | None) else self.constant(each) for each in placed
            ]
            y = self.add(name, *named, **attributes)
        return y

    def weight(self, *shape: int, scale: float = 0.5) -> str:
        """Add random weights."""
        return self.constant((self.random.normal(size=shape) * scale).astype(np.float32))

    def positive(self, *shape: int) -> str:
        return self.constant(self.random.uniform(0.5, 1.5, size=shape).astype(np.float32))

    def constant(self, array: Array | Sequence[int] | float) -> str:
        """Add an initializer; integers are int64, and a number is float32."""
        name = f"weight_{len(self.initializers)}"
        values = np.asarray(array, np.float32 if isinstance(array, float) else None)
        self.initializers.append(numpy_helper.from_array(values, name))
        return name

    def input(self, name: str, kind: int, *shape: int | str) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def dense(self, x: str, inputs: int, outputs: int) -> str:
        return self.add("Add", self.add("MatMul", x, self.weight(inputs, outputs)), self.weight(outputs))

    def model(self, *outputs: str) -> ModelProto:
        names = outputs or (self.nodes[-1].output[0],)
        infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names]
        graph = helper.make_graph(self.nodes, "test", self.inputs, infos, self.initializers)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)


def graph(*operators: Operator, **options: Any) -> Callable[[], ModelProto]:
    """Return a function that makes the graph of a chain over its input. options: of Net."""

    def build() -> ModelProto:
        net = Net(**options)
        return net.model(net.chain("x", *operators))

    return build


def dense(inputs: int, outputs: int) -> Operator:
    return lambda net, x: net.dense(x, inputs, outputs)


def channels(net: Net, x: str) -> str:
    """Move the columns before the steps, where a convolution has them, or back."""
    return net.add("Transpose", x, perm=CHANNELS_FIRST)


def imported(model: ModelProto, folder: Path) -> Draft:
    """Import a model from a file."""
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return read(path)


def spec_of(draft: Draft) -> ModelSpec:
    """Return the model.toml of a draft, and assert that it has the tensors of the draft."""
    spec = ModelSpec.model_validate(draft.model("imported", {"input": {"max_steps": 99, **draft.input}}))
    assert {name: array.shape for name, array in draft.arrays().items()} == spec.tensors()
    return spec


def answers(draft: Draft, rows: Sequence[Array]) -> list[Array]:
    """Return the main output of a draft for each sequence of a ragged batch."""
    spec = spec_of(draft)
    encoder = Encoder(spec, {name: torch.from_numpy(array) for name, array in draft.arrays().items()}, CPU)
    offsets = np.cumsum([0, *map(len, rows)])
    outputs = run_arrays(encoder, {"ids" if rows[0].ndim == 1 else "inputs": np.concatenate(rows), "offsets": offsets})
    main = outputs[spec.head.main_output or "logits"]
    if spec.head.kind not in ("tag", "sequence"):
        return list(main)
    return np.split(main, outputs["offsets"][1:-1])


def random_rows(model: ModelProto, lengths: Sequence[int]) -> list[Array]:
    """Return sequences of the model's input: ids, also where they come as floats, or features."""
    random = np.random.default_rng(1)
    if len(model.graph.input[0].type.tensor_type.shape.dim) == 2:
        return [random.integers(0, VOCABULARY, size=length) for length in lengths]
    return [random.normal(size=(length, FEATURES)).astype(np.float32) for length in lengths]


def expected(model: ModelProto, rows: Sequence[Array], axes: Sequence[int] | None, *, reference: bool) -> list[Array]:
    """Return the first output for each row by itself. axes, reference: as in Case."""
    kind = model.graph.input[0].type.tensor_type.elem_type
    batches = [row[None].transpose(axes or range(row.ndim + 1)).astype(helper.tensor_dtype_to_np_dtype(kind)) for row in rows]
    names = [info.name for info in model.graph.input]
    session: Any = ReferenceEvaluator(model) if reference else onnxruntime.InferenceSession(model.SerializeToString())
    return [
        np.asarray(session.run(None, {names[0]: batch, **{name: np.array([len(row)], np.int32) for name in names[1:]}})[0])
        for batch, row in zip(batches, rows, strict=True)
    ]


def assert_imports(model: ModelProto, folder: Path, case: Case | None = None) -> None:
    """Assert that the imported model gives the answers of the graph."""
    draft, case = imported(model, folder), case or Case("", lambda: model)
    rows = random_rows(model, case.lengths)
    wanted = expected(model, rows, case.axes, reference=case.reference)
    for answer, output in zip(answers(draft, rows), wanted, strict=True):
        np.testing.assert_allclose(answer.ravel(), draft.as_answer(output).ravel(), rtol=TOLERANCE, atol=TOLERANCE)


def assert_case(case: Case, folder: Path) -> None:
    """Assert that a graph imports and computes the same as in ONNX Runtime, or is refused with the reason."""
    if case.refused:
        with pytest.raises(ImportRefused, match=re.escape(case.refused)):
            imported(case.graph(), folder)
    else:
        assert_imports(case.graph(), folder, case)
