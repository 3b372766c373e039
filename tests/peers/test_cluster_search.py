"""Searches in a cluster: what a match holds can be read, and no interrupt, crowd or empty directory ends searching."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtide import Store
from kvtide.testing.interface import MODEL, held, prompt, until
from kvtide.tiers.peers.members import Member
from kvtide.tiers.peers.position import PeerPosition
from kvtide.tiers.peers.tier import PeerTier
from kvtide.transfer.node_search import NodeSearch
from tests.peers.cluster import Cluster
from tests.peers.test_cluster import found, keep, seen


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as cluster:
        yield cluster


def nodes_of(store: Store) -> NodeSearch:
    nodes = store.main.nodes
    assert nodes is not None
    return nodes


def positions_of(store: Store) -> list[PeerPosition]:
    return [place.position for place in nodes_of(store)._places]


def on_binder(store: Store, call: Callable[[], Any]) -> None:
    """Run something on the thread that binds, and wait for its end."""
    done = threading.Event()

    def run() -> None:
        try:
            call()
        finally:
            done.set()

    nodes_of(store)._calls.put(run)
    assert done.wait(30)


def other_than(store: Store, position: PeerPosition) -> Member:
    """A member that the position is not bound to."""
    return next(m for m in (nodes_of(store)._members or {}).values() if m != position.member)


@pytest.mark.parametrize("lately", [True, False])
def test_blocks_of_a_match_are_read_though_others_need_the_position(cluster: Cluster, lately: bool) -> None:
    """Also long after they were found, and until they are read."""
    parts = [cluster.part() for _ in range(6)]
    for n, part in enumerate(parts):
        keep(part, prompt(n), prompt(n, 1))
    reader = cluster.reader(peers={"most": 2})
    nodes = nodes_of(reader)
    with reader.session(MODEL) as session:
        until(lambda: found(session, prompt(0)))
        with session.match(prompt(0, 1), wait=10) as match:
            assert match.tokens == len(prompt(0, 1))
            for place in nodes._places:
                place.used -= 0 if lately else 100.0
            for n in range(1, 6):
                session.match(prompt(n), wait=10).release()
            assert session.load(match).wait(30).tokens == match.tokens
        for n in range(1, 6):  # then it may be taken
            until(lambda n=n: found(session, prompt(n, 1)))  # type: ignore[misc]
    assert held(reader) == 0


def test_blocks_that_were_found_are_there_when_the_caller_asks_again(cluster: Cluster) -> None:
    """Nobody holds them between the answer and that."""
    for _ in range(2):
        keep(cluster.part(), prompt(1), prompt(2))
    reader = cluster.reader(peers={"most": 1})
    nodes = nodes_of(reader)
    with reader.session(MODEL) as session:
        until(lambda: found(session, prompt(1)))
        session.match(prompt(2), wait=10).release()
        (place,) = nodes._places
        bound = place.position.member
        on_binder(reader, lambda: nodes._bind_one(other_than(reader, place.position), set()))
        assert place.position.member == bound
        place.used -= 100.0
        on_binder(reader, lambda: nodes._bind_one(other_than(reader, place.position), set()))
        assert place.position.member != bound


def test_nothing_is_entered_for_a_node_that_was_just_replaced(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is found is entered before the node is replaced, and then forgotten; or not at all."""
    for n in range(2):
        keep(cluster.part(), prompt(n, 1), prompt(n, 2))
    reader = cluster.reader(peers={"most": 1})
    nodes = nodes_of(reader)
    with reader.session(MODEL) as session:
        until(lambda: found(session, prompt(0, 1)))
        (place,) = nodes._places
        real, waited = reader.main.pending_blocks.enter, threading.Event()

        def enter(cold: Any, here: Any) -> None:
            def take() -> None:
                if (new := other_than(reader, place.position)) and (free := nodes._free_place(set())) is not None:
                    nodes._bind(free, new)
                waited.set()

            nodes._calls.put(take)
            assert not waited.wait(0.3), "the node was replaced while an answer of it was entered"
            real(cold, here)

        monkeypatch.setattr(reader.main.pending_blocks, "enter", enter)
        with session.match(prompt(0, 2), wait=10) as match:
            monkeypatch.undo()
            assert match.tokens == len(prompt(0, 2))
            assert session.load(match).wait(30).tokens == match.tokens
        assert waited.wait(30)


@pytest.mark.parametrize("verb", ["find", "read"])
def test_an_interrupt_in_a_request_keeps_nothing_open(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    keep(cluster.part(), prompt(1))
    reader = cluster.reader()
    with reader.session(MODEL) as session:
        until(lambda: found(session, prompt(1)))
    (position,) = [position for position in positions_of(reader) if position.member is not None]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PeerTier, verb, interrupted)
        with pytest.raises(KeyboardInterrupt):
            getattr(position, verb)([], lambda _: None)
    assert not position.busy


def test_closing_does_not_wait_for_a_request_that_never_ends(cluster: Cluster) -> None:
    keep(cluster.part(), prompt(1))
    reader = cluster.reader()
    with reader.session(MODEL) as session:
        until(lambda: found(session, prompt(1)))
    (position,) = [position for position in positions_of(reader) if position.member is not None]
    assert position._begin(object()) is not None
    on_binder(reader, lambda: position.bind(None))
    closer = threading.Thread(target=reader.close, daemon=True)
    closer.start()
    closer.join(60)
    assert not closer.is_alive()


def test_an_interrupt_does_not_end_the_list_of_members(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(cluster.part(), prompt(1))
    reader = cluster.reader()
    nodes = nodes_of(reader)
    with reader.session(MODEL) as session:
        until(lambda: found(session, prompt(1)))
        hit = []
        for name in ("_calls", "_jobs"):
            queue = getattr(nodes, name)
            method = "put" if name == "_calls" else "submit"
            real = getattr(queue, method)

            def once(*args: Any, real: Callable[..., None] = real, name: str = name) -> None:
                if name not in hit and threading.current_thread() is threading.main_thread():
                    hit.append(name)
                    raise KeyboardInterrupt
                real(*args)

            monkeypatch.setattr(queue, method, once)
        nodes._due = 0.0
        with pytest.raises(KeyboardInterrupt):
            nodes._keep_fresh()
        monkeypatch.undo()
        keep(cluster.part(), prompt(2))
        until(lambda: found(session, prompt(2)))


@pytest.mark.parametrize("count", [2, 6])
def test_an_empty_directory_takes_away_no_node_that_answers(tmp_path: Path, count: int) -> None:
    with Cluster(tmp_path, lease=60.0) as cluster:
        parts = [cluster.part(lease=60.0) for _ in range(count)]
        for n, part in enumerate(parts):
            keep(part, prompt(n), prompt(n, 1))
        reader = cluster.reader()
        nodes = nodes_of(reader)
        with reader.session(MODEL) as session:
            for n in range(count):
                until(lambda n=n: found(session, prompt(n)))  # type: ignore[misc]
            cluster.valkey.kill()
            cluster.valkey.start()
            for part in parts:  # they have not noticed yet
                assert part.node.statistics().epoch
            nodes._fetch_members(nodes._directory)
            on_binder(reader, nodes._rebind)
            assert len(seen(reader).members) == count
            for n in range(count):
                until(lambda n=n: found(session, prompt(n, 1)))  # type: ignore[misc]
            nodes._listed = dict.fromkeys(nodes._listed, -100.0)  # a lease later
            nodes._fetch_members(nodes._directory)
            assert not seen(reader).members


def test_a_node_that_joined_again_keeps_its_position(cluster: Cluster) -> None:
    keep(cluster.part(), prompt(1), prompt(2))
    reader = cluster.reader()
    nodes = nodes_of(reader)
    with reader.session(MODEL) as session:
        until(lambda: found(session, prompt(1)))
        (position,) = [position for position in positions_of(reader) if position.member is not None]
        tier, old = position._tier, position.member
        assert old is not None
        with session.match(prompt(2), wait=10) as match:
            nodes._members = {old.number: old._replace(epoch=old.epoch + 1)}
            on_binder(reader, nodes._rebind)
            assert position._tier is tier
            assert position.member == old._replace(epoch=old.epoch + 1)
            assert session.load(match).wait(30).tokens == len(prompt(2))


def test_a_crowd_of_prompts_is_no_failure_of_the_directory(cluster: Cluster) -> None:
    """They wait together, and are asked together."""
    parts = [cluster.part() for _ in range(6)]
    keep(parts[0], prompt(1))
    reader = cluster.reader()
    nodes = nodes_of(reader)
    with reader.session(MODEL) as session:
        until(lambda: found(session, prompt(1)))
        before, asking, go_on = seen(reader), threading.Event(), threading.Event()
        real = nodes._directory.holders

        def holders(keys: Any) -> Any:
            asking.set()
            assert go_on.wait(30)
            return real(keys)

        nodes._directory.holders = holders  # type: ignore[method-assign]
        session.match(prompt(99), wait=0).release()
        assert asking.wait(30)
        for n in range(50):
            session.match(prompt(100 + n), wait=0).release()
        go_on.set()
        until(lambda: not reader.main.pending_blocks._under_way)
        after = seen(reader)
        assert (after.failures, after.away) == (before.failures, False)
        assert after.lookups - before.lookups <= 3, "not one for each"


def test_what_was_not_asked_in_time_says_nothing_about_the_directory(cluster: Cluster) -> None:
    keep(cluster.part(), prompt(1))
    reader = cluster.reader()
    nodes = nodes_of(reader)
    with reader.session(MODEL) as session:
        until(lambda: found(session, prompt(1)))
        nodes._late("holders", 1)
        assert not seen(reader).away


def test_a_search_does_not_wait_for_ever_for_a_position(cluster: Cluster) -> None:
    """The thread that binds is busy with others: then the blocks are not found."""
    parts = [cluster.part() for _ in range(6)]
    for n, part in enumerate(parts):
        keep(part, prompt(n), prompt(n, 1))
    reader = cluster.reader(peers={"most": 1})
    nodes = nodes_of(reader)
    with reader.session(MODEL) as session:
        until(lambda: found(session, prompt(0)))
        busy, go_on = threading.Event(), threading.Event()

        def wait() -> None:
            busy.set()
            go_on.wait(30)

        nodes._calls.put(wait)
        assert busy.wait(30)
        for n in range(1, 6):
            session.match(prompt(n, 1), wait=0).release()
        bound = seen(reader).bound
        until(lambda: nodes._calls._queue.qsize() >= 5)
        nodes._clock = _Later(nodes._clock)
        go_on.set()
        until(lambda: not reader.main.pending_blocks._under_way)
        assert seen(reader).bound == bound, "it was too late for all of them"


class _Later:
    """A clock that is ten seconds ahead."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock

    def monotonic(self) -> float:
        return float(self._clock.monotonic()) + 10

    def time(self) -> float:
        return float(self._clock.time())


def test_counters_of_a_position_never_go_back(cluster: Cluster) -> None:
    for _ in range(2):
        keep(cluster.part(), prompt(1, 2, 3))
    reader = cluster.reader(peers={"most": 1})
    with reader.session(MODEL) as session:
        until(lambda: found(session, prompt(1, 2, 3)))
    (position,) = positions_of(reader)
    before = position.statistics().bytes_read
    assert before
    request = object()
    position._begin(request)  # so that the earlier tier stays open
    on_binder(reader, lambda: position.bind(None))
    assert position.statistics().bytes_read == before
    position._ended(request)
    until(lambda: not position._ending)
    assert position.statistics().bytes_read == before
    position.close()
    assert position.statistics().bytes_read == before
