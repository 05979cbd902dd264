"""Goals on one thread of a CPU are met, missed or open for figures computed by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from kernels.bench import goals
from kernels.bench.convolutions import embedded
from kernels.bench.goals import on_cpu, on_cuda
from kernels.bench.goals.on_cpu import LIBRARIES, cells
from kernels.bench.report import Measurement
from kernels.bench.workload import Workload
from kernels.bench.workloads import FAMILIES, workloads
from tests.kernels.bench.conftest import judged, timed

BACKENDS = ("cpu", "framework", "reference")
ROWS, HIDDEN = (1, 8, 32), (128, 256, 512)


def lines(measurements: Iterable[Measurement]) -> dict[str, str]:
    return judged(measurements, BACKENDS, on_cpu.GOALS)[0]


def ours(workloads: Iterable[Workload], median_us: float = 10.0) -> list[Measurement]:
    return [timed(workload, "cpu", median_us, "eager") for workload in workloads]


def libraries(workloads: Iterable[Workload], prefix: str = "", **ratios: float) -> list[Measurement]:
    """Return times of all libraries. The fastest takes 10 us times the ratio of the workload's lengths."""
    return [
        timed(workload, prefix + name, 10.0 * ratios[workload.lengths] + slower, "eager")
        for workload in workloads
        for slower, name in enumerate(LIBRARIES[workload.family])
    ]


def test_goals_are_chosen_by_device_and_threads() -> None:
    assert goals.goals_for("cpu", 1) is on_cpu.GOALS
    assert goals.goals_for("cuda", None) is on_cuda.GOALS
    assert goals.goals_for("cpu", 2) == ()


@pytest.mark.parametrize("family", LIBRARIES)
@pytest.mark.parametrize("kind", ["layer", "folded"])
def test_every_size_has_a_goal(family: str, kind: str) -> None:
    sizes = [(work.hidden, work.rows, work.lengths) for work in cells(family, kind)]
    expected = {(hidden, rows, lengths) for hidden in HIDDEN for rows in ROWS for lengths in ("equal", "questions")}
    assert len(sizes) == 18 and set(sizes) == expected
    assert {(work.steps, work.dtype) for work in cells(family, kind)} == {(64, "float32")}


def test_no_workload_on_a_gpu_has_a_goal_of_a_cpu() -> None:
    on_gpu = [workload for family in FAMILIES for workload in workloads(family, "cuda", quick=False)]
    names = {"cpu", *(name for names in LIBRARIES.values() for name in names), "torch conv1d"}
    measurements = [timed(workload, name, 1.0, "kernel") for workload in on_gpu for name in names]
    assert goals.table(on_cpu.GOALS, measurements, BACKENDS) == ""


@pytest.mark.parametrize("family", ["lstm", "gru"])
@pytest.mark.parametrize(
    "equal, questions, smallest, mean",
    [(0.97, 1.3, "0.97 hidden 128, 1 x 64 >= 0.97 met", "1.3 over 9 of 9 >= 1.3 met"),
     (0.96, 1.2, "0.96 hidden 128, 1 x 64 >= 0.97 missed", "1.2 over 9 of 9 >= 1.3 missed"),
     (1.5, 0.9, "0.9 hidden 128, 1 questions >= 0.97 missed", "0.9 over 9 of 9 >= 1.3 missed")],
)  # fmt: skip
def test_gated_layers_are_compared_with_the_fastest_library(
    family: str, equal: float, questions: float, smallest: str, mean: str
) -> None:
    layers = cells(family, "layer")
    assert lines([*ours(layers), *libraries(layers, equal=equal, questions=questions)]) == {
        f"{family} layer, fastest library, smallest": smallest,
        f"{family} layer, fastest library, questions, geometric mean": mean,
    }


def test_comparison_needs_every_library() -> None:
    (layer, *_) = layers = cells("lstm", "layer")
    incomplete = [
        one for one in libraries(layers, equal=2.0, questions=2.0) if one.workload != layer or "onnx" not in one.backend
    ]
    shown = lines([*ours(layers), *incomplete])
    assert shown["lstm layer, fastest library, smallest"] == "2 hidden 128, 1 questions >= 0.97 open"


def test_grid_shows_rows_of_equal_lengths_and_questions() -> None:
    layers = cells("gru", "layer")
    _, (grid,) = judged([*ours(layers), *libraries(layers, equal=1.0, questions=2.0)], BACKENDS, on_cpu.GOALS)
    assert grid == [
        ["gru layer, fastest library, smallest: cpu", "128", "256", "512"],
        *([f"{rows} x 64", *["1"] * 3] for rows in ROWS),
        *([f"{rows} questions", *["2"] * 3] for rows in ROWS),
    ]


@pytest.mark.parametrize("family, limit, below", [("lstm", 1.8, 1.7), ("gru", 1.8, 1.7), ("sru", 6, 5.9), ("qrnn", 6, 5.9)])
def test_token_ids_are_compared_with_an_embedding(family: str, limit: float, below: float) -> None:
    folded = cells(family, "folded")
    name = f"{family} over token ids, fastest library, geometric mean"
    for ratio, verdict in ((limit, "met"), (below, "missed")):
        # The mean of 2 x ratio and ratio / 2 is the ratio.
        baselines = libraries(folded, "embedding, ", equal=2 * ratio, questions=ratio / 2)
        assert lines([*ours(folded), *baselines]) == {name: f"{ratio} over 18 of 18 >= {limit} {verdict}"}


@pytest.mark.parametrize("family, library", [("sru", "sru package"), ("qrnn", "torch gates, scan")])
@pytest.mark.parametrize(
    "equal, questions, verdicts", [(4.5, 2.0, "met met"), (9.0, 1.0, "missed met"), (2.0, 2.5, "met missed")]
)
def test_scans_are_compared_in_every_size_and_in_the_mean(
    family: str, library: str, equal: float, questions: float, verdicts: str
) -> None:
    layers = cells(family, "layer")
    shown = lines([*ours(layers), *libraries(layers, equal=equal, questions=questions)])
    assert list(shown) == [f"{family} layer, {library}, {value}" for value in ("smallest", "geometric mean")]
    assert " ".join(line.split()[-1] for line in shown.values()) == verdicts


@pytest.mark.parametrize("family", ["lstm", "gru"])
@pytest.mark.parametrize("half_us, shown", [(10.0, "1.5 cpu >= 1.5 met"), (12.0, "1.25 cpu >= 1.5 missed")])
def test_bfloat16_is_compared_with_our_float32(family: str, half_us: float, shown: str) -> None:
    (half,) = cells(family, "layer", "bfloat16")
    assert half == Workload(family, 1, 64, 512, 512, dtype="bfloat16")
    single = replace(half, dtype="float32")
    assert single in cells(family, "layer")
    assert lines([*ours([half], half_us), *ours([single], 15.0)]) == {
        f"{family} layer, bfloat16 over float32, hidden 512, 1 x 64": shown
    }
    assert lines(ours([half])) == {}


@pytest.mark.parametrize("lengths, shown, limit", [("equal", "64 steps", 60), ("questions", "questions", 100)])
def test_text_cnn_over_folded_ids_is_compared_with_conv1d(lengths: str, shown: str, limit: int) -> None:
    folded = cells("conv", "text-cnn-ids", form="folded", lengths=lengths)
    assert [workload.rows for workload in folded] == [1, 8, 32]
    name = f"text CNN over token ids, {shown}, torch conv1d, smallest"
    size = "1 x 64" if lengths == "equal" else "1 questions"
    for ratio, verdict in ((limit, "met"), (limit - 1, "missed")):
        library = [timed(embedded(workload), "torch conv1d", 10.0 * ratio, "eager") for workload in folded]
        assert lines([*ours(folded), *library]) == {name: f"{ratio} hidden 300, {size} >= {limit} {verdict}"}


def test_only_eager_times_count() -> None:
    layers = cells("lstm", "layer")
    kernel = [replace(one, timing="kernel") for one in [*ours(layers), *libraries(layers, equal=9.0, questions=9.0)]]
    assert lines(kernel) == {}
