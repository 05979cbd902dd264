"""Files that are damaged or made to harm are refused with the reason, in bounded time and memory."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from service.importers.draft import ImportRefused
from service.importers.onnx import read
from tests.importers.onnx.graphs import FEATURES, Net, assert_imports, imported

MEMORY_BYTES = 300 << 20
"""More than the importer may allocate for any of these files, and less than each of them asks for."""


def good() -> ModelProto:
    net = Net()
    return net.model(net.dense("x", FEATURES, 4))


def refused(model: ModelProto, folder: Path) -> str:
    """Import a model that is refused, within bounds; return the message."""
    tracemalloc.start()
    try:
        with pytest.raises(ImportRefused) as raised:
            imported(model, folder)
        assert tracemalloc.get_traced_memory()[1] < MEMORY_BYTES
    finally:
        tracemalloc.stop()
    return str(raised.value)


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.6, 0.9, 0.99])
def test_truncated_file_is_refused(kept: float, tmp_path: Path) -> None:
    content = good().SerializeToString()
    file = tmp_path / "model.onnx"
    file.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(ImportRefused, match="export the model again"):
        read(file)


@pytest.mark.parametrize("seed", range(3))
def test_changed_bytes_import_or_are_refused(seed: int, tmp_path: Path) -> None:
    """No change of a file leads to another exception than the refusal."""
    random = np.random.default_rng(seed)
    content = np.frombuffer(good().SerializeToString(), np.uint8)
    file = tmp_path / "model.onnx"
    for _ in range(60):
        changed = content.copy()
        changed[random.integers(0, len(content), size=3)] = random.integers(0, 256, size=3)
        file.write_bytes(changed.tobytes())
        try:
            read(file)
        except ImportRefused as error:
            assert str(error)


def _weights(array: Any) -> TensorProto:
    return numpy_helper.from_array(np.asarray(array), "weight_0")


def _with_weights(tensor: TensorProto) -> ModelProto:
    model = good()
    model.graph.initializer[0].CopyFrom(tensor)
    model.graph.initializer[0].name = "weight_0"
    return model


@pytest.mark.parametrize(
    "dims, message",
    [
        ([1 << 40, 4], "does not fit its shape"),
        ([1 << 62, 1 << 62], "does not fit its shape"),
        ([-1, 4], r"has the shape \(-1, 4\)"),
        ([FEATURES, 0], "does not fit its shape"),
        ([FEATURES, 5], "does not fit its shape"),
    ],
    ids=str,
)
def test_wrong_shape_of_weights_is_refused(dims: list[int], message: str, tmp_path: Path) -> None:
    tensor = _weights(np.ones((FEATURES, 4), np.float32))
    del tensor.dims[:]
    tensor.dims.extend(dims)
    with pytest.raises(ImportRefused, match=message):
        imported(_with_weights(tensor), tmp_path)


def test_empty_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ImportRefused, match="which are no weights"):
        imported(_with_weights(_weights(np.ones((FEATURES, 0), np.float32))), tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300], ids=str)
def test_weights_that_are_not_finite_are_refused(value: float, tmp_path: Path) -> None:
    array = np.ones((FEATURES, 4))
    array[1, 2] = value
    with pytest.raises(ImportRefused, match=r"the weight weight is .* at \(1, 2\): weights are finite numbers of float32"):
        imported(_with_weights(_weights(array)), tmp_path)


@pytest.mark.parametrize("kind", [TensorProto.STRING, TensorProto.COMPLEX64, TensorProto.FLOAT8E4M3FN, 99])
def test_weights_of_another_type_are_refused(kind: int, tmp_path: Path) -> None:
    model = good()
    model.graph.initializer[0].data_type = kind
    with pytest.raises(ImportRefused, match="the tensor weight_0 is of type"):
        imported(model, tmp_path)


@pytest.mark.parametrize(
    "shape", [("batch", "steps", 1 << 40), ("batch", 1 << 50, 1 << 50), (1 << 30, 1 << 30, 1 << 30)], ids=str
)
def test_huge_input_is_refused(shape: tuple[int | str, ...], tmp_path: Path) -> None:
    net = Net(shape)
    refused(net.model(net.add("Tanh", "x")), tmp_path)


# External data


def external(folder: Path, location: str = "weights.bin", **entries: Any) -> ModelProto:
    """Return a model with its first weights in another file."""
    model = good()
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
    model = external(tmp_path, "inner/weights.bin", offset=8, length=FEATURES * 16)
    draft = imported(model, tmp_path)
    np.testing.assert_array_equal(draft.arrays()["layers.0.weight"].ravel(), np.arange(FEATURES * 4))


@pytest.mark.parametrize(
    "location", ["../weights.bin", "/etc/hostname", "inner/../../weights.bin", "", "a\\b", "a\0b"], ids=repr
)
def test_external_data_outside_the_folder_is_refused(location: str, tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(data())
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(ImportRefused, match="put the file into the folder of the model"):
        imported(external(folder, location), folder)


def _symlink(file: Path, target: Path) -> None:
    file.symlink_to(target)


def _hard_link(file: Path, target: Path) -> None:
    file.hardlink_to(target)


def _fifo(file: Path, target: Path) -> None:
    os.mkfifo(file)


def _folder(file: Path, target: Path) -> None:
    file.mkdir()


def _missing(file: Path, target: Path) -> None:
    pass


def _short(file: Path, target: Path) -> None:
    file.write_bytes(data(5))


@pytest.mark.parametrize(
    "make, message",
    [
        (_symlink, "Links are not followed"),
        (_hard_link, "has several names"),
        (_fifo, "is not a regular file"),
        (_folder, "is not a regular file"),
        (_missing, "No such file"),
        (_short, "has 20 of 48 bytes"),
    ],
)
def test_external_data_that_is_no_plain_file_is_refused(
    make: Callable[[Path, Path], None], message: str, tmp_path: Path
) -> None:
    target = tmp_path / "secret"
    target.write_bytes(data())
    folder = tmp_path / "model"
    folder.mkdir()
    make(folder / "weights.bin", target)
    with pytest.raises(ImportRefused, match=message):
        imported(external(folder), folder)


def test_folder_of_external_data_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "weights.bin").write_bytes(data())
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "inner").symlink_to(tmp_path / "secrets")
    with pytest.raises(ImportRefused, match="Links are not followed"):
        imported(external(folder, "inner/weights.bin"), folder)


@pytest.mark.parametrize(
    "entries, message",
    [
        ({"offset": -4}, "the offset '-4', which is no number of bytes"),
        ({"offset": "1e3"}, "no number of bytes"),
        ({"offset": 10**17}, "has 0 of 48 bytes"),
        ({"length": 12}, "has 12 bytes, and its shape needs 48"),
    ],
    ids=str,
)
def test_wrong_place_of_external_data_is_refused(entries: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(data())
    with pytest.raises(ImportRefused, match=message):
        imported(external(tmp_path, **entries), tmp_path)


def test_huge_external_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(data())
    model = external(tmp_path)
    del model.graph.initializer[0].dims[:]
    model.graph.initializer[0].dims.extend([1 << 30, 1 << 30])
    assert "bytes of external data" in refused(model, tmp_path)


def test_external_data_of_an_attribute_is_refused(tmp_path: Path) -> None:
    net = Net()
    tensor = TensorProto(name="secret", data_type=TensorProto.FLOAT, dims=[3], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="/etc/hostname")
    net.nodes.append(helper.make_node("Constant", [], ["constant"], value=tensor))
    with pytest.raises(ImportRefused, match="does not fit its shape"):
        imported(net.model(net.add("Add", "x", "constant")), tmp_path)


@pytest.mark.parametrize("make", [_fifo, _folder, _missing], ids=str)
def test_model_that_is_no_file_is_refused(make: Callable[[Path, Path], None], tmp_path: Path) -> None:
    make(tmp_path / "model.onnx", tmp_path)
    with pytest.raises(ImportRefused):
        read(tmp_path / "model.onnx")


# Graphs


def test_cyclic_graph_is_refused(tmp_path: Path) -> None:
    net = Net()
    net.nodes.append(helper.make_node("Add", ["x", "b"], ["a"], name="first"))
    net.nodes.append(helper.make_node("Tanh", ["a"], ["b"], name="second"))
    with pytest.raises(ImportRefused, match="Add node first: its input b is computed after it, or not at all"):
        imported(net.model("b"), tmp_path)


def test_name_with_two_values_is_refused(tmp_path: Path) -> None:
    net = Net()
    net.dense("x", FEATURES, 4)
    net.nodes.append(helper.make_node("Tanh", ["x"], [net.nodes[0].output[0]]))
    with pytest.raises(ImportRefused, match="has several values"):
        imported(net.model(), tmp_path)


def branched(depth: int) -> onnx.GraphProto:
    """Return a graph of If nodes within each other."""
    nodes = [helper.make_node("Tanh", ["x"], [f"y{depth}"])]
    infos = [helper.make_tensor_value_info(f"y{depth}", TensorProto.FLOAT, None)]
    if depth:
        branch = branched(depth - 1)
        nodes = [helper.make_node("If", ["yes"], [f"y{depth}"], then_branch=branch, else_branch=branch)]
    return helper.make_graph(nodes, f"branch{depth}", [], infos)


@pytest.mark.parametrize("depth, message", [(7, ""), (12, "it is within 8 others")])
def test_deep_branches_are_refused(depth: int, message: str, tmp_path: Path) -> None:
    graph = branched(depth)
    graph.input.extend([helper.make_tensor_value_info("x", TensorProto.FLOAT, ("batch", "steps", FEATURES))])
    graph.initializer.extend([numpy_helper.from_array(np.array(True), "yes")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    if not message:
        assert_imports(model, tmp_path)
        return
    with pytest.raises(ImportRefused, match=message):
        imported(model, tmp_path)


def test_branch_that_depends_on_the_input_is_refused(tmp_path: Path) -> None:
    graph = branched(1)
    graph.input.extend(
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ("batch", "steps", FEATURES)),
            helper.make_tensor_value_info("yes", TensorProto.INT64, ("batch",)),
        ]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    with pytest.raises(ImportRefused, match="its condition depends on the input"):
        imported(model, tmp_path)


@pytest.mark.parametrize("operator", ["Loop", "Scan"])
def test_loops_are_refused(operator: str, tmp_path: Path) -> None:
    net = Net()
    with pytest.raises(ImportRefused, match=f"{operator} node .*cannot be imported"):
        imported(net.model(net.add(operator, "x")), tmp_path)


def test_too_many_nodes_are_refused(tmp_path: Path) -> None:
    net = Net()
    node = helper.make_node("Tanh", ["x"], ["y"])
    net.nodes += [helper.make_node("Tanh", ["x" if not index else f"y{index}"], [f"y{index + 1}"]) for index in range(3)]
    model = net.model("y3")
    model.graph.node.extend([node] * 100_000)
    assert "has more than 10000 nodes" in refused(model, tmp_path)


def test_long_chain_of_activations_is_refused_in_bounded_time(tmp_path: Path) -> None:
    net = Net()
    y = "x"
    for _ in range(4000):
        y = net.add("Sin" if y == "last" else "Abs", y)
        y = net.add("Log", y)
    refused(net.model(y), tmp_path)


def test_doubled_columns_are_refused(tmp_path: Path) -> None:
    net = Net()
    y = net.dense("x", FEATURES, 4)
    for _ in range(60):
        y = net.add("Concat", y, y, axis=2)
    assert "columns, and the limit is" in refused(net.model(y), tmp_path)


def test_doubled_operations_are_refused(tmp_path: Path) -> None:
    net = Net()
    y = net.dense("x", FEATURES, 4)
    for _ in range(60):
        y = net.add("Mul", y, net.add("Sigmoid", y))
    refused(net.model(y), tmp_path)


def test_shared_weights_do_not_multiply(tmp_path: Path) -> None:
    """Each layer would have a copy of the weights of all."""
    net = Net()
    weight, y = net.weight(512, 512), net.dense("x", FEATURES, 512)
    for _ in range(2000):
        y = net.add("MatMul", y, weight)
    assert "far more than its weights" in refused(net.model(y), tmp_path)


# Constants


def _bomb(*nodes: tuple[str, list[Any], dict[str, Any]]) -> ModelProto:
    """Return a graph that adds a constant that nodes compute from lists of integers: each node takes the result of the previous node."""
    net = Net()
    name = ""
    for operator, inputs, attributes in nodes:
        names = [name] if name else []
        name = net.add(operator, *names, *(net.constant(value) for value in inputs), **attributes)
    return net.model(net.add("Add", "x", name))


FLOAT_ONE = numpy_helper.from_array(np.ones(1, np.float32))
BOMBS = {
    "ConstantOfShape": [("ConstantOfShape", [[1 << 20, 1 << 13]], {"value": FLOAT_ONE})],
    "ConstantOfShape of negative size": [("ConstantOfShape", [[-1, 3]], {"value": FLOAT_ONE})],
    "ConstantOfShape, Add": [("ConstantOfShape", [[1 << 16, 1 << 16]], {}), ("Add", [np.ones(1, np.float32)], {})],
    "Expand": [("Expand", [np.ones((1, 1), np.float32), [1 << 20, 1 << 13]], {})],
    "Expand, Expand": [
        ("Expand", [np.ones((1, 1), np.float32), [1 << 12, 1 << 11]], {}),
        ("Expand", [[1 << 20, 1 << 12, 1 << 11]], {}),
    ],
    "Range": [("Range", [np.array(0), np.array(1 << 40), np.array(1)], {})],
    "Range without end": [("Range", [np.array(0), np.array(5), np.array(0)], {})],
    "Range of infinity": [("Range", [np.array(0.0), np.array(np.inf), np.array(1.0)], {})],
    "Tile": [("Tile", [np.ones((2, 2), np.float32), [1 << 16, 1 << 16]], {})],
    "Tile of negative size": [("Tile", [np.ones((2, 2), np.float32), [-(1 << 40), -(1 << 40)]], {})],
    "Pad": [("Pad", [np.ones((2, 2), np.float32), [0, 0, 1 << 20, 1 << 20]], {})],
    "Gather": [
        ("Gather", [np.ones((1 << 12, 64), np.float32), np.zeros(1 << 12, np.int64)], {}),
        ("Gather", [np.zeros(1 << 12, np.int64)], {"axis": 1}),
    ],
    "Concat": [("ConstantOfShape", [[1 << 12, 1 << 12]], {}), ("Concat", [], {"axis": 0}), ("Tile", [[1 << 10, 1]], {})],
    "OneHot": [("OneHot", [np.zeros(1 << 12, np.int64), np.array(1 << 40), [0, 1]], {})],
    "EyeLike": [("ConstantOfShape", [[1 << 12, 1 << 12]], {}), ("EyeLike", [], {})],
    "RandomNormal": [("RandomNormal", [], {"shape": [1 << 20, 1 << 20]})],
    "Outer product": [("Mul", [np.ones((1 << 14, 1), np.float32), np.ones((1, 1 << 14), np.float32)], {})],
}


@pytest.mark.parametrize("nodes", BOMBS.values(), ids=BOMBS)
def test_constant_that_would_fill_the_memory_is_refused(nodes: Any, tmp_path: Path) -> None:
    message = refused(_bomb(*nodes), tmp_path)
    assert any(words in message for words in ("limit is", "constant of more", "cannot be imported", "do not fit"))


def test_many_constants_that_would_fill_the_memory_are_refused(tmp_path: Path) -> None:
    net = Net()
    size = net.constant([1 << 22])
    y = net.add("Unsqueeze", net.add("Range", *(net.constant(np.array(float(n))) for n in (0, 1 << 22, 1))), net.constant([0]))
    for _ in range(3000):
        y = net.add("Add", y, y)
    assert size
    assert "far more than its weights" in refused(net.model(net.add("Add", "x", y)), tmp_path)


# Attributes


@pytest.mark.parametrize(
    "attributes",
    [
        {"strides": [0]},
        {"strides": [-1]},
        {"dilations": [0]},
        {"group": 0},
        {"group": -1},
        {"pads": [-5, 0]},
        {"pads": [1 << 60, 0, 0]},
        {"strides": [1, 1, 1]},
        {"kernel_shape": [0]},
    ],
    ids=str,
)
def test_wrong_attribute_of_a_convolution_is_refused(attributes: dict[str, Any], tmp_path: Path) -> None:
    net = Net(("batch", FEATURES, "steps"))
    with pytest.raises(ImportRefused, match="Conv node"):
        imported(net.model(net.add("Conv", "x", net.weight(4, FEATURES, 3), **attributes)), tmp_path)


@pytest.mark.parametrize(
    "operator, inputs, attributes",
    [
        ("Transpose", [], {"perm": [0, 0, 1]}),
        ("Transpose", [], {"perm": [0, 1, 7]}),
        ("Transpose", [], {"perm": [0, 2, 0]}),
        ("Reshape", [[-1, -1]], {}),
        ("Reshape", [[0, 0, -5]], {}),
        ("Reshape", [[0, 0, 0, 0, 0]], {}),
        ("Squeeze", [[9]], {}),
        ("Unsqueeze", [[9]], {}),
        ("Slice", [[0], [1, 2], [0, 1]], {}),
        ("Slice", [[0], [5], [2], [0]], {}),
        ("Gather", [np.array(99)], {"axis": 2}),
        ("Gather", [np.array(0)], {"axis": 9}),
        ("Split", [[-1, 4]], {"axis": 2}),
        ("Split", [[1, 1]], {"axis": 2}),
        ("Concat", [], {"axis": 9}),
        ("Concat", [], {}),
        ("Softmax", [], {"axis": 5}),
        ("Cast", [], {}),
        ("Tanh", [], {"unknown": 1.0, "to": "x"}),
        ("Unknown", [], {}),
    ],
    ids=str,
)
def test_wrong_attribute_is_refused(operator: str, inputs: list[Any], attributes: dict[str, Any], tmp_path: Path) -> None:
    net = Net()
    y = net.add(
        operator, "x", *(net.constant(value) for value in inputs), outputs=2 if operator == "Split" else 1, **attributes
    )
    model = net.model(net.dense(y, FEATURES, 4))
    if operator == "Tanh":
        assert imported(model, tmp_path)
        return
    with pytest.raises(ImportRefused, match=f"{operator} node"):
        imported(model, tmp_path)


def test_operator_of_another_domain_is_refused(tmp_path: Path) -> None:
    net = Net()
    y = net.add("Tanh", "x", domain="com.microsoft")
    with pytest.raises(ImportRefused, match=r"it is an operator of com\.microsoft"):
        imported(net.model(y), tmp_path)


@pytest.mark.parametrize("version", [3, 99])
def test_unknown_opset_is_refused(version: int, tmp_path: Path) -> None:
    model = good()
    model.opset_import[0].version = version
    with pytest.raises(ImportRefused, match=f"the model has opset {version}"):
        imported(model, tmp_path)


def test_redefined_operator_is_refused(tmp_path: Path) -> None:
    model = good()
    model.functions.add(name="Add", domain="")
    with pytest.raises(ImportRefused, match="redefines operators"):
        imported(model, tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf], ids=str)
def test_factors_that_are_not_finite_are_refused(value: float, tmp_path: Path) -> None:
    net = Net()
    factors = net.constant(np.array([1.0, value, 1.0], np.float32))
    net.add("Relu", net.add("Mul", "x", factors))
    with pytest.raises(ImportRefused, match="not finite"):
        imported(net.model(), tmp_path)
