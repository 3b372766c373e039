"""Who sends another's block names learns nothing, gets nothing, and costs the owner nothing.

Names follow from model and tenant, so a session never asks for another's blocks by accident; but a client of a node
sends names, and may send any. And a read that fails for a reason that is not the record's costs that read, and not the
record.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtide import BlockRemoved, Session, Store, Tenant, config
from kvtide.events import Event
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.store.backend import LocalBackend
from kvtide.testing.faults import Fault, FaultyDisk, How
from kvtide.testing.keys import WRAPPING
from tests.books import agree
from tests.plan.small import LAYOUT, MODEL, SLOTS, content, keep, length, open_store, prompt, right
from tests.transfer.test_pipeline import world

STRANGER = Tenant("stranger", b"the naming secret of the stranger")
ASKERS = {
    "namespace": (b"\7" * 32, DEFAULT_TENANT.tag),
    "tenant": (MODEL.namespace(DEFAULT_TENANT), STRANGER.tag),
    "both": (b"\7" * 32, STRANGER.tag),
}
NUMBERS = itertools.count(500_000)
askers = pytest.mark.parametrize("asker", ASKERS)


def stranger(store: Store, asker: str = "both") -> LocalBackend:
    """Somebody of another identity, who knows the owner's names."""
    namespace, tenant = ASKERS[asker]
    return LocalBackend(store.main, LAYOUT, namespace, tenant)


def unknown(store: Store) -> None:
    """Nobody knows whose the blocks are, as after an opening with a journal of an older version."""
    with store.index.lock:
        store.index.identity[:] = 0


def blocks_got(backend: LocalBackend, owner: Session, *path: int) -> int:
    """Match and load by the owner's names: how many blocks a stranger gets."""
    holding = backend.match(owner.chain(prompt(*path)), 0, None)
    backend.load(holding, None).wait(30)
    found = backend.collect(holding)
    holding.release()
    assert found.blocks == len(found.spans["full"])
    return found.blocks


def push_out(store: Store, *path: int) -> None:
    """Let blocks leave DRAM."""
    with store.session(MODEL) as filler:
        assert store.flush(30)
        for _ in range(SLOTS):
            keep(filler, next(NUMBERS))
            assert store.flush(30)
        with filler.match(prompt(*path)) as match:
            assert not match.ready


@contextmanager
def watched(store: Store) -> Iterator[list[Event]]:
    events: list[Event] = []
    end = store.follow(events.append)
    yield events
    end()


CODECS: dict[str, dict[str, Any]] = {
    "raw": {},
    "zstd": {"nvme": {"codec": "zstd"}},
    "sealed": {"security": {"encrypt": True}},
}


@pytest.mark.parametrize("how", CODECS)
@askers
def test_a_record_on_disk_stays_for_its_owner(tmp_path: Path, asker: str, how: str) -> None:
    options: dict[str, Any] = {section: dict(values) for section, values in CODECS[how].items()}
    if how == "sealed":
        (tmp_path / "kek").touch(0o600)
        (tmp_path / "kek").write_bytes(WRAPPING)
        options["security"] |= {"key_source": f"file:{tmp_path / 'kek'}", "key_file": str(tmp_path / "keys")}
    with open_store(tmp_path / "kv", **options) as store, store.session(MODEL) as owner:
        keep(owner, 1, 2, 3)
        push_out(store, 1, 2, 3)
        unknown(store)
        before = store.statistics()
        with watched(store) as events:
            for _ in range(5):
                assert blocks_got(stranger(store, asker), owner, 1, 2, 3) == 0
        after = store.statistics()
        assert not [e for e in events if isinstance(e, BlockRemoved) and e.reason == "unreadable"]
        assert "blocks unreadable in nvme" not in after.counts
        assert after.counts["loads dropped: the block in nvme is not the asker's"] == 15
        assert after.tiers["nvme"].blocks == before.tiers["nvme"].blocks
        assert after.tiers["nvme"].failed_reads == before.tiers["nvme"].failed_reads
        assert dict(after.tiers["nvme"].reasons)["another model or tenant"] == 15
        assert right(owner, 1, 2, 3) == 3
        agree(store)


@askers
def test_blocks_in_memory_are_not_shown_to_another(asker: str) -> None:
    with open_store() as store, store.session(MODEL) as owner:
        keep(owner, 1, 2, 3)
        backend = stranger(store, asker)
        chain = owner.chain(prompt(1, 2, 3))
        assert backend.find(chain) == [False] * 3
        holding = backend.match(chain, 0, None)
        assert holding.plan.blocks == 0
        holding.release()
        assert right(owner, 1, 2, 3) == 3


def test_what_comes_to_memory_after_a_match_is_not_shown_either(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv") as store, store.session(MODEL) as owner:
        keep(owner, 1)
        push_out(store, 1)
        unknown(store)
        backend = stranger(store)
        holding = backend.match(owner.chain(prompt(1)), 0, None)
        assert holding.plan.blocks == 1, "whose a record on disk is shows when it is read"
        with owner.match(prompt(1)) as match:
            assert owner.load(match).wait(30).tokens == LAYOUT.block_tokens
            assert backend.collect(holding).blocks == 0
            backend.load(holding, None).wait(30)
            assert backend.collect(holding).blocks == 0
        holding.release()


def test_the_owner_does_not_join_a_strangers_read() -> None:
    """The owner gets its blocks though another tenant's read of them is under way."""
    with world() as w:
        w.chill(1, 2)
        unknown(w.store)
        backend = stranger(w.store)
        holding = backend.match(w.session.chain(prompt(1, 2)), 0, None)
        theirs = backend.load(holding, None)
        with w.session.match(prompt(1, 2)) as match:
            load = w.session.load(match)
            w.tier.refuse_read()
            assert theirs.ended
            assert backend.collect(holding).blocks == 0
            assert not load.transfer.ended
            w.tier.let_all()
            assert load.wait(0).tokens == 2 * LAYOUT.block_tokens
        holding.release()
        assert right(w.session, 1, 2) == 2


def test_a_stranger_does_not_join_the_owners_read() -> None:
    with world() as w:
        w.chill(1, 2)
        backend = stranger(w.store)
        with w.session.match(prompt(1, 2)) as match:
            load = w.session.load(match)
            holding = backend.match(w.session.chain(prompt(1, 2)), 0, None)
            theirs = backend.load(holding, None)
            w.tier.let_all()
            assert load.wait(0).tokens == 2 * LAYOUT.block_tokens
            assert theirs.ended
            assert backend.collect(holding).blocks == 0
            holding.release()


def test_who_gives_up_while_he_waits_for_anothers_read_holds_nothing() -> None:
    with world() as w:
        w.chill(1)
        backend = stranger(w.store)
        holding = backend.match(w.session.chain(prompt(1)), 0, None)
        backend.load(holding, None)
        with w.session.match(prompt(1)) as match:
            w.session.load(match).cancel()
        holding.release()
        w.tier.refuse_read()
        w.tier.let_all()
        assert right_when_let(w, 1) == 1
    # ``world`` checks that nothing is held at the end


def right_when_let(w: Any, *path: int) -> int:
    with w.session.match(prompt(*path)) as match:
        load = w.session.load(match)
        w.tier.let_all()
        return int(load.wait(0).tokens) // LAYOUT.block_tokens


def test_a_record_in_shared_storage_stays_for_its_owner(tmp_path: Path) -> None:
    files = {"path": str(tmp_path / "shared"), "store": "through", "threads": 1}
    with open_store(files=files) as store, store.session(MODEL) as owner:
        keep(owner, 1, 2)
        assert store.flush(30)
    blobs = sorted(p for p in (tmp_path / "shared").rglob("*") if p.is_file())
    with open_store(files=files) as store, store.session(MODEL) as owner:
        backend, chain = stranger(store), owner.chain(prompt(1, 2))
        for _ in range(3):  # by looking for them
            backend.match(chain, 0, None).release()
            _until(lambda: not backend.match(chain, 0, None).pending)
        assert sorted(p for p in (tmp_path / "shared").rglob("*") if p.is_file()) == blobs
        with owner.match(prompt(1, 2), wait=30) as match:
            assert match.blocks == 2, "found at once, though the stranger has just been refused"
            assert blocks_got(backend, owner, 1, 2) == 0  # and by reading them
        assert right(owner, 1, 2) == 2
        assert sorted(p for p in (tmp_path / "shared").rglob("*") if p.is_file()) == blobs


def _until(done: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if done():
            return
    raise AssertionError("never")


# -- reads that fail ----------------------------------------------------------------------------------------


def faulty(tmp_path: Path) -> tuple[Store, FaultyDisk]:
    disk = FaultyDisk(0)
    tree: dict[str, Any] = {
        "dram": {"budget": "1MiB", "segment": "1MiB"},
        "nvme": {"path": str(tmp_path / "kv"), "budget": "16MiB", "segment": "1MiB", "threads": 2},
    }
    return Store(config.read(env={}, **tree), disk=disk), disk


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ETIMEDOUT])
def test_one_failed_read_does_not_cost_a_good_record(tmp_path: Path, code: int) -> None:
    store, disk = faulty(tmp_path)
    with store, store.session(MODEL) as owner:
        keep(owner, 1)
        push_out(store, 1)
        for _ in range(3):  # never so often in a row that it is given up
            for times in (1, 1):
                disk.arm(Fault("read", How.FAIL, code, "*.segment", 0, times))
                assert right(owner, 1) == 0
                disk.disarm()
            assert right(owner, 1) == 1
            push_out(store, 1)
        counts = store.statistics().counts
        assert counts["loads dropped: a read from nvme failed"] == 6
        assert "blocks unreadable in nvme" not in counts


def test_a_record_whose_reads_keep_failing_is_given_up_and_may_be_stored_anew(tmp_path: Path) -> None:
    store, disk = faulty(tmp_path)
    with store, store.session(MODEL) as owner:
        keep(owner, 1)
        push_out(store, 1)
        for turn in range(3):
            assert length(owner, 1) == 1
            disk.arm(Fault("read", How.FAIL, errno.EIO, "*.segment", 0, 1))
            assert right(owner, 1) == 0
            disk.disarm()
            assert store.statistics().counts.get("blocks unreadable in nvme", 0) == (turn == 2)
        assert length(owner, 1) == 0
        tokens = prompt(1)
        assert owner.store(tokens, content(owner, tokens)).stored == 1
        agree(store)


def test_a_damaged_record_is_dropped_at_once(tmp_path: Path) -> None:
    store, disk = faulty(tmp_path)
    with store, store.session(MODEL) as owner:
        keep(owner, 1)
        push_out(store, 1)
        disk.arm(Fault("read", How.FLIP, errno.EIO, "*.segment", 0, 100))
        assert right(owner, 1) == 0
        disk.disarm()
        assert store.statistics().counts["blocks unreadable in nvme"] == 1
        assert length(owner, 1) == 0
