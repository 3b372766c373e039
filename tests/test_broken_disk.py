"""A disk that takes nothing more must not cost the store its memory too."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from kvtide import config
from kvtide.block import Layout
from kvtide.index.keys import Model
from kvtide.store.store import Store
from kvtide.testing import blocks
from kvtide.testing.faults import Fault, FaultyDisk
from tests.books import agree

MIB = 1 << 20
MODEL = Model(Layout.attention(layers=2, heads=2, head_dim=64, block_tokens=64), "broken")
SIZE = MODEL.layout.geometry["full"].nbytes


@pytest.mark.parametrize("call", ["write", "open", "sync"])
@pytest.mark.parametrize("when", ["through", "second-touch", "eviction"])
def test_with_a_disk_that_refuses_everything_it_is_a_store_in_memory(tmp_path: Path, when: str, call: str) -> None:
    settings = config.read(
        env={},
        dram={"budget": 2 * MIB, "segment": MIB},
        nvme={"path": str(tmp_path / "tier"), "budget": 16 * MIB, "segment": MIB, "store": when, "durable": True},
    )
    disk = FaultyDisk()
    with Store(settings, disk=disk) as store:
        session = store.session(MODEL)

        def put(number: int) -> int:
            tokens = np.full(64, number, np.uint32)
            return session.store(tokens, [blocks.content(k, SIZE) for k in session.chain(tokens).keys(b"full")]).stored

        def found(number: int) -> bool:
            tokens = np.full(64, number, np.uint32)
            with session.match(tokens) as match:
                loaded = session.load(match).wait()
                for view, key in zip(loaded.blocks, session.chain(tokens).keys(b"full"), strict=False):
                    assert blocks.holds(view, MODEL.layout.geometry["full"], blocks.content(key, SIZE))
                return bool(loaded.tokens)

        disk.arm(Fault(call, code=errno.ENOSPC, times=1 << 30))
        many = 3 * 2 * MIB // SIZE
        for number in range(many):
            stored = put(number)
            # What waits to be written cannot leave; what was refused can.
            if not stored:
                assert store.flush(60).complete
                stored = put(number)
            assert stored
            assert found(number)
        agree(store)
        assert store.statistics().counts["blocks evicted from dram"] >= many // 2
        disk.disarm()
        for number in range(many, 2 * many):
            put(number)
            found(number)
            store.flush(60)
        agree(store)
        assert store.statistics().tiers["nvme"].blocks
    with Store(settings) as store:
        assert store.statistics().blocks
