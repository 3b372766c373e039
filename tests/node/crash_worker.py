"""What the clients of ``test_crash`` do until they are killed: store, write slowly into slots, read, drop, prefetch.

The bytes of a block follow from its key, so each of them can tell whether what it is given is right. A slow writer
first fills its slots with rubbish, again and again, and with the block only just before it seals: if a slot that it
has were ever served as somebody's block, the reader would know.

All clients store and read all chains, so that each wants what another is just writing. Only those in ``OWNED`` have one
thread that stores and drops them: what it has dropped must stay away.
"""

from __future__ import annotations

import random
import time

import numpy as np

from kvtide.errors import TierError
from kvtide.node.client import link
from kvtide.node.client.client import Client
from kvtide.store.session import Session
from kvtide.testing import blocks
from tests import crash_worker as chains
from tests.crash_worker import CHAINS, DEPTH
from tests.node.crowd import THREADS, Job, Row, counting

__all__ = ["PLAYER", "CrashPlayer", "connected"]

OWNED = range(CHAINS // 2, CHAINS)
_SHARED = range(CHAINS // 2)
_TURNS, _VERIFIED, _STORED, _HALF = map(counting, ("turns", "verified", "stored", "half"))


def connected(job: Job) -> Client:
    """A client of the node, as soon as there is one."""
    while True:
        try:
            return Client(job.socket)
        except TierError:
            time.sleep(0.01)


class CrashPlayer:
    """One client process."""

    def __init__(self, job: Job) -> None:
        self._job = job
        link._ANSWER = 0.2  # some pauses of the node are longer
        self._client = connected(job)

    def told(self) -> None:
        """Hang up, whatever the threads are doing."""
        if self._client._link is not None:
            self._client._link.close()

    def play(self, row: Row, thread: int) -> None:
        _Thread(self._client, self._job, row, thread).run()


class _Thread:
    def __init__(self, client: Client, job: Job, row: Row, thread: int) -> None:
        self._client = client
        self._row = row
        self._rng = random.Random(f"{job.seed} {thread}")
        self._sessions = chains.sessions(client)
        mine = job.number * THREADS + thread
        self._mine = [n for n in OWNED if n // 4 % 6 == mine]
        self._gone: dict[int, int] = {}
        """Chains that were dropped, from which block on, and not stored since."""

    def run(self) -> None:
        verbs = [self._store, self._write, self._read, self._view, self._drop, self._prefetch, self._flush]
        while True:
            (verb,) = self._rng.choices(verbs, [20, 25, 15, 25, 6, 6, 1])
            verb()
            self._row[_TURNS] += 1
            if not self._client.connected or self._client.slow:
                time.sleep(0.005)

    def _session(self, number: int) -> Session:
        return chains.session_of(self._sessions, number)

    def _any(self) -> int:
        """A chain that this thread may store."""
        number: int = self._rng.choice([*_SHARED, *self._mine * 3])
        self._gone.pop(number, None)
        return number

    def _store(self) -> None:
        number, start = self._any(), self._rng.choice([0, 0, 1])
        session = self._session(number)
        names, size = session.chain(chains.tokens(number)), session.layout.geometry["full"].nbytes
        given = [chains.content(k, size) for k in names.keys(b"full")[start:]]
        self._row[_STORED] += session.store(names, given, start=start).stored

    def _write(self) -> None:
        number = self._any()
        session, rng = self._session(number), self._rng
        geometry = session.layout.geometry["full"]
        with session.reserve(chains.tokens(number)) as reservation:
            if not reservation.keys:
                return
            self._row[_HALF] += 1
            for step in range(rng.choice([1, 3, 10, 40])):
                for view in reservation.views:
                    np.frombuffer(view, np.uint8)[:] = step
                time.sleep(rng.random() * 0.004)
            for key, view in zip(reservation.keys, reservation.views, strict=True):
                blocks.fill(view, geometry, chains.content(key, geometry.nbytes))
            self._row[_HALF] -= 1
            if rng.random() < 0.85:
                self._row[_STORED] += len(reservation.keys)
                reservation.seal()

    def _read(self) -> None:
        """Into buffers of our own."""
        number = self._rng.randrange(CHAINS)
        session = self._session(number)
        names, geometry = session.chain(chains.tokens(number)), session.layout.geometry["full"]
        with session.match(names) as match:
            into = [np.zeros(geometry.nbytes, np.uint8) for _ in range(match.blocks)]
            loaded = session.load(match, into=into).wait()
            come = loaded.tokens // session.layout.block_tokens
        self._allowed(number, come)
        for key, found in zip(names.keys(b"full")[:come], into, strict=False):
            assert np.array_equal(found, chains.content(key, geometry.nbytes)), f"wrong bytes in {key.hex()}"
        self._row[_VERIFIED] += come

    def _view(self) -> None:
        """In place, for a while: whatever happens to the node, what was handed out stays as it is."""
        number = self._rng.randrange(CHAINS)
        session = self._session(number)
        names, geometry = session.chain(chains.tokens(number)), session.layout.geometry["full"]
        with session.match(names) as match:
            loaded = session.load(match).wait()
            self._allowed(number, len(loaded.blocks))
            for _ in range(self._rng.choice([1, 1, 2, 8])):
                for key, view in zip(names.keys(b"full"), loaded.blocks, strict=False):
                    right = blocks.holds(view, geometry, chains.content(key, geometry.nbytes))
                    assert right, f"wrong bytes in {key.hex()}"
                time.sleep(self._rng.random() * 0.004)
        self._row[_VERIFIED] += len(loaded.blocks)

    def _allowed(self, number: int, come: int) -> None:
        first = self._gone.get(number, DEPTH)
        assert come <= first, f"block {first} of chain {number} was dropped, and came back"

    def _drop(self) -> None:
        if not self._mine:
            return
        number, start = self._rng.choice(self._mine), self._rng.choice([1, 2])
        try:
            self._session(number).drop(chains.tokens(number), start=start)
            self._gone[number] = start
        except TierError as e:
            # Only a node that died or is late may leave a drop open.
            if "went away" not in str(e) and "in time" not in str(e):
                raise

    def _prefetch(self) -> None:
        number = self._rng.randrange(CHAINS)
        self._session(number).prefetch(chains.tokens(number))

    def _flush(self) -> None:
        self._client.flush(10)


PLAYER = CrashPlayer
