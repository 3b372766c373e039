"""The public interface, by its contract: in DRAM alone, and with an NVMe tier below in its several modes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import kvtide
from kvtide import Store
from kvtide import config as configuration
from kvtide.errors import ClosedError, TierLockedError
from kvtide.testing.interface import PLAIN, InterfaceContract
from kvtide.tiers.dram.copy import Bytes, Copier


def memories() -> set[str]:
    """Our descriptors of memory, by number."""
    found = set()
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of this very listing
            found.add(f"{file.name} {file.readlink()}")
    return {entry for entry in found if "memfd:kvtide" in entry}


def test_a_store_that_cannot_be_opened_leaves_nothing_behind(tmp_path: Path) -> None:
    nvme = {"path": str(tmp_path / "kv"), "budget": "32MiB", "threads": 2}
    dram = {"budget": "64MiB", "segment": "8MiB", "prefault": True}
    with kvtide.open(dram={"budget": "8MiB"}, nvme=nvme):
        threads, arenas = set(threading.enumerate()), memories()
        with pytest.raises(TierLockedError):
            Store(configuration.read(None, dram=dram, nvme=nvme), mapped=True)
        assert set(threading.enumerate()) == threads
        assert memories() <= arenas
    with kvtide.open(dram={"budget": "8MiB"}, nvme=nvme):
        pass


class SlowCopier(Copier):
    """Copies when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def copy(self, pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
        self.begun.set()
        assert self.go.wait(30)
        super().copy(pairs)


@pytest.mark.parametrize("verb", ["store", "load"])
def test_closing_waits_for_calls_under_way_and_refuses_new_ones(verb: str, tmp_path: Path) -> None:
    nvme = {"path": str(tmp_path / "kv"), "budget": "32MiB", "threads": 2}
    tokens = list(range(32))
    blocks = [np.random.bytes(PLAIN.geometry["full"].nbytes) for _ in range(2)]
    store = kvtide.open(dram={"budget": "8MiB"}, nvme=nvme)
    session = store.session(kvtide.Model(PLAIN, "given:slow"))
    if verb == "load":
        session.store(tokens, blocks)
    store.copier.close()
    store.copier = slow = SlowCopier()
    buffers = [bytearray(len(b)) for b in blocks]

    def call() -> None:
        if verb == "store":
            session.store(tokens, blocks)
        else:
            session.load(session.match(tokens), buffers).wait()

    calling, closing = threading.Thread(target=call), threading.Thread(target=store.close)
    calling.start()
    assert slow.begun.wait(30)
    closing.start()
    while not store.closed:
        pass
    with pytest.raises(ClosedError):
        session.match(tokens)
    closing.join(0.05)
    assert closing.is_alive(), "somebody is still copying"
    slow.go.set()
    calling.join(30)
    closing.join(30)
    assert not closing.is_alive()
    if verb == "load":
        assert [bytes(b) for b in buffers] == blocks
    with kvtide.open(dram={"budget": "8MiB"}, nvme=nvme) as store:
        session = store.session(kvtide.Model(PLAIN, "given:slow"))
        with session.match(tokens) as match:
            assert [bytes(v) for v in session.load(match).wait(30).blocks] == blocks


def test_weights_get_their_identity_from_the_store(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    cache = tmp_path / "cache.json"
    with kvtide.open(naming={"weights_cache": cache}) as store:
        assert store.weights(weights_id="mine") == "given:mine"
        found = store.weights(tmp_path)
        assert found.startswith("files:")
        assert kvtide.Model(kvtide.Layout.attention(layers=1, heads=1, head_dim=16), found)


def opened(nvme: Mapping[str, object], **settings: Mapping[str, object]) -> Store:
    tree: dict[str, Any] = {"dram": {"budget": "8MiB", "segment": "1MiB"}, "nvme": dict(nvme)}
    for section, values in settings.items():
        tree[section] = {**tree.get(section, {}), **values}
    return Store(configuration.read(None, **tree))


class TestDram(InterfaceContract):
    def open(self, folder: Path, **settings: Mapping[str, object]) -> Store:
        return opened({}, **settings)


class TestDramChecked(InterfaceContract):
    """With a checksum of every block in memory, which is checked at every load."""

    def open(self, folder: Path, **settings: Mapping[str, object]) -> Store:
        return opened({}, **{**settings, "dram": {"checksum": True, **settings.get("dram", {})}})


class TestNvme(InterfaceContract):
    outlives = True
    extra: ClassVar[dict[str, object]] = {}

    def open(self, folder: Path, **settings: Mapping[str, object]) -> Store:
        nvme = {"path": str(folder), "budget": "32MiB", "segment": "4MiB", "threads": 2, **self.extra}
        return opened(nvme, **settings)


class TestNvmeOnEviction(TestNvme):
    extra: ClassVar[dict[str, object]] = {"store": "eviction"}


class TestNvmeCompressed(TestNvme):
    extra: ClassVar[dict[str, object]] = {"codec": "zstd", "token_ids": True, "direct": False}


class TestFiles(InterfaceContract):
    """In shared storage alone: what is not known is looked for, so a question may have to be asked again."""

    outlives = True

    def open(self, folder: Path, **settings: Mapping[str, object]) -> Store:
        return opened({}, **{"files": {"path": str(folder), "threads": 2}, **settings})


class TestFilesBelowNvme(TestNvme):
    def open(self, folder: Path, **settings: Mapping[str, object]) -> Store:
        return super().open(folder / "own", **{"files": {"path": str(folder / "shared"), "threads": 2}, **settings})
