"""Cost of a model's batches on a device: measured once, and kept in a file with device and date."""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kernels.bench.report import Setting, slug
from loadtest import synthetic_models
from loadtest.simulation.arrivals import LONG_STEPS
from service.engine.execution.cost_model import Cost
from service.ipc.messages import ModelKey
from service.local import build_engine
from service.metrics import Metrics
from service.modeling.spec import EmbeddingLayer, LSTMLayer, SequenceInput
from service.settings import Settings

PATH = Path(__file__).parent.parent / "results" / "costs.json"
UNITS = (256, 512)
WARM_UPS = 5
"""Number of warm-ups. Each measures a cost, and the medians are kept."""


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """Cost of one model on one device, in seconds as in Cost."""

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
        return "{}, {}, {}: {} us a batch, {} a step, {} a token".format(self.model, self.device, self.date, *us)


def read(path: Path = PATH) -> dict[str, MeasuredCost]:
    """Return the costs in a file by name."""
    if not path.exists():
        return {}
    return {name: MeasuredCost(**fields) for name, fields in json.loads(path.read_text()).items()}


def measure(device: str, path: Path = PATH) -> list[str]:
    """Measure LSTMs over token ids during warm-up on this device, and add them to a file. Returns their names."""
    measured = {f"{slug(cost.device)}-{cost.model}": cost for cost in (_measured(device, units) for units in UNITS)}
    costs = read(path) | measured
    path.write_text(json.dumps({name: asdict(cost) for name, cost in sorted(costs.items())}, indent=2) + "\n")
    return list(measured)


def _measured(device: str, units: int) -> MeasuredCost:
    name = f"lstm-{units}"
    ids = SequenceInput(kind="ids", vocabulary=20_000, max_steps=LONG_STEPS)
    layers = EmbeddingLayer(kind="embedding", width=units), LSTMLayer(kind="lstm", hidden=units)
    with tempfile.TemporaryDirectory() as scratch:
        synthetic_models.write(Path(scratch), name, ids, *layers)
        settings = Settings(models=Path(scratch), device=device)
        engines = (build_engine(settings, Metrics()) for _ in range(WARM_UPS))
        costs = [engine.cost(ModelKey(name, "1")) for engine in engines]
    setting = Setting.of(torch.device("cuda:0" if device == "auto" and torch.cuda.is_available() else device))
    fixed, per_step, per_token = (float(f"{statistics.median(each):.4g}") for each in zip(*costs, strict=True))
    return MeasuredCost(name, setting.device, setting.date, fixed, per_step, per_token)
