"""Several users at one node: each trust domain has its own blocks, in memory of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvtide
from kvtide.errors import ConfigError, LayoutError, RightError, TierError
from kvtide.events import BlockStored, Event
from kvtide.node.client import Client
from kvtide.node.trust import Trust, Trusted
from kvtide.testing.interface import MODEL, PLAIN, check, data, length, prompt
from tests.node import host
from tests.node.serving import Process, eventually

root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become other users")

BLUE, READER, GREEN, STRANGER = 60001, 60002, 60003, 60004


@pytest.fixture
def node() -> Iterator[Process]:
    folder = Path(tempfile.mkdtemp(prefix="kvtide-trust-"))
    folder.chmod(0o755)
    process = Process(folder, KVTIDE_NODE_USERS=f"{BLUE}:blue {READER}:blue:read {GREEN}:green")
    yield process
    process.kill()
    shutil.rmtree(folder)


def as_user(user: int, work: Callable[[], None]) -> None:
    """Do something in a process of another user."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgid(user)
            os.setuid(user)
            work()
            status = 0
        except BaseException:  # noqa: BLE001 - it must not go on in here
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@root
def test_each_domain_has_blocks_of_its_own(node: Process) -> None:
    def store() -> None:
        with Client(node.path) as client, client.session(MODEL) as session:
            assert length(session, prompt(1)) == 0, "what others have is not there"
            assert session.store(prompt(1, 2), data(PLAIN, prompt(1, 2))).stored == 2
            assert length(session, prompt(1, 2)) == 32
            with session.match(prompt(1, 2)) as match:
                check(PLAIN, session.load(match).wait(), prompt(1, 2))
            assert client.flush(30)

    def see() -> None:
        with Client(node.path) as client, client.session(MODEL) as session:
            assert length(session, prompt(1, 2)) == 32, "its own domain's, from its disk"
            with session.match(prompt(1, 2)) as match:
                check(PLAIN, session.load(match).wait(), prompt(1, 2))
            assert session.drop(prompt(2)) == 0
            assert session.drop(prompt(1, 2)) == 2

    def miss() -> None:
        with Client(node.path) as client, client.session(MODEL) as session:
            assert length(session, prompt(1, 2)) == 0

    store()  # as root, in the node's own domain
    as_user(BLUE, store)
    as_user(GREEN, store)
    node.kill()
    node.start()
    as_user(BLUE, see)
    as_user(BLUE, miss)
    as_user(GREEN, see)
    see()


@root
def test_no_descriptor_leaves_its_domain(node: Process) -> None:
    """Not even when memory changes hands: both fill DRAM in turns, and no segment is seen by both."""
    seen = tempfile.NamedTemporaryFile("w+", prefix="kvtide-inodes-")  # noqa: SIM115 - closed below
    Path(seen.name).chmod(0o666)

    def flood() -> None:
        with Client(node.path) as client, client.session(MODEL) as session:
            for first in range(0, 4000, 500):
                tokens = prompt(*range(first, first + 500))
                session.store(tokens, [bytes(PLAIN.geometry["full"].nbytes)] * 500)
            with Path(seen.name).open("a") as file:
                for inode in host.memory([os.getpid()]):
                    file.write(f"{os.getuid()} {inode}\n")

    for user in (BLUE, GREEN, BLUE, GREEN):
        as_user(user, flood)
    pairs = {tuple(line.split()) for line in Path(seen.name).read_text().splitlines()}
    blue, green = ({inode for who, inode in pairs if who == str(user)} for user in (BLUE, GREEN))
    seen.close()
    assert blue
    assert green
    assert not blue & green


@root
def test_who_may_only_read_cannot_write(node: Process) -> None:
    def store() -> None:
        with Client(node.path) as client, client.session(MODEL) as session:
            session.store(prompt(1), data(PLAIN, prompt(1)))

    def read() -> None:
        with Client(node.path) as client, client.session(MODEL) as session:
            with session.match(prompt(1)) as match:
                loaded = session.load(match).wait()
                check(PLAIN, loaded, prompt(1))
            maps = Path("/proc/self/maps").read_text().splitlines()
            assert {line.split()[1] for line in maps if "memfd:kvtide" in line} == {"r--s"}
            assert session.store(prompt(2), data(PLAIN, prompt(2))).dropped == 1
            with pytest.raises(RightError, match="may only read"):
                session.drop(prompt(1))
            with pytest.raises(RightError, match="may only read"):
                session.pin(prompt(1))
            with pytest.raises(RightError):
                client.crew(session, 1)

    as_user(BLUE, store)
    as_user(READER, read)


@root
def test_a_stranger_is_sent_away(node: Process) -> None:
    def knock() -> None:
        with pytest.raises((TierError, OSError)):
            Client(node.path)

    as_user(STRANGER, knock)
    eventually(lambda: f"user {STRANGER} is not ours" in node.log)


@root
def test_events_stay_in_their_domain(node: Process) -> None:
    heard: list[Event] = []

    def store() -> None:
        with Client(node.path) as client, client.session(MODEL) as session:
            mine: list[Event] = []
            client.follow(mine.append)
            session.store(prompt(1), data(PLAIN, prompt(1)))
            keys = tuple(session.chain(prompt(1)).keys(b"full"))
            eventually(lambda: BlockStored("dram", keys) in mine)

    with Client(node.path) as client, client.session(MODEL) as session:
        client.follow(heard.append)
        as_user(BLUE, store)
        session.store(prompt(2), data(PLAIN, prompt(2)))
        keys = tuple(session.chain(prompt(2)).keys(b"full"))
        eventually(lambda: BlockStored("dram", keys) in heard)
        assert all(k in keys for e in heard if isinstance(e, BlockStored) for k in e.keys)


@root
def test_statistics_tell_of_the_clients_of_ones_own_domain(node: Process) -> None:
    def look() -> None:
        with Client(node.path) as client:
            found = client.status().node
            assert [c.pid for c in found.clients] == [os.getpid()]
            assert found.requests == 1

    with Client(node.path) as client:
        for _ in range(10):
            client.statistics()
        as_user(BLUE, look)
        as_user(GREEN, look)
        eventually(lambda: len(client.status().node.clients) == 1)
        assert client.status().node.requests > 12, "whose node it is is told of all"


def test_users_are_read_with_care() -> None:
    trusted = Trusted("60001:blue, 60002:blue:read 60003:green")
    assert trusted.of(60001) == Trust(1, b"\0blue")
    assert trusted.of(60002) == Trust(1, b"\0blue", stores=False)
    assert trusted.of(60003) == Trust(2, b"\0green")
    assert trusted.of(60004) is None
    assert trusted.of(os.getuid()) == trusted.of(0) == Trust()
    assert not Trusted("")
    for wrong in ("60001", "60001:engineering", "me:blue", "60001:blue:write", "60001:blue 60001:green", "0:blue"):
        with pytest.raises(ConfigError, match=r"node\.users"):
            Trusted(wrong)


@root
def test_names_that_records_have_no_room_for_are_refused(node: Process) -> None:
    """Cut short, they would be another domain's."""
    long = kvtide.Layout((kvtide.Group("sliding_window_0", kvtide.Kind.FULL, 1, 1, 8, "bfloat16"),))

    def ask() -> None:
        with (
            Client(node.path) as client,
            client.session(kvtide.Model(long, "given:long")) as session,
            pytest.raises(LayoutError, match="at most 11 letters in this trust domain"),
        ):
            session.match(list(range(256)))

    as_user(BLUE, ask)
    with Client(node.path) as client, client.session(kvtide.Model(long, "given:long")) as session:
        assert session.match(list(range(256))).tokens == 0
