"""The device of an engine: its stream, its memory, its copies, and whether it still works."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels.compile import driver
from kernels.launching import round_up

HIGH_PRIORITY = -1
SMALL_BYTES, SMALL_BLOCKS = 1 << 20, 32
"""torch's allocator keeps blocks up to SMALL_BYTES apart from larger blocks."""
ALIGNED_BYTES = 16
CAPTURE_OF_THIS_THREAD = 1
"""The driver's mode of a capture that calls of other threads do not end."""
SET_CAPTURE_DEPENDENCIES = 1
"""The driver's flag that replaces the nodes behind which the next captured work runs."""


class DeviceLost(Exception):
    """The device failed and every later call to it fails too: this process cannot recover."""


def use_device(device: torch.device) -> None:
    """Make a GPU current in this thread, with its one high-priority stream: all later launches of the thread run there in order."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(_stream(device))


def allow_tf32(device: torch.device, allowed: bool) -> None:
    """Let the float32 products and convolutions of this process on a GPU use TF32, or keep them true float32."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if allowed else "highest")
        torch.backends.cudnn.allow_tf32 = allowed


def raise_if_lost(device: torch.device, error: BaseException) -> None:
    """Raise DeviceLost if the device does not work any more after `error`. Waits for the batches in flight."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as lost:
        raise DeviceLost(f"{device} is lost: {str(error).splitlines()[0]}") from lost


def reserve_memory(device: torch.device, max_bytes: int) -> None:
    """Let torch's allocator hold one block of `max_bytes` (at most half of the free memory) and some small blocks.

    Batches that no CUDA graph serves allocate from them.
    """
    free, _ = torch.cuda.mem_get_info(device)
    blocks = [torch.empty(SMALL_BYTES, dtype=torch.uint8, device=device) for _ in range(SMALL_BLOCKS)]
    blocks.append(torch.empty(min(max_bytes, free // 2), dtype=torch.uint8, device=device))
    del blocks


def memory_counts(device: torch.device) -> tuple[int, int, int]:
    """Return the cudaMalloc calls and the allocated blocks of torch's allocator since the start, and the bytes that it holds now."""
    if device.type != "cuda":
        return 0, 0, 0
    stats = torch.cuda.memory_stats(device)
    return stats["num_device_alloc"], stats["allocation.all.allocated"], stats["reserved_bytes.all.current"]


def available_bytes(device: torch.device) -> int:
    """Return the free memory of a device, including what torch's allocator holds and does not use."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        # Only Linux has the file. The whole memory is then the limit.
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


class Copy:
    """A copy between the device and pinned memory, always of the same arrays, that runs once per batch.

    It calls the driver: torch's copy costs the host more than everything else in the launch of a small batch.
    """

    def __init__(self, target: Tensor, source: Tensor) -> None:
        """Both arrays must keep their addresses."""
        assert target.nbytes == source.nbytes and target.is_contiguous() and source.is_contiguous()
        self._arrays = target, source
        self._arguments = target.data_ptr(), source.data_ptr(), source.nbytes

    def start(self, stream: int) -> None:
        """Queue the copy on a stream, named by the driver's handle; raises RuntimeError if the device fails."""
        _check(_driver().cuMemcpyAsync(*self._arguments, stream))


class GraphLaunch:
    """The launch of a captured graph, always on the same stream. It calls the driver, as `Copy` does."""

    def __init__(self, graph: torch.cuda.CUDAGraph, stream: int) -> None:
        """stream: the driver's handle."""
        self._graph = graph  # owns the executable graph
        self._arguments = graph.raw_cuda_graph_exec(), stream

    def start(self) -> None:
        """Launch the graph; raises RuntimeError if the device fails."""
        _check(_driver().cuGraphLaunch(*self._arguments))


def add_to_capture(graph: torch.cuda.CUDAGraph, stream: int) -> None:
    """Make a copy of a graph a node of the graph that is being captured on a stream, behind all work captured so far.

    graph: made with `keep_graph`. stream: the driver's handle. Raises RuntimeError.
    """
    driver, node = _driver(), ctypes.c_void_p()
    status, id, captured = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    last_nodes, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t()
    information = (status, id, captured, last_nodes, count)
    _check(driver.cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), *map(ctypes.byref, information)))
    child = ctypes.c_void_p(graph.raw_cuda_graph())
    _check(driver.cuGraphAddChildGraphNode(ctypes.byref(node), captured, last_nodes, count, child))
    _check(
        driver.cuStreamUpdateCaptureDependencies(
            ctypes.c_void_p(stream), ctypes.byref(node), ctypes.c_size_t(1), SET_CAPTURE_DEPENDENCIES
        )
    )


def end_capture(graph: torch.cuda.CUDAGraph) -> None:
    """End the capture on the current stream; raises RuntimeError if a call in it was illegal, and leaves torch able to capture again.

    The driver ends such a capture with an error, and torch then keeps the graph's memory pool open: every later capture into the pool
    would fail. So torch ends an empty capture in its place.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        with suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of an empty graph
            _check(_driver().cuStreamBeginCapture_v2(stream, CAPTURE_OF_THIS_THREAD))
            graph.capture_end()
        raise


class OutputCollector:
    """Collects the outputs of one batch in flight: pinned host memory, and the event after which the outputs are complete.

    There is one collector for each batch that may be in flight. Its memory is one array of bytes, which every batch divides again.
    """

    def __init__(self, index: int, size_bytes: int) -> None:
        self.index = index
        self._bytes = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()  # torch creates the event only now
        self.stream: int = torch.cuda.current_stream().cuda_stream
        """The driver's handle of the stream on which batches run."""
        self._recorded = self._event.cuda_event, self.stream

    def host_arrays(self, arrays: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return a host array for each device array, side by side; None for None and for an array that does not fit."""
        begin, host_arrays = 0, list[Tensor | None]()
        for array in arrays:
            size = 0 if array is None else array.nbytes
            if array is None or begin + size > len(self._bytes):
                host_arrays.append(None)
                continue
            host_arrays.append(self._bytes[begin : begin + size].view(array.dtype).view(array.shape))
            begin += round_up(size, ALIGNED_BYTES)
        return host_arrays

    def record_end(self) -> None:
        """Record the event behind the last launch of a batch; raises RuntimeError if the device fails."""
        _check(_driver().cuEventRecord(*self._recorded))

    def complete(self) -> bool:
        """Return whether the device has finished the batch; raises RuntimeError if the device failed."""
        complete: bool = self._event.query()  # type: ignore[no-untyped-call]
        return complete

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
    library = driver()
    library.cuMemcpyAsync.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    library.cuGraphLaunch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.cuEventRecord.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return library
