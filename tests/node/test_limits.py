"""No client can have so much of a node that others go without; who asks for more is told so."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtide import Flushed, Layout, Match
from kvtide.errors import LayoutError, RightError, TierError
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.node import protocol as p
from kvtide.node.client.client import Client
from kvtide.node.server import client_handler, mapped_memory, server
from kvtide.store.store import Statistics
from kvtide.testing.interface import MODEL, PLAIN, SIZE, data, length, prompt
from tests.node.raw import answer, dialled, greet
from tests.node.serving import Process, Thread, eventually


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Thread]:
    thread = Thread(tmp_path / "node.sock", dram={"budget": "8MiB", "segment": "1MiB"})
    yield thread
    thread.close()


def serves(path: Path) -> bool:
    with Client(path) as client, client.session(MODEL) as session:
        session.store(prompt(1), data(PLAIN, prompt(1)))
        return length(session, prompt(1)) == 16


def test_without_descriptors_a_node_pauses_and_goes_on(tmp_path: Path) -> None:
    node = Process(tmp_path)
    try:
        pid = node.process.pid
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        assert soft == hard, "it took as many as it may have"
        used = max(int(fd.name) for fd in Path(f"/proc/{pid}/fd").iterdir())
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 5, hard))
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(dialled(node.path))
            eventually(lambda: "cannot accept a connection" in node.log)
            eventually(lambda: "no hello" in node.log)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
        assert serves(node.path)
        assert node.log.count("cannot accept a connection") < 100, "it does not try all the time"
    finally:
        node.kill()


def test_who_says_no_hello_makes_room_for_others(node: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_HELLO", 0.1)
    with dialled(node.path) as sock:
        assert answer(sock) is None, "sent away"
    monkeypatch.setattr(server, "_HELLO", 3600.0)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(dialled(node.path)) for _ in range(100)]
        assert serves(node.path)
        assert answer(silent[0]) is None, "the oldest went"


def test_a_hello_is_no_longer_than_it_need_be(node: Thread, caplog: pytest.LogCaptureFixture) -> None:
    """It is cut off by its length, before the rest of it is read."""
    most = 4096 + 32 * 8  # a segment of memory for each of 8 MiB
    names = [f"{i:016x}-{i}" for i in range(most // 32)]
    with dialled(node.path) as sock:
        greet(sock, p.frame(p.Hello(1, 1, "test", "", "one", names)))
        assert answer(sock)[0] == "welcome", "names of as many segments as there can be"
        sock.sendall(p.frame(p.Request(1, [p.Find(7, bytes(32 * 1000))])))
        assert answer(sock)[1][0][0] == "failure", "later frames may be longer"
    for sent in (p.LENGTH.pack(most + 1), p.LENGTH.pack(p.LARGEST), p.frame(p.Hello(1, 1, "", "", "", ["x" * most]))):
        caplog.clear()
        with dialled(node.path) as sock:
            sock.sendall(sent)
            assert answer(sock) is None
            assert f"where {most} are allowed" in caplog.text


def test_a_node_has_so_many_connections(node: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_CONNECTIONS", 4)
    with Client(node.path), Client(node.path) as client:
        with pytest.raises(TierError, match="has 4 connections"):
            Client(node.path)
        client.close()
        eventually(lambda: len(node.node._connections) == 2)
        assert serves(node.path)


def test_a_process_has_so_many_clients(node: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_CLIENTS", 3)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            greet(sock := stack.enter_context(dialled(node.path)))
            assert answer(sock)[0] == "welcome"
        with pytest.raises(TierError, match="this process has 3 clients"):
            Client(node.path)
        if (child := os.fork()) == 0:
            os._exit(0 if serves(node.path) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "another process does not suffer"


def test_a_client_has_so_many_sessions(node: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_handler, "_SESSIONS", 16)
    with Client(node.path) as client:
        sessions = [client.session(MODEL) for _ in range(16)]
        for session in sessions:
            assert length(session, prompt(1)) == 0
        with client.session(MODEL) as more, pytest.raises(RightError, match="16 sessions"):
            more.match(prompt(1))
        sessions[0].close()
        with client.session(MODEL) as more:
            assert length(more, prompt(1)) == 0


def test_a_client_has_so_much_under_way(node: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = threading.Event()
    monkeypatch.setattr(node.store, "flush", lambda: Flushed(0, complete=disk.wait()))
    with Client(node.path) as client, Client(node.path) as other:
        numbers = client.link.ask([p.Flush()] * 1000)
        assert all(isinstance(n, int) for n in numbers)
        with pytest.raises(RightError, match="1000 loads, drops and flushes"):
            client.flush()
        assert not other.flush(0.01), "it waits, as it should"
        disk.set()
        assert other.flush(30)
        assert client.flush(30)


def test_a_frame_has_so_many_operations(node: Thread, caplog: pytest.LogCaptureFixture) -> None:
    with dialled(node.path) as sock:
        greet(sock)
        assert answer(sock)[0] == "welcome"
        sock.sendall(p.frame(p.Request(1, [p.Follow(False)] * 1001)))
        assert answer(sock) is None
        assert "not understood" in caplog.text


def test_a_client_sends_more_operations_than_that_in_several_frames(node: Thread) -> None:
    with Client(node.path) as client:
        assert client.link.ask([p.Follow(False)] * 2500) == [None] * 2500
        assert client.status().node.clients[0].requests == 4


def test_a_client_holds_its_share_of_dram_and_no_more(node: Thread) -> None:
    """What it hoards is lost to others; the rest is not."""
    tokens = prompt(*range(1, 4000))
    with Client(node.path) as greedy, Client(node.path) as other:
        hoard, modest = greedy.session(MODEL), other.session(MODEL)
        got = [hoard.reserve(tokens, start=i, stop=i + 20) for i in range(0, 3900, 20)]
        assert got[0].keys
        assert not got[-1].keys
        assert got[-1].refused == 20
        held = sum(len(r.keys) for r in got) * PLAIN.geometry["full"].footprint
        assert (8 << 20) * 0.8 < held <= (8 << 20) * 0.9
        some = prompt(*range(5000, 5020))
        assert modest.store(some, data(PLAIN, some)).stored == 20
        assert length(modest, some) == len(some)
        assert length(hoard, some) < len(some), "a miss for a client that holds too much"
        for reservation in got:
            reservation.abort()
        assert length(hoard, some) == len(some)
        assert hoard.store(prompt(1), data(PLAIN, prompt(1))).stored == 1


def test_a_match_has_the_room_of_what_is_given_back_with_it(node: Thread) -> None:
    """An engine goes from one prompt to the next in one message, though both together were more than its share."""
    share = int(node.node.store.config.dram.budget * node.node.store.config.node.client_share)
    blocks = share * 3 // 5 // PLAIN.geometry["full"].footprint
    with Client(node.path) as client, client.session(MODEL) as session:
        whole = prompt(*range(1, blocks + 1))
        session.store(whole, data(PLAIN, whole))
        for _ in range(3):
            with session.match(whole) as found:
                assert found.tokens == len(whole)


def test_a_prefix_that_is_pinned_again_and_again_costs_its_client_nothing_more(node: Thread) -> None:
    with Client(node.path) as client, client.session(MODEL) as session:
        shared, others = prompt(*range(1, 65)), prompt(*range(1000, 1065))
        session.store(shared, data(PLAIN, shared))
        for _ in range(100):
            assert session.pin(shared) == 64
        assert length(session, shared) == len(shared)
        assert session.store(others, data(PLAIN, others)).dropped == 0
        for _ in range(100):
            assert session.unpin(shared) == 64
        assert session.unpin(shared) == 0


def test_reservations_that_grant_nothing_hold_no_more_than_a_share(tmp_path: Path) -> None:
    """Each keeps the blocks before its own, and that is memory too."""
    settings: Any = {"dram": {"budget": "8MiB", "segment": "1MiB"}, "node": {"client_share": 0.25}}
    node = Thread(tmp_path / "node.sock", **settings)
    some = (1 << 20) // PLAIN.geometry["full"].footprint
    with Client(node.path) as first, Client(node.path) as second:
        greedy, modest = first.session(MODEL), second.session(MODEL)
        prompts = [prompt(*range(1000 * n, 1000 * n + some)) for n in range(1, 9)]
        for tokens in prompts:
            greedy.store(tokens, data(PLAIN, tokens))
        held = [greedy.reserve(tokens) for tokens in prompts if length(greedy, tokens) == len(tokens)]
        assert len(held) > 6
        assert not any(r.keys for r in held)
        for n in range(20, 25):
            tokens = prompt(*range(1000 * n, 1000 * n + some))
            assert modest.store(tokens, data(PLAIN, tokens)).dropped == 0
            with modest.match(tokens) as found:
                assert found.tokens == len(tokens)
        for reservation in held:
            reservation.abort()
        assert greedy.store(prompt(1, 2), data(PLAIN, prompt(1, 2))).stored == 2
    node.close()


def test_a_prompt_in_parts_is_stored_though_its_beginning_is_kept(tmp_path: Path) -> None:
    node = Thread(tmp_path / "node.sock", dram={"budget": "8MiB", "segment": "1MiB"}, node={"client_share": 0.5})
    some = (1 << 18) // PLAIN.geometry["full"].footprint
    with Client(node.path) as client, client.session(MODEL) as session:
        tokens = prompt(*range(1, 14 * some + 1))
        blocks = data(PLAIN, tokens)
        for n in range(14):
            part = session.reserve(tokens, start=n * some, stop=(n + 1) * some)
            assert (len(part.keys), part.refused) == (some, 0)
            for view, block in zip(part.views, blocks[n * some :], strict=False):
                view[: block.nbytes] = block.tobytes()
            part.seal()
        assert length(session, tokens) == len(tokens)
    node.close()


def test_what_requests_have_in_common_counts_once(tmp_path: Path) -> None:
    """A hundred that begin with one system prompt hold it once, and are no reason for misses or refusals."""
    node = Thread(tmp_path / "node.sock", dram={"budget": "8MiB", "segment": "1MiB"}, node={"client_share": 0.5})
    each = PLAIN.geometry["full"].footprint
    common = range(1, (1 << 20) // each + 1)
    with Client(node.path) as client, client.session(MODEL) as session, client.session(MODEL) as other:
        prompts = [prompt(*common, 1000 + i) for i in range(20)]
        for tokens in prompts:
            session.store(tokens, data(PLAIN, tokens))
        (client_handler,) = node.node._handlers.values()
        account, full, rng = client_handler._account, client_handler._account.room, random.Random(0)
        held: dict[int, Match] = {}
        for _ in range(300):
            i = rng.randrange(40)
            if i in held:
                held.pop(i).release()
            else:
                held[i] = (other if i % 2 else session).match(prompts[i // 2])
                assert held[i].tokens == len(prompts[i // 2]), "all of it is here"
            if len({n // 2 for n in held}) > 10:  # beyond half of what it may have, if all were added up
                client.statistics()  # takes along what was put off
                assert full - account.room == (len(common) + len({n // 2 for n in held})) * each
        assert session.store(prompt(2000, 2001), data(PLAIN, prompt(2000, 2001))).stored == 2
        for match in held.values():
            match.release()
        client.statistics()
        assert account.room == full
    node.close()


def test_of_a_prompt_longer_than_there_is_room_the_beginning_can_be_pinned(tmp_path: Path) -> None:
    node = Thread(tmp_path / "node.sock", dram={"budget": "8MiB", "segment": "1MiB"}, node={"client_share": 0.25})
    with Client(node.path) as client, client.session(MODEL) as session:
        tokens = prompt(*range(1, (4 << 20) // PLAIN.geometry["full"].footprint + 1))
        session.store(tokens[: 2 * 16], data(PLAIN, tokens[: 2 * 16]))
        assert session.pin(tokens, stop=2) == 2
    node.close()


def test_one_group_is_reserved_once_in_a_message(node: Thread) -> None:
    """Many times would keep the others waiting."""
    with Client(node.path) as client, client.session(MODEL) as session:
        session.match(prompt(1)).release()
        (answered,) = client.link.ask([p.Reserve(1, [0, 0], bytes(32), 0, 1, None, 0)])
        assert isinstance(answered, p.Failure)
        assert "are not in this prompt" in answered.text


def test_what_a_node_keeps_of_a_client_is_short(node: Thread) -> None:
    with dialled(node.path) as sock:
        greet(sock, p.frame(p.Hello(1, 1, "test", "", "n" * 300)))
        assert sock.recv(1) == b"", "it is sent away"
    with Client(node.path) as client, pytest.raises(LayoutError, match="65 letters of 64"):
        client.session(replace(MODEL, layout=Layout((replace(PLAIN.groups[0], packing="x" * 65),), SIZE)))


def test_a_prompt_has_so_many_blocks(node: Thread) -> None:
    with Client(node.path) as client, client.session(MODEL) as session:
        session.match(prompt(1)).release()
        (answered,) = client.link.ask([p.Match(1, bytes(32 * ((1 << 17) + 1)), 0)])
        assert isinstance(answered, p.Failure)
        assert "is too long" in answered.text


def test_many_questions_for_statistics_in_one_frame_are_answered_once(
    node: Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes about a millisecond, in which nobody else is served."""
    made: list[Statistics] = []
    counted = node.store.statistics

    def count() -> Statistics:
        made.append(counted())
        return made[-1]

    monkeypatch.setattr(node.store, "statistics", count)
    with Client(node.path) as client, client.session(MODEL) as session:
        answers = client.link.ask([p.Statistics()] * 1000)
        assert len(made) == 1
        assert len(answers) == 1000
        assert all(answer == answers[0] for answer in answers)
        session.store(prompt(1), data(PLAIN, prompt(1)))
        assert client.statistics().blocks == 1, "the next frame is told what is true then"


def test_a_process_leaves_memory_of_so_many_clients(node: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_memory, "_CLIENTS", 3)
    opening = p.Open(p.describe(PLAIN), PLAIN.block_tokens, MODEL.namespace(), DEFAULT_TENANT.tag)
    for name in ("one", "two", "three"):
        with dialled(node.path) as sock:
            greet(sock, p.frame(p.Hello(1, 1, "test", "", name)))
            assert answer(sock)[0] == "welcome"
            sock.sendall(p.frame(p.Request(1, [opening])))
            (session,) = answer(sock)[1]
            reserved = p.Reserve(session, [0], bytes(32), 0, 1, None, 0)
            sock.sendall(p.frame(p.Request(2, [reserved, p.Close(session)])))
            assert answer(sock)[2], "it is given memory, and never says that it let go of it"
        eventually(lambda: not node.node._handlers)
    with dialled(node.path) as sock:
        greet(sock, p.frame(p.Hello(1, 1, "test", "", "four")))
        assert "memory of 3 clients" in answer(sock)[2]
    with dialled(node.path) as sock:
        greet(sock, p.frame(p.Hello(1, 1, "test", "", "one")))
        assert answer(sock)[0] == "welcome", "it has let go by now, since it says nothing else"
    eventually(lambda: not node.node._handlers)
    assert serves(node.path)
