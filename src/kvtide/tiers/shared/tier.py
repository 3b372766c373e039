"""Blocks in storage that other hosts use too: one tier over every kind of ``Blobs``.

A block is one blob: the same record as on a local disk, under a name derived from its key. So hosts need no agreement:
hosts that compute the same prompt derive the same names, find what others wrote, and write what is missing. A name is a
digest of the key and reveals neither tenant nor tokens nor model. The *place* of a block is a number from the same
digest and means only that the block was found once: other hosts may remove it at any time, and then it is a miss.

A failed read is not the block's fault: when the network fails, everything stays where it is. A blob that can be read
but is not a record of its block would occupy the name for ever, so the tier removes it.

Blocks that were dropped, or whose tenant was forgotten, are not served even if another host writes them again: see
drop_log.py.

Storage can hang, and no caller waits for it: see io_jobs.py. A read that hangs may still fill its span when storage
recovers, so the caller is told that it is late, and does not reuse that memory until the read ends.
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
from kvtide.serial_executor import SerialExecutor
from kvtide.tiers.base import (
    NOWHERE,
    DropDone,
    FoundBlock,
    Held,
    Identity,
    Read,
    ReadDone,
    TierStatistics,
    Wish,
    Write,
    WriteDone,
)
from kvtide.tiers.counters import TierCounters, bytes_read, read_results, size_for
from kvtide.tiers.format.encryption import OPEN, Encryption
from kvtide.tiers.format.packer import Packer, header_of
from kvtide.tiers.format.reason import UNUSABLE, Reason
from kvtide.tiers.format.record import Header, NotForAsker, Rejected, header_bytes, parse, recognise
from kvtide.tiers.format.scratch import Pool, Scratch
from kvtide.tiers.shared.blobs import Blobs, LastingBlobs
from kvtide.tiers.shared.budget import BudgetCoordinatorStatistics
from kvtide.tiers.shared.drop_log import NOT_OURS, PAGE, DropLog
from kvtide.tiers.shared.io_jobs import MOST, Batch, Jobs, Trickle

__all__ = ["Credit", "Permit", "Shared", "place_of"]

T = TypeVar("T")
R = TypeVar("R")

_SEQUENCE = 0
"""The sequence number of every record: a name has only one record, ever."""
_HEADERS = 1 << 20
"""The longest header."""
_CALL = 8 << 20
"""A call takes no more blocks once it has this many bytes."""
_ABSENT = 2.0
"""Seconds for which a block is remembered as absent."""
_REMEMBERED = 100_000
_FEW = 32
"""Blobs whose age is checked in one call."""


def place_of(name: str) -> int:
    """The place of a block, by its name in storage."""
    return int(name[:15], 16)


@dataclass(frozen=True, slots=True)
class Permit:
    """Permission to write one block."""

    until: float
    """When it ends, on the clock's monotonic time."""
    nbytes: int


class Credit(Protocol):
    """The write permissions of a process in storage with a byte budget, and its exchange with the budget
    coordinator."""

    @property
    def largest(self) -> int:
        """The largest block, in bytes, that fits into the budget at all."""

    def take(self, name: str, nbytes: int) -> Permit | None:
        """Returns permission to write a blob of ``nbytes``, which must be ended; None: not now."""

    def end(self, permit: Permit, *, failed: bool) -> None:
        """The write has ended. If it failed, some of its bytes may be in storage, or still arrive."""

    def used(self, names: Sequence[str]) -> None:
        """These blobs were read or written."""

    def coordinator_statistics(self) -> BudgetCoordinatorStatistics:
        """The last known statistics of the storage."""


class _Page(NamedTuple):
    """Blocks that are dropped together."""

    keys: list[BlockKey]
    unmet: Mapping[BlockKey, int]
    """For blocks that were not found here: the fingerprint that their blob must have. May contain other keys too."""


class _Ready(NamedTuple):
    """A record that may be written."""

    name: str
    spans: list[Span]
    permit: Permit | None
    """None where there is no byte budget."""


class Shared:
    """A tier over ``blobs``, which ``close`` closes too. See the module's docstring.

    Up to ``threads`` calls or blocks are sent at a time, each in at most ``timeout`` seconds, while as many are
    prepared or get their headers; twice as many are read, or checked. ``late`` is called with the keys of blocks whose
    read hangs. With ``credit``, nothing is written without its permission.
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
        """``scratch`` bounds the memory in which the threads compress, encrypt and decrypt blocks.

        ``log_bytes``: bytes of the storage that the drop log may take. For ``patience`` see ``DropLog``.
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
        """Found encrypted with a key that is unknown here: the next write of the block replaces the blob."""
        self._undead: set[BlockKey] = set()
        """Dropped, but storage failed to delete them: they must not be served any more."""
        self.drops = DropLog(blobs, timeout, encryption, self._delete_stale, log_bytes, patience, self._clock)
        self._calls = SerialExecutor("kvtide-shared-start")
        self.call_soon = self._calls.put
        """Run a function on a thread that storage cannot block."""
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
                self._counters.count_bytes(read=total)
            done(read_results(sizes))

        def late(items: Sequence[Read]) -> None:
            self._late([item.key for item in items])

        self._jobs.submit(Batch("read", batch, self._read_job, 0, finish, late), _together(batch))

    def write(self, batch: Sequence[Write], done: WriteDone) -> None:
        # No caller waits for a write that hangs: its block stays in DRAM until the write ends.
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
        """Drop blocks that are not here any more, and tell all nodes that use the storage to do so.

        ``who``: for each group (the end of a key), the fingerprint of the requester; None: any owner. For
        a block without a place it is not known here whose blob there may be: its header tells, and the blob of another
        owner stays.
        """
        keys = [key for key, _ in items]
        unmet = {} if who is None else {key: who[key[DIGEST:]] for key, place in items if place == NOWHERE}
        pages = [_Page(keys[i : i + PAGE], unmet) for i in range(0, len(keys), PAGE)]

        def gone(results: list[tuple[bool, bool]]) -> None:
            for page, (_, deleted) in zip(pages, results, strict=True):
                if not deleted:
                    self._undead.update(page.keys)
            self._leaving.difference_update(keys)
            done(
                [
                    announced and deleted
                    for page, (announced, deleted) in zip(pages, results, strict=True)
                    for _ in page.keys
                ]
            )

        self._leaving.update(keys)
        self._jobs.submit(Batch("drop", pages, self._withdraw, (False, False), gone), 1)

    def forget(self, tenant: bytes, done: DropDone) -> None:
        """Tell all nodes that use the storage to forget a tenant. This node has no blocks of it, and accepts none until
        ``done``."""
        self._jobs.submit(Batch("drop", [tenant], self._forget, False, done))

    def sync(self, items: Sequence[tuple[BlockKey, int]], done: DropDone) -> None:
        """See ``tiers.base.Sync``. Only for storage that is a ``LastingBlobs``."""
        self._jobs.submit(Batch("sync", [key for key, _ in items], self._sync, False, done))

    def evict(self, key: BlockKey, place: int) -> None:
        self._leaving.add(key)
        self._evicted.add((key, place))

    def scan(self) -> Iterator[Held]:
        """Nothing: blocks are found by looking them up."""
        return iter(())

    def own(self, places: npt.NDArray[np.int64], owners: npt.NDArray[np.int64]) -> None:
        """Does nothing: other hosts use the blobs too, so they have no owner here."""

    def statistics(self) -> TierStatistics:
        counters = self._counters
        there = (
            BudgetCoordinatorStatistics() if self._credit is None else self._credit.coordinator_statistics()
        )  # without a budget, blocks are not counted
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
        self._evicted.wait(2 * self._timeout)  # else nothing would ever remove the rest
        self._calls.close(self._timeout)
        self._jobs.close()
        self._blobs.close()

    # -- finding blocks of other hosts --------------------------------------------------------------------

    def find(self, options: Sequence[Wish], done: Callable[[Sequence[FoundBlock | None]], None]) -> None:
        """Look up blocks that other hosts may have written; None for those that are absent or invalid."""
        self._jobs.submit(Batch("find", options, self._find, None, done))

    def absent(self, key: BlockKey, who: Identity) -> bool:
        """Whether a recent lookup found no such block, or none that this identity may read."""
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
        """Returns for each the bytes read and verified; if not all were, 0, or ``size_for`` a reader that was
        refused."""
        starts = _starts([item.identity for item in run], packer)
        try:
            names = [self._encryption.name(item.key) for item in run]
            wanted = [
                (name, [start, item.span[: item.identity.geometry.footprint if item.sections is None else 0]])
                for name, start, item in zip(names, starts, run, strict=True)
            ]
            got = self._blobs.read(wanted, self._timeout)
        except Exception as e:  # noqa: BLE001 - see TierCounters
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
        except Exception as e:  # noqa: BLE001 - see TierCounters
            self._failed("read", e)
            self._unsound(item.key, item.identity, e)
            if isinstance(e, NotForAsker):
                return size_for(e)
            return 0  # for any error: the blob stays, and the next request finds it

    def _write(self, run: Sequence[Write], packer: Packer) -> list[int]:
        """Blocks that are written unchanged are sent together; a compressed or encrypted one stays in the packer's
        memory only until the next one."""
        sizes = [header_of(item) for item in run]
        pages = packer.header.get(sum(sizes))
        kept: set[str] = set()
        ready: list[_Ready] = []
        try:
            self.drops.fresh()
            self._delete_stale([item.key for item in run if self.drops.least(item.key, item.identity.tenant)])
            names = [self._encryption.name(item.key) for item in run]
            there = self._blobs.find(names, self._timeout) if self._credit is not None else [False] * len(run)
        except Exception as e:  # noqa: BLE001 - see TierCounters
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
            except Exception as e:  # noqa: BLE001 - see TierCounters
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
        """Returns permission to write a blob; None if there is no byte budget. Raises Rejected if it is refused."""
        if self._credit is None:
            return None
        if nbytes > self._credit.largest:
            raise Rejected(Reason.OVER_BUDGET)
        permit = self._credit.take(name, nbytes)
        if permit is None:
            raise Rejected(Reason.NO_CREDIT)
        return permit

    def _send(self, batch: Sequence[_Ready]) -> list[str]:
        """Write records; returns the names of those that are in storage now."""
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
        except Exception as e:  # noqa: BLE001 - see TierCounters
            if len(batch) > 1 and not isinstance(e, TimeoutError):
                return [name for one in batch for name in self._send([one])]
            self._failed("write", e, len(batch))
            self._end(batch, failed=not isinstance(e, Rejected))
            return []
        self._end(batch, failed=False)
        self._counters.count_bytes(written=sum(len(span) for one in batch for span in one.spans))
        return [one.name for one in batch]

    def _end(self, batch: Sequence[_Ready], *, failed: bool) -> None:
        if self._credit is not None:
            for one in batch:
                if one.permit is not None:
                    self._credit.end(one.permit, failed=failed)

    def _withdraw(self, run: Sequence[_Page], _: Packer) -> list[tuple[bool, bool]]:
        """For each page of blocks: whether the other nodes were informed, and whether the blobs were deleted."""
        results = []
        for page in run:
            try:
                others = self._others({key: page.unmet[key] for key in page.keys if key in page.unmet})
            except Exception as e:  # noqa: BLE001 - see TierCounters
                self._failed("drop", e)
                results.append((False, False))
                continue
            keys = [key for key in page.keys if key not in others]
            if not keys:
                results.append((True, True))
                continue
            announced = self._announce(self.drops.announce, keys)
            deleted = self._delete(keys)[0]
            # Storage may have had no space for the page before the blobs were deleted.
            results.append((announced or (deleted and self._announce(self.drops.announce, keys)), deleted))
        return results

    def _forget(self, run: Sequence[bytes], _: Packer) -> list[bool]:
        return [self._announce(self.drops.forget, tenant) for tenant in run]

    def _announce(self, announce: Callable[[T], None], what: T) -> bool:
        try:
            announce(what)
        except Exception as e:  # noqa: BLE001 - see TierCounters
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
        """The blocks whose blobs have another fingerprint than the requester's. Raises OSError, Rejected."""
        keys, others = list(asked), set[BlockKey]()
        for i in range(0, len(keys), _FEW):
            for key, name, start, got in self._begin(keys[i : i + _FEW]):
                try:
                    header = self._header(name, start, got)
                except NotForAsker as e:
                    # Any host can write such a blob: it must not keep a block from being dropped.
                    if e.reason in NOT_OURS:
                        continue
                    raise
                except Rejected:
                    continue
                if header.key == key and header.identity != asked[key]:
                    others.add(key)
        return others

    def _begin(self, keys: Sequence[BlockKey]) -> Iterator[tuple[BlockKey, str, Span, int]]:
        """Read the start of the existing blobs of a few blocks. Yields key, name, start and byte count. Raises OSError,
        Rejected."""
        names = {self._encryption.name(key): key for key in keys}
        pages = Scratch().get(len(names) * ALIGN)
        starts = [pages[n * ALIGN : (n + 1) * ALIGN] for n in range(len(names))]
        got = self._blobs.read([(name, [start]) for name, start in zip(names, starts, strict=True)], self._timeout)
        for (name, key), start, count in zip(names.items(), starts, got, strict=True):
            if count >= 0:
                yield key, name, start, count

    def _header(self, name: str, start: Span, got: int) -> Header:
        """The header of a blob, given its first bytes. Raises Rejected, OSError."""
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
        except Exception as e:  # noqa: BLE001 - see TierCounters
            self._failed("drop", e)
            return [False] * len(run)
        return [True] * len(run)

    def _sync(self, run: Sequence[BlockKey], packer: Packer) -> list[bool]:
        assert isinstance(self._blobs, LastingBlobs)
        try:
            good = self._blobs.sync([self._encryption.name(key) for key in run], self._timeout)
        except Exception as e:  # noqa: BLE001 - see TierCounters
            return self._apart(self._sync, run, packer, "sync", e, failed=False)
        return [fine and not self._goes(key) for key, fine in zip(run, good, strict=True)]

    def _find(self, run: Sequence[Wish], packer: Packer) -> list[FoundBlock | None]:
        """Reads the headers: only they tell whether a blob is that block, and when it expires."""
        starts = _starts([who for _, who in run], packer)
        try:
            if not self.drops.looked:
                self.drops.hear()
            names = [self._encryption.name(key) for key, _ in run]
            got = self._blobs.read([(n, [s]) for n, s in zip(names, starts, strict=True)], self._timeout)
        except Exception as e:  # noqa: BLE001 - see TierCounters
            for key, _ in run:
                self._miss(key)
            return self._apart(self._find, run, packer, "find", e, None)
        return [self._entry(*of) for of in zip(run, names, starts, got, strict=True)]

    def _entry(self, wish: Wish, name: str, start: Span, got: int) -> FoundBlock | None:
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
                raise Rejected(Reason.EXPIRED)  # deleting it makes space for the next write
            return FoundBlock(place_of(name), header.parent, header.depth, header.expiry, header.priority)
        except Exception as e:  # noqa: BLE001 - see TierCounters
            if not (isinstance(e, Rejected) and e.reason is Reason.GONE):
                self._failed("find", e)
            self._unsound(key, who, e)
            return None

    def _goes(self, key: BlockKey) -> bool:
        return key in self._leaving or key in self._undead

    def _unsound(self, key: BlockKey, who: Identity, e: Exception) -> None:
        """Remember that a block is absent, unreadable for now or for good, or not readable by this identity."""
        if isinstance(e, NotForAsker):
            self._miss(_refused(key, who))  # its owner must find it at once
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
        """A call for several items failed. Not all need be bad, so retry each alone, unless there is no time for
        that."""
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
    """The key under which a block is remembered as not readable by an identity."""
    return BlockKey(key + who.namespace + who.tenant)


def _together(batch: Sequence[Read] | Sequence[Write]) -> int:
    """How many of these blocks one call may move: enough to make the call's overhead small, few enough to end in
    time."""
    return min(MOST, _CALL // max([1, *(len(item.span) for item in batch)]))


def _starts(run: Sequence[Identity], packer: Packer) -> list[Span]:
    """Memory for the headers of the records of such blocks."""
    sizes = [header_bytes(who.geometry.sections) for who in run]
    pages = packer.header.get(sum(sizes))
    return [pages[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
