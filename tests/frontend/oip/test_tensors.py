"""Tensors of the Open Inference Protocol: what is said in bytes or in lists comes back, and what cannot be is refused by name."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from service.errors import InvalidInput
from service.frontend.oip.tensors import BYTES, DATATYPES, Tensor, decode, encode, listed

NUMBERS = sorted(DATATYPES.keys() - {"BF16"})
LISTED = sorted(set(NUMBERS) - {"FP16"})
SHAPES = arrays.array_shapes(min_dims=0, max_dims=4, max_side=4)
HUGE = 2**31 - 1


def elements(*parts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def values(tensor: Tensor) -> Any:
    """The values of numbers."""
    assert isinstance(tensor.values, np.ndarray) and tensor.values.shape == tensor.shape
    return tensor.values


@given(data=st.data(), datatype=st.sampled_from(NUMBERS))
def test_numbers_come_back_bit_by_bit(data: st.DataObject, datatype: str) -> None:
    given = data.draw(arrays.arrays(DATATYPES[datatype], SHAPES))
    read = decode("x", datatype, given.shape, given.tobytes())
    assert (read.name, read.datatype, read.shape) == ("x", datatype, given.shape)
    assert values(read).tobytes() == encode(read) == given.tobytes()


@given(given=arrays.arrays(np.uint16, SHAPES))
def test_bfloat16_comes_back_bit_by_bit_and_is_the_upper_half_of_a_float32(given: np.ndarray[Any, Any]) -> None:
    read = decode("x", "BF16", given.shape, given.tobytes())
    assert values(read).dtype == np.float32
    assert (values(read).view(np.uint32) == given.astype(np.uint32) << 16).all()
    assert encode(read) == given.tobytes()


@given(parts=st.lists(st.binary(max_size=9), min_size=1, max_size=9))
def test_strings_come_back(parts: list[bytes]) -> None:
    read = decode("x", BYTES, [len(parts), 1], elements(*parts))
    assert read == Tensor("x", BYTES, (len(parts), 1), parts)
    assert encode(read) == elements(*parts)


@given(data=st.data(), datatype=st.sampled_from(LISTED))
def test_a_list_flat_or_nested_says_what_the_bytes_say(data: st.DataObject, datatype: str) -> None:
    given = data.draw(arrays.arrays(DATATYPES[datatype], arrays.array_shapes(max_dims=4, max_side=4)))
    raw = decode("x", datatype, given.shape, given.tobytes())
    for said in (given.tolist(), given.ravel().tolist()):
        np.testing.assert_array_equal(values(listed("x", datatype, given.shape, said)), values(raw))


@pytest.mark.parametrize("said", [["ä", "", "b", "c"], [["ä", ""], ["b", "c"]], ["ä".encode(), b"", b"b", b"c"]])
def test_a_list_of_strings_says_what_the_bytes_say(said: list[Any]) -> None:
    assert encode(listed("x", BYTES, [2, 2], said)) == elements("ä".encode(), b"", b"b", b"c")


def test_known_bytes_have_the_known_values() -> None:
    assert values(decode("x", "FP16", [2], bytes.fromhex("003c00c0"))).tolist() == [1.0, -2.0]
    assert values(decode("x", "BF16", [2], bytes.fromhex("803f00c0"))).tolist() == [1.0, -2.0]
    assert values(decode("x", "INT64", [1], b"\xfe" + b"\xff" * 7)).tolist() == [-2]
    assert values(decode("x", "BOOL", [3], b"\x00\x01\x02")).tolist() == [False, True, True]


def test_numbers_are_not_copied() -> None:
    data = np.arange(6, dtype="<f4").tobytes()
    read = values(decode("x", "FP32", [2, 3], memoryview(data)))
    assert np.shares_memory(read, np.frombuffer(data, "<f4"))


WRONG_BYTES: list[tuple[str, list[int], bytes, tuple[str, ...]]] = [
    ("FP8", [1], b"\0", ("FP8", "FP32", "BYTES")),
    ("fp32", [1], b"\0" * 4, ("'fp32'", "known are")),
    ("FP32", [-1], b"\0" * 4, ("[-1]", "from 1")),
    ("FP32", [-1, -1], b"\0" * 4, ("[-1, -1]",)),
    ("FP32", [0], b"", ("[0]", "from 1")),
    ("FP32", [0, 2**62], b"", ("from 1",)),
    ("FP32", [2**62, 4], b"\0" * 4, (str(HUGE),)),
    ("FP32", [HUGE] * 8, b"\0" * 4, ("has 4 bytes", str(4 * HUGE**8))),
    ("FP32", [1] * 9, b"\0" * 4, ("9 dimensions", "8")),
    ("FP32", [1] * 100_000, b"\0" * 4, ("100000 dimensions",)),
    ("FP32", [2, 3], b"\0" * 23, ("has 23 bytes", "[2, 3]", "has 24")),
    ("FP32", [2, 3], b"\0" * 25, ("has 25 bytes", "has 24")),
    ("INT64", [2], b"\0" * 8, ("has 8 bytes", "has 16")),
    (BYTES, [HUGE, HUGE], b"\0" * 4, ("4 bytes", str(4 * HUGE**2))),
    (BYTES, [2], elements(b"a"), ("has 5 bytes", "8")),
    (BYTES, [1], elements(b"a", b"b"), ("has 10 bytes", "after 5")),
    (BYTES, [1], elements(b"abc")[:-1], ("element 0 has 3 bytes", "2 are left")),
    (BYTES, [2], elements(b"a", b"")[:-1] + b"", ("element 1",)),
    (BYTES, [1], b"\xff\xff\xff\xff", ("4294967295",)),
    (BYTES, [3], elements(b"abcdefgh"), ("element 1", "0 are left")),
]


@pytest.mark.parametrize(("datatype", "shape", "data", "parts"), WRONG_BYTES, ids=range(len(WRONG_BYTES)))
def test_bytes_that_cannot_be_are_refused_with_both_values(
    datatype: str, shape: list[int], data: bytes, parts: tuple[str, ...]
) -> None:
    refused(lambda: decode("x", datatype, shape, data), *parts)


WRONG_LISTS: list[tuple[str, list[int], list[Any], tuple[str, ...]]] = [
    ("FP16", [1], [1.0], ("FP16", "raw bytes", "FP32")),
    ("BF16", [1], [1.0], ("BF16", "raw bytes", "FP32")),
    ("FP8", [1], [1.0], ("FP8", "known are")),
    ("FP32", [-1], [1.0], ("[-1]",)),
    ("FP32", [2, 2], [1, 2, 3], ("has 3 values", "[2, 2]", "has 4")),
    ("FP32", [HUGE, HUGE], [1, 2, 3], ("has 3 values", str(HUGE**2))),
    ("FP32", [2, 2], [[1, 2], [3]], ("[2, 2]", "dimension 1", "of 2")),
    ("FP32", [2, 2], [[1, 2], 3], ("dimension 1",)),
    ("FP32", [2, 2], [[1, 2], [3, [4]]], ("a list at 3", "a number")),
    ("FP32", [2, 2], [1, 2, 3, [4]], ("a list at 3",)),
    ("FP32", [4], [[1, 2], [3, 4]], ("dimension 0", "of 4")),
    ("FP32", [2, 2], [[[1, 2], [3, 4]]], ("dimension 0",)),
    ("FP32", [1], ["1"], ("a string at 0", "a number")),
    ("FP32", [1], [True], ("true at 0", "a number")),
    ("FP32", [1], [None], ("null at 0",)),
    ("FP64", [1], [10**400], ("FP64 cannot hold",)),
    ("INT32", [2], [1, 2.0], ("2.0 at 1", "a whole number")),
    ("INT32", [1], [2**31], ("INT32 cannot hold",)),
    ("UINT8", [1], [-1], ("UINT8 cannot hold",)),
    ("BOOL", [1], [1], ("1 at 0", "true or false")),
    (BYTES, [1], [1], ("1 at 0", "a string")),
    (BYTES, [1], [{}], ("an object at 0", "a string")),
]


@pytest.mark.parametrize(("datatype", "shape", "said", "parts"), WRONG_LISTS, ids=range(len(WRONG_LISTS)))
def test_lists_that_cannot_be_are_refused_with_both_values(
    datatype: str, shape: list[int], said: list[Any], parts: tuple[str, ...]
) -> None:
    refused(lambda: listed("x", datatype, shape, said), *parts)


def refused(read: Any, *parts: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        read()
    assert raised.value.field == "x"
    assert raised.value.message.startswith("x ")
    for part in parts:
        assert part in raised.value.message


def test_a_float_that_is_too_large_becomes_infinite_and_is_left_to_the_model() -> None:
    assert values(listed("x", "FP32", [2], [1e39, 1])).tolist() == [float("inf"), 1.0]


def test_a_name_is_shown_short_and_on_one_line() -> None:
    with pytest.raises(InvalidInput) as raised:
        decode("x\n" * 1000, "FP8", [1], b"")
    assert "\n" not in raised.value.message and len(raised.value.message) < 500
