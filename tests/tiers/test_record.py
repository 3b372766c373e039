"""The record: what is packed is parsed, what is damaged is refused, and the format is what its text says."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from kvtide.block import ALIGN, BlockKey, Geometry, padded
from kvtide.testing.blocks import content, keys
from kvtide.tiers.format.record import (
    MAGIC,
    SECTION,
    VERSION,
    Header,
    Rejected,
    check_table,
    header_bytes,
    parse,
    recognise,
    sound,
    verify,
)


def table(count: int, section: int = 4096, start: int | None = None) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    start = header_bytes(count) if start is None else start
    rows = np.zeros(count, SECTION)
    rows["offset"] = start + np.arange(count) * padded(section)
    rows["stored"] = rows["raw"] = section
    rows["check"] = np.array([xxh3_128_digest(bytes([i % 256])) for i in range(count)], "V16")
    return rows


def sample(sections: int = 4, tokens: bytes = b"") -> Header:
    return Header(
        key=BlockKey(bytes(range(1, 33)) + b"full"),
        parent=bytes(range(32, 64)),
        namespace=bytes(range(64, 96)),
        tenant=bytes(range(96, 112)),
        layout=bytes(range(112, 128)),
        sequence=123456789,
        depth=7,
        tokens_covered=256,
        codec=0,
        raw=sections * 4096,
        sections=table(sections, start=header_bytes(sections, len(tokens))),
        created=1.7e9,
        expiry=1.8e9,
        priority=-3,
        tokens=tokens,
    )


def packed(header: Header) -> bytearray:
    out = bytearray(header.pages * ALIGN)
    header.pack_into(memoryview(out))
    return out


def resealed(data: bytearray) -> memoryview:
    """With a checksum that is right again: a record by somebody who meant it so."""
    data[16:32] = bytes(16)
    data[16:32] = xxh3_128_digest(data)
    return memoryview(data)


def same(a: Header, b: Header) -> bool:
    return all(
        np.array_equal(getattr(a, name), getattr(b, name))
        if name == "sections"
        else getattr(a, name) == getattr(b, name)
        for name in Header.__slots__
    )


headers = st.builds(
    Header,
    key=st.tuples(st.binary(min_size=32, max_size=32), st.text("abcxyz_0189", min_size=1, max_size=16)).map(
        lambda parts: BlockKey(parts[0] + parts[1].encode())
    ),
    parent=st.binary(min_size=32, max_size=32),
    namespace=st.binary(min_size=32, max_size=32),
    tenant=st.binary(min_size=16, max_size=16),
    layout=st.binary(min_size=16, max_size=16),
    sequence=st.integers(0, 2**62),
    depth=st.integers(0, 2**32 - 1),
    tokens_covered=st.integers(0, 2**32 - 1),
    codec=st.integers(0, 2**16 - 1),
    raw=st.integers(0, 2**63),
    sections=st.tuples(st.integers(1, 300), st.integers(1, 70_000)).map(lambda n: table(*n)),
    created=st.floats(allow_nan=False),
    expiry=st.floats(allow_nan=False),
    priority=st.integers(-100, 100),
    tokens=st.binary(max_size=5000),
)


@given(headers)
def test_what_is_packed_is_parsed(header: Header) -> None:
    data = packed(header)
    assert len(data) == header_bytes(len(header.sections), len(header.tokens))
    assert recognise(memoryview(data)) == len(data)
    assert same(parse(memoryview(data)), header)
    # What follows the header, its payload, does not matter to it.
    assert same(parse(memoryview(data + b"x" * 100)), header)


def test_fields_lie_where_the_format_says() -> None:
    """The offsets of the module's text, read by hand: records are written once and read for years."""
    tokens = struct.pack("<3I", 5, 6, 7)
    data = packed(sample(tokens=tokens))
    assert len(data) == 4096
    assert data[:8] == MAGIC == b"KVTIDE\r\n"
    assert struct.unpack_from("<HHI", data, 8) == (VERSION, 1, 0) == (1, 1, 0)
    assert data[32:96] == bytes(64)
    assert struct.unpack_from("<Qdd", data, 96) == (123456789, 1.7e9, 1.8e9)
    assert struct.unpack_from("<II", data, 120) == (7, 256)
    assert struct.unpack_from("<QQ", data, 128) == (4 * 4096, 4 * 4096)
    assert struct.unpack_from("<Hh", data, 144) == (0, -3)
    assert struct.unpack_from("<III", data, 148) == (4, 8 + 12, 0)
    assert data[160:208] == bytes(range(1, 33)) + b"full" + bytes(12)
    assert data[208:320] == bytes(range(32, 128)) + bytes(16)
    for i in range(4):
        row = struct.unpack_from("<QII16s", data, 320 + 32 * i)
        assert row == (4096 * (1 + i), 4096, 4096, xxh3_128_digest(bytes([i])))
    assert data[448:468] == struct.pack("<HHI", 1, 0, 12) + tokens
    assert not any(data[468:])
    check = bytes(data[16:32])
    data[16:32] = bytes(16)
    assert xxh3_128_digest(data) == check


def test_the_format_has_not_changed() -> None:
    """If this fails, VERSION must grow: records on disk would be misread."""
    assert xxh3_128_hexdigest(packed(sample())) == "4da55873c0b9300fca5a9e2089719538"
    assert xxh3_128_hexdigest(packed(sample(130, b"tokens"))) == "80c1071e3ddb5d55f9abd3949e64bc6a"


def test_every_bit_counts() -> None:
    data = packed(sample(tokens=b"abcd"))
    original = parse(memoryview(data))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Rejected):
            parse(memoryview(data))
        data[bit // 8] ^= 1 << bit % 8
    assert same(parse(memoryview(data)), original)


@pytest.mark.parametrize("sections", [4, 130])
def test_every_truncation_is_torn(sections: int) -> None:
    data = memoryview(packed(sample(sections)))
    for length in range(0, len(data), 64):
        with pytest.raises(Rejected, match="torn"):
            parse(data[:length])
    with pytest.raises(Rejected, match="torn"):
        parse(data[:-1])


def test_a_torn_write_of_a_long_header_is_refused() -> None:
    """One page of the new header, the other still of the old."""
    old, new = sample(130), sample(130)
    old.sequence, new.sequence = 1, 2
    new.sections["check"] = old.sections["check"][::-1]
    first, second = packed(old), packed(new)
    for mixed in (first[:ALIGN] + second[ALIGN:], second[:ALIGN] + first[ALIGN:]):
        with pytest.raises(Rejected, match="corrupt header"):
            parse(memoryview(mixed))


def with_fields(fields: bytes) -> memoryview:
    data = packed(sample())
    data[448 : 448 + len(fields)] = fields
    struct.pack_into("<I", data, 152, len(fields))
    return resealed(data)


TOKENS = struct.pack("<HHI", 1, 0, 8) + b"12345678"


def field(tag: int, body: bytes) -> bytes:
    return struct.pack("<HHI", tag, 0, len(body)) + body


@pytest.mark.parametrize("tag", [2, 99, 0x7FFF])
def test_an_unknown_optional_field_is_skipped(tag: int) -> None:
    later = field(tag, b"something of a later version")
    for fields in (later, later + TOKENS, TOKENS + later, field(tag, b"") + TOKENS + later):
        header = parse(with_fields(fields))
        assert header.tokens == (b"12345678" if TOKENS in fields else b"")
        assert header.key == sample().key


@pytest.mark.parametrize("tag", [0x8000, 0x8001, 0xFFFF])
def test_an_unknown_required_field_is_refused(tag: int) -> None:
    for fields in (field(tag, b"x"), TOKENS + field(tag, b""), field(2, b"") + field(tag, b"x") + TOKENS):
        with pytest.raises(Rejected, match="required field"):
            parse(with_fields(fields))


@pytest.mark.parametrize("fields", [b"x", TOKENS[:7], TOKENS[:-1], field(2, b"abc")[:-2], TOKENS + b"\0"])
def test_fields_that_do_not_end_are_refused(fields: bytes) -> None:
    with pytest.raises(Rejected, match="corrupt header"):
        parse(with_fields(fields))


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [
        (0, b"KVTIDE\n\n", "no record"),
        (0, bytes(8), "no record"),
        (8, b"\2\0", "version 2"),
        (8, b"\0\0", "version 0"),
        (8, b"\xff\xff", "version 65535"),
        (10, b"\0\0", "corrupt header"),
        (10, b"\2\0", "torn"),
        (12, b"\1\0\0\0", "its key is not here"),
        (12, b"\2\0\0\0", "unknown flags"),
        (12, b"\0\0\0\x80", "unknown flags"),
        (148, b"\0\0\0\0", "corrupt header"),
        (148, b"\xff\xff\xff\xff", "corrupt header"),
        (152, b"\xff\xff\xff\xff", "corrupt header"),
    ],
)
def test_what_a_reader_of_this_version_cannot_know_is_refused(at: int, value: bytes, reason: str) -> None:
    data = packed(sample())
    data[at : at + len(value)] = value
    with pytest.raises(Rejected, match=reason):
        parse(resealed(data))


@given(st.binary(max_size=3 * ALIGN))
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(Rejected):
        parse(memoryview(data))


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(8, 700), st.binary(min_size=1, max_size=8)), min_size=1, max_size=6))
def test_a_wrong_writer_cannot_crash_a_reader(changes: list[tuple[int, bytes]]) -> None:
    """Any header with a right checksum is parsed or refused, and its table checked before it is used."""
    data = packed(sample(tokens=b"abcd"))
    for at, value in changes:
        data[at : at + len(value)] = value
    try:
        header = parse(resealed(data))
        check_table(header, ALIGN, Geometry(len(header.sections), 4096), 5 * ALIGN)
    except Rejected:
        return
    ends = header.sections["offset"] + header.sections["stored"]
    assert (header.sections["offset"] >= ALIGN).all()
    assert (ends <= 5 * ALIGN).all()
    assert (header.sections["stored"] <= header.sections["raw"]).all()


def test_sections_are_verified_alone() -> None:
    (key,) = keys(1)
    data = bytearray(content(key, 4 * 8192).tobytes())
    rows = np.zeros(4, SECTION)
    rows["offset"], rows["stored"] = ALIGN + np.arange(4) * 8192, 5000
    rows["check"] = np.array([xxh3_128_digest(data[i : i + 5000]) for i in range(0, 4 * 8192, 8192)], "V16")
    header = sample()
    header.sections = rows
    verify(header, range(4), memoryview(data))
    verify(header, range(2, 4), memoryview(data)[2 * 8192 :])
    data[8192 + 5000] ^= 1  # padding
    verify(header, range(4), memoryview(data))
    data[8192 + 4999] ^= 1
    for wanted, start in ((range(1), 0), (range(2, 4), 2 * 8192)):
        verify(header, wanted, memoryview(data)[start:])
    for wanted, start in ((range(4), 0), (range(1, 2), 8192), (range(1, 4), 8192)):
        with pytest.raises(Rejected, match="corrupt payload"):
            verify(header, wanted, memoryview(data)[start:])


GEOMETRY = Geometry(4, 5000)


def whole(tokens: bytes = b"") -> tuple[bytearray, bytearray, Header]:
    """A header, its payload, and what they say."""
    (key,) = keys(1)
    payload = bytearray(content(key, GEOMETRY.footprint).tobytes())
    header = sample(4, tokens)
    header.sections = table(4, 5000)
    cuts = [slice(i * GEOMETRY.stride, i * GEOMETRY.stride + 5000) for i in range(4)]
    header.sections["check"] = np.array([xxh3_128_digest(payload[cut]) for cut in cuts], "V16")
    return packed(header), payload, header


def is_sound(page: bytearray, payload: bytearray, header: Header) -> bool:
    names = header.sequence, header.key, header.namespace, header.tenant, header.layout
    return sound(memoryview(page), memoryview(payload), GEOMETRY, names)


def accepted(page: bytearray, payload: bytearray, wanted: Header) -> bool:
    """The same, step by step."""
    try:
        found = parse(memoryview(page))
        check_table(found, len(page), GEOMETRY, len(page) + len(payload))
        verify(found, range(4), memoryview(payload), GEOMETRY)
    except Rejected:
        return False
    return all(
        getattr(found, name) == getattr(wanted, name) for name in ("sequence", "key", "namespace", "tenant", "layout")
    )


@given(st.data())
def test_the_usual_record_is_judged_in_one_go_as_step_by_step(data: st.DataObject) -> None:
    page, payload, header = whole()
    assert is_sound(page, payload, header)
    assert accepted(page, payload, header)
    where = data.draw(st.sampled_from([page, payload]))
    where[data.draw(st.integers(0, len(where) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    if data.draw(st.booleans()):
        resealed(page)
    before = bytes(page)
    if is_sound(page, payload, header):
        assert accepted(page, payload, header)
    assert page == before


@pytest.mark.parametrize("name", ["sequence", "key", "namespace", "tenant", "layout"])
def test_a_sound_record_of_another_block_is_not_it(name: str) -> None:
    page, payload, header = whole()
    other = getattr(header, name)
    setattr(header, name, other + 1 if isinstance(other, int) else bytes([other[0] ^ 1]) + other[1:])
    assert not is_sound(page, payload, header)
    assert not accepted(page, payload, header)


def test_a_record_with_more_in_it_is_judged_step_by_step() -> None:
    page, payload, header = whole(tokens=b"1234")
    assert not is_sound(page, payload, header)
    assert accepted(page, payload, header)


def test_a_block_that_never_expires() -> None:
    header = sample()
    header.expiry = math.inf
    assert parse(memoryview(packed(header))).expiry == math.inf
