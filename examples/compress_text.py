"""Make text classifiers smaller, with and without training, measure each through the running service, and draw the table of the price.

An original is trained as in `train_text.py`. Its variants are model folders beside it: int8, a low rank and a small vocabulary by
`seqserve compress`, the last two also trained after that, and a small model that learns the labels alone or is distilled from the
original. The command repeats nothing that the results file and the models folder have. `--holdout T` chooses settings: it trains without
tenth T of the training part, evaluates on it, prints the table and never uses the test part. With `--sets none` the command only draws
the table in README.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch
from results import Run, runs
from training import compression_table, pages, records
from training import flags as setting_flags
from training.compression import Choices
from training.compression_plan import Plan
from training.loads import gpu, measure
from training.records import Record
from training.service import running
from training.text_sets import FOLDS, MissingSet, read_set
from training.variants import VARIANTS

HERE = Path(__file__).parent
QUICK = Choices(rank=6, vocabulary=40, tuning_epochs=1, student_width=8, student_hidden=4, student_epochs=2)


def make(plan: Plan, run: Run, variant: str) -> Record:
    """Write the folder of a variant and return its record. Runs in a process of a pool, on one thread."""
    torch.set_num_threads(1)
    job = plan.job(run)
    shutil.rmtree(job.folder(variant).parent, ignore_errors=True)
    measured = VARIANTS[variant].make(job, variant)
    title = VARIANTS[variant].title.format(**asdict(plan.choices))
    size = compression_table.folder_bytes(job.folder(variant))
    return {"kind": "training", "title": title, **measured, "bytes": size, **gpu(plan.train_device)}


def make_all(plan: Plan, planned: list[Run], variants: list[str], devices: list[str], jobs: int) -> None:
    """Make the missing models: all models of a variant before the next variant, which may need them."""
    missing = {run: missing_models(plan, run, variants, devices) for run in planned}
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for variant in VARIANTS:
            made = {pool.submit(make, plan, run, variant): run for run in planned if variant in missing[run]}
            for each in as_completed(made):
                plan.append(made[each], variant, each.result())
                print(f"{made[each].name} {variant} is made", flush=True)


def missing_models(plan: Plan, run: Run, variants: list[str], devices: list[str]) -> set[str]:
    """Return the variants without a record, the variants without a folder that lack a figure, and the variants that these are made from."""
    here = {variant for variant in VARIANTS if plan.job(run).folder(variant).is_dir()}
    missing = {
        variant
        for variant in variants
        if not plan.has(run, variant, kind="training") or (variant not in here and plan.unmeasured(run, variant, devices))
    }
    for variant in reversed(VARIANTS):
        if variant in missing:
            missing |= {*VARIANTS[variant].of} - here
    return missing


def serve(plan: Plan, run: Run, variants: list[str], device: str) -> Iterator[tuple[str, Record]]:
    """Yield the missing figures of each variant of a run: the accuracy by HTTP, and the speed."""
    missing = [(variant, kind) for variant in variants for kind in plan.unmeasured(run, variant, [device])]
    if not missing:
        return
    job = plan.job(run)
    with running(job.models, device) as service:
        for variant, kind in missing:
            if kind == "served":
                accuracy = service.accuracy(job.name(variant), job.text_set.test)
                yield variant, {"kind": "served", "device": device, "served_percent": accuracy}
            else:
                for record in measure(service, job.models, job.name(variant), device, plan.seconds):
                    yield variant, record


def write_cards(plan: Plan, planned: list[Run], measured: list[Record]) -> None:
    """Write the row of each variant, next to the row of its original, into its card."""
    for run, variant in product(planned, VARIANTS):
        folder = plan.job(run).folder(variant)
        of_run = [record for record in measured if asdict(run).items() <= record.items()]
        if variant != "original" and folder.is_dir():
            compression_table.write_card(folder, compression_table.lines(of_run, ("original", variant)))


def arguments(line: list[str] | None) -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return [] if text == "none" else text.split(",")

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("DATA"), help="folder of the sets (default: $DATA)")
    parser.add_argument("--sets", type=words, default=["trec"], help="names of sets (default: trec)")
    parser.add_argument("--encoders", type=words, default=["lstm", "sru"], help="families (default: lstm,sru)")
    parser.add_argument("--variants", type=words, default=list(VARIANTS), help="(default: all)")
    parser.add_argument("--devices", type=words, default=["cpu"], help="devices to serve on, as in cpu,cuda:0 (default: cpu)")
    parser.add_argument("--train-device", default="cpu", help="device to train on (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="originals of a set with a test part (default: %(default)s)")
    parser.add_argument("--folds", type=int, default=FOLDS, help="tested folds of a set without parts (default: %(default)s)")
    parser.add_argument("--holdout", type=int, choices=range(FOLDS), help="evaluate on this tenth of the training part")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="trainings at once (default: the number of cores)")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of a load; 0 measures no speed (default: 5)")
    parser.add_argument(
        "--models", type=Path, default=Path("build/compressed"), help="folder for models (default: %(default)s)"
    )
    parser.add_argument("--results", type=Path, default=HERE / "results-compression.jsonl", help="(default: %(default)s)")
    parser.add_argument("--page", type=Path, default=HERE / "README.md", help="page with the table (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="small models, whose figures stay out of the table")
    setting_flags.add(parser, {"": Choices()})
    return parser.parse_args(line)


def main(line: list[str] | None = None) -> int:
    flags = arguments(line)
    choices = QUICK if flags.quick else Choices()
    choices = replace(choices, **setting_flags.given(flags, choices))
    plan = Plan(flags.data, flags.models, flags.results, choices, flags.holdout, flags.quick, flags.train_device, flags.seconds)
    try:
        groups = [runs(plan.data, name, encoder, flags.seeds, flags.folds) for name in flags.sets for encoder in flags.encoders]
        for group in groups:
            read_set(plan.data, group[0].set)
    except MissingSet as error:
        print(error, file=sys.stderr)
        return 2
    planned = [run for group in groups for run in group]
    make_all(plan, planned, flags.variants, flags.devices, flags.jobs)
    for device, run in product(flags.devices, planned):
        for variant, record in serve(plan, run, flags.variants, device):
            plan.append(run, variant, record)
    measured = records.read(plan.results)
    shown = compression_table.of_kind(measured, plan.quick, plan.holdout)
    write_cards(plan, planned, shown)
    if plan.holdout is None:
        pages.put(flags.page, compression_table.MARK, compression_table.lines(compression_table.of_kind(measured)))
    else:
        print("\n".join(compression_table.lines(shown)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
