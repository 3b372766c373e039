"""Memory that clients keep beyond a node's death is counted by its successor."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtide.block import Layout
from kvtide.index.keys import Model
from kvtide.node.client.client import Client
from kvtide.node.server.loop import run_in_loop
from kvtide.node.server.mapped_memory import MappedMemory
from kvtide.store.match import Match
from kvtide.store.session import Session
from kvtide.tiers.dram.tier import Dram
from tests.node import host
from tests.node.serving import Process, eventually

SEGMENT = 2 << 20
BUDGET = 4 * SEGMENT
LAYOUT = Layout.attention(layers=4, heads=2, head_dim=64)
BLOCKS = BUDGET // LAYOUT.geometry["full"].footprint
TOKENS = np.arange(BLOCKS * LAYOUT.block_tokens, dtype=np.uint32)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Process]:
    settings = {"DRAM_BUDGET": str(BUDGET), "DRAM_SEGMENT": str(SEGMENT), "DRAM_PREFAULT": "true", "NVME_PATH": ""}
    settings["NODE_CLIENT_SHARE"] = "1"
    process = Process(tmp_path, **{f"KVTIDE_{name}": value for name, value in settings.items()})
    yield process
    process.kill()


def host_memory(node: Process) -> int:
    """Bytes of all memory of nodes that this process or the node has, each counted once."""
    return sum(host.memory([os.getpid(), node.process.pid]).values())


def store(session: Session) -> int:
    blocks = [np.full(LAYOUT.geometry["full"].nbytes, i + 1, np.uint8) for i in range(BLOCKS)]
    return session.store(TOKENS, blocks).stored


def held(session: Session) -> Match:
    match = session.match(TOKENS)
    assert match.tokens == len(TOKENS)
    return match


def _length(session: Session) -> int:
    with session.match(TOKENS) as match:
        return match.tokens // LAYOUT.block_tokens


def test_a_new_node_leaves_room_for_what_clients_still_have(node: Process) -> None:
    with Client(node.path) as client, client.session(Model(LAYOUT, "test")) as session:
        assert store(session) == BLOCKS
        with held(session) as match:
            kept = session.load(match).wait().views["full"][: BLOCKS // 2]
        for _ in range(3):
            node.kill()
            node.start()
            eventually(lambda: client.connected)
            assert store(session) <= BLOCKS // 2, "the other half is not free"
            assert host_memory(node) <= BUDGET + SEGMENT
        assert [v[0] for v in kept] == list(range(1, BLOCKS // 2 + 1)), "what was handed out stays readable"
        del kept
        eventually(lambda: store(session) + _length(session) == BLOCKS)
        assert host_memory(node) <= BUDGET


def test_a_match_keeps_its_own_memory_beyond_the_nodes_death_and_no_other(node: Process) -> None:
    with Client(node.path) as client, client.session(Model(LAYOUT, "test")) as session:
        assert store(session) == BLOCKS
        match = session.match(TOKENS[: len(TOKENS) // BLOCKS])
        assert len(host.memory([os.getpid()])) == 4
        node.kill()
        eventually(lambda: not client.connected and len(host.memory([os.getpid()])) == 1)
        assert [v[0] for v in session.load(match).wait().blocks] == [1]
        match.release()
        eventually(lambda: not host.memory([os.getpid()]))


def test_the_memory_of_a_dead_client_is_free_for_the_next_node(node: Process) -> None:
    holder = (
        "import sys; from kvtide.node.client.client import Client; from kvtide.index.keys import Model;"
        "from tests.node.test_mapped_memory import LAYOUT, held, store;"
        "from pathlib import Path; c = Client(Path(sys.argv[1])); s = c.session(Model(LAYOUT, 'test'));"
        "store(s); v = s.load(held(s)).wait(); print('ready', flush=True); sys.stdin.readline()"
    )
    command = [sys.executable, "-c", holder, str(node.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)  # it can say nothing
        node.kill()
        node.start()
        with Client(node.path) as client, client.session(Model(LAYOUT, "test")) as session:
            assert store(session) == 0, "all memory is still the stopped process's"
            process.kill()
            process.wait()
            eventually(lambda: store(session) + _length(session) == BLOCKS)  # segments become free one by one
    assert "unreadable" not in node.log


def test_a_broken_book_is_told_and_does_no_harm(node: Process) -> None:
    with Client(node.path) as client, client.session(Model(LAYOUT, "test")) as session:
        store(session)
    node.kill()
    node.path.with_suffix(".lent").write_bytes(b'{"who": ["knows"')
    node.start()
    assert "unreadable" in node.log
    with Client(node.path) as client, client.session(Model(LAYOUT, "test")) as session:
        assert store(session) == BLOCKS


def test_a_version_that_was_torn_leaves_the_one_before(tmp_path: Path) -> None:
    async def written() -> None:
        mapped_memory = MappedMemory(tmp_path / "node.lent")
        mapped_memory.attach(asyncio.get_running_loop(), [dram])
        for serial in (1, 2, 3):
            mapped_memory.lent("a client", os.getpid(), [serial], [serial << 20])
        # It dies: nothing is closed.

    dram = Dram(8 << 20, segment=1 << 20)
    run_in_loop(written())
    book = tmp_path / "node.lent"
    assert MappedMemory(book).elsewhere == 6 << 20
    whole = book.read_bytes()
    assert book.stat().st_blocks * 512 < 1 << 20, "it is sparse"
    places = [0, whole.rindex(b"a client") & ~0xFFFFF]
    # One has all three, the other what there was before the last.
    assert {MappedMemory(_torn(book, whole, place)).elsewhere for place in places} == {3 << 20, 6 << 20}
    dram.close()


def _torn(book: Path, whole: bytes, place: int) -> Path:
    torn = bytearray(whole)
    torn[place + 40] ^= 1
    book.write_bytes(torn)
    return book


def test_nobody_else_reads_the_book(node: Process) -> None:
    """Neither a new one, nor one that is there already, nor what an interrupted writer left."""
    book, rest = node.path.with_suffix(".lent"), node.path.with_name("node.lent-new")
    with Client(node.path) as client, client.session(Model(LAYOUT, "test")) as session:
        store(session)
        assert book.stat().st_mode & 0o777 == 0o600
        node.kill()
        book.chmod(0o644)
        rest.write_bytes(b"")
        rest.chmod(0o644)
        node.start()
        assert book.stat().st_mode & 0o777 == 0o600
        eventually(lambda: store(session) == BLOCKS)
        assert (book.stat().st_mode & 0o777, rest.exists()) == (0o600, False)


def test_memory_that_is_given_up_is_free_though_clients_have_it_mapped(node: Process) -> None:
    """A segment that suits no other size is given back to the system, and taken anew."""
    wide = Layout.attention(layers=5, heads=4, head_dim=64)
    block = np.zeros(wide.geometry["full"].nbytes, np.uint8)

    def resident() -> int:
        """Bytes of shared memory that the two processes have, each page counted once."""
        facts = [Path(f"/proc/{pid}/smaps").read_text() for pid in (os.getpid(), node.process.pid)]
        found: dict[str, int] = {}
        for part in "".join(facts).split("/memfd:kvtide-")[1:]:
            name, size = part.split(maxsplit=1)[0], int(part.split("Rss:")[1].split()[0])
            found[name] = max(found.get(name, 0), size << 10)
        return sum(found.values())

    with Client(node.path) as client:
        with client.session(Model(LAYOUT, "test")) as session:
            assert store(session) == BLOCKS
            match = held(session)
            stale = session.load(match).wait().views["full"]
            match.release()
            with client.session(Model(wide, "test")) as other:
                for i in range(2 * BLOCKS):
                    assert other.store(np.full(wide.block_tokens, i, np.uint32), [block]).stored == 1
                assert resident() <= BUDGET, "though every old segment is still mapped here"
        assert len(stale) == BLOCKS


def test_a_node_that_ends_in_good_order_leaves_no_book(node: Process) -> None:
    with Client(node.path) as client, client.session(Model(LAYOUT, "test")) as session:
        store(session)
    node.stop()
    assert sorted(p.name for p in node.folder.iterdir()) == ["log", "node.alive", "ready.sock"]
