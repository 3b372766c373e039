"""The beginning of a connection between two nodes, from both sides: see protocol.py and trust.py."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable

from kvtide.tiers.peers.protocol import (
    ADDRESSED,
    FEATURES,
    HELLO,
    NEWEST,
    OLDEST,
    PROOF,
    WELCOME,
    Hello,
    PeerViolation,
    RequestCredit,
    Violation,
    Welcome,
)
from kvtide.tiers.peers.transport import PeerConnection
from kvtide.tiers.peers.trust import proof

__all__ = ["ask_in", "let_in", "received"]


def received(connection: PeerConnection, nbytes: int) -> bytearray:
    """The next bytes of a connection."""
    data = bytearray(nbytes)
    connection.receive([memoryview(data)])
    return data


def ask_in(
    connection: PeerConnection,
    secret: bytes | None,
    address: str = "",
    check: Callable[[Welcome], None] = lambda welcome: None,
) -> Welcome:
    """The asker's side. Raises OSError. With an ``address``, the server must have proved that it announces that one.
    ``check`` raises for a server that proved itself and is not to be asked: that is told nothing."""
    features = _features(address) | connection.features
    hello = Hello(OLDEST, NEWEST, features, secrets.token_bytes(32)).pack()
    connection.send([hello])
    answer = received(connection, WELCOME.size)
    welcome = Welcome.parse(answer)
    if not OLDEST <= welcome.version <= NEWEST:
        raise PeerViolation(Violation.VERSION)
    said = hello + answer[:-PROOF] + _addressed(welcome, address)
    if not hmac.compare_digest(welcome.proof, proof(secret, b"server", said)):
        raise PeerViolation(Violation.UNPROVEN)
    check(welcome)
    if address and not welcome.features & ADDRESSED:
        raise PeerViolation(Violation.UNPROVEN)
    connection.send([proof(secret, b"asker", said)])
    connection.agreed(welcome.features & features)
    return welcome._replace(features=welcome.features & FEATURES)


def let_in(
    connection: PeerConnection, secret: bytes | None, credit: RequestCredit, node: bytes, address: str = ""
) -> int:
    """The side of the server, whose name is ``node``, and which tells others that ``address``; empty: it tells none.
    Returns the features that both have. Raises OSError."""
    data = bytes(received(connection, HELLO.size))
    hello = Hello.parse(data)
    version = min(NEWEST, hello.newest)
    good = version >= max(OLDEST, hello.oldest)
    features = hello.features & (_features(address) | connection.features)
    welcome = Welcome(version if good else 0, features, secrets.token_bytes(32), node, credit)
    said = data + welcome.pack()[:-PROOF] + _addressed(welcome, address)
    connection.send([welcome._replace(proof=proof(secret, b"server", said)).pack()])
    if not good:
        raise PeerViolation(Violation.VERSION)
    if not hmac.compare_digest(received(connection, PROOF), proof(secret, b"asker", said)):
        raise PeerViolation(Violation.UNPROVEN)
    connection.agreed(features)
    return welcome.features


def _features(address: str) -> int:
    return FEATURES if address else FEATURES & ~ADDRESSED


def _addressed(welcome: Welcome, address: str) -> bytes:
    """What the proofs cover besides hello and welcome."""
    return address.encode() if welcome.features & ADDRESSED else b""
