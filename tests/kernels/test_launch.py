"""What the launcher of the LSTM's CUDA kernels works out without a GPU: the layout of the weights, shapes and tables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.backend import Problem
from kernels.contract import ContractError, LSTMState, Outputs, Ragged
from kernels.lstm import launch
from kernels.lstm.launch import OCTETS, SORTED, ClusterShape, GridShape, Layer, pack
from kernels.tuning import covering, tuned
from tests.kernels.families import Form
from tests.kernels.shapes import found_anew

H200_SHARED_BYTES = 232_448
CELL = (launch.HERE / "cell.cuh").read_text()


class Properties:
    multi_processor_count = 132


@pytest.fixture(autouse=True)
def _as_on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "shared_limit", lambda _: H200_SHARED_BYTES)
    monkeypatch.setattr(launch, "lends_registers", lambda _: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)


def through_fragments(packed: Tensor, hidden: Tensor) -> Tensor:
    """The gates of 8 rows as the tensor cores make them of m16n8k16 operands. hidden: (8, 32 x chunks); returns (8, 4, units)."""
    groups, chunks = packed.shape[:2]
    gates = torch.zeros(8, 4, groups, 8)
    for group in range(groups):
        for chunk in range(chunks):
            pieces = hidden[:, 32 * chunk : 32 * chunk + 32].view(8, 4, 8)  # row, q, unit of the piece
            for product in range(2):
                for tile in range(2):
                    lanes = packed[group, chunk, product, tile].view(8, 4, 2, 2, 2)  # g, q, upper, lower, value
                    # Rows g and g + 8 of the left operand; columns 2q, 2q + 1 and then 2q + 8, 2q + 9.
                    left = lanes.permute(3, 0, 2, 1, 4).reshape(16, 16)
                    right = pieces[:, :, 4 * product : 4 * product + 4].view(8, 4, 2, 2).permute(0, 2, 1, 3).reshape(8, 16)
                    both = (right @ left.T).view(8, 2, 8)
                    gates[:, 2 * tile : 2 * tile + 2, group] += both
    return gates.view(8, 4, groups * 8)


def test_packed_weights_are_the_operands_of_the_tensor_cores() -> None:
    generator = torch.Generator().manual_seed(0)
    recurrent = torch.randn(40, 160, generator=generator)
    hidden = torch.zeros(8, 64)
    hidden[:, :40] = torch.randn(8, 40, generator=generator)
    gates = through_fragments(pack(recurrent, groups=6, chunks=2), hidden)
    torch.testing.assert_close(gates[:, :, :40].reshape(8, 160), hidden[:, :40] @ recurrent, rtol=1e-5, atol=1e-5)
    assert not gates[:, :, 40:].any(), "units that are padding have no weights"


@pytest.mark.parametrize("hidden", [1, 64, 65, 128, 200, 512, 700, 768])
def test_a_cluster_covers_the_layer_in_the_same_way_with_any_number_of_blocks(hidden: int) -> None:
    shapes = [ClusterShape(Layer(0, False, False, hidden), blocks) for blocks in (4, 8, 16)]
    fitting = [shape for shape in shapes if shape.fits(1)]
    assert fitting
    assert len({(shape.groups, shape.chunks) for shape in fitting}) == 1
    for shape in fitting:
        assert shape.units * shape.blocks >= hidden
        assert shape.threads <= 1024
        assert shape.chunks % 2 == 0, "each half has whole chunks"


def test_a_layer_that_no_cluster_holds_does_not_fit() -> None:
    assert not any(ClusterShape(Layer(0, False, False, 1024), blocks).fits(1) for blocks in (4, 8, 16))
    assert ClusterShape(Layer(0, False, False, 768), 16).fits(1)
    assert not ClusterShape(Layer(0, False, False, 768), 8).fits(1)


@pytest.mark.parametrize(
    "rows, octets, width, tiles",
    [(1, 1, 1, 1), (7, 1, 1, 7), (8, 1, 2, 4), (56, 1, 8, 7), (57, 2, 5, 6), (100, 2, 8, 7), (256, 5, 8, 7), (4096, 5, 8, 103)],
)
def test_rows_are_spread_over_the_clusters_that_run_at_once(
    rows: int, octets: int, width: int, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClusterShape, "resident", lambda _: 7)
    monkeypatch.setattr(ClusterShape, "kernel", lambda *_: None)
    found = ClusterShape(Layer(0, False, False, 512), 16).launch(rows)
    assert (found.octets, found.width, found.blocks) == (octets, width, 16 * tiles)
    assert found.octets in OCTETS
    assert found.shared <= H200_SHARED_BYTES


@pytest.mark.parametrize("rows", [1, 8, 100, 500])
@pytest.mark.parametrize("lends", [True, False])
@pytest.mark.parametrize(
    "hidden, units", [(100, 16), (256, 16), (512, 16), (768, 8), (768, 24), (1024, 8), (1024, 16), (1500, 16), (2048, 16)]
)
def test_the_teams_of_a_grid_are_resident_at_once(
    hidden: int, units: int, lends: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "lends_registers", lambda _: lends)
    monkeypatch.setattr(GridShape, "_kernel", lambda *_: None)
    shape = GridShape(Layer(0, False, False, hidden), units)
    assert shape.fits()
    rows = min(rows, shape.most_rows)
    found = shape.launch(rows)
    assert found.blocks <= 132 * shape.together
    assert found.blocks // shape.members * found.octets * found.width >= rows
    assert (found.shared + 1024) * shape.together <= H200_SHARED_BYTES + 1024
    assert found.octets * found.width <= SORTED
    multiply = 32 * shape.parts
    lent = multiply * shape.registers + (shape.threads - multiply) * launch.OWNERS_REGISTERS
    assert shape.together * (lent if shape.lends else shape.threads * shape.registers) <= 65536
    assert not shape.lends or shape.threads % 128 == 0, "registers are lent by four warps to four warps"


@pytest.mark.parametrize("hidden", [130, 256, 300, 512])
def test_both_kernels_lay_out_weights_alike_where_the_number_of_rows_decides(hidden: int) -> None:
    layer = Layer(0, False, False, hidden)
    clusters, teams = ClusterShape(layer, 16), GridShape(layer, 16)
    assert clusters.chunks == teams.chunks
    assert teams.chunks % teams.parts == 0
    assert clusters.groups >= teams.groups


def test_only_where_both_kernels_sum_alike_does_the_number_of_rows_decide() -> None:
    shapes = tuned(launch.HERE / "tuned", "NVIDIA H200")["shapes"]
    for hidden in range(1, 2113):
        kinds = {next(covering(shapes, ("blocks", "units"), hidden=hidden, rows=rows))[0] for rows in (1, 8, 32, 64, 256, 4096)}
        assert hidden <= launch.LIKE_A_CLUSTER or kinds == {"units"}


class Recorder:
    """Stands for a compiled kernel: what it was launched with, by the name of the member of a Call."""

    def __init__(self) -> None:
        self.calls: list[dict[str, int]] = []

    def launch(self, blocks: int, shared: int, members: Sequence[int]) -> None:
        self.calls.append(dict(zip(CALL, members, strict=True)) | {"blocks": blocks, "shared": shared})


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    made = Recorder()
    monkeypatch.setattr(ClusterShape, "resident", lambda _: 7)
    monkeypatch.setattr(ClusterShape, "kernel", lambda *_: made)
    monkeypatch.setattr(launch, "current", lambda _: nullcontext())
    monkeypatch.setattr(launch, "_tuned", lambda _: tuned(launch.HERE / "tuned", "NVIDIA H200")["shapes"])
    with found_anew():
        yield made


CALL = [
    name
    for declared in re.findall(
        r"^    (?:const )?(?:\w+\*|long long) ([\w, ]+);", CELL[CELL.index("struct Call") :], re.MULTILINE
    )
    for name in declared.split(", ")
][:20]


def test_the_launcher_lists_the_members_of_a_call_in_their_order(recorder: Recorder) -> None:
    assert CALL[0] == "gates"
    assert CALL[-1] == "width"
    x, weights, state = Form("lstm").given([3, 0, 4], 40, 8, storage=torch.float16)
    x = Ragged(x.data.half(), x.offsets.long())
    encoded = launch.cluster(x, weights, state, want=Outputs(steps=True, mean=True))
    (call,) = recorder.calls
    assert {name: call[name] for name in ("wide", "first", "until", "hidden", "octets", "width")} == {
        "wide": 1,
        "first": 0,
        "until": 3,
        "hidden": 40,
        "octets": 1,
        "width": 1,
    }
    addresses = {
        "packed": weights.packed[8, 2],
        "offsets": x.offsets,
        "hidden_before": state.hidden,
        "cell_before": state.cell,
        "hidden_after": encoded.state.hidden,
        "cell_after": encoded.state.cell,
        "steps": encoded.steps,
        "mean": encoded.mean,
    }
    assert {name: call[name] for name in addresses} == {name: array.data_ptr() for name, array in addresses.items()}
    assert [name for name in CALL[:14] if call[name] == 0] == ["slots_before", "slots_after", "last", "max", "exchange"]


def test_a_state_in_slots_stays_where_it_is(recorder: Recorder) -> None:
    x, weights, _ = Form("lstm").given([3, 0, 4], 40, 8, storage=torch.float16)
    slabs = LSTMState(torch.zeros(9, 40), torch.zeros(9, 40), torch.tensor([8, 1, 2], dtype=torch.int32))
    encoded = launch.cluster(x, weights, slabs, want=Outputs(last=True))
    (call,) = recorder.calls
    assert encoded.state is slabs
    assert call["slots_before"] == call["slots_after"] == slabs.slots.data_ptr()
    assert call["hidden_before"] == call["hidden_after"] == slabs.hidden.data_ptr()
    assert encoded.last is not None
    assert call["last"] == encoded.last.data_ptr()
    with pytest.raises(ContractError, match=r"state.cell with slots is a contiguous float32 array"):
        launch.cluster(x, weights, LSTMState(slabs.hidden, slabs.cell.half(), slabs.slots), want=Outputs())


def test_a_state_goes_on_from_other_places_than_those_where_it_is_written(recorder: Recorder) -> None:
    x, weights, _ = Form("lstm").given([3, 0, 4], 40, 8, storage=torch.float16)
    slots, sources = torch.tensor([8, 1, 2], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    slabs = LSTMState(torch.zeros(9, 40), torch.zeros(9, 40), slots, sources)
    after = launch.cluster(x, weights, slabs, want=Outputs(last=True)).state
    (call,) = recorder.calls
    assert (call["slots_before"], call["slots_after"]) == (sources.data_ptr(), slots.data_ptr())
    assert call["hidden_before"] == call["hidden_after"] == slabs.hidden.data_ptr()
    assert after.hidden is slabs.hidden and after.slots is slots and after.sources is None


def test_weights_are_packed_once(recorder: Recorder) -> None:
    x, weights, state = Form("lstm").given([3, 0, 4], 40, 8, storage=torch.bfloat16)
    for _ in range(2):
        launch.cluster(x, weights, state, want=Outputs())
    first, second = recorder.calls
    assert first["packed"] == second["packed"]
    assert len(weights.packed) == 1


def test_without_rows_nothing_is_launched(recorder: Recorder) -> None:
    x, weights, state = Form("lstm").given([], 40, 8, storage=torch.float16)
    encoded = launch.cluster(x, weights, state, want=Outputs(steps=True, last=True, mean=True, max=True))
    assert not recorder.calls
    assert encoded.steps is not None
    assert encoded.steps.shape == (0, 40)


def test_a_measured_shape_covers_what_is_within_its_bounds() -> None:
    shapes = [{"hidden": 128, "rows": 8, "blocks": 4}, {"hidden": 128, "units": 2}, {"rows": 9, "blocks": 1}]
    assert list(covering(shapes, ("blocks", "units"), hidden=128, rows=8)) == [("blocks", 4), ("units", 2), ("blocks", 1)]
    assert list(covering(shapes, ("blocks",), hidden=128, rows=8)) == [("blocks", 4), ("blocks", 1)]
    assert list(covering(shapes, ("blocks", "units"), hidden=1, rows=9)) == [("units", 2), ("blocks", 1)]
    assert list(covering(shapes, ("blocks", "units"), hidden=129, rows=10)) == []


def test_which_kernel_runs_for_how_many_rows_is_told(recorder: Recorder) -> None:
    for hidden, told in (
        (128, "clusters of 8 blocks up to 64 rows, clusters of 2 blocks"),
        (512, "clusters of 16 blocks up to 128 rows, the grid by 16 units"),
        (1024, "the grid by 8 units up to 8 rows, the grid by 16 units"),
    ):
        assert launch.how_persistent(Problem(torch.device("cuda:0"), torch.float16, hidden)) == told


def test_a_device_takes_the_shapes_that_bear_its_name(tmp_path: Path) -> None:
    for name in ("h200", "h100"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"device": name}))
    assert tuned(tmp_path, "NVIDIA H100 80GB HBM3")["device"] == "h100"
    assert tuned(tmp_path, "NVIDIA H200")["device"] == "h200"
    assert tuned(tmp_path, "NVIDIA B200")["device"] == "h200", "what was not measured is taken to be like what was"
