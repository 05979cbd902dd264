"""Emulated GPUs for the kernels' launchers: the properties and limits of real devices, and fakes of compiled kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from kernels import compile as compiler
from kernels import launching
from kernels.compile import registers
from kernels.conv import folded, plan
from kernels.conv import product as conv_product
from kernels.persistent import choice, cluster, grid, packing, resident, step, two_products, wide
from kernels.persistent import launch as persistent
from kernels.scan import launch as scan
from kernels.scan import product as scan_product
from kernels.scan import shape as scan_shape
from kernels.tensormap import MAP_BYTES

KIB = 1024
KNOWN = (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)
"""The architectures that NVRTC 13.0 compiles for."""
QUARTER_REGISTERS = 16_384
MAX_CLUSTER = 16


@dataclass(frozen=True)
class Device:
    """The properties of a device by torch's names, and the limits of its architecture from the CUDA programming guide."""

    name: str
    capability: tuple[int, int]
    multi_processor_count: int
    shared_memory_per_block_optin: int
    max_threads_per_multi_processor: int
    max_blocks: int

    def __str__(self) -> str:
        return self.name.removeprefix("NVIDIA ").replace(" ", "-")

    @property
    def shared_memory_per_multiprocessor(self) -> int:
        """Bytes of shared memory. Each block takes 1 KiB more than it requests."""
        return self.shared_memory_per_block_optin + KIB

    @property
    def architecture(self) -> str:
        major, minor = self.capability
        return f"sm_{major}{minor}{'a' if major >= 9 else ''}"

    def resident_blocks(self, threads: int, registers_each: int, shared: int) -> int:
        """Return how many blocks a multiprocessor runs at once. The warps of a quarter take registers in units of 256."""
        warps = -(-threads // 32)
        warps_of_quarter = QUARTER_REGISTERS // (-(-registers_each * 32 // 256) * 256)
        return min(
            4 * warps_of_quarter // warps,
            self.max_threads_per_multi_processor // (32 * warps),
            self.shared_memory_per_multiprocessor // (-(-shared // 128) * 128 + KIB),
            self.max_blocks,
        )


A100 = Device("NVIDIA A100-SXM4-80GB", (8, 0), 108, 166_912, 2048, 32)
A10 = Device("NVIDIA A10", (8, 6), 72, 101_376, 1536, 16)
RTX_3090 = Device("NVIDIA GeForce RTX 3090", (8, 6), 82, 101_376, 1536, 16)
L4 = Device("NVIDIA L4", (8, 9), 58, 101_376, 1536, 24)
RTX_4090 = Device("NVIDIA GeForce RTX 4090", (8, 9), 128, 101_376, 1536, 24)
H100 = Device("NVIDIA H100 80GB HBM3", (9, 0), 132, 232_448, 2048, 32)
H200 = replace(H100, name="NVIDIA H200")
B200 = Device("NVIDIA B200", (10, 0), 148, 232_448, 2048, 32)
RTX_5090 = Device("NVIDIA GeForce RTX 5090", (12, 0), 170, 101_376, 1536, 24)
DEVICES = (A100, A10, RTX_3090, L4, RTX_4090, H100, B200, RTX_5090)


@dataclass
class FakeKernel:
    """A kernel as its launcher specialises it. It records its launches."""

    device: Device
    source: Path
    threads: int
    cluster: int
    cooperative: bool
    constants: Mapping[str, int]
    launches: list[FakeLaunch] = field(default_factory=list)

    def launch(
        self, blocks: tuple[int, int, int], shared: int, members: Sequence[int], *arguments: bytes, early: bool = False
    ) -> None:
        self.launches.append(FakeLaunch(self, blocks, shared, tuple(members), arguments, early))

    @property
    def name(self) -> str:
        return f"{self.source.parent.name}/{self.source.name}"

    @property
    def blocks_at_once(self) -> int:
        """Blocks of a multiprocessor for which the source limits its registers (__launch_bounds__)."""
        if self.name == "persistent/grid.cu":
            return 8 // self.constants["PARTS"]
        return max(1, 960 // self.threads) if self.name == "conv/folded.cu" else 1

    @property
    def max_registers(self) -> int:
        """Registers to which the compiler limits a thread."""
        return registers(self.threads * self.blocks_at_once)

    def resident_blocks(self, shared: int) -> int:
        return self.device.resident_blocks(self.threads, self.max_registers, shared)


class FakeLaunch(NamedTuple):
    kernel: FakeKernel
    blocks: tuple[int, int, int]
    shared: int
    members: tuple[int, ...] = ()
    arguments: tuple[bytes, ...] = ()
    early: bool = False

    def broken_limits(self) -> list[str]:
        """Return each limit of the device that the launch exceeds."""
        kernel, (along, *others) = self.kernel, self.blocks
        device, (major, _) = kernel.device, kernel.device.capability
        resident = kernel.resident_blocks(self.shared)
        limits = {
            "threads of a block": 0 < kernel.threads <= KIB and kernel.threads % 32 == 0,
            "shared memory of a block": 0 <= self.shared <= device.shared_memory_per_block_optin,
            "registers of a block": resident >= 1,
            "blocks along an axis": along < 2**31 and all(0 < count < 2**16 for count in others) and along > 0,
            "clusters need 9.0": kernel.cluster == 1 or major >= 9,
            "blocks of a cluster": kernel.cluster <= MAX_CLUSTER and along * others[0] % kernel.cluster == 0,
            "all blocks of a cooperative launch at once": not kernel.cooperative
            or along <= resident * device.multi_processor_count,
            "wgmma needs 9.0": kernel.source.name not in ("product.cu", "step.cu", "wide.cu") or device.capability == (9, 0),
            "warps lend registers from 9.0 on": not kernel.constants.get("REGISTERS") or major >= 9,
        }
        return [name for name, kept in limits.items() if not kept]


@contextmanager
def emulated(device: Device) -> Iterator[list[FakeKernel]]:
    """Give the launchers this device. The list receives every kernel that they compile."""
    made: list[FakeKernel] = []

    def load(
        source: Path, number: int, *, threads: int, cluster: int = 1, cooperative: bool = False, **constants: int
    ) -> FakeKernel:
        made.append(FakeKernel(device, source, threads, cluster, cooperative, constants))
        return made[-1]

    def clusters(kernel: Any, shared: int) -> int:
        """Return the clusters of seven eighths of the multiprocessors: the rest is in parts of the device without room for a cluster.

        Multiprocessors come in pairs, so each has room for half a pair of blocks.
        """
        usable = device.multi_processor_count * (8 if kernel.cluster == 2 else 7) // 8
        return usable // kernel.cluster if device.capability >= (9, 0) else 0

    with pytest.MonkeyPatch.context() as patch, fresh_shape_caches():
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "get_device_capability", lambda _: device.capability)
        patch.setattr(torch.cuda, "get_device_name", lambda _: device.name)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: device)
        patch.setattr(launching, "cupy_installed", lambda: True)
        patch.setattr(compiler, "_known_architectures", lambda: KNOWN)
        for module in (cluster, resident, step, two_products, wide):
            patch.setattr(module, "resident_clusters", clusters)
        patch.setattr(grid, "resident_blocks", lambda kernel, shared: kernel.resident_blocks(shared))
        for module in (scan_product, conv_product):
            patch.setattr(module, "tensor_map", lambda *_: bytes(MAP_BYTES), raising=False)
        for module in (packing, scan, plan, folded):
            patch.setattr(module, "load_kernel", load)
        for module in (persistent, scan, conv_product, folded):
            patch.setattr(module, "on_device", lambda _: nullcontext())
        clear_launch_caches()
        yield made
    clear_launch_caches()


def launches_of(made: Sequence[FakeKernel]) -> list[FakeLaunch]:
    """Return the launches of all kernels, kernel by kernel."""
    return [launch for kernel in made for launch in kernel.launches]


def assert_passed(call: Mapping[str, int], expected: Mapping[str, Any]) -> None:
    """Assert that members of a structure have these values, or the addresses of these arrays."""
    values = {name: value.data_ptr() if isinstance(value, torch.Tensor) else value for name, value in expected.items()}
    assert {name: call[name] for name in expected} == values


def clear_launch_caches() -> None:
    """Forget the launches of SRUs, QRNNs and convolutions, which depend on the device."""
    _clear_caches(scan, scan_shape, plan, folded)


@contextmanager
def fresh_shape_caches() -> Iterator[None]:
    """Forget the launch shapes of LSTMs and GRUs before and after the block, in which the device or its shapes are others."""
    _clear_caches(choice)
    launching.multiprocessors.cache_clear()
    try:
        yield
    finally:
        _clear_caches(choice)
        launching.multiprocessors.cache_clear()


def _clear_caches(*modules: ModuleType) -> None:
    for function in (function for module in modules for function in vars(module).values()):
        if hasattr(function, "cache_clear"):
            function.cache_clear()
