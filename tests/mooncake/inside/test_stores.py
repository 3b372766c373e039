"""Stores that share a Mooncake pool, whatever happens to its master and to the clients that have the bytes."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from kvtide.errors import ConfigError
from kvtide.testing.blocks import aligned
from kvtide.testing.interface import MODEL, PLAIN, SIZE, data, length, prompt, until
from kvtide.tiers.shared.blobs import ROOT
from kvtide.tiers.shared.budget import is_block
from kvtide.tiers.shared.mooncake import Mooncake
from tests import test_shared_servers as shared
from tests.mooncake.servers import Holder, MooncakeMaster

_MIB = 1 << 20

test_two_processes_share_it_and_others_after_them = shared.test_two_processes_share_it_and_others_after_them
test_a_server_that_fails_under_traffic = shared.test_a_server_that_fails_under_traffic
test_a_process_that_closes_nothing_ends_in_peace = pytest.mark.long(
    shared.test_a_process_that_closes_nothing_ends_in_peace
)


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[shared.Storage]:
    """A master of its own, with a holder of 64 MiB."""
    with MooncakeMaster(tmp_path / "master") as server, Holder(server, 64 * _MIB):
        yield _storage(server)


def _storage(server: MooncakeMaster) -> shared.Storage:
    return shared.Storage(server, "mooncake", {"url": server.url, "threads": 2}, False)


def test_what_one_store_computed_is_a_hit_for_another(master: MooncakeMaster) -> None:
    storage = _storage(master)
    path = prompt(11, 12)
    with storage.opened() as one, one.session(MODEL) as writer, storage.opened() as other:
        writer.store(path, data(PLAIN, path))
        assert one.flush(30)
        with other.session(MODEL) as reader:
            assert length(reader, path) == 2 * SIZE
            assert other.statistics().tiers["mooncake"].bytes_read > 0
            writer.drop(path)
            until(lambda: length(reader, path) == 0)  # the other one was told, and the pool does not have it any more


def test_what_mooncake_evicted_is_a_miss_and_can_be_stored_again(tmp_path: Path) -> None:
    path = prompt(21, 22)
    with MooncakeMaster(tmp_path / "master") as server, Holder(server, 16 * _MIB), ExitStack() as stack:
        storage = _storage(server)
        _stored(storage, path)
        blobs = stack.enter_context(closing(Mooncake(server.url, folder=ROOT)))
        kept = blobs.create("kept", b"", 30)
        names = iter(range(10_000))

        def gone() -> bool:
            with suppress(OSError):  # Mooncake evicts when it is full, and a little later
                blobs.write([(f"{next(names)}", [aligned(_MIB)])], 30)
            return not any(is_block(name) for name, _, _ in blobs.list(30))

        until(gone)
        assert _found(storage, path) == 0
        assert kept
        assert blobs.find(["kept"], 30) == [True], "what was created is never evicted"
        until(lambda: _stored(storage, path))


def test_a_holder_that_dies_takes_its_blocks_with_it_and_nothing_else(tmp_path: Path) -> None:
    path, other = prompt(31, 32), prompt(33)
    with MooncakeMaster(tmp_path / "master") as server, ExitStack() as stack:
        holder = stack.enter_context(Holder(server, 32 * _MIB))
        storage = _storage(server)
        assert _stored(storage, path)
        with storage.opened(timeout="2s") as store, store.session(MODEL) as session:
            holder.kill()
            until(lambda: length(session, path) == 0)
        stack.enter_context(Holder(server, 32 * _MIB))
        until(lambda: _stored(storage, path))
        until(lambda: _stored(storage, other))


def _stored(storage: shared.Storage, path: list[int]) -> bool:
    """Store it in one store; whether another one then finds it."""
    with storage.opened() as store, store.session(MODEL) as session:
        session.store(path, data(PLAIN, path))
        store.flush(30)
    return _found(storage, path) == len(path)


def _found(storage: shared.Storage, path: list[int]) -> int:
    with storage.opened() as store, store.session(MODEL) as session:
        return length(session, path)


def test_a_node_that_starts_before_the_master(tmp_path: Path) -> None:
    server = MooncakeMaster(tmp_path / "master")
    storage, path = _storage(server), prompt(41)
    with storage.opened(timeout="1s") as store, store.session(MODEL) as session, ExitStack() as stack:
        assert length(session, path) == 0
        stack.enter_context(server)
        stack.enter_context(Holder(server, 32 * _MIB))

        until(lambda: _stored(storage, path))
        until(lambda: length(session, path) == SIZE)  # in the store that was there before


def test_this_process_goes_on_while_a_master_does_not_answer_at_its_port(master: MooncakeMaster) -> None:
    """Its HTTP server answers. Mooncake's ``setup`` would stop all threads until its request has failed."""
    lived: list[bool] = []
    with socket.create_server(("127.0.0.1", 0)) as port:

        def answer_nothing() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = port.accept()
                    with connection:
                        connection.recv(1)
                        connection.setblocking(False)
                        lived.append(_is_open(connection))

        thread = threading.Thread(target=answer_nothing)
        thread.start()
        url = master.url.replace(str(master.port), str(port.getsockname()[1]))
        with closing(Mooncake(url)) as blobs:
            until(lambda: bool(lived))
            with pytest.raises(OSError, match="rpc_port"):
                blobs.find(["a"], 30)
        port.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert all(lived), "this process ran only when the request was given up"


def _is_open(connection: socket.socket) -> bool:
    """Whether the other end has not closed it."""
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return True
    except ConnectionError:
        pass
    return False


def test_settings_that_mooncake_cannot_keep_are_told(master: MooncakeMaster) -> None:
    before = threading.active_count()
    storage = _storage(master)
    with pytest.raises(ConfigError, match=r"mooncake\.budget"):
        storage.opened(budget="1GiB")
    for url, said in (
        (f"{master.url}&protocol=rdma", "over tcp alone"),
        (f"{master.url}&sgment=1GiB", "'sgment' is not known"),
        ("http://127.0.0.1:50051", "mooncake://HOST:PORT"),
        (master.url.replace("://", "://:secret@"), "mooncake://HOST:PORT"),
        ("mooncake://127.0.0.1:one", "rpc_port of the master"),
        (f"{master.url}&segment=much", "not a size"),
    ):
        with pytest.raises(ConfigError, match=said):
            storage.opened(url=url)
    assert threading.active_count() == before


_FORKS = """
import os, sys
import kvtide
from kvtide.errors import ForkedError
from kvtide.testing.blocks import aligned
from kvtide.testing.interface import MODEL, PLAIN, SIZE, data, length, prompt
with kvtide.open(dram={"budget": "8MiB"}, mooncake={"url": sys.argv[1]}) as store, store.session(MODEL) as session:
    session.store(prompt(51), data(PLAIN, prompt(51)))
    assert store.flush(30)
    child = os.fork()
    if not child:
        try:
            session.match(prompt(51))
        except ForkedError:
            sys.exit(7)  # with all that runs at an exit
        sys.exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert length(session, prompt(51)) == SIZE
print("fine")
"""


def test_a_forked_child_ends_and_disturbs_nothing(master: MooncakeMaster) -> None:
    command = [sys.executable, "-c", _FORKS, master.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_the_client_is_loaded_only_if_it_is_configured() -> None:
    code = "import sys, kvtide; kvtide.open(dram={'budget': '8MiB'}).close(); print('mooncake.store' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("False\n", "")
