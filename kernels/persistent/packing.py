"""Shared by the launchers of all kernels: tile constants, the packing of the recurrent weights, and compilation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.compile import Kernel, load_kernel
from kernels.launching import swizzled

HERE = Path(__file__).parent
OCTET = 8
"""Rows of a tensor-core product."""
SORTED = 512
"""Rows that a tile sorts by length, so that its octets have rows of similar length."""
SAME_SUMS = 512
"""Hidden units up to which both kernels sum in the same order, so that the number of rows may choose between them."""
ROW_BYTES, PIECE_BYTES, PRODUCT_BYTES = 16, 16, 512


class Variant(NamedTuple):
    """The properties that all kernels are specialised for, except their launch shape.

    storage: dtype of the weights; gates_float32: gate inputs are float32, otherwise they have that dtype; gru: the layer is a GRU,
    otherwise an LSTM; peepholes: an LSTM with peepholes; vector: the width of the hidden state of a layer with two dependent products in
    each step, which is a GRU with the reset before the product or an LSTM with a projection; 0 for all other layers. data_float32: the
    kernel multiplies the data itself, and they are float32.
    """

    device: int
    storage: torch.dtype
    gates_float32: bool
    hidden: int
    gru: bool = False
    peepholes: bool = False
    vector: int = 0
    data_float32: bool = False

    def of_size(self, hidden: int) -> Variant:
        """Return the variant with this number of hidden units."""
        return self._replace(hidden=hidden, vector=hidden if self.gru and self.vector else self.vector)

    @property
    def projected(self) -> bool:
        return self.vector > 0 and not self.gru

    @property
    def terms(self) -> int:
        """16-bit numbers of a weight, as in cell.cuh."""
        return 2 if self.storage == torch.float32 else 1

    def load(self, source: str, *, threads: int, cluster: int = 1, cooperative: bool = False, **constants: int) -> Kernel:
        """Return the kernel of a source file, specialised by this variant and the constants."""
        return load_kernel(
            HERE / source,
            self.device,
            threads=threads,
            cluster=cluster,
            cooperative=cooperative,
            SORTED=SORTED,
            BFLOAT16=int(self.storage == torch.bfloat16),
            FLOAT32=int(self.storage == torch.float32),
            GATES_FLOAT32=int(self.gates_float32),
            GRU=int(self.gru),
            PEEPHOLES=int(self.peepholes),
            PROJECTED=int(self.projected),
            **constants,
        )


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel and its grid. A cluster or team owns a tile of `octets` octets, each of up to `width` rows. blocks, exchange_words: of each
    direction; zeroed: whether the words are zero before the launch; early: whether it may begin while the kernel before it ends."""

    kernel: Kernel
    blocks: int
    shared: int
    octets: int = 0
    width: int = 0
    exchange_words: int = 0
    zeroed: bool = True
    early: bool = False


class Packing(NamedTuple):
    """The layout of the weights in cluster.cu and grid.cu: see `pack`."""

    groups: int
    chunks: int

    def pack(self, recurrent: Tensor) -> Tensor:
        return pack(recurrent, self.groups, self.chunks)

    def pack_terms(self, recurrent: Tensor, scale: Tensor) -> Tensor:
        """Return float32 weights as `pack` returns float16 weights, with an axis of two terms before the lanes: the scaled weights in
        float16, and the remainders."""
        return torch.stack([self.pack(term) for term in two_terms(recurrent * scale)], dim=4)


class WidePacking(NamedTuple):
    """The layout of the weights in wide.cu: see `pack_wide`."""

    def pack(self, recurrent: Tensor) -> Tensor:
        return pack_wide(recurrent)

    def pack_with_inputs(self, inputs: Tensor, recurrent: Tensor) -> Tensor:
        """Return the weights of a level above the first: the chunks of its inputs, then those of its hidden vector.

        inputs: (hidden, 4 or 3 x hidden). The input of a GRU's new gate is its fourth sum.
        """
        return torch.cat((pack_wide(of_four_gates(inputs, len(recurrent))), pack_wide(recurrent)), dim=1)


def of_four_gates(inputs: Tensor, hidden: int) -> Tensor:
    """Return input weights, (inputs, 4 or 3 x hidden), by the four sums of a unit: the input of a GRU's new gate is its fourth sum."""
    if inputs.shape[1] == 4 * hidden:
        return inputs
    return torch.cat((inputs[:, : 2 * hidden], torch.zeros_like(inputs[:, :hidden]), inputs[:, 2 * hidden :]), dim=1)


def scale_of(recurrent: Tensor) -> Tensor:
    """Return the power of two, (1,) float32, that makes the largest float32 weight a number from 2^13 to 2^14."""
    largest = recurrent.abs().max().clamp(min=2.0**-100)
    return torch.exp2(13 - largest.log2().floor()).float().reshape(1)


def two_terms(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 values in float16, and the remainders in float16."""
    first = values.half()
    return first, (values - first.float()).half()


def pack(matrix: Tensor, groups: int, chunks: int, hidden: int | None = None) -> Tensor:
    """Return the weights of a vector, (entries, 4 or 3 x hidden), as left operands of tensor-core products, padded with zeros.

    Shape: (groups of 8 units, chunks of 32 entries of the hidden vector, 2 products by 2 tiles, lane, 8 values). Lane 4 g + q
    multiplies the entries 8 q + 4 product + (0, 1, 2, 3) of the chunk. Its gates are the first and the second of unit g of the group, or
    the third and the fourth in the other tile. A fourth gate that the weights do not have is zero.
    """
    entries, hidden = len(matrix), hidden or len(matrix)
    gates = matrix.shape[1] // hidden
    padded = matrix.new_zeros(32 * chunks, 4, 8 * groups)
    padded[:entries, :gates, :hidden] = matrix.reshape(entries, gates, hidden)
    chunk, q, product, upper, value, tile, lower, group, g = range(9)
    split = padded.view(chunks, 4, 2, 2, 2, 2, 2, groups, 8)
    return split.permute(group, chunk, product, tile, g, q, upper, lower, value).contiguous()


def pack_wide(recurrent: Tensor) -> Tensor:
    """Return the recurrent weights, (hidden, 4 or 3 x hidden), as left operands of wgmma. hidden: a multiple of 64.

    Shape: (blocks of 16 units, chunks of 64 entries of the hidden vector, 64 gate rows, 8 pieces, 8 values). Gate row
    16 w + 8 upper + 2 v + odd has gate 2 odd + upper of unit 4 w + v of the block. The pieces of a row are swizzled. A fourth
    gate that the weights do not have is zero.
    """
    hidden = recurrent.shape[0]
    gates = recurrent.shape[1] // hidden
    padded = recurrent.new_zeros(hidden, 4, hidden)
    padded[:, :gates] = recurrent.reshape(hidden, gates, hidden)
    chunk, piece, value, odd, upper, block, w, v = range(8)
    split = padded.view(hidden // 64, 8, 8, 2, 2, hidden // 16, 4, 4)
    rows = split.permute(block, chunk, w, upper, v, odd, piece, value)
    return swizzled(rows.reshape(hidden // 16, hidden // 64, 64, 8, 8))
