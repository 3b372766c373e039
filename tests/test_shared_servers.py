"""Stores in processes of their own that share an object store or Valkey, whatever happens to its server."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

import kvtide
from kvtide import Store
from kvtide import config as configuration
from kvtide.errors import ConfigError, TierError
from kvtide.testing.interface import MODEL, PLAIN, SIZE, data, length, prompt, until
from kvtide.testing.servers import S3Server, Server, ValkeyServer
from kvtide.tiers.shared.blobs import ROOT
from kvtide.tiers.shared.objects import Objects
from tests.pairs import run_both

TIMEOUT = 1.0
"""Seconds that storage may take in the tests in which it hangs."""


class Storage(NamedTuple):
    server: Server
    section: str
    settings: dict[str, Any]
    lasts: bool
    """Whether it keeps what it has when it is killed."""

    def opened(self, **more: Any) -> Store:
        settings: Any = {"dram": {"budget": "8MiB", "segment": "1MiB"}, self.section: {**self.settings, **more}}
        return Store(configuration.read(None, env={}, **settings))


@pytest.fixture(params=["objects", "valkey"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    with ExitStack() as stack:
        if request.param == "objects":
            s3: S3Server = request.getfixturevalue("s3")
            settings = {"url": f"s3://shared{tmp_path}", "endpoint": s3.endpoint, "threads": 2}
            yield Storage(s3, "objects", settings, True)
        else:
            valkey = stack.enter_context(ValkeyServer(tmp_path / "valkey"))
            yield Storage(valkey, "valkey", {"url": valkey.url, "threads": 2}, False)


_WORKER = """
import json, sys
import kvtide
from kvtide.testing.interface import MODEL, PLAIN, data, length, prompt
settings, own, other = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
with kvtide.open(dram={"budget": "8MiB"}, **settings) as store, store.session(MODEL) as session:
    mine = prompt(0, own)
    session.store(mine, data(PLAIN, mine))
    assert store.flush(60)
    print("stored", flush=True)
    sys.stdin.readline()
    assert length(session, prompt(0, other)) == 32, "what the other process wrote"
print("done", flush=True)
"""


def test_two_processes_share_it_and_others_after_them(storage: Storage, tmp_path: Path) -> None:
    text = msgspec.json.encode({storage.section: storage.settings}).decode()
    folders = [tmp_path / "1", tmp_path / "2"]
    for folder in folders:
        folder.mkdir()
    run_both(_WORKER, ([text, "1", "2"], folders[0]), ([text, "2", "1"], folders[1]))
    with storage.opened() as store, store.session(MODEL) as session:
        assert length(session, prompt(0, 1)) == length(session, prompt(0, 2)) == 2 * SIZE


@pytest.mark.parametrize("fault", ["killed", "held"])
def test_a_server_that_fails_under_traffic(storage: Storage, fault: str) -> None:
    """No error, no hang, no wrong byte (``length`` looks at all of them), and hits again afterwards."""
    with storage.opened() as before, before.session(MODEL) as session:
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        assert before.flush(30)
    over, errors = threading.Event(), []

    with storage.opened(timeout=TIMEOUT) as store:

        def work(number: int) -> None:
            try:
                with store.session(MODEL) as session:
                    turn = 0
                    while not over.is_set():
                        turn += 1
                        tokens = prompt(number, turn)
                        length(session, prompt(1, 2))
                        length(session, tokens)
                        session.store(tokens, data(PLAIN, tokens))
            except Exception as e:  # noqa: BLE001 - for the test's own thread
                errors.append(e)

        threads = [threading.Thread(target=work, args=(1000 * i,)) for i in (1, 2, 3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(2):
                (storage.server.kill if fault == "killed" else storage.server.hold)()
                refused = _failures(store)
                until(lambda refused=refused: _failures(store) > refused + 10)  # type: ignore[misc]
                (storage.server.start if fault == "killed" else storage.server.resume)()
        finally:
            over.set()
            for thread in threads:
                thread.join(60)
        assert not [thread for thread in threads if thread.is_alive()]
        assert errors == []
        with store.session(MODEL) as session:
            if fault == "killed" and not storage.lasts:
                session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
            until(lambda: length(session, prompt(1, 2)) == 2 * SIZE)
            fresh = prompt(7, 8)

            def stored() -> bool:
                try:
                    session.drop(fresh)
                except TierError:  # storage is left alone for a moment after its last failure
                    return False
                session.store(fresh, data(PLAIN, fresh))
                store.flush(30)
                with storage.opened() as other, other.session(MODEL) as reader:
                    return length(reader, fresh) == 2 * SIZE

            until(stored)


def _failures(store: Store) -> int:
    (tier,) = (tier for name, tier in store.statistics().tiers.items() if name != "dram")
    return sum(count for _, count in tier.reasons)


def test_a_server_that_is_not_fit_is_told_at_opening_and_leaves_nothing_open(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path / "valkey", maxmemory_policy="noeviction") as server:
        before = threading.active_count()
        settings: Any = {"nvme": {"path": str(tmp_path / "nvme"), "budget": "16MiB"}, "valkey": {"url": server.url}}
        with pytest.raises(TierError, match="allkeys-lru"):
            kvtide.open(dram={"budget": "8MiB"}, **settings)
        assert threading.active_count() == before
        del settings["valkey"]
        kvtide.open(dram={"budget": "8MiB"}, **settings).close()  # the folder is not locked


def test_objects_without_obstore_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvtide.tiers.shared.objects", None)
    with pytest.raises(ConfigError, match=r"pip install kvtide\[objects\]"):
        kvtide.open(dram={"budget": "8MiB"}, objects={"url": "s3://bucket"})


def test_a_byte_budget_holds_in_an_object_store(s3: S3Server, tmp_path: Path) -> None:
    budget = 4 << 20
    url = f"s3://budget{tmp_path}"
    settings = {"url": url, "endpoint": s3.endpoint, "threads": 2, "budget": budget, "lease": "0.5s"}
    storage = Storage(s3, "objects", settings, True)
    there = Objects(f"{url}/{ROOT}", endpoint=s3.endpoint)
    there.create("bucket", b"", 30)  # comes into being with its first object
    written = 0
    with storage.opened() as one, storage.opened() as two, ExitStack() as stack:
        sessions = [stack.enter_context(store.session(MODEL)) for store in (one, two)]

        def writes() -> bool:
            nonlocal written
            for session in sessions:
                written += 1
                session.store(prompt(written), data(PLAIN, prompt(written)))
            lying = sum(size for _, size, _ in there.list(60))
            assert lying <= budget
            done = sum(store.statistics().tiers["objects"].bytes_written for store in (one, two))
            return done > budget + (budget >> 1)  # so that much was removed

        until(writes)
    assert 0 < sum(size for _, size, _ in there.list(60)) <= budget
    there.close()


_CARELESS = """
import json, sys
import kvtide
from kvtide.testing.interface import MODEL, PLAIN, data, prompt
settings, number = json.loads(sys.argv[1]), int(sys.argv[2])
store = kvtide.open(dram={"budget": "8MiB"}, **settings)
session = store.session(MODEL)
for n in range(20):
    session.store(prompt(number, n), data(PLAIN, prompt(number, n)))
print("bye", flush=True)
"""


def test_a_process_that_closes_nothing_ends_in_peace(storage: Storage) -> None:
    """With requests under way, whose answers come when there is no interpreter any more."""
    settings = json.dumps({storage.section: storage.settings})
    for number in range(5):
        command = [sys.executable, "-c", _CARELESS, settings, str(number)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, "bye\n", "")
