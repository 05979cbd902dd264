"""Baselines agree with their expected answers, and run where a goal or the figure needs them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.bench.baselines import BASELINES
from kernels.bench.baselines.baseline import Baseline, TimedCall
from kernels.bench.baselines.comparison import convolution, device_copy, lstm, one_product, square_product
from kernels.bench.case import case_for_layer, random_case
from kernels.bench.convolutions import text_cnn
from kernels.bench.workload import FORMS, Workload
from kernels.bench.workloads import workloads
from tests.kernels.bench.conftest import CPU, measured, tiny

EVERY_STEP = tiny("sru", "every-step", lengths="equal")


@pytest.mark.parametrize(
    "workload, baseline",
    [
        *((tiny(family, form=form), Baseline("product", one_product)) for family in FORMS for form in FORMS[family]),
        *((EVERY_STEP, Baseline(f"width {width}", convolution(width))) for width in (2, 3)),
        *((EVERY_STEP, Baseline(f"width {width}, channels last", convolution(width, channels_last=True))) for width in (2, 3)),
        (EVERY_STEP, Baseline("lstm", lstm)),
        (tiny("sru"), Baseline("lstm", lstm)),
    ],
    ids=str,
)
def test_each_agrees_with_its_expected_answer(workload: Workload, baseline: Baseline) -> None:
    findings = measured(workload, baseline)
    assert not findings.wrong
    assert findings.measurements[-1].backend == baseline.name and findings.measurements[-1].error < 1e-5


def test_copy_is_timed_without_an_encoder() -> None:
    findings = measured(tiny("sru", "copy", lengths="equal"), Baseline("copy", device_copy))
    assert [(one.backend, one.error) for one in findings.measurements] == [("copy", 0.0)]


def test_square_product_is_timed_without_an_encoder() -> None:
    square = Workload("conv", 1, 12, 12, 12, kind="product")
    (measurement,) = measured(square, Baseline("one product", square_product)).measurements
    assert measurement.backend == "one product" and measurement.error < 1e-6
    call = square_product(random_case(square, CPU))
    assert call.expected is not None and call.expected.shape == (12, 12)


@pytest.mark.parametrize("family, form, columns", [("sru", "v1", 6), ("qrnn", "window 1", 6), ("qrnn", "window 2", 12)])
def test_one_product_has_the_columns_of_its_window(family: str, form: str, columns: int) -> None:
    case = random_case(tiny(family, form=form), CPU)
    call = one_product(case)
    assert call.expected is not None and call.expected.shape == (sum(case.lengths), 18)
    wide = replace(case.weights[0], input=torch.ones_like(case.weights[0].input))
    sums = one_product(replace(case, weights=(wide,))).run()[:, 0]
    torch.testing.assert_close(sums, case.x.data.sum(1) * columns / 6)


def test_case_for_another_layer_keeps_data_and_size() -> None:
    case = random_case(tiny("sru"), CPU)
    other = case_for_layer(case, "qrnn", "window 2")
    assert other.x is case.x and other.lengths == case.lengths
    assert other.workload == tiny("qrnn") and other.weights[0].hidden == 6


def on_cuda(family: str) -> dict[str, set[tuple[str, int, int, int]]]:
    """Return kind, rows, steps and hidden size of the workloads of each baseline in a full run."""
    everything = workloads(family, "cuda", quick=False)
    runs: dict[str, set[tuple[str, int, int, int]]] = {}
    for baseline in BASELINES[family]:
        sizes = {(work.kind, work.rows, work.steps, work.hidden) for work in everything if baseline.applies(work, "cuda")}
        runs.setdefault(baseline.name, set()).update(sizes)
    return runs


def test_sru_baselines_run_where_they_are_useful() -> None:
    runs = on_cuda("sru")
    figure = {("every-step", 32, steps, hidden) for steps in (32, 128) for hidden in (256, 512)}
    outside_the_grid = {("layer", 32, 64, 256), ("layer", 32, 64, 512), ("layer", 1, 64, 512)}
    small = {("layer", rows, steps, hidden) for rows in (1, 32) for steps in (32, 128) for hidden in (256, 512)}
    assert runs["torch by step"] == outside_the_grid
    assert runs["sru package"] == outside_the_grid | small | {("layer", 1, 4096, 512)}
    assert runs["torch LSTM"] == runs["conv1d width 2"] == runs["conv1d width 3, channels last"] == figure
    assert len(runs["one product"]) == 3 * 3 * 4 and {kind for kind, *_ in runs["one product"]} == {"layer"}
    assert runs["device copy"] == {("copy", 1, 1 << 20, 512)}


def test_qrnn_baselines_run_where_they_are_useful() -> None:
    runs = on_cuda("qrnn")
    assert runs["torch by step"] == {("layer", 32, 64, 256), ("layer", 32, 64, 512), ("layer", 1, 64, 512)}
    assert runs["sru package v1"] == {("layer", 1, 4096, 512)}
    assert len(runs["one product"]) == 3 * 3 * 3
    assert len(runs["device copy"]) == 1


def test_convolution_strategies_run_over_vectors() -> None:
    runs = on_cuda("conv")
    texts = {("text-cnn", rows, 64, 300) for rows in (1, 8, 32, 64, 256, 1024)} | {("text-cnn", 256, 128, 1536)}
    dense = {("dense-conv", rows, 64, hidden) for rows in (1, 32) for hidden in (256, 512)}
    ids = {("text-cnn-ids", rows, 64, 300) for rows in (1, 32, 256, 1024)}
    stacks = {(kind, rows, 256, 256) for kind in ("tcn", "tcn-last") for rows in (1, 32)}
    everywhere = (
        "channels last",
        "im2col + product",
        "tiled implicit lowering",
        "batch innermost",
        "Winograd F(2,3)",
        "low rank",
    )
    assert all(runs[strategy] == texts | dense for strategy in everywhere)
    assert runs["torch conv1d"] == texts | dense | ids | stacks
    # The loops run on 256 rows of questions, but not on 256 rows of 64 steps.
    assert runs["direct loops"] == (texts | dense) - {
        *(("text-cnn", rows, 64, 300) for rows in (64, 1024)),
        ("text-cnn", 256, 128, 1536),
        ("dense-conv", 32, 64, 512),
    }
    loops = [baseline for baseline in BASELINES["conv"] if baseline.name == "direct loops"]
    assert not any(baseline.applies(text_cnn(256), "cuda") for baseline in loops)
    assert runs["one product"] == {("product", 1, 8192, 8192)}


def test_library_runs_once_over_token_ids() -> None:
    ids = [workload for workload in workloads("conv", "cuda", quick=False) if workload.kind == "text-cnn-ids"]
    forms = [workload.form for workload in ids for baseline in BASELINES["conv"] if baseline.applies(workload, "cuda")]
    assert len(ids) == 2 * 7 and forms == ["embedded"] * 7


def test_missing_expected_answer_is_reported() -> None:
    (line,) = measured(
        tiny("sru", "copy", lengths="equal"), Baseline("idle", lambda _: TimedCall(lambda: torch.zeros(1)))
    ).wrong
    assert line.startswith("idle on sru copy v2 3 x 7, 6 -> 6, float32: AssertionError: a workload without an encoder")
