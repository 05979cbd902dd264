"""Strategies for a convolution from the literature, and the library's own convolution. All return the same answers."""

from __future__ import annotations

from functools import partial

from kernels.bench.baselines.baseline import Baseline
from kernels.bench.baselines.comparison import square_product
from kernels.bench.baselines.conv.conv1d import channels_last, conv1d, embedding_and_conv1d, layer_by_layer
from kernels.bench.baselines.conv.direct import loops_on_cpu, loops_on_cuda
from kernels.bench.baselines.conv.low_rank import low_rank
from kernels.bench.baselines.conv.lowering import batch_innermost, in_tiles, lowered, tap_by_tap
from kernels.bench.baselines.conv.winograd import winograd
from kernels.bench.work import multiplications
from kernels.bench.workload import EMBEDDED, STACKS, Workload

CPU, CUDA = ("cpu",), ("cuda",)
LOOPS_ON_CPU, LOOPS_ON_CUDA = 2 * 10**8, 10**9
"""Multiplications that take the loops a tenth of a second, or some milliseconds."""


def _over_vectors(workload: Workload) -> bool:
    return workload.kind in ("text-cnn", "dense-conv")


def _over_ids(workload: Workload) -> bool:
    """The baseline is the same for both of our forms, so it runs once."""
    return workload.kind == "text-cnn-ids" and workload.form == EMBEDDED


def _small(limit: int, workload: Workload) -> bool:
    return _over_vectors(workload) and multiplications(workload) <= limit


CONV = (
    Baseline("one product", square_product, condition=lambda workload: workload.kind == "product"),
    Baseline("torch conv1d", conv1d, condition=_over_vectors),
    Baseline("torch conv1d", embedding_and_conv1d, condition=_over_ids),
    Baseline("torch conv1d", layer_by_layer, condition=lambda workload: workload.kind in STACKS),
    Baseline("channels last", channels_last, condition=_over_vectors),
    Baseline("direct loops", loops_on_cpu, CPU, condition=partial(_small, LOOPS_ON_CPU)),
    Baseline("direct loops", loops_on_cuda, CUDA, condition=partial(_small, LOOPS_ON_CUDA)),
    Baseline("im2col + product", lowered, condition=_over_vectors),
    Baseline("tiled implicit lowering", in_tiles, CPU, condition=_over_vectors),
    Baseline("tiled implicit lowering", tap_by_tap, CUDA, condition=_over_vectors),
    Baseline("batch innermost", batch_innermost, condition=_over_vectors),
    Baseline("Winograd F(2,3)", winograd, condition=_over_vectors),
    Baseline("low rank", low_rank, condition=_over_vectors),
)
