"""What the clients of ``test_node_death`` do: fill the node's memory, and hold views of it over its death."""

from __future__ import annotations

import random
import time

import numpy as np

from kvtide.node.client.backend import RemotePrefixLease
from kvtide.node.client.client import Client
from kvtide.store.match import Loaded, Match
from kvtide.testing import blocks
from tests import crash_worker as chains
from tests.crash_worker import CHAINS
from tests.node.crash_worker import connected
from tests.node.crowd import Job, Row, counting

__all__ = ["PLAYER", "LeasePlayer"]

MOST = 6
"""Matches that a thread holds."""
_HELD, _VERIFIED, _STORED = map(counting, ("held", "verified", "stored"))


class LeasePlayer:
    """One client process."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._client = connected(job)

    def told(self) -> None:
        raise NotImplementedError

    def play(self, row: Row, thread: int) -> None:
        _Thread(self._client, row, random.Random(f"{self._job.seed} {thread}")).run()


class _Thread:
    def __init__(self, client: Client, row: Row, rng: random.Random) -> None:
        self._client = client
        self._row = row
        self._rng = rng
        self._sessions = chains.sessions(client)
        self._held: list[tuple[int, int, Match, Loaded]] = []
        """Until which turn, the chain, and what was handed out of it."""

    def run(self) -> None:
        turn = 0
        while True:
            self._verify()
            if self._client.connected:
                turn += 1
                self._take(turn + self._rng.randrange(60))
                self._write()
                self._let_go(turn)
            else:
                time.sleep(0.005)
            self._row[_HELD] = sum(self._of_this_node(match) for _, _, match, _ in self._held)

    def _let_go(self, turn: int) -> None:
        for until, _, match, _ in self._held:
            if until <= turn:
                match.release()
        self._held = [held for held in self._held if held[0] > turn]

    def _of_this_node(self, match: Match) -> bool:
        assert isinstance(match.holding, RemotePrefixLease)
        return match.blocks > 0 and match.holding.link is self._client._link

    def _take(self, until: int) -> None:
        """Store a chain if need be, and hold it, unless we have much already."""
        number = self._rng.randrange(CHAINS)
        session = chains.session_of(self._sessions, number)
        names, size = session.chain(chains.tokens(number)), session.layout.geometry["full"].nbytes
        self._row[_STORED] += session.store(names, [chains.content(k, size) for k in names.keys(b"full")]).stored
        if len(self._held) < MOST:
            match = session.match(names)
            self._held.append((until, number, match, session.load(match).wait()))

    def _write(self) -> None:
        """Into slots that are given up again."""
        number = self._rng.randrange(CHAINS)
        with chains.session_of(self._sessions, number).reserve(chains.tokens(number)) as reservation:
            for _ in range(self._rng.choice([1, 5])):
                for view in reservation.views:
                    np.frombuffer(view, np.uint8)[:] = 0xEE
                time.sleep(self._rng.random() * 0.004)

    def _verify(self) -> None:
        for _, number, _, loaded in self._held:
            geometry = chains.session_of(self._sessions, number).layout.geometry["full"]
            for key, view in zip(chains.keys(number), loaded.blocks, strict=False):
                assert blocks.holds(view, geometry, chains.content(key, geometry.nbytes)), f"wrong: {key.hex()}"
            self._row[_VERIFIED] += len(loaded.blocks)


PLAYER = LeasePlayer
