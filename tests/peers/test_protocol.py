"""The messages between nodes: their bytes are fixed, and anything else is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.block import DIGEST, Geometry
from kvtide.tiers.base import Identity
from kvtide.tiers.peers import protocol as p
from kvtide.tiers.peers.protocol import (
    MOST_CREDIT,
    Hello,
    LocatedBlocks,
    PeerViolation,
    Presence,
    RequestCredit,
    Violation,
    Welcome,
)
from kvtide.tiers.peers.trust import proof

WHO = Identity(bytes(range(32)), bytes(range(16)), bytes(range(16, 32)), b"full", 256, Geometry(64, 32768), 2)
FOUND = LocatedBlocks(
    np.array([0, 1, 2, 1], np.uint8),
    np.array([np.inf, 1.5]),
    np.array([7, 8], np.uint32),
    b"p" * DIGEST + b"q" * DIGEST,
    np.array([-1, 3], np.int8),
)


def test_golden_bytes() -> None:
    """Nodes of other versions read these: they never change, not even for a new version of the protocol."""
    assert Hello(1, 2, 3, b"n" * 32).pack().hex() == "4b5654504545520a" + "0100" + "0200" + "03000000" + "6e" * 32
    welcome = Welcome(1, 0, b"m" * 32, b"i" * 16, RequestCredit(1024, 64, 8 << 20), b"x" * 32)
    assert welcome.pack().hex() == (
        "4b5654504545520a"
        + "0100"
        + "0000"
        + "00000000"
        + "6d" * 32
        + "69" * 16
        + "00040000"
        + "40000000"
        + "0000800000000000"
        + "78" * 32
    )
    assert p.REQUEST.pack(p.Operation.READ, 0, 2, 176, 5).hex() == "02000200b00000000500000000000000"
    assert p.REPLY.pack(p.Operation.LOCATE, 0, 2, 92, 5).hex() == "010002005c0000000500000000000000"
    assert p.ITEM.pack(b"d" * 32, 3, p.ALL).hex() == "64" * 32 + "03000000ffffffff"
    assert p.PART.pack(Presence.HIT, 4096, 1 << 33).hex() == "01000000001000000000000002000000"
    assert p.pack_identity(WHO).hex() == (
        bytes(range(32)).hex()
        + bytes(range(16)).hex()
        + bytes(range(16, 32)).hex()
        + b"full".hex()
        + "00" * 12
        + "00010000"
        + "40000000"
        + "00800000"
        + "02000000"
    )
    assert p.pack_located(FOUND).hex() == (
        "00010201" + "000000000000f07f" + "000000000000f83f" + "07000000" + "08000000" + "70" * 32 + "71" * 32 + "ff03"
    )


def test_golden_proofs() -> None:
    assert proof(None, b"asker", b"said") == bytes(32)
    made = proof(b"s" * 32, b"asker", b"said")
    assert made.hex() == "6a112ce91ff788b5dadf9ae141f46d1febb93bebf25a1e178c71e4799a813d79"
    assert len({proof(b"s" * 32, side, said) for side in (b"asker", b"server") for said in (b"a", b"b")}) == 4


def test_what_is_packed_is_parsed() -> None:
    assert Hello.parse(Hello(1, 2, 3, b"n" * 32).pack()) == Hello(1, 2, 3, b"n" * 32)
    welcome = Welcome(1, 0, b"m" * 32, b"i" * 16, RequestCredit(5, 6, 7), b"x" * 32)
    assert Welcome.parse(welcome.pack()) == welcome
    assert p.parse_identity(p.pack_identity(WHO)) == WHO
    assert p.parse_identity(p.pack_identity(WHO)).fingerprint == WHO.fingerprint
    again = p.parse_located(p.pack_located(FOUND), 4)
    assert p.pack_located(again) == p.pack_located(FOUND)


def test_more_credit_than_is_known_here_is_not_used() -> None:
    much = Welcome(1, 0, bytes(32), bytes(16), RequestCredit(1 << 30, 1 << 30, 1 << 60))
    assert Welcome.parse(much.pack()).credit == MOST_CREDIT


@pytest.mark.parametrize("credit", [RequestCredit(0, 1, 1), RequestCredit(1, 0, 1), RequestCredit(1, 1, 0)])
def test_no_credit_is_no_welcome(credit: RequestCredit) -> None:
    with pytest.raises(PeerViolation) as e:
        Welcome.parse(Welcome(1, 0, bytes(32), bytes(16), credit).pack())
    assert e.value.violation is Violation.GARBAGE


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_other_bytes_are_refused_or_harmless(data: st.DataObject) -> None:
    """One flipped bit, or other bytes altogether: a violation, or values within their limits, and never anything
    else."""
    packed = data.draw(st.sampled_from([Hello(1, 1, 0, bytes(32)).pack(), p.pack_identity(WHO), p.pack_located(FOUND)]))
    changed = bytearray(packed)
    for at in data.draw(st.lists(st.integers(0, len(packed) - 1), min_size=1, max_size=8)):
        changed[at] ^= data.draw(st.integers(1, 255))
    try:
        if len(packed) == p.HELLO.size:
            hello = Hello.parse(changed)
            assert hello.oldest <= hello.newest
        elif len(packed) == p.IDENTITY.size:
            who = p.parse_identity(bytes(changed))
            assert who.geometry.sections <= 1 << 16
        else:
            found = p.parse_located(bytes(changed), 4)
            assert len(found.parents) == DIGEST * len(found.depths) == DIGEST * 2
    except PeerViolation:
        pass


@pytest.mark.parametrize("size", [0, 3, 4, 5, 48, 93, 95, 200])
def test_an_answer_of_another_length_is_refused(size: int) -> None:
    packed = p.pack_located(FOUND)
    assert size != len(packed)
    with pytest.raises(PeerViolation):
        p.parse_located(packed.ljust(300, b"\0")[:size], 4)


def test_an_expiry_that_is_no_number_is_refused() -> None:
    """It is neither before nor after any time: a block with it would be found again and again, and never be entered."""
    packed = p.pack_located(dataclasses.replace(FOUND, expiries=np.array([np.nan, 1.5])))
    with pytest.raises(PeerViolation) as e:
        p.parse_located(packed, 4)
    assert e.value.violation is Violation.GARBAGE
