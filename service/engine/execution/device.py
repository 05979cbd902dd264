"""The device of an engine: its stream, its memory, and whether it still answers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels.compile import driver
from kernels.launching import round_up

HIGH_PRIORITY = -1
SMALL_BYTES, SMALL_BLOCKS = 1 << 20, 32
"""torch's allocator keeps blocks up to this size apart from the larger ones."""
ALIGNED_BYTES = 16


class DeviceLost(Exception):
    """The device failed in a way that this process cannot mend: whatever it is asked from now on fails as well."""


def hold(device: torch.device) -> None:
    """Make a GPU, and the one stream of high priority on it, this thread's own: all that it launches from now on goes there in order."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(_stream(device))


def raise_if_lost(device: torch.device, fault: BaseException) -> None:
    """After `fault`: raises DeviceLost when the device does not work any more; what is in flight on it is waited for."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as lost:
        raise DeviceLost(f"{device} is lost: {str(fault).splitlines()[0]}") from lost


def reserve(device: torch.device, most_bytes: int) -> None:
    """Have torch's allocator hold so many bytes in one piece, or half of what is free, and room for small blocks: for turns that no graph
    serves."""
    free, _ = torch.cuda.mem_get_info(device)
    blocks = [torch.empty(SMALL_BYTES, dtype=torch.uint8, device=device) for _ in range(SMALL_BLOCKS)]
    blocks.append(torch.empty(min(most_bytes, free // 2), dtype=torch.uint8, device=device))
    del blocks


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What torch's allocator says of a device: cudaMalloc calls and blocks handed out, both since the start, and bytes held."""

    mallocs: int = 0
    allocations: int = 0
    reserved_bytes: int = 0

    @classmethod
    def of(cls, device: torch.device) -> DeviceMemory:
        if device.type != "cuda":
            return cls()
        found = torch.cuda.memory_stats(device)
        return cls(found["num_device_alloc"], found["allocation.all.allocated"], found["reserved_bytes.all.current"])


def available_bytes(device: torch.device) -> int:
    """Memory of a device that nothing holds, or that its allocator could give again."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


class Streams:
    """For models that are made ready beside turns: a stream for each, which no other that is served was made ready on.

    What a library keeps for a stream, a graph that was captured on it goes on using: the next capture there would write to it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.cuda.Stream] = []

    def take(self) -> torch.cuda.Stream:
        stream: torch.cuda.Stream = self._free.pop() if self._free else torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return stream

    def give_back(self, stream: torch.cuda.Stream) -> None:
        """The model that was made ready on it has gone."""
        self._free.append(stream)


class Copy:
    """The same bytes from one array to another, again and again, on one stream: between the device and pinned memory.

    The driver is asked directly, as torch's way takes longer than everything else that a small turn asks for.
    """

    def __init__(self, target: Tensor, source: Tensor, stream: int) -> None:
        """Both stay where they are for as long as the copy is used. stream: as the driver knows it."""
        assert target.nbytes == source.nbytes and target.is_contiguous() and source.is_contiguous()
        self._arrays = target, source
        self._arguments = target.data_ptr(), source.data_ptr(), source.nbytes, stream

    def start(self) -> None:
        """Raises RuntimeError when the device refuses."""
        _check(_driver().cuMemcpyAsync(*self._arguments))


class OutputCollector:
    """One of the turns that may be in flight: pinned host memory for what it gives, and the event after which that is whole.

    The memory is one array of bytes, handed out from its beginning again for each turn.
    """

    def __init__(self, index: int, most_bytes: int) -> None:
        self.index = index
        self._bytes = torch.zeros(most_bytes, dtype=torch.uint8, pin_memory=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()  # which makes it: torch waits until then
        self.stream: int = torch.cuda.current_stream().cuda_stream
        """On which turns run, as the driver knows it."""
        self._recorded = self._event.cuda_event, self.stream

    def room(self, arrays: Sequence[Tensor | None]) -> list[Tensor | None]:
        """A host array for each of these, side by side; None for None, and for what finds no room any more."""
        begin, found = 0, list[Tensor | None]()
        for array in arrays:
            size = 0 if array is None else array.numel() * array.element_size()
            fits = array is not None and begin + size <= len(self._bytes)
            found.append(
                self._bytes[begin : begin + size].view(array.dtype).view(array.shape) if fits and array is not None else None
            )
            begin += round_up(size, ALIGNED_BYTES) if fits else 0
        return found

    def end(self) -> None:
        """All of the turn has been asked for; raises RuntimeError when the device refuses."""
        _check(_driver().cuEventRecord(*self._recorded))

    def reached(self) -> bool:
        """Whether the device has done it; raises RuntimeError when the device failed."""
        reached: bool = self._event.query()  # type: ignore[no-untyped-call]
        return reached

    def wait(self) -> None:
        self._event.synchronize()


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"CUDA error {status}")


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY)  # type: ignore[no-untyped-call]
    return stream


@cache
def _driver() -> ctypes.CDLL:
    found = driver()
    found.cuMemcpyAsync.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    found.cuEventRecord.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return found
