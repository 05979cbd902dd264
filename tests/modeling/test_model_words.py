"""Layers, pools and heads of model.toml against the same mathematics in plain PyTorch and NumPy, in float64 and one row at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels.ragged import Ragged
from service.modeling import store
from service.modeling.encoder import Encoder, Encoding
from service.modeling.spec import ModelSpec, read
from service.modeling.state_slabs import RowSlots
from tests.kernels.inputs import joined, rows
from tests.modeling.random_models import CPU, FEATURES, HIDDEN, Table, model, random_arrays
from tests.modeling.random_models import random_rows as rows_of

LENGTHS = (7, 1, 0, 4, 12)


def random_rows(lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    return rows_of(lengths)


def run(spec: ModelSpec, arrays: Mapping[str, Tensor], data: Sequence[Tensor]) -> tuple[Encoding, list[Tensor]]:
    """Return the encoding of rows and its steps by row."""
    encoding = Encoder(spec, arrays, CPU)(joined(data), sequence=spec.has_steps)
    return encoding, rows(Ragged(encoding.sequence, encoding.offsets)) if encoding.sequence is not None else []


def assert_steps(spec: ModelSpec, expected: Callable[[Tensor, dict[str, Tensor]], Tensor], *, skip_empty: bool = False) -> None:
    """Assert that each row's steps are the result of `expected` for the row and the first layer's weights, in float64."""
    arrays, width = random_arrays(spec), spec.input.features or 0
    data = [row for row in rows_of(LENGTHS, width) if len(row) or not skip_empty]
    wide = {name.removeprefix("layers.0."): array.double() for name, array in arrays.items()}
    for steps, row in zip(run(spec, arrays, data)[1], data, strict=True):
        torch.testing.assert_close(steps.double(), expected(row.double(), wide), rtol=1e-5, atol=1e-5)


def torch_recurrent(module: nn.RNNBase, arrays: Mapping[str, Tensor]) -> nn.RNNBase:
    """Fill a module of torch with the arrays of a layer. Both have the same order of gates."""
    state, names = {}, {"weight_ih": "input", "weight_hh": "recurrent", "weight_hr": "projection", "bias_ih": "bias"}
    for level in range(module.num_layers):
        for direction, suffix in (("forward", ""), ("backward", "_reverse"))[: 1 + module.bidirectional]:
            for theirs, ours in names.items():
                array = arrays.get(f"{level}.{direction}.{ours}")
                if array is not None:
                    state[f"{theirs}_l{level}{suffix}"] = array.T if array.dim() == 2 else array
            state[f"bias_hh_l{level}{suffix}"] = torch.zeros_like(arrays[f"{level}.{direction}.bias"])
    module.double().load_state_dict(state)
    return module.requires_grad_(False)


def after(module: nn.RNNBase, row: Tensor) -> Tensor:
    """Return the steps of a row, which torch refuses to compute for none."""
    width = (module.proj_size or module.hidden_size) * (1 + module.bidirectional)
    return module(row)[0] if len(row) else row.new_zeros(0, width)


@pytest.mark.parametrize(
    "pool, merge",
    [
        ("last", "concat"),
        ("last", "sum"),
        *((pool, "concat") for pool in ("mean", "max", "first", "last_step")),
        ("sum", "sum"),
    ],
)
def test_pools_of_both_directions(pool: str, merge: str) -> None:
    layer = {"kind": "lstm", "hidden": HIDDEN, "bidirectional": True, "merge": merge}
    spec = model(layer, head={"kind": "embed", "pool": pool})
    arrays, data = random_arrays(spec), random_rows()
    module = nn.LSTM(FEATURES, HIDDEN, bidirectional=True)
    torch_recurrent(module, {name.removeprefix("layers.0."): array.double() for name, array in arrays.items()})
    pooled = run(spec, arrays, data)[0].head_output.embedding
    assert pooled is not None
    for vector, row in zip(pooled, data, strict=True):
        steps = after(module, row.double())
        forward, backward = steps.chunk(2, 1)
        merged = steps if merge == "concat" else forward + backward
        if not len(row):
            expected = torch.zeros(merged.shape[1], dtype=torch.float64)
        elif pool == "last":
            ends = forward[-1], backward[0]
            expected = torch.cat(ends) if merge == "concat" else ends[0] + ends[1]
        else:
            pools = {"mean": merged.mean(0), "max": merged.amax(0), "sum": merged.sum(0), "first": merged[0]}
            expected = pools.get(pool, merged[-1])
        torch.testing.assert_close(vector.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["rnn", "lstm", "gru", "sru", "qrnn"])
def test_backward_layer_reads_reversed_rows_and_ends_at_the_first_step(kind: str) -> None:
    spec = model({"kind": kind, "hidden": HIDDEN, "direction": "backward", "depth": 2}, head={"kind": "embed", "pool": "last"})
    onward = model({"kind": kind, "hidden": HIDDEN, "depth": 2}, head={"kind": "embed", "pool": "last"})
    arrays, data = random_arrays(spec), random_rows()
    forward = {name.replace("backward", "forward"): array for name, array in arrays.items()}
    encoding, steps = run(spec, arrays, data)
    expected, reversed_steps = run(onward, forward, [row.flip(0) for row in data])
    for one, other in zip(steps, reversed_steps, strict=True):
        torch.testing.assert_close(one, other.flip(0))
    assert torch.equal(encoding.head_output.embedding, expected.head_output.embedding)  # type: ignore[arg-type]


def sigmoid(values: Any) -> Any:
    return 1 / (1 + np.exp(-values))


@pytest.mark.parametrize("norm", ["before", "after"])
def test_sru_in_both_directions(norm: str) -> None:
    """Each direction has its own projection and its own half of the input as its skip."""
    keys = {"hidden": 3, "bidirectional": True, "scale": 1.7, "projection": 2, "layer_norm": norm}

    def expected(steps: Tensor, arrays: dict[str, Tensor]) -> Tensor:
        tensors, x = {name: array.numpy() for name, array in arrays.items()}, steps.numpy()
        gain, offset = tensors["0.norm"]

        def normalise(values: Any) -> Any:
            return (values - values.mean(1, keepdims=True)) / np.sqrt(values.var(1, keepdims=True) + 1e-5) * gain + offset

        joined = []
        for number, direction in enumerate(("forward", "backward")):
            projection, blocks, bias, cell = (
                tensors[f"0.{direction}.{name}"] for name in ("projection", "input", "bias", "cell")
            )
            seen, c, outputs = normalise(x) if norm == "before" else x, np.zeros(3), []
            for t in range(len(x))[:: -1 if number else 1]:
                z, f, r = np.split(seen[t] @ projection @ blocks, 3)
                f, r = sigmoid(f + cell[:3] * c + bias[:3]), sigmoid(r + cell[3:] * c + bias[3:])
                c = f * c + (1 - f) * z
                outputs.append(r * c + (1 - r) * 1.7 * x[t, 3 * number : 3 * number + 3])
            joined.append(outputs[:: -1 if number else 1])
        result = np.hstack(joined)
        return torch.from_numpy(result if norm == "before" else normalise(result))

    assert_steps(model({"kind": "sru", **keys}, features=6), expected, skip_empty=True)


@pytest.mark.parametrize("pooling", ["f", "fo", "ifo"])
def test_qrnn_backward(pooling: str) -> None:
    """The window of the backward direction reads the steps after the current step."""

    def expected(steps: Tensor, arrays: dict[str, Tensor]) -> Tensor:
        taps, bias, x = arrays["0.backward.input"].numpy(), arrays["0.backward.bias"].numpy(), steps.numpy()
        c, outputs = np.zeros(4), np.zeros((len(x), 4))
        for t in reversed(range(len(x))):
            gates = bias + sum(x[t + j] @ taps[j] for j in range(3) if t + j < len(x))
            z, f, *others = np.split(gates, 1 + len(pooling))
            c = sigmoid(f) * c + (sigmoid(others[1]) if pooling == "ifo" else 1 - sigmoid(f)) * np.tanh(z)
            outputs[t] = sigmoid(others[0]) * c if others else c
        return torch.from_numpy(outputs)

    assert_steps(model({"kind": "qrnn", "hidden": 4, "window": 3, "pooling": pooling, "direction": "backward"}), expected)


def normalised(values: Tensor, norm: Tensor, epsilon: float) -> Tensor:
    gain, offset = norm
    return functional.layer_norm(values, values.shape[-1:], gain, offset, epsilon)


def plain_lstm(row: Tensor, arrays: dict[str, Tensor], **options: Any) -> Tensor:
    """An LSTM one number at a time, with every option of the layer written out."""
    get = {name.removeprefix("0.forward."): array for name, array in arrays.items()}
    gate, inner, outer = options.get("activations", (torch.sigmoid, torch.tanh, torch.tanh))
    limit = options.get("clip", torch.inf)

    def norm(values: Tensor, name: str) -> Tensor:
        return normalised(values, get[name], 1e-5) if name in get else values

    hidden, cell = get.get("start", torch.zeros(HIDDEN).double()), get.get("start_cell", torch.zeros(HIDDEN).double())
    peephole = get.get("peephole", torch.zeros(3 * HIDDEN).double()).chunk(3)
    steps = [torch.zeros(0, HIDDEN).double()]
    for x in row:
        gates = norm(x @ get["input"], "input_norm") + get["bias"] + norm(hidden @ get["recurrent"], "recurrent_norm")
        i, f, g, o = gates.chunk(4)
        i, f = gate((i + peephole[0] * cell).clamp(-limit, limit)), gate((f + peephole[1] * cell).clamp(-limit, limit))
        cell = norm(f * cell + i * inner(g.clamp(-limit, limit)), "cell_norm")
        hidden = gate((o + peephole[2] * cell).clamp(-limit, limit)) * outer(cell)
        steps.append(hidden[None])
    return torch.cat(steps)


def hard_sigmoid(values: Tensor) -> Tensor:
    return (values / 6 + 0.5).clamp(0, 1)


@pytest.mark.parametrize(
    "keys, options",
    [
        ({"peepholes": True}, {}),
        ({"clip": 0.3}, {"clip": 0.3}),
        ({"layer_norm": True}, {}),
        ({"learned_start": True}, {}),
        ({"layer_norm": True, "learned_start": True, "peepholes": True, "clip": 1.5}, {"clip": 1.5}),
        (
            {
                "gate_activation": {"kind": "hard_sigmoid", "alpha": 1 / 6},
                "activation": "softsign",
                "output_activation": {"kind": "scaled_tanh", "alpha": 1.5, "beta": 0.4},
            },
            {"activations": (hard_sigmoid, functional.softsign, lambda values: 1.5 * torch.tanh(0.4 * values))},
        ),
    ],
    ids=str,
)
def test_lstm_variants(keys: Table, options: Table) -> None:
    assert_steps(model({"kind": "lstm", "hidden": HIDDEN, **keys}), lambda row, arrays: plain_lstm(row, arrays, **options))


@pytest.mark.parametrize(
    "layer",
    [
        {"kind": "rnn", "hidden": HIDDEN, "depth": 2},
        {"kind": "lstm", "hidden": HIDDEN, "depth": 2, "layer_norm": True},
        {"kind": "gru", "hidden": HIDDEN, "layer_norm": True},
        {"kind": "lstm", "hidden": HIDDEN, "learned_start": True, "clip": 0.5},
        {"kind": "tcn", "filters": HIDDEN, "levels": 2},
    ],
    ids=str,
)
def test_chunks_continue_from_the_states_in_their_slots(layer: Table) -> None:
    """One row moves to another slot."""
    spec = model(layer, {"kind": "dense", "width": 4, "activation": "relu"})
    arrays, data = random_arrays(spec), random_rows([9, 9])
    encoder = Encoder(spec, arrays, CPU)
    assert encoder.streams
    encoder.allocate_states(6)
    before, pieces = torch.zeros(len(data), dtype=torch.int32), []
    for begin, end in pairwise((0, 2, 3, 9)):
        targets = torch.tensor([2 + begin % 2, 4 + end % 2], dtype=torch.int32)
        encoding = encoder(joined([row[begin:end] for row in data]), sequence=True, slots=RowSlots(before, targets))
        assert encoding.sequence is not None
        pieces.append(rows(Ragged(encoding.sequence, encoding.offsets)))
        before = targets
    for row, expected in enumerate(run(spec, arrays, data)[1]):
        torch.testing.assert_close(torch.cat([piece[row] for piece in pieces]), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "keys",
    [
        {"pads": (2, 0), "dilation": 2},
        {"pads": (0, 3), "stride": 2},
        {"padding": "none", "groups": 3},
        {"padding": "same", "groups": 3, "stride": 2},
        {"padding": "same_upper", "stride": 2},
        {"padding": "same_upper", "stride": 3, "dilation": 2},
        {"padding": "same_lower", "stride": 2},
        {"padding": "same_upper"},
        {"padding": "same_lower"},
    ],
    ids=str,
)
@pytest.mark.parametrize("width", [2, 3])
def test_convolution_with_pads_and_groups(keys: Table, width: int) -> None:
    leaky = {"kind": "leaky_relu", "alpha": 0.3}
    spec = model({"kind": "conv", "filters": 6, "width": width, "activation": "elu" if width == 2 else leaky, **keys})

    def expected(row: Tensor, arrays: dict[str, Tensor]) -> Tensor:
        padded = functional.pad(row.T, padding_of(keys, len(row), (width - 1) * keys.get("dilation", 1)))
        if padded.shape[1] <= (width - 1) * keys.get("dilation", 1):
            return row.new_zeros(0, 6)
        options = {name: keys[name] for name in ("stride", "dilation", "groups") if name in keys}
        maps = functional.conv1d(padded, arrays["filters"].permute(2, 1, 0), arrays["bias"], **options).T
        return functional.elu(maps) if width == 2 else functional.leaky_relu(maps, 0.3)

    assert_steps(spec, expected, skip_empty=True)


def padding_of(keys: Table, steps: int, around: int) -> tuple[int, int]:
    """Return the zero steps on both sides, as Keras and ONNX define them for a row of this length."""
    if "pads" in keys:
        left, right = keys["pads"]
        return left, right
    stride = keys.get("stride", 1)
    needed = around if keys["padding"] == "same" else max((-(-steps // stride) - 1) * stride + around + 1 - steps, 0)
    less, more = needed // 2, needed - needed // 2
    return {"none": (0, 0), "same_lower": (more, less)}.get(keys["padding"], (less, more))


@pytest.mark.parametrize(
    "keys",
    [
        {"width": 2, "stride": 2},
        {"width": 3},
        {"width": 3, "stride": 2, "padding": "same_upper"},
        {"width": 3, "pads": (1, 2), "stride": 2},
        {"width": 3, "pads": (1, 1), "count_padding": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_pool_reduces_windows(keys: Table, reduce: str) -> None:
    spec = model({"kind": "pool", "reduce": reduce, **keys})

    def expected(row: Tensor, _: dict[str, Tensor]) -> Tensor:
        left, right = padding_of({"padding": "none", **keys}, len(row), keys["width"] - 1)
        stride, steps = keys.get("stride", 1), []
        for first in range(-left, len(row) + right - keys["width"] + 1, stride):
            window = row[max(first, 0) : first + keys["width"]]
            count = keys["width"] if keys.get("count_padding") else len(window)
            steps.append(window.amax(0) if reduce == "max" else window.sum(0) / count)
        return torch.stack(steps) if steps else row.new_zeros(0, FEATURES)

    assert_steps(spec, expected, skip_empty=True)


def test_layers_of_single_steps() -> None:
    def dense(row: Tensor, arrays: dict[str, Tensor]) -> Tensor:
        return functional.gelu(row @ arrays["weight"] + arrays["bias"])

    assert_steps(model({"kind": "dense", "width": 4, "activation": "gelu"}), dense)
    assert_steps(model({"kind": "activation", "activation": "selu"}), lambda row, _: functional.selu(row))
    assert_steps(
        model({"kind": "layer_norm", "epsilon": 0.1}),
        lambda row, arrays: normalised(row, arrays["norm"], 0.1),
    )
    assert_steps(
        model({"kind": "batch_norm", "epsilon": 0.1}),
        lambda row, arrays: (
            (row - arrays["norm"][2]) / (arrays["norm"][3] + 0.1).sqrt() * arrays["norm"][0] + arrays["norm"][1]
        ),
    )


@pytest.mark.parametrize("fold", ["auto", "never"])
@pytest.mark.parametrize(
    "pool, layers", [("mean", ()), ("sum", ()), ("max", ({"kind": "dense", "width": 3, "activation": "tanh"},))]
)
def test_model_of_an_embedding_pools_its_vectors(pool: str, layers: tuple[Table, ...], fold: str) -> None:
    """A bag of words."""
    spec = model({"kind": "embedding", "width": 4}, *layers, head={"kind": "embed", "pool": pool}, ids=9)
    arrays = random_arrays(spec)
    data = [torch.tensor(ids, dtype=torch.int32) for ids in ([1, 8, 1], [0], [3, 3, 3, 2, 7])]
    pooled = Encoder(spec.model_copy(update={"fold": fold}), arrays, CPU)(joined(data)).head_output.embedding
    assert pooled is not None
    for vector, ids in zip(pooled, data, strict=True):
        steps = arrays["layers.0.weight"][ids.long()]
        if layers:
            steps = torch.tanh(steps @ arrays["layers.1.weight"] + arrays["layers.1.bias"])
        expected = {"mean": steps.mean(0), "sum": steps.sum(0), "max": steps.amax(0)}[pool]
        torch.testing.assert_close(vector, expected)


def test_several_running_pools_cover_all_chunks_of_a_sequence() -> None:
    spec = model({"kind": "gru", "hidden": HIDDEN}, head={"kind": "embed", "pool": ["last", "max", "mean", "last_step"]})
    arrays, data = random_arrays(spec), random_rows([9, 9])
    whole = run(spec, arrays, data)[0].head_output.embedding
    encoder = Encoder(spec, arrays, CPU)
    encoder.allocate_states(4)
    slots = torch.tensor([2, 3], dtype=torch.int32)
    encoder(joined([row[:4] for row in data]), slots=RowSlots(torch.zeros_like(slots), slots))
    pooled = encoder(joined([row[4:] for row in data]), slots=RowSlots(slots, slots)).head_output.embedding
    torch.testing.assert_close(pooled, whole)


@pytest.mark.parametrize("pool", ["attention", "first", "sum"])
def test_pools_that_need_all_steps_do_not_stream(pool: str) -> None:
    spec = model({"kind": "gru", "hidden": HIDDEN}, head={"kind": "embed", "pool": pool})
    assert not Encoder(spec, random_arrays(spec), CPU).streams


def test_words_survive_writing_and_reading(tmp_path: Path) -> None:
    elu = {"kind": "elu", "alpha": 0.5}
    lstm = {"kind": "lstm", "hidden": 4, "gate_activation": {"kind": "hard_sigmoid", "alpha": 0.25}, "activation": "softsign"}
    layers = lstm, {"kind": "conv", "filters": 2, "width": 2, "pads": (1, 0), "activation": elu}
    spec = model(*layers, head={"kind": "embed", "pool": ["last", "max"], "dense": [{"width": 2, "activation": elu}]})
    written = store.write(tmp_path / "words" / "1", spec, random_arrays(spec), card="made up")
    assert read(tmp_path / "words" / "1") == written == spec.model_copy(update={"sha256": written.sha256})
    assert ModelSpec.model_validate_json(spec.model_dump_json()) == spec
