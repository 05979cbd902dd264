"""Who is timed beside us, by family. A peer gets the same numbers in its own layout before the clock starts."""

from __future__ import annotations

from kernels.bench.peers.conv1d import conv1d
from kernels.bench.peers.discrete import gru_steps, lstm_steps, qrnn_steps, sru_steps
from kernels.bench.peers.layers import packed, padded
from kernels.bench.peers.onnx_runtime import onnx_runtime
from kernels.bench.peers.peer import Peer
from kernels.bench.peers.sru_package import sru_package

_LAYERS = (Peer("torch padded", padded), Peer("torch packed", packed))
_ONNX_RUNTIME = Peer("onnxruntime", onnx_runtime, devices=("cpu",))
_SRU_PACKAGE = Peer("sru package", sru_package, eager_only="its kernel is launched on the default stream")

PEERS: dict[str, tuple[Peer, ...]] = {
    "lstm": (*_LAYERS, Peer("torch by step", lstm_steps), _ONNX_RUNTIME),
    "gru": (*_LAYERS, Peer("torch by step", gru_steps), _ONNX_RUNTIME),
    "sru": (Peer("torch by step", sru_steps), _SRU_PACKAGE),
    "qrnn": (Peer("torch by step", qrnn_steps),),
    "conv": (Peer("torch conv1d", conv1d),),
}
