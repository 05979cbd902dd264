"""Baselines by family. A baseline gets the same numbers as our backends, in its own layout, before the clock starts."""

from __future__ import annotations

from kernels.bench.baselines.baseline import Baseline
from kernels.bench.baselines.comparison import (
    convolution,
    device_copy,
    first_sru_package,
    lstm,
    one_product,
    step_products,
)
from kernels.bench.baselines.conv import CONV
from kernels.bench.baselines.discrete import lstm_gates, lstm_steps
from kernels.bench.baselines.layers import packed, padded
from kernels.bench.baselines.packages import onnx_runtime, sru_package
from kernels.bench.baselines.scans import qrnn_scan
from kernels.bench.workload import FORMS, NEXT_STEPS, Workload
from kernels.bench.workloads import in_figure, one_long_row

CPU, CUDA = ("cpu",), ("cuda",)
# cuDNN's error in float32 with 128 units was up to 1.4 times what rounding explains.
_LAYERS = (
    Baseline("torch padded", padded, encoders=True, states=True, slack=2.0),
    Baseline("torch packed", packed, encoders=True, slack=2.0),
)
_STEP_PRODUCTS = Baseline(
    "step products", step_products, CUDA, states=True, condition=lambda workload: workload.kind == NEXT_STEPS
)
_ONNX_RUNTIME = Baseline("onnxruntime", onnx_runtime, CPU, condition=lambda workload: workload.dtype == "float32")
_OVER_IDS = (
    Baseline("embedding, torch padded", padded, CPU, over_ids=True),
    Baseline("embedding, torch packed", packed, CPU, over_ids=True),
    Baseline("embedding, onnxruntime", onnx_runtime, CPU, over_ids=True),
)

# On a GPU they take the same time for every size: milliseconds of host time.
_SLOW = "its loop has a thousand launches or more, and capturing them takes longer than timing"
_LSTM_LOOPS = (
    Baseline("torch by step", lstm_steps, CUDA, _SLOW, lambda work: (work.rows, work.hidden) == (1, 512)),
    Baseline("torch by gate", lstm_gates, CUDA, _SLOW, lambda work: (work.rows, work.hidden) == (1, 512)),
)


def _layer_in_grid(workload: Workload) -> bool:
    return workload.in_grid and workload.kind == "layer"


def _small_or_one_long_row(workload: Workload) -> bool:
    small = workload.rows <= 32 and workload.steps <= 128 and workload.hidden <= 512
    return not workload.in_grid or one_long_row(workload) or (_layer_in_grid(workload) and small)


_DEFAULT_STREAM = "its kernel is launched on the default stream"
_SRU_PACKAGE = Baseline("sru package", sru_package, eager_only=_DEFAULT_STREAM, condition=_small_or_one_long_row)
_SRU_PACKAGE_OVER_IDS = Baseline("embedding, sru package", sru_package, CPU, over_ids=True)
_QRNN_SCANS = (
    Baseline("torch gates, scan", qrnn_scan, CPU),
    Baseline("embedding, torch gates, scan", qrnn_scan, CPU, over_ids=True),
)
_FIRST_SRU_PACKAGE = Baseline("sru package v1", first_sru_package, CUDA, _DEFAULT_STREAM, one_long_row)
_ON_CUDA = (
    Baseline("one product", one_product, CUDA, condition=_layer_in_grid),
    Baseline("device copy", device_copy, CUDA, condition=lambda workload: workload.kind == "copy"),
)
_FIGURE = (
    Baseline("torch LSTM", lstm, CUDA, condition=in_figure),
    *(
        Baseline(f"conv1d width {width}{layout}", convolution(width, bool(layout)), CUDA, condition=in_figure)
        for width in (2, 3)
        for layout in ("", ", channels last")
    ),
)

_PACKAGES = {"sru": (_SRU_PACKAGE, _SRU_PACKAGE_OVER_IDS, *_FIGURE), "qrnn": (*_QRNN_SCANS, _FIRST_SRU_PACKAGE)}

BASELINES: dict[str, tuple[Baseline, ...]] = {
    "lstm": (*_LAYERS, _STEP_PRODUCTS, *_LSTM_LOOPS, _ONNX_RUNTIME, *_OVER_IDS),
    "gru": (*_LAYERS, _STEP_PRODUCTS, _ONNX_RUNTIME, *_OVER_IDS),
    **{family: (*_PACKAGES.get(family, ()), *_ON_CUDA) for family in FORMS},
    "conv": CONV,
}
