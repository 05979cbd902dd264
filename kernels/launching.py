"""Shared by the launchers of all families: devices that run a kernel, arrays in the form that kernels read, and tile arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from kernels.backend import Problem
from kernels.compile import cupy_installed
from kernels.ragged import ContractError

Capability = tuple[int, int]
PIECE = 8
"""Columns of 16-bit inputs in one 16-byte load."""
Packed = TypeVar("Packed")
"""Weights in the layout of a kernel: a tensor, or an object with its tensors in `arrays`."""


def device_refusal(
    problem: Problem, needed: Capability, *, until: Capability | None = None, halves: bool = False
) -> str | None:
    """Return why the problem's device or dtype cannot run a kernel, or None if it can. The problem's sizes do not matter.

    needed: the lowest compute capability; until: the first capability that the kernel does not support; halves: the kernel supports no
    float32 weights.
    """
    if problem.device.type != "cuda":
        return "needs an NVIDIA GPU"
    if halves and problem.storage not in (torch.float16, torch.bfloat16):
        return "needs float16 or bfloat16 weights"
    if device_index(problem.device) >= torch.cuda.device_count():
        return f"this machine has no {problem.device}"
    if not cupy_installed():
        return "CuPy is not installed"
    capability = torch.cuda.get_device_capability(problem.device)
    if capability < needed or (until is not None and capability >= until):
        return "needs compute capability {}.{}, this device has {}.{}".format(*needed, *capability)
    return None


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context manager that makes `device` the current one. Checking first is faster than setting the current device again."""
    return nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device)


def device_index(device: torch.device) -> int:
    return device.index or 0


@cache
def multiprocessors(device: int) -> int:
    """Return the number of multiprocessors of a device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def as_gate_dtype(values: Tensor, storage: torch.dtype) -> Tensor:
    """Return gate inputs or a skip as kernels read them: contiguous, in the dtype of the weights or in float32."""
    return (values if values.dtype in (storage, torch.float32) else values.float()).contiguous()


def as_int32(slots: Tensor) -> Tensor:
    """Return state slots, (rows,), as kernels read them."""
    return slots.int().contiguous()


def row_sources(slots: Tensor | None, sources: Tensor | None) -> Tensor | None:
    """Return the slots that the rows start from, as kernels read them. slots: `as_int32` of the slots that they write."""
    return slots if sources is None else as_int32(sources)


def aligned_inputs(values: Tensor) -> Tensor:
    """Return inputs, (..., inputs), as matrix products read them: aligned to 16 bytes and padded with zeros to whole pieces."""
    missing = -values.shape[-1] % PIECE
    padded = (functional.pad(values, (0, missing)) if missing else values).contiguous()
    return padded if padded.data_ptr() % 16 == 0 else padded.clone()


def check_state_cache(name: str, cache: Tensor) -> None:
    """Raises ContractError unless a kernel can write new states into this state cache."""
    if cache.dtype != torch.float32 or not cache.is_contiguous():
        raise ContractError(
            f"state.{name} with slots must be contiguous float32, got {cache.dtype} with strides {cache.stride()}"
        )


def swizzled(rows: Tensor) -> Tensor:
    """Return rows of 8 pieces, (..., rows, 8, values), with piece p of row r at position p ^ r % 8.

    Threads then read a column of pieces from shared memory without bank conflicts.
    """
    row = torch.arange(rows.shape[-3], device=rows.device)[:, None]
    return rows[..., row, torch.arange(8, device=rows.device) ^ row % 8, :].contiguous()


def pack_once(packed: dict[Any, Any], name: Any, pack: Callable[[], Packed]) -> Packed:
    """Return packed weights by name, packing them on first use."""
    weights: Packed | None = packed.get(name)
    if weights is None:
        weights = packed[name] = pack()
    return weights


def address(array: Tensor | None) -> int:
    """Return the device address of an array, or 0 for None."""
    return 0 if array is None else array.data_ptr()


def ceil_div(whole: int, part: int) -> int:
    return -(-whole // part)


def round_up(size: int, multiple: int) -> int:
    return ceil_div(size, multiple) * multiple
