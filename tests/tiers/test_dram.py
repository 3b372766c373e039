"""The arena: sealed memory that other processes can map, within its budget, for blocks of any size."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import queue
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from kvtide.testing.blocks import content, fill, holds, keys
from kvtide.testing.interface import until
from kvtide.testing.tier import Caller, shaped
from kvtide.tiers.base import NOWHERE, Identity
from kvtide.tiers.dram import memory
from kvtide.tiers.dram.memory import Memory
from kvtide.tiers.dram.tier import Dram

MIB = 1 << 20
SMALL, LARGE = shaped(4, 16 << 10), shaped(5, 100 << 10)


others: set[int] = set()


def arena() -> dict[int, os.stat_result]:
    """The memfds that a test has made, by inode: a mapping has a descriptor of its own."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            about = link.stat()
            if str(link.readlink()).startswith("/memfd:kvtide-") and about.st_ino not in others:
                found[about.st_ino] = about
        except FileNotFoundError:
            continue
    return found


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    others.clear()
    others.update(arena())
    yield
    assert not arena()


def test_segments_are_sealed_and_their_pages_are_there() -> None:
    dram = Dram(4 * MIB, segment=MIB)
    place = dram.take(MIB, 1)
    assert place is None
    assert dram.grow(MIB)
    fd = dram.descriptor(0)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & seals == seals
    for nbytes in (0, MIB - 4096, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    # Set aside before anybody sees them: no SIGBUS later.
    assert os.fstat(fd).st_blocks * 512 >= os.fstat(fd).st_size == MIB
    assert not os.get_inheritable(fd)
    dram.close()


READER = """
import hashlib, mmap, os, sys
fd, start, size = map(int, sys.argv[1:])
with mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ | mmap.PROT_WRITE) as memory:
    print(hashlib.sha256(memory[start:start + size]).hexdigest(), flush=True)
    sys.stdin.readline()
    memory[start] ^= 255
    print("changed", flush=True)
"""


def test_another_process_sees_the_bytes() -> None:
    dram = Dram(4 * MIB, segment=MIB)
    caller = Caller(dram)
    keep = keys(3)
    places = caller.write(keep, LARGE)
    place, size = places[2], LARGE.geometry.footprint
    span = dram.span(place, size)
    (address,) = dram.addresses(np.array([place]))[0].tolist()
    fd, start = dram.descriptor(address >> 40), address & 0xFFFFFFFFFF
    arguments = [sys.executable, "-c", READER, str(fd), str(start), str(size)]
    with subprocess.Popen(arguments, pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdin is not None
        assert reader.stdout.readline().decode().strip() == hashlib.sha256(span).hexdigest()
        before = span[0]
        reader.stdin.write(b"\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == b"changed\n"
        assert span[0] == before ^ 255
    span.release()
    caller.close()


def test_a_view_outlives_closing() -> None:
    """A caller that still copies when the store is closed reads its block, not a fault."""
    dram = Dram(2 * MIB, segment=MIB)
    caller = Caller(dram)
    (key,) = keys(1)
    (place,) = caller.write([key], SMALL)
    view = dram.span(place, SMALL.geometry.footprint).toreadonly()
    caller.close()
    assert holds(view, SMALL.geometry, content(key, SMALL.geometry.nbytes))


def test_spans_are_slots() -> None:
    dram = Dram(4 * MIB, segment=MIB)
    while dram.grow(SMALL.geometry.footprint) and (place := dram.take(SMALL.geometry.footprint, 1)) is not None:
        np.frombuffer(dram.span(place, SMALL.geometry.footprint), np.uint8)[:] = 1
        if dram.blocks == 40:
            break
    places = dram.take_many(SMALL.geometry.footprint, 10)
    for one, many in zip(
        [dram.span(p, 100) for p in places], dram.spans(places, SMALL.geometry.footprint), strict=True
    ):
        one[:3] = b"abc"
        assert bytes(many[:3]) == b"abc"
        assert len(many) == SMALL.geometry.footprint
    del one, many
    dram.close()


def test_memory_never_exceeds_the_budget() -> None:
    """Counted in memfds, while sizes take turns and several threads write."""
    budget = 4 * MIB
    dram = Dram(budget, segment=MIB)
    caller = Caller(dram)
    stop, most = threading.Event(), [0]

    def weigh() -> None:
        while not stop.is_set():
            most[0] = max(most[0], sum(about.st_size for about in arena().values()))

    watcher = threading.Thread(target=weigh)
    watcher.start()
    try:
        for turn in range(8):
            who = (SMALL, LARGE)[turn % 2]
            held = caller.fill(who, start=1000 * turn)
            assert sum(about.st_size for about in arena().values()) == dram.statistics().bytes_taken
            caller.evict(list(held), list(held.values()))
    finally:
        stop.set()
        watcher.join()
    assert 0 < most[0] <= budget
    caller.close()


def inode(dram: Dram) -> int:
    """Of the only memory that there is."""
    (serial,) = dram.serials
    return os.fstat(dram.descriptor(serial)).st_ino


def after_turn(first: Identity, second: Identity) -> tuple[Dram, int, int]:
    """A tier of one segment, filled with one size, emptied, filled with another; and the memory before and after."""
    dram = Dram(MIB, segment=MIB)
    caller = Caller(dram)
    held = caller.fill(first)
    before = inode(dram)
    caller.evict(list(held), list(held.values()))
    (place,) = caller.write(keys(1, start=500), second)
    assert place != NOWHERE
    assert caller.finds(keys(1, start=500), second, [place]) == [True]
    return dram, before, inode(dram)


def test_a_segment_is_cut_anew_where_little_is_wasted() -> None:
    dram, before, after = after_turn(shaped(1, 64 << 10), shaped(1, 128 << 10))
    assert before == after
    assert dram.segments[0].slots == 8
    dram.close()


def test_a_segment_is_given_back_where_much_would_be_wasted() -> None:
    """Three slots of 300 KiB would leave an eighth of a MiB unused for ever: other sizes can use it."""
    dram, before, after = after_turn(shaped(1, 64 << 10), shaped(1, 300 << 10))
    assert before != after
    assert dram.statistics().bytes_taken == 3 * dram.segments[0].size < MIB
    dram.close()


def test_prefault_takes_the_budget() -> None:
    dram = Dram(8 * MIB, segment=2 * MIB, prefault=True)
    dram.wait_prefault()
    assert dram.statistics().bytes_taken == 8 * MIB == sum(a.st_blocks * 512 for a in arena().values())
    assert dram.statistics().blocks == 0
    before = set(arena())
    caller = Caller(dram)
    held = caller.fill(SMALL)
    assert len(held) == 8 * MIB // SMALL.geometry.footprint
    assert set(arena()) == before  # cut, not taken again
    caller.close()


def test_closing_does_not_wait_for_the_whole_budget() -> None:
    dram = Dram(1 << 40, segment=4 * MIB, prefault=True)  # more than there is
    dram.close()


def test_blocks_come_while_memory_is_still_being_taken() -> None:
    dram = Dram(64 * MIB, segment=MIB, prefault=True)
    caller = Caller(dram)
    names = keys(50)
    places = caller.write(names, LARGE)
    assert all(caller.finds(names, LARGE, places))
    dram.wait_prefault()
    assert caller.statistics().bytes_taken <= 64 * MIB
    assert all(caller.finds(names, LARGE, places))
    caller.close()


def test_who_needs_memory_waits_for_one_segment_and_not_for_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node would answer nobody meanwhile."""
    taken, may = queue.SimpleQueue[int](), threading.Semaphore(0)
    allocate = Dram._allocate

    def slowly(dram: Dram, nbytes: int) -> Memory:
        taken.put(nbytes)
        may.acquire()
        return allocate(dram, nbytes)

    monkeypatch.setattr(Dram, "_allocate", slowly)
    dram = Dram(64 * MIB, segment=MIB, prefault=True)
    taken.get()
    with ThreadPoolExecutor(1) as pool:
        grown = pool.submit(dram.grow, SMALL.geometry.footprint)
        until(lambda: not dram._wanted.empty() or grown.done())
        may.release()  # the first segment, and no more
        assert grown.result(60)
    taken.get()
    assert dram.grow(LARGE.geometry.footprint), "while the next one is under way, the first can be cut anew"
    may.release(1000)
    dram.close()


def huge_pages_free() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("HugePages_Free")), 0)


def test_without_huge_pages_it_warns_once_and_works(caplog: pytest.LogCaptureFixture) -> None:
    expected = 0 if huge_pages_free() >= 4 else 1
    dram = Dram(9 * MIB, segment=4 * MIB, huge_pages="2MiB")
    assert dram.statistics().budget == 8 * MIB  # whole pages
    caller = Caller(dram)
    held = caller.fill(LARGE)
    assert len(held) == 2 * (4 * MIB // dram.segments[0].size)
    assert all(caller.finds(list(held), LARGE, list(held.values())))
    assert all(about.st_size % (2 * MIB) == 0 for about in arena().values())
    caller.close()
    assert len(caplog.records) == expected
    if expected:
        assert "no huge pages" in caplog.text
        assert "vm.nr_hugepages" in caplog.text


def test_transparent_huge_pages_are_only_advice(caplog: pytest.LogCaptureFixture) -> None:
    caller = Caller(Dram(4 * MIB, segment=4 * MIB, huge_pages="transparent"))
    places = caller.write(keys(4), SMALL)
    assert all(caller.finds(keys(4), SMALL, places))
    caller.close()
    assert not caplog.records


def test_a_host_that_has_no_more_memory(caplog: pytest.LogCaptureFixture) -> None:
    """Blocks are refused, what is there stays readable, and the budget is not eaten up by the attempts."""
    dram = Dram(16 * MIB, segment=4 * MIB)
    caller = Caller(dram)
    small = caller.write(keys(1), SMALL)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))  # the kernel now refuses files, and memfds, beyond this
    try:
        refused = [caller.write(keys(1, start=10 + i), LARGE)[0] for i in range(3)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert refused == [NOWHERE] * 3
    assert "cannot take" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING
    assert caller.statistics().bytes_taken == 4 * MIB
    assert len(arena()) == 1
    assert caller.finds(keys(1), SMALL, small) == [True]
    (place,) = caller.write(keys(1, start=20), LARGE)
    assert caller.finds(keys(1, start=20), LARGE, [place]) == [True]
    caller.close()


def test_a_late_writer_is_recognised() -> None:
    """Generations: the holder of a stale slot can detect that it was reassigned."""
    dram = Dram(MIB, segment=MIB)
    size = SMALL.geometry.footprint
    assert dram.grow(size)
    place = dram.take(size, 1)
    assert place is not None
    generation = dram.generation(place)
    dram.release(place)
    again = dram.take(size, 2)
    assert again == place
    assert dram.generation(place) != generation
    dram.close()


def test_owners_are_told() -> None:
    dram = Dram(MIB, segment=MIB)
    size = SMALL.geometry.footprint
    dram.grow(size)
    places = dram.take_many(size, 5)
    dram.own(np.array(places), np.arange(11, 16))
    assert sorted(dram.segments.owners(dram.segments[0].size).tolist()) == [11, 12, 13, 14, 15]
    more = dram.take_many(size, 3, np.array([7, 8, 9]))
    assert len(more) == 3
    assert sorted(dram.segments.owners(dram.segments[0].size).tolist()) == [7, 8, 9, 11, 12, 13, 14, 15]
    dram.close()


def test_many_threads_grow_at_once() -> None:
    """All find room for what they bring, and none finds another's."""
    dram = Dram(32 * MIB, segment=MIB)
    shapes = [shaped(1, n << 10) for n in (20, 50, 90, 130)]
    failures: list[str] = []

    def work(number: int) -> None:
        who = shapes[number % 4]
        size = who.geometry.footprint
        for key in keys(30, start=100 * number):
            data = content(key, who.geometry.nbytes)
            place = dram.take(size, number + 1)
            while place is None and dram.grow(size):
                place = dram.take(size, number + 1)
            if place is None:
                failures.append("no room")
                return
            span = dram.span(place, size)
            fill(span, who.geometry, data)
            if not holds(span, who.geometry, data):
                failures.append("not mine")
            dram.release(place)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert dram.statistics().blocks == 0
    dram.close()


def test_memory_is_there_before_it_is_needed_and_never_above_the_budget() -> None:
    dram = Dram(8 * MIB, segment=MIB, ahead=True)

    def taken() -> int:
        return dram.statistics().bytes_taken

    try:
        until(lambda: taken() == 2 * MIB)  # a quarter, before anybody asks
        assert dram.take_many(64 << 10, 1) == [], "it is not cut yet"
        assert dram.grow(64 << 10, wait=False) is True, "which takes no time"
        assert len(dram.take_many(64 << 10, 12)) == 12
        until(lambda: taken() == 3 * MIB)  # of what is taken a quarter of the budget is free again
        used = 12
        while used < 8 * 16:
            until(lambda: dram.grow(64 << 10, wait=False) is not None)
            given = len(dram.take_many(64 << 10, 1))
            assert given
            used += given
            assert taken() <= 8 * MIB
        assert dram.grow(64 << 10, wait=False) is False, "the budget is used up"
        assert taken() == 8 * MIB
    finally:
        dram.close()


def test_memory_that_is_ahead_grows_with_what_is_used() -> None:
    dram = Dram(64 * MIB, segment=MIB, ahead=True)
    try:
        until(lambda: dram.statistics().bytes_taken == 16 * MIB)
        for used in range(0, 24 * 16, 16):
            until(lambda: dram.grow(64 << 10, wait=False) is True)
            assert len(dram.take_many(64 << 10, 16)) == 16, used
        until(lambda: dram.statistics().bytes_taken >= 2 * 24 * MIB)  # as much again as is used
    finally:
        dram.close()


@pytest.mark.parametrize("domain", [0, 5])
def test_memory_that_is_ahead_suits_any_block(domain: int) -> None:
    """Of any domain: nobody has had it. Of a size that would waste much of it there is other memory in its stead."""
    dram = Dram(16 * MIB, segment=4 * MIB, ahead=True)

    def found(size: int) -> bool:
        return bool(dram.grow(size, domain, wait=False) and dram.take_many(size, 1, domain=domain))

    try:
        until(lambda: dram.statistics().bytes_taken == 4 * MIB)
        for size in (MIB, 5 * MIB // 2):
            until(partial(found, size))
    finally:
        dram.close()


def test_who_does_not_wait_for_memory_is_told_when_there_will_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    dram = Dram(4 * MIB, segment=MIB)
    try:
        monkeypatch.setattr(dram, "_allocate", Mock(side_effect=MemoryError))
        assert dram.grow(64 << 10, wait=False) is None
        until(lambda: dram.grow(64 << 10, wait=False) is False)  # then others must leave
        monkeypatch.undo()
        until(lambda: dram.grow(64 << 10, wait=False) is True)  # and it is tried again
    finally:
        dram.close()


@pytest.mark.parametrize("shared", [True, False])
def test_pages_are_huge_where_the_kernel_can(shared: bool) -> None:
    dram = Dram(8 * MIB, segment=4 * MIB, shared=shared)
    try:
        assert dram.grow(MIB)
        (place,) = dram.take_many(MIB, 1)
        huge = dram.statistics().bytes_huge
        assert huge in (0, 4 * MIB), "all of it or, by an older kernel, none"
        if shared and huge:
            assert np.frombuffer(dram.span(place, MIB), np.uint8).ctypes.data % (2 * MIB) == 0
        assert not any(dram.span(place, MIB))
    finally:
        dram.close()


def test_a_view_outlives_the_arena() -> None:
    dram = Dram(8 * MIB, segment=4 * MIB)
    assert dram.grow(MIB)
    (place,) = dram.take_many(MIB, 1)
    view = dram.span(place, MIB)
    view[:4] = b"abcd"
    dram.close()
    assert bytes(view[:4]) == b"abcd"


def test_memory_that_suits_no_block_of_a_kind_is_not_taken_again_and_again() -> None:
    """Blocks of 12 MiB in segments of 32 MiB waste a quarter: they get segments of their own."""
    dram = Dram(768 * MIB, segment=32 * MIB, ahead=True)
    try:

        def given() -> bool:
            return bool(dram.grow(12 * MIB, wait=False) and dram.take_many(12 * MIB, 1))

        for _ in range(6):
            until(given)
        assert dram.removals == 0, "there is room for both"
    finally:
        dram.close()


def test_each_kind_gets_memory_while_others_want_more() -> None:
    dram = Dram(256 * MIB, segment=2 * MIB, ahead=True)
    try:
        kinds = [64 << 10, 3 * MIB // 4, 5 * MIB // 4]
        given = dict.fromkeys(kinds, 0)
        for _ in range(40):
            for kind in kinds:
                if dram.grow(kind, wait=False):
                    given[kind] += len(dram.take_many(kind, 1))
            until(lambda: dram.in_hand(MIB))
        until(lambda: all(bool(dram.grow(kind, wait=False)) for kind in kinds))
    finally:
        dram.close()


def test_nothing_is_taken_while_others_have_more_than_the_budget() -> None:
    dram = Dram(8 * MIB, segment=2 * MIB, ahead=True, aside=12 * MIB)
    try:
        assert dram.grow(64 << 10, wait=False) is False
        assert dram.statistics().bytes_taken == 0
        dram.set_aside(0)
        until(lambda: dram.grow(64 << 10, wait=False) is True)
    finally:
        dram.close()


def test_a_mapping_that_fails_takes_nothing_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel lets go of what was there before, and another thread may have it by then."""
    unmapped: list[tuple[int, int]] = []
    real = memory._mmap

    def mmap(address: int | None, nbytes: int, rights: int, flags: int, fd: int) -> int:
        if address is not None:
            mapped.append((address, nbytes))
            raise OSError(12, "no huge pages")
        return real(address, nbytes, rights, flags, fd)

    mapped: list[tuple[int, int]] = []
    monkeypatch.setattr(memory, "_mmap", mmap)
    monkeypatch.setattr(memory._libc, "munmap", lambda address, nbytes: unmapped.append((address, nbytes)))
    with pytest.raises(OSError, match="no huge pages"):
        memory._map_aligned(-1, 4 * MIB)
    ((start, nbytes),) = mapped
    assert all(at + size <= start or at >= start + nbytes for at, size in unmapped)
    assert sum(size for _, size in unmapped) == 2 * MIB
