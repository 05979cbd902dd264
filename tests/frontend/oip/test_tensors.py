"""Tensors of the Open Inference Protocol: bytes and lists are decoded exactly, and invalid tensors are rejected by name."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from service.errors import InvalidInput
from service.frontend.oip.tensors import BYTES, DATATYPES, Tensor, decode, encode, from_list

NUMBERS = sorted(DATATYPES.keys() - {"BF16"})
LISTED = sorted(set(NUMBERS) - {"FP16"})
SHAPES = arrays.array_shapes(min_dims=0, max_dims=4, max_side=4)
HUGE = 2**31 - 1


def elements(*parts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def values(tensor: Tensor) -> Any:
    """Return the values of a numeric tensor."""
    assert isinstance(tensor.values, np.ndarray) and tensor.values.shape == tensor.shape
    return tensor.values


@given(data=st.data(), datatype=st.sampled_from(NUMBERS))
def test_numbers_round_trip_bit_by_bit(data: st.DataObject, datatype: str) -> None:
    array = data.draw(arrays.arrays(DATATYPES[datatype], SHAPES))
    tensor = decode("x", datatype, array.shape, array.tobytes())
    assert (tensor.name, tensor.datatype, tensor.shape) == ("x", datatype, array.shape)
    assert values(tensor).tobytes() == encode(tensor) == array.tobytes()


@given(array=arrays.arrays(np.uint16, SHAPES))
def test_bfloat16_round_trips_as_the_upper_half_of_float32(array: np.ndarray[Any, Any]) -> None:
    tensor = decode("x", "BF16", array.shape, array.tobytes())
    assert values(tensor).dtype == np.float32
    assert (values(tensor).view(np.uint32) == array.astype(np.uint32) << 16).all()
    assert encode(tensor) == array.tobytes()


@given(parts=st.lists(st.binary(max_size=9), min_size=1, max_size=9))
def test_strings_round_trip(parts: list[bytes]) -> None:
    tensor = decode("x", BYTES, [len(parts), 1], elements(*parts))
    assert tensor == Tensor("x", BYTES, (len(parts), 1), parts)
    assert encode(tensor) == elements(*parts)


@given(data=st.data(), datatype=st.sampled_from(LISTED))
def test_flat_and_nested_lists_equal_the_bytes(data: st.DataObject, datatype: str) -> None:
    array = data.draw(arrays.arrays(DATATYPES[datatype], arrays.array_shapes(max_dims=4, max_side=4)))
    raw = decode("x", datatype, array.shape, array.tobytes())
    for numbers in (array.tolist(), array.ravel().tolist()):
        np.testing.assert_array_equal(values(from_list("x", datatype, array.shape, numbers)), values(raw))


@pytest.mark.parametrize("strings", [["ä", "", "b", "c"], [["ä", ""], ["b", "c"]], ["ä".encode(), b"", b"b", b"c"]])
def test_lists_of_strings_equal_the_bytes(strings: list[Any]) -> None:
    assert encode(from_list("x", BYTES, [2, 2], strings)) == elements("ä".encode(), b"", b"b", b"c")


def test_known_bytes_have_known_values() -> None:
    assert values(decode("x", "FP16", [2], bytes.fromhex("003c00c0"))).tolist() == [1.0, -2.0]
    assert values(decode("x", "BF16", [2], bytes.fromhex("803f00c0"))).tolist() == [1.0, -2.0]
    assert values(decode("x", "INT64", [1], b"\xfe" + b"\xff" * 7)).tolist() == [-2]
    assert values(decode("x", "BOOL", [3], b"\x00\x01\x02")).tolist() == [False, True, True]


def test_numbers_are_not_copied() -> None:
    data = np.arange(6, dtype="<f4").tobytes()
    array = values(decode("x", "FP32", [2, 3], memoryview(data)))
    assert np.shares_memory(array, np.frombuffer(data, "<f4"))


INVALID_BYTES: list[tuple[str, list[int], bytes, tuple[str, ...]]] = [
    ("FP8", [1], b"\0", ("FP8", "FP32", "BYTES")),
    ("fp32", [1], b"\0" * 4, ("'fp32'", "send one of")),
    ("FP32", [-1], b"\0" * 4, ("[-1]", "between 1 and")),
    ("FP32", [-1, -1], b"\0" * 4, ("[-1, -1]",)),
    ("FP32", [0], b"", ("[0]", "between 1 and")),
    ("FP32", [0, 2**62], b"", ("between 1 and",)),
    ("FP32", [2**62, 4], b"\0" * 4, (str(HUGE),)),
    ("FP32", [HUGE] * 8, b"\0" * 4, ("has 4 bytes", str(4 * HUGE**8))),
    ("FP32", [1] * 9, b"\0" * 4, ("9 dimensions", "8")),
    ("FP32", [1] * 100_000, b"\0" * 4, ("100000 dimensions",)),
    ("FP32", [2, 3], b"\0" * 23, ("has 23 bytes", "[2, 3]", "requires 24")),
    ("FP32", [2, 3], b"\0" * 25, ("has 25 bytes", "requires 24")),
    ("INT64", [2], b"\0" * 8, ("has 8 bytes", "requires 16")),
    (BYTES, [HUGE, HUGE], b"\0" * 4, ("4 bytes", str(4 * HUGE**2))),
    (BYTES, [2], elements(b"a"), ("has 5 bytes", "8")),
    (BYTES, [1], elements(b"a", b"b"), ("has 10 bytes", "at byte 5")),
    (BYTES, [1], elements(b"abc")[:-1], ("3 bytes for element 0", "only 2 remain")),
    (BYTES, [2], elements(b"a", b"")[:-1] + b"", ("element 1",)),
    (BYTES, [1], b"\xff\xff\xff\xff", ("4294967295",)),
    (BYTES, [3], elements(b"abcdefgh"), ("before the length of element 1", "all 3 elements")),
]


@pytest.mark.parametrize(("datatype", "shape", "data", "texts"), INVALID_BYTES, ids=range(len(INVALID_BYTES)))
def test_invalid_bytes_are_rejected_with_both_values(
    datatype: str, shape: list[int], data: bytes, texts: tuple[str, ...]
) -> None:
    check_rejected(lambda: decode("x", datatype, shape, data), *texts)


INVALID_LISTS: list[tuple[str, list[int], list[Any], tuple[str, ...]]] = [
    ("FP16", [1], [1.0], ("FP16", "raw bytes", "FP32")),
    ("BF16", [1], [1.0], ("BF16", "raw bytes", "FP32")),
    ("FP8", [1], [1.0], ("FP8", "send one of")),
    ("FP32", [-1], [1.0], ("[-1]",)),
    ("FP32", [2, 2], [1, 2, 3], ("has 3 values", "[2, 2]", "requires 4")),
    ("FP32", [HUGE, HUGE], [1, 2, 3], ("has 3 values", str(HUGE**2))),
    ("FP32", [2, 2], [[1, 2], [3]], ("[2, 2]", "dimension 1", "2 entries")),
    ("FP32", [2, 2], [[1, 2], 3], ("dimension 1",)),
    ("FP32", [2, 2], [[1, 2], [3, [4]]], ("a list at index 3", "a number")),
    ("FP32", [2, 2], [1, 2, 3, [4]], ("a list at index 3",)),
    ("FP32", [4], [[1, 2], [3, 4]], ("dimension 0", "4 entries")),
    ("FP32", [2, 2], [[[1, 2], [3, 4]]], ("dimension 0",)),
    ("FP32", [1], ["1"], ("a string at index 0", "a number")),
    ("FP32", [1], [True], ("true at index 0", "a number")),
    ("FP32", [1], [None], ("null at index 0",)),
    ("FP64", [1], [10**400], ("FP64 cannot hold",)),
    ("INT32", [2], [1, 2.0], ("2.0 at index 1", "a whole number")),
    ("INT32", [1], [2**31], ("INT32 cannot hold",)),
    ("UINT8", [1], [-1], ("UINT8 cannot hold",)),
    ("BOOL", [1], [1], ("1 at index 0", "true or false")),
    (BYTES, [1], [1], ("1 at index 0", "a string")),
    (BYTES, [1], [{}], ("an object at index 0", "a string")),
]


@pytest.mark.parametrize(("datatype", "shape", "values", "texts"), INVALID_LISTS, ids=range(len(INVALID_LISTS)))
def test_invalid_lists_are_rejected_with_both_values(
    datatype: str, shape: list[int], values: list[Any], texts: tuple[str, ...]
) -> None:
    check_rejected(lambda: from_list("x", datatype, shape, values), *texts)


def check_rejected(parse: Callable[[], Tensor], *texts: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        parse()
    assert raised.value.field == "x"
    assert raised.value.message.startswith("x ")
    for text in texts:
        assert text in raised.value.message


def test_too_large_float_becomes_infinite() -> None:
    """The model's input check rejects infinite values."""
    assert values(from_list("x", "FP32", [2], [1e39, 1])).tolist() == [float("inf"), 1.0]


def test_name_in_a_message_is_short_and_on_one_line() -> None:
    with pytest.raises(InvalidInput) as raised:
        decode("x\n" * 1000, "FP8", [1], b"")
    assert "\n" not in raised.value.message and len(raised.value.message) < 500
