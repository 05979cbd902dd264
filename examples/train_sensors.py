"""Train the model sensor-forecast in plain PyTorch and write it as a model folder: a stream of readings in, the next reading out.

`signals.py` simulates the data, so nothing has to be downloaded. `--holdout` evaluates settings on streams that are used neither for
training nor for the card. The card's figures are measured at the end of a full training, with the weights read back from the folder.
"""

from __future__ import annotations

import argparse
import string
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from forecasts import Forecast, Regression, errors_by_seed, line, repeat_last_reading
from signals import CHANNELS, JUMP_EVERY, JUMP_SPREAD, NOISE, Readings, streams
from torch import Tensor, nn
from training import flags as setting_flags

from service.modeling import spec, store
from service.modeling.spec import LSTMLayer, ModelSpec, RegressHead, SequenceInput

NAME = "sensor-forecast"
CARD_TEMPLATE = Path(__file__).with_name("sensor-forecast.card.md")
STEPS, MAX_STEPS = 1024, 4096
"""Forecasts per training stream, and the model's `max_steps`."""
TRAINING, SETTINGS, TEST = range(3)
"""The first number of every seed, by the purpose of its streams."""
SEEDS, STREAMS_PER_SEED = 5, 32
"""Seeds of an evaluation, and streams of each seed."""


@dataclass(frozen=True)
class Settings:
    """The settings of a training; every field is a flag. A round trains on `streams` new streams, `batch` at a time."""

    hidden: int = 64
    rounds: int = 160
    streams: int = 256
    batch: int = 32
    chunk: int = 64
    rate: float = 0.01
    seed: int = 1


class Forecaster(nn.Module):
    """An LSTM and a linear layer over each of its steps. The state carries over from chunk to chunk."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layer = LSTMLayer(kind="lstm", hidden=hidden)
        self.lstm = nn.LSTM(len(CHANNELS), hidden, batch_first=True)
        # PyTorch has two biases and the model folder has one: the second stays zero.
        nn.init.zeros_(self.lstm.get_parameter("bias_hh_l0")).requires_grad_(False)
        self.head = nn.Linear(hidden, len(CHANNELS))

    def forward(self, readings: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the forecasts after each step and the state after the last step. readings: (streams, steps, channels)."""
        steps, state = self.lstm(readings, state)
        return self.head(steps), state

    @torch.no_grad()
    def forecast(self, readings: Readings) -> Readings:
        """Return forecasts of readings, as a `forecasts.Forecast`."""
        forecasts: Readings = self(torch.from_numpy(readings))[0].numpy()
        return forecasts

    def tensors(self) -> dict[str, Tensor]:
        """Return views of the parameters, in the names and layouts of the model folder."""
        return {
            "layers.0.0.forward.input": self.lstm.get_parameter("weight_ih_l0").T,
            "layers.0.0.forward.recurrent": self.lstm.get_parameter("weight_hh_l0").T,
            "layers.0.0.forward.bias": self.lstm.get_parameter("bias_ih_l0"),
            "head.weight": self.head.weight.T,
            "head.bias": self.head.bias,
        }

    def spec(self) -> ModelSpec:
        """Return the spec of the model. The head pools the last step, so the answer is the forecast after all readings so far."""
        return ModelSpec(
            name=NAME,
            description=f"The next reading of three sensors: {', '.join(CHANNELS)}",
            precision="float16",
            input=SequenceInput(kind="features", features=len(CHANNELS), max_steps=MAX_STEPS),
            layers=(self.layer,),
            head=RegressHead(kind="regress", pool=("last",), outputs=len(CHANNELS)),
        )


def train(settings: Settings) -> Forecaster:
    """Return the model after the last round. The learning rate falls to zero, so there is no need to choose a round."""
    torch.manual_seed(settings.seed)
    model = Forecaster(settings.hidden).train()
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(learned, settings.rate, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, settings.rounds)
    for number in range(settings.rounds):
        new_streams = torch.from_numpy(streams((TRAINING, settings.seed, number), settings.streams, STEPS + 1))
        for batch in torch.split(new_streams, settings.batch):
            learn(model, batch, optimizer, settings.chunk)
        schedule.step()
    return model.eval()


def learn(model: Forecaster, batch: Tensor, optimizer: torch.optim.Optimizer, chunk: int) -> None:
    """Train on one batch, chunk by chunk. The state carries over to the next chunk, the gradient does not."""
    state: tuple[Tensor, Tensor] | None = None
    chunks = zip(torch.split(batch[:, :-1], chunk, dim=1), torch.split(batch[:, 1:], chunk, dim=1), strict=True)
    for readings, following in chunks:
        forecasts, (hidden, cell) = model(readings, state)
        state = hidden.detach(), cell.detach()
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.mse_loss(forecasts, following))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def read_back(folder: Path) -> Forecaster:
    """Read the model in `folder`, in float32."""
    described = spec.read(folder)
    layer = described.layers[0]
    assert isinstance(layer, LSTMLayer)
    model = Forecaster(layer.hidden).eval()
    arrays = store.read_arrays(folder, described)
    for name, view in model.tensors().items():
        view.copy_(arrays[name])
    return model


def baselines() -> dict[str, Forecast]:
    """Return the forecasts of the baselines. The regression is fitted on training streams."""
    fitted = Regression.fitted(streams((TRAINING, Settings().seed, 0), Settings().streams, STEPS + 1))
    return {
        "the last reading, repeated": repeat_last_reading,
        f"linear regression over the last {fitted.steps} readings": fitted,
    }


def table(model: Forecaster, purpose: int) -> Iterator[str]:
    """Yield a Markdown table of errors: medians over the seeds of a purpose, and for all channels also the lowest and highest."""
    seeds = [(purpose, number) for number in range(SEEDS)]
    yield f"| forecast | {' | '.join(CHANNELS)} | all |"
    yield f"|---|{'---|' * len(CHANNELS)}---|"
    for name, forecast in {f"**{NAME}**": model.forecast, **baselines()}.items():
        yield line(name, errors_by_seed(forecast, seeds, STREAMS_PER_SEED, STEPS + 1))
    late = MAX_STEPS - STEPS
    long = errors_by_seed(model.forecast, seeds, STREAMS_PER_SEED, MAX_STEPS + 1, first=late)
    yield line(f"{NAME}, steps {late + 1:,} to {MAX_STEPS:,} of longer streams", long)


def train_and_write(settings: Settings, models: Path) -> None:
    start = time.monotonic()
    model = train(settings)
    seconds = time.monotonic() - start
    folder = models / NAME / "1"
    store.write(folder, model.spec(), model.tensors(), card="")
    measured = "\n".join(table(read_back(folder), TEST))
    (folder / spec.CARD).write_text(card(settings, measured))
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{measured}\ntrained in {seconds:.0f} s, {folder} has {size:,} bytes")


def card(settings: Settings, measured: str) -> str:
    steps = f"{settings.rounds * settings.streams * STEPS / 1e6:.0f} million"
    values = asdict(settings) | {"name": NAME, "flags": setting_flags.words(settings), "measured": measured, "steps": steps}
    values |= {"noise": NOISE, "jump_every": JUMP_EVERY, "jump_spread": JUMP_SPREAD, "max_steps": f"{MAX_STEPS:,}"}
    return string.Template(CARD_TEMPLATE.read_text()).substitute(values)


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default="models", help="models folder to write to (default: %(default)s)")
    parser.add_argument("--holdout", action="store_true", help="evaluate on held-out streams, write nothing")
    parser.add_argument("--quick", action="store_true", help="a small model and one short round")
    setting_flags.add(parser, {"lstm": Settings()})
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    flags = arguments(words)
    torch.set_num_threads(1)  # the model is small, and one thread sums in a fixed order
    settings = Settings(hidden=8, rounds=1, streams=16, batch=8) if flags.quick else Settings()
    settings = replace(settings, **setting_flags.given(flags, settings))
    if flags.holdout:
        print("\n".join(table(train(settings), SETTINGS)))
    else:
        train_and_write(settings, flags.models)
    return 0


if __name__ == "__main__":
    sys.exit(main())
