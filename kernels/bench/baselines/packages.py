"""Layers of other packages with the same weights: ONNX Runtime's LSTM and GRU, and the SRU of its authors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.bench.baselines.baseline import MissingError, TimedCall, embedded, last, optional_package, pad
from kernels.bench.baselines.layers import second_bias
from kernels.bench.case import BenchCase
from kernels.gru.types import GRUWeights
from kernels.lstm.types import LSTMWeights
from kernels.sru.types import SRUWeights

INSTALL = "install onnx and onnxruntime"
ORDER = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2)}
"""Our block for each block of ONNX: input, output, forget, cell; update, reset, new."""


def onnx_runtime(case: BenchCase) -> TimedCall:
    over_vectors, vectors, expected = embedded(case)
    session, lengths = _session(over_vectors)
    data = pad(case)

    def feeds() -> dict[str, Any]:
        return {"X": vectors(data).numpy(), **lengths}

    prepared = feeds() if expected is None else None
    return TimedCall(
        lambda: session.run(None, prepared or feeds()), lambda answer: torch.from_numpy(answer[0][0]), expected=expected
    )


def _session(case: BenchCase) -> tuple[Any, dict[str, Any]]:
    """Return a session of ONNX Runtime, and the lengths of the rows if they differ."""
    onnx, runtime = optional_package("onnx", INSTALL), optional_package("onnxruntime", INSTALL)
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    model = _model(onnx, case).SerializeToString()
    session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return session, {"lengths": torch.tensor(case.lengths, dtype=torch.int32).numpy()} if case.ragged else {}


def sru_package(case: BenchCase) -> TimedCall:
    """Its operator for the CPU or kernel for the GPU. It also computes the padding, which follows each row and needs no mask."""
    over_vectors, vectors, expected = embedded(case)
    cell, data, take = _sru_cell(over_vectors), pad(case), last(case)
    return TimedCall(lambda: take(cell(vectors(data))[0]), expected=expected)


def _sru_cell(case: BenchCase) -> Any:
    """Return the layer of the package with our weights."""
    weights: SRUWeights = case.weights[0]
    assert weights.input is not None
    device, dtype, inputs, hidden = weights.bias.device, weights.bias.dtype, weights.input.shape[0], weights.hidden
    if device.type == "cuda" and optional_package("torch.utils.cpp_extension", "install setuptools").CUDA_HOME is None:
        raise MissingError("install the CUDA compiler nvcc, which compiles its kernel")
    sru = optional_package("sru", "install sru, ninja and a C++ compiler, with ninja on the PATH")
    first, half = weights.cell is None, dtype == torch.float16
    cell = sru.SRUCell(inputs, hidden, rescale=False, v1=first, amp_recurrence_fp16=half)
    cell = cell.to(device, dtype).eval().requires_grad_(False)
    # The package interleaves the columns of a unit; ours are in blocks.
    cell.weight.copy_(weights.input.view(inputs, 3, hidden).transpose(1, 2).reshape(inputs, 3 * hidden))
    cell.weight_c.copy_(torch.zeros_like(weights.bias) if weights.cell is None else weights.cell)
    cell.bias.copy_(weights.bias)
    return cell


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

    def ordered(blocks: Tensor) -> Tensor:
        chunks = torch.split(blocks, weights.hidden, dim=-1)
        return torch.cat([chunks[block] for block in ORDER[operator]], dim=-1)

    matrices = {"W": ordered(weights.input).T, "R": ordered(weights.recurrent).T}
    bias = torch.cat((ordered(weights.bias), ordered(second_bias(weights))))
    return {name: array[None].contiguous() for name, array in {**matrices, "B": bias}.items()}
