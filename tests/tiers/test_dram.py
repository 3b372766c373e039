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
from pathlib import Path

import numpy as np
import pytest

from kvtide.testing.blocks import content, fill, holds, keys
from kvtide.testing.interface import until
from kvtide.testing.tier import Caller, shaped
from kvtide.tiers.base import NOWHERE, Identity
from kvtide.tiers.dram import Dram
from kvtide.tiers.memory import Memory

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
    """Generations: whoever still has a slot of before can tell that it is another's now."""
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
    dram = Dram(3 * MIB + 4096, segment=MIB, ahead=True)

    def taken() -> int:
        return dram.statistics().bytes_taken

    try:
        assert dram.grow(64 << 10)
        assert len(dram.take_many(64 << 10, 4)) == 4
        assert taken() == MIB, "most of it is free"
        for expected in (2, 3):
            assert len(dram.take_many(64 << 10, 12)) == 12
            until(lambda: taken() == expected * MIB)  # noqa: B023
            assert len(dram.take_many(64 << 10, 4)) == 4, "without growing"
        dram.take_many(64 << 10, 12)
        assert not dram.take_many(64 << 10, 1)
        assert not dram.grow(64 << 10)
        assert taken() == 3 * MIB
    finally:
        dram.close()
