"""ONNX Runtime's LSTM and GRU operators with the same weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.bench.baselines.baseline import TimedCall, optional_package, pad
from kernels.bench.case import BenchCase
from kernels.gru.types import GRUWeights
from kernels.lstm.types import LSTMWeights

INSTALL = "install onnx and onnxruntime"
ORDER = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2)}
"""Our block for each block of ONNX: input, output, forget, cell; update, reset, new."""


def onnx_runtime(case: BenchCase) -> TimedCall:
    onnx, runtime = optional_package("onnx", INSTALL), optional_package("onnxruntime", INSTALL)
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    model = _model(onnx, case).SerializeToString()
    session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feeds = {"X": pad(case).numpy()}
    if case.ragged:
        feeds["lengths"] = torch.tensor(case.lengths, dtype=torch.int32).numpy()
    return TimedCall(lambda: session.run(None, feeds), lambda answer: torch.from_numpy(answer[0][0]))


def _model(onnx: Any, case: BenchCase) -> Any:
    """Return a model from X (longest, rows, inputs), and lengths (rows,) if they differ, to Y_h (1, rows, hidden)."""
    weights: LSTMWeights | GRUWeights = case.weights[0]
    operator = "GRU" if isinstance(weights, GRUWeights) else "LSTM"
    helper, float32 = onnx.helper, onnx.TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info("X", float32, [None, None, case.x.data.shape[1]])]
    if case.ragged:
        inputs.append(helper.make_tensor_value_info("lengths", onnx.TensorProto.INT32, [None]))
    outputs = [helper.make_tensor_value_info("Y_h", float32, [1, None, weights.hidden])]
    constants = [onnx.numpy_helper.from_array(array.numpy(), name) for name, array in _arrays(weights, operator).items()]
    attributes = {"hidden_size": weights.hidden, **({"linear_before_reset": 1} if operator == "GRU" else {})}
    names = ["X", "W", "R", "B", *(["lengths"] if case.ragged else [])]
    node = helper.make_node(operator, names, ["", "Y_h"], **attributes)
    graph = helper.make_graph([node], operator.lower(), inputs, outputs, constants)
    # Fixed versions: the default of onnx may be newer than the runtime supports.
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)


def _arrays(weights: LSTMWeights | GRUWeights, operator: str) -> dict[str, Tensor]:
    """Return W (1, blocks x hidden, inputs), R (1, blocks x hidden, hidden) and B (1, 2 x blocks x hidden), the recurrent bias last."""
    assert weights.input is not None and weights.bias is not None
    second = torch.zeros_like(weights.bias)
    if isinstance(weights, GRUWeights):
        assert weights.recurrent_bias is not None
        second[2 * weights.hidden :] = weights.recurrent_bias

    def ordered(blocks: Tensor) -> Tensor:
        chunks = torch.split(blocks, weights.hidden, dim=-1)
        return torch.cat([chunks[block] for block in ORDER[operator]], dim=-1)

    matrices = {"W": ordered(weights.input).T, "R": ordered(weights.recurrent).T}
    bias = torch.cat((ordered(weights.bias), ordered(second)))
    return {name: array[None].contiguous() for name, array in {**matrices, "B": bias}.items()}
