"""ONNX Runtime's LSTM and GRU nodes, made from the same weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.bench.baselines.baseline import Call, pad, wanted
from kernels.bench.given import Given
from kernels.contract import GRUWeights, LSTMWeights

INSTALL = "install onnx and onnxruntime"
ORDER = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2)}
"""Which of our blocks stands where in theirs: input, output, forget, cell; update, reset, new."""


def onnx_runtime(given: Given) -> Call:
    onnx, runtime = wanted("onnx", INSTALL), wanted("onnxruntime", INSTALL)
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    model = _model(onnx, given).SerializeToString()
    session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feeds = {"X": pad(given).numpy()}
    if given.ragged:
        feeds["lengths"] = torch.tensor(given.lengths, dtype=torch.int32).numpy()
    return Call(lambda: session.run(None, feeds), lambda answer: torch.from_numpy(answer[0][0]))


def _model(onnx: Any, given: Given) -> Any:
    """X: (longest, rows, inputs); lengths: (rows,), left out when all are equal; Y_h: (1, rows, hidden)."""
    weights: LSTMWeights | GRUWeights = given.weights[0]
    operator = "GRU" if isinstance(weights, GRUWeights) else "LSTM"
    helper, float32 = onnx.helper, onnx.TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info("X", float32, [None, None, given.x.data.shape[1]])]
    if given.ragged:
        inputs.append(helper.make_tensor_value_info("lengths", onnx.TensorProto.INT32, [None]))
    outputs = [helper.make_tensor_value_info("Y_h", float32, [1, None, weights.hidden])]
    constants = [onnx.numpy_helper.from_array(array.numpy(), name) for name, array in _arrays(weights, operator).items()]
    attributes = {"hidden_size": weights.hidden, **({"linear_before_reset": 1} if operator == "GRU" else {})}
    names = ["X", "W", "R", "B", *(["lengths"] if given.ragged else [])]
    node = helper.make_node(operator, names, ["", "Y_h"], **attributes)
    graph = helper.make_graph([node], operator.lower(), inputs, outputs, constants)
    # Named versions, as the newest that onnx writes may be newer than what the runtime reads.
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)


def _arrays(weights: LSTMWeights | GRUWeights, operator: str) -> dict[str, Tensor]:
    """W: (1, blocks x hidden, inputs); R: (1, blocks x hidden, hidden); B: (1, 2 x blocks x hidden), the recurrent bias last."""
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
