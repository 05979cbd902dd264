"""What the launchers of the convolution's CUDA kernels work out without a GPU: which launches there are, their shapes and grids, and which
steps each window sees."""

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
from kernels.contract import ContractError, ConvState, ConvWeights, Outputs, Ragged
from kernels.conv import folded, launch, plan
from kernels.conv import product as launched
from kernels.conv.plan import Shape
from kernels.conv.product import Context, Steps, Target, convolve
from kernels.conv.rows import BANKS
from kernels.tuning import tuned
from tests.kernels.families import Form
from tests.kernels.inputs import EVERYTHING, Given
from tests.kernels.sources import Member, members, text, told
from tests.kernels.stacks import Maker, Stack

H200_SHARED_BYTES = 232_448
PROCESSORS = 132
HERE = plan.HERE
SHAPES = [Shape(1, 32), Shape(1, 64), Shape(1, 128), Shape(2, 64), Shape(2, 128), Shape(2, 256)]
HALF = torch.float16
LAST, MAXIMUM, STEPS = Outputs(last=True), Outputs(max=True), Outputs(steps=True)
LENGTHS = [9, 0, 1, 3, 14, 2]


def call_of(source: str) -> list[str]:
    """The members of its Call, in their order; of an array, each."""

    def each(one: Member) -> list[str]:
        if one.kind == "Rows":
            return [f"{one.name}.{inner.name}" for inner in members(HERE / "conv.cuh", "Rows")]
        return [f"{one.name} {number}" for number in range(BANKS)] if one.sizes else [one.name]

    return [name for one in members(HERE / source, "Call") for name in each(one)]


CALLS = {name: call_of(name) for name in ("product.cu", "folded.cu")}


@dataclass
class Kernel:
    """Stands for a compiled kernel: how it was specialised."""

    source: Path
    threads: int
    cluster: int
    constants: dict[str, int]
    launches: list[Launched]

    def launch(self, blocks: tuple[int, int, int], shared: int, members: Sequence[int], *, early: bool) -> None:
        call = dict(zip(CALLS[self.source.name], members, strict=True))
        self.launches.append(Launched(self, blocks, shared, call, early))


@dataclass
class Launched:
    """What a kernel was launched with."""

    kernel: Kernel
    blocks: tuple[int, int, int]
    shared: int
    call: dict[str, int]
    early: bool
    constants: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.constants = self.kernel.constants


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launched]]:
    """As on an H200 whose stream is this list; what is found meanwhile is not used after."""
    made: list[Launched] = []
    caches: list[Any] = [
        one for module in (plan, folded, launching) for one in vars(module).values() if hasattr(one, "cache_clear")
    ]

    def compiled(source: Path, device: int, *, threads: int, cluster: int = 1, **constants: int) -> Kernel:
        return Kernel(source, threads, cluster, constants, made)

    for module in (plan, folded):
        monkeypatch.setattr(module, "compiled", compiled)
    for module in (launched, folded):
        monkeypatch.setattr(module, "current", lambda _: nullcontext())
    monkeypatch.setattr(plan, "shared_limit", lambda _: H200_SHARED_BYTES)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=PROCESSORS))
    for cached in caches:
        cached.cache_clear()
    yield made
    for cached in caches:
        cached.cache_clear()


def given(form: Form, lengths: Sequence[int] = LENGTHS, outputs: int = 40, inputs: int = 24) -> Given:
    """In float16, but for ids."""
    made: Given = halves(form.given(lengths, outputs, inputs))
    return made


def halves(given: Any) -> Any:
    return given.mapped(lambda array: array.half() if array.is_floating_point() else array)


def run(given: Given, want: Outputs = EVERYTHING) -> Any:
    return launch.conv(*given, want=want)


def weights(width: int = 3, inputs: int = 24, maps: int = 40, **others: Any) -> ConvWeights:
    return ConvWeights(torch.zeros(width, inputs, maps, dtype=HALF), torch.zeros(maps, dtype=HALF), **others)


def steps(lengths: Sequence[int], inputs: int = 24) -> Steps:
    """Of which no memory is taken."""
    data = torch.zeros(1, inputs, dtype=HALF).expand(sum(lengths), inputs)
    return Steps(data, torch.tensor([0, *accumulate(lengths)], dtype=torch.int32))


def one_of(launches: list[Launched]) -> Launched:
    (found,) = launches
    return found


# What the sources are told.


def test_a_kernel_is_told_what_its_source_asks_for(launches: list[Launched]) -> None:
    run(given(Form("conv", width=3)))
    run(given(Form("conv", width=3, ids="tables")))
    assert [one.kernel.source for one in launches] == [HERE / "product.cu", HERE / "folded.cu"]
    for one in launches:
        assert one.constants.keys() | {"THREADS"} == told(one.kernel.source)
        assert {type(value) for value in one.constants.values()} == {int}
        assert {type(value) for value in one.call.values()} == {int}


def test_the_launcher_lists_the_members_of_a_call_in_their_order(launches: list[Launched]) -> None:
    x, layer, state = given(Form("conv", width=3, left=4, right=1, dilation=2, activation="glu"))
    encoded = run(Given(Ragged(x.data, x.offsets.long()), layer, state), STEPS)
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
    rows = {"rows": 6, "wide": 1, "most": 0, "every": 1, "most_out": 0, "left": 4, "right": 1, "stride": 1}
    expected = sizes | {f"batch.{name}": value for name, value in rows.items()}
    assert {name: call[name] for name in expected} == expected
    assert {name for name in ("ids", "lines_after", "residual", "maxima", "filters 1", "width 7") if call[name]} == set()


def test_ids_are_read_where_they_are(launches: list[Launched]) -> None:
    for wide in (torch.int32, torch.int64):
        x, layer, _ = given(Form("conv", width=3, left=1, right=1, activation="relu", ids="embedding"))
        x = Ragged(x.data.to(wide), x.offsets)
        run(Given(x, layer, None))
        call = launches[-1].call
        assert (call["ids"], call["wide_ids"]) == (x.data.data_ptr(), wide == torch.int64)
        assert call["x"] in {array.data_ptr() for array in (layer.embedding, layer.packed["embedding"])}
        assert not call["before"] and not call["after"], "of ids no state is kept"


def test_tables_are_read_where_they_are(launches: list[Launched]) -> None:
    x, layer, _ = given(Form("conv", width=3, left=2, ids="tables"), outputs=40)
    encoded = run(Given(x, layer, None), STEPS)
    call = one_of(launches).call
    assert (call["tables 0"], call["ids"], call["steps"]) == (
        layer.tables.data_ptr(),
        x.data.data_ptr(),
        encoded.steps.data_ptr(),
    )
    assert (call["height"], call["stride 0"], call["width 0"], call["columns"]) == (layer.tables.shape[1], 40, 3, 40)


@pytest.mark.parametrize("outputs", [33, 40])
def test_tables_whose_rows_begin_anywhere_are_laid_out_anew_once(outputs: int, launches: list[Launched]) -> None:
    x, layer, _ = given(Form("conv", width=3, left=2, ids="tables"), outputs=outputs)
    for _ in range(2):
        run(Given(x, layer, None))
    first, second = (one.call["tables 0"] for one in launches)
    assert first == second
    assert first % 16 == 0
    assert (first == layer.tables.data_ptr()) == (outputs % 8 == 0)


# Which launches there are.


def text_cnn(ids: str, widths: Sequence[int], *, labels: int = 0, lengths: Sequence[int] = LENGTHS, **others: Any) -> Any:
    made = Maker(24).text_cnn(lengths, widths, [20 + width for width in widths], ids=ids, labels=labels, **others)
    return launch.text_cnn(*halves(made))


@pytest.mark.parametrize("ids", ["", "embedding", "tables"])
@pytest.mark.parametrize("widths", [(3, 4, 5), (1,), (5, 1, 3, 2, 4, 6, 8, 7)], ids=str)
def test_a_text_cnn_is_one_launch(ids: str, widths: tuple[int, ...], launches: list[Launched]) -> None:
    text_cnn(ids, widths, labels=6 if ids == "tables" else 0)
    call = one_of(launches).call
    assert call["banks"] == len(widths)
    assert [call[f"width {bank}"] for bank in range(BANKS)] == [*widths, *[0] * (BANKS - len(widths))]
    outputs = [20 + width for width in widths]
    assert [call[f"outputs {bank}"] for bank in range(len(widths))] == outputs
    assert [call[f"first_column {bank}"] for bank in range(len(widths))] == [0, *accumulate(outputs)][:-1]
    assert call["columns"] == sum(outputs)


def test_more_widths_than_a_launch_takes_or_what_is_no_text_cnn_is_a_launch_each(launches: list[Launched]) -> None:
    text_cnn("", range(1, BANKS + 2))
    assert len(launches) == BANKS + 1
    launches.clear()
    x, relu = given(Form("conv", width=3)).x, partial(weights, activation="relu")
    launch.text_cnn(x, [weights(activation="tanh"), weights(4, activation="tanh")], None)
    launch.text_cnn(x, [relu(), relu(left=1)], None)
    assert [one.call["banks"] for one in launches] == [1] * 4


def test_windows_that_begin_in_other_places_are_a_launch_each(launches: list[Launched]) -> None:
    """Of other widths and more than one step apart, rows give different numbers of them."""
    x = given(Form("conv", width=3)).x
    launch.text_cnn(x, [weights(width, activation="relu", stride=2) for width in (2, 5)], None)
    assert [one.call["banks"] for one in launches] == [1, 1]


def test_a_classifier_follows_in_the_same_launch_where_it_is_stored_as_the_tables_are(launches: list[Launched]) -> None:
    made = halves(Maker(24).text_cnn(LENGTHS, (3, 4), (40, 40), ids="tables", labels=6))
    scores = launch.text_cnn(*made).scores
    call = one_of(launches).call
    assert scores is not None
    assert (call["scores"], call["labels"]) == (scores.data_ptr(), 6)
    assert one_of(launches).constants["CLASSIFIES"]
    wide = made._replace(classifier=(made.classifier[0].float(), made.classifier[1].float()))
    launch.text_cnn(*wide)
    assert not launches[-1].constants["CLASSIFIES"] and not launches[-1].call["scores"]


def stacked(*, states: bool = False) -> Stack:
    maker = Maker(24)
    made: Stack = halves(maker.stack(LENGTHS, *maker.tcn([24, 40, 40], width=3), with_states=states))
    return made


@pytest.mark.parametrize("want, states", [(EVERYTHING, False), (LAST, False), (EVERYTHING, True)])
def test_a_stack_is_a_launch_for_each_layer_and_each_projection(want: Outputs, states: bool, launches: list[Launched]) -> None:
    made = stacked(states=states)
    launch.stack(*made, want=want)
    projections = [block.projection for block in made.blocks if block.projection is not None]
    assert len(launches) == len(made.layers) + len(projections) == 7
    assert [one.constants["RESIDUAL"] for one in launches].count(1) == 3
    assert [one.constants["STEPS_FLOAT32"] for one in launches] == [0] * 6 + [1], "what leaves the stack is float32"
    assert [bool(one.call["after"]) for one in launches].count(True) == (len(made.layers) if states else 0)


def test_of_the_last_step_alone_only_those_are_computed_that_it_depends_on(launches: list[Launched]) -> None:
    launch.stack(*stacked(), want=LAST)
    assert all(one.constants["THINNED"] for one in launches)
    counts = [(one.call["batch.most_out"], one.call["batch.every_out"]) for one in launches]
    assert counts == [(27, 1), (13, 2), (11, 2), (5, 4), (5, 4), (3, 4), (1, 1)]
    added = [[one.call[f"residual_{name}"] for name in ("most", "every", "apart")] for one in launches]
    assert [numbers for numbers in added if any(numbers)] == [[0, 1, 2], [5, 4, 1], [5, 4, 1]]


def test_states_in_slots_that_a_kernel_can_write_stay_where_they_are(launches: list[Launched]) -> None:
    x, layer, _ = given(Form("conv", width=3, left=2), [3, 0, 4])
    slots, sources = torch.tensor([8, 1, 2]), torch.tensor([0, 0, 0])
    for slab, in_place in ((torch.ones(9, 2, 24, dtype=HALF), True), (torch.ones(9, 2, 24), False)):
        state = ConvState(slab, slots)
        assert launch.conv(x, layer, state, want=STEPS).state is state
        assert launch.conv(x, layer, ConvState(slab, slots, sources), want=STEPS).state == state
        call = launches[-1].call
        assert (call["after"] == slab.data_ptr()) == in_place
        assert bool(call["lines_after"]) == in_place
        assert call["before"] not in (0, slab.data_ptr()), "another block may look for the old one when the new one is there"


@pytest.mark.parametrize("ids", ["", "embedding", "tables"])
def test_without_rows_nothing_is_launched(ids: str, launches: list[Launched]) -> None:
    for want in (EVERYTHING, LAST, MAXIMUM):
        encoded = run(given(Form("conv", width=3, left=2, activation="relu", ids=ids), []), want)
        assert {len(array) for array in (encoded.steps, encoded.last, encoded.max) if array is not None} == {0}
    text_cnn(ids, (3, 4), labels=6, lengths=[])
    assert not launches


@pytest.mark.parametrize("want, activation", [(STEPS, "none"), (LAST, "none"), (MAXIMUM, "relu")])
@pytest.mark.parametrize("options", [{"left": 1}, {"left": 1, "stride": 2}, {}, {"left": 2}], ids=str)
def test_rows_without_steps_still_have_what_stands_before_their_next_chunk_and_their_outputs(
    options: dict[str, int], want: Outputs, activation: str, launches: list[Launched]
) -> None:
    """Memory that no launch writes holds anything."""
    x, layer, state = given(Form("conv", width=3, activation=activation, **options), [0, 0])
    encoded = run(Given(x, layer, state), want)
    if layer.left:
        assert [one.call["after"] for one in launches] == [encoded.state.left.data_ptr()]
    if want == MAXIMUM:
        assert one_of(launches).call["maxima"] == encoded.max.data_ptr()


# Tiles.


@pytest.mark.parametrize("tokens", [1, 31, 64, 65, 500, 4096, 100_000])
@pytest.mark.parametrize("maps", [1, 64, 65, 300, 1024])
def test_a_launch_has_no_more_blocks_than_the_device_multiprocessors(tokens: int, maps: int, launches: list[Launched]) -> None:
    for banks, rows in product(([3], [3, 4, 5], [1] * BANKS), (1, 7)):
        x = steps([tokens, *[0] * (rows - 1)])
        outputs = torch.zeros(rows, maps * len(banks))
        convolve(x, [weights(width, maps=maps, activation="relu") for width in banks], Target(maxima=outputs))
        one = launches[-1]
        blocks, call = one.blocks[0], one.call
        assert one.blocks == (min(call["tiles"], PROCESSORS), 1, 1)
        shape = Shape(one.constants["GROUPS"], one.constants["PLACES"])
        each = call["tiles"] // len(banks)
        assert each == positions(one) * -(-maps // shape.maps)
        firsts = [call[f"first_tile {bank}"] for bank in range(len(banks))]
        assert sorted(firsts) == [each * bank for bank in range(len(banks))], "every tile is that of one bank"
        assert blocks >= 1
        assert (positions(one) - 1) * shape.places < tokens + rows * 2


def test_every_measured_shape_is_one_that_the_source_has() -> None:
    for file in (HERE / "tuned").glob("*.json"):
        found = tuned(HERE / "tuned", file.stem)
        assert found["date"]
        for shape in found["shapes"]:
            assert shape["groups"] in (1, 2)
            assert f"PRODUCT_COLUMNS == {shape['places']}\n" in text(HERE / "product.cu")
    assert "H200" in tuned(HERE / "tuned", "NVIDIA H200")["device"]


def test_more_steps_have_larger_tiles_and_every_measured_shape_is_taken(launches: list[Launched]) -> None:
    found = [(shape["groups"], shape["places"]) for shape in tuned(HERE / "tuned", "NVIDIA H200")["shapes"]]
    taken = []
    for tokens in (1, 100, 1000, 3000, 6000, 12_000, 30_000, 100_000, 1_000_000):
        for maps in (64, 128, 300):
            convolve(steps([tokens]), [weights(maps=maps)], Target(torch.zeros(1, maps).expand(tokens, maps)))
            taken.append((launches[-1].constants["GROUPS"], launches[-1].constants["PLACES"]))
    assert {*taken} <= {*found}
    assert taken[0] == min(found)
    assert taken[-1] == max(found)


def positions(one: Launched) -> int:
    """How many tiles lie behind one another, for the same maps of the first bank."""
    firsts = sorted(one.call[f"first_tile {bank}"] for bank in range(one.call["banks"]))
    outputs = one.call["outputs 0"] * (2 if one.constants["GATE"] else 1)
    return [*firsts, one.call["tiles"]][1] // -(-outputs // (64 * one.constants["GROUPS"]))


def in_shape(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "shape_for", lambda *_: shape)


SIZES = {"unsigned char": 1, "int": 4, "unsigned long long": 8}
"""Of what a structure in shared memory holds; an address takes eight bytes."""


def bytes_of_memory(constants: dict[str, int]) -> int:
    """sizeof(Memory), laid out as a compiler does."""
    names = {**constants, "LINE_BYTES": plan.LINE_BYTES, "FILTER_BYTES": plan.FILTER_BYTES}
    at, most_aligned = 0, 1
    for one in members(HERE / "product.cu", "Memory"):
        size = SIZES.get(one.kind, 8)
        align = max(size, one.align)
        at = launching.round_up(at, align)
        for bound in one.sizes:
            condition, _, either = bound.partition(" ? ")
            values = either.split(" : ")
            expression = f"({values[0]}) if ({condition}) else ({values[1]})" if either else bound
            size *= int(eval(expression, {}, names))
        at, most_aligned = at + size, max(most_aligned, align)
    return launching.round_up(at, most_aligned)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 200, 200_000])
def test_every_tile_has_room_on_a_multiprocessor(
    shape: Shape, tokens: int, launches: list[Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_shape(shape, monkeypatch)
    forms: list[dict[str, Any]] = [{}, {"stride": 2}, {"left": 400, "dilation": 50}, {"activation": "relu"}]
    for width, inputs, options in product((1, 2, 3, 16, 60, plan.WIDEST), (2, 64, 300), forms):
        layer, columns = weights(width, inputs, **options), 40
        if "activation" in options:
            target = Target(maxima=torch.zeros(1, columns))
        else:
            target = Target(torch.zeros(1, columns).expand(9 * tokens, columns))
        convolve(steps([tokens], inputs), [layer], target)
        one = launches[-1]
        assert bytes_of_memory(one.constants) <= one.constants["SHARED"] == one.shared <= H200_SHARED_BYTES
        assert one.constants["X_STAGES"] >= 2
        assert one.constants["FILTER_STAGES"] >= min(2, width)
        assert one.constants["LINES"] % 8 == 0
        assert one.constants["LINES"] >= one.call["lines"]
        assert one.kernel.threads == 128 + 128 * one.constants["GROUPS"] <= 1024


def test_the_structure_in_shared_memory_is_laid_out_as_it_is_declared() -> None:
    """By hand, once."""
    constants = {"X_STAGES": 2, "LINES": 40, "FILTER_STAGES": 3, "GROUPS": 2, "TABLE": 40, "PLACES": 32, "RESIDUAL": 1}
    at = 2 * 40 * 128 + 3 * 2 * 8192 + 8 * 40 + 4 * 2 * 32 + 4 * 2 * 32 + 8 * (2 + 2 + 3 + 3 + 2 + 2)
    assert bytes_of_memory(constants) == -(-at // 1024) * 1024


def test_filters_that_have_no_room_are_not_multiplied_by_the_kernel(launches: list[Launched]) -> None:
    problem = halves(Form("conv", width=999, left=998).given([5, 3], 8, 24))
    encoded = run(problem)
    expected = Form("conv").exact(problem)
    assert not launches
    assert expected.steps is not None
    torch.testing.assert_close(encoded.steps, expected.steps.float(), rtol=1e-2, atol=1e-2)


def test_more_tokens_than_can_be_counted_are_refused() -> None:
    x = Steps(torch.zeros(1, 24, dtype=HALF).expand(2**31, 24), torch.tensor([0, 2**31]))
    with pytest.raises(ContractError, match=f"x has {2**31} tokens, at most about {plan.MOST_PLACES} are taken at once"):
        convolve(x, [weights(activation="relu")], Target(maxima=torch.zeros(1, 40)))


def test_maxima_are_set_to_zero_where_several_tiles_tell_of_them(launches: list[Launched]) -> None:
    for lengths, alone in (([3, 0, 4], True), ([900, 3], False), ([0, 0], True), ([0], True)):
        maxima = torch.full((len(lengths), 40), 7.0)
        convolve(steps(lengths), [weights(activation="relu")], Target(maxima=maxima))
        assert bool((maxima == (7.0 if alone else 0.0)).all())
        assert launches[-1].constants["ALONE"] == alone
        assert (positions(launches[-1]) == 1) == alone


def test_a_launch_may_begin_early_once_its_filters_are_packed(launches: list[Launched]) -> None:
    problem = given(Form("conv", width=3, left=1, right=1, activation="relu"))
    for _ in range(2):
        run(problem)
    assert [one.early for one in launches] == [False, True]
    launches.clear()
    made = stacked()
    for _ in range(2):
        launch.stack(*made, want=EVERYTHING)
    assert [one.early for one in launches] == [False] * 7 + [True] * 7
    assert [one.call["known"] for one in launches[:7]] == [0, 1, 1, 1, 1, 1, 1], "offsets that a launch before has seen"


def test_filters_are_packed_once_for_tiles_of_as_many_maps(launches: list[Launched]) -> None:
    layer = weights(maps=300, activation="relu")
    for tokens in (10, 10, 100_000, 200_000):
        convolve(steps([tokens]), [layer], Target(maxima=torch.zeros(1, 300)))
    first, second, third, fourth = (one.call["filters 0"] for one in launches)
    assert first == second != third == fourth


# Which lines a tile has, and which steps each window sees.


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
def test_taps_share_lines_where_that_is_worth_the_room(
    options: dict[str, int], lengths: list[int], shared: bool, launches: list[Launched]
) -> None:
    layer = weights(**options)
    convolve(steps(lengths), [layer], Target(torch.zeros(1, 40).expand(2000, 40), torch.zeros(len(lengths) + 1).int()))
    constants, call = one_of(launches).constants, one_of(launches).call
    assert constants["SHARED_LINES"] == shared
    assert call["lines"] == constants["PLACES"] + (layer.reach - 1 if shared else 0)
    assert constants["TABLE"] >= (call["lines"] if shared else 3 * constants["PLACES"])


@pytest.mark.parametrize(
    "left, right, with_state, gap",
    [(0, 0, True, 0), (2, 0, True, 2), (2, 0, False, 2), (1, 1, True, 2), (1, 1, False, 1), (0, 2, False, 2), (4, 5, False, 7)],
)
def test_between_rows_there_is_room_for_what_stands_around_them(
    left: int, right: int, with_state: bool, gap: int, launches: list[Launched]
) -> None:
    """Zeros may be those of two rows, the steps of the chunk before may not; and windows may be more than steps."""
    lengths, layer = [300, 0, 40], weights(left=left, right=right)
    before = torch.zeros(3, left, 24, dtype=HALF) if with_state and left else None
    convolve(steps(lengths), [layer], Target(torch.zeros(1, 40).expand(400, 40)), Context(before))
    assert one_of(launches).constants["SHARED_LINES"]
    assert one_of(launches).call["batch.gap"] == gap


Seen = tuple[str, int, int] | None
"""A step of a row, or of what stands before it; None is zeros."""


class Batch:
    """What a launch makes of rows, as the kernel finds it."""

    def __init__(self, one: Launched, lengths: Sequence[int], windows: Sequence[int]) -> None:
        """windows: (rows + 1,) where each row's begin, without what is between rows."""
        self.call, self.constants = one.call, one.constants
        self.lengths, self.windows_at = lengths, windows

    def first_place(self, row: int) -> int:
        return self.windows_at[row] + row * self.call["batch.gap"]

    def row_at(self, place: int) -> int:
        """The last one that begins at or before it."""
        return max((row for row in range(len(self.lengths)) if self.first_place(row) <= place), default=0)

    def line(self, row: int, step: int) -> Seen:
        if 0 <= step < self.lengths[row]:
            return "x", row, step
        left = self.call["batch.left"]
        return ("before", row, left + step) if self.call["before"] and -left <= step < 0 else None

    def seen(self, row: int, window: int, tap: int) -> Seen:
        """By a tap of a window, at the place where that stands."""
        left, ahead = self.call["batch.left"], tap * self.call["dilation"]
        if not self.constants["SHARED_LINES"]:
            return self.line(row, window * self.call["batch.stride"] - left + ahead)
        place = self.first_place(row) + window + ahead
        other = self.row_at(place)
        return self.line(other, place - self.first_place(other) - left)


@hypothesis.given(
    lengths=st.lists(st.integers(0, 12) | st.integers(0, 90), min_size=1, max_size=8),
    widths=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    left=st.integers(0, 9),
    right=st.integers(0, 9),
    dilation=st.integers(1, 4),
    stride=st.integers(1, 3),
    with_state=st.booleans(),
)
@hypothesis.settings(max_examples=300, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_every_window_of_every_row_has_a_place_and_sees_its_own_steps(
    lengths: list[int],
    widths: list[int],
    left: int,
    right: int,
    dilation: int,
    stride: int,
    with_state: bool,
    launches: list[Launched],
) -> None:
    launches.clear()
    widths = widths if stride == 1 else widths[:1]
    banks = [weights(width, left=left, right=right, dilation=dilation, stride=stride, activation="relu") for width in widths]
    x, before = steps(lengths), torch.zeros(len(lengths), left, 24, dtype=HALF) if with_state and left else None
    convolve(x, banks, Target(maxima=torch.zeros(len(lengths), 40 * len(banks))), Context(before))
    if not launches:
        assert all(not each for bank in banks for each in bank.steps(torch.tensor(lengths).numpy()))
        return
    one = one_of(launches)
    for bank in banks:
        counts = bank.steps(torch.tensor(lengths).numpy()).tolist()
        windows = [0, *accumulate(lengths if stride == 1 else counts)]
        batch = Batch(one, lengths, windows)
        places = [batch.first_place(row) + window for row, count in enumerate(counts) for window in range(count)]
        assert places == sorted({*places})
        assert not places or places[-1] < positions(one) * one.constants["PLACES"]
        for row, count in enumerate(counts):
            assert all(batch.row_at(batch.first_place(row) + window) == row for window in range(count))
            for window, tap in product(range(count), range(len(bank.filters))):
                step = window * stride - left + tap * dilation
                expected = batch.line(row, step)
                assert batch.seen(row, window, tap) == expected


def test_windows_of_rows_that_give_fewer_stand_where_their_own_begin(launches: list[Launched]) -> None:
    problem = given(Form("conv", width=3, left=2, stride=2, activation="relu"))
    encoded = run(problem, MAXIMUM)
    assert one_of(launches).call["batch.places"] != problem.x.offsets.data_ptr()
    assert encoded.offsets.tolist() == [0, *accumulate(problem.weights.steps(problem.x.lengths).tolist())]


# Sums of rows of tables.


@pytest.mark.parametrize("rows", [1, 2, 64, 4096])
@pytest.mark.parametrize("outputs", [1, 40, 300, 2000])
@pytest.mark.parametrize("labels", [0, 6])
def test_every_row_of_ids_has_blocks_of_its_own(rows: int, outputs: int, labels: int, launches: list[Launched]) -> None:
    made = halves(Maker(4).text_cnn([2] * rows, (3, 4), (outputs, outputs), ids="tables", labels=labels))
    launch.text_cnn(*made)
    one = one_of(launches)
    along, parts, shares = one.blocks
    split, groups = one.constants["SPLIT"], one.kernel.threads // 32 // one.constants["SPLIT"]
    assert (along, shares) == (rows, 1), "maxima are those of all windows"
    assert one.kernel.threads == 32 * split * groups <= 32 * folded.MOST_WARPS
    assert one.kernel.cluster == one.constants["CTAS"] == (parts if labels else 1) <= 8
    assert one.call["pieces"] == 2 * -(-outputs // 8)
    assert parts <= -(-one.call["pieces"] // folded.PIECES_AT_ONCE)
    assert one.shared == 4 * (one.kernel.threads + (2 * outputs if labels else 0)) <= 227 * 1024


def test_where_every_step_is_wanted_several_blocks_share_a_long_row(launches: list[Launched]) -> None:
    for length, several in ((10, False), (5000, True)):
        run(given(Form("conv", width=3, left=2, ids="tables"), [length]), STEPS)
        assert (launches[-1].blocks[2] > 1) == several


# What is refused.


def test_on_a_cpu_or_in_float32_the_framework_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "fused: runs on an NVIDIA GPU\nframework: chosen"
    assert explain("conv", device="cpu", dtype="float16", hidden=96) == said
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(launching, "installed", lambda: True)
    assert launch.refused(Problem(torch.device("cuda:0"), torch.float32, 96)) == "its weights are float16 or bfloat16"
