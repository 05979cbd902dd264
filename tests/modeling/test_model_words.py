"""Layers and pools of model.toml that no file of ONNX has, against the same mathematics in float64, one row at a time.

ONNX Runtime computes the others in tests/exporters and tests/importers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.ragged import Ragged
from service.modeling.encoder import Encoder, Encoding
from service.modeling.spec import ModelSpec
from service.modeling.state_slabs import RowSlots
from tests.kernels.inputs import joined, rows
from tests.modeling.random_models import CPU, HIDDEN, Table, model, random_arrays
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


def plain_lstm(row: Tensor, arrays: dict[str, Tensor]) -> Tensor:
    """An LSTM one number at a time, with every option of the layer written out."""
    get = {name.removeprefix("0.forward."): array for name, array in arrays.items()}
    limit = 1.5

    def norm(values: Tensor, name: str) -> Tensor:
        gain, offset = get[name]
        return functional.layer_norm(values, values.shape[-1:], gain, offset)

    hidden, cell, peephole = get["start"], get["start_cell"], get["peephole"].chunk(3)
    steps = [torch.zeros(0, HIDDEN).double()]
    for x in row:
        gates = norm(x @ get["input"], "input_norm") + get["bias"] + norm(hidden @ get["recurrent"], "recurrent_norm")
        i, f, g, o = gates.chunk(4)
        i, f = ((each + peephole[place] * cell).clamp(-limit, limit).sigmoid() for place, each in enumerate((i, f)))
        cell = norm(f * cell + i * g.clamp(-limit, limit).tanh(), "cell_norm")
        hidden = (o + peephole[2] * cell).clamp(-limit, limit).sigmoid() * cell.tanh()
        steps.append(hidden[None])
    return torch.cat(steps)


def test_lstm_with_every_option() -> None:
    keys = {"layer_norm": True, "learned_start": True, "peepholes": True, "clip": 1.5}
    assert_steps(model({"kind": "lstm", "hidden": HIDDEN, **keys}), plain_lstm)


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


@pytest.mark.parametrize("pool", ["mean", "sum", "max"])
def test_model_of_an_embedding_pools_its_vectors(pool: str) -> None:
    """A bag of words."""
    spec = model({"kind": "embedding", "width": 4}, head={"kind": "embed", "pool": pool}, ids=9)
    arrays, data = random_arrays(spec), [torch.tensor(ids, dtype=torch.int32) for ids in ([1, 8, 1], [0], [3, 3, 3, 2, 7])]
    pooled = run(spec, arrays, data)[0].head_output.embedding
    assert pooled is not None
    for vector, ids in zip(pooled, data, strict=True):
        steps = arrays["layers.0.weight"][ids.long()]
        torch.testing.assert_close(vector, {"mean": steps.mean(0), "sum": steps.sum(0), "max": steps.amax(0)}[pool])


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
