"""Files that are damaged or made to harm are refused with the reason, in bounded time and memory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from service.importers.draft import ImportRefused
from tests.importers import hostile
from tests.importers.onnx.graphs import FEATURES, Net, assert_imports, dense, graph, imported


def good() -> ModelProto:
    return onnx.load_from_string(hostile.good("model.onnx"))


def assert_refused(model: ModelProto, folder: Path, message: str) -> None:
    hostile.assert_refused(hostile.write(folder, "model.onnx", model.SerializeToString()), message)


def with_weights(array: Any = None, dims: tuple[int, ...] | None = None, kind: int | None = None) -> ModelProto:
    """Return a model with these first weights. dims, kind: a shape and a type that differ from the content."""
    model = good()
    tensor = model.graph.initializer[0]
    tensor.CopyFrom(numpy_helper.from_array(np.ones((FEATURES, 4), np.float32) if array is None else array, "weight_0"))
    if dims is not None:
        tensor.ClearField("dims")
        tensor.dims.extend(dims)
    tensor.data_type = tensor.data_type if kind is None else kind
    return model


NOT_FINITE = r"the weight weight is .* at \(1, 2\): weights are finite numbers of float32"
WEIGHTS: dict[str, tuple[ModelProto, str]] = {
    **{
        f"of shape {dims}": (with_weights(dims=dims), "does not fit its shape")
        for dims in ((1 << 40, 4), (1 << 62, 1 << 62), (FEATURES, 0), (FEATURES, 5))
    },
    "of a negative shape": (with_weights(dims=(-1, 4)), r"has the shape \(-1, 4\)"),
    "empty": (with_weights(np.ones((FEATURES, 0), np.float32)), "which are no weights"),
    **{
        f"of {value}": (with_weights(np.array([[1.0] * 4, [1.0, 1.0, value, 1.0], [1.0] * 4])), NOT_FINITE)
        for value in (np.nan, -np.inf, 1e300)
    },
    **{f"of type {kind}": (with_weights(kind=kind), "the tensor weight_0 is of type") for kind in (TensorProto.STRING, 99)},
}


def external(location: str = "weights.bin", dims: tuple[int, ...] = (FEATURES, 4), **entries: Any) -> ModelProto:
    """Return a model with its first weights in another file."""
    model = with_weights(dims=dims)
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    return model


def data(size: int = FEATURES * 4) -> bytes:
    return np.arange(size, dtype=np.float32).tobytes()


def test_external_data_beside_the_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "weights.bin").write_bytes(bytes(8) + data())
    draft = imported(external("inner/weights.bin", offset=8, length=FEATURES * 16), tmp_path)
    np.testing.assert_array_equal(draft.arrays()["layers.0.weight"].ravel(), np.arange(FEATURES * 4))


PLACED: dict[str, Callable[[Path, Path], Any]] = {
    "nothing": lambda *_: None,
    "a file": lambda file, _: file.write_bytes(data()),
    "a short file": lambda file, _: file.write_bytes(data(5)),
    "a link": Path.symlink_to,
    "a hard link": Path.hardlink_to,
    "a linked folder": lambda file, secret: (file.parent / "inner").symlink_to(secret.parent),
    "a pipe": lambda file, _: os.mkfifo(file),
    "a folder": lambda file, _: file.mkdir(),
}
"""What is put where the data of a model are looked for."""
OUTSIDE = "put the file into the folder of the model"


@pytest.mark.parametrize(
    "kind, model, message",
    [
        *(
            ("nothing", external(location), OUTSIDE)
            for location in ("../secret", "/etc/hostname", "inner/../../secret", "", "a\\b", "a\0b")
        ),
        ("nothing", external(), "No such file"),
        ("a link", external(), "Links are not followed"),
        ("a linked folder", external("inner/secret"), "Links are not followed"),
        ("a hard link", external(), "has several names"),
        ("a pipe", external(), "is not a regular file"),
        ("a folder", external(), "is not a regular file"),
        ("a short file", external(), "has 20 of 48 bytes"),
        ("a file", external(offset=-4), "the offset '-4', which is no number of bytes"),
        ("a file", external(offset="1e3"), "no number of bytes"),
        ("a file", external(offset=10**17), "has 0 of 48 bytes"),
        ("a file", external(length=12), "has 12 bytes, and its shape needs 48"),
        ("a file", external(dims=(1 << 30, 1 << 30)), "bytes of external data"),
    ],
)
def test_external_data_that_is_no_plain_file_is_refused(kind: str, model: ModelProto, message: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(data())
    (tmp_path / "model").mkdir()
    PLACED[kind](tmp_path / "model" / "weights.bin", tmp_path / "secret")
    assert_refused(model, tmp_path / "model", message)


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "nothing"])
def test_model_that_is_no_file_is_refused(kind: str, tmp_path: Path) -> None:
    PLACED[kind](tmp_path / "model.onnx", tmp_path)
    hostile.assert_refused(tmp_path / "model.onnx")


def constant_elsewhere(net: Net, x: str) -> str:
    tensor = TensorProto(name="secret", data_type=TensorProto.FLOAT, dims=[3], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="/etc/hostname")
    net.nodes.append(helper.make_node("Constant", [], ["constant"], value=tensor))
    return net.add("Add", x, "constant")


def many_large_constants(net: Net, x: str) -> str:
    y = net.add("Range", *(net.constant(float(number)) for number in (0, 1 << 22, 1)))
    for _ in range(300):
        y = net.add("Add", y, y)
    return net.add("Add", x, net.add("Unsqueeze", y, net.constant([0])))


def shared_weights(net: Net, x: str) -> str:
    """Each layer would have a copy of the weights of all."""
    return net.chain(x, dense(FEATURES, 512), *[("MatMul", net.weight(512, 512))] * 300)


def edited(edit: Callable[[ModelProto], Any]) -> Callable[[], ModelProto]:
    """Return a function that returns the good model with a change."""

    def build() -> ModelProto:
        model = good()
        edit(model)
        return model

    return build


def copied(model: ModelProto) -> ModelProto:
    return model


def with_opset(version: int, model: ModelProto) -> None:
    model.opset_import[0].version = version


GRAPHS: dict[str, tuple[Callable[[], ModelProto], str]] = {
    **{f"weights {name}": (partial(copied, model), message) for name, (model, message) in WEIGHTS.items()},
    "a cycle": (graph(("Add", "tanh_1"), ("Tanh",)), "Add node add_0: its input tanh_1 is computed after it, or not at all"),
    "a name with two values": (edited(lambda model: model.graph.node.append(model.graph.node[0])), "has several values"),
    "external data of an attribute": (graph(constant_elsewhere), "does not fit its shape"),
    "Loop": (graph(("Loop",)), "Loop node .*cannot be imported"),
    "many nodes": (edited(lambda model: model.graph.node.extend([model.graph.node[0]] * 10_001)), "has more than 10000 nodes"),
    "factors that are not finite": (graph(("Mul", np.array([1.0, np.nan, 1.0], np.float32)), ("Relu",)), "not finite"),
    "a long chain of activations": (graph(*[("Abs",), ("Log",)] * 4000), "."),
    "columns that double": (graph(dense(FEATURES, 4), *[("Concat", "_", "_", {"axis": 2})] * 60), "columns, and the limit is"),
    "operations that double": (graph(dense(FEATURES, 4), *[lambda net, x: net.add("Mul", x, net.add("Sigmoid", x))] * 60), "."),
    "weights that multiply": (graph(shared_weights), "far more than its weights"),
    "many large constants": (graph(many_large_constants), "far more than its weights"),
    "an operator of another domain": (graph(("Tanh", {"domain": "com.microsoft"})), r"it is an operator of com\.microsoft"),
    **{
        f"opset {version}": (
            edited(partial(with_opset, version)),
            f"has opset {version}",
        )
        for version in (3, 99)
    },
    "a redefined operator": (edited(lambda model: model.functions.add(name="Add", domain="")), "redefines operators"),
    **{
        f"an input of shape {shape}": (graph(("Tanh",), shape=shape), ".")
        for shape in (("batch", "steps", 1 << 40), ("batch", 1 << 50, 1 << 50), (1 << 30, 1 << 30, 1 << 30))
    },
}


@pytest.mark.parametrize("make, message", GRAPHS.values(), ids=GRAPHS)
def test_hostile_graph_is_refused(make: Callable[[], ModelProto], message: str, tmp_path: Path) -> None:
    assert_refused(make(), tmp_path, message)


def branched(depth: int, *inputs: onnx.ValueInfoProto) -> ModelProto:
    """Return a model of If nodes within each other. inputs: besides x; without any, the condition is a constant."""
    net = Net()
    branch = net.model(net.add("Tanh", "x")).graph
    del branch.input[:]
    for level in range(depth):
        node = helper.make_node("If", ["yes"], [f"y{level}"], then_branch=branch, else_branch=branch)
        branch = helper.make_graph([node], f"branch{level}", [], [helper.make_tensor_value_info(f"y{level}", 1, None)])
    branch.input.extend([*net.inputs, *inputs])
    branch.initializer.extend([] if inputs else [numpy_helper.from_array(np.array(True), "yes")])
    return helper.make_model(branch, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_branches_are_followed_if_they_are_constant_and_few(tmp_path: Path) -> None:
    assert_imports(branched(7), tmp_path)
    assert_refused(branched(12), tmp_path, "it is within 8 others")
    depends = branched(1, helper.make_tensor_value_info("yes", TensorProto.INT64, ("batch",)))
    assert_refused(depends, tmp_path, "its condition depends on the input")


ONE, BLOCK = np.ones((1, 1), np.float32), np.ones((2, 2), np.float32)
OF_ONES: dict[str, Any] = {"value": numpy_helper.from_array(np.ones(1, np.float32))}
TABLE: tuple[Any, ...] = ("ConstantOfShape", [1 << 12, 1 << 12])
# Each node takes the result of the node before it.
BOMBS: dict[str, list[tuple[Any, ...]]] = {
    "ConstantOfShape": [("ConstantOfShape", [1 << 20, 1 << 13], OF_ONES)],
    "ConstantOfShape of negative size": [("ConstantOfShape", [-1, 3], OF_ONES)],
    "ConstantOfShape, Add": [("ConstantOfShape", [1 << 16, 1 << 16]), ("Add", 1.0)],
    "Expand": [("Expand", ONE, [1 << 20, 1 << 13])],
    "Expand, Expand": [("Expand", ONE, [1 << 12, 1 << 11]), ("Expand", [1 << 20, 1 << 12, 1 << 11])],
    "Range": [("Range", np.array(0), np.array(1 << 40), np.array(1))],
    "Range without end": [("Range", np.array(0), np.array(5), np.array(0))],
    "Range of infinity": [("Range", np.array(0.0), np.array(np.inf), np.array(1.0))],
    "Tile": [("Tile", BLOCK, [1 << 16, 1 << 16])],
    "Tile of negative size": [("Tile", BLOCK, [-(1 << 40), -(1 << 40)])],
    "Pad": [("Pad", BLOCK, [0, 0, 1 << 20, 1 << 20])],
    "Gather": [
        ("Gather", np.ones((1 << 12, 64), np.float32), np.zeros(1 << 12, np.int64)),
        ("Gather", np.zeros(1 << 12, np.int64), {"axis": 1}),
    ],
    "Concat": [TABLE, ("Concat", {"axis": 0}), ("Tile", [1 << 10, 1])],
    "OneHot": [("OneHot", np.zeros(1 << 12, np.int64), np.array(1 << 40), [0, 1])],
    "EyeLike": [TABLE, ("EyeLike",)],
    "RandomNormal": [("RandomNormal", {"shape": [1 << 20, 1 << 20]})],
    "Outer product": [("Mul", np.ones((1 << 14, 1), np.float32), np.ones((1, 1 << 14), np.float32))],
}


@pytest.mark.parametrize("operators", BOMBS.values(), ids=BOMBS)
def test_constant_that_would_fill_the_memory_is_refused(operators: list[tuple[Any, ...]], tmp_path: Path) -> None:
    net = Net()
    name, *operands = operators[0]
    attributes = operands.pop() if isinstance(operands[-1], dict) else {}
    first = net.add(name, *map(net.constant, operands), **attributes)
    model = net.model(net.add("Add", "x", net.chain(first, *operators[1:])))
    assert_refused(model, tmp_path, "limit is|constant of more|cannot be imported|do not fit")


WRONG: list[tuple[Any, ...]] = [
    *(("Transpose", {"perm": perm}) for perm in ([0, 0, 1], [0, 1, 7])),
    *(("Reshape", shape) for shape in ([-1, -1], [0, 0, -5], [0, 0, 0, 0, 0])),
    *(("Squeeze", [9]), ("Unsqueeze", [9])),
    *(("Slice", [0], [1, 2], [0, 1]), ("Slice", [0], [5], [2], [0])),
    *(("Gather", np.array(99), {"axis": 2}), ("Gather", np.array(0), {"axis": 9})),
    *(("Split", sizes, {"axis": 2, "outputs": 2}) for sizes in ([-1, 4], [1, 1])),
    *(("Concat", {"axis": 9}), ("Concat",), ("Softmax", {"axis": 5}), ("Cast",), ("Unknown",)),
    *(
        ("Conv", np.ones((4, FEATURES, 3), np.float32), attributes)
        for attributes in (
            *({name: [value]} for name, value in (("strides", 0), ("strides", -1), ("dilations", 0), ("kernel_shape", 0))),
            *({"group": 0}, {"group": -1}, {"pads": [-5, 0]}, {"pads": [1 << 60, 0, 0]}, {"strides": [1, 1, 1]}),
        )
    ),
]


@pytest.mark.parametrize(
    "operator", WRONG, ids=lambda operator: re.sub(r"array\(.*\)", "array", str(operator), flags=re.DOTALL)
)
def test_wrong_attribute_is_refused(operator: tuple[Any, ...], tmp_path: Path) -> None:
    options: dict[str, Any] = {"shape": ("batch", FEATURES, "steps")} if operator[0] == "Conv" else {}
    with pytest.raises(ImportRefused, match=f"{operator[0]} node"):
        imported(graph(operator, ("Tanh",), **options)(), tmp_path)
