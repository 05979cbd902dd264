"""Checks which rows of a batch have written a finite state. Every number of a slot is finite once a batch has written it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from service.engine.batching.state_slots import Numbers
from service.engine.execution.device import Copy, GraphLaunch, OutputCollector
from service.engine.execution.graph_capture import GraphPool
from service.engine.execution.in_flight import Array


def host_finite_rows(slabs: Sequence[Array], targets: Numbers) -> Array | None:
    """The check on a CPU, for a few microseconds: torch would take several times as long. slabs: (slots, numbers) each.

    Returns (rows,) bool for the slots that the rows have written; None if all rows are finite.
    """
    finite = [np.isfinite(slab.take(targets, 0)) for slab in slabs]
    if all(flags.all() for flags in finite):
        return None
    rows: Array = np.logical_and.reduce([flags.all(1) for flags in finite])
    return rows


class DeviceStateCheck:
    """The check on a GPU: a small CUDA graph behind each batch with chunks, so that batches of whole sequences do not pay for it.

    The slabs, the device's copy of the slot numbers and the host's copy of the result keep their addresses: one graph for each collector
    serves batches of every size. Rows behind the batch write to DISCARD_SLOT, and their result is ignored.
    """

    def __init__(
        self, slabs: Sequence[Tensor], targets: Tensor, collectors: Sequence[OutputCollector], pool: GraphPool
    ) -> None:
        """targets: (max rows,) int32 on the device, the slots that the rows of the staged batch write."""
        finite_rows(slabs, targets)  # loads its kernels, which a capture must not
        self._results: list[Tensor] = []
        self._launches: list[GraphLaunch] = []
        for collector in collectors:
            result, graph = torch.zeros(len(targets), dtype=torch.bool, pin_memory=True), torch.cuda.CUDAGraph()
            captured_on = torch.cuda.current_stream().cuda_stream
            with pool.capturing(graph):
                Copy(result, finite_rows(slabs, targets)).start(captured_on)
            self._results.append(result)
            self._launches.append(GraphLaunch(graph, collector.stream))

    def start(self, collector: OutputCollector) -> Array:
        """Launch the check behind the launched batch. Returns (max rows,) bool, complete when the collector is."""
        self._launches[collector.index].start()
        return self._results[collector.index].numpy()


@torch.inference_mode()
def finite_rows(slabs: Sequence[Tensor], targets: Tensor) -> Tensor:
    """Return (rows,) bool on the device: whether each slot of `targets` has finite numbers only. slabs: (slots, numbers) each."""
    if not slabs:
        return torch.ones(len(targets), dtype=torch.bool, device=targets.device)
    states = torch.cat([slab.index_select(0, targets) for slab in slabs], dim=1)
    return (states - states).any(1).logical_not()  # a finite number minus itself is 0, any other is NaN
