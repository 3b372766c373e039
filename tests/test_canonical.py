"""The canonical encoding: different values have different bytes, equal ones the same, and the bytes never change."""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.canonical import Value, encode

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=4), st.binary(max_size=4)
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3)),
    max_leaves=8,
)


def tagged(value: Any) -> object:
    """``value`` with its types, so that ``1``, ``1.0`` and ``True`` compare as different; -0.0 and 0.0 too."""
    if isinstance(value, dict):
        return ("map", tuple(sorted((k, tagged(v)) for k, v in value.items())))
    if isinstance(value, list | tuple):
        return ("list", tuple(tagged(v) for v in value))
    return (type(value).__name__, repr(value))


def decode(data: bytes) -> tuple[Any, bytes]:
    """The value that ``data`` begins with, and what is left: that there is a way back is what injective means."""
    tag, rest = data[:1], data[1:]
    if tag in b"nTF":
        return {b"n": None, b"T": True, b"F": False}[tag], rest
    if tag == b"d":
        return struct.unpack("<d", rest[:8])[0], rest[8:]
    size = int.from_bytes(rest[:4], "little")
    body, rest = rest[4 : 4 + size], rest[4 + size :]
    if tag == b"i":
        return int.from_bytes(body, "little", signed=True), rest
    if tag == b"s":
        return body.decode(), rest
    if tag == b"b":
        return body, rest
    items = []
    while body:
        item, body = decode(body)
        items.append(item)
    return (items if tag == b"l" else dict(zip(items[::2], items[1::2], strict=True))), rest


@given(VALUES)
def test_every_value_can_be_read_back(value: Any) -> None:
    back, rest = decode(encode(value))
    assert rest == b""
    assert tagged(back) == tagged(value)


@given(VALUES, VALUES)
def test_bytes_are_equal_exactly_where_values_are(one: Any, two: Any) -> None:
    assert (encode(one) == encode(two)) == (tagged(one) == tagged(two))


@given(st.lists(VALUES, max_size=4), st.integers(0, 4))
def test_no_list_is_taken_for_another_cut_differently(values: list[Any], cut: int) -> None:
    halves: list[Any] = [values[:cut], values[cut:]]
    assert encode(halves) != encode(values)


@given(st.dictionaries(st.text(max_size=3), st.integers(), max_size=6))
def test_the_order_of_a_mapping_does_not_count(mapping: dict[str, int]) -> None:
    turned = OrderedDict(reversed(mapping.items()))
    assert encode(turned) == encode(mapping)


@pytest.mark.parametrize(
    ("value", "data"),
    [
        (None, "6e"),
        (True, "54"),
        (False, "46"),
        (0, "690100000000"),
        (127, "69010000007f"),
        (128, "69020000008000"),
        (-1, "6901000000ff"),
        (1.5, "64000000000000f83f"),
        ("é", "7302000000c3a9"),
        (b"\x00", "620100000000"),
        ([], "6c00000000"),
        ({"b": 1, "a": None}, "6d13000000" + "730100000061" + "6e" + "730100000062" + "690100000001"),
    ],
)
def test_the_bytes_are_part_of_the_format(value: Value, data: str) -> None:
    assert encode(value).hex() == data


def test_a_tuple_is_a_list() -> None:
    assert encode((1, ("a",))) == encode([1, ["a"]])


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({1: 2}, "mapping keys must be strings, not 1"),
        ({1, 2}, "set has no canonical form"),
        ([object], "type has no canonical form"),
        ({"a": [1j]}, "complex has no canonical form"),
    ],
)
def test_what_has_no_canonical_form_is_an_error(value: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        encode(value)
