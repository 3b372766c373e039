"""Storage that several stores use: what one writes the others find, and whatever storage does, nobody hangs."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

import kvtide
from kvtide import Model, Session, Store
from kvtide import config as configuration
from kvtide.block import BlockKey
from kvtide.errors import TierError
from kvtide.events import BlockRemoved
from kvtide.testing.clock import FakeClock
from kvtide.testing.faults import Fault, FaultyDisk, How
from kvtide.testing.interface import HYBRID, MODEL, PLAIN, SIZE, data, everything, length, prompt, until
from kvtide.tiers.syscalls import Disk
from kvtide.transfer import pending_blocks
from tests.pairs import run_both

TIMEOUT = 0.2
"""Seconds that storage may take in the tests in which it hangs."""


def opened(folder: Path, disk: Disk | None = None, clock: FakeClock | None = None, **files: Any) -> Store:
    settings = {"path": str(folder), "threads": 2, **files}
    return Store(
        configuration.read(None, env={}, dram={"budget": "8MiB", "segment": "1MiB"}, files=settings),
        disk=disk,
        clock=clock,
    )


@contextmanager
def sessions(folder: Path, count: int = 1, **how: Any) -> Iterator[list[Session]]:
    """So many sessions, each of a store of its own."""
    with ExitStack() as stack:
        stores = [stack.enter_context(opened(folder, **how)) for _ in range(count)]
        yield [stack.enter_context(store.session(MODEL)) for store in stores]


def blobs(folder: Path) -> list[Path]:
    """But for the log of drops, which is always there."""
    return sorted(file for file in folder.rglob("*") if file.is_file() and not file.name.startswith("dropped."))


def keep(session: Session, tokens: list[int]) -> None:
    """Store a prompt, and wait until storage has it."""
    session.store(tokens, data(PLAIN, tokens))
    assert session._session_host.flush(30).complete  # type: ignore[attr-defined]


# -- what others wrote ----------------------------------------------------------------------------------------


def test_stores_find_what_others_write_both_ways(tmp_path: Path) -> None:
    long = prompt(*range(70))  # more than is looked for at a time
    with sessions(tmp_path, 2) as (one, two):
        keep(one, long)
        assert length(two, long) == len(long)
        keep(two, long + prompt(100))
        assert length(one, long + prompt(100, 101)) == len(long) + SIZE
        assert length(one, prompt(5)) == 0
    with sessions(tmp_path) as (later,):
        assert length(later, long + prompt(100)) == len(long) + SIZE, "a hit after everybody has gone"


def test_all_groups_of_a_prompt_are_found(tmp_path: Path) -> None:
    tokens = prompt(*range(6))
    with opened(tmp_path) as one, opened(tmp_path) as two:
        model = Model(HYBRID, "given:hybrid")
        with one.session(model) as first, two.session(model) as second:
            first.store(tokens, everything(HYBRID, tokens))
            assert one.flush(30).complete
            assert length(second, tokens) == len(tokens)


def test_a_prompt_that_nobody_has_is_asked_for_once(tmp_path: Path) -> None:
    with opened(tmp_path) as store, store.session(MODEL) as session:
        with session.match(prompt(1), wait=30) as match:
            assert not match.pending
        with session.match(prompt(1)) as match:  # at once: nothing is looked for again so soon
            assert (match.tokens, match.pending) == (0, False)


def test_asking_for_single_blocks_finds_them_too(tmp_path: Path) -> None:
    with sessions(tmp_path, 2) as (one, two):
        keep(one, prompt(1, 2))
        two.find(prompt(1, 2, 3))
        until(lambda: two.find(prompt(1, 2, 3)) == [True, True, False])


def test_names_tell_nothing(tmp_path: Path) -> None:
    with sessions(tmp_path) as (session,):
        keep(session, prompt(1, 2))
        names = [file.name for file in blobs(tmp_path)]
        known = [digest.hex() for digest in session.chain(prompt(1, 2)).digests]
    assert len(names) == 2
    assert not [name for name in names for part in [*known, "full", "contract"] if part in name or name in part]


def test_what_one_drops_is_gone_for_all(tmp_path: Path) -> None:
    tokens = prompt(1, 2, 3)
    with sessions(tmp_path, 2) as (one, two):
        keep(one, tokens)
        with two.match(tokens, wait=30) as match:  # known, not loaded
            assert match.tokens == len(tokens)
        assert one.drop(tokens, start=1) == 2
        assert len(blobs(tmp_path)) == 1
        assert length(two, tokens) == SIZE


def test_a_block_found_lives_no_longer_than_its_writer_said(tmp_path: Path) -> None:
    clock = FakeClock()
    with sessions(tmp_path, 2, clock=clock) as (one, two):
        one.store(prompt(1), data(PLAIN, prompt(1)), ttl=100)
        assert one._session_host.flush(30).complete  # type: ignore[attr-defined]
        assert length(two, prompt(1)) == SIZE
        clock.advance(101)
        assert length(two, prompt(1)) == 0
        until(lambda: not blobs(tmp_path))


def test_a_thousand_blocks_that_expire_together_are_all_removed(tmp_path: Path) -> None:
    clock = FakeClock()
    with sessions(tmp_path, clock=clock) as (session,):
        for n in range(10):
            tokens = prompt(*range(100 * n, 100 * n + 100))
            session.store(tokens, data(PLAIN, tokens), ttl=100)
            assert session._session_host.flush(30).complete  # type: ignore[attr-defined]
        assert len(blobs(tmp_path)) == 1000
        keep(session, prompt(5000))
        clock.advance(101)
        assert length(session, prompt(5000)) == SIZE
        until(lambda: len(blobs(tmp_path)) == 1)


def test_what_has_expired_is_looked_for_once_and_makes_room_for_the_next(tmp_path: Path) -> None:
    clock = FakeClock()
    with sessions(tmp_path, 2, clock=clock) as (one, two):
        one.store(prompt(1), data(PLAIN, prompt(1)), ttl=10)
        assert one._session_host.flush(30).complete  # type: ignore[attr-defined]
        assert len(blobs(tmp_path)) == 1
        clock.advance(20)
        until(lambda: not two.match(prompt(1)).pending)
        assert blobs(tmp_path) == []
        keep(two, prompt(1))
    with sessions(tmp_path, clock=clock) as (later,):
        assert length(later, prompt(1)) == SIZE


def test_what_storage_would_not_delete_is_served_no_more(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with opened(tmp_path, disk) as store, store.session(MODEL) as session:
        keep(session, prompt(1))
        disk.arm(Fault("unlink", files="?" * 64))
        with pytest.raises(TierError):
            session.drop(prompt(1))
        assert length(session, prompt(1)) == 0
        keep(session, prompt(1))
        assert length(session, prompt(1)) == SIZE


def test_a_loaded_block_is_not_written_a_second_time(tmp_path: Path) -> None:
    with sessions(tmp_path, 2) as (one, two):
        keep(one, prompt(1))
        before = [file.stat().st_mtime_ns for file in blobs(tmp_path)]
        keep(two, prompt(1))
        assert [file.stat().st_mtime_ns for file in blobs(tmp_path)] == before


# -- storage that fails ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["empty", "torn", "flipped", "rubbish", "another block"])
def test_a_bad_file_is_a_miss_is_removed_and_can_be_stored_again(tmp_path: Path, damage: str) -> None:
    with sessions(tmp_path) as (session,):
        keep(session, prompt(1))
        keep(session, prompt(2))
    files = blobs(tmp_path)
    whole = [file.read_bytes() for file in files]
    spoil: Callable[[bytes, bytes], bytes] = {
        "empty": lambda mine, other: b"",
        "torn": lambda mine, other: mine[:-4096],
        "flipped": lambda mine, other: mine[:5000] + bytes([mine[5000] ^ 4]) + mine[5001:],
        "rubbish": lambda mine, other: bytes(len(mine)),
        "another block": lambda mine, other: other,
    }[damage]
    for file, mine, other in zip(files, whole, whole[::-1], strict=True):
        file.write_bytes(spoil(mine, other))
    with sessions(tmp_path) as (session,):
        assert (length(session, prompt(1)), length(session, prompt(2))) == (0, 0)
        assert blobs(tmp_path) == []
        keep(session, prompt(1))
    with sessions(tmp_path) as (session,):
        assert (length(session, prompt(1)), length(session, prompt(2))) == (SIZE, 0)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("call", ["open", "write", "rename"])
def test_a_store_that_storage_refuses_is_dropped_and_leaves_nothing(tmp_path: Path, call: str, code: int) -> None:
    disk = FaultyDisk()
    with sessions(tmp_path, disk=disk) as (session,):
        disk.arm(Fault(call, How.FAIL, code, times=100))
        keep(session, prompt(1, 2))
        assert blobs(tmp_path) == []
        assert length(session, prompt(1, 2)) == 2 * SIZE, "DRAM has it all the same"
        disk.disarm()
        keep(session, prompt(3))
        assert len(blobs(tmp_path)) == 1


def test_reads_that_fail_are_misses_and_nothing_is_lost(tmp_path: Path) -> None:
    with sessions(tmp_path) as (session,):
        keep(session, prompt(1, 2))
    disk, clock = FaultyDisk(), FakeClock()
    with sessions(tmp_path, disk=disk, clock=clock) as (session,):
        disk.arm(Fault("read", How.FAIL, errno.EIO, times=100))
        assert length(session, prompt(1, 2)) == 0
        disk.disarm()
        assert len(blobs(tmp_path)) == 2
        clock.advance(60)  # that it was not there is forgotten
        assert length(session, prompt(1, 2)) == 2 * SIZE


def test_a_storage_that_hangs_holds_up_nobody(tmp_path: Path) -> None:
    """Neither a search, nor a load without a deadline, nor a store, nor the end."""
    with sessions(tmp_path) as (session,):
        keep(session, prompt(1, 2))
        keep(session, prompt(3))
    disk = FaultyDisk()
    store = opened(tmp_path, disk, timeout=TIMEOUT)
    with store.session(MODEL) as session:
        with session.match(prompt(1, 2), wait=30) as match:
            gate = disk.gate("read", "*")
            loaded = session.load(match).wait(30)
            assert gate.wait_for(1)
            assert loaded.tokens == 0
        assert length(session, prompt(1, 2)) == 0, "it is looked for, in vain"
        assert length(session, prompt(3)) == 0
        session.store(prompt(4), data(PLAIN, prompt(4)))
        assert length(session, prompt(4)) == SIZE
        gate.open()
        until(lambda: length(session, prompt(1, 2)) == 2 * SIZE)
        until(lambda: length(session, prompt(3)) == SIZE)
        assert store.statistics().held == 0
        again = disk.gate("write", "*")
        session.store(prompt(5), data(PLAIN, prompt(5)))
        assert again.wait_for(1)
    store.close()  # though it still hangs
    again.open()


def test_one_blob_that_hangs_does_not_hold_up_what_was_asked_for_with_it(tmp_path: Path) -> None:
    with sessions(tmp_path) as (session,):
        keep(session, prompt(1, 2))
    disk = FaultyDisk()
    with opened(tmp_path, disk, timeout=TIMEOUT) as store, store.session(MODEL) as session:
        with session.match(prompt(1, 2), wait=30) as match:
            gate = disk.gate("read", blobs(tmp_path)[0].name)
            assert session.load(match).wait(30).tokens < 2 * SIZE
            assert gate.wait_for(1)
        gate.open()
        until(lambda: length(session, prompt(1, 2)) == 2 * SIZE)


def test_nobody_joins_a_load_that_was_given_up(tmp_path: Path) -> None:
    with sessions(tmp_path) as (session,):
        keep(session, prompt(1))
    disk = FaultyDisk()
    with opened(tmp_path, disk, timeout=TIMEOUT) as store, store.session(MODEL) as session:
        with session.match(prompt(1), wait=30) as match:
            gate = disk.gate("read", "*")
            assert session.load(match).wait(30).tokens == 0
            assert session.load(match).wait(30).tokens == 0, "though it still hangs"
        gate.open()


def test_a_long_prompt_with_a_hole_is_searched_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its first block is elsewhere: the rest need not be looked for, however much it is."""
    monkeypatch.setattr(pending_blocks, "_STEP", 1)
    tokens = prompt(*range(600))
    with sessions(tmp_path, count=2) as (here, there):
        here.store(tokens, data(PLAIN, tokens))
        here.drop(tokens[:SIZE])
        for _, tier in there.backend.partition.shared_tiers:  # type: ignore[attr-defined]
            tier.drops.hear()  # what it stores before it has heard of a drop is taken for what was dropped
        keep(there, tokens[:SIZE])
        with here.match(tokens, wait=30) as found:
            assert found.tokens > 200 * SIZE, "as many as there is room for"


def test_memory_that_a_hung_read_may_fill_is_given_to_nobody(tmp_path: Path) -> None:
    with sessions(tmp_path) as (session,):
        keep(session, prompt(1))
    disk = FaultyDisk()
    with opened(tmp_path, disk, timeout=TIMEOUT) as store, store.session(MODEL) as session:
        with session.match(prompt(1), wait=30) as match:
            gate = disk.gate("read", "*")
            assert session.load(match).wait(30).tokens == 0
        kept = [prompt(n) for n in range(10, 400)]
        for tokens in kept:  # more than DRAM has room for: every slot that is free is taken
            session.store(tokens, data(PLAIN, tokens))
        gate.open()
        until(lambda: store.statistics().pipeline.doomed == 0)
        for tokens in kept:
            length(session, tokens)  # checks every byte


# -- processes ------------------------------------------------------------------------------------------------

_WORKER = """
import sys
from pathlib import Path
import kvtide
from kvtide.testing.interface import MODEL, PLAIN, data, length, prompt
folder, own, other = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with kvtide.open(dram={"budget": "8MiB"}, files={"path": folder}) as store, store.session(MODEL) as session:
    mine = prompt(0, own)
    session.store(mine, data(PLAIN, mine))
    assert store.flush(60).complete
    print("stored", flush=True)
    sys.stdin.readline()
    assert length(session, prompt(0, other)) == 32, "what the other process wrote"
print("done", flush=True)
"""


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    run_both(_WORKER, ([str(shared), "1", "2"], tmp_path), ([str(shared), "2", "1"], tmp_path))
    with sessions(shared) as (session,):
        assert length(session, prompt(0, 1)) == length(session, prompt(0, 2)) == 2 * SIZE


def test_two_nodes_share_a_folder(tmp_path: Path) -> None:
    tokens = prompt(1, 2, 3)
    settings: dict[str, Any] = {"dram": {"budget": "8MiB"}, "files": {"path": str(tmp_path / "kv")}}
    for node, found in ((1, 0), (2, len(tokens))):
        differs = {"plan": {"deadline_seconds": node}}  # so that each has a node of its own
        with kvtide.open(node="auto", **settings, **differs) as client, client.session(MODEL) as session:
            assert length(session, tokens) == found
            session.store(tokens, data(PLAIN, tokens))
            until(lambda: len(blobs(tmp_path / "kv")) == 3)


def test_many_threads_ask_for_one_prompt(tmp_path: Path) -> None:
    tokens = prompt(*range(40))
    with sessions(tmp_path, 2) as (one, two):
        keep(one, tokens)
        found: list[int] = []
        threads = [threading.Thread(target=lambda: found.append(length(two, tokens))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert found == [len(tokens)] * 8


# -- the byte budget ------------------------------------------------------------------------------------------

BUDGET = 8 << 20

_WRITER = """
import itertools, sys
import kvtide
from kvtide.testing.interface import MODEL, PLAIN, data, prompt
folder, budget, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
files = {"path": folder, "budget": budget, "lease": 2, "threads": 2}
with kvtide.open(dram={"budget": "8MiB"}, files=files) as store, store.session(MODEL) as session:
    for n in itertools.count(seed * 1_000_000):
        tokens = prompt(n, n + 1, n + 2, n + 3)
        session.store(tokens, data(PLAIN, tokens))
        if n % 16 == 0:
            store.flush()
            print(store.statistics().tiers["files"].bytes_written, flush=True)
"""


def size(folder: Path) -> int:
    """All bytes of all files, unfinished ones too."""
    total = 0
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += file.stat().st_size if file.is_file() else 0
    return total


def test_four_writers_keep_the_budget_though_whoever_keeps_it_is_killed(tmp_path: Path) -> None:
    random = Random(1)
    seeds = itertools.count(1)
    written: Counter[int] = Counter()
    most = 0

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _WRITER, str(tmp_path), str(BUDGET), str(next(seeds))]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ})

    def writes(worker: subprocess.Popen[str]) -> None:
        """Wait until a process has written something more, and look at the budget all the while."""
        nonlocal most
        assert worker.stdout is not None
        first, end = written[worker.pid], time.monotonic() + 120
        while (now := int(worker.stdout.readline())) <= first:
            most = max(most, size(tmp_path))
            assert most <= BUDGET
            assert time.monotonic() < end, "nothing is stored any more"
        written[worker.pid] = now

    workers = [start() for _ in range(4)]
    try:
        for _ in range(2):
            for worker in workers:
                writes(worker)
            victim = random.randrange(4)
            workers[victim].kill()
            workers[victim].communicate()
            for worker in workers[:victim] + workers[victim + 1 :]:
                writes(worker)
            workers[victim] = start()
        while written.total() < 2 * BUDGET:  # so that much was removed
            writes(random.choice(workers))
        assert most > BUDGET / 4, "and it is used"
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert size(tmp_path) <= BUDGET


def test_without_anybody_who_keeps_the_budget_blocks_are_loaded_and_not_stored(tmp_path: Path) -> None:
    with sessions(tmp_path) as (session,):
        keep(session, prompt(1))
    (tmp_path / "kvtide-1" / "ev").mkdir()
    (tmp_path / "kvtide-1" / "ev" / "evictor.0000000007.0000000003").touch()  # of one that has died, a moment ago
    with opened(tmp_path, budget="1GiB", lease="60s") as store, store.session(MODEL) as session:
        assert length(session, prompt(1)) == SIZE
        keep(session, prompt(2))
        assert dict(store.statistics().tiers["files"].reasons) == {"no credit to write": 1}


def test_what_found_no_credit_is_written_when_there_is_some(tmp_path: Path) -> None:
    with opened(tmp_path, budget="1GiB", lease="0.5s") as store, store.session(MODEL) as session:
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))  # the first credit is still under way
        until(lambda: len([f for f in blobs(tmp_path) if "." not in f.name]) == 2)


def test_a_flush_waits_for_credit_that_is_on_its_way(tmp_path: Path) -> None:
    with opened(tmp_path, budget="1GiB", lease="2s") as store, store.session(MODEL) as session:
        until(lambda: store.statistics().budgets["files"].steward.term > 0)
        keep(session, prompt(0))
        until(lambda: len(blocks_in(tmp_path)) == 1)
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        assert store.flush(30).complete
        assert len(blocks_in(tmp_path)) == 3


def blocks_in(folder: Path) -> list[Path]:
    return [file for file in blobs(folder) if "." not in file.name]


def test_stores_that_store_nothing_remove_nothing_and_a_block_too_large_neither(tmp_path: Path) -> None:
    """In a storage that is full: nothing is asked for, and nothing goes."""
    with sessions(tmp_path) as (session,):
        for number in range(44):
            keep(session, prompt(number))
    full = blocks_in(tmp_path)
    assert len(full) == 44
    record = full[0].stat().st_size
    settings: Any = {"budget": str(48 * record), "lease": "0.3s"}
    with ExitStack() as stack:
        stores = [stack.enter_context(opened(tmp_path, **settings)) for _ in range(4)]
        until(lambda: any(store.statistics().budgets["files"].here for store in stores))
        reading = stack.enter_context(stores[0].session(MODEL))
        for number in range(44):
            assert length(reading, prompt(number)) == SIZE
        until(lambda: all(store.statistics().budgets["files"].steward.blocks == 44 for store in stores))
        time.sleep(1.5)  # five leases
        assert blocks_in(tmp_path) == full
        assert all(store.statistics().budgets["files"].credit == 0 for store in stores)
    tiny: Any = {"budget": str(record // 2), "lease": "0.3s"}
    other = tmp_path / "other"
    with opened(other, **tiny) as store, store.session(MODEL) as session:
        until(lambda: store.statistics().budgets["files"].steward.term > 0)
        keep(session, prompt(1))
        assert dict(store.statistics().tiers["files"].reasons) == {"larger than the budget of the storage": 1}


def test_what_the_coordinator_removes_is_forgotten_and_published(tmp_path: Path) -> None:
    """By every store: by the one that wrote it, and by one that only found it."""
    settings: Any = {"budget": "1MiB", "lease": "0.5s"}
    with opened(tmp_path, **settings) as writer, opened(tmp_path, **settings) as reader:
        gone: dict[Store, set[BlockKey]] = {writer: set(), reader: set()}

        def follow(store: Store) -> None:
            def happened(event: object) -> None:
                if isinstance(event, BlockRemoved) and event.tier == "files":
                    assert event.reason == "evicted"
                    gone[store].update(event.keys)

            store.follow(happened)

        follow(writer)
        follow(reader)
        with writer.session(MODEL) as writing, reader.session(MODEL) as reading:
            numbers = itertools.count()

            first: list[int] = []

            def known() -> bool:
                """Blocks that the reader knows of and has not loaded; a busy coordinator may have been faster."""
                first[:] = prompt(next(numbers), 2, 3)
                writing.store(first, data(PLAIN, first))
                until(lambda: writer.statistics().counts.get("blocks written to files") == 3 * (first[0] + 1))
                with reading.match(first, wait=30) as match:
                    return match.tokens == len(first)

            until(known)
            keys = set(writing.chain(first).keys(PLAIN.groups[0].suffix))

            def told() -> bool:
                keep(writing, prompt(next(numbers)))
                return keys <= gone[writer] & gone[reader]

            until(told)
            with reading.match(first) as match:
                assert match.tokens == 0
        assert "blocks unreadable in files" not in reader.statistics().counts, "nobody had to try"
        assert reader.statistics().counts["blocks evicted from files"] == len(gone[reader])


def test_what_a_store_evicts_is_gone_when_it_has_closed(tmp_path: Path) -> None:
    """However much that is: nobody would remove it later."""
    tokens = prompt(*range(200))
    with opened(tmp_path) as store, store.session(MODEL) as session:
        keep(session, tokens)
        assert len(blobs(tmp_path)) == 200
        for key in session.chain(tokens).keys(PLAIN.groups[0].suffix):
            store.main.colds[0].tier.evict(key, 0)
    assert blobs(tmp_path) == []


def test_who_cannot_know_what_was_removed_forgets_all_and_finds_it_again(tmp_path: Path) -> None:
    with sessions(tmp_path) as (session,):
        keep(session, prompt(1, 2))
    told: list[object] = []
    with opened(tmp_path) as store, store.session(MODEL) as session:
        with session.match(prompt(1, 2), wait=30) as match:
            assert match.tokens == 2 * SIZE
        store.follow(told.append)
        store.main.pending_blocks.removed("files", None)
        keys = session.chain(prompt(1, 2)).keys(PLAIN.groups[0].suffix)
        assert told == [BlockRemoved("files", tuple(keys), "forgotten")]
        assert store.statistics().blocks == 0
        assert length(session, prompt(1, 2)) == 2 * SIZE
