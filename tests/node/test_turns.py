"""Whatever one client asks for, the others are served in between: its work is counted in blocks, and cut into turns."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtide.index import work_slices
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.node import protocol as p
from kvtide.node import work_limits
from kvtide.node.client.client import Client
from kvtide.node.server.client_handler import _ANSWERS, ClientHandler
from kvtide.store.backend import LocalPrefixLease
from kvtide.testing.interface import MODEL, PLAIN, data, prompt
from tests.node.raw import answer, dialled, greet
from tests.node.serving import Thread, eventually

OPEN = p.Open(p.describe(PLAIN), PLAIN.block_tokens, MODEL.namespace(), DEFAULT_TENANT.tag)
MANY = [p.GroupFields(f"g{i}", "full", 1, 1, 16, "float16", 0, 1, "plain") for i in range(64)]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Thread]:
    thread = Thread(tmp_path / "node.sock", dram={"budget": "64MiB", "segment": "8MiB"})
    yield thread
    thread.close()


class Pair:
    """A client that asks for much, and another, which asks for little as soon as the node works for the first."""

    def __init__(self, node: Thread, busy: socket.socket, other: socket.socket) -> None:
        self.node = node
        self.busy = busy
        self.other = other
        self.order: list[str] = []
        """Whose work was done, step by step."""
        for sock in (busy, other):
            greet(sock)
            assert answer(sock)[0] == "welcome"
        self.session = self.ask(busy, [OPEN])[0]
        self.others = self.ask(other, [OPEN])[0]
        self._asked = False

    @staticmethod
    def ask(sock: socket.socket, operations: list[p.Operation]) -> Any:
        sock.sendall(p.frame(p.Request(7, operations)))
        number, answers, *_ = answer(sock)
        assert number == 7
        return answers

    def step(self) -> None:
        """The node did a part of the first client's work; the second asks when the first part is done."""
        self.order.append("busy")
        if not self._asked:
            self._asked = True
            self.other.sendall(p.frame(p.Request(8, [p.Follow(False)])))

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        follow = ClientHandler._follow

        def followed(handler: ClientHandler, o: p.Follow) -> None:
            self.order.append("other")
            follow(handler, o)

        monkeypatch.setitem(_ANSWERS, p.Follow, followed)

    def served_within(self, steps: int) -> None:
        """The other was served after so many parts of the first one's work at most, and before its end."""
        assert answer(self.other)[0] == 8
        assert "other" in self.order
        assert self.order.index("other") <= steps, self.order[:20]
        assert self.order[-1] == "busy", "the other did not have to wait for all of it"


@pytest.fixture
def pair(node: Thread, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    with dialled(node.path) as busy, dialled(node.path) as other:
        found = Pair(node, busy, other)
        found.watch(monkeypatch)
        yield found


def counting(pair: Pair, monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    """Each operation of that kind is a step of the first client's work."""
    real: Callable[[ClientHandler, Any], Any] = _ANSWERS[kind]

    def counted(handler: ClientHandler, o: Any) -> Any:
        pair.step()
        return real(handler, o)

    monkeypatch.setitem(_ANSWERS, kind, counted)


def test_others_are_served_between_two_operations_of_a_frame(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    counting(pair, monkeypatch, p.Find)
    found = pair.ask(pair.busy, [p.Find(pair.session, os.urandom(32 * work_limits.TURN)) for _ in range(8)])
    assert [kind for kind, *_ in found] == ["found"] * 8, "all of it is done, in turns"
    pair.served_within(2)


def test_a_frame_has_so_many_blocks_times_groups(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    counting(pair, monkeypatch, p.Find)
    (session,) = pair.ask(pair.busy, [p.Open(MANY, 16, bytes(32), b"x" * 16)])
    digests = os.urandom(32 * 2048)
    answers = pair.ask(pair.busy, [p.Find(session, digests)] * 250)
    done = [a for a in answers if a[0] == "found"]
    refused = [a for a in answers if a[0] == "failure"]
    assert len(answers) == 250
    assert len(done) == work_limits.FRAME // (2048 * 64)
    assert {a[1] for a in refused} == {"LayoutError"}
    assert "in a request of its own" in refused[0][2]
    pair.served_within(2)
    assert pair.ask(pair.busy, [p.Find(session, digests)])[0][0] == "found", "the connection stays"


def test_one_operation_that_names_too_much_is_refused_alone(pair: Pair) -> None:
    (session,) = pair.ask(pair.busy, [p.Open(MANY, 16, bytes(32), b"x" * 16)])
    too_much = os.urandom(32 * (work_limits.BLOCKS // 64 + 1))
    answers = pair.ask(pair.busy, [p.Match(session, too_much, 0), p.Find(session, too_much), p.Follow(False)])
    assert [a and a[0] for a in answers] == ["failure", "failure", None]
    assert "is too long" in answers[0][2]


def test_a_flood_of_small_frames_leaves_others_their_turn(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    counting(pair, monkeypatch, p.Cancel)
    pair.busy.sendall(p.frame(p.Request(1, [p.Cancel(1)])) * 4000)
    for _ in range(4000):
        assert answer(pair.busy)[0] == 1
    pair.served_within(work_limits.TURN // work_limits.MESSAGE + 1)


def test_pins_and_drops_are_made_in_slices(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_limits, "SLICE", 16)
    monkeypatch.setattr(work_limits, "TURN", 16 * work_limits.MOVE)
    index, pipeline = pair.node.store.index, pair.node.store.pipeline
    pin, drop, sizes = index.pin, pipeline.drop_some, []

    def pinned(*args: Any) -> None:
        pair.step()
        pin(*args)

    def dropped(keys: Any, *args: Any) -> int:
        pair.step()
        sizes.append(len(keys))
        return drop(keys, *args)

    monkeypatch.setattr(work_slices, "SLICE", 16)
    monkeypatch.setattr(index, "pin", pinned)
    monkeypatch.setattr(pipeline, "drop_some", dropped)
    digests = os.urandom(32 * 4 * work_limits.SLICE)
    assert pair.ask(pair.busy, [p.Pin(pair.session, digests, None, 1)]) == [0]
    pair.served_within(2)
    pair.order.clear()
    pair._asked = False
    assert isinstance(pair.ask(pair.busy, [p.Drop(pair.session, digests, 5)])[0], int)
    eventually(lambda: sum(sizes) == 4 * work_limits.SLICE - 5)
    pair.served_within(2)
    assert max(sizes) <= work_limits.SLICE


def test_what_is_pinned_and_dropped_in_slices_is_what_was_asked_for(
    node: Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_limits, "SLICE", 3)
    tokens = prompt(*range(1, 11))
    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(tokens, data(PLAIN, tokens))
        assert session.pin(tokens, stop=7) == 7
        assert client.statistics().pinned == 7
        assert session.unpin(tokens, stop=5) == 5
        assert client.statistics().pinned == 2
        assert session.drop(tokens, start=4) == 6
        assert session.find(tokens) == [True] * 4 + [False] * 6
        assert session.drop(prompt(99), start=1) == 0


def test_a_load_is_begun_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_limits, "SLICE", 3)
    monkeypatch.setattr(work_limits, "TURN", 1)
    settings: dict[str, Any] = {
        "dram": {"budget": "8MiB", "segment": "1MiB"},
        "nvme": {"path": str(tmp_path / "tier"), "budget": "32MiB", "segment": "4MiB"},
    }
    tokens = prompt(*range(1, 11))
    node = Thread(tmp_path / "node.sock", **settings)
    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(tokens, data(PLAIN, tokens))
        assert client.flush(30)
    node.close()
    node = Thread(tmp_path / "node.sock", **settings)
    with dialled(node.path) as busy, dialled(node.path) as other, Client(node.path) as client:
        pair = Pair(node, busy, other)
        pair.watch(monkeypatch)
        promotion = node.store.pipeline._promotion
        start = promotion._start

        def started(*args: Any) -> Any:
            pair.step()
            return start(*args)

        monkeypatch.setattr(promotion, "_start", started)
        matched = p.Match(pair.session, client.session(MODEL).chain(tokens).joined, 0, 0.0)
        holding = pair.ask(busy, [matched])[0][1]
        assert isinstance(pair.ask(busy, [p.Load(pair.session, holding, None)])[0], int)
        assert pair.order.count("busy") >= 4
        pair.served_within(3)  # for the first slice memory had to be taken from the host as well
        with client.session(MODEL) as session, session.match(tokens, wait=10) as match:
            assert session.load(match).wait(30).tokens == len(tokens)
    node.close()


def test_the_end_of_a_session_that_held_much_leaves_others_their_turn(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_limits, "TURN", 500)
    tokens = prompt(*range(1, 101))
    with Client(pair.node.path) as client, client.session(MODEL) as session:
        session.store(tokens, data(PLAIN, tokens))
        names = session.chain(tokens).joined
        release = LocalPrefixLease.release

        def ended(holding: LocalPrefixLease) -> None:
            pair.step()
            release(holding)

        for _ in range(2):  # the end of a session, and that of its client
            for _ in range(20):
                assert pair.ask(pair.busy, [p.Match(pair.session, names, 0)] * 20)[-1][0] == "matched"
            assert client.statistics().held == 100
            monkeypatch.setattr(LocalPrefixLease, "release", ended)
            assert pair.ask(pair.busy, [p.Close(pair.session)]) == [None]
            pair.served_within(100)
            eventually(lambda: client.statistics().held == 0)
            monkeypatch.setattr(LocalPrefixLease, "release", release)
            pair.order.clear()
            pair._asked = False
            (pair.session,) = pair.ask(pair.busy, [OPEN])


def test_a_reservation_has_so_many_blocks(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_limits, "RESERVED", 5)
    (made,) = pair.ask(pair.busy, [p.Reserve(pair.session, [0], os.urandom(32 * 8), 0, 8, None, 0)])
    assert made[0] == "reserved"
    assert (len(made[4]), made[2]) == (5, 3), "the rest is refused, as if there were no room"


def test_many_answers_in_one_reply_are_no_larger_than_a_client_may_leave_unread(pair: Pair) -> None:
    tokens = prompt(*range(1, 2001))
    with Client(pair.node.path) as client, client.session(MODEL) as session:
        session.store(tokens, data(PLAIN, tokens))
        matched = pair.ask(pair.busy, [p.Match(pair.session, session.chain(tokens).joined, 0)])[0]
    assert matched[2] > 1000
    answers = pair.ask(pair.busy, [p.Collect(pair.session, matched[1])] * 1000)
    done = [a for a in answers if a[0] == "collected"]
    assert len(done) == work_limits.FRAME // matched[2]
    assert {a[1] for a in answers[len(done) :]} == {"LayoutError"}


def test_a_layout_of_many_groups_is_refused_before_it_is_looked_at(pair: Pair) -> None:
    groups = [p.GroupFields(f"g{i}", "full", 1, 1, 16, "float16", 0, 1, "plain") for i in range(50_000)]
    answers = pair.ask(pair.busy, [p.Open(groups, 16, bytes(32), b"x" * 16), p.Follow(False)])
    assert answers[0][:2] == ["failure", "LayoutError"]
    assert answers[1] is None
    opened = pair.ask(pair.busy, [p.Open(MANY, 16, bytes(32), b"x" * 16)] * 1000)
    numbers = [n for n in opened if isinstance(n, int)]
    assert len(numbers) == work_limits.FRAME // (64 * work_limits.GROUP)


def test_what_gives_back_is_never_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_limits, "FRAME", 100)
    tokens = prompt(*range(1, 51))
    with Client(pair.node.path) as client, client.session(MODEL) as session:
        session.store(tokens, data(PLAIN, tokens))
        names = session.chain(tokens).joined
        held = [pair.ask(pair.busy, [p.Match(pair.session, names, 0)])[0][1] for _ in range(5)]
        find = p.Find(pair.session, os.urandom(32 * 90))
        answers = pair.ask(pair.busy, [find, find, p.Release(pair.session, held), find])
        assert [a and a[0] for a in answers] == ["found", "failure", None, "failure"]
        assert client.statistics().held == 0
    answers = pair.ask(pair.busy, [p.Release(pair.session, [1] * 20_000), p.Follow(False)])
    assert answers[0][0] == "failure", "more than a session may hold"


def test_a_step_that_is_too_much_for_one_request_is_made_in_several(
    node: Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_limits, "FRAME", 25)
    prompts = [prompt(*range(i, i + 10)) for i in (100, 200, 300, 400)]
    with Client(node.path) as client, client.session(MODEL) as session, Client(node.path) as other:
        for tokens in prompts:
            session.store(tokens, data(PLAIN, tokens))
        group = client.worker_group(session, 1)
        matches = [session.match(tokens) for tokens in prompts]
        with other.join(group.token, 0) as worker, worker.step([group.ticket(m) for m in matches]) as step:
            assert [loaded and loaded.tokens for loaded in step.loads] == [len(tokens) for tokens in prompts]
        for match in matches:
            match.release()


def test_drops_of_one_client_have_one_turn_together(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = pair.node.store.pipeline
    drop = pipeline.drop_some

    def dropped(*args: Any) -> int:
        pair.step()
        return drop(*args)

    monkeypatch.setattr(pipeline, "drop_some", dropped)
    blocks = os.urandom(32 * 2 * work_slices.SLICE)
    numbers = pair.ask(pair.busy, [p.Drop(pair.session, blocks, 0)] * 50)
    assert all(isinstance(number, int) for number in numbers)
    eventually(lambda: pair.order.count("busy") == 100)
    pair.served_within(2 * work_limits.SLICE // work_slices.SLICE)


def test_several_holdings_given_back_before_a_match_are_free_after_it(pair: Pair) -> None:
    names = os.urandom(32)
    handler = next(g for g in pair.node.node._handlers.values() if pair.session in g._sessions)
    held = [pair.ask(pair.busy, [p.Match(pair.session, names, 0)])[0][1] for _ in range(3)]
    assert handler.rights == 3
    released, matched = pair.ask(pair.busy, [p.Release(pair.session, held), p.Match(pair.session, names, 0)])
    assert released is None
    eventually(lambda: list(handler._sessions[pair.session].holdings) == [matched[1]])


def test_long_lists_of_numbers_are_counted_or_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    (refused,) = pair.ask(pair.busy, [p.Flush(pair.session, b"", [(0, 0, 0)] * 100_000)])
    assert refused[:2] == ["failure", "LayoutError"]
    counting(pair, monkeypatch, p.Reserve)
    reserve = p.Reserve(pair.session, [0], b"", 0, 0, None, 0, writers=[1] * 16_384)
    answers = pair.ask(pair.busy, [reserve] * 20)
    assert {tuple(a[:2]) for a in answers} == {("failure", "LayoutError")}
    assert all(len(a[2]) < 1000 for a in answers)
    pair.served_within(2)


def test_workers_and_their_visits_are_limited(pair: Pair) -> None:
    token = "x" * 32
    (refused,) = pair.ask(pair.busy, [p.Invite(pair.session, token, 1 << 40)])
    assert refused[:2] == ["failure", "RightError"]
    assert pair.ask(pair.busy, [p.Invite(pair.session, token, 4000)]) == [None]
    answers = []
    for first in range(0, 2000, 500):
        answers += pair.ask(pair.busy, [p.Join(token, rank) for rank in range(first, first + 500)])
    joined = [a for a in answers if a[0] == "joined"]
    assert len(joined) == 1024
    assert "resign some" in answers[1024][2]
    holding = pair.ask(pair.busy, [p.Match(pair.session, b"", 0)])[0][1]
    visits = [a for _ in range(5) for a in pair.ask(pair.busy, [p.Visit(joined[0][1], holding)] * 1000)]
    assert [a[0] for a in visits].count("collected") == 4096
    assert "leave some" in visits[-1][2]
    assert pair.ask(pair.busy, [p.Leave(joined[0][1], [holding], True), p.Visit(joined[0][1], holding)])[1][0] == (
        "collected"
    )


def test_the_models_of_many_sessions_do_not_make_the_statistics_too_long(pair: Pair) -> None:
    for first in range(0, 500, 100):
        some: list[p.Operation] = [
            p.Open(MANY, 16, (first + i).to_bytes(32, "big"), DEFAULT_TENANT.tag) for i in range(100)
        ]
        assert all(isinstance(n, int) for n in pair.ask(pair.busy, some))
    with Client(pair.node.path) as client:
        clients = client.status().node.clients
    assert max(c.sessions for c in clients) == 501
    assert max(len(c.models) for c in clients) == 16


def test_a_flush_that_cannot_begin_is_told_and_the_next_can(node: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name == "kvtide-flush":
            raise RuntimeError("can't start new thread")
        start(thread)

    with Client(node.path) as client:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fail)
            assert not client.flush(30).complete
        assert client.flush(30).complete


def test_a_drop_is_done_before_what_follows_it_in_a_request_and_after_its_client_is_gone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_slices, "SLICE", 16)
    monkeypatch.setattr(work_limits, "TURN", 1)
    tokens = prompt(*range(1, 101))
    with Client(pair.node.path) as client, client.session(MODEL) as session:
        session.store(tokens, data(PLAIN, tokens))
        names = session.chain(tokens).joined
        _, found = pair.ask(pair.busy, [p.Drop(pair.session, names, 50), p.Find(pair.session, names)])
        assert found == ["found", [True] * 50 + [False] * 50]
        pair.busy.sendall(p.frame(p.Request(9, [p.Drop(pair.session, names, 0)])))
        eventually(lambda: sum(session.find(tokens)) < 50)
        pair.busy.close()
        eventually(lambda: sum(session.find(tokens)) == 0)
