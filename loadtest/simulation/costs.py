"""What turns of a model cost on a device: figures that were measured once, kept in a file that says when and where."""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kernels.bench.report import Setting, slug
from loadtest import made_up
from loadtest.simulation.loads import LONG_STEPS
from service.engine.execution.cost_model import Cost
from service.ipc.messages import ModelKey
from service.local import build_engine
from service.metrics import Metrics
from service.modeling.spec import EmbeddingLayer, LSTMLayer, SequenceInput
from service.settings import Settings

PATH = Path(__file__).parent.parent / "results" / "costs.json"
UNITS = (256, 512)
WARM_UPS = 5
"""Each gives a cost; the median counts."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One model on one device. Seconds as in Cost."""

    model: str
    device: str
    date: str
    fixed: float
    per_step: float
    per_token: float

    @property
    def cost(self) -> Cost:
        return Cost(self.fixed, self.per_step, self.per_token)

    def __str__(self) -> str:
        us = (f"{1e6 * seconds:.3g}" for seconds in self.cost)
        return "{}, {}, {}: {} us a turn, {} a step, {} a token".format(self.model, self.device, self.date, *us)


def read(path: Path = PATH) -> dict[str, Entry]:
    """By name."""
    if not path.exists():
        return {}
    return {name: Entry(**entry) for name, entry in json.loads(path.read_text()).items()}


def measure(device: str, path: Path = PATH) -> list[str]:
    """Write what warm-up finds on this device for LSTMs of made-up weights over token ids; returns their names."""
    found = [_measured(device, units) for units in UNITS]
    entries = read(path) | {f"{slug(one.device)}-{one.model}": one for one in found}
    path.write_text(json.dumps({name: asdict(entry) for name, entry in sorted(entries.items())}, indent=2) + "\n")
    return [f"{slug(one.device)}-{one.model}" for one in found]


def _measured(device: str, units: int) -> Entry:
    name = f"lstm-{units}"
    ids = SequenceInput(kind="ids", vocabulary=20_000, max_steps=LONG_STEPS)
    with tempfile.TemporaryDirectory() as scratch:
        made_up.write(
            Path(scratch),
            name,
            ids,
            EmbeddingLayer(kind="embedding", width=units),
            LSTMLayer(kind="lstm", hidden=units),
        )
        settings = Settings(models=Path(scratch), device=device)
        engines = (build_engine(settings, Metrics()) for _ in range(WARM_UPS))
        costs = [engine.cost(ModelKey(name, "1")) for engine in engines]
    setting = Setting.of(torch.device("cuda:0" if device == "auto" and torch.cuda.is_available() else device))
    fixed, per_step, per_token = (float(f"{statistics.median(each):.4g}") for each in zip(*costs, strict=True))
    return Entry(name, setting.device, setting.date, fixed, per_step, per_token)
