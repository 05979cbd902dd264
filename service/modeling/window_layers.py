"""Layers over windows of steps that the convolution kernels do not run: pooling, and padding that depends on a row's length."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.pooling import pool_steps
from kernels.ragged import Encoded, Outputs, Ragged, Sizes, count_windows
from kernels.windows import windows
from service.modeling.runnable_layer import EMBEDDED, RunnableLayer, embed_ids
from service.modeling.spec.layers import ConvLayer, PoolLayer, WindowLayer


class RowPadding:
    """The padding steps of each row, on the host."""

    def __init__(self, layer: WindowLayer) -> None:
        self._layer = layer

    def steps(self, lengths: Sizes) -> tuple[Sizes, Sizes]:
        """Return the steps before and after each row, (rows,) each. A row without steps is not padded."""
        if not self._layer.pads_by_length:
            left, right = self._layer.padding_steps
            return np.where(lengths > 0, left, 0), np.where(lengths > 0, right, 0)
        outputs = -(-lengths // self._layer.stride)
        total = np.maximum((outputs - 1) * self._layer.stride + self._layer.reach - lengths, 0) * (lengths > 0)
        less, more = total // 2, total - total // 2
        return (more, less) if self._layer.padding == "same_lower" else (less, more)


class LayerOverRows(RunnableLayer):
    """A layer that needs the length of every row on the host. Over ids, it embeds them first."""

    _embedding: Tensor | None = None

    def embed(self, table: Tensor) -> None:
        self._embedding, self.takes_ids = table, EMBEDDED

    def fold(self, table: Tensor) -> None:
        raise NotImplementedError(f"{type(self).__name__} cannot fold an embedding")

    @property
    def folded_columns(self) -> None:
        return None

    def tensors(self) -> list[Tensor]:
        return [] if self._embedding is None else [self._embedding]

    def _vectors(self, x: Ragged) -> Ragged:
        return x if self._embedding is None else embed_ids(x, self._embedding)


class WindowPool(LayerOverRows):
    """The maximum or mean of each window of a row."""

    def __init__(self, layer: PoolLayer) -> None:
        self._layer = layer
        self._padding = RowPadding(layer)

    def __call__(self, x: Ragged, want: Outputs) -> Encoded:
        x = self._vectors(x)
        left, right = self._padding.steps(x.lengths)
        steps = self._reduced(x, left, right)
        counts = count_windows(x.lengths + left + right, self._layer.reach, self._layer.stride)
        offsets = torch.from_numpy(np.concatenate(([0], counts.cumsum()))).to(x.offsets)
        encoded = pool_steps(steps, offsets, want, directions=1)
        return Encoded(None, encoded.steps, encoded.last, encoded.mean, encoded.max, offsets)

    def backend(self) -> str:
        return "framework"

    def _reduced(self, x: Ragged, left: Sizes, right: Sizes) -> Tensor:
        """Return the (windows, width) maxima or means."""
        covered = self._windows(Ragged(x.data.float(), x.offsets), left, right)
        inside = self._windows(Ragged(torch.ones_like(x.data[:, :1], dtype=torch.float32), x.offsets), left, right)
        if self._layer.reduce == "max":
            return covered.masked_fill(inside == 0, -torch.inf).amax(1)
        counted = self._layer.width if self._layer.count_padding else inside.sum(1).clamp(min=1)
        return covered.sum(1) / counted

    def _windows(self, x: Ragged, left: Sizes, right: Sizes) -> Tensor:
        return windows(x, self._layer.width, left=left, right=right, dilation=self._layer.dilation, stride=self._layer.stride)


class PaddedRows(LayerOverRows):
    """Pads each row with the zero steps that its length needs, and runs a layer without padding on the rows."""

    def __init__(self, layer: ConvLayer, inner: RunnableLayer) -> None:
        self._padding = RowPadding(layer)
        self._inner = inner

    def __call__(self, x: Ragged, want: Outputs) -> Encoded:
        x = self._vectors(x)
        left, right = self._padding.steps(x.lengths)
        padded = windows(x, 1, left=left, right=right)[:, 0]
        lengths = x.lengths + left + right
        offsets = torch.from_numpy(np.concatenate(([0], lengths.cumsum()))).to(x.offsets)
        return self._inner(Ragged(padded, offsets), want)

    def backend(self) -> str:
        return self._inner.backend()

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), *self._inner.tensors()]
