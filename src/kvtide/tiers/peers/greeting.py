"""The beginning of a connection between two nodes, from both sides: see protocol.py and trust.py."""

from __future__ import annotations

import hmac
import secrets

from kvtide.tiers.peers.protocol import (
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


def ask_in(connection: PeerConnection, secret: bytes | None) -> Welcome:
    """The asker's side. Raises OSError."""
    hello = Hello(OLDEST, NEWEST, FEATURES, secrets.token_bytes(32)).pack()
    connection.send([hello])
    answer = received(connection, WELCOME.size)
    welcome = Welcome.parse(answer)
    if not OLDEST <= welcome.version <= NEWEST:
        raise PeerViolation(Violation.VERSION)
    said = hello + answer[:-PROOF]
    if not hmac.compare_digest(welcome.proof, proof(secret, b"server", said)):
        raise PeerViolation(Violation.UNPROVEN)
    connection.send([proof(secret, b"asker", said)])
    return welcome._replace(features=welcome.features & FEATURES)


def let_in(connection: PeerConnection, secret: bytes | None, credit: RequestCredit, node: bytes) -> int:
    """The side of the server, whose name is ``node``. Returns the features that both have. Raises OSError."""
    data = bytes(received(connection, HELLO.size))
    hello = Hello.parse(data)
    version = min(NEWEST, hello.newest)
    good = version >= max(OLDEST, hello.oldest)
    welcome = Welcome(version if good else 0, hello.features & FEATURES, secrets.token_bytes(32), node, credit)
    said = data + welcome.pack()[:-PROOF]
    connection.send([welcome._replace(proof=proof(secret, b"server", said)).pack()])
    if not good:
        raise PeerViolation(Violation.VERSION)
    if not hmac.compare_digest(received(connection, PROOF), proof(secret, b"asker", said)):
        raise PeerViolation(Violation.UNPROVEN)
    return welcome.features
