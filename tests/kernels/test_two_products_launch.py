"""Tests of the launcher of two_products.cu without a GPU: packed weights, launch shapes and arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import gru, lstm
from kernels.backend import Problem
from kernels.compile import registers
from kernels.gated import PEEPHOLES, PROJECTION, RESET_BEFORE
from kernels.persistent import launch, two_products
from kernels.persistent.packing import HERE, Launch, Variant
from kernels.persistent.two_products import PARTS, THREADS, TwoProductsCluster, TwoProductsGrid, TwoProductsShape, chunks_of
from kernels.ragged import Encoded, Outputs, Ragged
from kernels.tuning import load_tuned
from tests.kernels.families import Form
from tests.kernels.shapes import fresh_shape_caches
from tests.kernels.test_persistent_launch import H200_SHARED_BYTES, FakeKernel, Properties

GRU, PROJECTED = Form("gru", reset="before"), Form("lstm", projection=True, peepholes=True)
both_forms = pytest.mark.parametrize("form", [GRU, PROJECTED], ids=str)


@pytest.fixture(autouse=True)
def fake_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKernel]:
    fake = FakeKernel()
    monkeypatch.setattr(two_products, "shared_limit", lambda _: H200_SHARED_BYTES)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(TwoProductsShape, "kernel", lambda *_: fake)
    monkeypatch.setattr(TwoProductsCluster, "at_once", lambda _: 7)
    monkeypatch.setattr(launch, "on_device", lambda _: nullcontext())
    with fresh_shape_caches():
        yield fake


def variant_of(form: Form, hidden: int, vector: int) -> Variant:
    return Variant(0, torch.float16, False, hidden, form.family == "gru", vector=vector)


def multiplied(packed: Tensor, vector: Tensor) -> Tensor:
    """Return the sums of 8 rows, (8, tiles, 16), as m16n8k16 products compute them. vector: (8, entries)."""
    tiles, chunks = packed.shape[:2]
    pieces = torch.zeros(8, 32 * chunks)
    pieces[:, : vector.shape[1]] = vector
    # row, chunk, q, product, upper, value; then tile, chunk, product, g, q, upper, lower, value
    right = pieces.view(8, chunks, 4, 2, 2, 2)
    left = packed.float().view(tiles, chunks, 2, 8, 4, 2, 2, 2)
    return torch.einsum("rcqpuv,tcpgqulv->rtlg", right, left).reshape(8, tiles, 16)


@both_forms
@pytest.mark.parametrize("hidden, members", [(1, 4), (40, 2), (200, 4), (300, 16)])
def test_packed_weights_are_the_operands_of_both_products(form: Form, hidden: int, members: int) -> None:
    weights = form.arguments([1], hidden, 3).weights
    shape = TwoProductsCluster(variant_of(form, hidden, weights.vector), members)
    units, gates = members * shape.units, 2 if form is GRU else 4
    h, m = torch.randn(8, weights.vector), torch.randn(8, hidden)
    first, second = (shape.packing.pack(weights, number) for number in range(2))
    # Of each group: r and z of a GRU in one tile; i and f, then g and o of an LSTM in two.
    sums = multiplied(first, h).view(8, units // 8, gates, 8).transpose(1, 2).reshape(8, gates, units)
    expected = (h @ weights.recurrent).view(8, -1, hidden)[:, :gates]
    torch.testing.assert_close(sums[:, :, :hidden], expected, rtol=1e-4, atol=1e-4)
    assert not sums[:, :, hidden:].any(), "padding units have no weights"
    by_block = multiplied(second, m).view(8, members, -1)[:, :, : shape.outputs].reshape(8, -1)
    matrix = weights.recurrent[:, 2 * hidden :] if form is GRU else weights.projection
    torch.testing.assert_close(by_block[:, : weights.vector], m @ matrix, rtol=1e-4, atol=1e-4)
    assert not by_block[:, weights.vector :].any()


@pytest.mark.parametrize("vector, chunks", [(1, 8), (256, 8), (257, 16), (1024, 32)])
def test_every_warp_has_as_many_chunks(vector: int, chunks: int) -> None:
    assert chunks_of(vector) == chunks
    assert chunks % PARTS == 0


@both_forms
@pytest.mark.parametrize("hidden", [8, 100, 256, 512, 600, 1024, 2048])
@pytest.mark.parametrize("rows", [1, 8, 57, 500])
def test_a_launch_has_room_for_its_rows(form: Form, hidden: int, rows: int) -> None:
    variant = variant_of(form, hidden, hidden if form is GRU else hidden // 2)
    shapes: list[TwoProductsCluster | TwoProductsGrid] = [TwoProductsCluster(variant, size) for size in (2, 8, 16)]
    shapes += [TwoProductsGrid(variant, size) for size in (8, 16, 32)]
    running = [shape for shape in shapes if shape.runs()]
    assert running
    for shape in running:
        fitting = min(rows, shape.max_rows())
        plan = shape.launch(fitting)
        tiles = plan.blocks // shape.members
        assert tiles * plan.octets * plan.width >= fitting
        assert plan.shared <= H200_SHARED_BYTES
        assert shape.units * shape.members >= variant.hidden and shape.outputs * shape.members >= variant.vector
        assert 0 < 4 * shape.held(plan.octets) < registers(THREADS)
        assert (plan.exchange_words == 0) == shape.cluster
        assert shape.cluster or plan.blocks <= 132, "all blocks of a cooperative launch are resident"


def test_a_large_layer_does_not_fit_a_cluster() -> None:
    assert not any(TwoProductsCluster(variant_of(GRU, 1024, 1024), blocks).fits(1) for blocks in (4, 8, 16))
    assert TwoProductsCluster(variant_of(GRU, 512, 512), 16).fits(1)
    assert TwoProductsGrid(variant_of(PROJECTED, 4096, 512), 32).runs()


@both_forms
@pytest.mark.parametrize("hidden", [1, 64, 256, 512, 700, 1024, 2048])
def test_a_tuned_shape_runs_any_number_of_rows(form: Form, hidden: int) -> None:
    variant = variant_of(form, hidden, hidden if form is GRU else (hidden + 1) // 2)
    assert all(launch.fastest_shape(variant, rows, 1) for rows in (1, 8, 100, 5000))


def run(form: Form, find_shape: launch.FindShape, lengths: list[int], hidden: int) -> tuple[Encoded, Any, Any]:
    """Return the encoding, the weights and the state that it started from."""
    x, weights, state = form.arguments(lengths, hidden, 8, storage=torch.float16)
    x = Ragged(x.data.half(), x.offsets)
    family = {"gru": gru, "lstm": lstm}[form.family].FUSED
    return launch.encode(family, find_shape, x, weights, state, want=Outputs(last=True)), weights, state


def test_launcher_passes_both_products_of_a_projection(fake_kernel: FakeKernel) -> None:
    encoded, weights, state = run(PROJECTED, launch.cluster_shape, [3, 0, 4], 41)
    first, second = fake_kernel.calls
    assert (first["hidden"], second["hidden"]) == (41, 21)
    shape = launch.cluster_shape(variant_of(PROJECTED, 41, 21)._replace(peepholes=True), 3, 1)
    assert isinstance(shape, TwoProductsCluster)
    packed = [weights.packed[shape.packing, number].data_ptr() for number in range(2)]
    assert [call["packed"] for call in (first, second)] == packed
    for call in (first, second):
        assert (call["hidden_before"], call["cell_before"]) == (state.hidden.data_ptr(), state.cell.data_ptr())
        assert (call["hidden_after"], call["cell_after"]) == (
            encoded.state.hidden.data_ptr(),
            encoded.state.cell.data_ptr(),
        )
        assert call["own"] == weights.packed["own"].data_ptr() and call["exchange"] == call["scale"] == 0
        assert (call["gates_apart"], call["outputs_apart"], call["forward"]) == (164, 21, 1)
    assert encoded.state.hidden.shape == (3, 21) and encoded.state.cell.shape == (3, 41)
    assert encoded.last is encoded.state.hidden


def test_launcher_passes_an_exchange_to_both_products_of_a_grid(fake_kernel: FakeKernel) -> None:
    run(GRU, launch.grid_shape, [3, 0, 4], 41)
    first, second = fake_kernel.calls
    assert first["exchange"] == second["exchange"] != 0
    assert first["own"] == 0 and first["hidden"] == second["hidden"] == 41


def test_problems_with_two_products_choose_their_kernel() -> None:
    cuda, half = torch.device("cuda:0"), torch.float16
    projected = lstm.FUSED.variant(Problem(cuda, half, 512, (PEEPHOLES, PROJECTION), 128))
    assert (projected.vector, projected.peepholes, projected.gru) == (128, True, False)
    before = gru.FUSED.variant(Problem(cuda, half, 512, (RESET_BEFORE,), 512))
    assert (before.vector, before.gru) == (512, True)
    assert lstm.FUSED.variant(Problem(cuda, half, 512, (PEEPHOLES,), 512)).vector == 0
    assert isinstance(launch.fastest_shape(projected, 8, 1), TwoProductsCluster)
    assert isinstance(launch.fastest_shape(before, 8, 1), TwoProductsCluster)
    described = next(backend.describe for backend in gru.BACKENDS if backend.name == "persistent")
    assert described is not None
    assert described(Problem(cuda, half, 512, (RESET_BEFORE,))) == (
        "two products a step: clusters of 16 blocks up to 32 rows, clusters of 8 blocks up to 64 rows, the grid with 32 units per block"
    )


def test_tuned_shapes_name_only_kinds_that_two_products_have() -> None:
    tuned = load_tuned(HERE / "tuned", "NVIDIA H200")
    for name in ("lstm, two products", "gru, two products"):
        assert all(set(shape) & set(launch.TWO_PRODUCTS) for shape in tuned[name])


@both_forms
def test_launch_counts_exchanged_words(form: Form) -> None:
    plan = TwoProductsGrid(variant_of(form, 100, 100 if form is GRU else 30), 16).launch(1)
    assert isinstance(plan, Launch)
    expected = 2 * 128 * 16 if form is GRU else 2 * 32 * 16 + 128 * 16
    assert plan.exchange_words * 4 == expected, "the hidden state of a projection takes twice its size"
