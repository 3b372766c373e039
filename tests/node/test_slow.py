"""A node that lives but answers late: a call is a miss, and nothing else is lost or left behind at the node."""

from __future__ import annotations

import contextlib
import logging
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtide import Session
from kvtide.errors import TierError
from kvtide.node.client import backend
from kvtide.node.client import link as lines
from kvtide.node.client.client import Client
from kvtide.node.client.link import NodeLink
from kvtide.node.client.peer_process import PeerProcess
from kvtide.store.node_statistics import ClientStatistics
from kvtide.testing.interface import MODEL, PLAIN, check, data, length, prompt
from kvtide.transfer.write_results import Unwritten
from tests.node.serving import Process, eventually


@pytest.fixture
def other(node: Process) -> Iterator[Client]:
    """Somebody else, who waits longer."""
    with Client(node.path) as client:
        yield client


@pytest.fixture
def client(node: Process, other: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """One that waits for a fifth of a second."""
    monkeypatch.setattr(lines, "_ANSWER", 0.2)
    with Client(node.path) as client:
        yield client


@pytest.fixture
def session(client: Client) -> Iterator[Session]:
    """One whose node has blocks 1 and 2, on disk too."""
    with client.session(MODEL) as session:
        assert session.store(prompt(1, 2), data(PLAIN, prompt(1, 2))).stored == 2
        eventually(lambda: client.flush(30).complete)  # it waits for a fifth of a second, and the machine may be busy
        yield session


@contextlib.contextmanager
def stopped(node: Process) -> Iterator[None]:
    state = Path(f"/proc/{node.process.pid}/stat")
    node.signal(signal.SIGSTOP)
    try:
        eventually(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")
        yield
    finally:
        node.signal(signal.SIGCONT)


def never_again(line: NodeLink) -> None:
    """Whoever waits for the node from now on waits for ever."""
    assert line._requests is not None
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        line._requests.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", 0, 0))


def make_slow(client: Client, session: Session) -> None:
    """Ask a node that is stopped until nobody waits any more."""
    assert length(session, prompt(1, 2)) == 0
    before = client.slow, length(session, prompt(1, 2)), client.slow
    assert before == (False, 0, True), "one late answer may be chance, two are not"
    never_again(client.link)


def books(other: Client) -> ClientStatistics:
    """What the node has of the one client besides ``other``, who came before."""
    clients = eventually(lambda: other.status().node.clients)
    (_, found) = sorted(clients, key=lambda c: -c.seconds)
    return found


def at_rest(other: Client, sessions: int = 1) -> None:
    """Wait until the node has nothing of the client's but so many sessions."""

    def quiet() -> bool:
        found, store = books(other), other.statistics()
        rights = found.sessions, found.holdings, found.reservations, found.visits
        return rights == (sessions, 0, 0, 0) and (store.held, store.pinned) == (0, 0)

    eventually(quiet)


# -- one late answer ----------------------------------------------------------------------------------------


def test_a_late_answer_costs_that_call_and_nothing_else(
    node: Process, client: Client, other: Client, session: Session
) -> None:
    line, held = client.link, session.match(prompt(1, 2))
    with stopped(node):
        assert length(session, prompt(1, 2)) == 0
        check(PLAIN, session.load(held).wait(), prompt(1, 2))
    eventually(lambda: length(session, prompt(1, 2)) == 32)
    assert client.link is line, "it connected again"
    check(PLAIN, session.load(held).wait(), prompt(1, 2))
    eventually(lambda: books(other).holdings == 1)
    held.release()
    at_rest(other)


def opened(session: Session) -> None:
    """Another session, which is opened at its first use."""
    home: Any = session._session_host
    with home.session(MODEL) as another:
        assert length(another, prompt(1, 2)) == 0


def loaded(session: Session) -> None:
    with session.match(prompt(3)) as match:
        assert session.load(match).wait().tokens == 0


def reserved(session: Session) -> None:
    with session.reserve(prompt(7, 8)) as reservation:
        assert (reservation.keys, reservation.refused) == ([], 2)


def durable(session: Session) -> None:
    found = session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)), durable=True).wait()
    assert found.durable == 0
    assert {why for some in found.failed.values() for why in some.values()} == {Unwritten.TIMEOUT}


def dropped(session: Session) -> None:
    with pytest.raises(TierError, match="not answered in time"):
        session.drop(prompt(1, 2))


def nothing_stored(session: Session) -> None:
    assert session.store(prompt(7, 8), data(PLAIN, prompt(7, 8))).dropped == 2


def not_pinned(session: Session) -> None:
    assert session.pin(prompt(1, 2)) == 0


GRANTED = [opened, loaded, reserved, durable, dropped, nothing_stored, not_pinned]


@pytest.mark.parametrize("call", GRANTED)
@pytest.mark.parametrize("slow", [False, True])
def test_what_a_late_answer_grants_is_given_back(
    node: Process, client: Client, other: Client, session: Session, call: Callable[[Session], None], slow: bool
) -> None:
    line = client.link
    with stopped(node):
        if slow:
            make_slow(client, session)
        call(session)
    at_rest(other)
    eventually(lambda: session.store(prompt(5), data(PLAIN, prompt(5))).dropped == 0)
    eventually(lambda: length(session, prompt(5)) == 16)
    at_rest(other)
    assert client.link is line


def test_a_load_whose_answer_is_late_is_a_miss_and_its_match_is_still_good(
    node: Process, client: Client, other: Client, session: Session
) -> None:
    node.stop()  # then the blocks are on disk alone
    node.start()
    eventually(lambda: client.connected and other.connected)
    eventually(lambda: session.find(prompt(1, 2)) == [True, True])
    match = session.match(prompt(1, 2))
    assert (match.blocks, match.ready) == (2, False)
    with stopped(node):
        assert session.load(match).wait().tokens == 0
    eventually(lambda: session.load(match).wait().tokens == 32)
    check(PLAIN, session.load(match).wait(), prompt(1, 2))
    match.release()
    eventually(lambda: other.status().node.pid and other.statistics().held == 0)
    assert sum(c.holdings for c in other.status().node.clients) == 0


@pytest.mark.parametrize("slow", [False, True])
def test_a_store_of_several_parts_keeps_what_it_counts_as_stored(
    node: Process, client: Client, other: Client, session: Session, monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    """The request for the second part, which seals the first too, is answered late or not sent at all: the first part
    is sealed all the same."""
    monkeypatch.setattr(backend, "_FIRST_PART", 1)
    tokens, copy = prompt(*range(10, 16)), client.copier.copy
    with contextlib.ExitStack() as stack:

        def stop(pairs: Any) -> None:
            copy(pairs)
            if not stack._exit_callbacks:  # type: ignore[attr-defined]
                stack.enter_context(stopped(node))
                if slow:
                    make_slow(client, session)

        monkeypatch.setattr(client.copier, "copy", stop)
        found = session.store(tokens, data(PLAIN, tokens))
    assert found.stored >= 1
    assert found.dropped >= 1
    eventually(lambda: length(session, tokens) == 16 * found.stored)
    with session.match(tokens) as match:
        check(PLAIN, session.load(match).wait(), tokens[: 16 * found.stored])
    at_rest(other)


def test_the_rest_of_a_message_goes_out_before_anything_else(
    node: Process, client: Client, other: Client, session: Session
) -> None:
    line, long = client.link, session.chain(prompt(*range(100, 20_100)))
    with stopped(node):
        assert session.match(long).tokens == 0
        assert line._unsent.nbytes, "all of it has gone into the socket"
        assert session.unpin(prompt(1, 2)) == 0
    eventually(lambda: length(session, prompt(1, 2)) == 32)
    assert client.link is line
    at_rest(other)


# -- a node that is slow ------------------------------------------------------------------------------------


def test_nobody_waits_for_a_slow_node_and_it_is_used_when_it_answers(
    node: Process, client: Client, other: Client, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvtide.client")
    line, held, writing = client.link, session.match(prompt(1, 2)), session.reserve(prompt(7))
    written = session.reserve(prompt(6))
    for given in (writing, written):
        given.views[0][:] = bytes(len(given.views[0]))
    with stopped(node):
        make_slow(client, session)
        assert [length(session, prompt(1, 2)) for _ in range(100)] == [0] * 100
        check(PLAIN, session.load(held).wait(), prompt(1, 2))
        held.release()  # all that must reach the node later
        writing.abort()
        written.seal()
        assert "slow" in repr(client)
    eventually(lambda: not client.slow)
    assert client.link is line
    eventually(lambda: length(session, prompt(1, 2)) == 32)
    with session.match(prompt(6)) as found:
        assert found.tokens == 16, "what was sealed meanwhile is lost"
    at_rest(other)
    said = [r.message for r in caplog.records if "in time" in r.message or "twice" in r.message]
    assert len(said) == 2, said


def test_a_pin_ends_though_the_node_is_slow(node: Process, client: Client, other: Client, session: Session) -> None:
    assert session.pin(prompt(1, 2)) == 2
    with stopped(node):
        make_slow(client, session)
        session.unpin(prompt(1, 2))
    at_rest(other)


def test_who_is_followed_while_the_node_is_slow_hears_events_later(
    node: Process, client: Client, session: Session
) -> None:
    heard: list[object] = []
    with stopped(node):
        make_slow(client, session)
        client.follow(heard.append)
    eventually(lambda: not client.slow)
    session.store(prompt(5), data(PLAIN, prompt(5)))
    eventually(lambda: heard)


def test_a_slow_node_that_dies_is_found_dead(node: Process, client: Client, session: Session) -> None:
    line = client.link
    with stopped(node):
        make_slow(client, session)
        node.kill()
        eventually(lambda: not client.connected)
        node.start()
    eventually(lambda: client.connected and client.link is not line)
    eventually(lambda: length(session, prompt(1, 2)) == 32)


def test_where_nobody_can_say_whether_it_lives_it_counts_as_dead(
    node: Process, client: Client, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PeerProcess, "alive", False)
    line = client.link
    with stopped(node):
        assert length(session, prompt(1, 2)) == 0
        assert not line.alive
    eventually(lambda: client.connected)
    eventually(lambda: length(session, prompt(1, 2)) == 32)


def test_who_closes_while_the_node_is_slow_leaves_no_rights_behind(
    node: Process, client: Client, other: Client, session: Session
) -> None:
    session.match(prompt(1, 2))
    session.reserve(prompt(7, 8))
    assert other.statistics().held == 4
    with stopped(node):
        make_slow(client, session)
        client.close()
    eventually(lambda: other.statistics().held == 0 and len(other.status().node.clients) == 1)


# -- an engine of several processes -------------------------------------------------------------------------


@pytest.mark.parametrize("slow", [False, True])
def test_a_worker_that_misses_gives_up_what_it_was_to_write(
    node: Process, client: Client, other: Client, session: Session, slow: bool
) -> None:
    with other.session(MODEL) as scheduler:
        group = other.worker_group(scheduler, 1)
        with client.join(group.token, 0) as worker, scheduler.match(prompt(1, 2)) as match:
            given = group.delegate(prompt(7, 8))
            assert len(given.keys) == 2
            with stopped(node):
                if slow:
                    make_slow(client, session)
                with worker.step(loads=[group.ticket(match)], stores=[given.ticket]) as step:
                    assert (step.loads, step.stores) == ([None], [None])
            eventually(lambda: [c for c in other.status().node.clients if c.reservations] == [])
            eventually(lambda: books(other).visits == 0 and not client.slow)
            with worker.step(loads=[group.ticket(match)]) as step:
                assert step.loads[0] is not None
                assert step.loads[0].tokens == 32
    at_rest(other)


def test_a_worker_that_wrote_is_believed_though_the_node_was_slow(
    node: Process, client: Client, other: Client, session: Session
) -> None:
    with other.session(MODEL) as scheduler:
        group = other.worker_group(scheduler, 1)
        with client.join(group.token, 0) as worker:
            given = group.delegate(prompt(7, 8))
            with contextlib.ExitStack() as stack:
                step = worker.step(stores=[given.ticket])
                assert step.stores[0] is not None
                for view in step.stores[0].views:
                    view[:] = bytes(len(view))
                stack.enter_context(stopped(node))
                make_slow(client, session)
                with step:
                    pass
            eventually(lambda: scheduler.find(prompt(7, 8)) == [True, True])


def test_who_could_not_join_in_time_can_join_later(node: Process, client: Client, other: Client) -> None:
    with other.session(MODEL) as scheduler:
        group = other.worker_group(scheduler, 1)
        with stopped(node), pytest.raises(TierError, match="no node answers"):
            client.join(group.token, 0)
        client.join(group.token, 0).close()


# -- at any moment ------------------------------------------------------------------------------------------


def test_pauses_at_any_moment_cost_no_byte_and_leave_nothing(
    node: Process, client: Client, other: Client, session: Session
) -> None:
    """Several threads of one client store and read, while the node is stopped and goes on."""
    line, over, errors, verified = client.link, threading.Event(), list[BaseException](), [0] * 3

    def play(thread: int) -> None:
        rng = random.Random(thread)
        try:
            while not over.is_set():
                tokens = prompt(*range(n := rng.randrange(20, 40), n + rng.randrange(1, 6)))
                if rng.random() < 0.5:
                    session.store(tokens, data(PLAIN, tokens))
                    continue
                with session.match(tokens) as match:
                    found = session.load(match).wait()
                    check(PLAIN, found, tokens[: found.tokens])
                    verified[thread] += found.tokens
        except BaseException as e:  # noqa: BLE001 - told by the main thread
            errors.append(e)

    threads = [threading.Thread(target=play, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    rng, slow, before = random.Random(7), 0, list(verified)
    for _ in range(12):
        before[:] = verified
        with stopped(node):
            time.sleep(rng.choice([0, 0.1, 0.25, 0.7]))
            slow += client.slow
        eventually(lambda: errors or all(a > b for a, b in zip(verified, before, strict=True)))
    over.set()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert slow, "no pause was long enough"
    assert client.link is line
    at_rest(other)
