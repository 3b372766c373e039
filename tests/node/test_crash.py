"""A real node and real clients, killed, stopped and cut off at any moment, under load, again and again.

Clients (``crash_worker``) check every byte that they are given, and go on; after each event all of them must get on
again, and the budgets hold. When it is over nothing is left: no memory, no descriptor, no file, no process.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtide import config
from kvtide.node.client.client import Client
from kvtide.store.store import Store
from tests import crash_worker as chains
from tests.books import agree, left_behind, tier_bytes
from tests.crash_worker import CHAINS, DEPTH, MIB
from tests.node import host
from tests.node.crowd import Crowd, Person
from tests.node.serving import Process, eventually

CLIENTS = 3
DRAM, NVME = 8 * MIB, 16 * MIB
SETTINGS = {
    "KVTIDE_DRAM_BUDGET": str(DRAM),
    "KVTIDE_DRAM_SEGMENT": str(MIB),
    "KVTIDE_NVME_BUDGET": str(NVME),
    "KVTIDE_NVME_SEGMENT": str(MIB),
    "KVTIDE_NVME_THREADS": "2",
    "KVTIDE_NVME_STORE": "through",
}


class Storm:
    """What happens to a node and its clients."""

    def __init__(self, node: Process, crowd: Crowd, rng: random.Random, pauses: Sequence[float]) -> None:
        self._node = node
        self._crowd = crowd
        self._rng = rng
        self._pauses = pauses
        """Seconds for which the node may be stopped."""
        self.happened: Counter[str] = Counter()
        for number in range(CLIENTS):
            crowd.enter(number, rng.randrange(1 << 32))

    def strike(self) -> None:
        """One event, and wait until everybody has got over it."""
        events = [self.kill_node, self.stop_node, self.kill_client, self.kill_writer, self.stop_writer, self.cut_writer]
        (event,) = self._rng.choices(events, [3, 1, 2, 3, 3, 3])
        event()
        self.happened[event.__name__] += 1
        self.calm()

    def calm(self) -> None:
        """Everybody who can stores and reads again."""
        people = [p for p in self._crowd.people.values() if not p.stopped]
        before = {p.number: self._work(p) for p in people}

        def worked() -> bool:
            assert not self._crowd.errors, self._crowd.errors
            return all(a > b for p in people for a, b in zip(self._work(p), before[p.number], strict=True))

        eventually(worked)

    def _work(self, person: Person) -> tuple[int, int]:
        return self._crowd.count(person.number, "verified"), self._crowd.count(person.number, "stored")

    def kill_node(self) -> None:
        self._node.kill()
        time.sleep(self._rng.choice([0, 0, 0.1]))
        self._node.start()
        self._release()

    def stop_node(self) -> None:
        self._node.signal(signal.SIGSTOP)
        time.sleep(self._rng.choice(self._pauses))
        self._node.signal(signal.SIGCONT)

    def kill_client(self) -> None:
        time.sleep(self._rng.random() * 0.02)
        self._replace(self._rng.choice(list(self._crowd.people.values())))

    def kill_writer(self) -> None:
        self._replace(self._writer())

    def stop_writer(self) -> None:
        """One that is in the middle of its slots; others want them. The one that was stopped before goes on."""
        writer = self._writer()
        self._release()
        writer.stop()

    def cut_writer(self) -> None:
        """Its sockets are closed while it writes into its slots, and goes on to."""
        self._writer().signal(signal.SIGUSR1)

    def _writer(self) -> Person:
        def writing() -> list[Person]:
            people = [p for p in self._crowd.people.values() if not p.stopped]
            return [p for p in people if self._crowd.count(p.number, "half")]

        return self._rng.choice(eventually(writing))

    def _release(self) -> None:
        for person in self._crowd.people.values():
            if person.stopped:
                person.go_on()

    def _replace(self, person: Person) -> None:
        self._crowd.kill(person.number)
        self._crowd.enter(person.number, self._rng.randrange(1 << 32))


def within_budget(node: Process, observer: Client) -> None:
    """As the node says, and as its processes and files are."""
    for tier in observer.statistics().tiers.values():
        assert tier.bytes_taken <= tier.budget
    with host.standing_still([node.process.pid]):
        assert sum(host.memory([node.process.pid]).values()) <= DRAM
        assert tier_bytes(node.folder / "tier") <= NVME


def readable(folder: Path) -> int:
    """Read all that the node has left on its disk; answers how many blocks."""
    settings = {name.removeprefix("KVTIDE_NVME_").lower(): v for name, v in SETTINGS.items() if "NVME" in name}
    nvme = {**settings, "path": str(folder)}
    with Store(config.read(env={}, dram={"budget": DRAM, "segment": MIB}, nvme=nvme)) as store:
        sessions = chains.sessions(store)
        found = 0
        for number in range(CHAINS):
            session = chains.session_of(sessions, number)
            # Each by itself, so that the loss of its parents hides nothing.
            found += sum(chains.read(session, number, d + 1, have=d) > d for d in range(DEPTH))
        agree(store)
    return found


def storm(folder: Path, events: int, seed: int, pauses: Sequence[float] = (0.01, 0.1, 0.3)) -> None:
    ours, mapped = host.descriptors(os.getpid(), folder), host.memory([os.getpid()])
    mark = {"TEST_RUN": str(folder)}
    node = Process(folder, **SETTINGS, **mark)
    evicted: Counter[str] = Counter()
    try:
        before = node.at_rest()
        with Client(node.path) as observer, Crowd(folder, "tests.node.crash_worker", CLIENTS, mark) as crowd:
            storm = Storm(node, crowd, random.Random(seed), pauses)
            storm.calm()
            for _ in range(events):
                storm.strike()
                eventually(lambda: observer.connected)
                within_budget(node, observer)
                counts = observer.statistics().counts
                evicted.update({name: n for name, n in counts.items() if name.startswith("blocks evicted from")})
        assert node.at_rest() == before
        node.stop()
    finally:
        node.kill()
    assert set(storm.happened) == {e for e in dir(Storm) if e.startswith(("kill_", "stop_", "cut_"))}, "not all tried"
    assert set(evicted) == {"blocks evicted from dram", "blocks evicted from nvme"}, "there was room for everything"
    assert host.alive(f"TEST_RUN={folder}") == []
    assert host.descriptors(os.getpid(), folder) == ours
    assert host.memory([os.getpid()]).keys() <= mapped.keys()
    left_behind(folder / "tier", NVME)
    assert {p.name for p in folder.iterdir()} == {"tier", "log", "node.alive", "ready.sock", "board"}
    assert readable(folder / "tier")


def test_no_death_and_no_pause_costs_a_byte(tmp_path: Path) -> None:
    storm(tmp_path, 50, seed=1)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_death_and_no_pause_costs_a_byte_for_long(tmp_path: Path) -> None:
    # So long that clients do without a node that lives.
    storm(tmp_path, 500, seed=random.SystemRandom().randrange(1 << 32), pauses=(0.01, 0.1, 0.3, 12.0))
