"""Goals are met, missed or open for figures computed by hand. `test_kept.py` evaluates all of them for the results of real runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest

from kernels.bench import goals
from kernels.bench.convolutions import LARGE, PRODUCT
from kernels.bench.goals import on_cpu, on_cuda
from kernels.bench.goals.evaluation import Goal
from kernels.bench.goals.on_cpu import LIBRARIES, cells
from kernels.bench.goals.on_cuda import COPIES, MANY_ROWS, ONE_ROW, QUESTIONS, RECURRENCES, SCANS, TEMPORAL, VECTORS, equal
from kernels.bench.report import Measurement
from kernels.bench.workload import FORMS, Workload
from kernels.bench.workloads import FAMILIES, bidirectional, deep, workloads
from tests.kernels.bench.conftest import judged, measured, timed, tiny

BACKENDS = ("cpu", "quick", "thorough", "reference")
ONE_ROW_OF_512 = Workload("lstm", 1, 64, 512, 512, dtype="float16")


def lines(measurements: Iterable[Measurement], judging: Sequence[Goal] = on_cuda.GOALS) -> dict[str, str]:
    return judged(measurements, BACKENDS, judging)[0]


def scans(family: str, kind: str, form: str) -> list[Workload]:
    return [workload for workload in SCANS if (workload.family, workload.kind, workload.form) == (family, kind, form)]


def over_products(ratios: Sequence[float]) -> list[Measurement]:
    """Return times of layers of the SRU v1, as multiples of the times of their products, from the first size on."""
    layers = scans("sru", "layer", "v1")
    ours = [timed(layer, "quick", 100.0 * ratio) for layer, ratio in zip(layers, ratios, strict=False)]
    return ours + [timed(layer, "one product", 100.0) for layer in layers]


def on_one_thread(workloads: Iterable[Workload], library_us: float, timing: str = "eager") -> list[Measurement]:
    """Return times of 10 us for us, and times of all libraries. The first is the fastest."""
    return [
        timed(workload, name, median_us, timing)
        for workload in workloads
        for name, median_us in (("cpu", 10.0), *((name, library_us + at) for at, name in enumerate(LIBRARIES[workload.family])))
    ]


def test_goals_are_chosen_by_device_and_threads() -> None:
    assert goals.goals_for("cpu", 1) is on_cpu.GOALS
    assert goals.goals_for("cuda", None) is on_cuda.GOALS
    assert goals.goals_for("cpu", 2) == ()


def test_goals_use_the_workloads_of_a_full_run() -> None:
    on_gpu = {workload for family in FAMILIES for workload in workloads(family, "cuda", quick=False)}
    used = [*(workload for family in ("lstm", "gru") for workload in equal(family)), *QUESTIONS, *RECURRENCES, *SCANS]
    used += [LARGE, PRODUCT["cuda"], VECTORS, TEMPORAL, *ONE_ROW, *MANY_ROWS, bidirectional("gru", 32), deep("lstm", "float16")]
    assert set(used) <= on_gpu
    assert not set(used) & {workload for family in FAMILIES for workload in workloads(family, "cpu", quick=False)}


@pytest.mark.parametrize("family", ["lstm", "qrnn"])
def test_other_runs_have_no_goals(family: str) -> None:
    assert goals.table(on_cuda.GOALS, measured(tiny(family)).measurements, ["framework"]) == ""


@pytest.mark.parametrize(
    "of_64, of_320, step, fixed",
    [
        (40.0, 168.0, "0.5 us quick <= 0.6 us met", "8 us quick <= 8 us met"),
        (40.0, 142.4, "0.4 us quick <= 0.6 us met", "14.4 us quick <= 8 us missed"),
        (64.0, 256.0, "0.75 us quick <= 0.6 us missed", "16 us quick <= 8 us missed"),
    ],
)
def test_step_and_fixed_cost_come_from_two_lengths(of_64: float, of_320: float, step: str, fixed: str) -> None:
    short = next(workload for workload in RECURRENCES if (workload.hidden, workload.rows) == (512, 8))
    of_short = timed(short, "quick", of_64)
    shown = lines([of_short, timed(replace(short, steps=320), "quick", of_320)])
    size = "hidden 512, 8 x 64"
    assert shown == {f"recurrence, a step, {size}": step, f"recurrence, fixed, {size}": fixed}
    assert lines([of_short]) == {}


def test_our_time_is_that_of_the_first_backend() -> None:
    times = {"thorough": 50.0, "quick": 100.0, "reference": 10.0, "torch by gate": 15000.0}
    shown = lines([timed(ONE_ROW_OF_512, backend, median_us, "eager") for backend, median_us in times.items()])
    assert shown == {"torch by gate, eager, hidden 512, 1 x 64": "150 quick >= 140 met"}


def test_first_backend_without_a_kernel_time_is_not_replaced() -> None:
    ours = [timed(ONE_ROW_OF_512, "quick", 9.0, "eager"), timed(ONE_ROW_OF_512, "thorough", 10.0)]
    assert lines([*ours, timed(ONE_ROW_OF_512, "torch padded", 40.0)]) == {}


@pytest.mark.parametrize(
    "slow, share", [(0, "1 36 of 36 >= 0.8 met"), (7, "0.8056 29 of 36 >= 0.8 met"), (8, "0.7778 28 of 36 >= 0.8 missed")]
)
def test_one_layer_in_five_may_be_slower_than_its_product(slow: int, share: str) -> None:
    shown = lines(over_products([1.26] * slow + [1.25] * (36 - slow)))
    assert shown["sru layer v1 over one product, share within 1.25 times"] == share


def test_worst_size_is_named_and_incomplete_goals_are_open() -> None:
    name = "sru layer v1 over one product"
    assert lines(over_products([1.0, 1.5]))[name] == "1.5 times hidden 256, 1 x 128 <= 2 times open"
    assert lines(over_products([1.0, 2.4]))[name] == "2.4 times hidden 256, 1 x 128 <= 2 times missed"


def test_grid_shows_every_size_and_missing_ones() -> None:
    _, (grid,) = judged(over_products([1.234]), BACKENDS)
    assert grid[0] == ["sru layer v1 over one product: quick", "256", "512", "1024"]
    assert grid[1] == ["1 x 32", "1.23", "-", "-"] and len(grid) == 1 + 3 * 4


@pytest.mark.parametrize(
    "steps, product_us, ours_us, ratio",
    [(4096, 10.0, 108.4, 1.0), (4096, 100.0, 125.0, 1.0), (32, 1.0, 6.8, 1.0), (32, 1.0, 13.6, 2.0)],
)
def test_sru_v2_may_take_the_time_of_its_steps(steps: int, product_us: float, ours_us: float, ratio: float) -> None:
    layer = next(workload for workload in scans("sru", "layer", "v2") if workload.steps == steps)
    (shown,) = lines([timed(layer, "quick", ours_us), timed(layer, "one product", product_us)]).values()
    assert shown.startswith(f"{ratio:.4g} times") and shown.endswith("open" if ratio <= 1 else "missed")


@pytest.mark.parametrize(
    "family, form, copied_per_us, allowed_us",
    # 32 steps of 256 units gather 65,536 bytes in four blocks, and 49,152 in three. A call may take 6 us, and a step of v2 25 ns.
    [
        *(("sru", "v1", 1e3, 131.072), ("sru", "v2", 1e3, 131.072), ("qrnn", "window 1", 1e3, 98.304)),
        *(("sru", "v1", 4e6, 6.0), ("sru", "v2", 4e6, 6.8)),
    ],
)
def test_folded_layer_is_compared_with_twice_its_bytes(family: str, form: str, copied_per_us: float, allowed_us: float) -> None:
    copy = next(copy for copy in COPIES if copy.family == family)
    ours = timed(scans(family, "folded", form)[0], "quick", 2 * allowed_us)
    shown = lines([timed(copy, "device copy", 2 * 2**30 / copied_per_us), ours])
    (line,) = (line for name, line in shown.items() if name.startswith(f"{family} folded {form} over twice its bytes"))
    assert line == "2 times hidden 256, 1 x 32 <= 1 times missed"
    assert goals.table(on_cuda.GOALS, [ours], BACKENDS) == "", "the rate of a copy is missing"


def test_every_step_is_compared_with_the_faster_layout() -> None:
    layers = scans("sru", "every-step", "v1")
    baselines = {"conv1d width 2": 10.0, "conv1d width 2, channels last": 11.0}
    measurements = [
        timed(layer, name, median_us) for layer in layers for name, median_us in {**baselines, "quick": 10.0}.items()
    ]
    assert lines(measurements) == {"sru every step v1, conv1d width 2": "1 hidden 256, 32 x 32 >= 1 met"}


@pytest.mark.parametrize("family, baseline", [("sru", "sru package"), ("qrnn", "sru package v1")])
def test_one_long_row_is_compared_with_an_eager_call(family: str, baseline: str) -> None:
    form = FORMS[family][0]
    row = Workload(family, 1, 4096, 512, 512, dtype="float16", form=form)
    ours = [timed(row, "quick", 100.0), timed(row, "quick", 1.0, "eager")]
    assert lines([*ours, timed(row, baseline, 4100.0, "eager")]) == {
        f"{family} layer {form}, {baseline}, eager over our kernel": "41 hidden 512, 1 x 4096 >= 40 met"
    }


def test_large_text_cnn_is_compared_with_the_rate_of_a_product() -> None:
    # 256 rows of 128 steps, 512 -> 3 x 512: the windows of each filter width, times the width.
    ours = timed(LARGE, "quick", 2 * 256 * 512 * 512 * (126 * 3 + 125 * 4 + 124 * 5) / (0.8 * 600.0) / 1e6)
    product = timed(PRODUCT["cuda"], "one product", 2 * 8192**3 / 600.0 / 1e6)
    assert lines([ours, product]) == {
        "one product": "600 TFLOP/s",
        "conv text-cnn 256 x 128, 512 -> 1536, float16, share of the product rate": "0.8 >= 0.85 missed",
    }
    assert goals.table(on_cuda.GOALS, [ours], BACKENDS) == goals.table(on_cuda.GOALS, [product], BACKENDS) == ""


def test_faster_of_two_forms_over_token_ids_counts() -> None:
    name = "conv text-cnn-ids 1 x 64, 300 -> 300, float16"
    embedded, folded = (timed(form, "quick", median_us) for form, median_us in zip(ONE_ROW, (12.0, 9.5), strict=True))
    assert lines([embedded, folded]) == {name: "9.5 us folded <= 10 us met"}
    assert lines([folded]) == {name: "9.5 us folded <= 10 us open"}
    assert lines([embedded]) == {name: "12 us embedded <= 10 us missed"}


@pytest.mark.parametrize(
    "library_us, smallest, mean",
    [
        (9.7, "0.97 hidden 128, 1 x 64 >= 0.97 met", "0.97 over 9 of 9 >= 1.3 missed"),
        (9.6, "0.96 hidden 128, 1 x 64 >= 0.97 missed", "0.96 over 9 of 9 >= 1.3 missed"),
        (13.0, "1.3 hidden 128, 1 x 64 >= 0.97 met", "1.3 over 9 of 9 >= 1.3 met"),
    ],
)
def test_layers_on_a_cpu_are_compared_with_the_fastest_library(library_us: float, smallest: str, mean: str) -> None:
    assert lines(on_one_thread(cells("gru", "layer"), library_us), on_cpu.GOALS) == {
        "gru layer, fastest library, smallest": smallest,
        "gru layer, fastest library, questions, geometric mean": mean,
    }


def test_comparison_needs_every_library_and_eager_times() -> None:
    (layer, *_) = layers = cells("lstm", "layer")
    complete = on_one_thread(layers, 20.0)
    incomplete = [one for one in complete if one.workload != layer or "onnx" not in one.backend]
    shown = lines(incomplete, on_cpu.GOALS)
    assert shown["lstm layer, fastest library, smallest"] == "2 hidden 128, 1 questions >= 0.97 open"
    assert lines(on_one_thread(layers, 20.0, "kernel"), on_cpu.GOALS) == {}


def test_bfloat16_is_compared_with_our_float32() -> None:
    (half,) = cells("lstm", "layer", "bfloat16")
    single = replace(half, dtype="float32")
    measurements = [timed(half, "cpu", 12.0, "eager"), timed(single, "cpu", 15.0, "eager")]
    name = "lstm layer, bfloat16 over float32, hidden 512, 1 x 64"
    assert single in cells("lstm", "layer") and lines(measurements, on_cpu.GOALS) == {name: "1.25 cpu >= 1.5 missed"}
