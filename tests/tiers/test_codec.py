"""Between memory and rest: without loss, and what shrinks really takes less room."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from kvtide.block import ALIGN, BlockKey, Geometry, padded
from kvtide.errors import ConfigError
from kvtide.testing.blocks import aligned, content, fill, floats, holds, keys
from kvtide.testing.tier import Caller, shaped
from kvtide.tiers.format import codec
from kvtide.tiers.format.record import Header, Rejected, verify
from kvtide.tiers.nvme.tier import Nvme

ZSTD = codec.Zstd()
HEADER = 2 * ALIGN


def header(table: np.ndarray[tuple[int], np.dtype[np.void]], kind: int) -> Header:
    return Header(BlockKey(b"k" * 32 + b"full"), bytes(32), bytes(32), bytes(16), bytes(16), 1, 0, 256, kind, 0, table)


def stored(data: bytes | np.ndarray[tuple[int], np.dtype[np.uint8]], geometry: Geometry, itemsize: int = 2) -> bytes:
    """Store a block, read it back whole and by sections, and answer the payload."""
    flat = np.frombuffer(data, np.uint8)
    span = aligned(geometry.footprint)
    fill(span, geometry, flat)
    scratch = codec.Scratch()
    payload, table, kind = codec.encode(span, geometry, itemsize, HEADER, ZSTD, scratch)
    record = header(table, kind)
    assert len(payload) % ALIGN == 0
    assert len(payload) <= geometry.footprint
    assert (table["raw"] == geometry.section).all()
    assert table["offset"][0] == HEADER
    for wanted in (range(geometry.sections), *(range(i, i + 1) for i in range(geometry.sections))):
        start = int(table["offset"][wanted.start]) - HEADER
        verify(record, wanted, payload[start:])
        if kind == codec.RAW:
            assert holds(payload[start : start + len(wanted) * geometry.stride], geometry, flat, wanted)
        else:
            out = aligned(len(wanted) * geometry.stride)
            codec.decode(record, wanted, payload[start:], out, geometry, itemsize, ZSTD)
            assert holds(out, geometry, flat, wanted)
    return bytes(payload)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 3000),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["zeros", "floats", "noise", "mixed"]),
    st.integers(0, 2**32),
)
def test_nothing_is_lost(sections: int, items: int, itemsize: int, what: str, seed: int) -> None:
    geometry = Geometry(sections, items * itemsize)
    key = seed.to_bytes(8, "little")
    data = {
        "zeros": np.zeros(geometry.nbytes, np.uint8),
        "floats": floats(key, geometry.nbytes),
        "noise": content(key, geometry.nbytes),
        "mixed": np.concatenate([floats(key, geometry.nbytes // 2), content(key, -(-geometry.nbytes // 2))]),
    }[what]
    stored(data, geometry, itemsize)


@settings(max_examples=30, deadline=None)
@given(st.binary(min_size=1, max_size=20_000))
def test_any_bytes_come_back(data: bytes) -> None:
    stored(data, Geometry(1, len(data)), 1)


def test_numbers_shrink_and_noise_does_not() -> None:
    geometry = Geometry(4, 64 << 10)
    assert len(stored(floats(b"k", geometry.nbytes), geometry)) < 0.85 * geometry.footprint
    assert len(stored(floats(b"k", geometry.nbytes), geometry, 4)) < 0.95 * geometry.footprint
    assert len(stored(np.zeros(geometry.nbytes, np.uint8), geometry, 1)) == 4 * ALIGN
    assert len(stored(content(b"k", geometry.nbytes), geometry)) == geometry.footprint


def test_special_numbers_survive() -> None:
    """NaNs with payloads, infinities, negative zero, subnormals: bits, not values."""
    values = np.array([0x7FC0, 0x7F81, 0xFFFF, 0x7F80, 0xFF80, 0x8000, 0x0001, 0x807F] * 1024, "<u2")
    stored(values.view(np.uint8), Geometry(2, values.nbytes // 2))


def test_one_section_that_does_not_shrink_is_kept_as_it_is() -> None:
    geometry = Geometry(3, 32 << 10)
    data = np.concatenate([floats(b"a", 32 << 10), content(b"b", 32 << 10), floats(b"c", 32 << 10)])
    span = aligned(geometry.footprint)
    fill(span, geometry, data)
    payload, table, kind = codec.encode(span, geometry, 2, HEADER, ZSTD, codec.Scratch())
    assert kind == codec.ZSTD
    assert [s == 32 << 10 for s in table["stored"].tolist()] == [False, True, False]
    assert len(payload) == sum(padded(s) for s in table["stored"].tolist()) < geometry.footprint


def test_a_block_that_gains_no_page_is_raw() -> None:
    """Then it is read without a codec, straight into the caller's memory."""
    geometry = Geometry(2, 4096)
    data = np.concatenate([floats(b"a", 4096), content(b"b", 4096)])
    span = aligned(geometry.footprint)
    fill(span, geometry, data)
    payload, table, kind = codec.encode(span, geometry, 2, HEADER, ZSTD, codec.Scratch())
    assert kind == codec.RAW
    assert payload.obj is span.obj
    assert table["stored"].tolist() == [4096, 4096]
    assert [bytes(c) for c in table["check"].tolist()] == [xxh3_128_digest(span[:4096]), xxh3_128_digest(span[4096:])]


def test_damage_that_a_checksum_missed_is_refused() -> None:
    """Whatever is fed to the decoder, it fills the section or refuses."""
    section = aligned(8192)
    whole = ZSTD.compress(memoryview(floats(b"k", 8192).tobytes()), 2)
    kept = bytes(4096)  # of 4,096 numbers the lower bytes; then a frame of the upper ones
    # A frame that says it holds 2**60 bytes.
    liar = bytes.fromhex("28b52ffd") + b"\xe0" + (1 << 60).to_bytes(8, "little") + b"\x01\x00\x00"
    damaged = [b"", b"x", whole[:-1], whole[: len(whole) // 2], kept, kept + whole[4096:][::-1], kept + bytes(100)]
    for bad in (*damaged, kept + b"\x28\xb5\x2f\xfd" * 20, kept + liar, liar):
        for number in (codec.ZSTD, codec.PLANES):
            with pytest.raises(Rejected, match="undecodable"):
                ZSTD.decompress(memoryview(bad), section, 2, number)
    for size in (4096, 16384):  # a frame of another length than the section
        other = ZSTD.compress(memoryview(floats(b"k", size).tobytes()), 2)
        with pytest.raises(Rejected, match="undecodable"):
            ZSTD.decompress(memoryview(other), section, 2, codec.ZSTD)


@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_records_of_the_first_codec_are_still_read(itemsize: int) -> None:
    import zstandard

    data = floats(b"old", 8192)
    planes = np.ascontiguousarray(data.reshape(-1, itemsize).T).tobytes()
    section = aligned(8192)
    ZSTD.decompress(memoryview(zstandard.compress(planes)), section, itemsize, codec.PLANES)
    assert bytes(section) == data.tobytes()


def test_all_that_is_left_of_bfloat16_are_mantissas_and_a_third_of_the_exponents() -> None:
    assert len(ZSTD.compress(memoryview(floats(b"k", 1 << 20).tobytes()), 2)) < 0.7 * (1 << 20)


def test_another_codec_is_refused() -> None:
    geometry = Geometry(1, 8192)
    span = aligned(8192)
    fill(span, geometry, floats(b"k", 8192))
    payload, table, _ = codec.encode(span, geometry, 2, HEADER, ZSTD, codec.Scratch())
    with pytest.raises(Rejected, match="codec 7 is not known"):
        codec.decode(header(table, 7), range(1), payload, aligned(8192), geometry, 2, ZSTD)


def test_codecs_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert codec.make("raw") is None
    assert codec.make("zstd") is not None
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"pip install kvtide\[zstd\]"):
        codec.make("zstd")


def test_scratch_is_aligned_and_kept() -> None:
    scratch = codec.Scratch()
    first = scratch.get(5000)
    assert len(first) == 5000
    assert np.frombuffer(first, np.uint8).ctypes.data % ALIGN == 0
    assert scratch.get(100).obj is first.obj
    assert np.frombuffer(scratch.get(1 << 20), np.uint8).ctypes.data % ALIGN == 0


def room(where: Path, compression: str) -> tuple[int, int]:
    """How many blocks of numbers fit into 6 MiB, and how many bytes of slots they take."""
    who = shaped(4, 40 << 10)
    caller = Caller(Nvme(where, 6 << 20, segment=1 << 20, compression=compression), floats)
    held = caller.fill(who)
    assert all(caller.finds(list(held), who, list(held.values())))
    used = caller.statistics().bytes_used
    caller.close()
    return len(held), used


def test_its_gain_is_capacity(tmp_path: Path) -> None:
    raw, raw_bytes = room(tmp_path / "raw", "raw")
    packed, packed_bytes = room(tmp_path / "zstd", "zstd")
    assert packed >= 1.15 * raw
    assert packed_bytes / packed <= 0.87 * raw_bytes / raw


def test_a_tier_reads_what_another_codec_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    who, names = shaped(4, 20 << 10), keys(2)
    places: list[int] = []
    for key, compression in zip(names, ("zstd", "raw"), strict=True):
        caller = Caller(Nvme(tmp_path / "tier", 4 << 20, segment=1 << 20, compression=compression), floats)
        places += caller.write([key], who)
        assert all(caller.finds(names[: len(places)], who, places))
        caller.close()
    # Where the codec is not installed, its blocks are misses, and nothing else.
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    caller = Caller(Nvme(tmp_path / "tier", 4 << 20, segment=1 << 20), floats)
    assert caller.finds(names, who, places) == [False, True]
    assert ("its codec is not installed", 1) in caller.statistics().reasons
    caller.close()
