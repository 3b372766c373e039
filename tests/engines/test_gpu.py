"""What only a GPU can show: bounded staging, many moves at once, and the death of a process in the middle of a copy."""

from __future__ import annotations

import mmap
import os
import select
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import kvtide
from kvtide.engines.paged import Copy, Pages, mover
from kvtide.errors import ClosedError, LayoutError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU that torch can use")

LAYOUT = kvtide.Layout.attention(layers=4, heads=2, head_dim=64)
MIB = 1 << 20


def engine(pages: int, fill: int | None = None) -> list[torch.Tensor]:
    shape = (2, pages, 16, 2, 64)
    if fill is not None:
        return [torch.full(shape, fill, dtype=torch.int16, device="cuda").view(torch.bfloat16) for _ in range(4)]
    bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device="cuda")
    return [(bits + i).view(torch.bfloat16) for i in range(4)]


@pytest.mark.parametrize("uninterrupted", [1, 100_000, 32 * MIB])
@pytest.mark.parametrize("staging", [4096, 300_000, None])
def test_staging_may_be_smaller_than_a_block(
    staging: int | None, uninterrupted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many blocks in one buffer, or some sections of one, with and without pauses: the bytes are the same. Several
    moves at once."""
    monkeypatch.setattr("kvtide.engines.paged.gpu._UNINTERRUPTED", uninterrupted)
    order = np.random.default_rng(0).permutation(20 * 16).reshape(20, 16)
    before = engine(20 * 16)
    with kvtide.open(dram={"budget": "512MiB"}, nvme={"path": ""}) as store:
        session = store.session(kvtide.Model(LAYOUT, "gpu"))
        tokens = np.arange(20 * 256, dtype=np.uint32)
        ours = mover(torch.device("cuda"), staging)
        with session.reserve(tokens) as held:
            copies = [Copy(v, p) for v, p in zip(held.views, order, strict=True)]
            pages = Pages.of(LAYOUT, "full", before, "k p t h d")
            for move in [ours.store(pages, copies[i : i + 5]) for i in range(0, 20, 5)]:
                move.wait()
            held.seal()
        after = engine(20 * 16, fill=0)
        with session.match(tokens) as match:
            views = session.load(match).wait().blocks
            pages = Pages.of(LAYOUT, "full", after, "k p t h d")
            moves = [ours.load(pages, [Copy(v, p)]) for v, p in zip(views, order, strict=True)]
            for move in moves:
                move.join()
            assert all(
                torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(before, after, strict=True)
            )
            for move in moves:
                move.wait()
                assert move.done()
        ours.close()
        with pytest.raises(ClosedError):
            ours.store(pages, [])


def test_an_engines_own_copy_to_the_host_does_not_wait_for_a_whole_store() -> None:
    """It copies the tokens of each step, and the GPU executes all copies to the host in one order."""
    blocks = 2048
    caches = engine(blocks * 16, fill=1)
    order = np.arange(blocks * 16).reshape(blocks, 16)
    with kvtide.open(dram={"budget": "1536MiB", "prefault": True}, nvme={"path": ""}) as store:
        session = store.session(kvtide.Model(LAYOUT, "gpu"))
        ours, pages = mover(torch.device("cuda")), Pages.of(LAYOUT, "full", caches, "k p t h d")
        tokens, token = torch.zeros(64, device="cuda"), torch.zeros(64, pin_memory=True)
        with session.reserve(np.arange(blocks * 256, dtype=np.uint32)) as held:
            copies = [Copy(v, p) for v, p in zip(held.views, order, strict=True)]
            ours.store(pages, copies).wait()  # the memory is registered with the driver at its first use
            before = []
            for _ in range(5):  # this thread may be interrupted for longer than a store takes, but not each time
                move = ours.store(pages, copies)
                move.join()  # all of it is queued
                with torch.cuda.stream(torch.cuda.Stream()):
                    token.copy_(tokens, non_blocking=True)
                    torch.cuda.current_stream().synchronize()
                before.append(not move.done())
                move.wait()
            assert any(before)
        ours.close()


@pytest.mark.parametrize("staging", [300_000, None])
def test_pages_that_are_joined_may_change_while_their_copies_are_under_way(staging: int | None) -> None:
    """An engine gives the pages of a request that leaves to others in its next step."""
    order = np.random.default_rng(0).permutation(20 * 16).reshape(20, 16)
    caches = engine(20 * 16)
    true = [cache.clone() for cache in caches]
    with kvtide.open(dram={"budget": "512MiB"}, nvme={"path": ""}) as store:
        session = store.session(kvtide.Model(LAYOUT, "gpu"))
        ours = mover(torch.device("cuda"), staging)
        with session.reserve(np.arange(20 * 256, dtype=np.uint32)) as held:
            copies = [Copy(v, p) for v, p in zip(held.views, order, strict=True)]
            pages = Pages.of(LAYOUT, "full", caches, "k p t h d")
            moves = [ours.store(pages, copies[i : i + 5]) for i in range(0, 20, 5)]
            for move in moves:
                move.join()
            for cache in caches:
                cache.zero_()
            for move in moves:
                move.wait()
            after = engine(20 * 16, fill=0)
            ours.load(Pages.of(LAYOUT, "full", after, "k p t h d"), copies).wait()
        assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(true, after, strict=True))
        ours.close()


_WRITER = """
import mmap, sys, torch, kvtide
from kvtide.engines.paged import Copy, Pages, mover
memory = mmap.mmap(int(sys.argv[1]), 0)
layout = kvtide.Layout.attention(layers=32, heads=8, head_dim=128)
size = layout.geometry["full"].footprint
caches = [torch.zeros(2, 16, 16, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(32)]
pages, ours = Pages.of(layout, "full", caches, "k p t h d"), mover(torch.device("cuda"))
copies = [Copy(memoryview(memory)[i * size : (i + 1) * size], range(16)) for i in range(len(memory) // size)]
ours.store(pages, copies).wait()
print("ready", flush=True)
last = []
for i in range(10**9):
    for cache in caches:
        cache.fill_(i % 100 + 1)
    last = last[-3:] + [ours.store(pages, copies)]  # some are always under way
    if i > 3:
        last[0].wait()
"""


def test_nothing_is_written_after_the_death_of_the_writer() -> None:
    """The node gives a slot to others when the pidfd of its writer fires: by then no DMA may be under way."""
    nbytes = 256 * MIB
    fd = os.memfd_create("slots")
    os.ftruncate(fd, nbytes)
    memory = mmap.mmap(fd, nbytes)
    seen = np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE]
    for attempt in range(5):
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(fd)], pass_fds=[fd], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        pidfd = os.pidfd_open(writer.pid)
        first = seen.copy()
        while (seen == first).all():  # copies run
            pass
        os.kill(writer.pid, signal.SIGKILL)
        assert select.select([pidfd], [], [], 60)[0]
        after = seen.copy()
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            assert (seen == after).all(), f"bytes changed after the death of their writer (attempt {attempt})"
        os.close(pidfd)
        writer.wait()
        writer.stdout.close()
    os.close(fd)


@pytest.mark.parametrize("staging", [4096, None])
def test_what_is_warmed_up_changes_no_page(staging: int | None) -> None:
    caches = engine(32)
    true = [cache.clone() for cache in caches]
    ours = mover(torch.device("cuda"), staging)
    ours.warm(Pages.of(LAYOUT, "full", caches, "k p t h d"))
    torch.cuda.synchronize()
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(true, caches, strict=True))
    ours.close()


def test_pages_that_do_not_exist_end_a_move_with_an_error() -> None:
    """They are found while the parts before are copied. The mover can be used afterwards."""
    caches, after = engine(64 * 16), engine(64 * 16, fill=0)
    pages, others = (Pages.of(LAYOUT, "full", one, "k p t h d") for one in (caches, after))
    with kvtide.open(dram={"budget": "512MiB"}, nvme={"path": ""}) as store:
        session = store.session(kvtide.Model(LAYOUT, "gpu"))
        ours = mover(torch.device("cuda"), 8 * MIB)  # so that a part has four blocks at most
        with session.reserve(np.arange(64 * 256, dtype=np.uint32)) as held:
            good = [Copy(v, range(16 * i, 16 * i + 16)) for i, v in enumerate(held.views)]
            for wrong in (Copy(held.views[-1], [64 * 16] * 16), Copy(held.views[-1], [-1] * 16)):
                for move in (ours.store(pages, [*good[:-1], wrong]), ours.load(others, [*good[:-1], wrong])):
                    with pytest.raises(LayoutError, match="are not all among the 1024 of this engine"):
                        move.wait()
            whole = slice(0, 32 * 16)  # of blocks in parts before the last
            assert all(
                torch.equal(a[:, whole].view(torch.int16), b[:, whole].view(torch.int16))
                for a, b in zip(caches, after, strict=True)
            )
            ours.store(pages, good).wait()
            ours.load(others, good).wait()
        assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(caches, after, strict=True))
        ours.close()
