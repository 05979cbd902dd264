"""Tensors of the Open Inference Protocol: bytes and lists are decoded exactly, and invalid tensors are rejected by name."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from service.errors import InvalidInput, TooLarge
from service.frontend.oip.limits import MAX_TEXTS
from service.frontend.oip.tensors import BYTES, DATATYPES, Tensor, decode, encode, from_list

HUGE = 2**31 - 1


def elements(*parts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def values(tensor: Tensor) -> Any:
    """Return the values of a numeric tensor."""
    assert isinstance(tensor.values, np.ndarray) and tensor.values.shape == tensor.shape
    return tensor.values


@pytest.mark.parametrize("datatype", sorted(DATATYPES.keys() - {"BF16", BYTES}))
def test_numbers_round_trip_bit_by_bit(datatype: str) -> None:
    """Every bit pattern of a float, whole numbers to the ends of their range, and lists that are flat or nested."""
    dtype = np.dtype(DATATYPES[datatype].dtype)
    data = np.random.default_rng(7).bytes(24 * dtype.itemsize) if dtype.kind != "b" else bytes([0, 1] * 12)
    tensor = decode("x", datatype, (2, 3, 4), data)
    assert (tensor.name, tensor.datatype, tensor.shape, values(tensor).dtype) == ("x", datatype, (2, 3, 4), dtype)
    assert values(tensor).tobytes() == encode(tensor) == data
    if datatype != "FP16":
        for numbers in (values(tensor).tolist(), values(tensor).ravel().tolist()):
            np.testing.assert_array_equal(values(from_list("x", datatype, (2, 3, 4), numbers)), values(tensor))


def test_bfloat16_round_trips_as_the_upper_half_of_float32() -> None:
    array = np.arange(2**16, dtype=np.uint16)
    tensor = decode("x", "BF16", array.shape, array.tobytes())
    assert (values(tensor).view(np.uint32) == array.astype(np.uint32) << 16).all()
    assert encode(tensor) == array.tobytes()


@pytest.mark.parametrize("strings", [["ä", "", "b", "c"], [["ä", ""], ["b", "c"]], ["ä".encode(), b"", b"b", b"c"]])
def test_strings_round_trip(strings: list[Any]) -> None:
    data = elements("ä".encode(), b"", b"b", b"c")
    tensor = decode("x", BYTES, [2, 2], data)
    assert tensor == Tensor("x", BYTES, (2, 2), ["ä".encode(), b"", b"b", b"c"]) == from_list("x", BYTES, [2, 2], strings)
    assert encode(tensor) == data


def test_known_bytes_have_known_values_and_are_not_copied() -> None:
    assert values(decode("x", "FP16", [2], bytes.fromhex("003c00c0"))).tolist() == [1.0, -2.0]
    assert values(decode("x", "BF16", [2], bytes.fromhex("803f00c0"))).tolist() == [1.0, -2.0]
    assert values(decode("x", "INT64", [1], b"\xfe" + b"\xff" * 7)).tolist() == [-2]
    assert values(decode("x", "BOOL", [3], b"\x00\x01\x02")).tolist() == [False, True, True]
    assert values(from_list("x", "FP32", [2], [1e39, 1])).tolist() == [np.inf, 1.0], "the check of the inputs rejects it"
    data = np.arange(6, dtype="<f4").tobytes()
    array = values(decode("x", "FP32", [2, 3], memoryview(data)))
    assert np.shares_memory(array, np.frombuffer(data, "<f4"))


INVALID: list[tuple[Callable[..., Tensor], str, list[int], Any, tuple[str, ...]]] = [
    (decode, "FP8", [1], b"\0", ("FP8", "FP32", "BYTES")),
    (decode, "fp32", [1], b"\0" * 4, ("'fp32'", "send one of")),
    (decode, "FP32", [-1], b"\0" * 4, ("[-1]", f"between 1 and {HUGE}")),
    (decode, "FP32", [2**31], b"", (str(2**31),)),
    (decode, "FP32", [HUGE] * 8, b"\0" * 4, ("has 4 bytes", str(4 * HUGE**8))),
    (decode, "FP32", [1] * 9, b"\0" * 4, ("9 dimensions", "8")),
    (decode, "FP32", [2, 3], b"\0" * 23, ("has 23 bytes", "[2, 3]", "requires 24")),
    (decode, "INT64", [2], b"\0" * 17, ("has 17 bytes", "requires 16")),
    (decode, BYTES, [HUGE, HUGE], b"\0" * 4, ("4 bytes", str(4 * HUGE**2))),
    (decode, BYTES, [2], elements(b"a"), ("has 5 bytes", "8")),
    (decode, BYTES, [1], elements(b"a", b"b"), ("has 10 bytes", "at byte 5")),
    (decode, BYTES, [1], elements(b"abc")[:-1], ("3 bytes for element 0", "only 2 remain")),
    (decode, BYTES, [3], elements(b"abcdefgh"), ("before the length of element 1", "all 3 elements")),
    (from_list, "FP16", [1], [1.0], ("FP16", "raw bytes", "FP32")),
    (from_list, "FP8", [1], [1.0], ("FP8",)),
    (from_list, "FP32", [0], [], ("[0]",)),
    (from_list, "FP32", [3], [1, 2], ("has 2 values", "[3]", "requires 3")),
    (from_list, "FP32", [2, 2], [[1, 2], 3], ("dimension 1",)),
    (from_list, "FP32", [2, 2], [[1, 2], [3, [4]]], ("a list at index 3", "a number")),
    (from_list, "FP32", [4], [[1, 2], [3, 4]], ("dimension 0", "4 entries")),
    (from_list, "FP32", [2, 2], [[[1, 2], [3, 4]]], ("dimension 0",)),
    (from_list, "FP32", [1], ["1"], ("a string at index 0", "a number")),
    (from_list, "FP32", [1], [True], ("true at index 0", "a number")),
    (from_list, "FP64", [1], [10**400], ("FP64 cannot hold",)),
    (from_list, "INT32", [2], [1, 2.0], ("2.0 at index 1", "a whole number")),
    (from_list, "INT32", [1], [2**31], ("INT32 cannot hold",)),
    (from_list, "UINT8", [1], [-1], ("UINT8 cannot hold",)),
    (from_list, "BOOL", [1], [1], ("1 at index 0", "true or false")),
    (from_list, BYTES, [1], [1], ("1 at index 0", "a string")),
]


@pytest.mark.parametrize(("parse", "datatype", "shape", "data", "texts"), INVALID, ids=range(len(INVALID)))
def test_invalid_tensors_are_rejected_with_both_values(
    parse: Callable[..., Tensor], datatype: str, shape: list[int], data: Any, texts: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidInput) as raised:
        parse("x", datatype, shape, data)
    assert raised.value.field == "x" and raised.value.message.startswith("x ")
    assert all(text in raised.value.message for text in texts), raised.value.message


def test_number_of_texts_is_limited() -> None:
    """Each element of BYTES takes only 4 bytes or more, but becomes a bytes object."""
    for parse in (partial(decode, data=bytes(4 * MAX_TEXTS + 4)), partial(from_list, values=[""] * (MAX_TEXTS + 1))):
        with pytest.raises(TooLarge, match=f"at most {MAX_TEXTS}"):
            parse("text", BYTES, [MAX_TEXTS + 1])
    assert len(decode("text", BYTES, [MAX_TEXTS], bytes(4 * MAX_TEXTS)).values) == MAX_TEXTS


def test_name_in_a_message_is_short_and_on_one_line() -> None:
    with pytest.raises(InvalidInput) as raised:
        decode("x\n" * 1000, "FP8", [1], b"")
    assert "\n" not in raised.value.message and len(raised.value.message) < 500
