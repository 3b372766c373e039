"""What a client promises its users when lines break, nodes come and go, and callbacks do as they please."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtide
from kvtide import BlockStored, EventsLost, Session
from kvtide.block import Layout
from kvtide.errors import ArgumentError, LayoutError, TierError
from kvtide.events import Event
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.node import protocol as p
from kvtide.node.client import backend
from kvtide.node.client.client import Client
from kvtide.testing.interface import MODEL, PLAIN, check, data, length, prompt
from tests.node.serving import Apart, Process, Thread, apart, eventually


def void(_: object) -> None:
    """For lambdas that must answer nothing."""


def break_line(client: Client) -> None:
    """The connection breaks; the node lives on, and the client comes back."""
    line = client._link
    assert line is not None
    line.close()
    eventually(lambda: client._link is not line and client.connected)


# -- what a node keeps for a line that was lost -------------------------------------------------------------


def test_a_living_node_forgets_what_a_lost_line_held_when_nothing_of_it_is_used(node: Process) -> None:
    with Client(node.path) as client, Client(node.path) as other, client.session(MODEL) as session:
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        assert client.flush(30)
        match = session.match(prompt(1, 2))
        loaded = session.load(match).wait()
        reservation = session.reserve(prompt(7, 8))
        assert other.statistics().held == 4
        break_line(client)
        assert other.statistics().held == 4, "they may still be read and written"
        for view, block in zip(reservation.views, data(PLAIN, prompt(7, 8)), strict=True):
            view[:] = block.data.cast("B")
        reservation.seal()
        assert length(session, prompt(7, 8)) == 0, "it was asked over a line that is gone"
        assert other.statistics().held == 4
        check(PLAIN, loaded, prompt(1, 2))
        match.release()
        eventually(lambda: other.statistics().held == 0)
        assert session.store(prompt(7, 8), data(PLAIN, prompt(7, 8))).stored == 2


def test_what_nothing_is_known_of_any_more_is_forgotten_at_once(node: Process) -> None:
    """The node gave rights in a reply that never came."""
    with Client(node.path) as client, Client(node.path) as other, client.session(MODEL) as session:
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        line, number = session._backend._session()  # type: ignore[attr-defined]
        line.post(p.Match(number, b"".join(session.chain(prompt(1, 2)).digests), 0))
        eventually(lambda: other.statistics().held == 2)
        break_line(client)
        eventually(lambda: other.statistics().held == 0)


def test_another_process_cannot_let_rights_be_forgotten(tmp_path: Path) -> None:
    node = Process(tmp_path)
    try:
        with Client(node.path) as client, client.session(MODEL) as session:
            session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
            with session.match(prompt(1, 2)):
                token = client.link.welcome.token
                if (child := os.fork()) == 0:
                    with Client(node.path) as stranger:
                        stranger.link.ask_one(p.EndEarlierRights(token))
                    os._exit(0)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
                assert client.connected
                assert client.statistics().held == 2
    finally:
        node.kill()


def test_a_number_of_the_old_node_means_nothing_at_the_new_one(node: Process) -> None:
    """An end that was told early, or late, ends nothing that another life of the node has promised."""
    with Client(node.path) as client, client.session(MODEL) as session:
        line = client.link
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        for number in range(200):  # told by the old node, asked for by nobody
            line.completions.ended(p.Ended(number, count=77))
        node.kill()
        eventually(lambda: not client.connected)
        node.start()
        eventually(lambda: client.connected)
        session.store(prompt(3, 4, 5), data(PLAIN, prompt(3, 4, 5)))
        assert session.drop(prompt(3, 4, 5)) == 3


# -- callbacks ----------------------------------------------------------------------------------------------


def test_a_follower_may_use_and_close_the_store(node: Process) -> None:
    client = Client(node.path)
    session = client.session(MODEL)
    done: list[object] = []

    def follower(event: Event) -> None:
        if isinstance(event, BlockStored) and event.tier == "dram" and not done:
            done.append(session.drop(prompt(1)))
            done.append(client.flush().complete)
            client.close()
            done.append("closed")

    client.follow(follower)
    session.store(prompt(1), data(PLAIN, prompt(1)))
    eventually(lambda: done == [1, True, "closed"])
    assert not client.connected


def test_a_callback_at_the_end_of_a_load_may_wait_for_the_node(tmp_path: Path) -> None:
    node = Process(tmp_path, KVTIDE_DRAM_BUDGET="2MiB", KVTIDE_DRAM_SEGMENT="1MiB")
    try:
        with Client(node.path) as client, client.session(MODEL) as session:
            many = prompt(*range(200))
            session.store(many, data(PLAIN, many))
            assert client.flush(60)
            other = prompt(*range(500, 800))
            session.store(other, data(PLAIN, other))
            with session.match(many) as match:
                assert not match.ready
                dropped: list[int] = []
                load = session.load(match)
                load.transfer.on_end(lambda: dropped.append(session.drop(prompt(900))))
                load.wait()
                eventually(lambda: dropped == [0])
    finally:
        node.kill()


def test_a_follower_that_hangs_holds_up_nothing_else(node: Process) -> None:
    free = threading.Event()
    with Client(node.path) as client, client.session(MODEL) as session:
        client.follow(lambda event: void(free.wait()))
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        assert client.flush(30)
        assert session.drop(prompt(1, 2)) == 2
        free.set()


# -- events -------------------------------------------------------------------------------------------------


def test_a_node_tells_events_only_while_somebody_follows(tmp_path: Path) -> None:
    node = Thread(tmp_path / "node.sock", dram={"budget": "8MiB", "segment": "1MiB"})
    try:
        with Client(node.path) as client:
            stop, stop_too = client.follow(lambda event: None), client.follow(lambda event: None)
            assert node.store.feed.followed
            stop()
            assert node.store.feed.followed
            stop_too()
            assert not node.store.feed.followed
    finally:
        node.close()


def test_followers_go_on_at_a_new_node_and_know_that_they_missed_some(node: Process) -> None:
    seen: list[Event] = []
    with Client(node.path) as client, client.session(MODEL) as session:
        client.follow(seen.append)
        node.kill()
        eventually(lambda: not client.connected)
        client.follow(seen.append)  # while there is none
        node.start()
        eventually(lambda: seen == [EventsLost(0)] * 2)
        session.store(prompt(1), data(PLAIN, prompt(1)))
        eventually(lambda: sum(isinstance(e, BlockStored) and e.tier == "dram" for e in seen) == 2)


# -- what ends with a client --------------------------------------------------------------------------------


def test_pins_end_with_their_session_or_process(node: Process) -> None:
    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        with client.session(MODEL) as other:
            assert (session.pin(prompt(1)), other.pin(prompt(1, 2)), other.pin(prompt(2))) == (1, 2, 0)
            assert session.unpin(prompt(1, 2)) == 1, "only its own"
            assert client.statistics().pinned == 2
        assert client.statistics().pinned == 0
        if (child := os.fork()) == 0:
            pinning = Client(node.path).session(MODEL)
            os._exit(pinning.pin(prompt(1, 2)))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        eventually(lambda: client.statistics().pinned == 0)


def test_a_segment_may_go_in_the_frame_that_names_it(tmp_path: Path) -> None:
    node = Thread(tmp_path / "node.sock", dram={"budget": "1MiB", "segment": "1MiB"})
    other = Layout.attention(layers=1, heads=3, head_dim=400, block_tokens=16, dtype="float32")
    try:
        with Client(node.path) as client, Client(node.path) as late:
            with client.session(MODEL) as session:
                session.store(prompt(1), data(PLAIN, prompt(1)))
                digests = b"".join(session.chain(prompt(1)).digests)
                namespace = MODEL.namespace(DEFAULT_TENANT)
            opened = [
                p.Open(p.describe(layout), layout.block_tokens, namespace, DEFAULT_TENANT.tag)
                for layout in (PLAIN, other)
            ]
            one, two = late.link.ask(list(opened))
            assert isinstance(one, int)
            assert isinstance(two, int)
            found, _, _, made = late.link.ask(
                [
                    p.Match(one, digests, 0),
                    p.Release(one, [two + 1]),
                    p.Drop(one, digests, 0),
                    p.Reserve(two, [0], digests, 0, 1, None, 0),
                ]
            )
            assert isinstance(found, p.Matched)
            assert isinstance(made, p.Reserved)
            assert found.blocks == 1
            assert made.refused == 0
            late.link.spans(made.places, 4096)[0][:4] = b"here"
    finally:
        node.close()


# -- a node that hangs --------------------------------------------------------------------------------------


def test_a_node_that_hangs_is_a_miss_and_is_found_again(node: Process) -> None:
    async def ask(session: Session) -> int:
        with session.match(prompt(1, 2)) as match:
            return (await session.load(match)).tokens

    with Client(node.path) as client, Client(node.path) as other, client.session(MODEL) as session:
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        held = session.match(prompt(1, 2))
        node.signal(signal.SIGSTOP)
        assert asyncio.run(ask(session)) == 0
        assert [asyncio.run(ask(session)) for _ in range(100)] == [0] * 100, "nobody waits for it again"
        assert client.slow
        check(PLAIN, session.load(held).wait(), prompt(1, 2))
        held.release()
        node.signal(signal.SIGCONT)
        eventually(lambda: not client.slow)
        assert asyncio.run(ask(session)) == 32
        eventually(lambda: other.connected and other.statistics().held == 0)


def test_who_closes_while_the_node_hangs_leaves_no_rights_behind(node: Process) -> None:
    """What was given back is in the socket, and the node reads it when it goes on, though nobody hears its answers."""
    with Client(node.path) as other, Client(node.path) as client:
        session = client.session(MODEL)
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        eventually(lambda: client.flush(30).complete)
        session.match(prompt(1, 2))
        session.reserve(prompt(7, 8))
        assert other.statistics().held == 4
        node.signal(signal.SIGSTOP)
        client.close()
        node.signal(signal.SIGCONT)
        eventually(lambda: other.connected and other.statistics().held == 0)


def test_closing_does_not_wait_for_a_node_that_hangs(node: Process) -> None:
    client = Client(node.path)
    node.signal(signal.SIGSTOP)
    try:
        client.link.close()
        eventually(lambda: client.dialing)
        client.close()
        assert client.dialing, "it waited for an attempt to reach the node"
    finally:
        node.signal(signal.SIGCONT)
    eventually(lambda: not client.dialing)
    with Client(node.path) as other:
        eventually(lambda: len(other.status().node.clients) == 1)


@apart
def test_a_node_that_could_not_see_when_we_die_refuses_us(tmp_path: Path) -> None:
    hidden = Apart(tmp_path)
    try:
        with pytest.raises(TierError, match="hostPID"):
            Client(hidden.path)
    finally:
        hidden.kill()


def test_both_sides_say_their_version(node: Process) -> None:
    with Client(node.path) as client:
        assert client.link.welcome.version == kvtide.__version__
        eventually(lambda: f"client {os.getpid()}, kvtide {kvtide.__version__}" in node.log)


# -- what is put off ----------------------------------------------------------------------------------------


def test_what_is_released_is_given_back_soon_though_nothing_else_is_asked(node: Process) -> None:
    with Client(node.path) as client, Client(node.path) as other, client.session(MODEL) as session:
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        assert client.flush(30)
        for _ in range(3):
            match = session.match(prompt(1, 2))
            assert other.statistics().held == 2
            match.release()
            eventually(lambda: other.statistics().held == 0)


def test_many_releases_at_once_are_no_message_that_is_too_large(node: Process) -> None:
    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        assert client.flush(30)
        line = client._link
        matches = [session.match(prompt(1, 2)) for _ in range(3000)]
        for match in matches:
            match.release()
        assert client.statistics().held == 0
        assert client._link is line, "the node did not hang up"


def test_a_prompt_that_was_all_there_is_not_found_when_a_part_of_it_was_dropped(node: Process) -> None:
    """It is remembered that it was all there, but not for longer than that is true."""
    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        assert [length(session, prompt(1, 2)) for _ in range(3)] == [32, 32, 32]
        session.drop(prompt(1, 2), start=1)
        assert length(session, prompt(1, 2)) == 16
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        assert length(session, prompt(1, 2)) == 32


@pytest.mark.parametrize("colder", [True, False])
def test_a_store_goes_in_parts_where_a_disk_waits_for_the_first_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, colder: bool
) -> None:
    """Else parts are messages that nobody needs."""
    monkeypatch.setattr(backend, "_FIRST_PART", 1)
    disk: dict[str, Any] = {"nvme": {"path": str(tmp_path / "disk"), "budget": "64MiB"}} if colder else {}
    node = Thread(tmp_path / "socket", dram={"budget": "64MiB"}, **disk)
    try:
        with Client(node.path) as client, client.session(MODEL) as session:
            blocks = prompt(*range(8))
            before = client.status().node.requests
            assert session.store(blocks, data(PLAIN, blocks)).stored == 8
            asked = client.status().node.requests - before - 2  # a session was opened, and this was asked
            assert asked == (5 if colder else 2)  # parts of 1, 2, 4 and 1 blocks, or one; and the end
    finally:
        node.close()


def test_numbers_of_numpy_are_numbers_and_what_is_none_costs_no_release(node: Process) -> None:
    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)), priority=np.int64(3), ttl=np.float32(60))  # type: ignore[call-overload]
        for _ in range(5):
            session.match(prompt(1, 2)).release()
            session.match(prompt(1, 2), have=np.int64(16)).release()  # type: ignore[arg-type]
            session.match(prompt(1, 2), have=10**30 * 16).release()
            with pytest.raises(LayoutError, match="blocks -1 to 2"):
                session.drop(prompt(1, 2), start=-1)
            with pytest.raises(ArgumentError, match="give a number"):
                session.match(prompt(1, 2), prefill=object())  # type: ignore[arg-type]
        eventually(lambda: client.status().node.clients[0].holdings == 0)


def test_what_computing_costs_goes_to_the_node_as_a_curve(node: Process) -> None:
    cost = kvtide.PrefillCost(0.5, 0.25)
    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(prompt(1), data(PLAIN, prompt(1)))
        with session.match(prompt(1, 2), prefill=cost) as match:
            assert match.tokens == 16
            assert match.plan.compute_seconds == pytest.approx(cost.seconds(16, 32))
        with session.match(prompt(1, 2), prefill=4.0) as match:
            assert match.plan.compute_seconds == pytest.approx(16 / 4)


def test_a_node_that_knows_no_curve_is_told_the_mean_speed(node: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    cost = kvtide.PrefillCost(0.5, 0.25)
    known = p.Match
    monkeypatch.setattr(p, "Match", lambda *fields: known(*fields[:4]))
    with (
        Client(node.path) as client,
        client.session(MODEL) as session,
        session.match(prompt(1, 2), prefill=cost) as match,
    ):
        assert match.plan.compute_seconds == pytest.approx(cost.seconds(0, 32))
