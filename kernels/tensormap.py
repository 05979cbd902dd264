"""Maps of matrices, through which a device fetches boxes of rows and columns into shared memory by itself (TMA)."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from kernels.compile import driver

MAP_BYTES, ALIGNED = 128, 64
MOST_MAPS = 4096
"""That are kept."""
UINT16, NO_INTERLEAVE, SWIZZLE_128_BYTES, PROMOTION_TO_128_BYTES, ZEROS = 1, 0, 3, 2, 0
"""As CUDA's driver numbers them."""


@lru_cache(MOST_MAPS)
def mapped(address: int, rows: int, columns: int, box_rows: int, box_columns: int) -> bytes:
    """Of a (rows, columns) matrix of 16-bit values at this address of the device, both a multiple of 16 bytes; raises RuntimeError when
    the driver refuses.

    A box is whole wherever it begins: what lies outside the matrix is zero. Of its rows of 128 bytes, 16-byte piece p of row r is
    stored in place p ^ r % 8.
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
        raise RuntimeError(f"the matrix at {address:#x}, {rows} x {columns}, was not mapped: CUDA error {status}")
    return room.raw[skipped : skipped + MAP_BYTES]
