"""Runs the batches of one model on a GPU: as one CUDA graph if the batch fits a captured bucket, else launch by launch.

The graph reads lengths and offsets on the device, so it serves every mixture of lengths in its bucket. All work of a batch goes to the
engine's stream: the copy in, the layers, the copies out, and the event that marks its end.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from kernels.ragged import Ragged
from service.engine.batch import Batch, Chunk
from service.engine.execution.cost_model import Cost
from service.engine.execution.device import Copy, OutputCollector
from service.engine.execution.graph_buckets import Bucket, GraphBuckets
from service.engine.execution.in_flight import BatchArrays, InFlightBatch
from service.engine.execution.model_runner import ModelRunner
from service.ipc.messages import ModelKey, Returns
from service.modeling.encoder import Encoder, Encoding
from service.modeling.heads import HeadOutput

T = TypeVar("T")
CAPTURE_SECONDS = 5.0
"""Time limit for capturing the graphs of one model. Batches of the buckets that are missing then run launch by launch."""
TIMED_REPLAYS = 3
MAX_TRIAL_SECONDS = 1.0
"""A batch that takes longer is not run to measure its memory."""


class RunBetweenBatches(Protocol):
    """Runs work between two batches in the thread that launches them. Returns its result or raises its error."""

    def __call__(self, work: Callable[[], T]) -> T: ...


class NotCapturable(Exception):
    """A batch of this model cannot be captured as a graph; the message is the reason."""


def run_now(work: Callable[[], T]) -> T:
    """Run work in this thread, which launches the batches."""
    return work()


class GraphPool:
    """Device memory that the graphs of all models share. Graphs never overlap: all are replayed on the engine's stream."""

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        # torch frees a pool when its last graph is freed. This graph keeps the pool alive when models are unloaded.
        self._kept = torch.cuda.CUDAGraph(), torch.zeros(1, device=device)
        graph, array = self._kept
        array.add_(1)  # loads its kernel, which a capture must not
        torch.cuda.synchronize()
        graph.capture_begin(pool=self.handle, capture_error_mode="thread_local")
        array.add_(1)
        graph.capture_end()


@dataclass(frozen=True, slots=True)
class OutputCopies:
    """The copies of a batch's outputs to the host, with the embedding in a separate list, and the host arrays that they fill."""

    copies: list[Copy]
    embedding: list[Copy]
    arrays: BatchArrays


@dataclass(frozen=True, slots=True)
class ReplayTime:
    """Device time of a replay with a longest row of `longest` steps."""

    longest: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """One graph, with its copies for each output collector.

    even, skewed: replay times with rows of equal length, and with one row of the maximum length.
    """

    graph: torch.cuda.CUDAGraph
    copies_in: list[Copy]
    copies_out: list[OutputCopies]
    even: ReplayTime
    skewed: ReplayTime

    def seconds(self, longest: int) -> float:
        """Return the predicted time of a replay with a longest row of `longest` steps."""
        more_steps = max(1, self.skewed.longest - self.even.longest)
        per_step = max(0.0, self.skewed.seconds - self.even.seconds) / more_steps
        return self.even.seconds + per_step * max(0, longest - self.even.longest)


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
        self._run_between_batches = run_between_batches
        self._graphs_have_slots = encoder.streams and encoder.resumes_for_free
        """Whether graphs also serve chunks that continue from a state slot, not only whole sequences."""
        steps = encoder.spec.input.max_steps
        self._largest = Bucket(max_batch_sequences, min(max_batch_tokens, max_batch_sequences * steps)), Bucket(1, steps)
        self._buckets = GraphBuckets(max_batch_sequences, max_batch_tokens, steps)
        self._captured: dict[Bucket, CapturedGraph] = {}
        self.fallback_reason = self._capture_all(collectors, pool)
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
            captured.copies_in[collector.index].start()
            captured.graph.replay()
            outputs = captured.copies_out[collector.index]
        for copy in (*outputs.copies, *(outputs.embedding if batch.returns_embedding else ())):
            copy.start()
        collector.record_end()
        return InFlightBatch(
            batch,
            offsets,
            outputs.arrays,
            self._seconds(batch, captured),
            began,
            staged,
            time.monotonic(),
            collector,
            by_graph=captured is not None,
            padded_tokens=bucket.tokens - batch.tokens,
        )

    def largest_bytes(self) -> int:
        """Return the device memory that the largest batches need without a graph: all rows, and one row of the maximum length.

        A layer that is launched step by step takes minutes for a long row: its memory is extrapolated from two shorter rows.
        """
        return max(self._batch_bytes(bucket) for bucket in self._largest)

    def _batch_bytes(self, bucket: Bucket) -> int:
        share = MAX_TRIAL_SECONDS / max(self._launch_cost.of(max(_even(bucket)), bucket.tokens), MAX_TRIAL_SECONDS)
        rows, tokens = bucket.rows, max(2 * bucket.rows * self.encoder.spec.min_steps, int(share * bucket.tokens))
        if tokens >= bucket.tokens:
            return self._peak_bytes(bucket)
        half, whole = (self._peak_bytes(Bucket(rows, count)) for count in (tokens // 2, tokens))
        return whole + (whole - half) * (bucket.tokens - tokens) // (tokens - tokens // 2)

    def _peak_bytes(self, bucket: Bucket) -> int:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self._stage_trial(bucket, _even(bucket))
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
        """Launch a batch of exactly its size, layer by layer."""
        self._staging.copy(batch.tokens, self._stream, collector.index).start()
        ragged, encoding = self._encode(batch.rows, batch.tokens, sequence=batch.returns_sequence, whole=batch.whole)
        return self._output_copies(_contiguous(encoding), ragged, collector)

    def _capture_all(self, collectors: list[OutputCollector], pool: GraphPool) -> str | None:
        """Capture the graphs of all buckets. Returns why some are missing, None if none is."""
        seconds = 0.0
        for bucket in self._buckets.buckets:
            if seconds > CAPTURE_SECONDS:
                return f"{self.graphs} graphs took {seconds:.1f} s"
            try:
                self._check_capturable(bucket)
                began = time.monotonic()
                self._captured[bucket] = self._capture(bucket, collectors, pool)
            except NotCapturable as error:
                return str(error)
            seconds += time.monotonic() - began
        return None

    def _graph_cost(self) -> Cost:
        """Fit the cost model: single rows give the cost of a batch and of a step, the fullest bucket the cost of a further token."""
        singles = sorted(bucket for bucket in self._captured if bucket.rows == 1) or [min(self._captured)]
        short, long = (self._captured[bucket].even for bucket in (singles[0], singles[-1]))
        more_steps = long.longest - short.longest
        per_step = max(0.0, long.seconds - short.seconds) / more_steps if more_steps else short.seconds / short.longest
        fixed, full = max(0.0, short.seconds - per_step * short.longest), max(self._captured)
        fullest = self._captured[full].even
        return Cost(fixed, per_step, max(0.0, fullest.seconds - fixed - per_step * fullest.longest) / full.tokens)

    def _check_capturable(self, bucket: Bucket) -> None:
        """Run a batch once, which may compile kernels, then once more; raises NotCapturable if the second run waits for the device."""
        self._stage_trial(bucket, _even(bucket))
        self._encode(*bucket, whole=not self._graphs_have_slots)
        self._run_between_batches(partial(self._encode_without_waiting, bucket))

    def _encode_without_waiting(self, bucket: Bucket) -> None:
        # The check is process-wide: no batch of another model may be launched meanwhile.
        with _no_waiting():
            self._encode(*bucket, whole=not self._graphs_have_slots)

    def _capture(self, bucket: Bucket, collectors: list[OutputCollector], pool: GraphPool) -> CapturedGraph:
        graph = torch.cuda.CUDAGraph()
        # The context manager torch.cuda.graph would run the garbage collector and empty the allocator's cache before each capture.
        torch.cuda.synchronize()
        graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
        try:
            ragged, encoding = self._encode(*bucket, whole=not self._graphs_have_slots)
            encoding = _contiguous(encoding)
        finally:
            graph.capture_end()
        copies_out = [self._output_copies(encoding, ragged, collector, may_wait=False) for collector in collectors]
        times = [
            self._run_between_batches(partial(self._replay_time, graph, bucket, lengths))
            for lengths in (_even(bucket), self._skewed(bucket))
        ]
        copies_in = [self._staging.copy(bucket.tokens, self._stream, collector.index) for collector in collectors]
        return CapturedGraph(graph, copies_in, copies_out, *times)

    def _replay_time(self, graph: torch.cuda.CUDAGraph, bucket: Bucket, lengths: list[int]) -> ReplayTime:
        self._stage_trial(bucket, lengths)
        return ReplayTime(max(lengths), _replay_seconds(graph))

    def _skewed(self, bucket: Bucket) -> list[int]:
        """Return the row lengths of a bucket with one row as long as possible and one step in each other row."""
        short_rows = bucket.rows - 1
        return [min(self.encoder.spec.input.max_steps, bucket.tokens - short_rows), *[1] * short_rows]

    def _stage_trial(self, bucket: Bucket, lengths: list[int]) -> None:
        """Stage zeros with rows of these lengths, and copy them to the device."""
        chunks = [Chunk(bytes(steps * self._staging.step_bytes), steps, Returns(), None) for steps in lengths]
        self._staging.stage(Batch(ModelKey(self.encoder.spec.name, ""), chunks))
        self._staging.copy(bucket.tokens, self._stream).start()
        torch.cuda.synchronize()  # before the host buffer is staged again

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
                (embedding if array is head.embedding else copies).append(Copy(target, array, self._stream))
                arrays.append(target.numpy())
            elif may_wait:
                arrays.append(array.cpu().numpy())
            else:
                raise NotCapturable("its outputs do not fit into the host buffer")
        scores, picks, vectors, sequence, offsets = arrays
        return OutputCopies(copies, embedding, BatchArrays(scores, picks, vectors, sequence, offsets, head.per_step))


def _contiguous(encoding: Encoding) -> Encoding:
    """Return an encoding with contiguous arrays, so that one copy moves each array."""
    head = encoding.head_output
    scores, picks, embedding, sequence = (
        None if array is None else array.contiguous() for array in (head.scores, head.picks, head.embedding, encoding.sequence)
    )
    return replace(encoding, head_output=HeadOutput(scores, picks, embedding, head.per_step), sequence=sequence)


def _even(bucket: Bucket) -> list[int]:
    """Return row lengths that divide the tokens of a bucket evenly."""
    whole, odd = divmod(bucket.tokens, bucket.rows)
    return [whole + (row < odd) for row in range(bucket.rows)]


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Raise NotCapturable if anything waits for the device. A failed capture would leave the allocator in an undefined state."""
    with warnings.catch_warnings():  # torch warns that this mode is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        raise NotCapturable(str(error).splitlines()[0]) from error
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Return the fastest of a few replays, on the clock of the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    seconds = []
    for _ in range(TIMED_REPLAYS):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return float(min(seconds))
