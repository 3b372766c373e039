"""An opening that fails leaves nothing behind: no lock, thread or descriptor. The next one finds all as it was."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtide
from kvtide.block import Layout
from kvtide.errors import ClosedError, TierError
from kvtide.index.keys import Model, Tenant
from kvtide.security.key_ring import KeyRing
from kvtide.store.partition import Partition
from kvtide.store.store import Store
from kvtide.tiers.dram.copy import Copier
from kvtide.tiers.dram.tier import Dram
from kvtide.tiers.shared.drop_log import DropLogReader
from tests.node.serving import Process

MODEL = Model(Layout.attention(layers=1, heads=1, head_dim=64, block_tokens=16), "opening")
SHARE = Tenant("share", b"s" * 32)
"""It has a reserved share."""
BLOCKS = [np.full(MODEL.layout.geometry["full"].nbytes, i, np.uint8) for i in range(2)]


def settings(folder: Path) -> dict[str, Any]:
    """Of a store with every kind of thread, as few of each as there may be."""
    (folder / "kek").touch(0o600)
    (folder / "kek").write_text("01" * 32)
    return {
        "dram": {"budget": "5MiB", "segment": "1MiB", "prefault": True, "reserved": f"{SHARE.tag.hex()}:1MiB"},
        "nvme": {
            "path": str(folder / "nvme"),
            "budget": "32MiB",
            "segment": "1MiB",
            "threads": 1,
            "store": "through",
            "reserved": f"{SHARE.tag.hex()}:16MiB",
        },
        "files": {"path": str(folder / "files"), "budget": "64MiB", "threads": 1},
        "objects": {"url": f"file://{folder / 'objects'}", "threads": 1},
        "security": {
            "encrypt": True,
            "key_source": f"file:{folder / 'kek'}",
            "key_file": str(folder / "keys.json"),
        },
    }


def taken() -> tuple[set[str], list[str]]:
    """The threads and descriptors of this process."""
    names = []
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # of the listing itself
            names.append(str(fd.readlink()))
    return {t.name for t in threading.enumerate()}, sorted(n for n in names if "/proc/" not in n)


@contextmanager
def failing(owner: Any, name: str, number: int, error: Callable[[], Exception]) -> Iterator[list[int]]:
    """The call with that number fails, and all after it."""
    real, calls = getattr(owner, name), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] > number:
            raise error()
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield calls


def no_thread() -> Exception:
    return RuntimeError("can't start new thread")


def no_file() -> Exception:
    return OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize(
    ("owner", "name", "error", "least"),
    [(threading.Thread, "start", no_thread, 11), (os, "open", no_file, 4)],
    ids=["threads", "files"],
)
def test_a_store_opens_whole_or_not_at_all(tmp_path: Path, owner: Any, name: str, error: Any, least: int) -> None:
    known = settings(tmp_path)
    with kvtide.open(**known) as store, store.session(MODEL) as session:
        session.store([1] * 32, BLOCKS)
    before = taken()
    for number in range(100):
        with failing(owner, name, number, error):
            try:
                store = kvtide.open(**known)
            except (RuntimeError, OSError, TierError):
                opened = False
            else:
                opened = True
        if opened:
            store.close()
            break
        assert taken() == before, f"after failure {number}"
    assert number >= least, "it is meant to fail at each of them"
    assert taken() == before
    with kvtide.open(**known) as store, store.session(MODEL) as session:
        assert session.match([1] * 32).tokens == 32


def test_a_client_is_connected_whole_or_not_at_all(tmp_path: Path) -> None:
    node = Process(tmp_path)
    try:
        kvtide.connect(f"unix:{node.path}").close()
        before = taken()
        for number in range(20):
            with failing(threading.Thread, "start", number, no_thread):
                try:
                    client = kvtide.connect(f"unix:{node.path}")
                except RuntimeError:
                    client = None
            if client is not None:
                client.close()
                break
            assert taken() == before, f"after failure {number}"
        assert number == 3
    finally:
        node.kill()


def test_a_failure_after_the_directory_was_opened_gives_its_lock_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = settings(tmp_path)
    kvtide.open(**known).close()
    before = taken()
    for name in ("adopt", "Pipeline", "PendingBlocks", "Planner", "LearningThread"):
        with monkeypatch.context() as patch:
            patch.setattr(f"kvtide.store.partition.{name}", lambda *_: (_ for _ in ()).throw(MemoryError))
            with pytest.raises(MemoryError):
                kvtide.open(**known)
        assert taken() == before, name
    kvtide.open(**known).close()


def test_what_was_opened_is_closed_in_the_order_of_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listeners first, which drop blocks from all partitions; memory after the key ring, which drops blocks too."""
    order = []
    for owner, name in ((DropLogReader, "listener"), (Partition, "partition"), (KeyRing, "key ring"), (Dram, "memory")):

        def close(self: Any, *args: Any, real: Any = owner.close, name: str = name) -> Any:
            order.append(name)
            return real(self, *args)

        monkeypatch.setattr(owner, "close", close)
    monkeypatch.setattr(Store, "_measured_disk", lambda _: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        kvtide.open(**settings(tmp_path))
    last = {name: max(i for i, other in enumerate(order) if other == name) for name in order}
    assert last["listener"] < last["partition"] < last["key ring"] < order.index("memory")
    assert [order.count(name) for name in ("listener", "partition", "memory")] == [2, 2, 2]
    assert order.index("listener") == 1, "after main, which has the listeners, began to close"


def test_a_closed_partition_does_not_claim_to_drop_blocks(tmp_path: Path) -> None:
    """Else a notice from other users of a shared storage would count as applied."""
    known = settings(tmp_path)
    with kvtide.open(**known) as store, store.session(MODEL) as session:
        session.store([1] * 32, BLOCKS)
        store.flush()
        partition = store.main
        names = session.chain([1] * 32).digests
    with pytest.raises(ClosedError):
        partition.drop_here(names)
    with pytest.raises(ClosedError):
        partition.forget_here(SHARE.tag)
    with kvtide.open(**known) as store, store.session(MODEL) as session:
        assert session.match([1] * 32).tokens == 32


def test_a_copy_needs_no_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    copier = Copier(threads=3)
    pairs = [(np.zeros(8 << 20, np.uint8), np.full(8 << 20, i, np.uint8)) for i in range(4)]
    with failing(threading.Thread, "start", 1, no_thread):
        copier.copy(pairs)
    assert all((target == source).all() for target, source in pairs)
    for target, _ in pairs:
        target[:] = 99
    copier.close()
    assert all((target == 99).all() for target, _ in pairs), "nobody copies later"
