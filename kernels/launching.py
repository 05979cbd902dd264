"""What the launchers of all families share: where a kernel may run, what it may read and write, and sizes in whole parts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels.backend import Problem
from kernels.compile import installed
from kernels.contract import ContractError

Capability = tuple[int, int]
PIECE = 8
"""Columns of 16-bit inputs that are fetched at once."""


def refused_by_device(
    problem: Problem, needed: Capability, *, until: Capability | None = None, halves: bool = False
) -> str | None:
    """Why no problem like this runs here, whatever its size.

    needed: the least compute capability; until: the first that the kernel does not know; halves: it takes no float32 weights.
    """
    if problem.device.type != "cuda":
        return "runs on an NVIDIA GPU"
    if halves and problem.storage not in (torch.float16, torch.bfloat16):
        return "its weights are float16 or bfloat16"
    if index_of(problem.device) >= torch.cuda.device_count():
        return f"there is no {problem.device} here"
    if not installed():
        return "CuPy is not installed"
    capability = torch.cuda.get_device_capability(problem.device)
    if capability < needed or (until is not None and capability >= until):
        return "needs compute capability {}.{}, this device has {}.{}".format(*needed, *capability)
    return None


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes it the current device, if it is not, which takes longer to do than to see."""
    return nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device)


def index_of(device: torch.device) -> int:
    return device.index or 0


def in_either(values: Tensor, storage: torch.dtype) -> Tensor:
    """As kernels read gates and skips: in the dtype of the weights, or in float32."""
    return (values if values.dtype in (storage, torch.float32) else values.float()).contiguous()


def check_slab(name: str, slab: Tensor) -> None:
    """Of a state that is written in place; raises ContractError when a kernel could not."""
    if slab.dtype != torch.float32 or not slab.is_contiguous():
        raise ContractError(
            f"state.{name} with slots is a contiguous float32 array, got {slab.dtype} with strides {slab.stride()}"
        )


def as_lines(places: Tensor) -> Tensor:
    """(rows,) int32 places in a slab, as kernels read them."""
    return places.int().contiguous()


def parts_of(whole: int, part: int) -> int:
    """How many parts of this size the whole takes."""
    return -(-whole // part)


def round_up(size: int, multiple: int) -> int:
    return parts_of(size, multiple) * multiple


def in_pieces(values: Tensor) -> Tensor:
    """(..., inputs) as products read their inputs, 16 bytes at a time: padded with zeros if need be."""
    odd = -values.shape[-1] % PIECE
    whole = (functional.pad(values, (0, odd)) if odd else values).contiguous()
    return whole if whole.data_ptr() % 16 == 0 else whole.clone()


def kept(packed: dict[Any, Tensor], name: Any, make: Callable[[], Tensor]) -> Tensor:
    """What is made of a layer's weights once."""
    found = packed.get(name)
    if found is None:
        found = packed[name] = make()
    return found


def address(array: Tensor | None) -> int:
    return 0 if array is None else array.data_ptr()


@cache
def processors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
