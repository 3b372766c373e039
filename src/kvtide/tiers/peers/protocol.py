"""The messages between two nodes. All numbers are little-endian; docs/design/0004-peers.md has the same as tables.

A connection begins with a greeting, in which versions, features and credit are agreed on and both sides prove that they
know the shared secret, if there is one. Then the asker sends requests, as many as it likes before it reads an answer,
and the server answers them in order::

    asker                            server
    Hello                        →
                                 ←   Welcome, with its proof and its credit
    Proof                        →
    Request, Identity, items     →
                                 ←   Reply, columns (LOCATE) or parts and records (READ)
                                     or, for each block, part and record (READ_COMPRESSED)

Blocks are named by digests, which nobody can make without the tenant's naming secret. A request is about blocks of one
identity, and an answer says for each block no more than that it is there or is not. A record has the format of those on
disk (``tiers/format/record.py``), and is not encrypted. Its table has a single section, which is all that was asked for
of the block (``as_sent``), and its sequence number is the number of the first of the block's sections that are in it. A
compressed record has the block's own table, and sequence number 0. The reader checks key, owner, layout and checksums
before it uses a byte.

A member of a cluster is asked at the address that the directory says, and whoever can write there could say another
one, and pass on the greeting of the node. So the proofs cover that address then: both sides must mean the same.

*RequestCredit* is what one request may ask for: so many blocks to locate, so many blocks and bytes to read. A single
block may always be read, however large."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.block import ALIGN, DIGEST, Geometry
from kvtide.tiers.base import Identity

__all__ = [
    "ADDRESSED",
    "COMPRESSION",
    "FEATURES",
    "HELLO",
    "IDENTITY",
    "ITEM",
    "LARGEST_BLOCK",
    "LARGEST_BODY",
    "MOST_CREDIT",
    "NEWEST",
    "NIXL",
    "OLDEST",
    "PART",
    "PROOF",
    "REPLY",
    "REQUEST",
    "SLOWEST",
    "WELCOME",
    "Hello",
    "LocatedBlocks",
    "Operation",
    "Part",
    "PeerViolation",
    "Presence",
    "RequestCredit",
    "Violation",
    "Welcome",
    "as_sent",
    "pack_identity",
    "pack_located",
    "parse_identity",
    "parse_located",
]

MAGIC = b"KVTPEER\n"
OLDEST = NEWEST = 1
"""The versions of the protocol that this side understands."""
COMPRESSION, ADDRESSED = 1, 1 << 1
"""The features of nodes that know READ_COMPRESSED, and have what it needs; and of those whose proofs cover the address
at which the asker looks for the server."""
FEATURES = ADDRESSED | (COMPRESSION if find_spec("zstandard") is not None else 0)
"""A bit for each optional extension that this side understands; both use those that both have."""

NIXL = 1 << 4
"""Large parts may go through memory that the other end reads by RDMA (nixl.py). For connections that can do it."""

HELLO = struct.Struct("<8sHHI32s")
"""Magic, oldest and newest version, features, nonce."""
WELCOME = struct.Struct("<8sHHI32s16sIIQ32s")
"""Magic, version (0: none in common), zeros, features, nonce, node, credit (blocks to locate, blocks to read, bytes to
read), proof."""
PROOF = 32
REQUEST = struct.Struct("<BBHIQ")
"""Operation, zero, number of items, bytes that follow, number of the request: greater than any before."""
REPLY = struct.Struct("<BBHIQ")
"""Operation, zero, number of items, bytes that follow (of READ: before the records), number of the request."""
IDENTITY = struct.Struct("<32s16s16s16sIIII")
"""Namespace, tenant tag, layout digest, end of the keys (padded with zeros), tokens of a block, sections, bytes of a
section, bytes of an element."""
ITEM = struct.Struct(f"<{DIGEST}sII")
"""Of READ: digest, first section, number of sections (``ALL``: all)."""
PART = struct.Struct("<B3xIQ")
"""Presence, bytes of the header, bytes of the sections that follow. Of READ_COMPRESSED: fewer than the block has if
they are compressed."""
ALL = 0xFFFFFFFF
_KEYS, _BLOCKS, _BYTES, _MOST_BYTES = 1024, 64, 8 << 20, 16 << 20
LARGEST_BLOCK = (1 << 32) - ALIGN
"""The most bytes of a block that is sent: the table of its record has 32 bits for them."""
LARGEST_BODY = IDENTITY.size + _KEYS * max(DIGEST, ITEM.size)
"""The most bytes that may follow a request."""


SLOWEST = 16 << 20
"""Bytes per second that an answer may take: its deadline is a second later for each so many bytes."""


class Operation(IntEnum):
    LOCATE = 1
    READ = 2
    READ_COMPRESSED = 3
    """READ, for a slow link. The part of each block is before its record, because nobody knows yet how long those of
    the others will be. The server decides for each block whether to compress it, if all of it is wanted."""


class Presence(IntEnum):
    """The answer for one block."""

    MISS = 0
    HIT = 1
    BUSY = 2
    """It may be there, but the server has no memory or no time for it now."""


class Violation(StrEnum):
    """Why a connection was closed. The values are shown in statistics and metrics."""

    GARBAGE = "garbage"
    VERSION = "no common version"
    UNPROVEN = "did not prove that it knows the secret"
    CERTIFICATE = "no accepted certificate"
    REPLAYED = "replayed or out of order"
    OVER_CREDIT = "more than its credit"
    SLOW = "too slow"
    TOO_MANY = "too many connections"


class PeerViolation(OSError):  # noqa: N818 - a verdict
    """The other end broke the protocol: nothing that it says on this connection can be used."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(violation.value)
        self.strerror = violation.value
        self.violation = violation


class RequestCredit(NamedTuple):
    """What one request may ask for; by default, what a server grants at least."""

    keys: int = _KEYS
    blocks: int = _BLOCKS
    nbytes: int = _BYTES


MOST_CREDIT = RequestCredit(nbytes=_MOST_BYTES)
"""What an asker uses at most, whatever a server grants."""


class Hello(NamedTuple):
    """The first message of an asker."""

    oldest: int
    newest: int
    features: int
    nonce: bytes

    def pack(self) -> bytes:
        return HELLO.pack(MAGIC, *self)

    @classmethod
    def parse(cls, data: bytes | bytearray) -> Hello:
        """Raises PeerViolation."""
        magic, *fields = HELLO.unpack(data)
        if magic != MAGIC or fields[0] > fields[1]:
            raise PeerViolation(Violation.GARBAGE)
        return cls(*fields)


class Welcome(NamedTuple):
    """The answer of a server."""

    version: int
    features: int
    nonce: bytes
    node: bytes
    """A random name of the store that is served: by it a node recognises itself in its list of addresses."""
    credit: RequestCredit
    proof: bytes = bytes(PROOF)

    def pack(self) -> bytes:
        return WELCOME.pack(MAGIC, self.version, 0, self.features, self.nonce, self.node, *self.credit, self.proof)

    @classmethod
    def parse(cls, data: bytes | bytearray) -> Welcome:
        """Raises PeerViolation."""
        magic, version, _, features, nonce, node, keys, blocks, nbytes, proof = WELCOME.unpack(data)
        if magic != MAGIC or not (keys and blocks and nbytes):
            raise PeerViolation(Violation.GARBAGE)
        credit = RequestCredit(*map(min, (keys, blocks, nbytes), MOST_CREDIT))
        return cls(version, features, nonce, node, credit, proof)


class Part(NamedTuple):
    """The answer for one block of READ."""

    presence: Presence
    header: int = 0
    payload: int = 0


def as_sent(nbytes: int) -> Geometry:
    """The shape of a record with that many bytes of a block: one section, since one checksum over all bytes takes less
    time than one for each section, and does not hold the interpreter."""
    return Geometry(1, nbytes)


def pack_identity(identity: Identity) -> bytes:
    geometry = identity.geometry
    return IDENTITY.pack(
        identity.namespace,
        identity.tenant,
        identity.layout,
        identity.group,
        identity.block_tokens,
        geometry.sections,
        geometry.section,
        identity.itemsize,
    )


def parse_identity(data: memoryview | bytes) -> Identity:
    """Raises PeerViolation."""
    namespace, tenant, layout, group, tokens, sections, section, itemsize = IDENTITY.unpack(data)
    if not (tokens and 0 < sections <= 1 << 16 and section and 0 < itemsize <= 16):
        raise PeerViolation(Violation.GARBAGE)
    return Identity(namespace, tenant, layout, group.rstrip(b"\0"), tokens, Geometry(sections, section), itemsize)


@dataclass(frozen=True, slots=True)
class LocatedBlocks:
    """The answer of LOCATE: for each block whether it is there, and columns for those that are."""

    presence: npt.NDArray[np.uint8]
    expiries: npt.NDArray[np.float64]
    depths: npt.NDArray[np.uint32]
    parents: bytes
    """``DIGEST`` bytes for each."""
    priorities: npt.NDArray[np.int8]


_HIT = bytes([Presence.HIT])
_KNOWN = bytes(Presence)
_EACH = 8 + 4 + DIGEST + 1
"""Bytes of the columns for each block that is there."""


def pack_located(found: LocatedBlocks) -> bytes:
    return b"".join(
        (
            found.presence.tobytes(),
            found.expiries.astype("<f8").tobytes(),
            found.depths.astype("<u4").tobytes(),
            found.parents,
            found.priorities.astype("i1").tobytes(),
        )
    )


def parse_located(data: memoryview | bytes, count: int) -> LocatedBlocks:
    """The answer for ``count`` blocks. Raises PeerViolation."""
    said = bytes(data[:count])
    hits = said.count(_HIT)
    if len(data) != count + hits * _EACH or said.strip(_KNOWN):
        raise PeerViolation(Violation.GARBAGE)
    presence = np.frombuffer(said, np.uint8)
    at = [count + hits * n for n in (0, 8, 12, 12 + DIGEST, _EACH)]
    expiries = np.frombuffer(data[at[0] : at[1]], "<f8")
    if np.isnan(expiries).any():
        raise PeerViolation(Violation.GARBAGE)
    return LocatedBlocks(
        presence,
        expiries,
        np.frombuffer(data[at[1] : at[2]], "<u4"),
        bytes(data[at[2] : at[3]]),
        np.frombuffer(data[at[3] : at[4]], "i1"),
    )
