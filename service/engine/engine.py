"""One device: turns in, encodings out. Nothing here knows a queue, a caller or a socket."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from service.engine.staging import Staging
from service.engine.turn import Chunk, Turn
from service.metrics import Metrics
from service.sequence import Loaded, ModelKey
from service.zoo.encoder import Encoder, Encoding

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Encoded:
    """One chunk's answer; None is what the head has not, or the caller did not ask for.

    scores: (lines, n) float32 and picks: (lines, m) int32, where a line is the whole chunk or one step; embedding: (1, width);
    sequence: (steps, width); steps: how many came out of the encoder.
    """

    scores: Array | None
    picks: Array | None
    embedding: Array | None
    sequence: Array | None
    steps: int


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds that a turn is expected to take, measured at warm-up."""

    per_step: float
    per_token: float

    @classmethod
    def measured(cls, encoder: Encoder, rows: int, steps: int, tokens: int) -> Cost:
        """One row tells the cost of a step, many rows what each further token adds.

        Before that every size is tried, on a GPU up to as many tokens as a turn may have: whatever a first batch of a size compiles or
        makes is then there before any caller.
        """
        for size in _doubling(rows):
            encoder.trial(size, steps)
        if encoder.device.type == "cuda":
            for longer in _doubling(max(1, tokens // (rows * steps)))[1:]:
                encoder.trial(rows, min(steps * longer, encoder.spec.input.max_steps))
        alone, together = encoder.trial(1, steps), encoder.trial(rows, steps)
        return cls(alone / steps, max(0.0, together - alone) / (rows * steps))

    def of(self, turn: Turn) -> float:
        return self.per_step * turn.longest + self.per_token * turn.tokens


class Engine:
    """Runs turns on `device`. A turn is launched, then collected from `finished`."""

    def __init__(
        self, encoders: Mapping[ModelKey, Encoder], metrics: Metrics, *, max_turn_rows: int, max_turn_tokens: int
    ) -> None:
        self._encoders = dict(encoders)
        self._metrics = metrics
        self._done: list[tuple[Chunk, Encoded]] = []
        self._staging: dict[ModelKey, Staging] = {}
        self._costs: dict[ModelKey, Cost] = {}
        metrics.slots.set(max_turn_rows)
        for key, encoder in self._encoders.items():
            shape = encoder.spec.input
            tokens = max(max_turn_tokens, shape.max_steps)
            self._staging[key] = Staging(max_turn_rows, tokens, shape.features, encoder.device)
            steps = max(min(16, shape.max_steps), encoder.spec.min_steps)
            self._costs[key] = Cost.measured(encoder, rows=max_turn_rows, steps=steps, tokens=tokens)
            metrics.weight_bytes.set(encoder.weight_bytes(), *key)
            for layer, backend in encoder.backends().items():
                metrics.backend.set(1, *key, layer, backend)

    def loaded(self) -> list[Loaded]:
        """What is served, and what runs it."""
        return [
            Loaded(
                name=key.name,
                version=key.version,
                device=str(encoder.device),
                backends=[f"{layer}: {backend}" for layer, backend in encoder.backends().items()],
                weight_bytes=encoder.weight_bytes(),
            )
            for key, encoder in self._encoders.items()
        ]

    def serves(self, key: ModelKey) -> bool:
        return key in self._encoders

    def predicted_seconds(self, turn: Turn) -> float:
        return self._costs[turn.model].of(turn)

    def launch(self, turn: Turn) -> None:
        """Run a turn. Whatever the model raises passes through, and nothing of the turn is then finished."""
        start = time.perf_counter()
        batch = self._staging[turn.model].lay(turn)
        staged = time.perf_counter()
        encoding = self._encoders[turn.model](batch, sequence=any(chunk.returns.sequence for chunk in turn.chunks))
        computed = time.perf_counter()
        self._done += _split(turn, encoding)
        self._count(turn, staged - start, computed - staged, time.perf_counter() - computed)

    def finished(self) -> list[tuple[Chunk, Encoded]]:
        """The chunks that ended since the last call, each with its answer."""
        done, self._done = self._done, []
        return done

    def _count(self, turn: Turn, stage_in: float, compute: float, stage_out: float) -> None:
        metrics = self._metrics
        for stage, seconds in (("stage_in", stage_in), ("compute", compute), ("stage_out", stage_out)):
            metrics.stage_seconds.observe(seconds, *turn.model, stage)
        metrics.turn_rows.observe(turn.rows, *turn.model)
        metrics.turn_tokens.observe(turn.tokens, *turn.model)
        metrics.tokens.add(*turn.model, by=turn.tokens)
        metrics.padding_avoided.add(*turn.model, by=turn.rows * turn.longest - turn.tokens)


def _doubling(most: int) -> list[int]:
    """1, 2, 4 and so on, and `most`."""
    return [1 << power for power in range(most.bit_length()) if 1 << power < most] + [most]


def _split(turn: Turn, encoding: Encoding) -> list[tuple[Chunk, Encoded]]:
    """A batch's arrays chunk by chunk; what a caller did not ask for stays behind."""
    verdict, offsets = encoding.verdict, encoding.offsets.tolist()
    scores, picks, embedding, sequence = map(_host, (verdict.scores, verdict.picks, verdict.embedding, encoding.sequence))
    parts = []
    for row, chunk in enumerate(turn.chunks):
        steps = slice(offsets[row], offsets[row + 1])
        lines = steps if verdict.per_step else slice(row, row + 1)
        encoded = Encoded(
            scores=None if scores is None else scores[lines],
            picks=None if picks is None else picks[lines],
            embedding=embedding[row : row + 1] if embedding is not None and chunk.returns.embedding else None,
            sequence=sequence[steps] if sequence is not None and chunk.returns.sequence else None,
            steps=steps.stop - steps.start,
        )
        parts.append((chunk, encoded))
    return parts


def _host(array: Tensor | None) -> Array | None:
    return None if array is None else array.cpu().numpy()
