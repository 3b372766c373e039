"""Several users at one node: each has its role, and each trust domain its own blocks, in memory of its own."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import fcntl
import json
import mmap
import os
import pwd
import shutil
import signal
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvtide
from kvtide.errors import AccessError, ConfigError, LayoutError
from kvtide.events import BlockStored, Event
from kvtide.index.keys import DEFAULT_TENANT, Tenant
from kvtide.node import protocol as p
from kvtide.node.client.client import Client
from kvtide.node.roles import Role
from kvtide.node.server.access import Access, AccessList
from kvtide.security.audit import verify
from kvtide.testing.interface import MODEL, PLAIN, check, data, length, prompt
from tests.node import host
from tests.node.raw import answer, dialled, greet, packed
from tests.node.serving import Process, Served, eventually

root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become other users")

BLUE, READER, GREEN, STRANGER = 60001, 60002, 60003, 60004
OPERATORS, VISITORS = 61001, 61002


@pytest.fixture
def node() -> Iterator[Process]:
    folder = Path(tempfile.mkdtemp(prefix="kvtide-trust-"))
    folder.chmod(0o755)
    process = Process(
        folder,
        KVTIDE_NODE_USERS=f"{BLUE}:blue {READER}:blue:read {GREEN}:green @{OPERATORS}::admin @{VISITORS}::read",
        KVTIDE_SECURITY_AUDIT=str(folder / "audit.jsonl"),
    )
    yield process
    process.kill()
    shutil.rmtree(folder)


def as_user(user: int, work: Callable[[], None], *groups: int) -> None:
    """Do something in a process of another user, who is in these groups too."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups(groups)
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
            with pytest.raises(AccessError, match=f"drop needs the role write, and user {READER} has read"):
                session.drop(prompt(1))
            with pytest.raises(AccessError, match="pin needs the role write"):
                session.pin(prompt(1))

    as_user(BLUE, store)
    as_user(READER, read)


@root
def test_an_engine_of_several_processes_may_only_read_too(node: Process) -> None:
    def store() -> None:
        with Client(node.path) as client, client.session(MODEL) as session:
            session.store(prompt(1), data(PLAIN, prompt(1)))

    def read() -> None:
        with Client(node.path) as client, client.session(MODEL) as session:
            group = client.worker_group(session, 1)
            with client.join(group.token, 0) as worker, session.match(prompt(1)) as match:
                with worker.step(loads=[group.ticket(match)]) as step:
                    (loaded,) = step.loads
                    assert loaded is not None
                    check(PLAIN, loaded, prompt(1))
                assert group.delegate(prompt(2)).ticket == "", "there is nothing to fill"

    as_user(BLUE, store)
    as_user(READER, read)


def lent(path: Path) -> int:
    """A descriptor as the node hands it out: that of the memory of prompt(1)."""
    name = b"".join(MODEL.namer(DEFAULT_TENANT).chain(prompt(1)).digests)
    groups = [list(msgspec.structs.astuple(g)) for g in p.describe(PLAIN)]
    with dialled(path) as sock:
        greet(sock)
        assert answer(sock)[0] == "welcome"
        opening = ["open", groups, PLAIN.block_tokens, MODEL.namespace(DEFAULT_TENANT), DEFAULT_TENANT.tag]
        sock.sendall(packed([1, [opening]]))
        (session,) = answer(sock)[1]
        sock.sendall(packed([2, [["match", session, name, 0]]]))
        _, fds, _, _ = socket.recv_fds(sock, 1 << 16, 4)
        assert len(fds) == 1
        return fds[0]


@root
def test_memory_that_was_lent_to_read_cannot_be_written_by_any_means(node: Process) -> None:
    def store() -> None:
        with Client(node.path) as client, client.session(MODEL) as session:
            session.store(prompt(1), data(PLAIN, prompt(1)))

    def attack() -> None:
        fd = lent(node.path)
        size = os.fstat(fd).st_size
        with pytest.raises(PermissionError):
            mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        with pytest.raises(PermissionError):
            os.fchmod(fd, 0o666)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        for attempt in (lambda: os.pwrite(fd, b"x", 0), lambda: os.posix_fallocate(fd, 0, size)):
            with pytest.raises(OSError, match="Bad file descriptor"):
                attempt()
        with pytest.raises(OSError, match="Invalid argument"):
            os.ftruncate(fd, 0)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        at = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        assert libc.mprotect(at, size, mmap.PROT_READ | mmap.PROT_WRITE) == -1
        assert ctypes.get_errno() == errno.EACCES
        child = os.fork()
        if child == 0:
            faulthandler.disable()
            ctypes.memset(at, 0, 1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV

    as_user(BLUE, store)
    as_user(READER, attack)


@root
def test_a_stranger_is_sent_away(node: Process) -> None:
    def knock() -> None:
        with pytest.raises(AccessError, match=f"user {STRANGER} has no role at this node; .* node.users"):
            Client(node.path)

    as_user(STRANGER, knock)
    eventually(lambda: f"user {STRANGER} has no role" in node.log)


@root
def test_a_stranger_is_told_before_anything_of_it_is_read(node: Process) -> None:
    def knock() -> None:
        for _ in range(3):
            with dialled(node.path) as sock:
                assert answer(sock)[:2] == ["failure", "AccessError"], "without a word of ours"
        with dialled(node.path) as sock:
            sock.setblocking(False)
            sent = 0
            with contextlib.suppress(BlockingIOError):
                while sent < 64 << 20:
                    sent += sock.send(p.LENGTH.pack(p.LARGEST) + bytes(1 << 16))
            assert sent < 64 << 20, "it piles up in the socket"

    as_user(STRANGER, knock)
    eventually(lambda: f"user {STRANGER} has no role" in node.log)
    assert node.log.count(f"user {STRANGER} has no role") == 1, "the log does not grow with each attempt"


@root
def test_connections_without_a_hello_make_room_for_those_of_the_same_user_alone(node: Process) -> None:
    with dialled(node.path) as quiet:
        quiet.sendall(p.frame(p.Hello(1, 1, "slow"))[:6])

        def flood() -> None:
            silent = []
            for _ in range(150):
                sock = socket.socket(socket.AF_UNIX)
                sock.connect(str(node.path))
                silent.append(sock)
            assert answer(silent[0]) is None, "its own oldest went"
            with Client(node.path) as client:
                assert client.connected

        as_user(BLUE, flood)
        quiet.setblocking(False)
        with pytest.raises(BlockingIOError):
            quiet.recv(1)
        quiet.setblocking(True)
        quiet.settimeout(30)
        pidfd = os.pidfd_open(os.getpid())
        socket.send_fds(quiet, [p.frame(p.Hello(1, 1, "slow"))[6:]], [pidfd])
        os.close(pidfd)
        assert answer(quiet)[0] == "welcome"


@root
def test_a_group_gives_a_role_and_ones_own_entry_wins(node: Process) -> None:
    def read() -> None:
        with Client(node.path) as client, client.session(MODEL) as session:
            assert length(session, prompt(1)) == 16, "the node's own blocks"
            assert session.store(prompt(2), data(PLAIN, prompt(2))).dropped == 1
            assert [c.pid for c in client.status().node.clients] == [os.getpid(), os.getppid()][::-1]

    def administer() -> None:
        with Client(node.path) as client:
            assert client.forget(DEFAULT_TENANT.tag).blocks == 2, "in all domains"

    def write() -> None:
        with Client(node.path) as client, client.session(MODEL) as session:
            assert length(session, prompt(1)) == 0, "that of its own domain"
            assert session.store(prompt(1), data(PLAIN, prompt(1))).stored == 1

    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(prompt(1), data(PLAIN, prompt(1)))
        as_user(STRANGER, read, VISITORS)
        as_user(STRANGER, read, 1, VISITORS, OPERATORS + 5)
        as_user(BLUE, write, OPERATORS)
        as_user(STRANGER, administer, VISITORS, OPERATORS)


@root
def test_refused_administrative_acts_are_in_the_audit_log(node: Process) -> None:
    """However often a user without a role tries, neither the log nor the node's time is used up."""

    def attempt() -> None:
        with Client(node.path) as client:
            with pytest.raises(AccessError, match=f"erase needs the role admin, and user {BLUE} has write"):
                client.forget(DEFAULT_TENANT.tag)
            for _ in range(100):
                client.link.ask([p.ForgetTenant(DEFAULT_TENANT.tag)] * 100)

    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(prompt(1), data(PLAIN, prompt(1)))
        as_user(BLUE, attempt)
        log = node.folder / "audit.jsonl"

        def acts() -> list[dict[str, Any]]:
            return [json.loads(line) for line in log.read_text().splitlines()]

        eventually(lambda: log.exists() and sum(act["times"] for act in acts()) == 10_001)
        assert {(a["who"], a["what"], a["result"].split(":")[0]) for a in acts()} == {
            (f"user {BLUE}", "erase", "refused")
        }
        assert len(acts()) < 100
        assert verify(log).problem == ""
        assert length(session, prompt(1)) == 16


def test_a_prompt_of_another_tenant_is_answered_like_one_that_nobody_has(tmp_path: Path) -> None:
    """Word for word: the node has nothing to tell them apart by."""
    theirs, mine = (Tenant(name, name.encode().ljust(32, b".")) for name in ("theirs", "mine"))
    with Served(tmp_path / "node.sock", dram={"budget": "16MiB", "segment": "2MiB"}) as client:
        with client.session(MODEL, theirs) as session:
            session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
            assert length(session, prompt(1, 2)) == 32
        groups, namespace = p.describe(PLAIN), MODEL.namespace(mine)
        number = client.link.ask_one(p.Open(groups, PLAIN.block_tokens, namespace, mine.tag))
        assert isinstance(number, int)

        def asked(tokens: list[int]) -> list[Any]:
            digests = b"".join(MODEL.namer(mine).chain(tokens).digests)
            match, find = client.link.ask([p.Match(number, digests, 0), p.Find(number, digests)])
            assert isinstance(match, p.Matched)
            return [msgspec.structs.replace(match, holding=0), find]

        assert asked(prompt(1, 2)) == asked(prompt(3, 4))


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
    access_list = AccessList(
        "60001:blue, 60002:blue:read 60003:green:write 60005::admin nobody::read @60006:green @60007::read"
    )
    assert access_list.of(60001) == Access(Role.WRITE, 1, b"\0blue")
    assert access_list.of(60002) == Access(Role.READ, 1, b"\0blue")
    assert access_list.of(60003) == Access(Role.WRITE, 2, b"\0green")
    assert access_list.of(60004) is None
    assert access_list.of(60004, {60007, 60006}) == Access(Role.WRITE, 2, b"\0green")
    assert access_list.of(60002, {60006}) == Access(Role.READ, 1, b"\0blue")
    assert access_list.of(60005) == access_list.of(os.getuid()) == access_list.of(0) == Access(Role.ADMIN)
    assert access_list.of(pwd.getpwnam("nobody").pw_uid) == Access(Role.READ)
    assert not AccessList("")
    wrongs = ["60001", "60001:engineering", "nosuchuser:blue", "@nosuchgroup:blue", "60001:blue:all", "60001:", ":blue"]
    wrongs += ["60001:blue 60001:green", "0:blue", "60001:blue:admin", "@:blue"]
    for wrong in wrongs:
        with pytest.raises(ConfigError, match=r"node\.users"):
            AccessList(wrong)


@root
def test_names_that_records_have_no_room_for_are_refused(node: Process) -> None:
    """Cut short, they would be another domain's."""
    long = kvtide.Layout((kvtide.Group("sliding_window_0", kvtide.Kind.FULL, 1, 1, 8, "bfloat16"),))

    def ask() -> None:
        with (
            Client(node.path) as client,
            client.session(kvtide.Model(long, "given:long")) as session,
            pytest.raises(LayoutError, match="at most 11 letters"),
        ):
            session.match(list(range(256)))

    as_user(BLUE, ask)
    with Client(node.path) as client, client.session(kvtide.Model(long, "given:long")) as session:
        assert session.match(list(range(256))).tokens == 0
