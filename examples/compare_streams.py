"""Train every family for a recipe with streams, evaluate each model through the running service, and draw the table in README.md.

    python examples/compare_streams.py forecast
    python examples/compare_streams.py keyword --encoders qrnn,gru --evaluate="--hours 1"

A model with a folder is not trained again. With `--encoders none` the command only draws the table. With `--url` it asks a running service
that has the models. The figures of an evaluation join the earlier figures of the family, so streams in real time can be measured later.
The first of `--devices` evaluates the model, and all of them measure the speed of single requests unless `--seconds` is 0.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import string
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from training import pages, records
from training.encoders import STEP_ENCODERS
from training.loads import measure
from training.records import Record
from training.service import Service, running

HERE = Path(__file__).parent


def figure(name: str, form: str = "{}") -> Callable[[Record], str]:
    """Return a function that writes a figure of a record, or a dash without it."""
    return lambda record: form.format(record[name]) if record.get(name) is not None else pages.MISSING


def figures(form: str) -> Callable[[Record], str]:
    """Return a function that writes several figures of a record, or a dash if any is missing."""
    names = [name for _, name, _, _ in string.Formatter().parse(form) if name]
    return lambda record: form.format(**record) if record.keys() >= set(names) else pages.MISSING


@dataclass(frozen=True)
class Recipe:
    """train, evaluate: names of modules. columns: the functions that write the columns of a record with all figures of a family."""

    train: str
    evaluate: str
    columns: dict[str, Callable[[Record], str]]


SPEEDS = tuple(f"{device} {figure}" for device in ("CPU", "GPU") for figure in ("ms", "sequences/s"))
BOTH = {"training, s": figure("training_seconds", "{:.0f}"), "bytes": figure("bytes", "{:,}")}
RECIPES = {
    "forecast": Recipe(
        "train_forecast",
        "evaluate_forecast",
        {
            **BOTH,
            "pinball loss": figure("loss"),
            "inside 80 % interval, %": figure("coverage_percent"),
            "width": figure("width"),
            "spikes found, %": figure("found_spike_percent"),
            "frozen, %": figure("found_frozen_percent"),
            "shifts, %": figure("found_shift_percent"),
            "false alarms in 1,000": figure("false_alarms_of_1000"),
            "ms": figure("p50_ms"),
            "p99 ms": figure("p99_ms"),
        },
    ),
    "keyword": Recipe(
        "train_keyword",
        "evaluate_keyword",
        {
            **BOTH,
            "CPU, s": figure("cpu_seconds", "{:.0f}"),
            "threshold": figure("threshold"),
            "missed": figures("{misses} of {keywords}"),
            "false alarms an hour": figures("{false_alarms_an_hour:.1f} in {babble_hours:g} h"),
            "near misses taken for it": figures("{near_false_alarms} in {keyword_hours:g} h"),
            "audio to event, ms": figure("audio_ms_p50", "{:.0f}"),
            "p99": figure("audio_ms_p99", "{:.0f}"),
            "live event, ms": figure("event_ms_p50", "{:.0f}"),
            "live p99": figure("event_ms_p99", "{:.0f}"),
            "chunk, ms": figure("chunk_ms_p50"),
            "chunk p99": figure("chunk_ms_p99"),
            "late chunks": figures("{late_chunks} of {chunks:,}"),
            "streams behind": figures("{streams_behind_at_end} of {streams}"),
            "service, % of a core": figure("service_core_percent"),
        },
    ),
}


def run(recipe: Recipe, encoder: str, flags: argparse.Namespace) -> None:
    """Train a family unless its model is there, evaluate it through the service, and append the figures."""
    models = flags.models / flags.recipe / encoder
    train, evaluate = importlib.import_module(recipe.train), importlib.import_module(recipe.evaluate)
    quick = ["--quick"] if flags.quick else []
    if not (models / encoder / "1").is_dir():
        line = ["--encoder", encoder, "--name", encoder, "--models", str(models), "--results", str(flags.results), *quick]
        if train.main([*line, *shlex.split(flags.train)]):
            raise SystemExit(2)
    trained = [
        record for record in records.read(flags.results) if record["kind"] == "training" and record["encoder"] == encoder
    ]
    threshold = ["--threshold", str(trained[-1]["threshold"])] if "threshold" in trained[-1] else []
    part = flags.results.with_suffix(f".{encoder}.tmp")
    part.unlink(missing_ok=True)
    first, *others = flags.devices.split(",")
    with nullcontext(Service(flags.url)) if flags.url else running(models, first) as service:
        line = ["--model", encoder, "--url", service.url, "--results", str(part), *threshold]
        if evaluate.main([*line, *shlex.split(flags.evaluate)]):
            raise SystemExit(1)
        loads = measure(service, models, encoder, first, flags.seconds) if flags.seconds else []
    for device in others if flags.seconds else []:
        with running(models, device) as service:
            loads += measure(service, models, encoder, device, flags.seconds)
    for record in (records.read(part)[-1], *loads):
        records.append(flags.results, record | {"encoder": encoder, "quick": flags.quick})
    part.unlink()


def lines(recipe: Recipe, measured: list[Record]) -> list[str]:
    """Return the table of a results file, without quick trials. A later record of a family replaces an earlier record."""
    full = newest(record for record in measured if not record["quick"])
    loads = [record for record in full if record["kind"] == "speed"]
    families: dict[str, Record] = {}
    for kind in ("training", "served"):
        for record in full:
            if record["kind"] == kind:
                families[record["encoder"]] = families.get(record["encoder"], {}) | record
    rows = [
        [encoder, *(write(record) for write in recipe.columns.values()), *speeds(loads, encoder)]
        for encoder, record in families.items()
    ]
    if not rows:
        return [pages.EMPTY]
    return [*pages.table(("family", *recipe.columns, *SPEEDS), rows), "", pages.places(full)]


def newest(measured: Iterable[Record]) -> list[Record]:
    """Return the records that no later record replaces. Streams in real time have separate records."""
    names = ("kind", "encoder", "device", "callers")
    return list({(*map(record.get, names), "streams" in record): record for record in measured}.values())


def speeds(loads: Iterable[Record], encoder: str) -> list[str]:
    """Return the speed of single requests to the model of a family on both kinds of device."""
    here = [load for load in loads if load["encoder"] == encoder]
    return [cell for on_gpu in (False, True) for cell in pages.speed([load for load in here if pages.on_gpu(load) == on_gpu])]


def arguments(line: list[str] | None) -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return [] if text == "none" else text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--encoders", type=words, default=list(STEP_ENCODERS), help="families (default: all)")
    parser.add_argument("--train", default="", metavar="FLAGS", help="more flags of the training")
    parser.add_argument("--evaluate", default="", metavar="FLAGS", help="more flags of the evaluation")
    parser.add_argument("--models", type=Path, default=Path("build/streams"), help="folder for models (default: %(default)s)")
    parser.add_argument("--devices", default="cpu", help="devices to serve on, as in cpu,cuda:0 (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="duration of each load; 0 measures no speed (default: %(default)s)"
    )
    parser.add_argument("--url", help="address of a service that has the models (default: starts one for each family)")
    parser.add_argument("--results", type=Path, help="results file (default: results-RECIPE.jsonl beside this script)")
    parser.add_argument("--page", type=Path, default=HERE / "README.md", help="page with the table (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="small models, whose figures stay out of the table")
    flags = parser.parse_args(line)
    flags.results = flags.results or HERE / f"results-{flags.recipe}.jsonl"
    return flags


def main(line: list[str] | None = None) -> int:
    flags = arguments(line)
    recipe = RECIPES[flags.recipe]
    for encoder in flags.encoders:
        run(recipe, encoder, flags)
    pages.put(flags.page, flags.recipe, lines(recipe, records.read(flags.results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
