"""Tensor maps, by which the device's TMA unit copies boxes of a matrix into shared memory."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from kernels.compile import driver

MAP_BYTES, ALIGNED = 128, 64
MAX_CACHED_MAPS = 4096
UINT16, NO_INTERLEAVE, SWIZZLE_128_BYTES, PROMOTION_TO_128_BYTES, ZEROS = 1, 0, 3, 2, 0
"""The CUDA driver's enumeration values."""


@lru_cache(MAX_CACHED_MAPS)
def tensor_map(address: int, rows: int, columns: int, box_rows: int, box_columns: int) -> bytes:
    """Return the map of a (rows, columns) matrix of 16-bit values; raises RuntimeError when the driver refuses.

    The matrix's address and the bytes of its rows are multiples of 16. A box is always whole: values outside the matrix are zero. Its
    rows have 128 bytes, and 16-byte piece p of row r is stored at position p ^ r % 8.
    """
    room = ctypes.create_string_buffer(MAP_BYTES + ALIGNED)
    skipped = -ctypes.addressof(room) % ALIGNED
    status = driver().cuTensorMapEncodeTiled(
        ctypes.byref(room, skipped),
        UINT16,
        2,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(2 * columns),
        (ctypes.c_uint32 * 2)(box_columns, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        NO_INTERLEAVE,
        SWIZZLE_128_BYTES,
        PROMOTION_TO_128_BYTES,
        ZEROS,
    )
    if status:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled failed for the {rows} x {columns} matrix at {address:#x}: CUDA error {status}"
        )
    return room.raw[skipped : skipped + MAP_BYTES]
