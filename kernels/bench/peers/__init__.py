"""Who is timed beside us, by family. A peer gets the same numbers in its own layout before the clock starts."""

from __future__ import annotations

from kernels.bench.peers.conv1d import conv1d
from kernels.bench.peers.discrete import gru_steps, lstm_gates, lstm_steps, qrnn_steps, sru_steps
from kernels.bench.peers.layers import packed, padded
from kernels.bench.peers.onnx_runtime import onnx_runtime
from kernels.bench.peers.peer import Peer
from kernels.bench.peers.sru_package import sru_package
from kernels.bench.workloads import Workload

_LAYERS = (Peer("torch padded", padded), Peer("torch packed", packed))
_ONNX_RUNTIME = Peer("onnxruntime", onnx_runtime, devices=("cpu",))
_SRU_PACKAGE = Peer("sru package", sru_package, eager_only="its kernel is launched on the default stream")


def _of_512(workload: Workload) -> bool:
    return workload.hidden == 512


def _one_row_of_512(workload: Workload) -> bool:
    return workload.rows == 1 and workload.hidden == 512


# On a GPU they take as long for every size: milliseconds, all of it the host's.
_SLOW = "20 copies of its loop are thousands of launches, which take longer to capture than to time"
_LSTM_LOOPS = (
    Peer("torch by step", lstm_steps, devices=("cpu",)),
    Peer("torch by step", lstm_steps, devices=("cuda",), eager_only=_SLOW, takes=_of_512),
    Peer("torch by gate", lstm_gates, eager_only=_SLOW, takes=_one_row_of_512),
)

PEERS: dict[str, tuple[Peer, ...]] = {
    "lstm": (*_LAYERS, *_LSTM_LOOPS, _ONNX_RUNTIME),
    "gru": (*_LAYERS, Peer("torch by step", gru_steps), _ONNX_RUNTIME),
    "sru": (Peer("torch by step", sru_steps), _SRU_PACKAGE),
    "qrnn": (Peer("torch by step", qrnn_steps),),
    "conv": (Peer("torch conv1d", conv1d),),
}
