"""Other computations of a layer's size agree with right answers of their own, and are asked where a goal or the figure needs them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.bench.baselines import PEERS
from kernels.bench.baselines.baseline import Call, Peer
from kernels.bench.baselines.beside import convolution, device_copy, first_sru_package, lstm, one_product, square_product
from kernels.bench.convolutions import text_cnn
from kernels.bench.given import another, made_up
from kernels.bench.workload import FORMS, Workload
from kernels.bench.workloads import workloads
from tests.kernels.bench.conftest import CPU, measured, tiny

EVERY_STEP = tiny("sru", "every-step", lengths="equal")


@pytest.mark.parametrize(
    "workload, peer",
    [
        *((tiny(family, form=form), Peer("product", one_product)) for family in FORMS for form in FORMS[family]),
        *((EVERY_STEP, Peer(f"width {width}", convolution(width))) for width in (2, 3)),
        *((EVERY_STEP, Peer(f"width {width}, channels last", convolution(width, channels_last=True))) for width in (2, 3)),
        (EVERY_STEP, Peer("lstm", lstm)),
        (tiny("sru"), Peer("lstm", lstm)),
    ],
    ids=str,
)
def test_each_agrees_with_its_own_right_answer(workload: Workload, peer: Peer) -> None:
    findings = measured(workload, peer)
    assert not findings.wrong
    assert findings.rows[-1].backend == peer.name and findings.rows[-1].agrees < 1e-5


def test_a_copy_is_timed_without_an_encoder() -> None:
    findings = measured(tiny("sru", "copy", lengths="equal"), Peer("copy", device_copy))
    assert [(row.backend, row.agrees) for row in findings.rows] == [("copy", 0.0)]


def test_a_square_product_is_timed_without_an_encoder_and_agrees() -> None:
    square = Workload("conv", 1, 12, 12, 12, kind="product")
    (row,) = measured(square, Peer("one product", square_product)).rows
    assert row.backend == "one product" and row.agrees < 1e-6
    call = square_product(made_up(square, CPU))
    assert call.right is not None and call.right.shape == (12, 12)


@pytest.mark.parametrize("family, form, columns", [("sru", "v1", 6), ("qrnn", "window 1", 6), ("qrnn", "window 2", 12)])
def test_one_product_has_the_window_s_columns_and_three_blocks(family: str, form: str, columns: int) -> None:
    given = made_up(tiny(family, form=form), CPU)
    call = one_product(given)
    assert call.right is not None and call.right.shape == (sum(given.lengths), 18)
    wide = replace(given.weights[0], input=torch.ones_like(given.weights[0].input))
    sums = one_product(replace(given, weights=(wide,))).run()[:, 0]
    torch.testing.assert_close(sums, given.x.data.sum(1) * columns / 6)


@pytest.mark.parametrize("form", FORMS["sru"])
def test_the_package_runs_both_forms_where_it_is_installed(form: str) -> None:
    findings = measured(tiny("sru", form=form), next(peer for peer in PEERS["sru"] if peer.name == "sru package"))
    assert not findings.wrong
    if not findings.left_out:
        assert findings.rows[-1].backend == "sru package" and findings.rows[-1].agrees < 1e-5


def test_beside_a_qrnn_the_package_runs_its_first_form() -> None:
    findings = measured(tiny("qrnn"), Peer("sru package v1", first_sru_package))
    assert not findings.wrong
    assert findings.left_out or findings.rows[-1].agrees < 1e-5


def test_another_layer_has_the_same_data_and_size() -> None:
    given = made_up(tiny("sru"), CPU)
    other = another(given, "qrnn", "window 2")
    assert other.x is given.x and other.lengths == given.lengths
    assert other.workload == tiny("qrnn") and other.weights[0].hidden == 6


def on_cuda(family: str) -> dict[str, set[tuple[str, int, int, int]]]:
    """Where each peer is asked in a whole run: kind, rows, steps, hidden size."""
    every = workloads(family, "cuda", quick=False)
    asked: dict[str, set[tuple[str, int, int, int]]] = {}
    for peer in PEERS[family]:
        sizes = {(one.kind, one.rows, one.steps, one.hidden) for one in every if peer.is_asked(one, "cuda")}
        asked.setdefault(peer.name, set()).update(sizes)
    return asked


def test_peers_of_the_sru_are_asked_where_they_tell_something() -> None:
    asked = on_cuda("sru")
    figure = {("every-step", 32, steps, hidden) for steps in (32, 128) for hidden in (256, 512)}
    beside = {("layer", 32, 64, 256), ("layer", 32, 64, 512), ("layer", 1, 64, 512)}
    small = {("layer", rows, steps, hidden) for rows in (1, 32) for steps in (32, 128) for hidden in (256, 512)}
    assert asked["torch by step"] == beside
    assert asked["sru package"] == beside | small | {("layer", 1, 4096, 512)}
    assert asked["torch LSTM"] == asked["conv1d width 2"] == asked["conv1d width 3, channels last"] == figure
    assert len(asked["one product"]) == 3 * 3 * 4 and {kind for kind, *_ in asked["one product"]} == {"layer"}
    assert asked["device copy"] == {("copy", 1, 1 << 20, 512)}


def test_peers_of_the_qrnn_are_asked_where_they_tell_something() -> None:
    asked = on_cuda("qrnn")
    assert asked["torch by step"] == {("layer", 32, 64, 256), ("layer", 32, 64, 512), ("layer", 1, 64, 512)}
    assert asked["sru package v1"] == {("layer", 1, 4096, 512)}
    assert len(asked["one product"]) == 3 * 3 * 3
    assert len(asked["device copy"]) == 1


def test_strategies_of_the_convolution_are_asked_over_vectors_and_loops_where_they_are_small() -> None:
    asked = on_cuda("conv")
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
    assert all(asked[strategy] == texts | dense for strategy in everywhere)
    assert asked["torch conv1d"] == texts | dense | ids | stacks
    # Of 256 rows of 64 steps they are not, only of as many questions.
    assert asked["direct loops"] == (texts | dense) - {
        *(("text-cnn", rows, 64, 300) for rows in (64, 1024)),
        ("text-cnn", 256, 128, 1536),
        ("dense-conv", 32, 64, 512),
    }
    assert not any(peer.is_asked(text_cnn(256), "cuda") for peer in PEERS["conv"] if peer.name == "direct loops")
    assert asked["one product"] == {("product", 1, 8192, 8192)}


def test_over_token_ids_the_library_is_asked_once() -> None:
    ids = [one for one in workloads("conv", "cuda", quick=False) if one.kind == "text-cnn-ids"]
    asked = [one.form for one in ids for peer in PEERS["conv"] if peer.is_asked(one, "cuda")]
    assert len(ids) == 2 * 7 and asked == ["embedded"] * 7


def test_whoever_has_no_right_answer_without_a_layer_is_named() -> None:
    (line,) = measured(tiny("sru", "copy", lengths="equal"), Peer("idle", lambda _: Call(lambda: torch.zeros(1)))).wrong
    assert line.startswith("idle on sru copy v2 3 x 7, 6 -> 6, float32: AssertionError: whoever is asked")
