"""Sealed records: a stranger learns nothing from them, a forger achieves nothing, and a key that is gone is a miss."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from kvtide.block import ALIGN, BlockKey, Layout, Span
from kvtide.index.keys import DEFAULT_TENANT, Tenant
from kvtide.security.key_admin import destroy
from kvtide.security.key_file import KeyFile
from kvtide.security.key_ring import KeyRing
from kvtide.testing.blocks import aligned, content, fill, floats, holds, identity, keys
from kvtide.testing.clock import FakeClock
from kvtide.testing.keys import ring_in
from kvtide.testing.tier import Caller, shaped
from kvtide.tiers.base import Identity, Read, Write
from kvtide.tiers.format.encryption import OPEN, Encryption, RecordCipher
from kvtide.tiers.format.packer import Packer
from kvtide.tiers.format.reason import Reason
from kvtide.tiers.format.record import Rejected
from kvtide.tiers.nvme.tier import Nvme

FOUR = shaped(4, 5000)
EVEN = shaped(4, 8192)
"""Without padding, and so with short sections that are opened from elsewhere into place."""
BUDGET = 4 << 20


def opened(path: Path, key_ring: KeyRing | None, *, seals: bool = True, accept_open: bool = False) -> Caller:
    encryption = Encryption(key_ring, seals=seals, accept_open=accept_open)
    return Caller(Nvme(path / "tier", BUDGET, segment=1 << 20, threads=2, encryption=encryption))


def found(caller: Caller) -> dict[BlockKey, int]:
    return {k: p for held in caller.tier.scan() for k, p in zip(held.keys, held.places.tolist(), strict=True)}


def reasons(caller: Caller) -> dict[str, int]:
    return dict(caller.tier.statistics().reasons)


def on_disk(path: Path) -> bytes:
    return b"".join(p.read_bytes() for p in sorted((path / "tier").iterdir()))


# -- one record -----------------------------------------------------------------------------------------------


class Record:
    """A record in memory, made by one packer and read by another."""

    def __init__(self, key_ring: KeyRing, who: Identity, compression: str = "raw", tokens: bytes = b"") -> None:
        self.key_ring, self.who = key_ring, who
        (self.key,) = keys(1)
        make = floats if compression == "zstd" else content
        self.data = make(self.key, who.geometry.nbytes)
        span = aligned(who.geometry.footprint)
        fill(span, who.geometry, self.data)
        packed = Packer(compression, Encryption(key_ring)).pack(
            Write(self.key, who, span, bytes(32), 0, 1, tokens=tokens)
        )
        page = aligned(packed.header)
        packed.name(page, 7, 1.0)
        self.header = packed.header
        self.bytes = bytearray(page) + bytearray(packed.payload)
        cuts = packed.table[["offset", "stored"]].tolist()
        self.meant = [*range(self.header), *(i for offset, size in cuts for i in range(offset, offset + size))]
        """All its bytes but padding."""

    def read(self, sections: range | None = None, encryption: Encryption | None = None, changed: bytes = b"") -> bool:
        """Whether it is read; what is must be right. ``changed``: what it is after its start was read."""
        geometry = self.who.geometry
        span = aligned((geometry.sections if sections is None else len(sections)) * geometry.stride)
        item = Read(self.key, self.who, 0, span, sections)
        start = memoryview(self.bytes)[:ALIGN]

        def fetch(into: Sequence[Span], offset: int) -> int:
            got, data = 0, memoryview(self.bytes)[offset:]
            for part in into:
                size = min(len(part), len(data))
                part[:size], data = data[:size], data[size:]
                got += size
            return got

        room, packer = len(self.bytes), Packer("raw", encryption or Encryption(self.key_ring))
        number = 0 if sections is None and room == ALIGN + geometry.footprint else None
        if number is None:
            into: Sequence[Span] = [span[: max(0, room - ALIGN) if sections is None else 0]]
        else:
            into = packer.into(item, number)
        got = fetch([aligned(ALIGN), *into], 0)
        self.bytes = bytearray(changed) or self.bytes
        packer.unpack(item, 7, start, got, room, fetch, number)
        return holds(span, geometry, self.data, sections)


@pytest.fixture(scope="module")
def key_ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyRing]:
    made = ring_in(tmp_path_factory.mktemp("keys"))
    yield made
    made.close()


@pytest.mark.parametrize("who", [FOUR, EVEN])
@pytest.mark.parametrize("compression", ["raw", "zstd"])
@pytest.mark.parametrize("tokens", [b"", b"token ids!!!" * 500])
def test_a_record_and_each_of_its_sections_can_be_read(
    key_ring: KeyRing, who: Identity, compression: str, tokens: bytes
) -> None:
    record = Record(key_ring, who, compression, tokens)
    assert record.read()
    for first in range(4):
        for last in range(first + 1, 5):
            assert record.read(range(first, last))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_change_of_a_record_passes(key_ring: KeyRing, data: st.DataObject) -> None:
    """Whatever byte of it is changed; with a checksum that is right again too."""
    record = Record(key_ring, data.draw(st.sampled_from([FOUR, EVEN])), data.draw(st.sampled_from(["raw", "zstd"])))
    at = data.draw(st.sampled_from(record.meant))
    record.bytes[at] ^= data.draw(st.integers(1, 255))
    if at < record.header and at not in range(16, 32) and data.draw(st.booleans()):
        record.bytes[16:32] = bytes(16)
        record.bytes[16:32] = xxh3_128_digest(record.bytes[: record.header])
    with pytest.raises(Rejected):
        record.read()


def test_a_record_that_changes_while_it_is_read_is_looked_at_again(key_ring: KeyRing) -> None:
    """A storage may give another answer when the rest of a long header is fetched: one in the open, say."""
    tokens = b"token ids!!!" * 500
    record, again = Record(key_ring, FOUR, tokens=tokens), Record(key_ring, FOUR, tokens=tokens)
    span = aligned(FOUR.geometry.footprint)
    fill(span, FOUR.geometry, record.data)
    packed = Packer("raw", OPEN).pack(Write(record.key, FOUR, span, bytes(32), 0, 1, tokens=tokens))
    page = aligned(packed.header)
    packed.name(page, 7, 1.0)
    forged = bytes(page) + bytes(packed.payload)
    assert record.read(encryption=Encryption(key_ring, accept_open=True), changed=forged)
    with pytest.raises(Rejected, match="not sealed"):
        again.read(changed=forged)


@pytest.mark.parametrize("who", [FOUR, EVEN])
def test_sections_cannot_change_places_nor_come_from_another_time(key_ring: KeyRing, who: Identity) -> None:
    record, again = Record(key_ring, who), Record(key_ring, who)
    assert record.bytes[record.header :] != again.bytes[record.header :]  # the same block, sealed twice
    stride, first = who.geometry.stride, record.header
    swapped = Record(key_ring, who)
    swapped.bytes[first : first + stride], swapped.bytes[first + stride : first + 2 * stride] = (
        swapped.bytes[first + stride : first + 2 * stride],
        swapped.bytes[first : first + stride],
    )
    record.bytes[first : first + stride] = again.bytes[first : first + stride]
    for forged in (record, swapped):
        with pytest.raises(Rejected, match="corrupt payload"):
            forged.read()


def test_a_second_implementation_opens_a_record_with_the_tenants_key_and_aes_256_gcm(key_ring: KeyRing) -> None:
    """From the description of the format alone: so it says what is done, and nothing weaker is."""
    record = Record(key_ring, FOUR)
    head, own = bytes(record.bytes[: record.header]), key_ring.of(FOUR.tenant)
    assert (own.id, len(own.secret)) == (head[32:48], 32)

    def cipher(info: bytes) -> AESGCM:
        return AESGCM(HKDF(hashes.SHA256(), 32, head[48:80], info).derive(own.secret))

    body = cipher(b"kvtide 1 header").decrypt(b"\xff" * 12, head[96:] + head[80:96], head[:16] + head[32:80])
    assert (body[64:96], body[176:192]) == (record.key[:32], FOUR.tenant)
    sections = cipher(b"kvtide 1 sections" + record.key)
    found = b""
    for i in range(4):
        offset, stored, _, tag = struct.unpack_from("<QII16s", body, 320 - 96 + 32 * i)
        found += sections.decrypt(i.to_bytes(12, "little"), bytes(record.bytes[offset : offset + stored]) + tag, None)
    assert found == record.data.tobytes()
    own = key_ring.of(bytes(range(16)))
    with pytest.raises(InvalidTag):
        cipher(b"kvtide 1 header").decrypt(b"\xff" * 12, head[96:] + head[80:96], head[:16] + head[32:80])


def test_without_the_key_a_record_is_a_miss_with_a_reason(key_ring: KeyRing, tmp_path: Path) -> None:
    record = Record(key_ring, FOUR)
    with pytest.raises(Rejected, match="its key is not here"):
        record.read(encryption=OPEN)
    with pytest.raises(Rejected, match="its key is not known here"):
        record.read(encryption=Encryption(ring_in(tmp_path)))


# -- a directory ----------------------------------------------------------------------------------------------


def test_a_stranger_finds_nothing_on_the_disk(tmp_path: Path) -> None:
    """Neither bytes of blocks nor keys, parents, namespace, tenant, layout or token ids; in the journal neither."""
    caller = opened(tmp_path, ring_in(tmp_path))
    names = keys(8)
    tokens = np.arange(1000, dtype="<u4").tobytes()
    batch = [caller.block(k, FOUR) for k in names]
    caller.start_write([Write(w.key, w.identity, w.span, bytes(range(32)), 3, w.owner, tokens=tokens) for w in batch])
    caller.close()
    disk = on_disk(tmp_path)
    wanted = [k[:16] for k in names] + [content(k, 20000).tobytes()[:16] for k in names]
    wanted += [bytes(range(32))[:16], FOUR.namespace[:16], FOUR.tenant, FOUR.layout, tokens[400:416]]
    assert [w for w in wanted if w in disk] == []


def test_equal_blocks_of_equal_names_look_different_each_time(tmp_path: Path) -> None:
    pages = []
    for name in ("a", "b"):
        caller = opened(tmp_path / name, ring_in(tmp_path))
        caller.write(keys(1), FOUR)
        caller.close()
        pages.append((tmp_path / name / "tier" / "00000.segment").read_bytes()[ALIGN:])
    same = sum(pages[0][i : i + 16] == pages[1][i : i + 16] != bytes(16) for i in range(96, 6 * ALIGN, 16))
    assert same == 0


@pytest.mark.parametrize("journal", [True, False])
def test_everything_is_found_again_with_the_keys(tmp_path: Path, journal: bool) -> None:
    caller = opened(tmp_path, ring_in(tmp_path))
    caller.write(keys(10), FOUR)
    caller.close()
    if not journal:
        (tmp_path / "tier" / "journal").unlink()
    caller = opened(tmp_path, ring_in(tmp_path))
    places = found(caller)
    assert set(places) == set(keys(10))
    assert all(caller.finds(list(places), FOUR, list(places.values())))
    caller.close()


@pytest.mark.parametrize("journal", [True, False])
def test_without_the_keys_a_directory_is_free(tmp_path: Path, journal: bool, caplog: pytest.LogCaptureFixture) -> None:
    """And can be used for others; what was there is not served, and does not come back."""
    caller = opened(tmp_path, ring_in(tmp_path))
    caller.write(keys(10), FOUR)
    caller.close()
    if not journal:
        (tmp_path / "tier" / "journal").unlink()
    caller = opened(tmp_path, ring_in(tmp_path / "other"))
    assert found(caller) == {}
    assert reasons(caller) == {"its key is not known here": 10}
    assert "10 encrypted records cannot be read" in caplog.text
    places = caller.write(keys(20, start=50), FOUR)
    assert all(caller.finds(keys(20, start=50), FOUR, places))
    caller.close()


def test_what_was_dropped_without_its_key_does_not_come_back_with_it(tmp_path: Path) -> None:
    caller = opened(tmp_path, ring_in(tmp_path))
    caller.write(keys(3), FOUR)
    caller.close()
    caller = opened(tmp_path, None)
    assert caller.start_drop([(keys(1)[0], -1)]).wait() == [True]
    caller.close()
    (tmp_path / "tier" / "journal").unlink()
    caller = opened(tmp_path, ring_in(tmp_path))
    assert keys(1)[0] not in found(caller)
    caller.close()


@pytest.mark.parametrize("who", [FOUR, EVEN])
def test_encryption_can_be_turned_on_and_off_over_the_same_directory(tmp_path: Path, who: Identity) -> None:
    written: list[BlockKey] = []
    for start, seals in ((0, False), (10, True), (20, False), (30, True)):
        caller = opened(tmp_path, ring_in(tmp_path), seals=seals, accept_open=True)
        places = found(caller)
        assert set(places) == set(written)
        assert all(caller.finds(list(places), who, list(places.values())))
        caller.write(keys(10, start=start), who)
        written += keys(10, start=start)
        caller.close()


def test_a_block_of_more_sections_than_one_call_reads_into_is_read(tmp_path: Path) -> None:
    wide, many = shaped(1100, ALIGN), shaped(64, ALIGN)
    encryption = Encryption(ring_in(tmp_path))
    caller = Caller(Nvme(tmp_path / "tier", 64 << 20, segment=16 << 20, threads=2, encryption=encryption))
    for who, count in ((wide, 2), (many, 80)):
        places = caller.write(keys(count), who)
        assert all(caller.finds(keys(count), who, places))
        assert caller.start_drop(list(zip(keys(count), places, strict=True))).wait() == [True] * count
    assert caller.tier.statistics().failed_reads == 0
    caller.close()


@pytest.mark.parametrize("known", [True, False])
def test_who_waits_for_a_key_keeps_nobody_else_waiting(tmp_path: Path, known: bool) -> None:
    """Few threads open records with short sections at a time: none of them asks a key service meanwhile, nor again."""
    key_ring, asked, fetched = ring_in(tmp_path), threading.Semaphore(0), threading.Event()
    other = replace(EVEN, tenant=bytes(range(16)))
    slow, fast = Record(key_ring, other), Record(key_ring, EVEN)

    class Slow(Encryption):
        def old(self, number: bytes, salt: bytes) -> RecordCipher:
            if number == key_ring.of(other.tenant).id:
                asked.release()
                fetched.wait()
                if not known:
                    raise Rejected(Reason.KEY_UNKNOWN)
            return super().old(number, salt)

    def wait() -> None:
        with nullcontext() if known else pytest.raises(Rejected, match="its key"):
            assert slow.read(encryption=Slow(key_ring))

    waiting = [threading.Thread(target=wait) for _ in range(4)]
    for thread in waiting:
        thread.start()
    for _ in waiting:
        asked.acquire()
    for _ in range(4):
        assert fast.read(encryption=Slow(key_ring))
    fetched.set()
    for thread in waiting:
        thread.join()
    assert not asked.acquire(blocking=False), "once for each record"
    key_ring.close()


def test_neighbours_of_a_spoilt_block_are_read(tmp_path: Path) -> None:
    """They are read in one call, to memory that they have for themselves, and each is opened from there."""
    caller = opened(tmp_path, ring_in(tmp_path))
    names = keys(20)
    places = caller.write(names, EVEN)
    segment = min((tmp_path / "tier").glob("*.segment"))
    with segment.open("r+b") as file:
        data = bytearray(file.read())
        at = data.index(b"KVTIDE", data.index(b"KVTIDE", ALIGN) + 1) + 2 * ALIGN  # in the second or a later record
        file.seek(at)
        file.write(bytes([data[at] ^ 1]))
    hits = caller.finds(names, EVEN, places)
    assert hits.count(False) == 1
    assert reasons(caller) == {"corrupt payload": 1}
    caller.close()


@pytest.mark.parametrize("journal", ["kept", "lost"])
def test_where_records_are_sealed_one_in_the_open_is_a_miss_and_is_written_anew(tmp_path: Path, journal: str) -> None:
    caller = opened(tmp_path, ring_in(tmp_path), seals=False)
    caller.write(keys(4), FOUR)
    caller.close()
    if journal == "lost":
        (tmp_path / "tier" / "journal").unlink()
    caller = opened(tmp_path, ring_in(tmp_path))
    places = found(caller)
    for sections in (None, range(1, 2)):
        batch = [caller.read_item(key, FOUR, place, sections) for key, place in places.items()]
        assert not any(caller.read(batch))
    assert set(reasons(caller)) <= {"not sealed"}
    again = caller.write(keys(4), FOUR)
    assert all(caller.finds(keys(4), FOUR, again))
    caller.close()


def test_a_destroyed_key_is_a_miss_when_its_lease_ends(tmp_path: Path) -> None:
    clock = FakeClock()
    key_ring = ring_in(tmp_path, 60.0, clock)
    caller = opened(tmp_path, key_ring)
    places = caller.write(keys(2), FOUR)
    destroy(KeyFile(tmp_path / "keys.json"), DEFAULT_TENANT.tag, clock)
    assert all(caller.finds(keys(2), FOUR, places))
    clock.advance(61)
    assert not any(caller.finds(keys(2), FOUR, places))
    assert reasons(caller) == {"its key was destroyed": 2}
    refused = caller.write(keys(2, start=5), FOUR)  # this process has not dropped the tenant's blocks yet
    assert refused == [-1, -1]
    key_ring.tend()
    again = caller.write(keys(2, start=7), FOUR)  # what comes after that gets a new key
    assert all(caller.finds(keys(2, start=7), FOUR, again))
    caller.close()


def test_tenants_have_keys_of_their_own(tmp_path: Path) -> None:
    layout = Layout.attention(layers=2, heads=1, head_dim=16, dtype="float32", block_tokens=16)
    one, other = (identity(layout, tenant=Tenant(n, n.encode() * 32)) for n in ("a", "b"))
    clock = FakeClock()
    caller = opened(tmp_path, ring_in(tmp_path, 60.0, clock))
    mine, theirs = keys(3), keys(3, start=10)
    here, there = caller.write(mine, one), caller.write(theirs, other)
    destroy(KeyFile(tmp_path / "keys.json"), one.tenant, clock)
    clock.advance(61)
    assert not any(caller.finds(mine, one, here))
    assert all(caller.finds(theirs, other, there))
    caller.close()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=5000)), min_size=1, max_size=8)
)
def test_garbage_on_the_disk_is_never_more_than_a_miss(
    tmp_path_factory: pytest.TempPathFactory, rubbish: list[tuple[float, bytes]]
) -> None:
    """Bytes written anywhere, by an attacker with the disk but no keys: a read returns the right bytes, or fails."""
    path = tmp_path_factory.mktemp("garbage")
    caller = opened(path, ring_in(path))
    caller.write(keys(6), FOUR)
    caller.close()
    files = sorted(p for p in (path / "tier").iterdir() if p.suffix == ".segment" or p.name == "journal")
    for where, data in rubbish:
        file = files[len(data) % len(files)]
        with file.open("r+b") as f:
            f.seek(int(where * min(file.stat().st_size, 8 * 6 * ALIGN)))
            f.write(data)
    caller = opened(path, ring_in(path))
    places = found(caller)
    assert set(places) <= set(keys(6))
    caller.finds(list(places), FOUR, list(places.values()))  # compares every byte of what it finds
    caller.close()
