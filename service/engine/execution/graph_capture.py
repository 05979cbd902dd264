"""Captures the layers of one model as CUDA graphs, and measures them to choose the sizes that get graphs."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import torch

from kernels.ragged import Ragged
from service.engine.execution.device import Copy, GraphLaunch, add_to_capture, end_capture
from service.engine.execution.graph_buckets import ROW_PADDING, Bucket, TokenCost, row_counts, token_limits
from service.engine.execution.staging import Staging
from service.modeling.encoder import Encoding
from service.modeling.heads import HeadOutput

T = TypeVar("T")
TIMED_REPLAYS = 3
TYPICAL_STEPS = 16
"""Steps of a row in the batches that decide whether a row count gets graphs."""


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
        with self.capturing(graph):
            array.add_(1)

    @contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture the work of the block as a graph."""
        # The context manager torch.cuda.graph would run the garbage collector and empty the allocator's cache before each capture.
        torch.cuda.synchronize()
        graph.capture_begin(pool=self.handle, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # the error of the block is the cause
                end_capture(graph)
            raise
        end_capture(graph)


class ReplayTime(NamedTuple):
    """Device time of a replay with a longest row of `longest` steps."""

    longest: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CapturedLayers:
    """The layers of a bucket as a graph without copies, with their input and their output on the device."""

    graph: torch.cuda.CUDAGraph
    ragged: Ragged
    encoding: Encoding


class GraphCapture:
    """Captures the graphs of one model. Each size of the layers is captured once."""

    def __init__(
        self,
        encode: Callable[[Bucket], tuple[Ragged, Encoding]],
        staging: Staging,
        stream: int,
        pool: GraphPool,
        run_between_batches: RunBetweenBatches,
    ) -> None:
        """encode: launches the layers on the staged batch. stream: on which batches run, as the driver's handle."""
        self._encode = encode
        self._staging = staging
        self._stream = stream
        self._pool = pool
        self._run_between_batches = run_between_batches
        self._layers: dict[Bucket, CapturedLayers] = {}
        self.seconds = 0.0
        """The time that captures and replays took, without compilation."""

    def layers(self, bucket: Bucket) -> CapturedLayers:
        """Return the graph of a bucket's layers; raises NotCapturable."""
        if bucket not in self._layers:
            self._check_capturable(bucket)
            began = time.monotonic()
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with self._capturing(graph, bucket):
                ragged, encoding = self._encode(bucket)
                encoding = contiguous(encoding)
            self._layers[bucket] = CapturedLayers(graph, ragged, encoding)
            self.seconds += time.monotonic() - began
        return self._layers[bucket]

    def with_copies(self, bucket: Bucket, buffer: int, copies_out: Sequence[Copy]) -> GraphLaunch:
        """Return the launch of a graph that copies a host buffer to the device, runs the layers, and copies their outputs.

        Raises NotCapturable.
        """
        began = time.monotonic()
        layers, graph = self.layers(bucket), torch.cuda.CUDAGraph()
        captured_on = torch.cuda.current_stream().cuda_stream
        with self._capturing(graph, bucket):
            self._staging.copy(bucket.tokens, buffer).start(captured_on)
            add_to_capture(layers.graph, captured_on)
            for copy in copies_out:
                copy.start(captured_on)
        self.seconds += time.monotonic() - began
        return GraphLaunch(graph, self._stream)

    def replay_time(self, bucket: Bucket, lengths: list[int]) -> ReplayTime:
        """Measure the layers of a bucket with rows of these lengths."""
        graph = self.layers(bucket).graph
        began = time.monotonic()
        seconds = self._run_between_batches(partial(self._replay_seconds, graph, bucket, lengths))
        self.seconds += time.monotonic() - began
        return ReplayTime(max(lengths), seconds)

    def token_costs(self, max_rows: int, max_tokens: int, max_steps: int) -> list[TokenCost]:
        """Measure the row counts that get graphs. max_steps: of one row. Raises NotCapturable."""
        copied = self._run_between_batches(partial(self._copy_seconds, max_tokens)) / max_tokens
        costs: list[TokenCost] = []
        for rows in row_counts(max_rows):
            least, most = token_limits(rows, max_tokens, max_steps)
            if not costs or not self._served_by(costs[-1], rows, least, most):
                costs.append(self._token_cost(rows, least, most, copied))
        return costs

    def _served_by(self, larger: TokenCost, rows: int, least: int, most: int) -> bool:
        """Return whether the graphs of a larger row count run typical batches of `rows` rows in nearly the same time."""
        tokens = max(least, min(most, rows * TYPICAL_STEPS))
        lengths = even_lengths(Bucket(rows, tokens))
        other = self.replay_time(Bucket(larger.rows, max(larger.least, tokens)), lengths)
        return other.seconds <= (1 + ROW_PADDING) * self.replay_time(Bucket(rows, tokens), lengths).seconds

    def _token_cost(self, rows: int, least: int, most: int, copied: float) -> TokenCost:
        """Measure a row count. copied: seconds for the copy of a token to the device."""
        smallest, largest = Bucket(rows, least), Bucket(rows, most)
        shortest = self.replay_time(smallest, even_lengths(smallest)).seconds
        longest = self.replay_time(largest, even_lengths(largest)).seconds
        padded = self.replay_time(largest, even_lengths(smallest)).seconds
        per_token = max(0.0, padded - shortest) / max(1, most - least) + copied
        return TokenCost(rows, least, most, shortest, longest, per_token)

    @contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph, bucket: Bucket) -> Iterator[None]:
        """Capture the work of the block; raises NotCapturable if a call in it is illegal in a capture."""
        try:
            with self._pool.capturing(graph):
                yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise NotCapturable(
                f"the capture of a batch of {bucket.rows} rows and {bucket.tokens} steps failed: {reason}"
            ) from error

    def _check_capturable(self, bucket: Bucket) -> None:
        """Run a batch once, which may compile kernels, then once more; raises NotCapturable if the second run waits for the device."""
        self._staging.stage_zeros(even_lengths(bucket))
        self._start_copy(bucket.tokens)
        self._encode(bucket)
        self._run_between_batches(partial(self._encode_without_waiting, bucket))

    def _encode_without_waiting(self, bucket: Bucket) -> None:
        # The check is process-wide: no batch of another model may be launched meanwhile.
        with _no_waiting():
            self._encode(bucket)

    def _replay_seconds(self, graph: torch.cuda.CUDAGraph, bucket: Bucket, lengths: list[int]) -> float:
        self._staging.stage_zeros(lengths, rows=bucket.rows)
        self._start_copy(bucket.tokens)
        return _device_seconds(graph.replay)

    def _copy_seconds(self, tokens: int) -> float:
        copy, stream = self._staging.copy(tokens), torch.cuda.current_stream().cuda_stream
        return _device_seconds(partial(copy.start, stream))

    def _start_copy(self, tokens: int) -> None:
        """Copy the staged batch to the device."""
        self._staging.copy(tokens).start(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()  # before the host buffer is staged again


def contiguous(encoding: Encoding) -> Encoding:
    """Return an encoding with contiguous arrays, so that one copy moves each array."""
    head = encoding.head_output
    scores, picks, embedding, sequence = (
        None if array is None else array.contiguous() for array in (head.scores, head.picks, head.embedding, encoding.sequence)
    )
    return replace(encoding, head_output=HeadOutput(scores, picks, embedding, head.per_step), sequence=sequence)


def even_lengths(bucket: Bucket) -> list[int]:
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


def _device_seconds(work: Callable[[], None]) -> float:
    """Return the fastest of a few runs on the current stream, on the clock of the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    seconds = []
    for _ in range(TIMED_REPLAYS):
        begin.record()
        work()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return float(min(seconds))
