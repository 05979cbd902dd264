"""The launchers of LSTMs and GRUs on an emulated H200: packed weights, launch shapes, tuned shapes and arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import gru, lstm
from kernels.backend import AUTO, PINNED, Problem, choose
from kernels.gated import PEEPHOLES, PROJECTION, RESET_BEFORE
from kernels.persistent import launch
from kernels.persistent.choice import cluster_shape, step_shape
from kernels.persistent.cluster import OCTETS, ClusterShape
from kernels.persistent.packing import HERE, Variant, pack
from kernels.persistent.step import pack_columns
from kernels.ragged import Outputs, Ragged
from kernels.tuning import matching_shapes
from tests.kernels.devices import H200, FakeKernel, assert_passed, emulated, launches_of
from tests.kernels.families import Form
from tests.kernels.sources import members

SHARED_BYTES = H200.shared_memory_per_block_optin
HALF, CUDA = torch.float16, torch.device("cuda:0")
CALL = [member.name for member in members(HERE / "cell.cuh", "Call")]
STEP = [member.name for member in members(HERE / "step.cuh", "Step")][1:]


@pytest.fixture(autouse=True)
def made() -> Iterator[list[FakeKernel]]:
    with emulated(H200) as kernels:
        yield kernels


def through_fragments(packed: Tensor, hidden: Tensor) -> Tensor:
    """Return the gates of 8 rows, (8, 4, units), as m16n8k16 products compute them. hidden: (8, 32 x chunks)."""
    groups, chunks = packed.shape[:2]
    # Rows g and g + 8 of the left operand; columns 2q, 2q + 1 and then 2q + 8, 2q + 9.
    left = packed.float().view(groups, chunks, 2, 2, 8, 4, 2, 2, 2)  # group, chunk, product, tile, g, q, upper, lower, value
    right = hidden.view(8, chunks, 4, 2, 2, 2)  # row, chunk, q, product, upper, value
    sums = torch.einsum("ncpxgqulv,rcqpuv->rxlng", left, right)
    return sums.reshape(8, 4, groups * 8)


@pytest.mark.parametrize("gates", [3, 4])
def test_packed_weights_are_tensor_core_operands(gates: int) -> None:
    """The fourth gate of a GRU is zero, and so are padding units."""
    generator = torch.Generator().manual_seed(0)
    recurrent, hidden = torch.randn(40, gates * 40, generator=generator), torch.zeros(8, 64)
    hidden[:, :40] = torch.randn(8, 40, generator=generator)
    products = through_fragments(pack(recurrent, groups=6, chunks=2), hidden)
    expected = hidden[:, :40] @ recurrent
    torch.testing.assert_close(products[:, :gates, :40].reshape(8, -1), expected, rtol=1e-5, atol=1e-5)
    assert not products[:, :, 40:].any() and not products[:, gates:].any()


@pytest.mark.parametrize("gates", [3, 4])
def test_packed_columns_are_operands_of_products(gates: int) -> None:
    """A lane of a product has the sums of columns 2q and 2q + 1: of units 4q to 4q + 3 of a part in its two halves."""
    generator = torch.Generator().manual_seed(0)
    matrix, vector = torch.randn(70, gates * 40, generator=generator), torch.zeros(2, 64)
    vector.view(-1)[:70] = torch.randn(70, generator=generator)
    packed, column = pack_columns(matrix, 40), torch.arange(8)[:, None]
    columns = packed[..., column, torch.arange(8) ^ column, :].flatten(-2)
    sums = torch.einsum("cpgnk,ck->pgn", columns, vector).view(-1, gates, 2, 4, 2)  # part, gate, half, q, low
    by_unit = sums.permute(1, 0, 3, 2, 4).reshape(gates, -1)
    torch.testing.assert_close(by_unit[:, :40].flatten(), vector.view(-1)[:70] @ matrix, rtol=1e-5, atol=1e-5)
    assert not by_unit[:, 40:].any()


@pytest.mark.parametrize(
    "rows, octets, width, tiles",
    [(1, 1, 1, 1), (7, 1, 1, 7), (8, 1, 2, 4), (56, 1, 8, 7), (57, 2, 5, 6), (100, 2, 8, 7), (256, 5, 8, 7), (4096, 5, 8, 103)],
)
def test_rows_are_spread_over_resident_clusters(rows: int, octets: int, width: int, tiles: int) -> None:
    plan = ClusterShape(Variant(0, HALF, False, 512), 16).launch(rows)
    assert (plan.octets, plan.width, plan.blocks) == (octets, width, 16 * tiles)
    assert plan.octets in OCTETS and plan.shared <= SHARED_BYTES


def test_matching_shapes_respects_the_bounds() -> None:
    shapes = [{"hidden": 128, "rows": 8, "blocks": 4}, {"hidden": 128, "units": 2}, {"rows": 9, "blocks": 1}]
    for hidden, rows, expected in (
        (128, 8, [("blocks", 4), ("units", 2), ("blocks", 1)]),
        (1, 9, [("units", 2), ("blocks", 1)]),
        (129, 10, []),
    ):
        assert list(matching_shapes(shapes, ("blocks", "units"), hidden=hidden, rows=rows)) == expected
    assert list(matching_shapes(shapes, ("blocks",), hidden=128, rows=8)) == [("blocks", 4), ("blocks", 1)]


FEW = "the grid with 8 units per block up to 8 rows, the grid with 16 units per block up to 64 rows"


@pytest.mark.parametrize(
    "family, backend, hidden, variants, description",
    [
        ("lstm", "persistent", 512, (), "clusters of 16 blocks up to 128 rows, the grid with 16 units per block"),
        (
            "lstm",
            "adaptive",
            1024,
            (),
            f"{FEW}, wide tiles of 64 rows up to 512 rows, one product a step; a single step: one product a step",
        ),
        (
            *("gru", "persistent", 512, (RESET_BEFORE,)),
            "two products a step: clusters of 16 blocks up to 32 rows, clusters of 8 blocks up to 64 rows, "
            "the grid with 32 units per block",
        ),
    ],
)
def test_describe_names_the_kernel_for_each_number_of_rows(
    family: str, backend: str, hidden: int, variants: tuple[str, ...], description: str
) -> None:
    backends = {"lstm": lstm.BACKENDS, "gru": gru.BACKENDS}[family]
    describe = next(one.describe for one in backends if one.name == backend)
    assert describe is not None and describe(Problem(CUDA, HALF, hidden, variants)) == description


@pytest.mark.parametrize(
    "hidden, storage, options, requested, name",
    [
        (1024, HALF, {}, AUTO, "adaptive"),
        (1024, HALF, {}, PINNED, "persistent"),
        (768, torch.bfloat16, {"variants": (PEEPHOLES,)}, AUTO, "adaptive"),
        (1000, HALF, {}, AUTO, "adaptive"),
        (1001, HALF, {}, AUTO, "persistent"),
        (512, torch.float32, {}, AUTO, "adaptive"),
        (512, torch.float32, {}, PINNED, "persistent"),
        (1024, torch.float32, {}, AUTO, "adaptive"),
        (1024, torch.float32, {}, PINNED, "step"),
        (2200, HALF, {}, PINNED, "step"),
        (512, HALF, {"levels": 2}, AUTO, "adaptive"),
        (512, HALF, {"levels": 2}, PINNED, "persistent"),
        (129, HALF, {"levels": 2}, AUTO, "persistent"),
    ],
)
def test_backend_adapts_to_rows_and_levels_unless_it_is_pinned(
    hidden: int, storage: torch.dtype, options: dict[str, Any], requested: str, name: str
) -> None:
    assert choose(lstm.BACKENDS, Problem(CUDA, storage, hidden, **options), requested).backend.name == name


def test_float32_layer_with_two_products_runs_by_step_or_in_torch() -> None:
    """Other kernels have no room for weights of two terms in both products."""
    gru_before = [Problem(CUDA, torch.float32, hidden, (RESET_BEFORE,), hidden) for hidden in (100, 128)]
    assert [choose(gru.BACKENDS, problem).backend.name for problem in gru_before] == ["framework", "adaptive"]
    assert choose(lstm.BACKENDS, Problem(CUDA, torch.float32, 128, (PROJECTION,), 64)).backend.name == "framework"


def test_members_of_call_are_passed_in_order(made: list[FakeKernel]) -> None:
    x, weights, state = Form("lstm").arguments([3, 0, 4], 40, 8, storage=HALF)
    x = Ragged(x.data.half(), x.offsets.long())
    encoded = launch.encode(lstm.FUSED, cluster_shape, x, weights, state, want=Outputs(steps=True, mean=True))
    [launched] = launches_of(made)
    *members_of_call, blocks = launched.members
    call = dict(zip(CALL, members_of_call, strict=True))
    assert launched.blocks == (blocks, 1, 1)
    passed = {"packed": weights.packed[8, 2], "offsets": x.offsets, "hidden_before": state.hidden, "cell_before": state.cell}
    passed |= {"hidden_after": encoded.state.hidden, "cell_after": encoded.state.cell}
    passed |= {"steps": encoded.steps, "mean": encoded.mean}
    numbers = {"wide": 1, "first": 0, "until": 3, "hidden": 40, "octets": 1, "width": 1, "forward": 1}
    assert_passed(call, {**passed, **numbers, "gates_apart": 160, "outputs_apart": 40})
    absent = ["scale", "own", "slots_before", "slots_after", "last", "max", "exchange"]
    assert [name for name in CALL[:16] if call[name] == 0] == absent


@pytest.mark.parametrize("kind", ["data", "gate inputs", "ids"])
def test_inputs_of_a_step_are_passed_after_its_call(kind: str, made: list[FakeKernel]) -> None:
    form = Form("gru", reset="after", ids=kind == "ids")
    arguments = form.arguments([2, 0, 1], 40, 12, storage=HALF)
    x, weights, state = form.gated(arguments) if kind == "gate inputs" else arguments
    x = Ragged(x.data if kind == "ids" else x.data.half(), x.offsets)
    before = replace(state, hidden=torch.zeros(9, 40), slots=torch.tensor([8, 1, 2]), sources=torch.tensor([0, 0, 0]))
    launch.encode(gru.FUSED, step_shape, x, weights, before, want=Outputs(last=True))
    [launched] = launches_of(made)
    call = dict(zip([*CALL, "blocks", *STEP], launched.members, strict=True))
    assert call["hidden_before"] == call["hidden_after"] == before.hidden.data_ptr() and call["gates_apart"] == {"data": 0}.get(
        kind, 120
    )
    passed = {"x": x.data if kind == "data" else 0, "ids": x.data if kind == "ids" else 0}
    widths = {"x_apart": 16, "inputs": 16} if kind == "data" else {"x_apart": 0, "inputs": 0}
    assert call["meeting"] and bool(call["x"]) == (kind == "data")
    assert_passed(call, {"ids": passed["ids"], "ids_wide": kind == "ids" and x.data.dtype == torch.int64, **widths})
