"""The processors that compiled loops are made for. One target runs on many processors, so an image can carry its machine code.

Does not import Numba, which takes half a second.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache

TARGET = "KERNELS_CPU_TARGET"
"""The environment variable that names another target than the fastest of this processor."""
X86, ARM = "x86", "arm"
ARCHITECTURES = {"x86_64": X86, "AMD64": X86, "aarch64": ARM, "arm64": ARM}
"""Architectures by the machine's name."""


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of processor.

    name, features: as LLVM knows them; needed: the features that a processor of the architecture may lack, by LLVM's names;
    lanes: float32 numbers of a vector register; registers: vector registers; int8_steps: how many products of integers an
    instruction adds up in 32 bits: four of unsigned and signed bytes (VNNI), or two of 16-bit numbers.
    """

    name: str
    architecture: str
    needed: tuple[str, ...]
    lanes: int
    registers: int
    int8_steps: int
    features: str = ""


AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512vnni")
TARGETS = (
    Target("x86-64-v4", X86, AVX512, lanes=16, registers=32, int8_steps=4, features="+avx512vnni"),
    Target("x86-64-v3", X86, ("avx2", "fma", "bmi2", "f16c"), lanes=8, registers=16, int8_steps=2),
    Target("generic", ARM, (), lanes=4, registers=32, int8_steps=2, features="+neon"),
)
"""From the fastest to the slowest: AVX-512 with VNNI, AVX2, and Arm with NEON."""


@cache
def host_target() -> Target | None:
    """Return the fastest target of this processor, or the target that KERNELS_CPU_TARGET names; None if there is none."""
    name, targets = os.environ.get(TARGET), compilable_targets()
    if name is None:
        targets = [target for target in targets if _runs_here(target)]
    else:
        targets = [target for target in targets if target.name == name]
    return targets[0] if targets else None


def compilable_targets() -> list[Target]:
    """Return the targets of this machine's architecture, from the fastest to the slowest. This processor may lack their
    features."""
    architecture = ARCHITECTURES.get(platform.machine())
    return [target for target in TARGETS if target.architecture == architecture]


def _runs_here(target: Target) -> bool:
    if not target.needed:
        return True
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    return all(features.get(feature, False) for feature in target.needed)
