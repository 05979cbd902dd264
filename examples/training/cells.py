"""The cells of SRU and QRNN over all steps, with gradients in closed form: a step is a launch or three, where autograd takes dozens.

Every shape is (directions, steps, rows, hidden). In both recurrences c[t] = f[t]·c[t-1] + z[t], the loss reaches c[t] directly and through
c[t+1], so the gradients are a recurrence too, from the last step to the first: g[t] = direct[t] + k[t+1]·g[t+1].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


def forget_cells(candidate: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """Return the cells of an SRU of version 2: c[t] = f·c[t-1] + (1 - f)·candidate[t] with f = sigmoid(gate[t] + weight·c[t-1]).

    weight: (directions, 1, 1, hidden). The first cell follows zeros. Source: Lei et al. (2018), equations 1 and 2.
    """
    cells: Tensor = _ForgetCells.apply(candidate, gate, weight)  # type: ignore[no-untyped-call]
    return cells


def pool(forget: Tensor, new: Tensor) -> Tensor:
    """Return c[t] = forget[t]·c[t-1] + new[t], which follows zeros. Source: Bradbury et al. (2017), fo-pooling."""
    cells: Tensor = _Pool.apply(forget, new)  # type: ignore[no-untyped-call]
    return cells


def before(cells: Tensor) -> Tensor:
    """Return the cell before each step: zeros, then all cells but the last."""
    return torch.cat([torch.zeros_like(cells[:, :1]), cells[:, :-1]], dim=1)


class _ForgetCells(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, candidate: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        cells, forget = torch.empty_like(candidate), torch.empty_like(gate)
        cell = torch.zeros_like(candidate[:, 0])
        for step in range(candidate.shape[1]):
            torch.addcmul(gate[:, step], weight[:, 0], cell, out=forget[:, step]).sigmoid_()
            cell = torch.lerp(candidate[:, step], cell, forget[:, step], out=cells[:, step])
        ctx.save_for_backward(candidate, forget, cells, weight)
        return cells

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[no-untyped-def]
        candidate, forget, cells, weight = ctx.saved_tensors
        previous = before(cells)
        slope = (previous - candidate) * forget * (1 - forget)  # of c[t], by the gate before its sigmoid
        total = _from_the_end(gradient, forget + slope * weight)
        gates = total * slope
        return total * (1 - forget), gates, (gates * previous).sum((1, 2), keepdim=True)


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, forget: Tensor, new: Tensor) -> Tensor:
        cells = torch.empty_like(new)
        cell = torch.zeros_like(new[:, 0])
        for step in range(new.shape[1]):
            cell = torch.addcmul(new[:, step], forget[:, step], cell, out=cells[:, step])
        ctx.save_for_backward(forget, cells)
        return cells

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        forget, cells = ctx.saved_tensors
        total = _from_the_end(gradient, forget)
        return total * before(cells), total


def _from_the_end(direct: Tensor, kept: Tensor) -> Tensor:
    """Return g[t] = direct[t] + kept[t+1]·g[t+1], from the last step to the first."""
    total = direct.clone(memory_format=torch.contiguous_format)
    for step in reversed(range(direct.shape[1] - 1)):
        total[:, step].addcmul_(kept[:, step + 1], total[:, step + 1])
    return total
