"""Train every family on sets of time series, evaluate each model through the running service, measure its speed, and draw the table.

A model whose folder is there is not trained again. With `--sets none` it only draws the table in README.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import evaluate_series
import torch
import train_series
from training import pages, records
from training.loads import measure
from training.records import Record
from training.series_sets import MissingSet, read, read_set
from training.service import running

HERE = Path(__file__).parent
MARK = "series"
SETS = ("JapaneseVowels", "BasicMotions")
IDENTITY = ("kind", "set", "encoder", "seed", "device", "callers")
"""The fields that identify a record: a later record with the same values replaces an earlier record."""
COLUMNS = (
    *("set", "family", "runs", "framework alone, %", "training, s", "bytes"),
    *(f"{device} {figure}" for device in ("CPU", "GPU") for figure in ("%", "ms", "series/s")),
)


@dataclass(frozen=True)
class Run:
    set: str
    encoder: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.set}-{self.encoder}-{self.seed}"


def train(run: Run, data: Path, models: Path, is_quick: bool) -> Record:
    """Train one model and write its folder. Runs in a process of a pool, on one thread."""
    torch.set_num_threads(1)
    series_set, settings = read_set(data, run.set), train_series.DEFAULTS[run.encoder]
    if is_quick:
        series_set, settings = train_series.quick(series_set, settings)
    trained = train_series.train(series_set, replace(settings, seed=run.seed))
    return train_series.write(models / run.name / "1", trained, series_set, f"--set {run.set}") | {"quick": is_quick}


def serve(runs: list[Run], data: Path, models: Path, device: str, seconds: float, is_quick: bool) -> Iterator[Record]:
    """Yield the accuracy of each model by HTTP, and the speed of the first model of each set and family. One engine serves all models."""
    with running(models, device) as service:
        for run in runs:
            test = read(data, run.set, "TEST")
            percent = evaluate_series.accuracy(service, run.name, test[: train_series.QUICK_SERIES] if is_quick else test)
            yield {"kind": "served", "device": device, "served_percent": percent, **asdict(run)}
        for run in {(run.set, run.encoder): run for run in reversed(runs)}.values():
            for load in measure(service, models, run.name, device, seconds):
                yield load | asdict(run)


def lines(measured: list[Record]) -> list[str]:
    """Return the table of a results file, without quick trials."""
    full = [record for record in measured if not record["quick"]]
    newest = {tuple(map(record.get, IDENTITY)): record for record in full}.values()
    pairs = sorted({(record["set"], record["encoder"]) for record in newest})
    if not pairs:
        return [pages.EMPTY]
    groups = [[record for record in newest if (record["set"], record["encoder"]) == pair] for pair in pairs]
    return [*pages.table(COLUMNS, map(row, groups)), "", *pages.machines(newest)]


def row(group: list[Record]) -> list[str]:
    """Return the row of a set and family: means and deviations of accuracies, and medians of times and sizes."""
    trainings = [record for record in group if record["kind"] == "training"]
    return [
        group[0]["set"],
        group[0]["encoder"],
        str(len(trainings)),
        pages.spread([record["trained_percent"] for record in trainings]),
        f"{median(record['training_seconds'] for record in trainings):.0f}" if trainings else pages.MISSING,
        f"{median(record['bytes'] for record in trainings):,.0f}" if trainings else pages.MISSING,
        *(cell for on_gpu in (False, True) for cell in on_device(group, on_gpu)),
    ]


def on_device(group: list[Record], on_gpu: bool) -> tuple[str, str, str]:
    """Return the accuracy by HTTP and the speed of a set and family on one kind of device."""
    here = [record for record in group if "device" in record and pages.on_gpu(record) == on_gpu]
    served = [record["served_percent"] for record in here if record["kind"] == "served"]
    return pages.spread(served), *pages.speed([record for record in here if record["kind"] == "speed"])


def arguments(line: list[str] | None) -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return [] if text == "none" else text.split(",")

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("DATA"), help="folder of the sets (default: $DATA)")
    parser.add_argument("--sets", type=words, default=list(SETS), help=f"(default: {','.join(SETS)})")
    parser.add_argument("--encoders", type=words, default=list(train_series.DEFAULTS), help="families (default: all)")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each family on a set (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at once (default: %(default)s)")
    parser.add_argument("--devices", default="cpu", help="devices to serve on, as in cpu,cuda:0 (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each load (default: %(default)s)")
    parser.add_argument("--models", type=Path, default=Path("build/series"), help="folder for models (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=HERE / "results-series.jsonl", help="(default: %(default)s)")
    parser.add_argument("--page", type=Path, default=HERE / "README.md", help="page with the table (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="small models, whose figures stay out of the table")
    flags = parser.parse_args(line)
    flags.data = Path(flags.data) if flags.data else None
    return flags


def main(line: list[str] | None = None) -> int:
    flags = arguments(line)
    mark = {"quick": flags.quick}
    runs = [Run(*parts) for parts in product(flags.sets, flags.encoders, range(1, flags.seeds + 1))]
    try:
        for name in flags.sets:
            read_set(flags.data, name)
    except MissingSet as error:
        print(error, file=sys.stderr)
        return 2
    missing = [run for run in runs if not (flags.models / run.name / "1").is_dir()]
    with ProcessPoolExecutor(flags.jobs, get_context("spawn")) as pool:
        trainings = [pool.submit(train, run, flags.data, flags.models, flags.quick) for run in missing]
        for run, training in zip(missing, trainings, strict=True):
            records.append(flags.results, training.result())
            print(f"{run.name} is trained", flush=True)
    for device in flags.devices.split(",") if runs else []:
        for record in serve(runs, flags.data, flags.models, device, flags.seconds, flags.quick):
            records.append(flags.results, record | mark)
    pages.put(flags.page, MARK, lines(records.read(flags.results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
