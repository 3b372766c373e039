"""NIXL between nodes: over UCX without RDMA. The contract of its connections is in test_transport.py."""

from __future__ import annotations

import os
import signal
import struct
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from kvtide import Layout, Model
from kvtide import config as configuration
from kvtide.block import Group, Kind
from kvtide.errors import ConfigError
from kvtide.node.client.client import Client
from kvtide.testing.blocks import aligned
from kvtide.testing.interface import SIZE, data, length, prompt, until
from kvtide.testing.servers import free_ports
from kvtide.tiers.peers import nixl
from kvtide.tiers.peers.nixl import Nixl
from kvtide.tiers.peers.nixl_process import CHUNK, NixlOffer, NixlProcess
from kvtide.tiers.peers.protocol import NIXL, PeerViolation
from kvtide.tiers.peers.tcp import Tcp
from kvtide.tiers.peers.transport import PeerConnection
from kvtide.tiers.peers.trust import PeerTrust
from tests.node.certificates import Authority
from tests.node.serving import Process
from tests.peers.nixl import NEEDS_NIXL, SHARED, TCP, TwoAgents
from tests.peers.nodes import token

pytestmark = NEEDS_NIXL

LAYOUT = Layout((Group("full", Kind.FULL, 4, 8, 512, "float32", page=SIZE),), block_tokens=SIZE)
"""Its blocks have 2 MiB, so that they go through chunks."""
MODEL = Model(LAYOUT, "given:large")
PROMPTS = [prompt(*range(10 * n, 10 * n + 4)) for n in range(6)]


class Nodes:
    """Two nodes, each a process; ``two`` reads from ``one``."""

    def __init__(self, folder: Path, stack: ExitStack, one: str = "nixl", two: str = "nixl", transports: str = TCP):
        (port,) = free_ports(1)
        settings = {
            "KVTIDE_PEERS_TOKEN_FILE": token(folder),
            "KVTIDE_PEERS_TIMEOUT": "5s",
            "KVTIDE_DRAM_BUDGET": "64MiB",
            "KVTIDE_DRAM_SEGMENT": "16MiB",
            "KVTIDE_NVME_BUDGET": "128MiB",
            "KVTIDE_NVME_SEGMENT": "16MiB",
            "UCX_TLS": transports,
        }
        address = f"127.0.0.1:{port}"
        for name in ("one", "two"):
            (folder / name).mkdir()
        self.one = Process(folder / "one", KVTIDE_PEERS_LISTEN=address, KVTIDE_PEERS_FABRIC=one, **settings)
        stack.callback(self.one.kill)
        self.two = Process(folder / "two", KVTIDE_PEERS_ADDRESSES=address, KVTIDE_PEERS_FABRIC=two, **settings)
        stack.callback(self.two.kill)
        self.tier = f"peer {address}"
        with Client(self.one.path) as client, client.session(MODEL) as session:
            for tokens in PROMPTS:
                session.store(tokens, data(LAYOUT, tokens))
            assert client.flush(60)

    def carrier(self) -> str:
        """What moves the blocks that ``two`` reads."""
        with Client(self.two.path) as client:
            return client.statistics().tiers[self.tier].carrier

    def read(self, *prompts: list[int]) -> None:
        with Client(self.two.path) as client, client.session(MODEL) as session:
            for tokens in prompts:
                until(lambda tokens=tokens: length(session, tokens) == len(tokens))  # type: ignore[misc]

    def read_by_nixl(self) -> None:
        """Have ``two`` read new prompts until NIXL moves them: its agent starts while the first come over TCP."""
        number = 1000
        while self.carrier() != "NIXL":
            assert number < 1500
            number += 1
            tokens = prompt(number)
            with Client(self.one.path) as client, client.session(MODEL) as session:
                session.store(tokens, data(LAYOUT, tokens))
            self.read(tokens)
            time.sleep(0.05)


def helpers(pid: int) -> list[int]:
    """The processes with NIXL that a process has."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == pid and b"nixl_helper" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.fixture(scope="module")
def agents() -> Iterator[TwoAgents]:
    with closing(TwoAgents(SHARED)) as agents:
        yield agents


class Ends:
    """A connection whose end ``asks`` has NIXL, and whose other end ``says`` what it likes: first, an offer."""

    def __init__(self, agents: TwoAgents, stack: ExitStack, offer: NixlOffer | None = None) -> None:
        listener = stack.enter_context(closing(Tcp().listen("127.0.0.1:0")))
        offer = offer or offered(agents, 1)
        with ThreadPoolExecutor(1) as pool:
            accepted = pool.submit(listener.accept)
            self.asks: PeerConnection = agents.asks.connect(listener.address, 30)
            stack.callback(self.asks.close)
            self.says = stack.enter_context(closing(accepted.result(30)))
            agreed = pool.submit(self.asks.agreed, NIXL)
            head = struct.pack("<IQQ", len(offer.metadata), offer.base, offer.nbytes)
            self.says.send([head + offer.metadata])
            agreed.result(30)

    def frame(self, kind: int, nbytes: int, offset: int) -> None:
        self.says.send([struct.pack("<B3xIQ", kind, nbytes, offset)])

    def good(self, agents: TwoAgents) -> bool:
        """Whether it works, with an offer that is true."""
        said = os.urandom(1 << 20)
        agents.processes[1].at(CHUNK, 1 << 20)[:] = said
        self.frame(2, 1 << 20, CHUNK)
        got = aligned(1 << 20)
        self.asks.receive([got])
        return bytes(got) == said


def offered(agents: TwoAgents, number: int) -> NixlOffer:
    offer = agents.processes[number].offer()
    assert offer is not None
    return offer


@pytest.mark.parametrize(
    "frame",
    [
        (0, 1, 0),
        (4, 1, 0),
        (1, 0, 0),
        (2, 0, 0),
        (2, CHUNK + 1, 0),
        (2, 0xFFFFFFFF, 0),
        (2, 4096, 8 * CHUNK - 4095),
        (2, 4096, (1 << 64) - 4096),
        (3, 0, 0),
        (3, 0, 1 << 40),
    ],
)
def test_a_frame_that_lies_ends_its_connection_alone(agents: TwoAgents, frame: tuple[int, int, int]) -> None:
    with ExitStack() as stack:
        bad, good = Ends(agents, stack), Ends(agents, stack)
        bad.frame(*frame)
        with pytest.raises(PeerViolation):
            bad.asks.receive([aligned(1 << 20)])
        assert good.good(agents)


@pytest.mark.parametrize("lie", ["too large", "garbage", "none", "other memory", "another's name"])
def test_an_offer_that_lies_ends_its_connection_alone(agents: TwoAgents, lie: str) -> None:
    true, own = offered(agents, 1), offered(agents, 0)
    lying = {
        "too large": NixlOffer(true.base, true.nbytes, bytes(1 << 20)),
        "garbage": NixlOffer(true.base, true.nbytes, bytes(range(256)) * 4),
        "none": NixlOffer(0, 1 << 40, b"x"),
        "other memory": NixlOffer(true.base - (1 << 30), true.nbytes, true.metadata),
        "another's name": NixlOffer(true.base, true.nbytes, own.metadata + b"!"),
    }[lie]
    with ExitStack() as stack:

        def receive() -> None:
            bad = Ends(agents, stack, lying)
            bad.frame(2, 1 << 20, 0)
            bad.asks.receive([aligned(1 << 20)])

        with pytest.raises(OSError, match=r".+"):
            receive()
        assert Ends(agents, stack).good(agents)
        assert agents.processes[0].offer() is own, "its agent is as it was"


@pytest.mark.parametrize("late", [True, False])
def test_an_address_where_nixl_failed_is_used_by_tcp(agents: TwoAgents, late: bool) -> None:
    """Not one where a read was interrupted before its deadline: it was not wanted any more."""
    with ExitStack() as stack:
        listener = stack.enter_context(closing(agents.serves.listen("127.0.0.1:0")))
        one = stack.enter_context(closing(agents.asks.connect(listener.address, 30)))
        other = stack.enter_context(closing(listener.accept()))
        with ThreadPoolExecutor(1) as pool:
            agreed = pool.submit(other.agreed, NIXL)
            one.agreed(NIXL)
            agreed.result(30)
            assert (one.carrier, one.features) == ("NIXL", NIXL)
            got = pool.submit(one.receive, [aligned(1 << 20)])
            os.kill(agents.processes[1].pid, signal.SIGSTOP)  # it does not answer the other agent
            try:
                other.send([bytes(1 << 20)])
                with pytest.raises(TimeoutError):
                    got.result(0.2)
                one.due = time.monotonic() + (0 if late else 60)
                one.interrupt()
                with pytest.raises(OSError, match=r".+"):
                    got.result(30)
            finally:
                os.kill(agents.processes[1].pid, signal.SIGCONT)
        again = stack.enter_context(closing(agents.asks.connect(listener.address, 30)))
        assert again.features == (0 if late else NIXL)


def test_a_chunk_is_not_awaited_for_ever_by_an_end_without_a_deadline(
    agents: TwoAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a server that waits for a request."""
    monkeypatch.setattr(nixl, "_LONGEST", 0.2)
    with ExitStack() as stack:
        ends = Ends(agents, stack)
        os.kill(agents.processes[1].pid, signal.SIGSTOP)
        try:
            ends.frame(2, 1 << 20, 0)
            with ThreadPoolExecutor(1) as pool:
                received = pool.submit(ends.asks.receive, [aligned(1 << 20)])
                try:
                    with pytest.raises(TimeoutError, match="timed out"):
                        received.result(30)
                finally:
                    ends.asks.interrupt()
        finally:
            os.kill(agents.processes[1].pid, signal.SIGCONT)


@pytest.mark.parametrize("harm", ["interrupted", "its process ended"])
def test_what_is_left_of_a_chunk_is_not_taken_from_another_transfer(agents: TwoAgents, harm: str) -> None:
    with ExitStack() as stack:
        ends, other = Ends(agents, stack), Ends(agents, stack)
        said = bytes(1 << 20)
        agents.processes[1].at(0, len(said))[:] = said
        ends.frame(2, len(said), 0)
        got = aligned(1 << 20)
        ends.asks.receive([got[:4096]])
        if harm == "interrupted":
            ends.asks.interrupt()
        else:
            os.kill(agents.processes[0].pid, signal.SIGKILL)
            until(lambda: agents.processes[0].offer() is None)
            agents.processes[0].start()
            other = Ends(agents, stack)
        assert other.good(agents)  # in the same chunk
        with pytest.raises(OSError, match=r".+"):
            ends.asks.receive([got[4096:8192]])


@pytest.mark.parametrize("started", [False, True])
def test_bytes_that_nobody_asked_for_take_no_memory(agents: TwoAgents, started: bool) -> None:
    """They come while this end waits until its chunk was read."""
    with ExitStack() as stack:
        ends = Ends(agents, stack)
        ends.frame(1, 1 << 28 if started else 2 << 20, 0)
        if started:
            ends.says.send([b"x"])
            ends.asks.receive([aligned(1)])
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        with pytest.raises(OSError, match="does not receive"):
            ends.asks.send([memoryview(bytes(CHUNK))] * 5)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20


def test_memory_of_a_transfer_that_was_given_up_is_not_used_again() -> None:
    """The other end is stopped while it is read from. What arrives when it goes on is in nobody's memory."""
    with ExitStack() as stack:
        agents = stack.enter_context(closing(TwoAgents(TCP)))
        assert Ends(agents, stack).good(agents)
        os.kill(agents.processes[1].pid, signal.SIGSTOP)
        for number in range(4):
            with ThreadPoolExecutor(1) as pool:
                ends = Ends(agents, stack)
                got = aligned(1 << 20)
                got[:] = bytes(1 << 20)
                received = pool.submit(ends.asks.receive, [got])
                ends.frame(2, 1 << 20, 0)
                with pytest.raises(TimeoutError):
                    received.result(0.2)
                ends.asks.interrupt()
                with pytest.raises(OSError, match=r".+"):
                    received.result(30)
                ends.asks.close()
                assert not any(got), number
        until(lambda: agents.processes[0].offer() is None)  # half of its memory is lost: it ends
        os.kill(agents.processes[1].pid, signal.SIGCONT)
        for process in agents.processes:
            process.start()  # UCX may end the other one too, when it learns of this end
        assert Ends(agents, stack).good(agents)


@pytest.mark.parametrize("transports", [SHARED, pytest.param(TCP, marks=pytest.mark.long)])
def test_a_node_reads_by_nixl_what_another_computed(tmp_path: Path, transports: str) -> None:
    with ExitStack() as stack:
        both = Nodes(tmp_path, stack, transports=transports)
        both.read_by_nixl()
        both.read(*PROMPTS)
        assert both.carrier() == "NIXL"
        agents = [*helpers(both.one.process.pid), *helpers(both.two.process.pid)]
        assert len(agents) == 2
        both.two.stop()
        both.one.kill()
        until(lambda: not any(Path(f"/proc/{pid}/fd").exists() for pid in agents))


@pytest.mark.parametrize(("one", "two"), [("nixl", "tcp"), ("tcp", "nixl")])
def test_a_node_without_nixl_is_read_over_tcp(tmp_path: Path, one: str, two: str) -> None:
    with ExitStack() as stack:
        both = Nodes(tmp_path, stack, one, two)
        both.read(*PROMPTS)
        assert both.carrier() == "TCP"


@pytest.mark.parametrize(
    ("end", "harm"),
    [
        ("one", signal.SIGKILL),
        pytest.param("two", signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("one", signal.SIGSTOP, marks=pytest.mark.long),
        ("two", signal.SIGSTOP),
    ],
)
def test_an_agent_that_ends_or_hangs_costs_time_and_no_byte(tmp_path: Path, end: str, harm: signal.Signals) -> None:
    with ExitStack() as stack:
        both = Nodes(tmp_path, stack)
        both.read_by_nixl()
        node = both.one if end == "one" else both.two
        (agent,) = helpers(node.process.pid)
        os.kill(agent, harm)
        both.read(*PROMPTS)  # every byte is checked
        node.stop()
        until(lambda: not Path(f"/proc/{agent}/fd").exists())


def test_a_killed_node_that_was_read_by_nixl_comes_back(tmp_path: Path) -> None:
    with ExitStack() as stack:
        both = Nodes(tmp_path, stack)
        both.read_by_nixl()
        both.one.kill()
        with Client(both.two.path) as client, client.session(MODEL) as session:
            assert length(session, PROMPTS[0]) == 0
        both.one.start()
        with Client(both.one.path) as client, client.session(MODEL) as session:
            session.store(PROMPTS[1], data(LAYOUT, PROMPTS[1]))
        both.read(PROMPTS[1])
        with Client(both.two.path) as client:
            until(lambda: client.statistics().held == 0)


def test_an_agent_that_cannot_start_is_said() -> None:
    process = NixlProcess({"UCX_TLS": "no-such-transport"})
    with closing(process):
        with pytest.raises(ConfigError, match=r"peers\.fabric"):
            Nixl(Tcp(), process).listen("127.0.0.1:0")
        Nixl(Tcp(), process, forced=False).listen("127.0.0.1:0").close()
        assert process.offer() is None


def test_nixl_is_not_used_with_certificates(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    peers = {
        "listen": "127.0.0.1:0",
        "certificate": str(authority.issue("host7")),
        "authority": str(authority.file),
        "names": "host7",
    }
    settings = configuration.read(None, env={}, peers={**peers, "fabric": "nixl"})
    with pytest.raises(ConfigError, match="not encrypted"):
        PeerTrust(settings.peers, settings.security)
    settings = configuration.read(None, env={}, peers={**peers, "fabric": "auto"})
    assert isinstance(PeerTrust(settings.peers, settings.security).transport, Tcp)
