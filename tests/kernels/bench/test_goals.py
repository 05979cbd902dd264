"""Goals are met, missed or open for figures computed by hand. `test_kept.py` evaluates all of them for the results of real runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from kernels.bench import goals
from kernels.bench.goals import on_cpu, on_cuda
from kernels.bench.goals.evaluation import Goal
from kernels.bench.goals.on_cpu import LIBRARIES, cells
from kernels.bench.goals.on_cuda import ONE_ROW, SCANS
from kernels.bench.report import Measurement
from kernels.bench.workload import Workload
from tests.kernels.bench.conftest import judged, timed

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
