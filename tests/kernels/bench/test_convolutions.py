"""Every strategy for a convolution gives the right answers; what it lays out anew and what its factors cost is known."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.bench.agreement import expected
from kernels.bench.baselines import PEERS
from kernels.bench.baselines.baseline import Peer
from kernels.bench.baselines.conv import direct
from kernels.bench.baselines.conv.low_rank import error, factorised, low_rank
from kernels.bench.baselines.conv.lowering import TILE, in_tiles, lowered, tap_by_tap
from kernels.bench.baselines.conv.winograd import transformed, winograd
from kernels.bench.given import Given, made_up
from kernels.bench.report import FACTORS, MEMORY
from kernels.bench.workload import Workload
from kernels.contract import ConvWeights
from kernels.launching import parts_of
from tests.kernels.bench.conftest import CPU, OVER_VECTORS, measured, tiny

STRATEGIES = (
    *(peer for peer in PEERS["conv"] if peer.is_asked(tiny("conv", "text-cnn"), "cpu") and peer.name != "direct loops"),
    Peer("tap by tap", tap_by_tap),
)


@pytest.fixture
def _plain_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba that compiles nothing."""
    numba: Any = ModuleType("numba")
    numba.njit = lambda function: function
    monkeypatch.setattr(direct, "wanted", lambda *_: numba)


def agrees(workload: Workload, peer: Peer, at_most: float) -> None:
    findings = measured(workload, peer)
    assert not findings.wrong and not findings.left_out
    assert findings.rows[-1].backend == peer.name and findings.rows[-1].agrees < at_most


@pytest.mark.parametrize("workload", OVER_VECTORS, ids=str)
def test_a_product_for_each_tap_agrees(workload: Workload) -> None:
    agrees(workload, Peer("tap by tap", tap_by_tap), 1e-5)


@pytest.mark.parametrize("peer", STRATEGIES, ids=lambda peer: str(peer.name))
@pytest.mark.parametrize("workload", OVER_VECTORS, ids=str)
def test_every_strategy_agrees_in_float16(workload: Workload, peer: Peer) -> None:
    agrees(replace(workload, dtype="float16", inputs=24, hidden=24), peer, 1e-2)


@pytest.mark.parametrize("peer", STRATEGIES, ids=lambda peer: str(peer.name))
def test_more_windows_than_a_tile_holds_and_rows_of_an_odd_number_of_steps_agree(peer: Peer) -> None:
    odd = Workload("conv", 7, 2 * TILE // 7, 5, 9, kind="text-cnn")
    assert odd.rows * odd.steps > TILE and odd.rows * odd.steps % 2
    agrees(odd, peer, 1e-5)


@pytest.mark.parametrize("workload", OVER_VECTORS, ids=str)
def test_plain_loops_agree(workload: Workload, _plain_loops: None) -> None:
    agrees(workload, Peer("direct loops", direct.loops_on_cpu), 1e-5)


def test_compiled_loops_agree_where_numba_is_installed() -> None:
    pytest.importorskip("numba")
    agrees(tiny("conv", "text-cnn"), Peer("direct loops", direct.loops_on_cpu), 1e-5)


@pytest.mark.parametrize("build, install", [(direct.loops_on_cpu, "install numba"), (direct.loops_on_cuda, "install cupy")])
def test_loops_say_what_compiles_them(build: Any, install: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_there(package: str) -> None:
        raise ImportError(f"No module named {package!r}")

    monkeypatch.setattr("kernels.bench.baselines.baseline.import_module", not_there)
    (line,) = measured(tiny("conv", "text-cnn"), Peer("direct loops", build)).left_out
    assert line.startswith(f"direct loops is left out: {install}")


class MadeUpKernel:
    """Does over the addresses that it is given what the kernel's threads do, each over its own output."""

    def launch(self, blocks: tuple[int, int, int], shared: int, members: list[int]) -> None:
        *addresses, windows, depth, inputs, outputs = members
        assert blocks == (parts_of(windows * outputs, direct.THREADS), 1, 1) and shared == 0
        sizes = (windows - 1) * inputs + depth, depth * outputs, outputs, windows * outputs
        seen, filters, bias, answers = (
            np.ctypeslib.as_array((ctypes.c_float * size).from_address(address))
            for size, address in zip(sizes, addresses, strict=True)
        )
        for at in range(windows * outputs):
            window, output = divmod(at, outputs)
            begin = window * inputs
            answers[at] = bias[output] + seen[begin : begin + depth] @ filters[output::outputs]


@pytest.mark.parametrize("workload", OVER_VECTORS, ids=str)
def test_a_thread_for_each_output_is_given_where_everything_lies(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "wanted", lambda *_: None)
    monkeypatch.setattr(direct, "current", lambda _: nullcontext())
    monkeypatch.setattr(direct, "compiled", lambda *_, **__: MadeUpKernel())
    agrees(workload, Peer("direct loops", direct.loops_on_cuda), 1e-5)


@pytest.mark.parametrize(
    "form, whole, tile, pairs",
    # 3 rows of 7 steps: a tile holds the 27 or 33 padded steps, and Winograd's pairs are half as many, of four each.
    [("width 3", 3.0, 3 * 27 / 21, 4 * 14 / 21), ("width 5", 5.0, 5 * 33 / 21, 4 * 17 / 21)],
)
def test_what_is_laid_out_anew_is_known(form: str, whole: float, tile: float, pairs: float) -> None:
    given = made_up(tiny("conv", "dense-conv", "equal", form=form), CPU)
    found = [build(given).extra[MEMORY] for build in (lowered, in_tiles, tap_by_tap, winograd)]
    assert found == pytest.approx([whole, tile, 0.0, pairs])


def test_a_text_cnn_needs_room_for_its_widest_filters_and_questions_for_their_padding() -> None:
    equal, questions = (made_up(tiny("conv", "text-cnn", lengths), CPU) for lengths in ("equal", "questions"))
    assert lowered(equal).extra[MEMORY] == pytest.approx(max(3 * 5, 4 * 4, 5 * 3) / 7)
    longest = max(questions.lengths)
    widest = max(width * (longest - width + 1) for width in (3, 4, 5))
    assert lowered(questions).extra[MEMORY] == pytest.approx(3 * widest / sum(questions.lengths))


def test_a_tile_is_no_larger_however_long_the_batch() -> None:
    few, many = (made_up(Workload("conv", rows, 2 * TILE, 2, 3, kind="text-cnn"), CPU) for rows in (1, 4))
    assert in_tiles(few).extra[MEMORY] == 4 * in_tiles(many).extra[MEMORY] == 5 / 2


def test_what_is_known_of_a_strategy_stands_in_its_row() -> None:
    findings = measured(tiny("conv", "dense-conv", "equal"), Peer("im2col", lowered), Peer("low rank", low_rank))
    assert [set(row.extra) for row in findings.rows] == [set(), {MEMORY}, {FACTORS}]


def test_filters_of_width_three_are_transformed_as_by_lavin_and_gray() -> None:
    filters = torch.tensor([1.0, 2.0, 4.0]).view(3, 1, 1)
    assert transformed(filters).flatten().tolist() == [1.0, 3.5, 1.5, 4.0]


def of_rank(rank: int, given: Given) -> Given:
    def layer(layer: ConvWeights) -> ConvWeights:
        width, inputs, outputs = layer.filters.shape
        generator = torch.Generator().manual_seed(3)
        first, second = (torch.randn(shape, generator=generator) for shape in ((width * inputs, rank), (rank, outputs)))
        return replace(layer, filters=(first @ second).view(width, inputs, outputs) / width)

    return replace(given, weights=tuple(map(layer, given.weights)))


def test_factors_have_at_most_half_of_the_parameters() -> None:
    filters = torch.randn(5, 12, 16)
    first, second = factorised(filters)
    assert first.shape == (5, 12, 6) and second.shape == (6, 16)
    assert filters.numel() // 2 - (5 * 12 + 16) < first.numel() + second.numel() <= filters.numel() // 2


def test_factors_of_filters_that_have_few_cost_nothing() -> None:
    given = of_rank(1, made_up(tiny("conv", "text-cnn"), CPU))
    call = low_rank(given)
    assert call.extra[FACTORS] < 1e-6
    torch.testing.assert_close(call.run(), given.encoder("framework")(), rtol=1e-4, atol=1e-4)


def test_factors_of_others_are_held_to_their_own_right_answers() -> None:
    given = made_up(tiny("conv", "text-cnn"), CPU)
    call, true = low_rank(given), expected(given)
    assert call.right is not None and call.right.error(call.run()) < 1e-5
    assert float((call.right.values - true.values).abs().max()) > 0.01
    assert 0.1 < call.extra[FACTORS] < 1


def test_the_error_of_factors_is_relative_to_the_filters_of_all_widths() -> None:
    filters = [torch.tensor([[[3.0]]]), torch.tensor([[[4.0]]])]
    products: list[Tensor] = [torch.tensor([[[3.0]]]).double(), torch.tensor([[[1.0]]]).double()]
    assert error(filters, products) == pytest.approx(3 / 5)
