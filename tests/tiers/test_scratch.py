"""The memory beside the blocks': bounded, counted, given back; and nobody waits for ever for it."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import kvtide
from kvtide.block import Layout
from kvtide.index.keys import Model
from kvtide.tiers.format import codec
from kvtide.tiers.format.encryption import OPEN
from kvtide.tiers.format.packer import Packer
from kvtide.tiers.format.scratch import Pool, Scratch, Workspace

MIB = 1 << 20


def workspace(pool: Pool) -> tuple[Workspace, Scratch]:
    own, memory = Workspace(pool), Scratch()
    own.keep(memory)
    return own, memory


def test_idle_memory_is_kept_until_another_needs_it() -> None:
    pool = Pool(10 * MIB)
    (one, memory), (other, _) = workspace(pool), workspace(pool)
    one.begin(6 * MIB)
    memory.get(6 * MIB)
    one.end()
    assert (pool.taken, len(memory)) == (6 * MIB, 6 * MIB)
    other.begin(4 * MIB)
    assert len(memory) == 6 * MIB, "there was room for both"
    other.end()
    other.begin(5 * MIB)
    assert (pool.taken, len(memory)) == (5 * MIB, 0)
    other.end()
    assert (pool.taken, pool.most) == (0, 10 * MIB)


def test_a_pool_that_is_emptied_keeps_nothing_of_jobs_that_began_before() -> None:
    pool = Pool(10 * MIB)
    (idle, kept), (busy, used) = workspace(pool), workspace(pool)
    for own, memory in ((idle, kept), (busy, used)):
        own.begin(2 * MIB)
        memory.get(2 * MIB)
    idle.end()
    pool.empty()
    assert (len(kept), len(used)) == (0, 2 * MIB), "a job goes on"
    busy.end()
    assert (len(used), pool.taken) == (0, 0)
    busy.begin(2 * MIB)
    used.get(2 * MIB)
    busy.end()
    assert len(used) == 2 * MIB, "the next one keeps its memory again"


def test_headers_go_when_the_pool_is_emptied_and_a_job_under_way_keeps_its_own() -> None:
    pool = Pool(10 * MIB)
    packer = Packer("raw", OPEN, pool)
    page = packer.header.get(8192)
    page[:3] = b"ids"
    pool.empty()
    assert (len(packer.header), bytes(page[:3])) == (0, b"ids")
    assert bytes(packer.header.get(8192)) == bytes(8192)


def test_memory_may_be_dropped_at_any_time() -> None:
    memory, over = Scratch(), threading.Event()

    def drop() -> None:
        while not over.is_set():
            memory.drop()

    thread = threading.Thread(target=drop)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        assert {len(memory.get(4096 + i % 2 * 4096)) for i in range(3000)} == {4096, 8192}
    finally:
        sys.setswitchinterval(before)
        over.set()
        thread.join()


def test_a_job_that_takes_as_much_as_the_one_before_gets_the_same_memory() -> None:
    """Though that one did not use all that it was granted. New memory would cost a fault for every page."""
    pool = Pool(10 * MIB)
    own, memory = workspace(pool)
    own.begin(6 * MIB)
    first = np.frombuffer(memory.get(4 * MIB), np.uint8).ctypes.data
    own.end()
    assert pool.taken == 4 * MIB
    own.begin(6 * MIB)
    assert pool.taken == 6 * MIB
    assert np.frombuffer(memory.get(4 * MIB), np.uint8).ctypes.data == first
    own.end()


def test_a_job_waits_for_its_memory_and_a_large_one_is_alone() -> None:
    pool = Pool(10 * MIB)
    running, most = 0, 0
    sizes = [1, 3, 25, 2, 9, 10, 30, 1, 1, 4] * 4
    lock = threading.Lock()

    def work(size: int) -> None:
        nonlocal running, most
        own, memory = workspace(pool)
        for turn in range(20):
            mine = size if turn % 2 else 1
            own.begin(mine * MIB)
            with lock:
                running += mine
                most = max(most, running if running > mine else 0)
            memory.get(mine * MIB)
            with lock:
                running -= mine
            own.end()

    threads = [threading.Thread(target=work, args=(size,), daemon=True) for size in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "somebody waits for ever"
    assert pool.most == 30 * MIB
    assert most <= 10, "beside others"


@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_a_long_section_is_compressed_in_parts(itemsize: int) -> None:
    """With the result of a short one: either way reads what the other made."""
    zstd = codec.Zstd()
    count = (5 << 20) // itemsize // 4 * 4
    random = np.random.default_rng(itemsize)
    if itemsize == 1:
        data = random.integers(0, 4, count).astype(np.uint8)
    else:
        floats = random.standard_normal(count).astype(np.float32).view(np.uint32)
        data = (floats >> 16).astype("<u2").view(np.uint8) if itemsize == 2 else floats.view(np.uint8)
    section = memoryview(data.tobytes())
    out = memoryview(bytearray(len(section)))
    size = zstd.compress_into(out, section, itemsize)
    assert size < len(section)
    short = zstd.compress(section, itemsize)
    assert abs(size - len(short)) < 0.02 * len(section)
    for stored in (out[:size], memoryview(short)):
        back = memoryview(bytearray(len(section)))
        zstd.decompress(stored, back, itemsize, codec.ZSTD)
        assert back == section
    noise = memoryview(random.integers(0, 256, len(section), np.uint8).tobytes())
    assert zstd.compress_into(out, noise, itemsize) == len(section), "it does not shrink"


@pytest.mark.parametrize("encrypt", [False, True], ids=["open", "sealed"])
@pytest.mark.parametrize("compression", ["raw", "zstd"])
def test_a_store_takes_no_more_than_it_says(tmp_path: Path, compression: str, encrypt: bool) -> None:
    (tmp_path / "kek").touch(0o600)
    (tmp_path / "kek").write_text("01" * 32)
    model = Model(Layout.attention(layers=2, heads=1, head_dim=1 << 16, block_tokens=16, dtype="bfloat16"), "scratch")
    nbytes = model.layout.geometry["full"].nbytes
    security = {"encrypt": encrypt}
    if encrypt:
        security |= {"key_source": f"file:{tmp_path / 'kek'}", "key_file": str(tmp_path / "keys.json")}  # type: ignore[dict-item]
    with kvtide.open(
        dram={"budget": 6 * nbytes, "segment": nbytes},
        nvme={
            "path": str(tmp_path / "nvme"),
            "budget": 32 * nbytes,
            "segment": 4 * nbytes,
            "store": "through",
            "codec": compression,
        },
        files={"path": str(tmp_path / "files"), "codec": compression},
        security=security,
    ) as store:
        pools = store.main._scratch
        assert store.statistics().scratch.limit == sum(pool.limit for pool in pools) == 2 * (64 << 20)
        for pool in pools:
            pool.limit = 2 * nbytes
        with store.session(model) as session:
            blocks = [
                (np.random.default_rng(i).standard_normal(nbytes // 2).astype(np.float32).view(np.uint32) >> 16)
                .astype("<u2")
                .view(np.uint8)
                for i in range(10)
            ]
            for seed, block in enumerate(blocks):
                session.store([seed] * 16, [block])
                store.flush()
            for seed, block in enumerate(blocks):
                with session.match([seed] * 16) as match:
                    loaded = session.load(match).wait()
                    assert loaded.tokens == 16
                    assert bytes(loaded.blocks[0]) == block.tobytes()
        now = store.statistics().scratch
    one = 2 * nbytes + codec.work_of(nbytes // 4) + (1 << 20)
    assert all(pool.most <= max(pool.limit, one) for pool in pools)
    assert all(pool.taken <= pool.limit for pool in pools)
    assert now.taken == sum(pool.taken for pool in pools)
    assert (now.most > 0) == (encrypt or compression == "zstd")
