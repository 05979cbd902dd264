"""The PCI addresses of the GPUs. `python -m service.supervisor.gpus` prints them as JSON, in CUDA's order.

The addresses come from the driver, which applies CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER. The supervisor must not initialise CUDA,
therefore a separate process calls the driver.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys

DRIVER = "libcuda.so.1"
PROBE_SECONDS = 30.0
"""The driver of a machine with many GPUs takes seconds to initialise."""
ADDRESS_BYTES = 32


def find_gpus() -> list[str]:
    """Return the PCI address of each GPU that CUDA sees, in CUDA's order; none if the driver is missing or fails."""
    command = [sys.executable, "-m", "service.supervisor.gpus"]
    try:
        printed = subprocess.run(command, capture_output=True, check=True, timeout=PROBE_SECONDS).stdout
        addresses: list[str] = json.loads(printed)
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    return addresses


def read_addresses(driver: ctypes.CDLL) -> list[str]:
    """Return the PCI address of each GPU, as /sys/bus/pci spells it; raises OSError when a call fails."""
    count = ctypes.c_int()
    _check(driver.cuInit(0))
    _check(driver.cuDeviceGetCount(ctypes.byref(count)))
    addresses = []
    for device in range(count.value):
        address = ctypes.create_string_buffer(ADDRESS_BYTES)
        _check(driver.cuDeviceGetPCIBusId(address, ADDRESS_BYTES, device))
        addresses.append(address.value.decode().lower())
    return addresses


def _check(status: int) -> None:
    if status:
        raise OSError(f"CUDA error {status}")


if __name__ == "__main__":
    try:
        print(json.dumps(read_addresses(ctypes.CDLL(DRIVER))))
    except OSError:
        print("[]")
