"""The contract of shared storage (``kvtide.tiers.shared.blobs``) as tests. Needs pytest and hypothesis.

Subclass it, define how the storage is opened, and run pytest::

    class TestMine(BlobsContract):
        def make(self, where: Path) -> Blobs:
            return Mine(where)

Names are new in every test, so that one storage may serve all of them.
"""

from __future__ import annotations

import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtide.block import Span
from kvtide.testing.blocks import aligned, content
from kvtide.tiers.shared.blobs import Blobs, LastingBlobs

__all__ = ["TIME", "BlobsContract", "cut", "names", "value"]

TIME = 30.0
"""Time limit in seconds of a call."""
_SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.differing_executors]
"""Names are new every time, and each storage is an executor of its own."""
SIZES = (1, 100, 4096, 3 * 4096, 1_000_000, 9 << 20)


def names(count: int, prefix: str = "") -> list[str]:
    """Names that were not used before."""
    return [(prefix + secrets.token_hex(32))[:64] for _ in range(count)]


def value(name: str, nbytes: int) -> Span:
    """The bytes of a blob, which follow from its name."""
    span = aligned(nbytes)
    span[:] = content(name.encode(), nbytes).data
    return span


def cut(span: Span, *places: int) -> list[Span]:
    """The parts of a span between these places."""
    marks = [0, *places, len(span)]
    return [span[a:b] for a, b in pairwise(marks)]


class BlobsContract(ABC):
    """See the module's docstring."""

    dated = True
    """Whether it knows when a blob was written."""

    @abstractmethod
    def make(self, where: Path) -> Blobs:
        """The opened storage; ``where`` is a folder for this test alone."""

    @pytest.fixture
    def blobs(self, tmp_path: Path) -> Iterator[Blobs]:
        blobs = self.make(tmp_path / "blobs")
        yield blobs
        blobs.close()

    # -- written blobs ------------------------------------------------------------------------------------

    def test_what_was_written_is_read(self, blobs: Blobs) -> None:
        known = dict(zip(names(len(SIZES)), SIZES, strict=True))
        batch = [(name, cut(value(name, size), size // 3)) for name, size in known.items()]
        assert blobs.write(batch, TIME) == [True] * len(SIZES)
        room = {name: aligned(size) for name, size in known.items()}
        # In another order and split differently.
        options = [(name, cut(room[name], size // 7, size // 2)) for name, size in reversed(known.items())]
        assert blobs.read(options, TIME) == list(reversed(SIZES))
        for name, size in known.items():
            assert room[name] == value(name, size), f"{size} bytes"

    def test_a_blob_of_another_length_than_its_room(self, blobs: Blobs) -> None:
        sizes = (10_000, 8 << 20, (8 << 20) + 1, 16 << 20)
        for name, size in zip(names(len(sizes)), sizes, strict=True):
            whole = value(name, size)
            blobs.write([(name, [whole])], TIME)
            large, small = aligned(size + (20 << 20)), aligned(size - 1)
            assert blobs.read([(name, cut(large, 4096)), (name, [small])], TIME) == [size, size - 1]
            assert large[:size] == whole
            assert small == whole[:-1]
            last = aligned(4096)
            assert blobs.read([(name, [last])], TIME) == [4096], "what came after it is not taken for it"
            assert last == whole[:4096]

    def test_a_part_of_a_blob(self, blobs: Blobs) -> None:
        (name,) = names(1)
        whole = value(name, 100_000)
        blobs.write([(name, [whole])], TIME)
        for offset, size in (
            (0, 10),
            (4096, 4096),
            (99_990, 10),
            (99_990, 4096),
            (1, 99_999),
            (100_000, 8),
            (1 << 30, 8),
        ):
            span = aligned(size)
            count = len(whole[offset : offset + size])
            assert blobs.read_part(name, span, offset, TIME) == count, f"{size} from {offset}"
            assert span[:count] == whole[offset : offset + count]

    def test_the_callers_memory_is_his_own_again_after_a_write(self, blobs: Blobs) -> None:
        (name,) = names(1)
        span = value(name, 2 << 20)
        blobs.write([(name, [span.toreadonly()])], TIME)
        span[:] = bytes(len(span))
        room = aligned(len(span))
        blobs.read([(name, [room])], TIME)
        assert room == value(name, len(span))

    def test_what_a_name_holds_never_changes(self, blobs: Blobs) -> None:
        (name,) = names(1)
        first, second, room = value("first", 5000), value("second", 5000), aligned(5000)
        assert blobs.write([(name, [first])], TIME) == [True]
        assert blobs.write([(name, [second])], TIME) == [True]
        blobs.read([(name, [room])], TIME)
        assert room == first

    def test_bytes_are_sent_in_a_turn_or_not_at_all(self, blobs: Blobs) -> None:
        other, name = names(2)
        blobs.write([(other, [value(other, 100)])], TIME)
        turns: list[str] = []

        @contextmanager
        def turn() -> Iterator[None]:
            turns.append("begins")
            yield
            turns.append("ends")

        def refused() -> AbstractContextManager[object]:
            raise LookupError("not now")

        with pytest.raises(LookupError):
            blobs.write([(name, [value(name, 9000)])], TIME, refused)
        assert blobs.find([name], TIME) == [False]
        assert blobs.tidy(0.0, TIME, lambda: None) == (0, 0), "something is left of it"
        assert blobs.write([(name, [value(name, 9000)])], TIME, turn) == [True]
        assert turns == ["begins", "ends"]
        assert blobs.find([name], TIME) == [True]

    @settings(max_examples=15, deadline=None, suppress_health_check=_SHARED)
    @given(data=st.data())
    def test_any_sizes_and_cuts(self, blobs: Blobs, data: st.DataObject) -> None:
        known = {name: data.draw(st.integers(1, 20_000)) for name in names(data.draw(st.integers(1, 6)))}
        places = st.lists(st.integers(0, 20_000), max_size=4).map(sorted)

        def cuts(span: Span) -> list[Span]:
            return cut(span, *(min(place, len(span)) for place in data.draw(places)))

        blobs.write([(name, cuts(value(name, size))) for name, size in known.items()], TIME)
        room = {name: aligned(data.draw(st.integers(1, 20_000))) for name in known}
        counts = blobs.read([(name, cuts(span)) for name, span in room.items()], TIME)
        for (name, span), count in zip(room.items(), counts, strict=True):
            assert count == min(known[name], len(span))
            assert span[:count] == value(name, known[name])[:count]

    # -- missing blobs ------------------------------------------------------------------------------------

    def test_what_is_missing_is_an_answer(self, blobs: Blobs) -> None:
        there, missing = names(2)
        blobs.write([(there, [value(there, 5000)])], TIME)
        room = aligned(5000)
        assert blobs.read([(missing, [aligned(5000)]), (there, [room]), (missing, [aligned(20 << 20)])], TIME) == [
            -1,
            5000,
            -1,
        ]
        assert room == value(there, 5000)
        assert blobs.read_part(missing, aligned(10), 0, TIME) == -1
        assert blobs.read_part(missing, aligned(10), 4096, TIME) == -1
        assert blobs.find([missing, there], TIME) == [False, True]

    def test_empty_batches(self, blobs: Blobs) -> None:
        assert blobs.read([], TIME) == []
        assert blobs.write([], TIME) == []
        assert blobs.find([], TIME) == []
        blobs.delete([], TIME)

    def test_a_blob_of_nothing(self, blobs: Blobs) -> None:
        (name,) = names(1, "empty.")
        assert blobs.create(name, b"", TIME)
        assert blobs.find([name], TIME) == [True]
        assert blobs.read([(name, [aligned(100)])], TIME) == [0]
        assert name in {name for name, _, _ in blobs.list(TIME, "empty.")}
        assert not blobs.create(name, b"", TIME)

    def test_what_was_deleted_is_gone(self, blobs: Blobs) -> None:
        gone, missing, stays = names(3)
        blobs.write([(name, [value(name, 5000)]) for name in (gone, stays)], TIME)
        blobs.delete([missing, gone], TIME)
        assert blobs.find([gone, missing, stays], TIME) == [False, False, True]
        assert blobs.read([(gone, [aligned(5000)])], TIME) == [-1]
        blobs.write([(gone, [value(gone, 6000)])], TIME)
        assert blobs.read([(gone, [aligned(8192)])], TIME) == [6000]

    def test_what_lasts_is_synced_and_what_is_missing_is_told(self, blobs: Blobs) -> None:
        there, missing = names(2)
        blobs.write([(there, [value(there, 5000)])], TIME)
        if isinstance(blobs, LastingBlobs):
            assert blobs.sync([missing, there, there], TIME) == [False, True, True]
            assert blobs.sync([], TIME) == []
            blobs.delete([there], TIME)
            assert blobs.sync([there], TIME) == [False]

    # -- concurrency --------------------------------------------------------------------------------------

    def test_of_many_that_create_a_blob_one_does(self, blobs: Blobs) -> None:
        (name,), start = names(1), threading.Barrier(8)

        def create(number: int) -> bool:
            start.wait()
            return blobs.create(name, b"number %d" % number, TIME)

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(create, range(8)))
        assert sum(won) == 1
        room = aligned(8)
        blobs.read([(name, [room])], TIME)
        assert bytes(room) == b"number %d" % won.index(True)
        assert not blobs.create(name, b"later", TIME)

    def test_many_threads(self, blobs: Blobs) -> None:
        def work(number: int) -> None:
            mine = names(6)
            blobs.write([(name, cut(value(name, 50_000 + number), 4096)) for name in mine], TIME)
            room = [aligned(50_000 + number) for _ in mine]
            assert blobs.read([(n, [span]) for n, span in zip(mine, room, strict=True)], TIME) == [50_000 + number] * 6
            assert all(span == value(n, 50_000 + number) for n, span in zip(mine, room, strict=True))
            blobs.delete(mine[:3], TIME)
            assert blobs.find(mine, TIME) == [False] * 3 + [True] * 3

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(16)))

    def test_two_that_open_it_see_each_other(self, blobs: Blobs, tmp_path: Path) -> None:
        (name,) = names(1)
        other = self.make(tmp_path / "blobs")
        try:
            blobs.write([(name, [value(name, 5000)])], TIME)
            room = aligned(5000)
            assert other.read([(name, [room])], TIME) == [5000]
            assert room == value(name, 5000)
        finally:
            other.close()
        assert blobs.find([name], TIME) == [True]

    def test_all_are_listed(self, blobs: Blobs) -> None:
        before = time.time()
        known = {name: 100 + i for i, name in enumerate(names(5, "list.a.") + names(3, "list.b."))}
        blobs.write([(name, [value(name, size)]) for name, size in known.items()], TIME)
        every = {name: (size, when) for name, size, when in blobs.list(TIME)}
        assert {name: every[name][0] for name in known} == known
        if self.dated:
            assert all(before - 2 < every[name][1] < time.time() + 2 for name in known)
        a, b = (sorted(name for name, _, _ in blobs.list(TIME, prefix)) for prefix in ("list.a.", "list.b."))
        assert (set(known) & set(a), set(known) & set(b)) == (set(list(known)[:5]), set(list(known)[5:]))
        assert all(name.startswith("list.a.") for name in a)
        blobs.delete(list(known), TIME)
        assert not set(known) & {name for name, _, _ in blobs.list(TIME)}

    def test_nothing_unfinished_is_left(self, blobs: Blobs) -> None:
        blobs.write([(name, [value(name, 5000)]) for name in names(3)], TIME)
        assert blobs.tidy(0.0, TIME, lambda: None) == (0, 0)
