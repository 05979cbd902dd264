"""The launchers of LSTMs and GRUs on an emulated H200: packed weights, launch shapes, tuned shapes and arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import gru, lstm
from kernels.backend import AUTO, PINNED, Problem, choose
from kernels.gated import PEEPHOLES, RESET_BEFORE
from kernels.lstm.types import LSTMState
from kernels.persistent import launch
from kernels.persistent.cluster import OCTETS, ClusterShape
from kernels.persistent.packing import HERE, Variant, pack
from kernels.persistent.two_products import TwoProductsCluster
from kernels.ragged import ContractError, Encoded, Outputs, Ragged
from kernels.tuning import matching_shapes
from tests.kernels.devices import H200, FakeKernel, assert_passed, emulated, launches_of
from tests.kernels.families import Form
from tests.kernels.inputs import EVERYTHING
from tests.kernels.sources import members

SHARED_BYTES, PROCESSORS = H200.shared_memory_per_block_optin, H200.multi_processor_count
HALF, CUDA = torch.float16, torch.device("cuda:0")
FAMILIES = {"lstm": lstm.FUSED, "gru": gru.FUSED}
LSTM, GRU, LENGTHS = Form("lstm"), Form("gru", reset="after"), [3, 0, 4]
RESET, PROJECTED = Form("gru", reset="before"), Form("lstm", projection=True, peepholes=True)
LAST = Outputs(last=True)
CALL = [member.name for member in members(HERE / "cell.cuh", "Call")]
cluster_shape = launch.cluster_shape


@pytest.fixture(autouse=True)
def made() -> Iterator[list[FakeKernel]]:
    with emulated(H200) as kernels:
        yield kernels


def plain(hidden: int, **changes: Any) -> Variant:
    return Variant(0, HALF, False, hidden)._replace(**changes)


def two_products(form: Form, hidden: int, vector: int) -> Variant:
    return plain(hidden, gru=form.family == "gru", vector=vector)


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


@pytest.mark.parametrize(
    "rows, octets, width, tiles",
    [(1, 1, 1, 1), (7, 1, 1, 7), (8, 1, 2, 4), (56, 1, 8, 7), (57, 2, 5, 6), (100, 2, 8, 7), (256, 5, 8, 7), (4096, 5, 8, 103)],
)
def test_rows_are_spread_over_resident_clusters(rows: int, octets: int, width: int, tiles: int) -> None:
    plan = ClusterShape(plain(512), 16).launch(rows)
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


FEW = "the grid with 8 units per block up to 8 rows, the grid with 16 units per block"


@pytest.mark.parametrize(
    "family, backend, hidden, variants, description",
    [
        ("lstm", "persistent", 512, (), "clusters of 16 blocks up to 128 rows, the grid with 16 units per block"),
        ("lstm", "adaptive", 1024, (), f"{FEW} up to 64 rows, wide tiles of 64 rows"),
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
        (1000, HALF, {}, AUTO, "persistent"),
        (512, torch.float32, {}, AUTO, "persistent"),
        (512, HALF, {}, AUTO, "persistent"),
        (512, HALF, {"levels": 2}, AUTO, "adaptive"),
        (512, HALF, {"levels": 2}, PINNED, "persistent"),
        (128, HALF, {"levels": 2}, AUTO, "persistent"),
    ],
)
def test_backend_adapts_to_rows_and_levels_unless_it_is_pinned(
    hidden: int, storage: torch.dtype, options: dict[str, Any], requested: str, name: str
) -> None:
    assert choose(lstm.BACKENDS, Problem(CUDA, storage, hidden, **options), requested).backend.name == name


def arguments_of(form: Form, hidden: int = 40, lengths: Sequence[int] = LENGTHS, **options: Any) -> tuple[Ragged, Any, Any]:
    x, weights, state = form.arguments(lengths, hidden, options.pop("inputs", 8), storage=HALF, **options)
    return Ragged(x.data.half(), x.offsets), weights, state


def run(form: Form, *arguments: Any, find_shape: Any = cluster_shape, want: Outputs = LAST) -> Encoded:
    return launch.encode(FAMILIES[form.family], find_shape, *arguments, want=want)


def calls_of(made: list[FakeKernel]) -> list[dict[str, int]]:
    """Return the members of the Call of each direction or product of all launches, with the blocks of a direction."""
    calls: list[dict[str, int]] = []
    for launched in launches_of(made):
        *sides, blocks = launched.members
        begins = range(0, len(sides), len(CALL))
        calls += [dict(zip(CALL, sides[at : at + len(CALL)], strict=True)) | {"blocks": blocks} for at in begins]
    return calls


def test_members_of_call_are_passed_in_order(made: list[FakeKernel]) -> None:
    x, weights, state = arguments_of(LSTM)
    x = Ragged(x.data, x.offsets.long())
    encoded = run(LSTM, x, weights, state, want=Outputs(steps=True, mean=True))
    [call] = calls_of(made)
    passed = {"packed": weights.packed[8, 2], "offsets": x.offsets, "hidden_before": state.hidden, "cell_before": state.cell}
    passed |= {"hidden_after": encoded.state.hidden, "cell_after": encoded.state.cell}
    passed |= {"steps": encoded.steps, "mean": encoded.mean}
    numbers = {"wide": 1, "first": 0, "until": 3, "hidden": 40, "octets": 1, "width": 1, "forward": 1}
    assert_passed(call, {**passed, **numbers, "gates_apart": 160, "outputs_apart": 40})
    absent = ["scale", "own", "slots_before", "slots_after", "last", "max", "exchange"]
    assert [name for name in CALL[:16] if call[name] == 0] == absent


def test_both_directions_share_a_launch_if_there_is_room(made: list[FakeKernel]) -> None:
    (x, forward, before), (_, backward, also_before) = (arguments_of(LSTM, seed=seed) for seed in (0, 1))
    pair, states = (forward, backward), (before, also_before)
    encoded = launch.encode_both(lstm.FUSED, cluster_shape, x, pair, states, want=Outputs(steps=True, last=True))
    first, second = calls_of(made)
    assert launches_of(made)[0].blocks == (2 * first["blocks"], 1, 1)
    assert (first["forward"], second["forward"]) == (1, 0)
    assert first["gates_apart"] == second["gates_apart"] == 320 and second["gates"] == first["gates"] + 160 * 2
    for name, output in (("steps", encoded.steps), ("last", encoded.last)):
        assert output is not None and output.shape[1] == first["outputs_apart"] == 80
        assert (first[name], second[name]) == (output.data_ptr(), output.data_ptr() + 40 * 4)
    for call, layer, state, after in zip((first, second), pair, states, encoded.state, strict=True):
        passed = {"packed": layer.packed[8, 2], "hidden_before": state.hidden, "cell_after": after.cell}
        assert_passed(call, passed)
    made.clear()
    large = [arguments_of(GRU, 1500, [2], seed=seed)[1] for seed in (0, 1)]
    x = Ragged(torch.zeros(2, 8).half(), torch.tensor([0, 2], dtype=torch.int32))
    launch.encode_both(gru.FUSED, launch.grid_shape, x, large, None, want=LAST)
    assert [
        (call["forward"], launched.blocks[0]) for call, launched in zip(calls_of(made), launches_of(made), strict=True)
    ] == [(direction, call["blocks"]) for direction, call in zip((1, 0), calls_of(made), strict=True)]


@pytest.mark.parametrize("with_sources", [False, True])
def test_state_is_read_from_sources_and_written_to_slots(with_sources: bool, made: list[FakeKernel]) -> None:
    x, weights, _ = arguments_of(LSTM)
    slots = torch.tensor([8, 1, 2], dtype=torch.int32)
    sources = torch.zeros(3, dtype=torch.int32) if with_sources else None
    caches = LSTMState(torch.zeros(9, 40), torch.zeros(9, 40), slots, sources)
    encoded = run(LSTM, x, weights, caches)
    begun = {"slots_before": slots if sources is None else sources, "hidden_before": caches.hidden}
    assert_passed(calls_of(made)[0], {**begun, "slots_after": slots, "hidden_after": caches.hidden, "last": encoded.last})
    after = encoded.state
    assert after.hidden is caches.hidden and after.slots is slots and after.sources is None
    assert (after is caches) != with_sources
    with pytest.raises(ContractError, match=r"state.cell with slots must be contiguous float32"):
        run(LSTM, x, weights, replace(caches, cell=caches.cell.half()))


def test_batch_without_rows_launches_nothing(made: list[FakeKernel]) -> None:
    encoded = run(LSTM, *arguments_of(LSTM, lengths=[]), want=EVERYTHING)
    assert not launches_of(made) and encoded.steps is not None and encoded.steps.shape == (0, 40)


def test_both_products_of_a_step_are_passed(made: list[FakeKernel]) -> None:
    x, weights, state = arguments_of(PROJECTED, 41)
    encoded = run(PROJECTED, x, weights, state)
    shape = cluster_shape(two_products(PROJECTED, 41, 21)._replace(peepholes=True), 3, 1)
    assert isinstance(shape, TwoProductsCluster)
    for number, (call, hidden) in enumerate(zip(calls_of(made), (41, 21), strict=True)):
        passed = {"hidden_before": state.hidden, "cell_before": state.cell, "packed": weights.packed[shape.packing, number]}
        passed |= {"hidden_after": encoded.state.hidden, "cell_after": encoded.state.cell, "own": weights.packed["own"]}
        sizes = {"exchange": 0, "scale": 0, "hidden": hidden, "gates_apart": 164, "outputs_apart": 21, "forward": 1}
        assert_passed(call, {**passed, **sizes})
    assert encoded.state.hidden.shape == (3, 21) and encoded.state.cell.shape == (3, 41)
    assert encoded.last is encoded.state.hidden
    made.clear()
    run(RESET, *arguments_of(RESET, 41), find_shape=launch.grid_shape)
    first, second = calls_of(made)
    assert first["exchange"] == second["exchange"] != 0
    assert first["own"] == 0 and first["hidden"] == second["hidden"] == 41
