"""Checks on a GPU that the states which a batch wrote are finite."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from service.engine.execution.device import Copy, GraphLaunch, OutputCollector
from service.engine.execution.graph_capture import GraphPool
from service.modeling.encoder import Encoder


class StateCheck:
    """A small CUDA graph of its own behind each batch with chunks, so that batches of whole sequences do not pay for it.

    The slabs, the device's copy of the slot numbers and the host's copy of the result keep their addresses: one graph for each collector
    serves batches of every size. Rows behind the batch write to DISCARD_SLOT, and their result is ignored.
    """

    def __init__(self, encoder: Encoder, targets: Tensor, collectors: list[OutputCollector], pool: GraphPool) -> None:
        """targets: (max rows,) int32 on the device, the slots that the rows of the staged batch write."""
        encoder.finite_states(targets)  # loads its kernels, which a capture must not
        self._results: list[Tensor] = []
        self._launches: list[GraphLaunch] = []
        for collector in collectors:
            result, graph = torch.zeros(len(targets), dtype=torch.bool, pin_memory=True), torch.cuda.CUDAGraph()
            captured_on = torch.cuda.current_stream().cuda_stream
            with pool.capturing(graph):
                Copy(result, encoder.finite_states(targets)).start(captured_on)
            self._results.append(result)
            self._launches.append(GraphLaunch(graph, collector.stream))

    def start(self, collector: OutputCollector) -> NDArray[Any]:
        """Launch the check behind the launched batch. Returns (max rows,) bool, complete when the collector is."""
        self._launches[collector.index].start()
        return self._results[collector.index].numpy()
