"""Blocks in storage that other hosts use too: the one tier over every kind of ``Blobs``.

A block is one blob, the same record as on a local disk, under a name that follows from its key. So there is nothing to
agree on between hosts: whoever computes the same prompt makes the same names, finds what others wrote, and writes what
nobody has. A name is a digest of the key and tells neither tenant nor tokens nor model. The *place* of a block is a
number from the same digest, and says no more than that it was found once: others may remove it at any time, and then
it is a miss.

What cannot be read is not the fault of a block: a network that fails leaves everything where it is. What can be read
and is no record of that block is rubbish that would keep its name for ever; the tier removes it.

What was dropped, or whose tenant was forgotten, is not served, whoever writes it again: see drop_log.py.

Storage can hang, and nobody waits for it: see jobs.py. A read that hangs may still fill its span when storage wakes up,
so the caller is told that it is late, and keeps that memory aside until the answer comes.
"""

from __future__ import annotations

import errno
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvtide.block import ALIGN, DIGEST, BlockKey, Span
from kvtide.clock import Clock, SystemClock
from kvtide.tiers.base import NOWHERE, DropDone, Held, Identity, Read, ReadDone, TierStatistics, Write, WriteDone
from kvtide.tiers.callback_thread import CallbackThread
from kvtide.tiers.counters import TierCounters, bytes_read, read_results, size_for
from kvtide.tiers.format.encryption import OPEN, Encryption
from kvtide.tiers.format.packer import Packer, header_of
from kvtide.tiers.format.reason import UNUSABLE, Reason
from kvtide.tiers.format.record import Header, NotForAsker, Rejected, header_bytes, parse, recognise
from kvtide.tiers.format.scratch import Pool, Scratch
from kvtide.tiers.shared.blobs import Blobs, LastingBlobs
from kvtide.tiers.shared.budget import BudgetCoordinatorStatistics
from kvtide.tiers.shared.drop_log import NOT_OURS, PAGE, DropLog
from kvtide.tiers.shared.jobs import Batch, Jobs, Trickle

__all__ = ["BlobEntry", "Credit", "Permit", "Shared", "Wish", "place_of"]

T = TypeVar("T")
R = TypeVar("R")

_SEQUENCE = 0
"""Of every record: a name has one record, ever."""
_HEADERS = 1 << 20
"""No header is longer."""
_CALL = 8 << 20
"""Bytes after which a call takes no more blocks."""
_ABSENT = 2.0
"""Seconds for which it is remembered that a block is not there."""
_REMEMBERED = 100_000
_FEW = 32
"""Blobs whose age is looked at in one call."""


def place_of(name: str) -> int:
    """The place of a block, by its name in storage."""
    return int(name[:15], 16)


@dataclass(frozen=True, slots=True)
class Permit:
    """The right to write one block."""

    until: float
    """When it ends, on the clock's monotonic time."""
    nbytes: int


class Credit(Protocol):
    """What a process may write into a storage with a byte budget, and what it tells and hears of it."""

    @property
    def largest(self) -> int:
        """The most bytes that a block may have so that it fits into the budget at all."""

    def take(self, name: str, nbytes: int) -> Permit | None:
        """The right to write a blob of so many bytes; None: not now. It is to be ended."""

    def end(self, permit: Permit, *, failed: bool) -> None:
        """The write has ended. If it failed, some of its bytes may be there, or still come."""

    def used(self, names: Sequence[str]) -> None:
        """These blobs were read or written."""

    def told(self) -> BudgetCoordinatorStatistics:
        """What is there, as far as anybody knows."""


class BlobEntry(NamedTuple):
    """What is known of a block that somebody has written."""

    place: int
    parent: bytes
    depth: int
    expiry: float
    priority: int


Wish = tuple[BlockKey, Identity]


class _Page(NamedTuple):
    """Blocks that are dropped together."""

    keys: list[BlockKey]
    unmet: Mapping[BlockKey, int]
    """Of these, perhaps among others: whose they must be, by fingerprint."""


class _Ready(NamedTuple):
    """A record that may be written."""

    name: str
    spans: list[Span]
    permit: Permit | None
    """None where there is no byte budget."""


class Shared:
    """A tier over ``blobs``, which it closes in the end. See the module's text.

    The bytes of ``threads`` blocks, or calls, are sent at a time, each in at most ``timeout`` seconds, while as many
    are prepared or named; twice as many are read, or checked. ``late`` is told the keys of blocks whose read hangs.
    With ``credit`` nothing is written that it does not allow.
    """

    def __init__(
        self,
        blobs: Blobs,
        *,
        threads: int = 8,
        timeout: float = 10.0,
        compression: str = "raw",
        encryption: Encryption = OPEN,
        credit: Credit | None = None,
        late: Callable[[Sequence[BlockKey]], None] = lambda _: None,
        clock: Clock | None = None,
        scratch: Pool | None = None,
        log_bytes: int = sys.maxsize,
        patience: float = 30.0,
    ) -> None:
        """``scratch``: what bounds the memory that its threads compress, seal and open blocks in.

        ``log_bytes``: bytes of the storage that the log of drops may take. For ``patience`` see ``DropLog``.
        """
        self._blobs = blobs
        self._copied = bool(getattr(blobs, "copies", False))
        self._timeout = timeout
        self._encryption = encryption
        self._credit = credit
        self._late = late
        self._clock = clock or SystemClock()
        self._counters = TierCounters()
        self._writes = threading.Semaphore(threads)
        self._absent: dict[BlockKey, float] = {}
        self._leaving: set[BlockKey] = set()
        """Evicted or dropped, and not yet deleted."""
        self._evicted = Trickle(self.drop, lambda items: self._leaving.difference_update(key for key, _ in items))
        self._keyless: set[BlockKey] = set()
        """Found sealed with a key that nobody here knows: the next to write the block replaces that."""
        self._undead: set[BlockKey] = set()
        """Dropped, but storage refused to delete them: they must not be served from here any more."""
        self.drops = DropLog(blobs, timeout, encryption, self._delete_stale, log_bytes, patience, self._clock)
        self._calls = CallbackThread("kvtide-shared-start")
        self.call_soon = self._calls.put
        """Call something on a thread that no storage can hold up."""
        try:
            self._jobs = Jobs(
                "shared",
                [Packer(compression, encryption, scratch) for _ in range(2 * threads)],
                timeout,
                self._no_answer,
                self._clock,
            )
        except BaseException:
            self._calls.close(0)
            raise

    def __repr__(self) -> str:
        return f"<Shared over {self._blobs!r}{', which hangs' if self._jobs.hangs else ''}>"

    # -- the contract of a tier ---------------------------------------------------------------------------

    def read(self, batch: Sequence[Read], done: ReadDone) -> None:
        def finish(sizes: list[int]) -> None:
            if total := bytes_read(sizes):
                self._counters.moved(read=total)
            done(read_results(sizes))

        def late(items: Sequence[Read]) -> None:
            self._late([item.key for item in items])

        self._jobs.submit(Batch("read", batch, self._read_job, 0, finish, late), _together(batch))

    def write(self, batch: Sequence[Write], done: WriteDone) -> None:
        # A write that hangs is late to nobody: its block is in DRAM, and held there until the answer comes.
        job = Batch("write", batch, self._write_job, NOWHERE, done, late=lambda _: None)
        self._jobs.submit(job, _together(batch))

    def drop(self, items: Sequence[tuple[BlockKey, int]], done: DropDone) -> None:
        keys = [key for key, _ in items]

        def gone(results: list[bool]) -> None:
            self._undead.update(key for key, deleted in zip(keys, results, strict=True) if not deleted)
            self._leaving.difference_update(keys)
            done(results)

        self._leaving.update(keys)
        self._jobs.submit(Batch("drop", keys, self._delete, False, gone))

    def withdraw(
        self, items: Sequence[tuple[BlockKey, int]], done: DropDone, who: Mapping[bytes, int] | None = None
    ) -> None:
        """Drop blocks that are not here any more, and let all who use the storage do so.

        ``who``: by what ends their keys, the fingerprint of whoever asks; None: whosever they are. Of a block at no
        place nobody here knows whose blob there may be: its header says so, and another's stays.
        """
        keys = [key for key, _ in items]
        unmet = {} if who is None else {key: who[key[DIGEST:]] for key, place in items if place == NOWHERE}
        pages = [_Page(keys[i : i + PAGE], unmet) for i in range(0, len(keys), PAGE)]

        def gone(results: list[tuple[bool, bool]]) -> None:
            for page, (_, deleted) in zip(pages, results, strict=True):
                if not deleted:
                    self._undead.update(page.keys)
            self._leaving.difference_update(keys)
            done([told and deleted for page, (told, deleted) in zip(pages, results, strict=True) for _ in page.keys])

        self._leaving.update(keys)
        self._jobs.submit(Batch("drop", pages, self._withdraw, (False, False), gone), 1)

    def forget(self, tenant: bytes, done: DropDone) -> None:
        """Let all who use the storage forget a tenant of whom nothing is here, nor comes in until ``done``."""
        self._jobs.submit(Batch("drop", [tenant], self._forget, False, done))

    def sync(self, items: Sequence[tuple[BlockKey, int]], done: DropDone) -> None:
        """See ``tiers.base.Sync``. Only over storage that is a ``LastingBlobs``."""
        self._jobs.submit(Batch("sync", [key for key, _ in items], self._sync, False, done))

    def evict(self, key: BlockKey, place: int) -> None:
        self._leaving.add(key)
        self._evicted.add((key, place))

    def scan(self) -> Iterator[Held]:
        """Nothing: what is there is found by asking for it."""
        return iter(())

    def own(self, places: npt.NDArray[np.int64], owners: npt.NDArray[np.int64]) -> None:
        """Nobody's: others use it too."""

    def statistics(self) -> TierStatistics:
        counters = self._counters
        there = (
            BudgetCoordinatorStatistics() if self._credit is None else self._credit.told()
        )  # without a budget nobody counts
        with counters.lock:
            return TierStatistics(
                blocks=there.blocks,
                bytes_used=there.bytes_used,
                bytes_taken=there.bytes_used,
                budget=there.budget,
                bytes_read=counters.read,
                bytes_written=counters.written,
                failed_reads=counters.failures["read"],
                failed_writes=counters.failures["write"],
                reasons=tuple(sorted(counters.reasons.items())),
                errors_in_a_row=counters.errors,
            )

    def close(self) -> None:
        self._evicted.wait(2 * self._timeout)  # else nobody would ever remove the rest
        self._calls.close(self._timeout)
        self._jobs.close()
        self._blobs.close()

    # -- what others wrote --------------------------------------------------------------------------------

    def find(self, options: Sequence[Wish], done: Callable[[Sequence[BlobEntry | None]], None]) -> None:
        """Where blocks are that others may have written; None for those that are not there, or are not sound."""
        self._jobs.submit(Batch("find", options, self._find, None, done))

    def absent(self, key: BlockKey, who: Identity) -> bool:
        """Whether a block was asked for a moment ago, and was not there, or not for blocks of such an identity."""
        until = max(self._absent.get(key, 0.0), self._absent.get(_refused(key, who), 0.0))
        return until > self._clock.monotonic()

    def _miss(self, key: BlockKey) -> None:
        if len(self._absent) >= _REMEMBERED:
            self._absent.clear()
        self._absent[key] = self._clock.monotonic() + _ABSENT

    # -- the I/O threads ----------------------------------------------------------------------------------

    def _read_job(self, run: Sequence[Read], packer: Packer) -> list[int]:
        try:
            if self._copied:
                packer.workspace.begin(sum(len(item.span) for item in run) + packer.to_open(run))
            return self._read(run, packer)
        finally:
            packer.workspace.end()

    def _write_job(self, run: Sequence[Write], packer: Packer) -> list[int]:
        try:
            packer.workspace.begin(max(packer.to_write([item]) for item in run))
            return self._write(run, packer)
        finally:
            packer.workspace.end()

    def _read(self, run: Sequence[Read], packer: Packer) -> list[int]:
        """Of each, how many bytes were read and verified; if not all was, 0, or ``size_for`` a refused asker."""
        starts = _starts([item.identity for item in run], packer)
        try:
            names = [self._encryption.name(item.key) for item in run]
            wanted = [
                (name, [start, item.span[: item.identity.geometry.footprint if item.sections is None else 0]])
                for name, start, item in zip(names, starts, run, strict=True)
            ]
            got = self._blobs.read(wanted, self._timeout)
        except Exception as e:  # noqa: BLE001 - see Tally
            return self._apart(self._read, run, packer, "read", e, 0)
        sizes = [
            self._unpack(item, name, start, count, packer)
            for item, name, start, count in zip(run, names, starts, got, strict=True)
        ]
        if self._credit is not None:
            self._credit.used([name for name, size in zip(names, sizes, strict=True) if size > 0])
        return sizes

    def _unpack(self, item: Read, name: str, start: Span, got: int, packer: Packer) -> int:
        def fetch(into: Sequence[Span], offset: int) -> int:
            total = 0
            for span in into:
                if span:
                    total += max(0, self._blobs.read_part(name, span, offset + total, self._timeout))
            return total

        try:
            if got < 0 or item.place != place_of(name) or self._goes(item.key):
                raise Rejected(Reason.GONE)
            if self.drops.least(item.key, item.identity.tenant):
                self._check_age(self._header(name, start, got), item.key)
            room = _HEADERS + item.identity.geometry.footprint
            return packer.unpack(item, _SEQUENCE, start, got, room, fetch)
        except Exception as e:  # noqa: BLE001 - see Tally
            self._failed("read", e)
            self._unsound(item.key, item.identity, e)
            if isinstance(e, NotForAsker):
                return size_for(e)
            return 0  # whatever it is: the blob stays, and whoever asks again finds it

    def _write(self, run: Sequence[Write], packer: Packer) -> list[int]:
        """Together, where they are written as they lie: a packed one is in the packer's memory until the next."""
        sizes = [header_of(item) for item in run]
        pages = packer.header.get(sum(sizes))
        kept: set[str] = set()
        ready: list[_Ready] = []
        try:
            self.drops.fresh()
            self._delete_stale([item.key for item in run if self.drops.least(item.key, item.identity.tenant)])
            names = [self._encryption.name(item.key) for item in run]
            there = self._blobs.find(names, self._timeout) if self._credit is not None else [False] * len(run)
        except Exception as e:  # noqa: BLE001 - see Tally
            self._failed("write", e, len(run))
            return [NOWHERE] * len(run)
        for item, name, size, end, found in zip(run, names, sizes, accumulate(sizes), there, strict=True):
            try:
                if item.key in self._leaving or (item.key in self._undead and not self._delete([item.key])[0]):
                    raise Rejected(Reason.LEAVING)
                self._undead.discard(item.key)
                if item.since < self.drops.least(item.key, item.identity.tenant):
                    self.drops.refused = True
                    raise Rejected(Reason.DROPPED)
                if item.key in self._keyless:
                    if not self._delete([item.key])[0]:
                        raise Rejected(Reason.LEAVING)
                    self._keyless.discard(item.key)
                elif found:
                    kept.add(name)
                    continue
                packed = packer.pack(item)
                page = pages[end - size : end]
                packed.name(page, _SEQUENCE, self._clock.time())
                ready.append(_Ready(name, [page, packed.payload], self._permit(name, packed.nbytes)))
            except Exception as e:  # noqa: BLE001 - see Tally
                self._failed("write", e)
                continue
            if packed.payload is not item.span:
                kept.update(self._send(ready))
                ready = []
        kept.update(self._send(ready))
        for key in [item.key for item, name in zip(run, names, strict=True) if name in kept]:
            self._absent.pop(key, None)
        self.drops.wrote(item.key for item, name in zip(run, names, strict=True) if name in kept)
        if self._credit is not None:
            self._credit.used(list(kept))
        return [place_of(name) if name in kept else NOWHERE for name in names]

    def _permit(self, name: str, nbytes: int) -> Permit | None:
        """The right to write a blob; None where there is no byte budget. Raises Rejected where there is no right."""
        if self._credit is None:
            return None
        if nbytes > self._credit.largest:
            raise Rejected(Reason.OVER_BUDGET)
        permit = self._credit.take(name, nbytes)
        if permit is None:
            raise Rejected(Reason.NO_CREDIT)
        return permit

    def _send(self, batch: Sequence[_Ready]) -> list[str]:
        """Write records; the names of those that are there now."""
        if not batch:
            return []
        until = min((one.permit.until for one in batch if one.permit is not None), default=math.inf)

        @contextmanager
        def turn() -> Iterator[None]:
            with self._writes:
                if self._clock.monotonic() >= until:
                    raise Rejected(Reason.CREDIT_ENDED)
                if self.drops.late:  # this process was stopped, perhaps for long
                    self.drops.refused = True
                    raise Rejected(Reason.DROPS_UNKNOWN)
                yield

        try:
            self._blobs.write([(one.name, one.spans) for one in batch], self._timeout, turn)
        except Exception as e:  # noqa: BLE001 - see Tally
            if len(batch) > 1 and not isinstance(e, TimeoutError):
                return [name for one in batch for name in self._send([one])]
            self._failed("write", e, len(batch))
            self._end(batch, failed=not isinstance(e, Rejected))
            return []
        self._end(batch, failed=False)
        self._counters.moved(written=sum(len(span) for one in batch for span in one.spans))
        return [one.name for one in batch]

    def _end(self, batch: Sequence[_Ready], *, failed: bool) -> None:
        if self._credit is not None:
            for one in batch:
                if one.permit is not None:
                    self._credit.end(one.permit, failed=failed)

    def _withdraw(self, run: Sequence[_Page], _: Packer) -> list[tuple[bool, bool]]:
        """Of each page of blocks: whether the others were told, and whether the blobs were deleted."""
        results = []
        for page in run:
            try:
                others = self._others({key: page.unmet[key] for key in page.keys if key in page.unmet})
            except Exception as e:  # noqa: BLE001 - see Tally
                self._failed("drop", e)
                results.append((False, False))
                continue
            keys = [key for key in page.keys if key not in others]
            if not keys:
                results.append((True, True))
                continue
            told = self._tell(self.drops.announce, keys)
            deleted = self._delete(keys)[0]
            # There may have been no room for a page before.
            results.append((told or (deleted and self._tell(self.drops.announce, keys)), deleted))
        return results

    def _forget(self, run: Sequence[bytes], _: Packer) -> list[bool]:
        return [self._tell(self.drops.forget, tenant) for tenant in run]

    def _tell(self, tell: Callable[[T], None], what: T) -> bool:
        try:
            tell(what)
        except Exception as e:  # noqa: BLE001 - see Tally
            self._failed("drop", e)
            return False
        return True

    def _delete_stale(self, keys: Sequence[BlockKey]) -> None:
        """Delete blobs of copies from before a drop. Raises OSError, Rejected."""
        for i in range(0, len(keys), _FEW):
            stale = []
            for key, name, start, got in self._begin(keys[i : i + _FEW]):
                try:
                    self._check_age(self._header(name, start, got), key)
                except NotForAsker:
                    continue
                except Rejected as e:
                    if e.reason in UNUSABLE:
                        stale.append(name)
            self._blobs.delete(stale, self._timeout)

    def _others(self, asked: Mapping[BlockKey, int]) -> set[BlockKey]:
        """The blocks whose blobs are of others than those that ask, by fingerprint. Raises OSError, Rejected."""
        keys, others = list(asked), set[BlockKey]()
        for i in range(0, len(keys), _FEW):
            for key, name, start, got in self._begin(keys[i : i + _FEW]):
                try:
                    header = self._header(name, start, got)
                except NotForAsker as e:
                    if (
                        e.reason in NOT_OURS
                    ):  # anybody can write such a blob: it must not keep a block from being dropped
                        continue
                    raise
                except Rejected:
                    continue
                if header.key == key and header.identity != asked[key]:
                    others.add(key)
        return others

    def _begin(self, keys: Sequence[BlockKey]) -> Iterator[tuple[BlockKey, str, Span, int]]:
        """How those blobs begin that there are of a few blocks, with their names, and how many bytes came. Raises
        OSError, Rejected."""
        names = {self._encryption.name(key): key for key in keys}
        pages = Scratch().get(len(names) * ALIGN)
        starts = [pages[n * ALIGN : (n + 1) * ALIGN] for n in range(len(names))]
        got = self._blobs.read([(name, [start]) for name, start in zip(names, starts, strict=True)], self._timeout)
        for (name, key), start, count in zip(names.items(), starts, got, strict=True):
            if count >= 0:
                yield key, name, start, count

    def _header(self, name: str, start: Span, got: int) -> Header:
        """The header of a blob that begins so. Raises Rejected, OSError."""
        size = recognise(start[:got])
        if size > len(start):
            start = Scratch().get(min(size, _HEADERS))
            got = self._blobs.read_part(name, start, 0, self._timeout)
        self._encryption.check(start)
        return parse(start[:got], self._encryption.open_header)

    def _check_age(self, header: Header, key: BlockKey) -> None:
        """Raises Rejected for a copy from before a drop."""
        if header.heard < self.drops.least(key, header.tenant):
            raise Rejected(Reason.DROPPED)

    def _delete(self, run: Sequence[BlockKey], _: Packer | None = None) -> list[bool]:
        try:
            self._blobs.delete([self._encryption.name(key) for key in run], self._timeout)
        except Exception as e:  # noqa: BLE001 - see Tally
            self._failed("drop", e)
            return [False] * len(run)
        return [True] * len(run)

    def _sync(self, run: Sequence[BlockKey], packer: Packer) -> list[bool]:
        assert isinstance(self._blobs, LastingBlobs)
        try:
            good = self._blobs.sync([self._encryption.name(key) for key in run], self._timeout)
        except Exception as e:  # noqa: BLE001 - see Tally
            return self._apart(self._sync, run, packer, "sync", e, failed=False)
        return [fine and not self._goes(key) for key, fine in zip(run, good, strict=True)]

    def _find(self, run: Sequence[Wish], packer: Packer) -> list[BlobEntry | None]:
        """By their headers: only they say whether a blob is that block, and how long it lives."""
        starts = _starts([who for _, who in run], packer)
        try:
            if not self.drops.looked:
                self.drops.hear()
            names = [self._encryption.name(key) for key, _ in run]
            got = self._blobs.read([(n, [s]) for n, s in zip(names, starts, strict=True)], self._timeout)
        except Exception as e:  # noqa: BLE001 - see Tally
            for key, _ in run:
                self._miss(key)
            return self._apart(self._find, run, packer, "find", e, None)
        return [self._entry(*of) for of in zip(run, names, starts, got, strict=True)]

    def _entry(self, wish: Wish, name: str, start: Span, got: int) -> BlobEntry | None:
        key, who = wish
        try:
            if got < 0 or self._goes(key):
                raise Rejected(Reason.GONE)
            header = self._header(name, start, got)
            if header.key != key:
                raise Rejected(Reason.ANOTHER_BLOCK)
            self._check_age(header, key)
            if header.identity != who.fingerprint:
                raise NotForAsker(Reason.ANOTHER_OWNER)
            if header.expiry <= self._clock.time():
                raise Rejected(Reason.EXPIRED)  # whoever finds it makes room for the next
            return BlobEntry(place_of(name), header.parent, header.depth, header.expiry, header.priority)
        except Exception as e:  # noqa: BLE001 - see Tally
            if not (isinstance(e, Rejected) and e.reason is Reason.GONE):
                self._failed("find", e)
            self._unsound(key, who, e)
            return None

    def _goes(self, key: BlockKey) -> bool:
        return key in self._leaving or key in self._undead

    def _unsound(self, key: BlockKey, who: Identity, e: Exception) -> None:
        """There is no such block, or none that can be read: for a moment, or for good; or not for this asker."""
        if isinstance(e, NotForAsker):
            self._miss(_refused(key, who))  # whose it is must find it at once
            if e.reason is Reason.KEY_UNKNOWN:
                # Anybody can write such a blob. Another host may know the key, so it stays until there is a better one.
                if len(self._keyless) >= _REMEMBERED:
                    self._keyless.clear()
                self._keyless.add(key)
            return
        self._miss(key)
        if isinstance(e, Rejected) and e.reason in UNUSABLE:
            self._delete([key])

    def _apart(
        self,
        do: Callable[[Sequence[T], Packer], list[R]],
        run: Sequence[T],
        packer: Packer,
        verb: str,
        e: Exception,
        failed: R,
    ) -> list[R]:
        """A call for several failed: not all need be bad, so each for itself, unless there is no time for that."""
        if len(run) > 1 and not isinstance(e, TimeoutError):
            return [do([one], packer)[0] for one in run]
        self._failed(verb, e, len(run))
        return [failed] * len(run)

    def _failed(self, verb: str, e: Exception, count: int = 1) -> None:
        self._counters.failed(verb, e, count)
        if isinstance(e, TimeoutError):
            self._jobs.rest()

    def _no_answer(self, verb: str, count: int) -> None:
        self._counters.failed(verb, TimeoutError(errno.ETIMEDOUT, "storage does not answer"), count)


def _refused(key: BlockKey, who: Identity) -> BlockKey:
    """Under which it is remembered that a block is not for an asker."""
    return BlockKey(key + who.namespace + who.tenant)


def _together(batch: Sequence[Read] | Sequence[Write]) -> int:
    """How many of these blocks one call may move: so many that asking costs little, and it ends in time anywhere."""
    return _CALL // max([1, *(len(item.span) for item in batch)])


def _starts(run: Sequence[Identity], packer: Packer) -> list[Span]:
    """Memory for the headers of the records of such blocks."""
    sizes = [header_bytes(who.geometry.sections) for who in run]
    pages = packer.header.get(sum(sizes))
    return [pages[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
