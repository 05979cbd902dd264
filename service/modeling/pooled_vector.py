"""Computes the vector of each row on which a head works: joined pools over the steps, then dense layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kernels.activations import TANH
from kernels.ragged import Encoded, Outputs, compute_dtype
from service.modeling.activations import kernel_activation
from service.modeling.spec.heads.descriptor import Pool, PoolingHead
from service.modeling.state_slabs import RowSlots
from service.modeling.step_layers import Dense

BY_STEPS = ("first", "last_step", "attention")
"""Pools that are computed here, from the steps."""


class PooledVector:
    """The pools and the dense layers of a head.

    wants: the outputs that the encoder has to compute; streams: whether later steps can extend the pools of the steps so far.
    """

    def __init__(self, head: PoolingHead, arrays: Mapping[str, Tensor], device: torch.device) -> None:
        """arrays: of the whole model."""

        def weights(name: str) -> Tensor:
            return arrays[f"head.{name}"].to(device, compute_dtype(arrays[f"head.{name}"].dtype, device))

        pools = set(head.pool)
        self.wants = Outputs(
            steps=not pools.isdisjoint(BY_STEPS),
            last="last" in pools,
            mean=not pools.isdisjoint({"mean", "sum"}),
            max="max" in pools,
        )
        self.streams = pools <= {"last", "last_step", "mean", "max"}
        self.is_pool_alone = len(head.pool) == 1 and not head.dense
        self._pools = head.pool
        self._running = {pool: head.state_name(pool) for pool in head.running_pools}
        self._attention = Attention(head, weights) if "attention" in pools else None
        self._dense = [
            Dense(weights(f"dense.{index}.weight"), weights(f"dense.{index}.bias"), kernel_activation(layer.activation))
            for index, layer in enumerate(head.dense)
        ]

    def __call__(self, encoded: Encoded, offsets: Tensor) -> Tensor:
        """Return (rows, width) float32. offsets: (rows + 1,) where the steps of each row begin."""
        pooled = [self._pooled(pool, encoded, offsets) for pool in self._pools]
        vector = pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)
        for dense in self._dense:
            vector = dense(vector)
        return vector

    def extended(self, encoded: Encoded, offsets: Tensor, slots: RowSlots, states: Mapping[str, Tensor]) -> Encoded:
        """Return `encoded` with its running pools, which cover this batch's steps only, extended to all steps of each sequence."""
        for pool, name in self._running.items():
            slab, counts, targets = states[name], states[f"{name}.steps"], slots.targets.long()
            pooled, earlier = getattr(encoded, pool), slab.index_select(0, slots.sources)
            if pool == "max":
                encoded = replace(encoded, max=_store(slab, targets, torch.maximum(earlier, pooled)))
                continue
            steps = torch.diff(offsets)[:, None]
            total = _store(slab, targets, torch.addcmul(earlier, pooled, steps.to(pooled.dtype)))
            count = _store(counts, targets, counts.index_select(0, slots.sources) + steps)
            encoded = replace(encoded, mean=total / count.clamp(min=1))
        return encoded

    def tensors(self) -> list[Tensor]:
        attention = [] if self._attention is None else self._attention.tensors()
        return [*attention, *(tensor for dense in self._dense for tensor in dense.tensors)]

    def _pooled(self, pool: Pool, encoded: Encoded, offsets: Tensor) -> Tensor:
        """Return (rows, width) of one pool. A row without steps has zeros."""
        match pool:
            case "sum":
                assert encoded.mean is not None
                return encoded.mean * torch.diff(offsets)[:, None]
            case "first":
                return _step_at(encoded, offsets[:-1], offsets)
            case "last_step":
                return _step_at(encoded, offsets[1:] - 1, offsets)
            case "attention":
                assert self._attention is not None
                return self._attention(encoded, offsets)
        vector: Tensor = getattr(encoded, pool)
        return vector


class Attention:
    """The sum of the steps of a row, with weights from a softmax over their scores (Bahdanau et al. 2015; Yang et al. 2016)."""

    def __init__(self, head: PoolingHead, weights: Callable[[str], Tensor]) -> None:
        self._query = weights("attention.query")
        self._dense = (
            None if head.attention_width is None else Dense(weights("attention.weight"), weights("attention.bias"), TANH)
        )

    def __call__(self, encoded: Encoded, offsets: Tensor) -> Tensor:
        """Return (rows, width)."""
        steps, offsets = encoded.steps, offsets.long()
        assert steps is not None
        scores = (steps if self._dense is None else self._dense(steps)) @ self._query.float()
        highest = _reduced(scores, "max", offsets)
        # Tokens after the last row, which a GPU's batches may have, count as its tokens here and are left out of the sums.
        row = torch.searchsorted(offsets[1:], torch.arange(len(steps), device=steps.device), right=True)
        row.clamp_(max=max(len(offsets) - 2, 0))
        weights = torch.exp(scores - highest[row])
        total = _reduced(weights, "sum", offsets)
        return _reduced(steps * (weights / total[row])[:, None], "sum", offsets)

    def tensors(self) -> list[Tensor]:
        return [self._query, *([] if self._dense is None else self._dense.tensors)]


def _store(slab: Tensor, targets: Tensor, values: Tensor) -> Tensor:
    slab.index_copy_(0, targets, values)
    return values


def _reduced(values: Tensor, operation: str, offsets: Tensor) -> Tensor:
    """Return one value for each row: its maximum or sum. A row without steps has zero."""
    return torch.segment_reduce(
        values, operation, offsets=offsets, axis=0, initial=-torch.inf if operation == "max" else 0.0, unsafe=True
    )


def _step_at(encoded: Encoded, position: Tensor, offsets: Tensor) -> Tensor:
    """Return the steps at these positions, (rows, width), or zeros for rows without steps."""
    steps = encoded.steps
    assert steps is not None
    if not len(steps):
        return steps.new_zeros(len(position), steps.shape[1])
    has_steps = torch.diff(offsets)[:, None] > 0
    return steps.index_select(0, position.long().clamp(0, len(steps) - 1)).where(has_steps, 0.0)
