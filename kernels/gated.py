"""Shared by the LSTM, the GRU and the plain RNN: their weights and the checks of them, their variants, and their layers over token ids."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Self

from torch import Tensor

from kernels.activations import Activation
from kernels.embedding import embed, fold
from kernels.framework import linear
from kernels.norm import EPSILON, layer_norm
from kernels.ragged import (
    ContractError,
    Encoded,
    LayerWeights,
    Outputs,
    Ragged,
    RowState,
    RunKernel,
    check_absent,
    check_data,
    check_shape,
    state_entries,
)


@dataclass(frozen=True)
class RecurrentWeights(LayerWeights):
    """The weights of one layer of an LSTM, a GRU or a plain RNN in one direction, gate blocks in the order of `gates`. Values must not
    change after the first call.

    input: (inputs, gates x hidden), or None when the data are gate inputs, that is ``x @ input + bias``; recurrent: (vector, gates x
    hidden); bias: (gates x hidden,), or None when input is None.

    table: (vocabulary, gates x hidden), or None. With a table, the data are ids, (tokens,) int32 or int64, the table's rows are the gate
    inputs, and input and bias are None.

    int8: whether products on a CPU take int8 weights and rows, each row with its own scale, where the backend can; input and recurrent
    then have values of `kernels.quantized.dequantize`.

    activations: as each family describes them. clip: bounds the input of every gate's activation, from -clip to clip, or None. input_norm,
    recurrent_norm: (2, gates x hidden) gain and offset of a layer norm over ``x @ input`` without the bias and over ``h @ recurrent``, or
    None; epsilon: of the norms (Ba, Kiros and Hinton 2016).
    """

    input: Tensor | None
    recurrent: Tensor
    bias: Tensor | None
    table: Tensor | None = None
    int8: bool = False
    activations: tuple[Activation, ...] = ()
    clip: float | None = None
    input_norm: Tensor | None = None
    recurrent_norm: Tensor | None = None
    epsilon: float = EPSILON

    @property
    def hidden(self) -> int:
        return self.recurrent.shape[0]

    @property
    def array(self) -> Tensor:
        return self.recurrent

    @cached_property
    def columns(self) -> int | None:
        """The data's number of columns, or None for ids. The first access checks the shapes of the weights and raises ContractError if
        they are inconsistent."""
        return gated_columns(self)

    @cached_property
    def over_gate_inputs(self) -> Self:
        """The weights of the same layer over the rows of its table. They share what kernels pack."""
        weights = replace(self, input=None, bias=None, table=None, input_norm=None)
        vars(weights)["packed"] = self.packed
        return weights

    def folded(self, embedding: Tensor) -> Self:
        assert self.input is not None and self.bias is not None
        if self.input_norm is None:
            gates = fold(embedding, self.input, self.bias)
        else:
            product = fold(embedding.float(), self.input)
            gates = (layer_norm(product, self.input_norm, self.epsilon) + self.bias.float()).to(embedding.dtype)
        return replace(self, input=None, bias=None, table=gates, input_norm=None)

    @property
    def table_columns(self) -> int:
        assert self.input is not None
        return self.input.shape[1]


def gated_columns(weights: RecurrentWeights) -> int | None:
    """Return the data's number of columns, or None for ids. Raises ContractError for inconsistent weights."""
    check_shape("weights.recurrent", weights.recurrent, (None, None))
    hidden = weights.hidden
    columns = len(weights.gates) * hidden
    check_shape("weights.recurrent", weights.recurrent, (weights.vector, columns))
    for name in ("input_norm", "recurrent_norm"):
        if getattr(weights, name) is not None:
            check_shape(f"weights.{name}", getattr(weights, name), (2, columns))
    if weights.table is not None:
        check_absent(weights, ("input", "bias"), "the data are ids")
        check_shape("weights.table", weights.table, (None, columns))
        return None
    if weights.input is not None and weights.bias is not None:
        check_shape("weights.input", weights.input, (None, columns))
        check_shape("weights.bias", weights.bias, (columns,))
        return int(weights.input.shape[0])
    if weights.input is not None or weights.bias is not None:
        raise ContractError("weights.input and weights.bias belong together: pass both, or neither")
    return columns


@dataclass(frozen=True, slots=True)
class HiddenState(RowState):
    """The state of a GRU or a plain RNN. hidden: (rows, hidden) float32, or with slots a (slots, hidden) state cache. slots, sources: as in
    `kernels.ragged.RowState`."""

    hidden: Tensor
    slots: Tensor | None = None
    sources: Tensor | None = None


PEEPHOLES, PROJECTION, RESET_BEFORE = "peepholes", "a projection", "the reset gate before the product"
"""Variants that some fused kernels run."""


def variants_of(weights: Any, **others: bool) -> tuple[str, ...]:
    """Return the features of a layer beyond the plain layer of its family. others: features that only this family has."""
    plain = {field.name: field.default for field in fields(weights)}
    found = {
        "a layer norm": weights.input_norm is not None or weights.recurrent_norm is not None,
        "a clip": weights.clip is not None,
        "activations of its own": weights.activations != plain["activations"],
        **others,
    }
    return tuple(name for name, present in found.items() if present)


def gate_inputs(data: Tensor, weights: Any) -> Tensor:
    """Return the gate inputs of all tokens, (tokens, gates x hidden) float32: ``x @ input + bias``, with the norm of the product if there
    is one. data: as in `kernels.lstm.types`, without ids."""
    if weights.input is None:
        return data.float()
    if weights.input_norm is None:
        return linear(data, weights.input, weights.bias)
    gates: Tensor = layer_norm(linear(data, weights.input, None), weights.input_norm, weights.epsilon) + weights.bias
    return gates


def recurrent_product(hidden: Tensor, weights: Any) -> Tensor:
    """Return ``h @ recurrent``, (rows, gates x hidden) float32, with its norm if there is one."""
    product = linear(hidden, weights.recurrent, None)
    return product if weights.recurrent_norm is None else layer_norm(product, weights.recurrent_norm, weights.epsilon)


def clipped(values: Tensor, clip: float | None) -> Tensor:
    return values if clip is None else values.clamp(-clip, clip)


def check_gated(x: Ragged, weights: RecurrentWeights, state: Any) -> None:
    """Raises ContractError unless data, weights and hidden state have consistent shapes."""
    check_data(x, weights.columns)
    if state is not None:
        check_shape("state.hidden", state.hidden, (state_entries(x, state), weights.vector))


def with_table(run: RunKernel) -> RunKernel:
    """Add layers over token ids to a backend without them: gather the gate inputs of all tokens before it runs."""

    def run_with_table(x: Ragged, weights: Any, state: Any, *, want: Outputs) -> Encoded:
        if weights.table is None:
            return run(x, weights, state, want=want)
        gates = Ragged(embed(x.data, weights.table, weights.table.dtype), x.offsets)
        return run(gates, weights.over_gate_inputs, state, want=want)

    return run_with_table
