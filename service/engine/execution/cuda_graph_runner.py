"""Runs the batches of one model on a GPU: as one CUDA graph if the batch fits a captured bucket, else launch by launch.

The graph reads lengths and offsets on the device, so it serves every mixture of lengths in its bucket. All work of a batch goes to the
engine's stream: the copy in, the layers, the copies out, and the event that marks its end. The copies are nodes of the graph, except for
the embedding, which few requests ask for. Batches in flight have separate host memory, so each has a graph with its copies.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from kernels.ragged import Ragged
from service.engine.batch import Batch
from service.engine.execution.cost_model import Cost
from service.engine.execution.device import Copy, GraphLaunch, OutputCollector
from service.engine.execution.graph_buckets import Bucket, GraphBuckets
from service.engine.execution.graph_capture import (
    CapturedLayers,
    GraphCapture,
    GraphPool,
    NotCapturable,
    ReplayTime,
    RunBetweenBatches,
    contiguous,
    even_lengths,
    run_now,
)
from service.engine.execution.in_flight import BatchArrays, InFlightBatch
from service.engine.execution.model_runner import ModelRunner
from service.engine.execution.state_check import DeviceStateCheck
from service.modeling.encoder import Encoder, Encoding

CAPTURE_SECONDS = 5.0
"""Time limit for capturing the graphs of one model. Batches of the buckets that are missing then run launch by launch."""
MAX_TRIAL_SECONDS = 1.0
"""A batch that takes longer is not run to measure its memory."""


@dataclass(frozen=True, slots=True)
class OutputCopies:
    """The copies of a batch's outputs to the host, with the embedding in a separate list, and the host arrays that they fill."""

    copies: list[Copy]
    embedding: list[Copy]
    arrays: BatchArrays


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """The graphs of one bucket.

    layers: owns the memory that the graphs use; launches, outputs: of the graph for each output collector;
    short, even, skewed: replay times of the layers with one step in each row, with rows of equal length that fill the bucket, and with one
    row of the maximum length.
    """

    layers: CapturedLayers
    launches: list[GraphLaunch]
    outputs: list[OutputCopies]
    short: ReplayTime
    even: ReplayTime
    skewed: ReplayTime

    def seconds(self, longest: int) -> float:
        """Return the predicted time of a replay with a longest row of `longest` steps: on the lines between the measured times."""
        less, more = (self.short, self.even) if longest <= self.even.longest else (self.even, self.skewed)
        per_step = max(0.0, more.seconds - less.seconds) / max(1, more.longest - less.longest)
        return less.seconds + per_step * max(0, longest - less.longest)


class CudaGraphRunner(ModelRunner):
    """Launches batches on a GPU without waiting for them. `fallback_reason` says why some buckets have no graph."""

    def __init__(
        self,
        encoder: Encoder,
        collectors: list[OutputCollector],
        pool: GraphPool,
        *,
        max_batch_sequences: int,
        max_batch_tokens: int,
        slots: int,
        run_between_batches: RunBetweenBatches = run_now,
    ) -> None:
        """run_between_batches: required if another thread launches batches at the same time."""
        limits = {"max_batch_sequences": max_batch_sequences, "max_batch_tokens": max_batch_tokens}
        super().__init__(encoder, **limits, slots=slots, in_flight=len(collectors))
        self._stream = collectors[0].stream
        self._graphs_have_slots = encoder.streams and encoder.resumes_for_free
        """Whether graphs also serve chunks that continue from a state slot, not only whole sequences."""
        steps = encoder.spec.input.max_steps
        self._largest = Bucket(max_batch_sequences, min(max_batch_tokens, max_batch_sequences * steps)), Bucket(1, steps)
        self._buckets = GraphBuckets([])
        self._captured: dict[Bucket, CapturedGraph] = {}
        capture = GraphCapture(self._encode_bucket, self._staging, self._stream, pool, run_between_batches)
        self.fallback_reason = self._capture_all(capture, collectors, (max_batch_sequences, max_batch_tokens, steps))
        targets = self._staging.row_slots(max_batch_sequences).targets
        self._device_check = DeviceStateCheck(encoder.state_numbers(), targets, collectors, pool)
        self._launch_cost = self.cost
        if self._captured:
            self.cost = self._graph_cost()

    @property
    def graphs(self) -> int:
        return len(self._captured)

    def predicted_seconds(self, batch: Batch) -> float:
        return self._seconds(batch, self._graph_for(batch)[1])

    def launch(self, batch: Batch, collector: OutputCollector | None = None) -> InFlightBatch:
        """Launch all work of a batch; raises whatever the model raises on the host."""
        assert collector is not None
        began = time.monotonic()
        bucket, captured = self._graph_for(batch)
        offsets = self._staging.stage(batch, collector.index, bucket.rows)
        staged = time.monotonic()
        if captured is None:
            outputs = self._launch_layers(batch, collector)
        else:
            captured.launches[collector.index].start()
            outputs = captured.outputs[collector.index]
        if batch.returns_embedding:
            self._start(outputs.embedding)
        finite = None if batch.whole else self._device_check.start(collector)
        collector.record_end()
        times, padded = (self._seconds(batch, captured), began, staged, time.monotonic()), bucket.tokens - batch.tokens
        by = "launches" if captured is None else "graph"
        return InFlightBatch(batch, offsets, outputs.arrays, *times, collector, by, padded, finite)

    def largest_bytes(self) -> int:
        """Return the device memory that the largest batches need without a graph: all rows, and one row of the maximum length.

        A layer that is launched step by step takes minutes for a long row: its memory is extrapolated from two shorter rows.
        """
        return max(self._batch_bytes(bucket) for bucket in self._largest)

    def _batch_bytes(self, bucket: Bucket) -> int:
        share = MAX_TRIAL_SECONDS / max(self._launch_cost.of(max(even_lengths(bucket)), bucket.tokens), MAX_TRIAL_SECONDS)
        rows, tokens = bucket.rows, max(2 * bucket.rows * self.encoder.spec.min_steps, int(share * bucket.tokens))
        if tokens >= bucket.tokens:
            return self._peak_bytes(bucket)
        half, whole = (self._peak_bytes(Bucket(rows, count)) for count in (tokens // 2, tokens))
        return whole + (whole - half) * (bucket.tokens - tokens) // (tokens - tokens // 2)

    def _peak_bytes(self, bucket: Bucket) -> int:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self._staging.stage_zeros(even_lengths(bucket))
        self._staging.copy(bucket.tokens).start(self._stream)
        torch.cuda.synchronize()  # before the host buffer is staged again
        self._encode(*bucket, sequence=True, whole=not self.streams)
        return torch.cuda.max_memory_allocated() - before

    def _seconds(self, batch: Batch, captured: CapturedGraph | None) -> float:
        """Return the predicted time of a batch, by its graph or without one."""
        return self._launch_cost.of(batch.longest, batch.tokens) if captured is None else captured.seconds(batch.longest)

    def _graph_for(self, batch: Batch) -> tuple[Bucket, CapturedGraph | None]:
        """Return the bucket and the graph that serve a batch, or its exact size and None."""
        exact = Bucket(batch.rows, batch.tokens)
        if batch.returns_sequence or not (batch.whole or self._graphs_have_slots):
            return exact, None
        bucket = self._buckets.bucket(*exact)
        captured = None if bucket is None else self._captured.get(bucket)
        return (exact, None) if bucket is None or captured is None else (bucket, captured)

    def _launch_layers(self, batch: Batch, collector: OutputCollector) -> OutputCopies:
        """Launch a batch of exactly its size, layer by layer, with its copies."""
        self._staging.copy(batch.tokens, collector.index).start(self._stream)
        ragged, encoding = self._encode(batch.rows, batch.tokens, sequence=batch.returns_sequence, whole=batch.whole)
        outputs = self._output_copies(contiguous(encoding), ragged, collector)
        self._start(outputs.copies)
        return outputs

    def _start(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            copy.start(self._stream)

    def _encode_bucket(self, bucket: Bucket) -> tuple[Ragged, Encoding]:
        return self._encode(*bucket, whole=not self._graphs_have_slots)

    def _capture_all(
        self, capture: GraphCapture, collectors: list[OutputCollector], limits: tuple[int, int, int]
    ) -> str | None:
        """Choose the buckets and capture their graphs. limits: of rows, tokens and steps. Returns why some are missing, None if none is."""
        try:
            self._buckets = GraphBuckets(capture.token_costs(*limits))
            for bucket in self._buckets.buckets:
                if capture.seconds > CAPTURE_SECONDS:
                    return f"{self.graphs} graphs took {capture.seconds:.1f} s"
                self._captured[bucket] = self._capture(capture, bucket, collectors)
        except NotCapturable as error:
            return str(error)
        return None

    def _capture(self, capture: GraphCapture, bucket: Bucket, collectors: list[OutputCollector]) -> CapturedGraph:
        layers = capture.layers(bucket)
        outputs = [self._output_copies(layers.encoding, layers.ragged, collector, may_wait=False) for collector in collectors]
        launches = [
            capture.with_copies(bucket, collector.index, copies.copies)
            for collector, copies in zip(collectors, outputs, strict=True)
        ]
        lengths = [1] * bucket.rows, even_lengths(bucket), self._skewed(bucket)
        times = [capture.replay_time(bucket, each) for each in lengths]
        return CapturedGraph(layers, launches, outputs, *times)

    def _graph_cost(self) -> Cost:
        """Fit the cost model: the fewest rows give the cost of a batch and of a step, the fullest bucket the cost of a further token."""
        fewest = min(self._captured).rows
        of_fewest = sorted(bucket for bucket in self._captured if bucket.rows == fewest)
        short, long = self._captured[of_fewest[0]].short, self._captured[of_fewest[-1]].even
        more_steps = long.longest - short.longest
        per_step = max(0.0, long.seconds - short.seconds) / more_steps if more_steps else short.seconds / short.longest
        fixed, full = max(0.0, short.seconds - per_step * short.longest), max(self._captured)
        fullest = self._captured[full].even
        return Cost(fixed, per_step, max(0.0, fullest.seconds - fixed - per_step * fullest.longest) / full.tokens)

    def _skewed(self, bucket: Bucket) -> list[int]:
        """Return the row lengths of a bucket with one row as long as possible and one step in each other row."""
        short_rows = bucket.rows - 1
        return [min(self.encoder.spec.input.max_steps, bucket.tokens - short_rows), *[1] * short_rows]

    def _output_copies(
        self, encoding: Encoding, ragged: Ragged, collector: OutputCollector, *, may_wait: bool = True
    ) -> OutputCopies:
        """Return the copies of an encoding to the collector. An array that does not fit is copied now, or raises NotCapturable."""
        head, offsets = encoding.head_output, None if encoding.offsets is ragged.offsets else encoding.offsets
        outputs = [head.scores, head.picks, head.embedding, encoding.sequence, offsets]
        copies: list[Copy] = []
        embedding: list[Copy] = []
        arrays: list[Any] = []
        for array, target in zip(outputs, collector.host_arrays(outputs), strict=True):
            if array is None:
                arrays.append(None)
            elif target is not None:
                (embedding if array is head.embedding else copies).append(Copy(target, array))
                arrays.append(target.numpy())
            elif may_wait:
                arrays.append(array.cpu().numpy())
            else:
                raise NotCapturable("its outputs do not fit into the host buffer")
        scores, picks, vectors, sequence, offsets = arrays
        return OutputCopies(copies, embedding, BatchArrays(scores, picks, vectors, sequence, offsets, head.per_step))
