"""The runs of the recipe for compression: where their models are, and which of their records the results file has."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import train_text
from results import Run

from training import records
from training.compression import Choices, Job
from training.records import Record
from training.text_sets import hold_out, read_set
from training.variants import VARIANTS


@dataclass(frozen=True)
class Plan:
    """Shared by all runs. holdout: the tenth of the training part on which models are evaluated instead of the test part; seconds: of a
    load, 0 for no speed."""

    data: Path
    models: Path
    results: Path
    choices: Choices
    holdout: int | None
    quick: bool
    train_device: str
    seconds: float

    def job(self, run: Run) -> Job:
        text_set, settings = read_set(self.data, run.set, run.fold), train_text.DEFAULTS[run.encoder]
        if self.holdout is not None:
            rest, held_out = hold_out(text_set.train, self.holdout)
            text_set = replace(text_set, train=rest, test=held_out)
        if self.quick:
            text_set, settings = train_text.quick(text_set, settings)
            settings = replace(settings, width=12)  # an SRU as wide as its outputs has no matrix that a lower rank could change
        kind = "-".join(["quick" if self.quick else "full", *([] if self.holdout is None else [f"holdout-{self.holdout}"])])
        source = train_text.source(text_set, None, self.quick)
        return Job(
            self.models / kind / run.name,
            text_set,
            replace(settings, seed=run.seed),
            self.choices,
            source,
            torch.device(self.train_device),
        )

    def identity(self, run: Run, variant: str) -> Record:
        """Return the fields that identify a variant of a run in the results file."""
        choices = {name: value for name, value in asdict(self.choices).items() if name in VARIANTS[variant].choices}
        return asdict(run) | {"variant": variant, "choices": choices, "quick": self.quick, "holdout": self.holdout}

    def append(self, run: Run, variant: str, record: Record) -> None:
        records.append(self.results, record | self.identity(run, variant))

    def has(self, run: Run, variant: str, **kind: str) -> bool:
        """Return whether the results file has such a record of a variant."""
        wanted = self.identity(run, variant) | kind
        return any(wanted.items() <= record.items() for record in records.read(self.results))

    def unmeasured(self, run: Run, variant: str, devices: list[str]) -> list[str]:
        """Return the kinds of records that a variant lacks. Only the first run of a set and family has a speed."""
        kinds = ["served", *(["speed"] if self.seconds and (run.fold, run.seed) == (0, 1) else [])]
        return [kind for kind in kinds for device in devices if not self.has(run, variant, kind=kind, device=device)]
