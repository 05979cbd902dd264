"""Who is timed beside us, by family. A peer gets the same numbers in its own layout before the clock starts."""

from __future__ import annotations

from kernels.bench.baselines.baseline import Peer
from kernels.bench.baselines.beside import convolution, device_copy, first_sru_package, lstm, one_product
from kernels.bench.baselines.conv import CONV
from kernels.bench.baselines.discrete import gru_steps, lstm_gates, lstm_steps, qrnn_steps, sru_steps
from kernels.bench.baselines.layers import packed, padded
from kernels.bench.baselines.onnx_runtime import onnx_runtime
from kernels.bench.baselines.sru_package import sru_package
from kernels.bench.workload import Workload
from kernels.bench.workloads import of_the_figure, one_long_row

_LAYERS = (Peer("torch padded", padded), Peer("torch packed", packed))
_ONNX_RUNTIME = Peer("onnxruntime", onnx_runtime, devices=("cpu",))


def _of_512(workload: Workload) -> bool:
    return workload.hidden == 512


def _one_row_of_512(workload: Workload) -> bool:
    return workload.rows == 1 and workload.hidden == 512


# On a GPU they take as long for every size: milliseconds, all of it the host's.
_SLOW = "its loop is a thousand launches and more, which take longer to capture than to time"
_LSTM_LOOPS = (
    Peer("torch by step", lstm_steps, devices=("cpu",)),
    Peer("torch by step", lstm_steps, devices=("cuda",), eager_only=_SLOW, takes=_of_512),
    Peer("torch by gate", lstm_gates, eager_only=_SLOW, takes=_one_row_of_512),
)


def _beside_the_grid(workload: Workload) -> bool:
    return not workload.in_grid


def _layer_in_grid(workload: Workload) -> bool:
    return workload.in_grid and workload.kind == "layer"


def _small_or_one_long_row(workload: Workload) -> bool:
    small = workload.rows <= 32 and workload.steps <= 128 and workload.hidden <= 512
    return not workload.in_grid or one_long_row(workload) or (_layer_in_grid(workload) and small)


def _copied(workload: Workload) -> bool:
    return workload.kind == "copy"


_DEFAULT_STREAM = "its kernel is launched on the default stream"
_SRU_PACKAGE = Peer("sru package", sru_package, eager_only=_DEFAULT_STREAM, takes=_small_or_one_long_row)
_FIRST_SRU_PACKAGE = Peer(
    "sru package v1", first_sru_package, devices=("cuda",), eager_only=_DEFAULT_STREAM, takes=one_long_row
)
_ON_CUDA = (
    Peer("one product", one_product, devices=("cuda",), takes=_layer_in_grid),
    Peer("device copy", device_copy, devices=("cuda",), takes=_copied),
)
_FIGURE = (
    Peer("torch LSTM", lstm, devices=("cuda",), takes=of_the_figure),
    *(
        Peer(f"conv1d width {width}{layout}", convolution(width, bool(layout)), devices=("cuda",), takes=of_the_figure)
        for width in (2, 3)
        for layout in ("", ", channels last")
    ),
)

PEERS: dict[str, tuple[Peer, ...]] = {
    "lstm": (*_LAYERS, *_LSTM_LOOPS, _ONNX_RUNTIME),
    "gru": (*_LAYERS, Peer("torch by step", gru_steps), _ONNX_RUNTIME),
    "sru": (Peer("torch by step", sru_steps, takes=_beside_the_grid), _SRU_PACKAGE, *_ON_CUDA, *_FIGURE),
    "qrnn": (Peer("torch by step", qrnn_steps, takes=_beside_the_grid), _FIRST_SRU_PACKAGE, *_ON_CUDA),
    "conv": CONV,
}
