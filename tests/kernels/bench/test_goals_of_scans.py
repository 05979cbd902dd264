"""Goals of the SRU and the QRNN, by figures that can be checked by hand."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import pytest

from kernels.bench import goals
from kernels.bench.goals.scan import CELLS
from kernels.bench.report import Row
from kernels.bench.timing import Spread
from kernels.bench.workload import FORMS, LONG_MEMORY, Workload
from kernels.bench.workloads import one_long_row, workloads

BACKENDS = ("quick", "reference")
COPIES = {one.family: one for one in CELLS if one.kind == "copy"}


def timed(workload: Workload, backend: str, median_us: float, timing: str = "kernel") -> Row:
    return Row(workload, backend, timing, Spread(median_us, median_us, median_us, 20), 0.0)


def cells(family: str, kind: str, form: str) -> list[Workload]:
    return [one for one in CELLS if (one.family, one.kind, one.form) == (family, kind, form)]


def copied(family: str, bytes_per_us: float) -> Row:
    """A copy of 1 GiB, each byte read and written, at this rate."""
    return timed(COPIES[family], "device copy", 2 * 2**30 / bytes_per_us)


def parts(rows: Iterable[Row]) -> tuple[dict[str, str], list[list[list[str]]]]:
    """The lines by what they are about, and the grids, cell by cell."""
    lines, *grids = (
        [re.split(" {2,}", line) for line in part.splitlines()] for part in goals.table(rows, BACKENDS).split("\n\n")
    )
    return {what: " ".join(more) for what, *more in lines[1:]}, grids


def found(rows: Iterable[Row]) -> dict[str, str]:
    return parts(rows)[0]


def over_products(family: str, form: str, ratio: float, product_us: float = 100.0) -> list[Row]:
    over = cells(family, "layer", form)
    ours = [timed(one, "quick", ratio * product_us) for one in over]
    return ours + [timed(one, "one product", product_us) for one in over]


@pytest.mark.parametrize("family, form", [("sru", "v1"), ("qrnn", "window 1"), ("qrnn", "window 2"), ("sru", LONG_MEMORY)])
@pytest.mark.parametrize("ratio, verdict", [(1.25, "met"), (1.26, "missed")])
def test_a_layer_is_held_against_one_product(family: str, form: str, ratio: float, verdict: str) -> None:
    size = "hidden 512, 1 x 4096" if form == LONG_MEMORY else "hidden 256, 1 x 32"
    shown = found(over_products(family, form, ratio))
    assert shown == {f"{family} layer {form} over one product": f"{ratio} times {size} <= 1.25 times {verdict}"}


def test_the_worst_size_is_named_and_the_goal_open_while_others_are_missing() -> None:
    slow = next(one for one in cells("sru", "layer", "v1") if (one.hidden, one.rows, one.steps) == (512, 32, 1024))
    rows = [row for row in over_products("sru", "v1", 1.0) if row.workload.hidden != 1024]
    assert found(rows) == {"sru layer v1 over one product": "1 times hidden 256, 1 x 32 <= 1.25 times open"}
    missed = [*over_products("sru", "v1", 1.0), timed(slow, "quick", 140.0)]
    assert found(missed) == {"sru layer v1 over one product": "1.4 times hidden 512, 32 x 1024 <= 1.25 times missed"}


@pytest.mark.parametrize(
    "steps, product_us, ours_us, ratio",
    [(4096, 10.0, 108.4, 1.0), (4096, 100.0, 125.0, 1.0), (32, 1.0, 6.8, 1.0), (32, 1.0, 13.6, 2.0)],
)
def test_a_second_version_may_also_take_the_time_of_its_steps(
    steps: int, product_us: float, ours_us: float, ratio: float
) -> None:
    one = next(one for one in cells("sru", "layer", "v2") if one.steps == steps)
    (shown,) = found([timed(one, "quick", ours_us), timed(one, "one product", product_us)]).values()
    assert shown.startswith(f"{ratio:.4g} times") and shown.endswith("open" if ratio <= 1 else "missed")


@pytest.mark.parametrize(
    "family, form, allowed_us",
    # At 1,000 bytes a microsecond: 32 steps of 256 units gather 65,536 bytes in four blocks, and 49,152 in three.
    [("sru", "v1", 131.072), ("sru", "v2", 131.072), ("qrnn", "window 1", 98.304)],
)
def test_a_folded_layer_is_held_against_twice_its_bytes(family: str, form: str, allowed_us: float) -> None:
    one = next(one for one in cells(family, "folded", form) if (one.hidden, one.rows, one.steps) == (256, 1, 32))
    shown = found([copied(family, 1e3), timed(one, "quick", allowed_us)])
    assert shown["device copy, bytes read and written"] == "0.001 TB/s"
    (line,) = (line for what, line in shown.items() if what.startswith(f"{family} folded {form} over twice its bytes"))
    assert line == "1 times hidden 256, 1 x 32 <= 1 times open"


@pytest.mark.parametrize("form, steps, allowed_us", [("v1", 32, 6.0), ("v2", 32, 6.8), ("v2", 4096, 108.4)])
def test_where_its_bytes_take_no_time_a_folded_layer_has_a_time_of_its_own(form: str, steps: int, allowed_us: float) -> None:
    one = next(one for one in cells("sru", "folded", form) if (one.hidden, one.rows, one.steps) == (256, 1, steps))
    shown = found([copied("sru", 4e6), timed(one, "quick", 2 * allowed_us)])
    (line,) = (line for what, line in shown.items() if what.startswith("sru folded"))
    assert line == f"2 times hidden 256, 1 x {steps} <= 1 times missed"


def test_without_the_rate_of_a_copy_bytes_say_nothing() -> None:
    assert goals.table([timed(cells("sru", "folded", "v1")[0], "quick", 5.0)], BACKENDS) == ""


def test_the_lstm_and_the_convolutions_are_held_against_every_step() -> None:
    over = cells("sru", "every-step", "v1")
    peers = {"torch LSTM": 90.0, "conv1d width 2": 10.0, "conv1d width 3": 30.0, "conv1d width 3, channels last": 9.0}
    rows = [timed(one, peer, median_us) for one in over for peer, median_us in peers.items()]
    assert found([*rows, *(timed(one, "quick", 10.0) for one in over)]) == {
        "sru every step v1, torch LSTM, 128 steps": "9 hidden 256, 32 x 128 >= 10 missed",
        "sru every step v1, torch LSTM, 32 steps": "9 hidden 256, 32 x 32 >= 6 met",
        "sru every step v1, conv1d width 2": "1 hidden 256, 32 x 32 >= 1 met",
        "sru every step v1, conv1d width 3": "0.9 hidden 256, 32 x 32 >= 1 missed",
    }


@pytest.mark.parametrize(
    "family, form, peer",
    [("sru", "v1", "sru package"), ("qrnn", "window 1", "sru package v1"), ("qrnn", "window 2", "sru package v1")],
)
def test_one_long_row_is_held_against_the_package(family: str, form: str, peer: str) -> None:
    (one,) = (one for one in cells(family, "layer", form) if one_long_row(one))
    rows = [timed(one, "quick", 100.0), timed(one, "quick", 1.0, "eager"), timed(one, peer, 4100.0, "eager")]
    assert found(rows) == {
        f"{family} layer {form}, {peer}, eager over our kernel": "41 hidden 512, 1 x 4096 >= 40 met",
    }


def test_a_grid_shows_every_size_and_what_is_missing() -> None:
    rows = [row for row in over_products("qrnn", "window 2", 1.234) if (row.workload.hidden, row.workload.rows) != (512, 1)]
    lines, (grid,) = parts(rows)
    assert list(lines) == ["qrnn layer window 2 over one product"]
    assert grid[0] == ["qrnn layer window 2 over one product", "256", "512", "1024"]
    assert grid[1] == ["1 x 32", "1.23", "-", "1.23"]
    assert [line[0] for line in grid[1:]] == [f"{rows} x {steps}" for rows in (1, 32, 256) for steps in (32, 128, 4096)]
    assert grid[-1] == ["256 x 4096", "1.23", "1.23", "1.23"]


def test_ours_is_the_backend_that_a_caller_gets() -> None:
    one = cells("sru", "layer", "v1")[0]
    rows = [timed(one, "reference", 1.0), timed(one, "quick", 10.0), timed(one, "one product", 10.0)]
    assert found(rows)["sru layer v1 over one product"].startswith("1 times")


@pytest.mark.parametrize("family", FORMS)
def test_none_of_the_workloads_on_a_cpu_or_beside_the_grid_has_a_goal(family: str) -> None:
    assert not set(CELLS) & set(workloads(family, "cpu", quick=False))
    assert not set(CELLS) & {replace(one, lengths="questions") for one in CELLS}
