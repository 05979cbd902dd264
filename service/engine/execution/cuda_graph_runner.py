"""A model's turns on a GPU: as one CUDA graph where they fit a bucket of its ladder, else launch after launch.

Offsets are read on the device, so that one graph serves every mixture of lengths in its bucket. Everything goes to this thread's
stream: a copy in, the layers, a copy out, and an event by which the end is known.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import torch

from kernels.contract import Ragged
from service.engine.batch import Batch, Chunk
from service.engine.execution.cost_model import Cost
from service.engine.execution.device import Copy, OutputCollector
from service.engine.execution.graph_buckets import Bucket, GraphBuckets
from service.engine.execution.in_flight import BatchArrays, InFlightBatch
from service.engine.execution.model_runner import ModelRunner
from service.ipc.messages import ModelKey, Returns
from service.modeling.encoder import Encoder, Encoding
from service.modeling.heads import Verdict

T = TypeVar("T")
CAPTURE_SECONDS = 5.0
"""A model's graphs are captured for so long at most; turns of the sizes that are missing then are launched as they are."""
TIMED_REPLAYS = 3
LONGEST_TRY_SECONDS = 1.0
"""A turn that takes longer is not run to see what memory it takes."""


class Between(Protocol):
    """Has something done by the thread that launches turns, between two of them; gives what it gives, or raises what it raises."""

    def __call__(self, work: Callable[[], T]) -> T: ...


class NotCapturable(Exception):
    """No graph holds a turn of this model; the message says why."""


def _at_once(work: Callable[[], T]) -> T:
    """This thread launches turns itself."""
    return work()


class Pool:
    """Memory of the device that the graphs of all models share, which never run side by side: each is replayed on the stream of turns."""

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        # A pool that no graph uses can be used by none any more: this one does, whichever models go.
        self._kept = torch.cuda.CUDAGraph(), torch.zeros(1, device=device)
        graph, some = self._kept
        some.add_(1)  # loads its kernel, which a capture may not
        torch.cuda.synchronize()
        graph.capture_begin(pool=self.handle, capture_error_mode="thread_local")
        some.add_(1)
        graph.capture_end()


@dataclass(frozen=True, slots=True)
class Landing:
    """What comes back from a turn in one place: the copies to the host, those of the embedding apart, and the arrays that they fill."""

    copies: list[Copy]
    embedding: list[Copy]
    arrays: BatchArrays


@dataclass(frozen=True, slots=True)
class Timed:
    """What a replay takes on the device when the longest row has so many steps."""

    longest: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Captured:
    """One graph. copies_in, landings: by place; even, skewed: replays of rows of like length, and of one that is as long as can be."""

    graph: torch.cuda.CUDAGraph
    copies_in: list[Copy]
    landings: list[Landing]
    even: Timed
    skewed: Timed

    def seconds(self, longest: int) -> float:
        """Of a replay when the longest row has so many steps."""
        further = max(1, self.skewed.longest - self.even.longest)
        per_step = max(0.0, self.skewed.seconds - self.even.seconds) / further
        return self.even.seconds + per_step * max(0, longest - self.even.longest)


class CudaGraphRunner(ModelRunner):
    """Runs turns on a GPU, where a turn goes on after it was launched. `why` says what kept turns out of graphs, if anything did."""

    def __init__(
        self,
        encoder: Encoder,
        places: list[OutputCollector],
        pool: Pool,
        *,
        max_batch_sequences: int,
        max_batch_tokens: int,
        slots: int,
        between_batches: Between = _at_once,
    ) -> None:
        """between_turns: where another thread than this one launches turns."""
        limits = {"max_batch_sequences": max_batch_sequences, "max_batch_tokens": max_batch_tokens}
        super().__init__(encoder, **limits, slots=slots, places=len(places))
        self._stream = places[0].stream
        self._between_turns = between_batches
        self._any_place = encoder.streams and encoder.free_states
        """Whether graphs also serve sequences that go on, and not only whole ones."""
        steps = encoder.spec.input.max_steps
        self._largest = Bucket(max_batch_sequences, min(max_batch_tokens, max_batch_sequences * steps)), Bucket(1, steps)
        self._buckets = GraphBuckets(max_batch_sequences, max_batch_tokens, steps)
        self._captured: dict[Bucket, Captured] = {}
        self.why = self._capture_all(places, pool)
        self._by_launches = self.cost
        if self._captured:
            self.cost = self._cost_of_graphs()

    @property
    def graphs(self) -> int:
        return len(self._captured)

    def predicted_seconds(self, batch: Batch) -> float:
        return self._seconds(batch, self._serving(batch)[1])

    def launch(self, batch: Batch, place: OutputCollector | None = None) -> InFlightBatch:
        """Asks the device for all of it and does not wait. Whatever the model raises on the host passes through."""
        assert place is not None
        began = time.monotonic()
        bucket, captured = self._serving(batch)
        ends = self._staging.lay(batch, place.index, bucket.rows)
        staged = time.monotonic()
        if captured is None:
            landing = self._launched(batch, place)
        else:
            captured.copies_in[place.index].start()
            captured.graph.replay()
            landing = captured.landings[place.index]
        for copy in (*landing.copies, *(landing.embedding if batch.returns_embedding else ())):
            copy.start()
        place.end()
        return InFlightBatch(
            batch,
            ends,
            landing.arrays,
            self._seconds(batch, captured),
            began,
            staged,
            time.monotonic(),
            place,
            by_graph=captured is not None,
            padded_tokens=bucket.tokens - batch.tokens,
        )

    def largest_bytes(self) -> int:
        """What the largest turns take on the device when no graph serves them: all rows, and one of all steps.

        Where steps are launched one by one a long row takes minutes: what it needs lies on the line through two shorter ones.
        """
        return max(self._taken_bytes(bucket) for bucket in self._largest)

    def _taken_bytes(self, bucket: Bucket) -> int:
        share = LONGEST_TRY_SECONDS / max(self._by_launches.of(max(_even(bucket)), bucket.tokens), LONGEST_TRY_SECONDS)
        rows, tokens = bucket.rows, max(2 * bucket.rows * self.encoder.spec.min_steps, int(share * bucket.tokens))
        if tokens >= bucket.tokens:
            return self._peak_bytes(bucket)
        half, whole = (self._peak_bytes(Bucket(rows, some)) for some in (tokens // 2, tokens))
        return whole + (whole - half) * (bucket.tokens - tokens) // (tokens - tokens // 2)

    def _peak_bytes(self, bucket: Bucket) -> int:
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        self._made_up(bucket, _even(bucket))
        self._encoded(*bucket, sequence=True, whole=not self.streams)
        return torch.cuda.max_memory_allocated() - held

    def _seconds(self, batch: Batch, captured: Captured | None) -> float:
        """That a turn is expected to take, by this graph or without one."""
        return self._by_launches.of(batch.longest, batch.tokens) if captured is None else captured.seconds(batch.longest)

    def _serving(self, batch: Batch) -> tuple[Bucket, Captured | None]:
        """The graph that serves a turn and its size, or the turn's own."""
        own = Bucket(batch.rows, batch.tokens)
        if batch.returns_sequence or not (batch.whole or self._any_place):
            return own, None
        bucket = self._buckets.bucket(*own)
        captured = None if bucket is None else self._captured.get(bucket)
        return (own, None) if bucket is None or captured is None else (bucket, captured)

    def _launched(self, batch: Batch, place: OutputCollector) -> Landing:
        """A turn of its very size, layer by layer."""
        self._staging.copy(batch.tokens, self._stream, place.index).start()
        ragged, encoding = self._encoded(batch.rows, batch.tokens, sequence=batch.returns_sequence, whole=batch.whole)
        return self._landing(_in_one_piece(encoding), ragged, place)

    def _capture_all(self, places: list[OutputCollector], pool: Pool) -> str | None:
        """Why no, or no further, bucket was captured, if so."""
        spent = 0.0
        for bucket in self._buckets.buckets:
            if spent > CAPTURE_SECONDS:
                return f"{self.graphs} graphs took {spent:.1f} s"
            try:
                self._try(bucket)
                began = time.monotonic()
                self._captured[bucket] = self._capture(bucket, places, pool)
            except NotCapturable as fault:
                return str(fault)
            spent += time.monotonic() - began
        return None

    def _cost_of_graphs(self) -> Cost:
        """The shortest and the longest single row tell the cost of a turn and of a step, the fullest turn what each further token adds."""
        singles = sorted(bucket for bucket in self._captured if bucket.rows == 1) or [min(self._captured)]
        short, long = (self._captured[bucket].even for bucket in (singles[0], singles[-1]))
        further = long.longest - short.longest
        per_step = max(0.0, long.seconds - short.seconds) / further if further else short.seconds / short.longest
        fixed, full = max(0.0, short.seconds - per_step * short.longest), max(self._captured)
        fullest = self._captured[full].even
        return Cost(fixed, per_step, max(0.0, fullest.seconds - fixed - per_step * fullest.longest) / full.tokens)

    def _try(self, bucket: Bucket) -> None:
        """Once as it is, which may compile kernels; then raises NotCapturable where anything waits for the device."""
        self._made_up(bucket, _even(bucket))
        self._encoded(*bucket, whole=not self._any_place)
        self._between_turns(partial(self._try_without_waiting, bucket))

    def _try_without_waiting(self, bucket: Bucket) -> None:
        # What waits is found by a switch of the whole process, which no turn of another model may be launched under.
        with _no_waiting():
            self._encoded(*bucket, whole=not self._any_place)

    def _capture(self, bucket: Bucket, places: list[OutputCollector], pool: Pool) -> Captured:
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph, which would collect garbage and give the allocator's memory back before each.
        torch.cuda.synchronize()
        graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
        try:
            ragged, encoding = self._encoded(*bucket, whole=not self._any_place)
            encoding = _in_one_piece(encoding)
        finally:
            graph.capture_end()
        landings = [self._landing(encoding, ragged, place, waits=False) for place in places]
        timed = [
            self._between_turns(partial(self._timed, graph, bucket, lengths))
            for lengths in (_even(bucket), self._skewed(bucket))
        ]
        copies_in = [self._staging.copy(bucket.tokens, self._stream, place.index) for place in places]
        return Captured(graph, copies_in, landings, *timed)

    def _timed(self, graph: torch.cuda.CUDAGraph, bucket: Bucket, lengths: list[int]) -> Timed:
        self._made_up(bucket, lengths)
        return Timed(max(lengths), _replay_seconds(graph))

    def _skewed(self, bucket: Bucket) -> list[int]:
        """One row as long as it can be, all others of one step."""
        others = bucket.rows - 1
        return [min(self.encoder.spec.input.max_steps, bucket.tokens - others), *[1] * others]

    def _made_up(self, bucket: Bucket, lengths: list[int]) -> None:
        """A turn of rows of these lengths in a batch of this size, laid and copied to the device."""
        chunks = [Chunk(bytes(steps * self._staging.step_bytes), steps, Returns(), None) for steps in lengths]
        self._staging.lay(Batch(ModelKey(self.encoder.spec.name, ""), chunks))
        self._staging.copy(bucket.tokens, self._stream).start()
        torch.cuda.synchronize()  # before the place is laid again

    def _landing(self, encoding: Encoding, ragged: Ragged, place: OutputCollector, *, waits: bool = True) -> Landing:
        """The way of an encoding to the host. What finds no room in the place is waited for, or raises NotCapturable."""
        verdict, offsets = encoding.verdict, None if encoding.offsets is ragged.offsets else encoding.offsets
        given = [verdict.scores, verdict.picks, verdict.embedding, encoding.sequence, offsets]
        rooms = place.room(given)
        there = [(room, array) for room, array in zip(rooms, given, strict=True) if room is not None and array is not None]
        if not waits and len(there) < sum(array is not None for array in given):
            raise NotCapturable("its answers have no room on the host")
        hosts = [array.cpu() if room is None and array is not None else room for room, array in zip(rooms, given, strict=True)]
        scores, picks, embedding, sequence, begins = (None if host is None else host.numpy() for host in hosts)
        arrays = BatchArrays(scores, picks, embedding, sequence, begins, verdict.per_step)
        vectors = [Copy(room, array, self._stream) for room, array in there if array is verdict.embedding]
        return Landing(
            [Copy(room, array, self._stream) for room, array in there if array is not verdict.embedding], vectors, arrays
        )


def _in_one_piece(encoding: Encoding) -> Encoding:
    """With arrays that can be copied in one piece."""
    verdict = encoding.verdict
    scores, picks, embedding, sequence = (
        None if array is None else array.contiguous()
        for array in (verdict.scores, verdict.picks, verdict.embedding, encoding.sequence)
    )
    return replace(encoding, verdict=Verdict(scores, picks, embedding, verdict.per_step), sequence=sequence)


def _even(bucket: Bucket) -> list[int]:
    """Rows of like length that have all tokens."""
    whole, odd = divmod(bucket.tokens, bucket.rows)
    return [whole + (row < odd) for row in range(bucket.rows)]


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Whatever waits for the device raises NotCapturable: a capture that fails can leave the allocator in disorder."""
    with warnings.catch_warnings():  # it says that it is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as fault:
        raise NotCapturable(str(fault).splitlines()[0]) from fault
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    """The fastest of a few replays, by the device's own clock."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    taken = []
    for _ in range(TIMED_REPLAYS):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return float(min(taken))
