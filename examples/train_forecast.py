"""Train a model that forecasts the next reading of a stream as quantiles, and write it as a model folder with a card.

`training/signals.py` simulates the streams, so nothing has to be downloaded. The median is the forecast, the other quantiles bound an
interval, and a reading far outside its interval is unexpected. `--expected` trains the embedded model sensor-forecast instead, an LSTM over
raw readings that forecasts the expected reading alone.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from training.encoders import STEP_ENCODERS
from training.fitting import fit
from training.model import Model, Raw, Scaled
from training.parts import Parts
from training.recipe import Recipe, Trained, main
from training.recurrent import LSTMEncoder
from training.service import Advance, Service, ignore
from training.signals import CHANNELS, JUMP_EVERY, JUMP_SPREAD, MAX_STEPS, NOISE, Readings, streams

from service.modeling.spec import SequenceInput
from service.modeling.spec.heads import RegressHead

EXPECTED, TRAINING, TEST = 0, 10, 12
"""The first number of every seed, by the purpose of its streams: two trainings, and the test of both."""
TEST_STREAMS, TEST_STEPS = 32, 1000
FIRST = 8
"""Steps of each stream that figures skip."""
QUANTILES = (0.1, 0.5, 0.9)
"""Quantiles of the next reading; the first and the last bound an interval that has it with a probability of 80 %."""
INPUTS = SequenceInput(kind="features", features=len(CHANNELS), names=CHANNELS, max_steps=MAX_STEPS)
OUTPUTS = len(CHANNELS) * len(QUANTILES)

Chunk = tuple[Tensor, Tensor, bool]
"""Readings and the readings after them, (streams, steps, channels), and whether the streams begin."""


@dataclass(frozen=True)
class Settings:
    """The settings of a training; every field is a flag. A round trains once on `streams` new streams of `steps` readings."""

    encoder: str
    hidden: int = 64
    rounds: int = 400
    streams: int = 64
    steps: int = 256
    rate: float = 0.01
    seed: int = 1


class ForecastRecipe(Recipe):
    """An example is a stream, and an answer the forecasts after each of its readings but the last, (steps, channels, quantiles)."""

    task, default_set, has_sets = "forecast", "sensors", False
    settings: ClassVar = {encoder: Settings(encoder) for encoder in STEP_ENCODERS}
    quick: ClassVar = {"hidden": 8, "rounds": 10, "streams": 16, "steps": 64}

    def read(self, data: Path, name: str, settings: Settings) -> Parts:
        """Return the test part alone: the training makes new streams in each round."""
        return Parts([], [], self.read_test(data, name))

    def read_test(self, data: Path, name: str) -> list[Readings]:
        return list(streams((TEST, 1, 0), TEST_STREAMS, TEST_STEPS + 1))

    def train(self, name: str, parts: Parts, settings: Any, device: torch.device) -> Trained:
        rows = torch.from_numpy(streams((TRAINING, settings.seed), settings.streams, settings.steps)).flatten(0, 1)
        encoder = STEP_ENCODERS[settings.encoder](len(CHANNELS), settings.hidden, True)
        model = Model(Scaled(rows), encoder, OUTPUTS).to(device)

        def new_streams(number: int) -> list[Tensor]:
            return [torch.from_numpy(streams((TRAINING, settings.seed, number), settings.streams, settings.steps + 1))]

        def backward(readings: Tensor) -> Tensor:
            lengths = torch.full((len(readings),), readings.shape[1] - 1)
            values = model(readings[:, :-1].to(device), lengths.to(device))
            loss = pinball_loss(values.unflatten(-1, (len(CHANNELS), -1)), readings[:, 1:].to(device))
            torch.autograd.backward(loss)
            return loss.detach()

        fitted = fit(model, settings.rounds, settings.rate, new_streams, backward)
        description = f"Quantiles {', '.join(map(str, QUANTILES))} of the next reading of {', '.join(CHANNELS)}"
        head = RegressHead(kind="regress", pool=("last",), outputs=OUTPUTS)
        return Trained(model, fitted, description, INPUTS, head)

    def values(self, outputs: NDArray[Any]) -> NDArray[Any]:
        """Return the forecasts of the outputs of a model, (steps, outputs), with the quantiles of each in order."""
        return np.sort(outputs.reshape(len(outputs), len(CHANNELS), -1))

    def answers(self, trained: Trained, examples: list[Readings]) -> list[NDArray[Any]]:
        scores = trained.model.scores([torch.from_numpy(stream[:-1]) for stream in examples])
        return [self.values(each.double().numpy()) for each in scores]

    def ask(self, service: Service, model: str, examples: list[Readings], advance: Advance = ignore) -> list[NDArray[Any]]:
        """Send each stream through a session, one reading in a chunk."""
        outputs = service.streams(model, [[row[None] for row in stream[:-1]] for stream in examples], advance)
        return [self.values(np.array([output["value"] for output in each])) for each in outputs]

    def quality(self, examples: list[Readings], answers: list[NDArray[Any]]) -> dict[str, float]:
        """Return the loss, and the percentage of readings between the outer quantiles."""
        following = torch.from_numpy(np.stack(examples)[:, 1 + FIRST :].astype(np.float64))
        forecasts = torch.from_numpy(np.stack(answers)[:, FIRST:])
        is_inside = (forecasts[..., 0] <= following) & (following <= forecasts[..., -1])
        loss, inside = pinball_loss(forecasts, following), is_inside.double().mean()
        return {"pinball_loss": float(loss), "inside_percent": 100 * float(inside)}

    def prefix(self, name: str) -> str:
        return self.task


def pinball_loss(forecasts: Tensor, following: Tensor) -> Tensor:
    """Return the mean pinball loss, which only the true quantiles minimise.

    forecasts: (streams, steps, channels, quantiles), of the next readings; following: (streams, steps, channels), the next readings.
    """
    above = following[..., None] - forecasts
    quantiles = torch.tensor(QUANTILES, dtype=above.dtype, device=above.device)
    return torch.maximum(quantiles * above, (quantiles - 1) * above).mean()


@dataclass(frozen=True)
class ExpectedSettings:
    """The settings of `--expected`. A round trains on `streams` new streams, `batch` at a time. The gradient goes through `chunk` steps.
    The state is carried from chunk to chunk, as in a stream."""

    encoder: str = "lstm"
    hidden: int = 64
    rounds: int = 160
    streams: int = 256
    steps: int = 1024
    batch: int = 32
    chunk: int = 64
    rate: float = 0.01
    seed: int = 1


class ExpectedRecipe(ForecastRecipe):
    """An answer is the forecasts of the expected reading, (steps, channels)."""

    task = "expected"
    settings: ClassVar = {"lstm": ExpectedSettings()}
    quick: ClassVar = {"hidden": 8, "rounds": 1, "streams": 16, "batch": 8}

    def train(self, name: str, parts: Parts, settings: Any, device: torch.device) -> Trained:
        encoder = LSTMEncoder(len(CHANNELS), settings.hidden, causal=True)
        model, state = Model(Raw(), encoder, len(CHANNELS)).to(device), list[tuple[Tensor, Tensor]]()

        def chunks(number: int) -> list[Chunk]:
            readings = torch.from_numpy(streams((EXPECTED, settings.seed, number), settings.streams, settings.steps + 1))
            found = []
            for batch in torch.split(readings, settings.batch):
                before, after = (torch.split(rows, settings.chunk, dim=1) for rows in (batch[:, :-1], batch[:, 1:]))
                found += [(*pair, number == 0) for number, pair in enumerate(zip(before, after, strict=True))]
            return found

        def backward(chunk: Chunk) -> Tensor:
            readings, following, is_first = chunk
            if is_first:
                state.clear()
            steps, (hidden, cell) = encoder.recurrent(readings.to(device), *state)
            state[:] = [(hidden.detach(), cell.detach())]
            loss = nn.functional.mse_loss(model.head(steps), following.to(device))
            torch.autograd.backward(loss)
            return loss.detach()

        fitted = fit(model, settings.rounds, settings.rate, chunks, backward, every_batch=False)
        head = RegressHead(kind="regress", pool=("last",), outputs=len(CHANNELS))  # of the last step, so of all readings so far
        return Trained(model, fitted, f"The next reading of three sensors: {', '.join(CHANNELS)}", INPUTS, head)

    def values(self, outputs: NDArray[Any]) -> NDArray[Any]:
        return outputs

    def quality(self, examples: list[Readings], answers: list[NDArray[Any]]) -> dict[str, float]:
        """Return the root mean squared error of the forecasts, and of forecasts that repeat the last reading."""
        readings = np.stack(examples).astype(np.float64)
        differences = {
            "error": np.stack(answers) - readings[:, 1:],
            "error_of_the_last_reading": readings[:, :-1] - readings[:, 1:],
        }
        return {name: float(np.sqrt((each[:, FIRST:] ** 2).mean())) for name, each in differences.items()}

    def card_values(self, name: str, parts: Parts, trained: Trained) -> dict[str, Any]:
        return {"noise": NOISE, "jump_every": JUMP_EVERY, "jump_spread": JUMP_SPREAD, "max_steps": f"{MAX_STEPS:,}"}

    def prefix(self, name: str) -> str:
        return "sensor"

    def model_name(self, name: str, encoder: str) -> str:
        return "sensor-forecast"


if __name__ == "__main__":
    is_expected = "--expected" in sys.argv
    line = [word for word in sys.argv[1:] if word != "--expected"]
    sys.exit(main(ExpectedRecipe() if is_expected else ForecastRecipe(), __doc__, line))
