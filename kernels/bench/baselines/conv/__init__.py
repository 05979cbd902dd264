"""Strategies for a convolution, as the literature has them, beside the library's own: the same answers by other ways."""

from __future__ import annotations

from kernels.bench.baselines.baseline import Peer
from kernels.bench.baselines.beside import square_product
from kernels.bench.baselines.conv.batch_innermost import batch_innermost
from kernels.bench.baselines.conv.conv1d import channels_last, conv1d, embedding_and_conv1d
from kernels.bench.baselines.conv.direct import loops_on_cpu, loops_on_cuda
from kernels.bench.baselines.conv.low_rank import low_rank
from kernels.bench.baselines.conv.lowering import in_tiles, lowered, tap_by_tap
from kernels.bench.baselines.conv.temporal import layer_by_layer
from kernels.bench.baselines.conv.winograd import winograd
from kernels.bench.shares import multiplications
from kernels.bench.workload import EMBEDDED, STACKS, Workload

LOOPS_ON_CPU, LOOPS_ON_CUDA = 2 * 10**8, 10**9
"""Multiplications for which loops take a tenth of a second, or some milliseconds."""


def _over_vectors(workload: Workload) -> bool:
    return workload.kind in ("text-cnn", "dense-conv")


def _over_ids(workload: Workload) -> bool:
    """Once, as it is the same beside each of our forms."""
    return workload.kind == "text-cnn-ids" and workload.form == EMBEDDED


def _stack(workload: Workload) -> bool:
    return workload.kind in STACKS


def _small(workload: Workload, limit: int) -> bool:
    many = multiplications(workload)
    return _over_vectors(workload) and many is not None and many <= limit


def _small_on_cpu(workload: Workload) -> bool:
    return _small(workload, LOOPS_ON_CPU)


def _small_on_cuda(workload: Workload) -> bool:
    return _small(workload, LOOPS_ON_CUDA)


def _product(workload: Workload) -> bool:
    return workload.kind == "product"


CONV = (
    Peer("one product", square_product, takes=_product),
    Peer("torch conv1d", conv1d, takes=_over_vectors),
    Peer("torch conv1d", embedding_and_conv1d, takes=_over_ids),
    Peer("torch conv1d", layer_by_layer, takes=_stack),
    Peer("channels last", channels_last, takes=_over_vectors),
    Peer("direct loops", loops_on_cpu, devices=("cpu",), takes=_small_on_cpu),
    Peer("direct loops", loops_on_cuda, devices=("cuda",), takes=_small_on_cuda),
    Peer("im2col + product", lowered, takes=_over_vectors),
    Peer("tiled implicit lowering", in_tiles, devices=("cpu",), takes=_over_vectors),
    Peer("tiled implicit lowering", tap_by_tap, devices=("cuda",), takes=_over_vectors),
    Peer("batch innermost", batch_innermost, takes=_over_vectors),
    Peer("Winograd F(2,3)", winograd, takes=_over_vectors),
    Peer("low rank", low_rank, takes=_over_vectors),
)
