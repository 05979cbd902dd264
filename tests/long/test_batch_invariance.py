"""10,000 sequences of each layer: the results of a session depend neither on its chunks nor on the batches in which they run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from service.engine.batching.state_slots import DISCARD_SLOT, FIRST_SLOT, ZERO_SLOT
from service.engine.execution.device_engine import DeviceEngine
from service.engine.execution.in_flight import BlockResult
from service.ipc.messages.inference import FEATURES
from service.metrics import Metrics
from service.modeling import store
from service.modeling.encoder import Encoder
from tests import models
from tests.engine.execution.test_chunks import FLOATS, HEADS, KEY, LAYERS, Chunk, run
from tests.long import scaled

SEQUENCES = scaled(10_000)
MOST_STEPS, MOST_TOGETHER = 24, 16
POISONED = 0.3
"""Share of the batches that also have a row of NaN."""
ROUNDING = 1e-5
"""Largest difference, relative to values of at least 1. A library computes the products in front of the recurrence."""
Rows = np.ndarray[Any, np.dtype[np.float32]]


def make_engine(root: Path, layer: str, head: str) -> DeviceEngine:
    spec = models.made_up(root, "streamed", FLOATS, LAYERS[layer], head=HEADS[head])
    spec = spec.model_copy(update={"pin_backend": True})
    encoder = Encoder(spec, store.read_arrays(root / "streamed" / "1", spec), torch.device("cpu"))
    return DeviceEngine({KEY: encoder}, Metrics(), max_batch_sequences=MOST_TOGETHER + 1, max_batch_tokens=1024)


class Stream:
    """A sequence that runs in chunks, in the state slot with this number."""

    def __init__(self, number: int, slot: int) -> None:
        self.number = number
        self.data = data_of(number)
        self.slot = slot
        self.steps = 0
        self.results: list[BlockResult] = []

    @property
    def ended(self) -> bool:
        return self.steps == len(self.data)

    def next_chunk(self, steps: int) -> Chunk:
        """Return the next chunk, of up to `steps` steps."""
        begin, self.steps = self.steps, min(self.steps + steps, len(self.data))
        read_slot, write_slot = self.slot if begin else ZERO_SLOT, DISCARD_SLOT if self.ended else self.slot
        return Chunk(self.data[begin : self.steps], read_slot, write_slot)


def data_of(number: int) -> Rows:
    chance = np.random.default_rng(number)
    return chance.normal(size=(chance.integers(1, MOST_STEPS, endpoint=True), 3)).astype(FEATURES)


def run_together(engine: DeviceEngine, count: int, seed: int) -> Iterator[Stream]:
    """Run sequences in random chunks and random batches. Yield each at its end."""
    chance, numbers = random.Random(seed), iter(range(count))
    free = list(range(FIRST_SLOT, FIRST_SLOT + 2 * MOST_TOGETHER))
    running = [Stream(number, free.pop()) for number in islice(numbers, len(free))]
    while running:
        batch = chance.sample(running, chance.randint(1, min(MOST_TOGETHER, len(running))))
        chunks = [stream.next_chunk(chance.randint(1, MOST_STEPS)) for stream in batch]
        place = len(chunks)
        if chance.random() < POISONED:
            nothing, place = np.full((chance.randint(1, MOST_STEPS), 3), np.nan, FEATURES), chance.randint(0, len(chunks))
            chunks.insert(place, Chunk(nothing))
        results, _ = run(engine, *chunks)
        for stream, result in zip(batch, results[:place] + results[place + 1 :], strict=True):
            stream.results.append(result)
        for stream in [stream for stream in batch if stream.ended]:
            yield stream
            running.remove(stream)
            running += [Stream(number, stream.slot) for number in islice(numbers, 1)]


def outputs(results: Sequence[BlockResult]) -> list[Rows]:
    """Return the vectors of all steps, and the output of the head after the last step."""
    sequence = np.concatenate([result.sequence for result in results if result.sequence is not None])
    last = results[-1]
    return [sequence, *(array for array in (last.scores, last.embedding) if array is not None)]


def differences(engine: DeviceEngine, streams: Iterator[Stream]) -> Iterator[float]:
    """Yield the largest difference of each sequence to the results of the whole sequence alone."""
    for stream in streams:
        alone = Stream(stream.number, stream.slot)
        alone.results, _ = run(engine, alone.next_chunk(MOST_STEPS))
        pairs = zip(outputs(stream.results), outputs(alone.results), strict=True)
        yield max(float((np.abs(one - other) / np.maximum(np.abs(other), 1)).max()) for one, other in pairs)


@pytest.mark.parametrize("head", ["last", "mean"])
@pytest.mark.parametrize("layer", LAYERS)
def test_10_000_sequences_have_the_same_results_in_any_batch(
    layer: str, head: str, tmp_path: Path, show: Callable[[object], None]
) -> None:
    engine = make_engine(tmp_path, layer, head)
    found = list(differences(engine, run_together(engine, SEQUENCES, seed=1)))
    show(f"{layer} {head}: the largest difference is {max(found):.1e}")
    assert len(found) == SEQUENCES
    assert max(found) <= ROUNDING
