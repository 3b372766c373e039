"""What the clients of ``test_traffic`` do: a bit of everything, each with sessions of its own, until they are told.

All but one behave. The last one misbehaves, in one way after the other (``hostile_client``).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import numpy as np

from kvtide.events import Event
from kvtide.node.client.client import Client
from kvtide.store.session import Session
from kvtide.testing import blocks
from tests import crash_worker as chains
from tests.crash_worker import CHAINS, MODELS
from tests.node.crowd import Job, Player, Row, counting
from tests.node.hostile_client import HostileClient

__all__ = ["CLIENTS", "PLAYER", "TrafficPlayer"]

CLIENTS = 8
"""That behave; the next number is the one that does not."""
_TURNS, _VERIFIED, _STORED, _HEARD, _DONE = map(counting, ("turns", "verified", "stored", "heard", "done"))


class TrafficPlayer:
    """One client process."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._over = threading.Event()

    def told(self) -> None:
        self._over.set()

    def play(self, row: Row, thread: int) -> None:
        worker = _Thread(self._job, row, random.Random(f"{self._job.seed} {thread}"))
        while not self._over.is_set():
            worker.turn()
        worker.close()
        row[_DONE] = 1


class _Thread:
    def __init__(self, job: Job, row: Row, rng: random.Random) -> None:
        self._job = job
        self._row = row
        self._rng = rng
        self._pinned: list[int] = []
        self._connect()
        self._verbs: dict[Callable[[], None], int] = {
            self._store: 20,
            self._reserve: 20,
            self._read: 25,
            self._view: 20,
            self._pin: 5,
            self._drop: 5,
            self._prefetch: 8,
            self._flush: 1,
            self._reopen: 4,
            self._reconnect: 2,
        }

    def turn(self) -> None:
        (verb,) = self._rng.choices(list(self._verbs), list(self._verbs.values()))
        verb()
        self._row[_TURNS] += 1

    def _connect(self) -> None:
        self._client = Client(self._job.socket)
        self._sessions = chains.sessions(self._client)
        self._unfollow = self._client.follow(self._happened)

    def _happened(self, _: Event) -> None:
        self._row[_HEARD] += 1

    def close(self) -> None:
        while self._pinned:
            self._unpin()
        self._unfollow()
        self._client.close()

    def _reconnect(self) -> None:
        self.close()
        self._connect()

    def _reopen(self) -> None:
        """One session ends, with what it holds, and another begins."""
        at = self._rng.randrange(len(MODELS))
        number = self._rng.randrange(CHAINS)
        session = chains.session_of(self._sessions, number)
        session.match(chains.tokens(number))
        session.reserve(chains.tokens(self._rng.choice(range(number % 2, CHAINS, 2))))
        self._sessions[at].close()
        self._sessions[at] = self._client.session(MODELS[at])

    def _any(self) -> tuple[Session, int]:
        number = self._rng.randrange(CHAINS)
        return chains.session_of(self._sessions, number), number

    def _store(self) -> None:
        session, number = self._any()
        names, size = session.chain(chains.tokens(number)), session.layout.geometry["full"].nbytes
        given = [chains.content(k, size) for k in names.keys(b"full")]
        priority = self._rng.choice([0, 0, 1])
        self._row[_STORED] += session.store(names, given, ttl=self._rng.choice([None, 60.0]), priority=priority).stored

    def _reserve(self) -> None:
        session, number = self._any()
        geometry = session.layout.geometry["full"]
        with session.reserve(chains.tokens(number)) as reservation:
            for key, view in zip(reservation.keys, reservation.views, strict=True):
                blocks.fill(view, geometry, chains.content(key, geometry.nbytes))
            match self._rng.choice(["seal", "seal", "abort", "leave"]):
                case "seal":
                    reservation.seal()
                case "abort":
                    reservation.abort()

    def _read(self) -> None:
        session, number = self._any()
        names, geometry = session.chain(chains.tokens(number)), session.layout.geometry["full"]
        with session.match(names) as match:
            into = [np.zeros(geometry.nbytes, np.uint8) for _ in range(match.blocks)]
            come = session.load(match, into=into).wait().tokens // session.layout.block_tokens
        for key, found in zip(names.keys(b"full")[:come], into, strict=False):
            assert np.array_equal(found, chains.content(key, geometry.nbytes)), f"wrong bytes in {key.hex()}"
        self._row[_VERIFIED] += come

    def _view(self) -> None:
        session, number = self._any()
        self._row[_VERIFIED] += chains.read(session, number, self._rng.randrange(1, chains.DEPTH + 1))

    def _pin(self) -> None:
        """Nobody drops these: what is pinned can be unpinned as often."""
        if len(self._pinned) > 2:
            self._unpin()
            return
        number = self._rng.randrange(0, CHAINS, 4)
        chains.session_of(self._sessions, number).pin(chains.tokens(number), stop=1)
        self._pinned.append(number)

    def _unpin(self) -> None:
        number = self._pinned.pop()
        chains.session_of(self._sessions, number).unpin(chains.tokens(number), stop=1)

    def _drop(self) -> None:
        session, number = self._any()
        session.drop(chains.tokens(number), start=1, timeout=60)

    def _prefetch(self) -> None:
        session, number = self._any()
        session.prefetch(chains.tokens(number))

    def _flush(self) -> None:
        assert self._client.flush(60)


class HostileClientPlayer:
    """The one that misbehaves; its other thread has nothing to do."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._over = threading.Event()

    def told(self) -> None:
        self._over.set()

    def play(self, row: Row, thread: int) -> None:
        hostile_client = HostileClient(self._job.socket)
        while not thread and not self._over.is_set():
            hostile_client.turn()
            row[_TURNS] += 1
            time.sleep(0.01)
        row[_DONE] = 1


def PLAYER(job: Job) -> Player:  # noqa: N802
    return TrafficPlayer(job) if job.number < CLIENTS else HostileClientPlayer(job)
