"""The launchers of the convolution's CUDA kernels on an emulated H200: launches, their shapes and grids, and the steps of each window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, product
from typing import Any

import pytest
import torch

from kernels.conv import folded, plan
from kernels.conv import launch as fused
from kernels.conv import product as product_launcher
from kernels.conv.geometry import BANKS
from kernels.conv.plan import HERE, TileShape
from kernels.conv.product import Destination, LeftContext, PackedSteps, convolve
from kernels.conv.types import ConvState, ConvWeights
from kernels.ragged import ContractError, Outputs, Ragged
from kernels.tuning import load_tuned
from tests.kernels.devices import H200, FakeKernel, FakeLaunch, emulated, launches_of
from tests.kernels.families import Form
from tests.kernels.inputs import EVERYTHING, Arguments
from tests.kernels.sources import Member, members, text, undefined_names
from tests.kernels.stacks import Maker, Stack

SHARED_BYTES, PROCESSORS = H200.shared_memory_per_block_optin, H200.multi_processor_count
SHAPES = [TileShape(1, 32), TileShape(1, 64), TileShape(1, 128), TileShape(2, 64), TileShape(2, 128), TileShape(2, 256)]
HALF = torch.float16
LAST, MAXIMUM, STEPS = Outputs(last=True), Outputs(max=True), Outputs(steps=True)
LENGTHS = [9, 0, 1, 3, 14, 2]
CONV = Form("conv", width=3)


def names_of(member: Member) -> list[str]:
    """Return the names of a member of `Call`, with one name per array entry."""
    if member.kind == "Rows":
        return [f"{member.name}.{inner.name}" for inner in members(HERE / "conv.cuh", "Rows")]
    return [f"{member.name} {number}" for number in range(BANKS)] if member.sizes else [member.name]


CALLS = {
    source: [name for member in members(HERE / source, "Call") for name in names_of(member)]
    for source in ("product.cu", "folded.cu")
}


class Launches:
    """The launches of an emulated device."""

    def __init__(self, made: list[FakeKernel]) -> None:
        self._made = made

    @property
    def all(self) -> list[FakeLaunch]:
        return launches_of(self._made)

    @property
    def calls(self) -> list[dict[str, int]]:
        """The members of the Call of each launch by name."""
        return [dict(zip(CALLS[one.kernel.source.name], one.members, strict=True)) for one in self.all]

    def only(self) -> tuple[FakeLaunch, dict[str, int]]:
        """Return the only launch and its members, and forget it."""
        [launch], [call] = self.all, self.calls
        self.clear()
        return launch, call

    def clear(self) -> None:
        for kernel in self._made:
            kernel.launches.clear()


@pytest.fixture(autouse=True)
def launches() -> Iterator[Launches]:
    with emulated(H200) as made:
        yield Launches(made)


def halves(problem: Any) -> Any:
    """Return a problem in float16, with ids unchanged."""
    return problem.map_arrays(lambda array: array.half() if array.is_floating_point() else array)


def problem_of(form: Form, lengths: Sequence[int] = LENGTHS, outputs: int = 40, inputs: int = 24) -> Arguments:
    made: Arguments = halves(form.arguments(lengths, outputs, inputs))
    return made


def run(problem: Arguments, want: Outputs = EVERYTHING) -> Any:
    return fused.conv(*problem, want=want)


def weights(width: int = 3, inputs: int = 24, maps: int = 40, **others: Any) -> ConvWeights:
    return ConvWeights(torch.zeros(width, inputs, maps, dtype=HALF), torch.zeros(maps, dtype=HALF), **others)


def steps(lengths: Sequence[int], inputs: int = 24) -> PackedSteps:
    """Return steps that take no memory."""
    data = torch.zeros(1, inputs, dtype=HALF).expand(sum(lengths), inputs)
    return PackedSteps(data, torch.tensor([0, *accumulate(lengths)], dtype=torch.int32))


def written(tokens: int, columns: int = 40) -> torch.Tensor:
    """Return room for steps that takes no memory."""
    return torch.zeros(1, columns).expand(tokens, columns)


# Constants and arguments of the kernels.


def test_members_of_call_are_passed_in_order(launches: Launches) -> None:
    x, layer, state = problem_of(Form("conv", width=3, left=4, right=1, dilation=2, activation="glu"))
    encoded = run(Arguments(Ragged(x.data, x.offsets.long()), layer, state), STEPS)
    _, call = launches.only()
    arrays = {"x": x.data, "before": state.left, "after": encoded.state.left, "steps": encoded.steps}
    packed = {"filters 0": layer.packed["filters", 64], "bias 0": layer.packed["bias", 64]}
    addresses = {name: array.data_ptr() for name, array in {**arrays, **packed}.items()}
    sizes = {
        "inputs": 24,
        "dilation": 2,
        "columns": 40,
        "banks": 1,
        "width 0": 3,
        "outputs 0": 40,
        "first_tile 0": 0,
        "known": 0,
    }
    rows = {"rows": 6, "wide": 1, "count": 0, "spacing": 1, "count_out": 0, "left": 4, "right": 1, "stride": 1}
    expected = {**addresses, **sizes, **{f"batch.{name}": value for name, value in rows.items()}}
    assert {name: call[name] for name in expected} == expected
    assert not any(call[name] for name in ("ids", "lines_after", "residual", "maxima", "filters 1", "width 7"))


@pytest.mark.parametrize("wide", [torch.int32, torch.int64], ids=str)
def test_ids_embeddings_and_tables_are_not_copied(wide: torch.dtype, launches: Launches) -> None:
    x, layer, _ = problem_of(Form("conv", width=3, left=1, right=1, activation="relu", ids="embedding"))
    run(Arguments(Ragged(x.data.to(wide), x.offsets), layer, None))
    _, call = launches.only()
    assert call["wide_ids"] == (wide == torch.int64) and call["x"] in {
        array.data_ptr() for array in (layer.embedding, layer.packed["embedding"])
    }
    assert not call["before"] and not call["after"], "ids have no state"
    x, layer, _ = problem_of(Form("conv", width=3, left=2, ids="tables"))
    encoded = run(Arguments(x, layer, None), STEPS)
    launch, call = launches.only()
    assert launch.kernel.constants.keys() | {"THREADS"} == undefined_names(HERE / "folded.cu")
    passed = {"tables 0": layer.tables.data_ptr(), "ids": x.data.data_ptr(), "steps": encoded.steps.data_ptr()}
    passed |= {"height": layer.tables.shape[1], "stride 0": 40, "width 0": 3, "columns": 40}
    assert {name: call[name] for name in passed} == passed


# Launches.


@pytest.mark.parametrize("ids", ["", "embedding", "tables"])
@pytest.mark.parametrize("widths", [(1,), (5, 1, 3, 2, 4, 6, 8, 7)], ids=str)
def test_text_cnn_is_one_launch(ids: str, widths: tuple[int, ...], launches: Launches) -> None:
    outputs, labels = [20 + width for width in widths], 6 if ids == "tables" else 0
    made = Maker(24).text_cnn(LENGTHS, widths, outputs, ids=ids, labels=labels)
    fused.text_cnn(*halves(made))
    _, call = launches.only()
    assert (call["banks"], call["columns"]) == (len(widths), sum(outputs))
    assert [call[f"width {bank}"] for bank in range(BANKS)] == [*widths, *[0] * (BANKS - len(widths))]
    assert [call[f"outputs {bank}"] for bank in range(len(widths))] == outputs
    assert [call[f"first_column {bank}"] for bank in range(len(widths))] == [0, *accumulate(outputs)][:-1]


def test_layers_that_do_not_fit_one_launch_are_launched_alone(launches: Launches) -> None:
    """With stride > 1, rows have a different number of windows for each width."""
    x, relu = problem_of(CONV).x, partial(weights, activation="relu")
    for layers in (
        [relu(width) for width in range(1, BANKS + 2)],
        [weights(activation="tanh"), weights(4, activation="tanh")],
        [relu(), relu(left=1)],
        [relu(width, stride=2) for width in (2, 5)],
    ):
        fused.text_cnn(x, layers, None)
        assert [call["banks"] for call in launches.calls] == [1] * len(layers)
        launches.clear()


def test_classifier_in_the_dtype_of_the_tables_needs_no_launch(launches: Launches) -> None:
    made = halves(Maker(24).text_cnn(LENGTHS, (3, 4), (40, 40), ids="tables", labels=6))
    scores = fused.text_cnn(*made).scores
    launch, call = launches.only()
    assert scores is not None and launch.kernel.constants["CLASSIFIES"]
    assert (call["scores"], call["labels"]) == (scores.data_ptr(), 6)
    fused.text_cnn(*made._replace(classifier=(made.classifier[0].float(), made.classifier[1].float())))
    launch, call = launches.only()
    assert not launch.kernel.constants["CLASSIFIES"] and not call["scores"]


def stacked(*, states: bool = False) -> Stack:
    maker = Maker(24)
    made: Stack = halves(maker.stack(LENGTHS, *maker.tcn([24, 40, 40], width=3), with_states=states))
    return made


@pytest.mark.parametrize("states", [False, True])
def test_stack_is_one_launch_per_layer_and_projection(states: bool, launches: Launches) -> None:
    made = stacked(states=states)
    fused.stack(*made, want=EVERYTHING)
    constants, calls = [launch.kernel.constants for launch in launches.all], launches.calls
    assert len(calls) == len(made.layers) + 1 == 7 and [one["RESIDUAL"] for one in constants].count(1) == 3
    assert sorted(one["STEPS_FLOAT32"] for one in constants) == [0] * 6 + [1], "the output of the stack is float32"
    assert [bool(call["after"]) for call in calls].count(True) == (len(made.layers) if states else 0)


def test_last_step_alone_computes_only_the_needed_steps(launches: Launches) -> None:
    fused.stack(*stacked(), want=LAST)
    assert all(launch.kernel.constants["THINNED"] for launch in launches.all)
    counts = [(call["batch.count_out"], call["batch.spacing_out"]) for call in launches.calls]
    assert sorted(counts) == sorted([(27, 1), (13, 2), (11, 2), (5, 4), (5, 4), (3, 4), (1, 1)])
    added = [[call[f"residual_{name}"] for name in ("count", "spacing", "apart")] for call in launches.calls]
    assert sorted(numbers for numbers in added if any(numbers)) == [[0, 1, 2], [5, 4, 1], [5, 4, 1]]


def test_writable_state_slots_are_written_in_place(launches: Launches) -> None:
    x, layer, _ = problem_of(Form("conv", width=3, left=2), [3, 0, 4])
    slots, sources = torch.tensor([8, 1, 2]), torch.tensor([0, 0, 0])
    for slab, in_place in ((torch.ones(9, 2, 24, dtype=HALF), True), (torch.ones(9, 2, 24), False)):
        state = ConvState(slab, slots)
        assert fused.conv(x, layer, state, want=STEPS).state is state
        assert fused.conv(x, layer, ConvState(slab, slots, sources), want=STEPS).state == state
        call = launches.calls[-1]
        assert (call["after"] == slab.data_ptr()) == in_place == bool(call["lines_after"])
        # Another block may still read the old state after the new state was written.
        assert call["before"] not in (0, slab.data_ptr())


@pytest.mark.parametrize("ids", ["", "embedding", "tables"])
def test_batch_without_rows_launches_nothing(ids: str, launches: Launches) -> None:
    for want in (EVERYTHING, LAST, MAXIMUM):
        encoded = run(problem_of(Form("conv", width=3, left=2, activation="relu", ids=ids), []), want)
        assert {len(array) for array in (encoded.steps, encoded.last, encoded.max) if array is not None} == {0}
    fused.text_cnn(*halves(Maker(24).text_cnn([], (3, 4), (23, 24), ids=ids, labels=6)))
    assert not launches.all


@pytest.mark.parametrize("want, activation", [(STEPS, "none"), (LAST, "none"), (MAXIMUM, "relu")])
@pytest.mark.parametrize("options", [{"left": 1, "stride": 2}, {}, {"left": 2}], ids=str)
def test_rows_without_steps_still_write_state_and_outputs(
    options: dict[str, int], want: Outputs, activation: str, launches: Launches
) -> None:
    """Otherwise they would return uninitialised memory."""
    x, layer, state = problem_of(Form("conv", width=3, activation=activation, **options), [0, 0])
    encoded = run(Arguments(x, layer, state), want)
    if layer.left:
        assert [call["after"] for call in launches.calls] == [encoded.state.left.data_ptr()]
    if want == MAXIMUM:
        assert [call["maxima"] for call in launches.calls] == [encoded.max.data_ptr()]


def test_launches_are_early_once_filters_are_packed(launches: Launches) -> None:
    made = stacked()
    for times in (1, 2):
        fused.stack(*made, want=EVERYTHING)
        assert [launch.early for launch in launches.all].count(True) == (0 if times == 1 else 7)
        # An earlier launch has read the same offsets.
        assert sorted(call["known"] for call in launches.calls) == [0, 1, 1, 1, 1, 1, 1]
        launches.clear()


def test_filters_are_packed_once_per_tile_height(launches: Launches) -> None:
    layer, addresses = weights(maps=300, activation="relu"), []
    for tokens in (10, 10, 100_000, 200_000):
        convolve(steps([tokens]), [layer], Destination(maxima=torch.zeros(1, 300)))
        addresses.append(launches.only()[1]["filters 0"])
    first, second, third, fourth = addresses
    assert first == second != third == fourth


# Tiles.


def positions(launch: FakeLaunch, call: dict[str, int]) -> int:
    """Return the number of tiles along the places, for the same maps of the first bank."""
    firsts = sorted(call[f"first_tile {bank}"] for bank in range(call["banks"]))
    constants = launch.kernel.constants
    outputs = call["outputs 0"] * (2 if constants["GATE"] else 1)
    return [*firsts, call["tiles"]][1] // -(-outputs // (64 * constants["GROUPS"]))


@pytest.mark.parametrize("maps", [1, 65, 1024])
@pytest.mark.parametrize("widths", [[3], [3, 4, 5], [1] * BANKS], ids=str)
def test_launch_has_at_most_one_block_per_multiprocessor(maps: int, widths: list[int], launches: Launches) -> None:
    for tokens, rows in ((1, 1), (65, 7), (4096, 1), (100_000, 7)):
        outputs = torch.zeros(rows, maps * len(widths))
        layers = [weights(width, maps=maps, activation="relu") for width in widths]
        convolve(steps([tokens, *[0] * (rows - 1)]), layers, Destination(maxima=outputs))
        launch, call = launches.only()
        assert launch.blocks == (min(call["tiles"], PROCESSORS), 1, 1)
        shape = TileShape(launch.kernel.constants["GROUPS"], launch.kernel.constants["PLACES"])
        tiles_per_bank = call["tiles"] // len(widths)
        assert tiles_per_bank == positions(launch, call) * -(-maps // shape.maps)
        firsts = sorted(call[f"first_tile {bank}"] for bank in range(len(widths)))
        assert firsts == [tiles_per_bank * bank for bank in range(len(widths))], "every tile belongs to one bank"
        assert (positions(launch, call) - 1) * shape.places < tokens + rows * 2


def test_more_steps_get_larger_tiles_of_tuned_shapes(launches: Launches) -> None:
    for file in (HERE / "tuned").glob("*.json"):
        for shape in load_tuned(HERE / "tuned", file.stem)["shapes"]:
            assert shape["groups"] in (1, 2) and f"MULTIPLY({shape['places']}," in text(HERE / "product.cu")
    tuned = [(shape["groups"], shape["places"]) for shape in load_tuned(HERE / "tuned", "NVIDIA H200")["shapes"]]
    chosen = []
    for tokens, maps in product((1, 1000, 6000, 30_000, 1_000_000), (64, 300)):
        convolve(steps([tokens]), [weights(maps=maps)], Destination(written(tokens, maps)))
        constants = launches.only()[0].kernel.constants
        chosen.append((constants["GROUPS"], constants["PLACES"]))
    assert {*chosen} <= {*tuned} and (chosen[0], chosen[-1]) == (min(tuned), max(tuned))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tile_fits_into_shared_memory(shape: TileShape, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_launcher, "shape_for", lambda *_: shape)
    forms: list[dict[str, Any]] = [{}, {"stride": 2}, {"left": 400, "dilation": 50}, {"activation": "relu"}]
    for width, inputs, options, tokens in product((1, 3, plan.MAX_WIDTH), (2, 300), forms, (500, 200_000)):
        maxima = Destination(maxima=torch.zeros(1, 40))
        target = maxima if "activation" in options else Destination(written(9 * tokens))
        convolve(steps([tokens], inputs), [weights(width, inputs, **options)], target)
        launch, call = launches.only()
        constants = launch.kernel.constants
        assert constants.keys() | {"THREADS"} == undefined_names(HERE / "product.cu")
        assert constants["SHARED"] == launch.shared <= SHARED_BYTES
        assert constants["X_STAGES"] >= 2 and constants["FILTER_STAGES"] >= min(2, width)
        assert constants["LINES"] % 8 == 0 and constants["LINES"] >= call["lines"]
        assert launch.kernel.threads == 128 + 128 * constants["GROUPS"] <= 1024


def test_filters_that_are_too_wide_use_the_framework(launches: Launches) -> None:
    problem = halves(Form("conv", width=999, left=998).arguments([5, 3], 8, 24))
    encoded, expected = run(problem), Form("conv").exact(problem)
    assert not launches.all and expected.steps is not None
    torch.testing.assert_close(encoded.steps, expected.steps.float(), rtol=1e-2, atol=1e-2)


def test_too_many_tokens_are_rejected() -> None:
    x = PackedSteps(torch.zeros(1, 24, dtype=HALF).expand(2**31, 24), torch.tensor([0, 2**31]))
    with pytest.raises(ContractError, match=f"x has {2**31} tokens, one launch takes about {plan.MAX_PLACES}"):
        convolve(x, [weights(activation="relu")], Destination(maxima=torch.zeros(1, 40)))


def test_maxima_are_zeroed_if_several_tiles_share_a_row(launches: Launches) -> None:
    for lengths, alone in (([3, 0, 4], True), ([900, 3], False), ([0], True)):
        maxima = torch.full((len(lengths), 40), 7.0)
        convolve(steps(lengths), [weights(activation="relu")], Destination(maxima=maxima))
        launch, call = launches.only()
        assert bool((maxima == (7.0 if alone else 0.0)).all())
        assert (launch.kernel.constants["ALONE"], positions(launch, call) == 1) == (alone, alone)


# The lines of a tile and the steps of each window.


@pytest.mark.parametrize(
    "options, lengths, shared",
    [
        ({"left": 1, "right": 1}, [500], True),
        ({"left": 1, "right": 1, "stride": 2}, [500], False),
        ({"left": 100, "dilation": 50}, [500], False),
        ({"left": 16, "dilation": 8}, [500], True),
        ({"left": 16, "dilation": 8}, [3] * 300, False),
        ({}, [3] * 300, True),
    ],
    ids=str,
)
def test_taps_share_lines_if_gaps_are_cheap(
    options: dict[str, int], lengths: list[int], shared: bool, launches: Launches
) -> None:
    layer = weights(**options)
    convolve(steps(lengths), [layer], Destination(written(2000), torch.zeros(len(lengths) + 1).int()))
    launch, call = launches.only()
    constants = launch.kernel.constants
    assert constants["SHARED_LINES"] == shared
    assert call["lines"] == constants["PLACES"] + (layer.reach - 1 if shared else 0)
    assert constants["TABLE"] >= (call["lines"] if shared else 3 * constants["PLACES"])


@pytest.mark.parametrize(
    "left, right, with_state, gap",
    [(0, 0, True, 0), (2, 0, True, 2), (2, 0, False, 2), (1, 1, True, 2), (1, 1, False, 1), (0, 2, False, 2), (4, 5, False, 7)],
)
def test_gap_between_rows_has_room_for_padding(left: int, right: int, with_state: bool, gap: int, launches: Launches) -> None:
    """Two rows may share zeros, but not steps of an earlier chunk. A row may have more windows than steps."""
    before = torch.zeros(3, left, 24, dtype=HALF) if with_state and left else None
    convolve(steps([300, 0, 40]), [weights(left=left, right=right)], Destination(written(400)), LeftContext(before))
    launch, call = launches.only()
    assert launch.kernel.constants["SHARED_LINES"] and call["batch.gap"] == gap


def test_strided_windows_are_packed_by_their_own_offsets(launches: Launches) -> None:
    problem = problem_of(Form("conv", width=3, left=2, stride=2, activation="relu"))
    encoded = run(problem, MAXIMUM)
    assert launches.only()[1]["batch.places"] != problem.x.offsets.data_ptr()
    assert encoded.offsets.tolist() == [0, *accumulate(problem.weights.steps(problem.x.lengths).tolist())]


@pytest.mark.parametrize("rows, outputs, labels", [(1, 1, 0), (2, 2000, 6), (64, 40, 6), (4096, 300, 0)])
def test_every_row_of_ids_has_separate_blocks(rows: int, outputs: int, labels: int, launches: Launches) -> None:
    fused.text_cnn(*halves(Maker(4).text_cnn([2] * rows, (3, 4), (outputs, outputs), ids="tables", labels=labels)))
    launch, call = launches.only()
    (along, parts, shares), kernel = launch.blocks, launch.kernel
    split = kernel.constants["SPLIT"]
    assert (along, shares) == (rows, 1), "maxima cover all windows"
    assert kernel.threads == 32 * split * (kernel.threads // 32 // split) <= 32 * folded.MAX_WARPS
    assert kernel.cluster == kernel.constants["CTAS"] == (parts if labels else 1) <= 8
    assert call["pieces"] == 2 * -(-outputs // 8) and parts <= -(-call["pieces"] // folded.PIECES_PER_WARP)
    assert launch.shared == 4 * (kernel.threads + (2 * outputs if labels else 0)) <= 227 * 1024
