"""Real nodes, each a process: one is killed, stopped, restarted or cut off while another reads from it."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

import pytest

from kvtide.node.client.client import Client
from kvtide.store.node_statistics import PeerServing
from kvtide.testing.interface import MODEL, PLAIN, SIZE, data, length, prompt, until
from kvtide.testing.servers import free_ports
from tests.node.serving import Process
from tests.peers.nodes import Proxy, Stores, token

PROMPTS = [prompt(*range(100 * n, 100 * n + 12)) for n in range(12)]


class Nodes:
    """Two nodes: ``one`` serves, and ``two`` reads from it by way of ``proxy``."""

    def __init__(self, folder: Path, stack: ExitStack, timeout: str = "1s", **settings: str) -> None:
        (self.port,) = free_ports(1)
        secret = {"KVTIDE_PEERS_TOKEN_FILE": token(folder), "KVTIDE_PEERS_TIMEOUT": timeout, **settings}
        for name in ("one", "two"):
            (folder / name).mkdir()
        listen = f"127.0.0.1:{self.port}"
        self.one = Process(folder / "one", KVTIDE_PEERS_LISTEN=listen, KVTIDE_NVME_STORE="through", **secret)
        stack.callback(self.one.kill)
        self.proxy = Proxy(listen)
        stack.callback(self.proxy.close)
        self.two = Process(folder / "two", KVTIDE_PEERS_ADDRESSES=self.proxy.address, **secret)
        stack.callback(self.two.kill)

    def serving(self) -> PeerServing:
        with Client(self.one.path) as client:
            found = client.status().node.peers
            assert found is not None
            return found


@contextmanager
def nodes(folder: Path, **settings: str) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(folder, stack, **settings)


def store_all(path: Path) -> None:
    with Client(path) as client, client.session(MODEL) as session:
        for tokens in PROMPTS:
            session.store(tokens, data(PLAIN, tokens))
        assert client.flush(60)


def sockets(pid: int) -> int:
    """Sockets that a process has."""
    found = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found += str(link.readlink()).startswith("socket:")
        except OSError:
            continue
    return found


def test_a_node_reads_what_another_computed_from_memory_and_disk(tmp_path: Path) -> None:
    with nodes(tmp_path) as both:
        store_all(both.one.path)
        with Client(both.two.path) as client, client.session(MODEL) as session:
            assert [length(session, tokens) for tokens in PROMPTS] == [len(tokens) for tokens in PROMPTS]
        assert both.serving().blocks_sent == 12 * 12
        both.one.stop()
        both.two.kill()
        both.one.start()  # nothing is in its memory now
        both.two.start()
        with Client(both.two.path) as client, client.session(MODEL) as session:
            assert [length(session, tokens) for tokens in PROMPTS] == [len(tokens) for tokens in PROMPTS]
        with Client(both.one.path) as client:
            assert client.statistics().tiers["dram"].blocks == 0
        until(lambda: both.serving().bytes_held == 0)
        both.two.stop()
        both.one.stop()


def test_a_killed_node_is_misses_and_comes_back(tmp_path: Path) -> None:
    with nodes(tmp_path) as both:
        store_all(both.one.path)
        with Client(both.two.path) as client, client.session(MODEL) as session:
            assert length(session, PROMPTS[0]) == len(PROMPTS[0])
            both.one.kill()
            began = time.monotonic()
            for tokens in PROMPTS[1:4]:
                assert length(session, tokens) == 0
            assert length(session, PROMPTS[0]) == len(PROMPTS[0]), "what was read is here"
            assert time.monotonic() - began < 20
            both.one.start()
            for tokens in PROMPTS:
                until(lambda tokens=tokens: length(session, tokens) == len(tokens))  # type: ignore[misc]


def test_a_stopped_node_costs_one_deadline(tmp_path: Path) -> None:
    with nodes(tmp_path) as both:
        store_all(both.one.path)
        with Client(both.two.path) as client, client.session(MODEL) as session:
            with session.match(PROMPTS[0], wait=30) as match:
                assert match.tokens == len(PROMPTS[0])
                both.one.signal(signal.SIGSTOP)
                began = time.monotonic()
                loaded = session.load(match).wait(60)
                assert loaded.tokens == 0
                assert time.monotonic() - began < 15
            for n in range(50):
                with session.match(prompt(5000 + n)) as match:
                    assert (match.tokens, match.pending) == (0, False)
            both.one.signal(signal.SIGCONT)
            until(lambda: length(session, PROMPTS[0]) == len(PROMPTS[0]))
            assert client.statistics().held == 0


@pytest.mark.parametrize("seed", range(2))
def test_under_load_with_a_bad_network_no_byte_is_wrong_and_nothing_leaks(tmp_path: Path, seed: int) -> None:
    """Readers check every byte, while connections are cut, frozen, slowed down and their bits flipped, and the node
    itself is stopped and killed."""
    random = Random(seed)
    with nodes(tmp_path, timeout="300ms") as both:
        store_all(both.one.path)
        before = sockets(both.one.process.pid)
        stop = threading.Event()
        loads: list[int] = []
        failed: list[BaseException] = []

        def reader(number: int) -> None:
            mine = Random(100 * seed + number)
            try:
                with Client(both.two.path) as client, client.session(MODEL) as session:
                    while not stop.is_set():
                        tokens = mine.choice(PROMPTS)
                        tokens = tokens[: SIZE * mine.randrange(1, 13)]
                        got = length(session, tokens)
                        assert got <= len(tokens)
                        loads.append(got)
                        if mine.random() < 0.5:
                            session.drop(tokens) if mine.random() < 0.05 else None
            except BaseException as e:  # noqa: BLE001 - of another thread
                failed.append(e)

        readers = [threading.Thread(target=reader, args=(n,)) for n in range(3)]
        for thread in readers:
            thread.start()
        for _ in range(12):
            harm = random.choice(["cut", "flip", "freeze", "slow", "stop", "all"])
            if harm == "slow":
                both.proxy.slow(random.choice([1000, 50_000]), 0.001)
            elif harm == "stop":
                both.one.signal(signal.SIGSTOP)
            elif harm == "all":
                both.proxy.cut()
            else:
                both.proxy.harm(random.randrange(1 << random.randrange(1, 18)), harm)
            stop.wait(0.2)
            both.one.signal(signal.SIGCONT)
            both.proxy.slow(1 << 16, 0.0)
            both.proxy.harm(1 << 60, "pass")
        both.one.kill()
        stop.wait(0.3)
        both.one.start()
        stop.wait(0.3)
        stop.set()
        for thread in readers:
            thread.join(60)
        assert not failed
        assert loads
        with Client(both.two.path) as client:
            until(lambda: client.statistics().held == 0)
            both.proxy.cut()
            until(lambda: both.serving().connections == 0)
            until(lambda: both.serving().bytes_held == 0)
            until(lambda: sockets(both.one.process.pid) <= before)
        both.two.stop()
        both.one.stop()


def sockets_of_a_child() -> int:
    """How many sockets a forked child has."""
    pid = os.fork()
    if not pid:
        os._exit(sockets(os.getpid()))
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def test_a_forked_child_has_no_connection(tmp_path: Path) -> None:
    gc.collect()  # what earlier tests left does not end between the two children
    before = sockets_of_a_child()
    with Stores(tmp_path) as stores:
        one, server = stores.serving()
        two = stores.store(server.address)
        with one.session(MODEL) as first, two.session(MODEL) as second:
            mine = sockets(os.getpid())
            first.store(prompt(1), data(PLAIN, prompt(1)))
            assert length(second, prompt(1)) == SIZE
            assert sockets(os.getpid()) > mine
            assert sockets_of_a_child() == before, "neither a connection nor the listening socket"
            first.store(prompt(2), data(PLAIN, prompt(2)))
            assert length(second, prompt(2)) == SIZE, "the parent's connections are as they were"
