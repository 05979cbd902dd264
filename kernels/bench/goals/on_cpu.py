"""The goals of all families on one thread of a CPU, in float32 unless a goal names another dtype.

A value is the time of the fastest baseline as a multiple of our backend's. Layers over token ids are folded, and their baselines
look up an embedding.
"""

from __future__ import annotations

from dataclasses import replace

from kernels.bench.convolutions import embedded
from kernels.bench.goals.evaluation import Goal, Times, speedup
from kernels.bench.goals.limit import Limit
from kernels.bench.workload import FOLDED, INT8, Workload
from kernels.bench.workloads import workloads

EAGER = "eager"
GATED, SCANS = ("lstm", "gru"), ("sru", "qrnn")
LIBRARIES = {
    **dict.fromkeys(GATED, ("torch padded", "torch packed", "onnxruntime")),
    "sru": ("sru package",),
    "qrnn": ("torch gates, scan",),
}
"""The baselines of a layer. Over token ids, `embedding` is in front of their names."""

CELLS = [workload for family in (*LIBRARIES, "conv") for workload in workloads(family, "cpu", quick=False)]


def cells(family: str, kind: str, dtype: str = "float32", **others: str) -> list[Workload]:
    """Return the workloads of a kind and dtype. others: values of further fields."""
    named = {"family": family, "kind": kind, "dtype": dtype, **others}
    return [cell for cell in CELLS if all(getattr(cell, field) == value for field, value in named.items())]


def _over_float32(times: Times, workload: Workload) -> float:
    """Return our backend's time with float32 weights as a multiple of its time on the workload."""
    return times.ours(replace(workload, dtype="float32"), EAGER) / times.ours(workload, EAGER)


def _gated_goals(family: str) -> list[Goal]:
    name, value = f"{family} layer, fastest library", speedup(*LIBRARIES[family], timing=EAGER)
    layers, questions = cells(family, "layer"), cells(family, "layer", lengths="questions")
    return [
        Goal(f"{name}, smallest", layers, value, Limit(0.97), has_grid=True),
        Goal(f"{name}, questions, geometric mean", questions, value, Limit(1.3), "mean"),
        _mean_over_ids(family, Limit(1.8)),
        Goal(f"{family} layer, bfloat16 over float32", cells(family, "layer", "bfloat16"), _over_float32, Limit(1.5), "each"),
    ]


def _scan_goals(family: str) -> list[Goal]:
    (library,) = LIBRARIES[family]
    name, layers, value = f"{family} layer, {library}", cells(family, "layer"), speedup(library, timing=EAGER)
    return [
        Goal(f"{name}, smallest", layers, value, Limit(2), has_grid=True),
        Goal(f"{name}, geometric mean", layers, value, Limit(3), "mean"),
        _mean_over_ids(family, Limit(6)),
    ]


def _mean_over_ids(family: str, limit: Limit) -> Goal:
    value = speedup(*(f"embedding, {library}" for library in LIBRARIES[family]), timing=EAGER)
    name = f"{family} over token ids, fastest library, geometric mean"
    return Goal(name, cells(family, "folded"), value, limit, "mean", has_grid=True)


def _text_cnn_goal(lengths: str, name: str, limit: float) -> Goal:
    folded = cells("conv", "text-cnn-ids", form=FOLDED, lengths=lengths)
    value = speedup("torch conv1d", timing=EAGER, at=embedded)
    return Goal(f"text CNN over token ids, {name}, torch conv1d, smallest", folded, value, Limit(limit), has_grid=True)


def _int8_goal(family: str) -> Goal:
    return Goal(f"{family} layer, int8 over float32", cells(family, "layer", INT8), _over_float32, Limit(None), has_grid=True)


GOALS = [
    *(goal for family in GATED for goal in _gated_goals(family)),
    *(goal for family in SCANS for goal in _scan_goals(family)),
    *(_int8_goal(family) for family in (*GATED, *SCANS)),
    _text_cnn_goal("equal", "64 steps", 60),
    _text_cnn_goal("questions", "questions", 100),
]
