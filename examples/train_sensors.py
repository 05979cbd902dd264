"""Train the model sensor-forecast in plain PyTorch and write it as a model folder: a stream of readings in, the next reading out.

The data is made up by `signals.py`, so nothing is fetched. Settings are judged with `--holdout`, on streams that are neither trained
on nor those of the card. These are made once, at the end of a full training, for the weights as they were read back from the folder.
"""

from __future__ import annotations

import argparse
import string
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from forecasts import Forecast, Regression, errors_by_seed, last_reading_again
from signals import CHANNELS, JUMP_EVERY, JUMP_SPREAD, NOISE, Readings, streams
from torch import Tensor, nn

from service.modeling import spec, store
from service.modeling.spec import LSTMLayer, ModelSpec, RegressHead, SequenceInput

NAME = "sensor-forecast"
CARD_TEMPLATE = Path(__file__).with_name("sensor-forecast.card.md")
STEPS, MAX_STEPS = 1024, 4096
"""Forecasts in a stream that is trained on, and the most that the model is served with at once."""
TRAINING, SETTINGS, TEST = range(3)
"""The first number of every seed says what its streams are for."""
SEEDS, JUDGED = 5, 32
"""Seeds that are judged, and streams of each."""

State = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Settings:
    """What a training depends on; every field is a flag. A round is `streams` new streams, learned `batch` at a time."""

    hidden: int = 64
    rounds: int = 160
    streams: int = 256
    batch: int = 32
    chunk: int = 64
    rate: float = 0.01
    seed: int = 1


class Forecaster(nn.Module):
    """LSTM and a linear layer over its every step. It goes on from the state that it gave for the chunk before."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layer = LSTMLayer(kind="lstm", hidden=hidden)
        self.lstm = nn.LSTM(len(CHANNELS), hidden, batch_first=True)
        # PyTorch has two biases where the folder has one: the second stays zero.
        nn.init.zeros_(self.lstm.get_parameter("bias_hh_l0")).requires_grad_(False)
        self.head = nn.Linear(hidden, len(CHANNELS))

    def forward(self, readings: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """(streams, steps, channels) to the forecasts after each step, and the state after the last."""
        steps, state = self.lstm(readings, state)
        return self.head(steps), state

    @torch.no_grad()
    def forecast(self, readings: Readings) -> Readings:
        """As `forecasts.Forecast` has it."""
        forecasts: Readings = self(torch.from_numpy(readings))[0].numpy()
        return forecasts

    def tensors(self) -> dict[str, Tensor]:
        """Views of the parameters under the names and in the layouts of the model folder."""
        return {
            "layers.0.0.forward.input": self.lstm.get_parameter("weight_ih_l0").T,
            "layers.0.0.forward.recurrent": self.lstm.get_parameter("weight_hh_l0").T,
            "layers.0.0.forward.bias": self.lstm.get_parameter("bias_ih_l0"),
            "head.weight": self.head.weight.T,
            "head.bias": self.head.bias,
        }

    def spec(self) -> ModelSpec:
        """The head pools by the last step: whatever a caller has sent so far, the answer is the forecast of what comes next."""
        return ModelSpec(
            name=NAME,
            description=f"The next reading of three sensors: {', '.join(CHANNELS)}",
            precision="float16",
            input=SequenceInput(kind="features", features=len(CHANNELS), max_steps=MAX_STEPS),
            layers=(self.layer,),
            head=RegressHead(kind="regress", pool="last", outputs=len(CHANNELS)),
        )


def train(settings: Settings) -> Forecaster:
    """The model after the last round. The rate falls to zero, so that no round has to be picked."""
    torch.manual_seed(settings.seed)
    model = Forecaster(settings.hidden).train()
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(learned, settings.rate, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, settings.rounds)
    for number in range(settings.rounds):
        made_up = torch.from_numpy(streams((TRAINING, settings.seed, number), settings.streams, STEPS + 1))
        for batch in torch.split(made_up, settings.batch):
            learn(model, batch, optimizer, settings.chunk)
        schedule.step()
    return model.eval()


def learn(model: Forecaster, batch: Tensor, optimizer: torch.optim.Optimizer, chunk: int) -> None:
    """Chunk after chunk from the error of every forecast. The state goes on from chunk to chunk, as in a stream; the gradient ends."""
    state: State | None = None
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
    """The model as it lies in `folder`, in float32."""
    described = spec.read(folder)
    layer = described.layers[0]
    assert isinstance(layer, LSTMLayer)
    model = Forecaster(layer.hidden).eval()
    arrays = store.read_arrays(folder, described)
    for name, view in model.tensors().items():
        view.copy_(arrays[name])
    return model


def baselines() -> dict[str, Forecast]:
    """What a forecast is held against. The regression knows streams that the model was trained on, and none that is judged."""
    fitted = Regression.fitted(streams((TRAINING, Settings().seed, 0), Settings().streams, STEPS + 1))
    return {"the last reading again": last_reading_again, f"linear regression over the last {fitted.steps} readings": fitted}


def table(model: Forecaster, purpose: int) -> Iterator[str]:
    """Medians over the seeds of this purpose; of all channels together with the lowest and the highest."""
    seeds = [(purpose, number) for number in range(SEEDS)]
    yield f"| forecast | {' | '.join(CHANNELS)} | all |"
    yield f"|---|{'---|' * len(CHANNELS)}---|"
    for name, forecast in {f"**{NAME}**": model.forecast, **baselines()}.items():
        yield line(name, errors_by_seed(forecast, seeds, JUDGED, STEPS + 1))
    late = MAX_STEPS - STEPS
    long = errors_by_seed(model.forecast, seeds, JUDGED, MAX_STEPS + 1, first=late)
    yield line(f"{NAME}, steps {late + 1:,} to {MAX_STEPS:,} of longer streams", long)


def line(name: str, found: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> str:
    medians = " | ".join(f"{median:.3f}" for median in np.median(found, axis=0))
    together = found[:, -1]
    return f"| {name} | {medians} ({together.min():.3f} to {together.max():.3f}) |"


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
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in asdict(settings).items())
    steps = settings.rounds * settings.streams * STEPS
    known = asdict(settings) | {"name": NAME, "flags": flags, "measured": measured, "steps": f"{steps / 1e6:.0f} million"}
    said = {"noise": NOISE, "jump_every": JUMP_EVERY, "jump_spread": JUMP_SPREAD, "max_steps": f"{MAX_STEPS:,}"}
    return string.Template(CARD_TEMPLATE.read_text()).substitute(known | said)


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default="models", help="folder of models to write to, %(default)s unless given")
    parser.add_argument("--holdout", action="store_true", help="report on streams to judge settings on, write nothing")
    for one in fields(Settings):
        parser.add_argument(f"--{one.name}", type=type(one.default), default=one.default, help="%(default)s unless given")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    flags = arguments(words)
    torch.set_num_threads(1)  # the model is small, and one thread adds up in one order
    settings = Settings(**{one.name: getattr(flags, one.name) for one in fields(Settings)})
    if flags.holdout:
        print("\n".join(table(train(settings), SETTINGS)))
    else:
        train_and_write(settings, flags.models)
    return 0


if __name__ == "__main__":
    sys.exit(main())
