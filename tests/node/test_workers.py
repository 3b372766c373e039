"""Engines of several processes: workers read and write what their scheduler's session holds."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtide.block import Group, Kind, Layout
from kvtide.errors import RightError, TierError
from kvtide.index.keys import Model
from kvtide.node.client.client import Client
from kvtide.node.client.workers import Worker, WorkerGroup
from kvtide.store.session import Session
from tests.node.serving import Process, eventually

LAYOUT = Layout.attention(layers=3, heads=4, head_dim=8, block_tokens=16)
MODEL = Model(LAYOUT, "given:worker_group")
TOKENS = np.arange(4 * 16, dtype=np.uint32)
OTHERS = TOKENS + 100_000


def content(layout: Layout, group: str, depth: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """A block without padding, a row for each section."""
    geometry = layout.geometry[group]
    seed = np.random.default_rng([depth, *group.encode()])
    return seed.integers(0, 256, (geometry.sections, geometry.section), np.uint8)


@contextlib.contextmanager
def engine(node: Process, layout: Layout, ranks: int) -> Iterator[tuple[Session, WorkerGroup, list[Worker]]]:
    """A scheduler and its workers, each with a connection of its own."""
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(Client(node.path))
        session = stack.enter_context(client.session(Model(layout, "given:worker_group")))
        worker_group = client.worker_group(session, ranks)
        workers = [
            stack.enter_context(stack.enter_context(Client(node.path)).join(worker_group.token, rank))
            for rank in range(ranks)
        ]
        yield session, worker_group, workers


def fill(worker: Worker, ticket: str) -> None:
    """Write this worker's heads of all blocks."""
    with worker.step(stores=[ticket]) as step:
        (filling,) = step.stores
        assert filling is not None
        for group, depth, view in zip(filling.groups, filling.depths, filling.views, strict=True):
            if worker.writes(group):
                share = worker.layout.group(group).share(worker.rank, worker.ranks)
                size = worker.layout.group(group).head_bytes(worker.layout.block_tokens)
                part = content(worker.layout, group, depth)[:, share.start * size : share.stop * size]
                worker.part(group, view)[:] = part


def whole(session: Session, tokens: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> bool:
    """Whether all of a prompt is there, right in every byte."""
    layout = session.layout
    with session.match(tokens) as match:
        loaded = session.load(match).wait()
        for group, views in loaded.views.items():
            geometry = layout.geometry[group]
            for depth, view in enumerate(views, loaded.first[group]):
                rows = np.frombuffer(view, np.uint8).reshape(geometry.sections, geometry.stride)
                assert (rows[:, : geometry.section] == content(layout, group, depth)).all(), (group, depth)
        return loaded.tokens == len(tokens)


MIXED = Layout(
    (
        Group("full", Kind.FULL, 2, 4, 8, "bfloat16"),
        Group("latent", Kind.MLA, 2, 1, 24, "bfloat16"),
        Group("state", Kind.STATE, 1, 4, 64, "float32"),
    ),
    16,
)


@pytest.mark.parametrize(("layout", "ranks"), [(LAYOUT, 1), (LAYOUT, 2), (LAYOUT, 4), (LAYOUT, 8), (MIXED, 2)])
def test_each_worker_writes_and_reads_its_heads(node: Process, layout: Layout, ranks: int) -> None:
    with engine(node, layout, ranks) as (session, worker_group, workers):
        while (given := worker_group.delegate(TOKENS)).again:
            given.abort()  # the node is just taking memory
        assert len(given.keys) == 4 * len(layout.groups)
        writers = [w for w in workers if any(w.writes(g.name) for g in layout.groups)]
        for worker in writers:
            with session.match(TOKENS) as match:
                assert match.tokens == 0, "not before each has written"
                assert match.pending
            fill(worker, given.ticket)
        assert whole(session, TOKENS)
        assert worker_group.delegate(TOKENS).ticket == "", "nothing is left to write"
        with session.match(TOKENS) as match:
            assert match.ready
            ticket = worker_group.ticket(match)
            for worker in workers:
                with worker.step(loads=[ticket]) as step:
                    (loaded,) = step.loads
                    assert loaded is not None
                    assert loaded.tokens == len(TOKENS)
                    for group, views in loaded.views.items():
                        share = layout.group(group).share(worker.rank, ranks)
                        size = layout.group(group).head_bytes(layout.block_tokens)
                        for depth, view in enumerate(views, loaded.first[group]):
                            expected = content(layout, group, depth)[:, share.start * size : share.stop * size]
                            assert (worker.part(group, view) == expected).all()


def test_what_a_worker_reads_stays_though_its_scheduler_lets_go(node: Process) -> None:
    with engine(node, LAYOUT, 1) as (session, worker_group, (worker,)), Client(node.path) as client:
        fill(worker, worker_group.delegate(TOKENS).ticket)
        match = session.match(TOKENS)
        ticket = worker_group.ticket(match)
        with worker.step(loads=[ticket]) as step:
            match.release()
            assert client.statistics().held == 4
            (loaded,) = step.loads
            assert loaded is not None
            flood(client)
            for depth, view in enumerate(loaded.blocks):
                assert (worker.part("full", view) == content(LAYOUT, "full", depth)).all()
        eventually(lambda: client.statistics().held == 0)
        with worker.step(loads=[ticket]) as step:
            assert step.loads == [None], "it was released"
        with pytest.raises(RightError, match="released"):
            worker_group.ticket(match)


def test_what_a_worker_reads_stays_on_the_account_of_who_closed_its_session(tmp_path: Path) -> None:
    node = Process(tmp_path, KVTIDE_NODE_CLIENT_SHARE="0.01")
    try:
        with Client(node.path) as client, Client(node.path) as other:
            session = client.session(MODEL)
            worker_group = client.worker_group(session, 1)
            worker = other.join(worker_group.token, 0)
            others = TOKENS + np.uint32(1000)
            for tokens in (TOKENS, others):
                fill(worker, worker_group.delegate(tokens).ticket)
            with worker.step(loads=[worker_group.ticket(session.match(TOKENS))]):
                session.close()
                with client.session(MODEL) as again, again.match(others) as match:
                    assert match.blocks == 2, "a hundredth of 16 MiB is six blocks, of which it holds four"
                    with again.match(TOKENS) as same:
                        assert same.blocks == 4, "which it holds already"
            with client.session(MODEL) as again:
                assert whole(again, TOKENS)
    finally:
        node.kill()


def flood(client: Client) -> None:
    """Store so much that everything which may leave DRAM does."""
    with client.session(Model(LAYOUT, "given:flood")) as session:
        block = np.zeros(LAYOUT.geometry["full"].nbytes, np.uint8)
        for i in range(20):
            session.store(np.arange(i * 4096, i * 4096 + 4096, dtype=np.uint32), [block] * 256)


def test_one_that_fails_spoils_it_for_all(node: Process) -> None:
    with engine(node, LAYOUT, 2) as (session, worker_group, (first, second)):
        given = worker_group.delegate(TOKENS)
        fill(first, given.ticket)
        with contextlib.suppress(RuntimeError), second.step(stores=[given.ticket]):
            raise RuntimeError("the GPU has gone away")
        assert not whole(session, TOKENS)
        again = worker_group.delegate(TOKENS)
        assert len(again.keys) == 4, "the slots are free again"
        for worker in (first, second):
            fill(worker, again.ticket)
        assert whole(session, TOKENS)


@pytest.mark.parametrize("how", ["resigns", "hangs up", "dies"])
def test_one_that_has_written_its_part_may_go(node: Process, how: str) -> None:
    with engine(node, LAYOUT, 2) as (session, worker_group, (first, second)):
        given = worker_group.delegate(TOKENS)
        if how == "dies":
            client_of(first).close()
            eventually(
                lambda: worker_group.delegate(TOKENS).keys
            )  # the node has heard of it, and ended what waits for it
            given = worker_group.delegate(OTHERS)
            script = WORKER.replace('print("ready"', 'step.__exit__(None, None, None); print("ready"')
            command = [sys.executable, "-c", script, str(node.path), worker_group.token, "0", given.ticket]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                process.kill()
            with Client(node.path) as watching:
                eventually(lambda: all(c.pid != process.pid for c in watching.status().node.clients))
            fill(second, given.ticket)
            with session.match(OTHERS) as match:
                assert match.tokens == len(OTHERS)
            return
        fill(first, given.ticket)
        if how == "resigns":
            first.close()
        else:
            client_of(first).close()
        with session.match(TOKENS) as match:
            assert match.pending, "the other's part is still to come"
        fill(second, given.ticket)
        assert whole(session, TOKENS)


def test_one_that_goes_ends_what_it_was_still_to_write_and_nothing_else(node: Process) -> None:
    with engine(node, LAYOUT, 2) as (session, worker_group, (first, second)):
        written, open_ = worker_group.delegate(TOKENS), worker_group.delegate(OTHERS)
        fill(first, written.ticket)
        first.close()
        with second.step(stores=[open_.ticket]) as step:
            assert step.stores == [None], "it was given up"
        fill(second, written.ticket)
        assert whole(session, TOKENS)
        assert len(worker_group.delegate(OTHERS).keys) == 4, "its slots are free again"


def test_one_that_goes_in_the_midst_of_its_writing_ends_it(node: Process) -> None:
    with engine(node, LAYOUT, 2) as (session, worker_group, (first, second)):
        given = worker_group.delegate(TOKENS)
        fill(first, given.ticket)
        again = first.step(stores=[given.ticket])
        first.close()
        with contextlib.suppress(RightError):  # it is no worker any more
            again.__exit__(None, None, None)
        with second.step(stores=[given.ticket]) as step:
            assert step.stores == [None]
        assert not whole(session, TOKENS)


WORKER = """
import sys
from pathlib import Path
from kvtide.node.client.client import Client
worker = Client(Path(sys.argv[1])).join(sys.argv[2], int(sys.argv[3]))
step = worker.step(stores=[sys.argv[4]])
filling, = step.stores
for group, view in zip(filling.groups, filling.views):
    worker.part(group, view)[: 2] = 7
print("ready", flush=True)
while sys.stdin.readline():
    for group, view in zip(filling.groups, filling.views):
        worker.part(group, view)[:] = 9
    print("written", flush=True)
"""


@contextlib.contextmanager
def half_written(node: Process, worker_group: WorkerGroup, ticket: str) -> Iterator[subprocess.Popen[str]]:
    """The second worker, in a process of its own, in the middle of its slices."""
    command = [sys.executable, "-c", WORKER, str(node.path), worker_group.token, "1", ticket]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_a_worker_that_dies_half_way(node: Process) -> None:
    with Client(node.path) as client, client.session(MODEL) as session:
        worker_group = client.worker_group(session, 2)
        with Client(node.path).join(worker_group.token, 0) as worker:
            given = worker_group.delegate(TOKENS)
            with half_written(node, worker_group, given.ticket) as process:
                fill(worker, given.ticket)
                process.kill()
                process.wait()
                again = eventually(lambda: worker_group.delegate(TOKENS))
                while len(again.keys) < 4:  # the node has not heard of it yet
                    again = eventually(lambda: worker_group.delegate(TOKENS))
                assert again.ticket != given.ticket
                with worker.step(stores=[given.ticket]) as step:
                    assert step.stores == [None], "that is over"


def test_a_stopped_worker_keeps_its_slots_from_others(node: Process) -> None:
    """It may write when it goes on: nobody must be there then."""
    with Client(node.path) as client, client.session(MODEL) as session:
        worker_group = client.worker_group(session, 2)
        given = worker_group.delegate(TOKENS)
        with half_written(node, worker_group, given.ticket) as process:
            process.send_signal(signal.SIGSTOP)
            given.abort()
            assert client.statistics().held == 4, "in quarantine"
            block = np.full(LAYOUT.geometry["full"].nbytes, 1, np.uint8)
            other = client.session(Model(LAYOUT, "given:other"))
            many = np.arange(20 * 4096, dtype=np.uint32)
            stored = other.store(many, [block] * (len(many) // 16)).stored
            assert stored
            process.send_signal(signal.SIGCONT)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("go on\n")
            process.stdin.flush()
            assert process.stdout.readline() == "written\n"
            with other.match(many) as match:
                for view in other.load(match).wait().blocks:
                    assert view[0] == 1, "nobody else's block was written over"
            other.close()
        eventually(lambda: client.statistics().held == 0)


def test_a_worker_group_ends_with_its_scheduler(node: Process) -> None:
    with Client(node.path) as client, Client(node.path) as other:
        session = client.session(MODEL)
        worker_group = client.worker_group(session, 1)
        worker = other.join(worker_group.token, 0)
        given = worker_group.delegate(TOKENS)
        step = worker.step(stores=[given.ticket])
        session.close()
        assert other.statistics().held == 4, "the worker still has its slots"
        with step:
            pass
        assert other.statistics().held == 0
        assert other.statistics().counts.get("blocks stored", 0) == 0
        with pytest.raises(RightError, match="no session has this token"):
            other.join(worker_group.token, 0)


def test_strangers_and_doubles_are_refused(node: Process) -> None:
    with engine(node, LAYOUT, 2) as (session, worker_group, workers), Client(node.path) as client:
        with pytest.raises(RightError, match="has joined already"):
            client.join(worker_group.token, 1)
        with pytest.raises(RightError, match="not one of this session's 2"):
            client.join(worker_group.token, 2)
        with pytest.raises(RightError, match="no session has this token"):
            client.join("guess" * 8, 0)
        with pytest.raises(RightError, match="is no ticket"):
            workers[0].step(loads=["rubbish"])
        workers[1].close()
        assert client.join(worker_group.token, 1).ranks == 2
        assert whole(session, TOKENS) is False


def test_a_worker_group_continues_at_the_next_node(node: Process) -> None:
    with engine(node, LAYOUT, 1) as (session, worker_group, (worker,)):
        old = worker_group.delegate(TOKENS)
        node.kill()
        with worker.step(stores=[old.ticket]) as step:
            assert step.stores == [None]
        assert worker_group.delegate(TOKENS).refused == 4
        node.start()
        given = eventually(lambda: next((g for g in [worker_group.delegate(TOKENS)] if g.ticket), None))
        assert given is not None
        eventually(lambda: client_of(worker).connected)
        with worker.step(stores=[old.ticket]) as step:
            assert step.stores == [None], "its number may mean something else now"
        fill(worker, given.ticket)
        assert whole(session, TOKENS)
    node.kill()
    with pytest.raises(TierError, match="no node answers"):
        Client(node.path)


def reconnected(client: Client) -> None:
    """A line breaks, though the node lives, and there is another."""
    line = client.link
    line.close()
    eventually(lambda: client._link is not line and client.connected)


def test_a_ticket_of_a_line_that_broke_never_means_another_prompt(node: Process) -> None:
    with engine(node, LAYOUT, 1) as (session, worker_group, (worker,)):
        old = worker_group.delegate(TOKENS)
        reconnected(session._session_host)  # type: ignore[arg-type]
        other = TOKENS + 1000
        given = eventually(lambda: next((g for g in [worker_group.delegate(other)] if g.ticket), None))
        assert given is not None
        assert given.ticket != old.ticket
        with worker.step(stores=[old.ticket]) as step:
            assert step.stores == [None]
        with session.match(other) as match:
            assert match.tokens == 0, "nobody has written it"
        fill(worker, given.ticket)
        assert whole(session, other)


def test_a_worker_group_continues_when_its_schedulers_connection_breaks(node: Process) -> None:
    """Though it holds a match over the line that broke, and its workers' lines did not."""
    with engine(node, LAYOUT, 2) as (session, worker_group, workers):
        given = worker_group.delegate(TOKENS)
        for worker in workers:
            fill(worker, given.ticket)
        with session.match(TOKENS) as held:
            views = session.load(held).wait().blocks
            reconnected(session._session_host)  # type: ignore[arg-type]
            assert whole(session, TOKENS)
            other = TOKENS + 1000
            again = eventually(lambda: next((g for g in [worker_group.delegate(other)] if g.ticket), None))
            assert again is not None
            for worker in workers:
                fill(worker, again.ticket)
            assert whole(session, other)
            assert len(views) == 4


def test_a_worker_may_use_one_right_twice_at_a_time(node: Process) -> None:
    with engine(node, LAYOUT, 1) as (session, worker_group, (worker,)), Client(node.path) as client:
        given = worker_group.delegate(TOKENS)
        first, second = worker.step(stores=[given.ticket]), worker.step(stores=[given.ticket])
        with second:
            with first:
                pass
            with session.match(TOKENS) as match:
                assert match.tokens == 0, "it is still being written"
            (filling,) = second.stores
            assert filling is not None
            for group, depth, view in zip(filling.groups, filling.depths, filling.views, strict=True):
                worker.part(group, view)[:] = content(LAYOUT, group, depth)
        assert whole(session, TOKENS)
        match = session.match(TOKENS)
        ticket = worker_group.ticket(match)
        one, two = worker.step(loads=[ticket]), worker.step(loads=[ticket])
        with two:
            with one:
                pass
            match.release()
            flood(client)
            (loaded,) = two.loads
            assert loaded is not None
            for depth, view in enumerate(loaded.blocks):
                assert (worker.part("full", view) == content(LAYOUT, "full", depth)).all()
        eventually(lambda: client.statistics().held == 0)


def test_a_scheduler_does_not_map_what_its_workers_read(node: Process) -> None:
    """Mapping gigabytes takes tens of milliseconds, in the request that is the first to find them."""
    with Client(node.path) as client, client.session(MODEL) as session, Client(node.path) as other:
        worker_group = client.worker_group(session, 1)
        with other.join(worker_group.token, 0) as worker:
            while (given := worker_group.delegate(TOKENS)).again:
                given.abort()
            fill(worker, given.ticket)
            with session.match(TOKENS) as match:
                assert match.ready
                assert match.held_tokens == len(TOKENS)
                with worker.step(loads=[worker_group.ticket(match)]) as step:
                    assert [loaded and loaded.tokens for loaded in step.loads] == [len(TOKENS)]
                assert _mapped(client) == 0
                assert _mapped(other) == 1
            assert whole(session, TOKENS), "it may still look at the bytes itself"
            assert _mapped(client) == 1


def client_of(worker: Worker) -> Client:
    assert isinstance(worker._client, Client)
    return worker._client


def _mapped(client: Client) -> int:
    """Segments of the node that a client has in its memory."""
    return len(client.link.lent)
