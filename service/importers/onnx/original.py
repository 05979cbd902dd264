"""Runs a graph with ONNX Runtime, where it is installed, to compare an imported model with it."""

from __future__ import annotations

from collections.abc import Sequence, Set
from importlib.util import find_spec
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from service.importers.draft import Array, Original
from service.importers.onnx.file import Tensors
from service.importers.onnx.readings import InputPlan

HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def original(
    model: ModelProto, nodes: Sequence[NodeProto], names: Set[str], tensors: Tensors, plan: InputPlan, steps: int | None
) -> Original | None:
    """Return the source as ONNX Runtime runs it, or None without ONNX Runtime.

    nodes: the nodes on which the first output depends; names: those that they read; steps: the only length. ONNX Runtime gets no other
    nodes, and no files: it runs nothing that is not imported.
    """
    if find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    used = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    used.graph.name = model.graph.name
    used.graph.node.extend(nodes)
    used.graph.input.extend(model.graph.input)
    used.graph.output.extend(model.graph.output[:1])
    needed = [tensor for tensor in model.graph.initializer if tensor.name in names]
    used.graph.initializer.extend(
        numpy_helper.from_array(tensors.array(tensor), tensor.name) if tensor.data_location == TensorProto.EXTERNAL else tensor
        for tensor in needed
    )
    halves = [tensor for tensor in used.graph.initializer if tensor.data_type in HALVES]
    session: list[Any] = []

    def run(row: Array) -> Array:
        if halves:
            raise ValueError("it computes with numbers of 16 bits, whose rounding exceeds the tolerance of a comparison")
        inputs = plan.sample(row)
        if not session:
            onnxruntime.set_default_logger_severity(4)  # it would also write its exceptions to stderr
            session.append(onnxruntime.InferenceSession(used.SerializeToString(), providers=["CPUExecutionProvider"]))
        return np.asarray(session[0].run(None, inputs)[0])

    return Original(f"ONNX Runtime {onnxruntime.__version__}", run, steps)
