"""Encrypted records: header and sections encrypted with AES-256-GCM.

Every record has its own keys, derived from its tenant's data key and a salt of 32 random bytes in its header, so no
nonce is ever used twice though nonces are plain numbers::

    header key     HKDF-SHA256(data key, salt, "kvtide 1 header")
    section key    HKDF-SHA256(data key, salt, "kvtide 1 sections" + block key)

The *body* of the header (all but magic, version, size, flags, checksum, key id, salt and tag) is encrypted with the
first, with the clear fields as associated data. Each section is encrypted with the second, with its number as nonce, so
that it can be read alone; its tag takes the place of the checksum in the section table. The table is part of the
encrypted body, so an attacker cannot substitute another section, or an earlier version of the same one. Compression
comes before encryption. The header's checksum covers the bytes on the disk: it tells accidents from a wrong key.

Recovery must be able to read headers before it knows which blocks a directory has; that is why the header key does not
depend on the block key.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from xxhash import xxh3_128_digest

from kvtide.block import ALIGN, BlockKey, Geometry, Span, padded
from kvtide.security.key_ring import OWN, DataKey, KeyRing
from kvtide.security.wrapping import KeyState, Unavailable, aead
from kvtide.tiers.format.reason import Reason
from kvtide.tiers.format.record import BODY, FLAG_SEALED, NotForAsker, Rejected, cuts_of, plain, sealed_by
from kvtide.tiers.format.scratch import Scratch
from kvtide.tiers.syscalls import VECTORS

__all__ = ["OPEN", "TAG", "Encryption", "FileCipher", "RecordCipher", "TaggedBuffer"]

TAG = 16
_HEADER = b"\xff" * 12
"""The nonce of a header's body, which has its own key; no section has this number."""
_SHORT = 128 << 10
"""The cipher takes less time for shorter sections than a thread takes to wake up."""
_TURNS = itertools.cycle((threading.Lock(), threading.Lock()))


def _derive(key: DataKey, salt: bytes, what: bytes) -> Any:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return aead(HKDF(SHA256(), 32, salt, what).derive(key.secret))


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")


@lru_cache(maxsize=256)
def _nonces(sections: range) -> tuple[bytes, ...]:
    return tuple(map(_nonce, sections))


def _clear(page: Span | bytearray) -> bytes:
    """The unencrypted fields, without checksum and tag: they are authenticated too."""
    return bytes(page[:16]) + bytes(page[32:80])


def turn() -> threading.Lock:
    """Returns one of two locks, for one of many threads."""
    return next(_TURNS)


class TaggedBuffer:
    """Memory for the payload of an encrypted record, in which every section is followed by space for its tag.

    So it can be decrypted from there into a block's span, which saves a copy. For short sections, where each copy makes
    all other threads wait, that is a third of the time.
    """

    def __init__(self) -> None:
        self._memory = Scratch()
        self._geometry: Geometry | None = None
        self._sections: list[Span] = []
        self.tagged: list[Span] = []
        """Sections with their tags."""
        self.tags: npt.NDArray[np.uint8] = np.empty((0, TAG), np.uint8)

    def __len__(self) -> int:
        return len(self._memory)

    def drop(self) -> None:
        """Free the memory."""
        self._forget()
        self._memory.drop()

    def _forget(self) -> None:
        self._geometry, self._sections, self.tagged = None, [], []
        self.tags = np.empty((0, TAG), np.uint8)

    @staticmethod
    def needed(geometry: Geometry) -> int:
        """Bytes for a block of that geometry."""
        return geometry.sections * padded(geometry.section + TAG)

    def sections(self, geometry: Geometry) -> Sequence[Span]:
        """The buffers for the sections of a block of that geometry, each at the start of a page."""
        if geometry != self._geometry:
            size, count = geometry.section, geometry.sections
            each = padded(size + TAG)
            self._forget()
            memory = self._memory.get(count * each)
            self._sections = [memory[i : i + size] for i in range(0, count * each, each)]
            self.tagged = [memory[i : i + size + TAG] for i in range(0, count * each, each)]
            self.tags = np.frombuffer(memory, np.uint8).reshape(count, each)[:, size : size + TAG]
            self._geometry = geometry
        return self._sections


class RecordCipher:
    """Encrypts and decrypts one record."""

    __slots__ = ("_key", "_salt")

    def __init__(self, key: DataKey, salt: bytes) -> None:
        self._key = key
        self._salt = salt

    @property
    def name(self) -> bytes:
        """The id of its key and its salt: the arguments of ``Encryption.old``."""
        return self._key.id + self._salt

    def file_cipher(self) -> FileCipher:
        """The cipher for a file of the store itself, such as the journal."""
        return FileCipher(_derive(self._key, self._salt, b"kvtide 1 paper"))

    def close_header(self, page: Span) -> None:
        """Encrypt a header that was packed unencrypted."""
        page[12:16] = FLAG_SEALED.to_bytes(4, "little")
        page[16:32] = bytes(16)
        page[32:48], page[48:80] = self._key.id, self._salt
        sealed = _derive(self._key, self._salt, b"kvtide 1 header").encrypt(_HEADER, page[BODY:], _clear(page))
        page[80:BODY], page[BODY:] = sealed[-TAG:], sealed[:-TAG]
        page[16:32] = xxh3_128_digest(page)

    def open_header(self, page: bytearray) -> None:
        """Decrypt a header's body in place. Raises Rejected."""
        from cryptography.exceptions import InvalidTag

        opener = _derive(self._key, self._salt, b"kvtide 1 header")
        try:
            page[BODY:] = opener.decrypt(_HEADER, bytes(page[BODY:]) + bytes(page[80:BODY]), _clear(page))
        except InvalidTag as e:
            raise Rejected(Reason.FORGED_HEADER) from e

    def close_sections(self, payload: Span, table: npt.NDArray[np.void], key: BlockKey, out: Span) -> Span:
        """Encrypt a payload into ``out``, which is ``TAG`` bytes longer, and put the tags into the table."""
        seal, checks = _derive(self._key, self._salt, b"kvtide 1 sections" + key).encrypt_into, []
        for nonce, cut in zip(_nonces(range(len(table))), cuts_of(table), strict=True):
            end = cut.stop
            # The tag is written directly after the section, where the next section, or padding, goes afterwards.
            seal(nonce, payload[cut], None, out[cut.start : end + TAG])
            checks.append(out[end : end + TAG].tobytes())
            if end % ALIGN:
                out[end : padded(end)] = bytes(padded(end) - end)
        table["check"] = np.array(checks, "V16")
        return out[: len(payload)]

    def open_sections(
        self, payload: Span, table: npt.NDArray[np.void], sections: range, key: BlockKey, scratch: Span
    ) -> None:
        """Verify sections, of which ``payload`` starts with the first, and decrypt them in place.

        ``scratch`` has space for the largest and ``TAG`` bytes. Raises Rejected.
        """
        from cryptography.exceptions import InvalidTag

        unseal = _derive(self._key, self._salt, b"kvtide 1 sections" + key).decrypt_into
        part = table[sections.start : sections.stop]
        try:
            for nonce, cut, tag in zip(_nonces(sections), cuts_of(part), part["check"].tolist(), strict=True):
                section = payload[cut]
                size = len(section)
                if size < _SHORT:
                    scratch[:size] = section
                else:  # numpy releases the GIL for the copy
                    np.copyto(np.frombuffer(scratch, np.uint8, size), np.frombuffer(section, np.uint8))
                scratch[size : size + TAG] = tag
                unseal(nonce, scratch[: size + TAG], None, section)
        except InvalidTag as e:
            raise Rejected(Reason.CORRUPT_PAYLOAD) from e

    def open_aside(
        self, aside: TaggedBuffer, table: npt.NDArray[np.void], geometry: Geometry, key: BlockKey, out: Span
    ) -> None:
        """Verify all sections of a block that were read to ``aside``, and decrypt them into its span.

        Raises Rejected.
        """
        from cryptography.exceptions import InvalidTag

        aside.tags[:] = np.frombuffer(table["check"].tobytes(), np.uint8).reshape(-1, TAG)
        unseal = _derive(self._key, self._salt, b"kvtide 1 sections" + key).decrypt_into
        sections = map(out.__getitem__, plain(geometry, int(table["offset"][0])).cuts)
        calls = map(unseal, _nonces(range(len(table))), aside.tagged, itertools.repeat(None), sections)
        try:
            deque(calls, 0)  # without Python code in between
        except InvalidTag as e:
            raise Rejected(Reason.CORRUPT_PAYLOAD) from e


class FileCipher:
    """Encrypts the parts of one append-only file; a part's offset is its nonce."""

    def __init__(self, cipher: Any) -> None:
        self._cipher = cipher

    def close(self, at: int, part: bytes) -> bytes:
        return bytes(self._cipher.encrypt(_nonce(at), part, None))

    def open(self, at: int, part: Span) -> bytes:
        """Raises ValueError if the part was not encrypted for that offset."""
        from cryptography.exceptions import InvalidTag

        try:
            return bytes(self._cipher.decrypt(_nonce(at), part, None))
        except InvalidTag as e:
            raise ValueError("this was not sealed here") from e


class Encryption:
    """Encrypts and decrypts records, with the keys of a key ring; without one, it does neither.

    With ``seals`` False records are written unencrypted, and encrypted ones can still be read. With ``seals`` True an
    unencrypted record is rejected, because anyone without a key could have made it, unless ``accept_open``.
    """

    def __init__(self, key_ring: KeyRing | None = None, *, seals: bool = True, accept_open: bool = False) -> None:
        self._key_ring = key_ring
        self.seals = seals and key_ring is not None
        self.accepts_open = accept_open or not self.seals
        """Whether unencrypted records are accepted, though anyone without a key could have made them."""

    def new(self, tenant: bytes) -> RecordCipher | None:
        """The cipher for a new record of a tenant; None where records are not encrypted. Raises Rejected."""
        if self._key_ring is None:
            return None
        try:
            if not self.seals:  # blocks stored before a key was destroyed must not be written unencrypted either
                self._key_ring.check_heard(tenant)
                return None
            return RecordCipher(self._key_ring.of(tenant), secrets.token_bytes(32))
        except Unavailable as e:
            raise Rejected(_reason(e), str(e)) from e

    def turns(self, section: int) -> bool:
        """Whether to hold a ``turn`` while a record with sections of that size is encrypted or decrypted.

        Every call of the cipher releases the GIL, and then waits for it. For a short section that takes longer than the
        cipher itself: two threads encrypt more of them than many.
        """
        return self._key_ring is not None and section < _SHORT

    def aside(self, geometry: Geometry) -> bool:
        """Whether records of such blocks are best read into a ``TaggedBuffer``."""
        # Not where sections are padded: in a slot, old bytes would stay in between.
        even = geometry.section == geometry.stride and geometry.sections < VECTORS  # the header is one too
        return self.seals and geometry.section < _SHORT and even

    def old(self, number: bytes, salt: bytes) -> RecordCipher:
        """The cipher of a record that was encrypted with that key and salt. Raises Rejected.

        A key that is unavailable now may be available later, so its record is kept; a destroyed one never comes back.
        """
        if self._key_ring is None:
            raise NotForAsker(Reason.KEY_NOT_HERE)
        try:
            return RecordCipher(self._key_ring.find(number), salt)
        except Unavailable as e:
            raise (Rejected if e.state is KeyState.DESTROYED else NotForAsker)(_reason(e), str(e)) from e

    def name(self, key: BlockKey) -> str:
        """The name of a block in storage that others can list. Raises Rejected.

        A digest of the key would hide the key itself, but the keys of the default tenant can be guessed from a prompt.
        So where records are encrypted, a name reveals nothing without the keys.
        """
        secret = b""
        if self._key_ring is not None and self.seals:
            try:
                secret = self._key_ring.of(OWN).secret
            except Unavailable as e:
                raise Rejected(_reason(e), str(e)) from e
        return blake3(secret + key, derive_key_context="kvtide 1 name in shared storage").hexdigest()

    def check(self, start: Span) -> None:
        """Raises Rejected if a record that begins with ``start`` is not encrypted and must be."""
        if not self.accepts_open and not start[12] & FLAG_SEALED:
            raise Rejected(Reason.NOT_ENCRYPTED)

    def open_header(self, page: bytearray) -> None:
        """Decrypt an encrypted header's body in place. Raises Rejected."""
        self.old(*sealed_by(page)).open_header(page)


def _reason(e: Unavailable) -> Reason:
    return Reason.KEY_UNAVAILABLE if e.state is None else Reason(e.state.value)


OPEN = Encryption()
"""Writes records unencrypted and cannot read encrypted ones."""
