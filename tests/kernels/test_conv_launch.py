"""The launchers of the convolution's CUDA kernels, without a GPU: the launches, their shapes and grids, and the steps of each window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from kernels import launching
from kernels.backend import Problem, explain
from kernels.conv import folded, plan
from kernels.conv import launch as fused
from kernels.conv import product as product_launcher
from kernels.conv.geometry import BANKS
from kernels.conv.plan import TileShape
from kernels.conv.product import Destination, LeftContext, PackedSteps, convolve
from kernels.conv.types import ConvState, ConvWeights
from kernels.ragged import ContractError, Outputs, Ragged
from kernels.tuning import load_tuned
from tests.kernels.families import Form
from tests.kernels.inputs import EVERYTHING, Arguments
from tests.kernels.sources import Member, members, text, undefined_names
from tests.kernels.stacks import Maker, Stack

H200_SHARED_BYTES = 232_448
PROCESSORS = 132
HERE = plan.HERE
SHAPES = [TileShape(1, 32), TileShape(1, 64), TileShape(1, 128), TileShape(2, 64), TileShape(2, 128), TileShape(2, 256)]
HALF = torch.float16
LAST, MAXIMUM, STEPS = Outputs(last=True), Outputs(max=True), Outputs(steps=True)
LENGTHS = [9, 0, 1, 3, 14, 2]


def call_of(source: str) -> list[str]:
    """Return the names of the members of `Call` in order, with one name per array entry."""

    def names(member: Member) -> list[str]:
        if member.kind == "Rows":
            return [f"{member.name}.{inner.name}" for inner in members(HERE / "conv.cuh", "Rows")]
        return [f"{member.name} {number}" for number in range(BANKS)] if member.sizes else [member.name]

    return [name for member in members(HERE / source, "Call") for name in names(member)]


CALLS = {name: call_of(name) for name in ("product.cu", "folded.cu")}


@dataclass
class Kernel:
    """Stands for a compiled kernel and records how it was specialised."""

    source: Path
    threads: int
    cluster: int
    constants: dict[str, int]
    launches: list[Launch]

    def launch(self, blocks: tuple[int, int, int], shared: int, members: Sequence[int], *, early: bool) -> None:
        call = dict(zip(CALLS[self.source.name], members, strict=True))
        self.launches.append(Launch(self, blocks, shared, call, early))


@dataclass
class Launch:
    """The arguments of a launch."""

    kernel: Kernel
    blocks: tuple[int, int, int]
    shared: int
    call: dict[str, int]
    early: bool
    constants: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.constants = self.kernel.constants


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Simulate an H200 that records launches in this list. Plans cached during a test are discarded."""
    made: list[Launch] = []
    caches: list[Any] = [
        function
        for module in (plan, folded, launching)
        for function in vars(module).values()
        if hasattr(function, "cache_clear")
    ]

    def compiled(source: Path, device: int, *, threads: int, cluster: int = 1, **constants: int) -> Kernel:
        return Kernel(source, threads, cluster, constants, made)

    for module in (plan, folded):
        monkeypatch.setattr(module, "load_kernel", compiled)
    for module in (product_launcher, folded):
        monkeypatch.setattr(module, "on_device", lambda _: nullcontext())
    monkeypatch.setattr(plan, "shared_limit", lambda _: H200_SHARED_BYTES)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=PROCESSORS))
    for cached in caches:
        cached.cache_clear()
    yield made
    for cached in caches:
        cached.cache_clear()


def problem_of(form: Form, lengths: Sequence[int] = LENGTHS, outputs: int = 40, inputs: int = 24) -> Arguments:
    """Return a problem in float16, with ids unchanged."""
    made: Arguments = halves(form.arguments(lengths, outputs, inputs))
    return made


def halves(problem: Any) -> Any:
    return problem.map_arrays(lambda array: array.half() if array.is_floating_point() else array)


def run(problem: Arguments, want: Outputs = EVERYTHING) -> Any:
    return fused.conv(*problem, want=want)


def weights(width: int = 3, inputs: int = 24, maps: int = 40, **others: Any) -> ConvWeights:
    return ConvWeights(torch.zeros(width, inputs, maps, dtype=HALF), torch.zeros(maps, dtype=HALF), **others)


def steps(lengths: Sequence[int], inputs: int = 24) -> PackedSteps:
    """Return steps that take no memory."""
    data = torch.zeros(1, inputs, dtype=HALF).expand(sum(lengths), inputs)
    return PackedSteps(data, torch.tensor([0, *accumulate(lengths)], dtype=torch.int32))


def one_of(launches: list[Launch]) -> Launch:
    (launch,) = launches
    return launch


# Constants and arguments of the kernels.


def test_launcher_defines_every_constant_of_the_source(launches: list[Launch]) -> None:
    run(problem_of(Form("conv", width=3)))
    run(problem_of(Form("conv", width=3, ids="tables")))
    assert [launch.kernel.source for launch in launches] == [HERE / "product.cu", HERE / "folded.cu"]
    for launch in launches:
        assert launch.constants.keys() | {"THREADS"} == undefined_names(launch.kernel.source)
        assert {type(value) for value in launch.constants.values()} == {int}
        assert {type(value) for value in launch.call.values()} == {int}


def test_launcher_passes_members_in_order(launches: list[Launch]) -> None:
    x, layer, state = problem_of(Form("conv", width=3, left=4, right=1, dilation=2, activation="glu"))
    encoded = run(Arguments(Ragged(x.data, x.offsets.long()), layer, state), STEPS)
    call = one_of(launches).call
    arrays = {"x": x.data, "before": state.left, "after": encoded.state.left, "steps": encoded.steps}
    packed = {"filters 0": layer.packed["filters", 64], "bias 0": layer.packed["bias", 64]}
    addresses = {name: array.data_ptr() for name, array in {**arrays, **packed}.items()}
    assert {name: call[name] for name in addresses} == addresses
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
    expected = sizes | {f"batch.{name}": value for name, value in rows.items()}
    assert {name: call[name] for name in expected} == expected
    assert {name for name in ("ids", "lines_after", "residual", "maxima", "filters 1", "width 7") if call[name]} == set()


def test_ids_are_not_copied(launches: list[Launch]) -> None:
    for wide in (torch.int32, torch.int64):
        x, layer, _ = problem_of(Form("conv", width=3, left=1, right=1, activation="relu", ids="embedding"))
        x = Ragged(x.data.to(wide), x.offsets)
        run(Arguments(x, layer, None))
        call = launches[-1].call
        assert (call["ids"], call["wide_ids"]) == (x.data.data_ptr(), wide == torch.int64)
        assert call["x"] in {array.data_ptr() for array in (layer.embedding, layer.packed["embedding"])}
        assert not call["before"] and not call["after"], "ids have no state"


def test_tables_are_not_copied(launches: list[Launch]) -> None:
    x, layer, _ = problem_of(Form("conv", width=3, left=2, ids="tables"), outputs=40)
    encoded = run(Arguments(x, layer, None), STEPS)
    call = one_of(launches).call
    assert (call["tables 0"], call["ids"], call["steps"]) == (
        layer.tables.data_ptr(),
        x.data.data_ptr(),
        encoded.steps.data_ptr(),
    )
    assert (call["height"], call["stride 0"], call["width 0"], call["columns"]) == (layer.tables.shape[1], 40, 3, 40)


@pytest.mark.parametrize("outputs", [33, 40])
def test_unaligned_tables_are_packed_once(outputs: int, launches: list[Launch]) -> None:
    x, layer, _ = problem_of(Form("conv", width=3, left=2, ids="tables"), outputs=outputs)
    for _ in range(2):
        run(Arguments(x, layer, None))
    first, second = (launch.call["tables 0"] for launch in launches)
    assert first == second
    assert first % 16 == 0
    assert (first == layer.tables.data_ptr()) == (outputs % 8 == 0)


# Launches.


def text_cnn(ids: str, widths: Sequence[int], *, labels: int = 0, lengths: Sequence[int] = LENGTHS, **others: Any) -> Any:
    made = Maker(24).text_cnn(lengths, widths, [20 + width for width in widths], ids=ids, labels=labels, **others)
    return fused.text_cnn(*halves(made))


@pytest.mark.parametrize("ids", ["", "embedding", "tables"])
@pytest.mark.parametrize("widths", [(3, 4, 5), (1,), (5, 1, 3, 2, 4, 6, 8, 7)], ids=str)
def test_text_cnn_is_one_launch(ids: str, widths: tuple[int, ...], launches: list[Launch]) -> None:
    text_cnn(ids, widths, labels=6 if ids == "tables" else 0)
    call = one_of(launches).call
    assert call["banks"] == len(widths)
    assert [call[f"width {bank}"] for bank in range(BANKS)] == [*widths, *[0] * (BANKS - len(widths))]
    outputs = [20 + width for width in widths]
    assert [call[f"outputs {bank}"] for bank in range(len(widths))] == outputs
    assert [call[f"first_column {bank}"] for bank in range(len(widths))] == [0, *accumulate(outputs)][:-1]
    assert call["columns"] == sum(outputs)


def test_layers_that_do_not_fit_one_launch_are_launched_alone(launches: list[Launch]) -> None:
    text_cnn("", range(1, BANKS + 2))
    assert len(launches) == BANKS + 1
    launches.clear()
    x, relu = problem_of(Form("conv", width=3)).x, partial(weights, activation="relu")
    fused.text_cnn(x, [weights(activation="tanh"), weights(4, activation="tanh")], None)
    fused.text_cnn(x, [relu(), relu(left=1)], None)
    assert [launch.call["banks"] for launch in launches] == [1] * 4


def test_layers_with_different_windows_are_launched_alone(launches: list[Launch]) -> None:
    """With stride > 1, rows have a different number of windows for each width."""
    x = problem_of(Form("conv", width=3)).x
    fused.text_cnn(x, [weights(width, activation="relu", stride=2) for width in (2, 5)], None)
    assert [launch.call["banks"] for launch in launches] == [1, 1]


def test_classifier_in_the_dtype_of_the_tables_needs_no_launch(launches: list[Launch]) -> None:
    made = halves(Maker(24).text_cnn(LENGTHS, (3, 4), (40, 40), ids="tables", labels=6))
    scores = fused.text_cnn(*made).scores
    call = one_of(launches).call
    assert scores is not None
    assert (call["scores"], call["labels"]) == (scores.data_ptr(), 6)
    assert one_of(launches).constants["CLASSIFIES"]
    wide = made._replace(classifier=(made.classifier[0].float(), made.classifier[1].float()))
    fused.text_cnn(*wide)
    assert not launches[-1].constants["CLASSIFIES"] and not launches[-1].call["scores"]


def stacked(*, states: bool = False) -> Stack:
    maker = Maker(24)
    made: Stack = halves(maker.stack(LENGTHS, *maker.tcn([24, 40, 40], width=3), with_states=states))
    return made


@pytest.mark.parametrize("want, states", [(EVERYTHING, False), (LAST, False), (EVERYTHING, True)])
def test_stack_is_one_launch_per_layer_and_projection(want: Outputs, states: bool, launches: list[Launch]) -> None:
    made = stacked(states=states)
    fused.stack(*made, want=want)
    projections = [block.projection for block in made.blocks if block.projection is not None]
    assert len(launches) == len(made.layers) + len(projections) == 7
    assert [launch.constants["RESIDUAL"] for launch in launches].count(1) == 3
    assert [launch.constants["STEPS_FLOAT32"] for launch in launches] == [0] * 6 + [1], "the output of the stack is float32"
    assert [bool(launch.call["after"]) for launch in launches].count(True) == (len(made.layers) if states else 0)


def test_last_step_alone_computes_only_the_needed_steps(launches: list[Launch]) -> None:
    fused.stack(*stacked(), want=LAST)
    assert all(launch.constants["THINNED"] for launch in launches)
    counts = [(launch.call["batch.count_out"], launch.call["batch.spacing_out"]) for launch in launches]
    assert counts == [(27, 1), (13, 2), (11, 2), (5, 4), (5, 4), (3, 4), (1, 1)]
    added = [[launch.call[f"residual_{name}"] for name in ("count", "spacing", "apart")] for launch in launches]
    assert [numbers for numbers in added if any(numbers)] == [[0, 1, 2], [5, 4, 1], [5, 4, 1]]


def test_writable_state_slots_are_written_in_place(launches: list[Launch]) -> None:
    x, layer, _ = problem_of(Form("conv", width=3, left=2), [3, 0, 4])
    slots, sources = torch.tensor([8, 1, 2]), torch.tensor([0, 0, 0])
    for slab, in_place in ((torch.ones(9, 2, 24, dtype=HALF), True), (torch.ones(9, 2, 24), False)):
        state = ConvState(slab, slots)
        assert fused.conv(x, layer, state, want=STEPS).state is state
        assert fused.conv(x, layer, ConvState(slab, slots, sources), want=STEPS).state == state
        call = launches[-1].call
        assert (call["after"] == slab.data_ptr()) == in_place
        assert bool(call["lines_after"]) == in_place
        assert call["before"] not in (0, slab.data_ptr()), (
            "another block may still read the old state after the new state was written"
        )


@pytest.mark.parametrize("ids", ["", "embedding", "tables"])
def test_batch_without_rows_launches_nothing(ids: str, launches: list[Launch]) -> None:
    for want in (EVERYTHING, LAST, MAXIMUM):
        encoded = run(problem_of(Form("conv", width=3, left=2, activation="relu", ids=ids), []), want)
        assert {len(array) for array in (encoded.steps, encoded.last, encoded.max) if array is not None} == {0}
    text_cnn(ids, (3, 4), labels=6, lengths=[])
    assert not launches


@pytest.mark.parametrize("want, activation", [(STEPS, "none"), (LAST, "none"), (MAXIMUM, "relu")])
@pytest.mark.parametrize("options", [{"left": 1}, {"left": 1, "stride": 2}, {}, {"left": 2}], ids=str)
def test_rows_without_steps_still_write_state_and_outputs(
    options: dict[str, int], want: Outputs, activation: str, launches: list[Launch]
) -> None:
    """Otherwise they would return uninitialised memory."""
    x, layer, state = problem_of(Form("conv", width=3, activation=activation, **options), [0, 0])
    encoded = run(Arguments(x, layer, state), want)
    if layer.left:
        assert [launch.call["after"] for launch in launches] == [encoded.state.left.data_ptr()]
    if want == MAXIMUM:
        assert one_of(launches).call["maxima"] == encoded.max.data_ptr()


# Tiles.


@pytest.mark.parametrize("tokens", [1, 31, 64, 65, 500, 4096, 100_000])
@pytest.mark.parametrize("maps", [1, 64, 65, 300, 1024])
def test_launch_has_at_most_one_block_per_multiprocessor(tokens: int, maps: int, launches: list[Launch]) -> None:
    for banks, rows in product(([3], [3, 4, 5], [1] * BANKS), (1, 7)):
        x = steps([tokens, *[0] * (rows - 1)])
        outputs = torch.zeros(rows, maps * len(banks))
        convolve(x, [weights(width, maps=maps, activation="relu") for width in banks], Destination(maxima=outputs))
        launch = launches[-1]
        blocks, call = launch.blocks[0], launch.call
        assert launch.blocks == (min(call["tiles"], PROCESSORS), 1, 1)
        shape = TileShape(launch.constants["GROUPS"], launch.constants["PLACES"])
        tiles_per_bank = call["tiles"] // len(banks)
        assert tiles_per_bank == positions(launch) * -(-maps // shape.maps)
        firsts = [call[f"first_tile {bank}"] for bank in range(len(banks))]
        assert sorted(firsts) == [tiles_per_bank * bank for bank in range(len(banks))], "every tile belongs to one bank"
        assert blocks >= 1
        assert (positions(launch) - 1) * shape.places < tokens + rows * 2


def test_every_tuned_shape_exists_in_the_source() -> None:
    for file in (HERE / "tuned").glob("*.json"):
        tuned = load_tuned(HERE / "tuned", file.stem)
        assert tuned["date"]
        for shape in tuned["shapes"]:
            assert shape["groups"] in (1, 2)
            assert f"MULTIPLY({shape['places']}," in text(HERE / "product.cu")
    assert "H200" in load_tuned(HERE / "tuned", "NVIDIA H200")["device"]


def test_more_steps_get_larger_tiles(launches: list[Launch]) -> None:
    tuned = [(shape["groups"], shape["places"]) for shape in load_tuned(HERE / "tuned", "NVIDIA H200")["shapes"]]
    chosen = []
    for tokens in (1, 100, 1000, 3000, 6000, 12_000, 30_000, 100_000, 1_000_000):
        for maps in (64, 128, 300):
            convolve(steps([tokens]), [weights(maps=maps)], Destination(torch.zeros(1, maps).expand(tokens, maps)))
            chosen.append((launches[-1].constants["GROUPS"], launches[-1].constants["PLACES"]))
    assert {*chosen} <= {*tuned}
    assert chosen[0] == min(tuned)
    assert chosen[-1] == max(tuned)


def positions(launch: Launch) -> int:
    """Return the number of tiles along the places, for the same maps of the first bank."""
    firsts = sorted(launch.call[f"first_tile {bank}"] for bank in range(launch.call["banks"]))
    outputs = launch.call["outputs 0"] * (2 if launch.constants["GATE"] else 1)
    return [*firsts, launch.call["tiles"]][1] // -(-outputs // (64 * launch.constants["GROUPS"]))


def in_shape(shape: TileShape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_launcher, "shape_for", lambda *_: shape)


SIZES = {"unsigned char": 1, "int": 4, "unsigned long long": 8}
"""Bytes of each type in the shared-memory structure. An address takes eight bytes."""


def bytes_of_memory(constants: dict[str, int]) -> int:
    """Return sizeof(Memory) by the layout rules of a compiler."""
    names = {**constants, "LINE_BYTES": plan.LINE_BYTES, "FILTER_BYTES": plan.FILTER_BYTES}
    at, most_aligned = 0, 1
    for member in members(HERE / "product.cu", "Memory"):
        size = SIZES.get(member.kind, 8)
        align = max(size, member.align)
        at = launching.round_up(at, align)
        for bound in member.sizes:
            condition, _, either = bound.partition(" ? ")
            values = either.split(" : ")
            expression = f"({values[0]}) if ({condition}) else ({values[1]})" if either else bound
            size *= int(eval(expression, {}, names))
        at, most_aligned = at + size, max(most_aligned, align)
    return launching.round_up(at, most_aligned)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 200, 200_000])
def test_every_tile_fits_into_shared_memory(
    shape: TileShape, tokens: int, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_shape(shape, monkeypatch)
    forms: list[dict[str, Any]] = [{}, {"stride": 2}, {"left": 400, "dilation": 50}, {"activation": "relu"}]
    for width, inputs, options in product((1, 2, 3, 16, 60, plan.MAX_WIDTH), (2, 64, 300), forms):
        layer, columns = weights(width, inputs, **options), 40
        if "activation" in options:
            target = Destination(maxima=torch.zeros(1, columns))
        else:
            target = Destination(torch.zeros(1, columns).expand(9 * tokens, columns))
        convolve(steps([tokens], inputs), [layer], target)
        launch = launches[-1]
        assert bytes_of_memory(launch.constants) <= launch.constants["SHARED"] == launch.shared <= H200_SHARED_BYTES
        assert launch.constants["X_STAGES"] >= 2
        assert launch.constants["FILTER_STAGES"] >= min(2, width)
        assert launch.constants["LINES"] % 8 == 0
        assert launch.constants["LINES"] >= launch.call["lines"]
        assert launch.kernel.threads == 128 + 128 * launch.constants["GROUPS"] <= 1024


def test_size_of_the_shared_memory_structure() -> None:
    """The expected size is computed by hand."""
    constants = {"X_STAGES": 2, "LINES": 40, "FILTER_STAGES": 3, "GROUPS": 2, "TABLE": 40, "PLACES": 32, "RESIDUAL": 1}
    at = 2 * 40 * 128 + 3 * 2 * 8192 + 8 * 40 + 4 * 2 * 32 + 4 * 2 * 32 + 8 * (2 + 2 + 3 + 3 + 2 + 2)
    assert bytes_of_memory(constants) == -(-at // 1024) * 1024


def test_filters_that_are_too_wide_use_the_framework(launches: list[Launch]) -> None:
    problem = halves(Form("conv", width=999, left=998).arguments([5, 3], 8, 24))
    encoded = run(problem)
    expected = Form("conv").exact(problem)
    assert not launches
    assert expected.steps is not None
    torch.testing.assert_close(encoded.steps, expected.steps.float(), rtol=1e-2, atol=1e-2)


def test_too_many_tokens_are_rejected() -> None:
    x = PackedSteps(torch.zeros(1, 24, dtype=HALF).expand(2**31, 24), torch.tensor([0, 2**31]))
    with pytest.raises(ContractError, match=f"x has {2**31} tokens, one launch takes about {plan.MAX_PLACES}"):
        convolve(x, [weights(activation="relu")], Destination(maxima=torch.zeros(1, 40)))


def test_maxima_are_zeroed_if_several_tiles_share_a_row(launches: list[Launch]) -> None:
    for lengths, alone in (([3, 0, 4], True), ([900, 3], False), ([0, 0], True), ([0], True)):
        maxima = torch.full((len(lengths), 40), 7.0)
        convolve(steps(lengths), [weights(activation="relu")], Destination(maxima=maxima))
        assert bool((maxima == (7.0 if alone else 0.0)).all())
        assert launches[-1].constants["ALONE"] == alone
        assert (positions(launches[-1]) == 1) == alone


def test_launch_starts_early_once_filters_are_packed(launches: list[Launch]) -> None:
    problem = problem_of(Form("conv", width=3, left=1, right=1, activation="relu"))
    for _ in range(2):
        run(problem)
    assert [launch.early for launch in launches] == [False, True]
    launches.clear()
    made = stacked()
    for _ in range(2):
        fused.stack(*made, want=EVERYTHING)
    assert [launch.early for launch in launches] == [False] * 7 + [True] * 7
    assert [launch.call["known"] for launch in launches[:7]] == [0, 1, 1, 1, 1, 1, 1], (
        "an earlier launch has read the same offsets"
    )


def test_filters_are_packed_once_per_tile_height(launches: list[Launch]) -> None:
    layer = weights(maps=300, activation="relu")
    for tokens in (10, 10, 100_000, 200_000):
        convolve(steps([tokens]), [layer], Destination(maxima=torch.zeros(1, 300)))
    first, second, third, fourth = (launch.call["filters 0"] for launch in launches)
    assert first == second != third == fourth


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
    options: dict[str, int], lengths: list[int], shared: bool, launches: list[Launch]
) -> None:
    layer = weights(**options)
    convolve(steps(lengths), [layer], Destination(torch.zeros(1, 40).expand(2000, 40), torch.zeros(len(lengths) + 1).int()))
    constants, call = one_of(launches).constants, one_of(launches).call
    assert constants["SHARED_LINES"] == shared
    assert call["lines"] == constants["PLACES"] + (layer.reach - 1 if shared else 0)
    assert constants["TABLE"] >= (call["lines"] if shared else 3 * constants["PLACES"])


@pytest.mark.parametrize(
    "left, right, with_state, gap",
    [(0, 0, True, 0), (2, 0, True, 2), (2, 0, False, 2), (1, 1, True, 2), (1, 1, False, 1), (0, 2, False, 2), (4, 5, False, 7)],
)
def test_gap_between_rows_has_room_for_padding(
    left: int, right: int, with_state: bool, gap: int, launches: list[Launch]
) -> None:
    """Two rows may share zeros, but not steps of an earlier chunk. A row may have more windows than steps."""
    lengths, layer = [300, 0, 40], weights(left=left, right=right)
    before = torch.zeros(3, left, 24, dtype=HALF) if with_state and left else None
    convolve(steps(lengths), [layer], Destination(torch.zeros(1, 40).expand(400, 40)), LeftContext(before))
    assert one_of(launches).constants["SHARED_LINES"]
    assert one_of(launches).call["batch.gap"] == gap


Source = tuple[str, int, int] | None
"""A step of a row or of its left context; None stands for zeros."""


class KernelView:
    """The rows of a launch, computed from its arguments in the same way as the kernel does."""

    def __init__(self, launch: Launch, lengths: Sequence[int], windows: Sequence[int]) -> None:
        """windows: (rows + 1,) where the windows of each row begin, without gaps."""
        self.call, self.constants = launch.call, launch.constants
        self.lengths, self.windows_at = lengths, windows

    def first_place(self, row: int) -> int:
        return self.windows_at[row] + row * self.call["batch.gap"]

    def row_at(self, place: int) -> int:
        """Return the last row that begins at or before a place."""
        return max((row for row in range(len(self.lengths)) if self.first_place(row) <= place), default=0)

    def line(self, row: int, step: int) -> Source:
        if 0 <= step < self.lengths[row]:
            return "x", row, step
        left = self.call["batch.left"]
        return ("before", row, left + step) if self.call["before"] and -left <= step < 0 else None

    def seen(self, row: int, window: int, tap: int) -> Source:
        """Return the step that a tap of a window reads."""
        left, ahead = self.call["batch.left"], tap * self.call["dilation"]
        if not self.constants["SHARED_LINES"]:
            return self.line(row, window * self.call["batch.stride"] - left + ahead)
        place = self.first_place(row) + window + ahead
        line_row = self.row_at(place)
        return self.line(line_row, place - self.first_place(line_row) - left)


@hypothesis.given(
    lengths=st.lists(st.integers(0, 12) | st.integers(0, 90), min_size=1, max_size=8),
    widths=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    left=st.integers(0, 9),
    right=st.integers(0, 9),
    dilation=st.integers(1, 4),
    stride=st.integers(1, 3),
    with_state=st.booleans(),
)
@hypothesis.settings(max_examples=300, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_every_window_reads_the_steps_of_its_row(
    lengths: list[int],
    widths: list[int],
    left: int,
    right: int,
    dilation: int,
    stride: int,
    with_state: bool,
    launches: list[Launch],
) -> None:
    launches.clear()
    widths = widths if stride == 1 else widths[:1]
    banks = [weights(width, left=left, right=right, dilation=dilation, stride=stride, activation="relu") for width in widths]
    x, before = steps(lengths), torch.zeros(len(lengths), left, 24, dtype=HALF) if with_state and left else None
    convolve(x, banks, Destination(maxima=torch.zeros(len(lengths), 40 * len(banks))), LeftContext(before))
    if not launches:
        assert all(not count for bank in banks for count in bank.steps(torch.tensor(lengths).numpy()))
        return
    launch = one_of(launches)
    for bank in banks:
        counts = bank.steps(torch.tensor(lengths).numpy()).tolist()
        windows = [0, *accumulate(lengths if stride == 1 else counts)]
        batch = KernelView(launch, lengths, windows)
        places = [batch.first_place(row) + window for row, count in enumerate(counts) for window in range(count)]
        assert places == sorted({*places})
        assert not places or places[-1] < positions(launch) * launch.constants["PLACES"]
        for row, count in enumerate(counts):
            assert all(batch.row_at(batch.first_place(row) + window) == row for window in range(count))
            for window, tap in product(range(count), range(len(bank.filters))):
                step = window * stride - left + tap * dilation
                expected = batch.line(row, step)
                assert batch.seen(row, window, tap) == expected


def test_strided_windows_are_packed_by_their_own_offsets(launches: list[Launch]) -> None:
    problem = problem_of(Form("conv", width=3, left=2, stride=2, activation="relu"))
    encoded = run(problem, MAXIMUM)
    assert one_of(launches).call["batch.places"] != problem.x.offsets.data_ptr()
    assert encoded.offsets.tolist() == [0, *accumulate(problem.weights.steps(problem.x.lengths).tolist())]


# Sums of table rows.


@pytest.mark.parametrize("rows", [1, 2, 64, 4096])
@pytest.mark.parametrize("outputs", [1, 40, 300, 2000])
@pytest.mark.parametrize("labels", [0, 6])
def test_every_row_of_ids_has_separate_blocks(rows: int, outputs: int, labels: int, launches: list[Launch]) -> None:
    made = halves(Maker(4).text_cnn([2] * rows, (3, 4), (outputs, outputs), ids="tables", labels=labels))
    fused.text_cnn(*made)
    launch = one_of(launches)
    along, parts, shares = launch.blocks
    split, groups = launch.constants["SPLIT"], launch.kernel.threads // 32 // launch.constants["SPLIT"]
    assert (along, shares) == (rows, 1), "maxima cover all windows"
    assert launch.kernel.threads == 32 * split * groups <= 32 * folded.MAX_WARPS
    assert launch.kernel.cluster == launch.constants["CTAS"] == (parts if labels else 1) <= 8
    assert launch.call["pieces"] == 2 * -(-outputs // 8)
    assert parts <= -(-launch.call["pieces"] // folded.PIECES_PER_WARP)
    assert launch.shared == 4 * (launch.kernel.threads + (2 * outputs if labels else 0)) <= 227 * 1024


def test_several_blocks_share_a_long_row(launches: list[Launch]) -> None:
    for length, several in ((10, False), (5000, True)):
        run(problem_of(Form("conv", width=3, left=2, ids="tables"), [length]), STEPS)
        assert (launches[-1].blocks[2] > 1) == several


# Refusals.


def test_framework_runs_on_a_cpu_and_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.cpu.cache.missing", lambda: "Numba is not installed")
    explanation = "fused: needs an NVIDIA GPU\ntables: needs an NVIDIA GPU\ncpu: Numba is not installed\nframework: chosen"
    assert explain("conv", device="cpu", dtype="float16", hidden=96) == explanation
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(launching, "cupy_installed", lambda: True)
    assert fused.refused(Problem(torch.device("cuda:0"), torch.float32, 96)) == "needs float16 or bfloat16 weights"
