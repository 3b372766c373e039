"""The drop log: tells all nodes that use a storage which blocks were dropped and which tenants forgotten. It consists
of numbered pages, in the storage itself.

A drop deletes blobs, but other nodes may have the block in memory and would write it again. So a node that drops blocks
writes a *page* first, and then deletes the blobs. A page holds the keys of blocks, or the tag of one tenant::

    dropped.N             N = 1, 2, 3 ...; of all nodes that try to write page N one succeeds, the others try the next
    forgotten.TAG.N       a tenant was forgotten by page N; kept for good, the last of each tenant

*Numbers instead of clocks.* Every process knows the last page it has applied. It advances to page N only after it has
dropped what page N names from its index, memory and disk. A block that it submits for writing then has the number in
its record (``Write.since``, ``Header.heard``): this copy was not among what was dropped up to page N. So a blob whose
record has a lower number than the page that names its key, or its tenant, is a copy from before the drop, no matter
which node wrote it and when: it is a miss, and any node that finds it deletes it. A blob with the same number, or a
higher one, was stored afterwards. Clocks need not agree, and a dropped block can be stored again without waiting.

*A node that writes before it has read a page* writes a record with a lower number. When it reads the page, it deletes
the blobs of the blocks that the page names (for a tenant's page: outdated blobs of all blocks) that it has written
since it last read the log. If it dies before, the other nodes refuse the blob, and before a page is removed from the
log the blobs that it names are checked once more. A node that has not read the log for long reads it
before it writes, or does not write.

*Cheap to follow.* Whether there is a page N+1 is one query for two names, a few times in a lease. All pages are listed
at the start, when page N is gone, and now and then.

*Bounded.* Some hundred pages are kept, of a few megabytes together, for a day. The oldest are removed first and the
last one never is. So a node that finds page N, and no page N+1, has missed nothing. A node that finds only later pages
cannot know what it has missed, and drops everything it has. That is always safe: it costs misses. A node's own
directory records the last page applied to its blocks (drop_positions.py), so that this holds for a process that was
closed, too.

*Other writers.* Where records are encrypted, so are pages, and an unencrypted one is not a page. A blob that is not a
page, or too long, is ignored. Without encryption, anyone who can write to the storage can cause blocks to be dropped;
they could delete them too. A write that hangs for longer than pages are kept, and completes then, is not covered.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import logging
import random
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvtide.block import BlockKey
from kvtide.clock import Clock, SystemClock
from kvtide.security.key_ring import OWN
from kvtide.tiers.format.encryption import Encryption
from kvtide.tiers.format.reason import Reason
from kvtide.tiers.format.record import Rejected
from kvtide.tiers.format.scratch import Scratch
from kvtide.tiers.nvme.drop_positions import DropLogPositions
from kvtide.tiers.shared.blobs import Blobs, reason_of

__all__ = ["NOT_OURS", "PAGE", "DropLog", "DropLogReader", "DropNotice"]

log = logging.getLogger("kvtide.drops")

PAGE = 1024
"""Blocks of one page."""
_KEY = 48
"""Bytes of a key in a page, padded with zeros."""
_MAGIC = b"KVDROP\r\n"
_SEAL = 48
"""Bytes that name key and salt of an encrypted page; zeros: it is not encrypted."""
_START = len(_MAGIC) + _SEAL
_LONGEST = _START + 9 + PAGE * _KEY + 16
_KEPT = 2048
"""Maximum number of pages that are kept."""
_KEPT_BYTES = 3 << 20
"""Maximum bytes of all pages together."""
_KEPT_SECONDS = 86_400.0
"""Maximum age of a page, by the storage's clock, where it has one."""
_REMEMBERED = 1 << 16
"""Blocks of pages that are remembered: as many as those pages can name, or others could fill this process's memory."""
_LOOK = 60.0
"""Seconds after which all pages are listed."""
_MOMENT = 1.0
"""Seconds that a store waits for the first reading of the log when it is opened."""
_TOGETHER = 64
"""Pages that are read, or removed, at a time."""
_TRIES = 16
"""How often a page gets another number because another node wrote that one first."""
_PAGES, _FORGOTTEN = "dropped.", "forgotten."
_LAST = 10**18 - 1
NOT_OURS = frozenset({Reason.KEY_UNKNOWN, Reason.KEY_DESTROYED, Reason.KEY_NOT_HERE})
"""Why a page of other nodes cannot be decrypted. Their blocks have other names than those of this process."""
_TENANTS = 1 << 20
"""Forgotten tenants that are remembered; there are more only if something else creates such names."""


def _page(number: int) -> str:
    return f"{_PAGES}{number:018d}"


def _numbered(name: str) -> int | None:
    """The number of the page of that name; None: something else wrote the blob."""
    number = name.removeprefix(_PAGES)
    return int(number) if len(number) == 18 and number.isascii() and number.isdecimal() else None


def _nothing(_: object) -> None:
    pass


@dataclass(slots=True)
class DropNotice:
    """Callbacks for what the log says. Each returns when the blocks are not here any more, or are marked for
    removal."""

    dropped: Callable[[Sequence[BlockKey]], None] = _nothing
    """Blocks were dropped."""
    forgotten: Callable[[bytes], None] = _nothing
    """A tenant was forgotten."""
    missed: Callable[[], None] = lambda: None
    """Pages were missed: it is unknown which blocks were dropped."""
    heard: Callable[[], None] = lambda: None
    """Pages were applied: blocks that were refused meanwhile may be written now."""


class DropLog:
    """One process's view of the drop log of one storage. Thread-safe; methods that access storage say so.

    ``stale`` is called with keys that may have blobs older than this log allows: it deletes those. ``room`` limits the
    bytes of pages in the storage. After ``patience`` seconds without reading the log, a writer must read it first.
    """

    def __init__(
        self,
        blobs: Blobs,
        timeout: float,
        encryption: Encryption,
        stale: Callable[[Sequence[BlockKey]], None] = _nothing,
        room: int = _KEPT_BYTES,
        patience: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        self._blobs = blobs
        self._timeout = timeout
        self._encryption = encryption
        self._stale = stale
        self._room = max(_LONGEST, min(room, _KEPT_BYTES))
        self._patience = patience
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self.told = DropNotice()
        self.number = 0
        """The last page applied: the blocks of all pages up to it were removed here, except those stored since."""
        self.drop_positions: DropLogPositions | None = None
        """Of a directory whose blocks outlive this process."""
        self.looked = False
        """Whether the log was read at all."""
        self.refused = False
        """Whether the write of a block was refused because it was submitted before a page was applied; it may still be
        in memory."""
        self._heard_at = 0.0
        self._listed_at = 0.0
        self._pages: dict[int, tuple[BlockKey, ...]] = {}
        """The blocks of pages that are kept."""
        self._keys: dict[BlockKey, int] = {}
        """By key: the last page that names it."""
        self._tenants: dict[bytes, int] = {}
        """By tag of a forgotten tenant: the page."""
        self._recent: dict[BlockKey, None] = {}
        """Blocks that were written since the log was last read."""

    def __repr__(self) -> str:
        return f"<DropLog, page {self.number}>"

    def __str__(self) -> str:
        return str(self._blobs)

    def least(self, key: BlockKey, tenant: bytes = b"") -> int:
        """The lowest page number that the record of a block may have; 0: any."""
        return max(self._keys.get(key, 0), self._tenants.get(tenant, 0))

    def wrote(self, keys: Iterable[BlockKey]) -> None:
        """These blocks were written."""
        self._recent.update(dict.fromkeys(keys))

    @property
    def late(self) -> bool:
        """Whether the log must be read again before anything may be written."""
        return not self.looked or self._clock.monotonic() - self._heard_at > self._patience

    def fresh(self) -> None:
        """Read the log if ``late``, before a write. Accesses storage then. Raises OSError, Rejected."""
        if self.late:
            with self._turn():
                # before the first page there is none whose absence would show that pages were missed
                self._hear(look=True)

    def hear(self) -> None:
        """Apply new pages. Accesses storage. Raises OSError, Rejected."""
        with self._turn():
            self._hear()

    def step(self) -> None:
        """``hear``, and now and then remove old pages. Accesses storage. Raises OSError, Rejected."""
        # At a random time in each process: one of many removes them, and the others find that they are gone.
        look = self._clock.monotonic() >= self._listed_at + _LOOK * random.uniform(1.0, 2.0)
        with self._turn():
            self._hear(look=look)
            if look:
                self._trim()
            if self.drop_positions is not None:
                self.drop_positions.move(repr(self._blobs), self.number)
        if self.refused:
            self.refused = False
            self.told.heard()

    def announce(self, keys: Sequence[BlockKey]) -> None:
        """Write a page of blocks, at most ``PAGE``, that are not here any more. Accesses storage. Raises OSError,
        Rejected."""
        data = b"".join(key.ljust(_KEY, b"\0") for key in keys)
        with self._turn():
            self._enter(self._write(b"K" + data), tuple(keys))

    def forget(self, tenant: bytes) -> None:
        """Write a page of a tenant that has no blocks here any more, and gets none. Accesses storage. Raises OSError,
        Rejected."""
        with self._turn():
            number = self._write(b"T" + tenant, f"{_FORGOTTEN}{tenant.hex()}.")
            self._note_forgotten(tenant, number)
            self._enter(number, ())
            before = [name for name, _, n in self._forgotten(tenant.hex()) if n < number]
            with contextlib.suppress(OSError):
                self._blobs.delete(before, self._timeout)

    # -- under the lock -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=self._timeout):
            raise TimeoutError(errno.ETIMEDOUT, "storage does not answer")
        try:
            yield
        finally:
            self._lock.release()

    def _write(self, what: bytes, lasting: str = "") -> int:
        """Write a page; returns its number. ``lasting``: the name prefix of a blob that outlives the page."""
        for _ in range(_TRIES):
            self._hear()
            number = self.number + 1
            if number > _LAST:
                raise OSError(errno.ENOSPC, f"{_page(_LAST)} is there, and no page can follow it: remove it")
            # First: if this process dies in between, nodes that open later still treat the tenant as forgotten, and
            # there is never a page whose lasting blob is missing.
            if lasting:
                self._blobs.create(f"{lasting}{number:018d}", b"", self._timeout)
            if self._blobs.create(_page(number), self._sealed(number, what), self._timeout):
                return number
        raise OSError(errno.EBUSY, "others were quicker to write each page that was tried")

    def _sealed(self, number: int, what: bytes) -> bytes:
        seal, body = self._encryption.new(OWN), number.to_bytes(8, "little") + what
        if seal is None:
            return _MAGIC + bytes(_SEAL) + body
        return _MAGIC + seal.name + seal.file_cipher().close(0, body)

    def _opened(self, number: int, data: memoryview) -> bytes:
        """The decrypted content of a page, starting with its kind; empty if it is not one of ours. Raises Rejected if
        its key is unavailable now."""
        named, body = bytes(data[len(_MAGIC) : _START]), data[_START:]
        if data[: len(_MAGIC)] != _MAGIC or not body:
            return b""
        if any(named):
            try:
                clear = self._encryption.old(named[:16], named[16:]).file_cipher().open(0, body)
            except ValueError:
                return b""
            except Rejected as e:
                if e.reason in NOT_OURS:
                    return b""
                raise
        elif self._encryption.accepts_open:
            clear = bytes(body)
        else:
            return b""
        return clear[8:] if clear[:8] == number.to_bytes(8, "little") else b""

    def _hear(self, *, look: bool = False) -> None:
        # A block written from here on is still in the index and is dropped below, or it has the new number.
        recent, self._recent = self._recent, {}
        try:
            if look or not self.looked or not self._follow(recent):
                self._look(recent)
        except BaseException:
            self._recent.update(recent)
            raise
        self._heard_at = self._clock.monotonic()

    def _follow(self, recent: Collection[BlockKey]) -> bool:
        """Apply the pages after the last one; False if that is gone."""
        while True:
            here, more = self._blobs.find([_page(self.number), _page(self.number + 1)], self._timeout)
            if not more:
                return here or not self.number
            self._take([self.number + 1], recent)

    def _look(self, recent: Collection[BlockKey]) -> None:
        """List all pages, and apply those that are new."""
        pages = sorted(self._listed())
        new = [number for number in pages if number > self.number]
        if not self.looked:
            self._learn_forgotten()
            if self._ours(self._beyond(pages)):
                self._miss(new, ())
            else:
                self._take(new, ())
        elif new == list(range(self.number + 1, self.number + 1 + len(new))):
            self._take(new, recent)
        elif new := self._ours(new):
            self._miss(new, recent)
        if self.number and (not pages or pages[-1] < self.number):
            # The storage was emptied: there must be a last page.
            with contextlib.suppress(OSError):
                self._blobs.create(_page(self.number), b"", self._timeout)
        for number in set(self._pages).difference(pages):
            self._leave(number)
        self._listed_at = self._clock.monotonic()
        self.looked = True

    def _beyond(self, pages: Sequence[int]) -> list[int]:
        """At the opening: the pages after the recorded position, if there is one and the first page after it is
        gone."""
        last = None if self.drop_positions is None else self.drop_positions.page(repr(self._blobs))
        if last is None or last + 1 in pages:
            return []
        return [number for number in pages if number > last]

    def _ours(self, numbers: Sequence[int]) -> list[int]:
        """The pages with valid content: page names alone, which anyone can create, must not cost all blocks."""
        before = {number: self._pages.get(number) for number in numbers}
        ours = []
        for number in numbers:
            keys, tenants = self._read([number])
            if keys or tenants:
                ours.append(number)
            elif before[number] is None:
                self._leave(number)
        return ours

    def _miss(self, new: Sequence[int], recent: Collection[BlockKey]) -> None:
        """There are pages, but some of those before them are gone."""
        log.warning(
            "%s: drop log pages were removed before this node read them. All blocks here are dropped, since it is "
            "unknown which of them others have dropped",
            self._blobs,
        )
        self._learn_forgotten()
        self._read(new)
        self.told.missed()
        self.number = new[-1]
        names = [self._encryption.name(key) for key in recent]
        for i in range(0, len(names), PAGE):
            self._blobs.delete(names[i : i + PAGE], self._timeout)
        self.told.heard()

    def _learn_forgotten(self) -> None:
        for _, tag, number in self._forgotten():
            self._note_forgotten(tag, number)

    def _note_forgotten(self, tag: bytes, number: int) -> None:
        if len(self._tenants) < _TENANTS:
            self._tenants[tag] = max(number, self._tenants.get(tag, 0))

    def _names(self, prefix: str) -> Iterator[tuple[str, int, float]]:
        """As ``Blobs.list``."""
        with contextlib.suppress(FileNotFoundError):  # some servers create a bucket only with its first blob
            yield from self._blobs.list(self._timeout, prefix)

    def _listed(self) -> list[int]:
        """The numbers of the latest pages."""
        found = (_numbered(name) for name, _, _ in self._names(_PAGES))
        return heapq.nlargest(2 * _KEPT, (number for number in found if number is not None))

    def _forgotten(self, tag: str = "") -> Iterator[tuple[str, bytes, int]]:
        """The names, tenants and pages of forgotten tenants, of all or of one."""
        for name, _, _ in self._names(_FORGOTTEN + tag):
            match name.split("."):
                case [_, whose, number] if len(whose) == 32 and len(number) == 18 and number.isdecimal():
                    with contextlib.suppress(ValueError):
                        yield name, bytes.fromhex(whose), int(number)

    def _read(self, numbers: Sequence[int]) -> tuple[list[BlockKey], list[bytes]]:
        """Read pages, and remember their content; returns the blocks and the tenants."""
        keys: list[BlockKey] = []
        tenants: list[bytes] = []
        for i in range(0, len(numbers), _TOGETHER):
            some = numbers[i : i + _TOGETHER]
            memory = Scratch().get(len(some) * (_LONGEST + 1))
            spans = [memory[n * (_LONGEST + 1) :][: _LONGEST + 1] for n in range(len(some))]
            got = self._blobs.read([(_page(n), [span]) for n, span in zip(some, spans, strict=True)], self._timeout)
            for number, span, count in zip(some, spans, got, strict=True):
                what = self._opened(number, span[:count]) if 0 < count <= _LONGEST else b""
                named: tuple[BlockKey, ...] = ()
                if what[:1] == b"T" and len(what) == 17:
                    self._note_forgotten(what[1:], number)
                    tenants.append(what[1:])
                elif what[:1] == b"K" and not (len(what) - 1) % _KEY:
                    cut = range(1, len(what), _KEY)
                    named = tuple(BlockKey(what[at : at + _KEY].rstrip(b"\0")) for at in cut)
                self._remember(number, named)
                keys += named
        return keys, tenants

    def _take(self, numbers: Sequence[int], recent: Collection[BlockKey]) -> None:
        """Apply pages, the first of which follows the last one applied."""
        if not numbers:
            return
        keys, tenants = self._read(numbers)
        if keys:
            self.told.dropped(keys)
        for tenant in tenants:
            self.told.forgotten(tenant)
        self.number = numbers[-1]
        if mine := list(recent) if tenants else [key for key in keys if key in recent]:
            self._stale(mine)
        if keys or tenants:
            self.told.heard()

    def _enter(self, number: int, keys: tuple[BlockKey, ...]) -> None:
        """Apply a page of this process's own, whose blocks are not here any more."""
        self._remember(number, keys)
        self.number = number

    def _remember(self, number: int, keys: tuple[BlockKey, ...]) -> None:
        self._pages[number] = keys
        for key in keys:
            self._keys[key] = max(number, self._keys.get(key, 0))
        while len(self._pages) > 2 * _KEPT or (len(self._keys) > _REMEMBERED and len(self._pages) > 1):
            self._leave(min(self._pages))

    def _leave(self, number: int) -> None:
        for key in self._pages.pop(number, ()):
            if self._keys.get(key) == number:
                del self._keys[key]

    def _trim(self) -> None:
        """Remove pages that are old, or too many; the last one stays."""
        pages: list[tuple[int, int, float]] = []
        for name, nbytes, when in self._names(_PAGES):
            if (number := _numbered(name)) is not None:
                pages.append((number, nbytes, when))
                if len(pages) > 4 * _KEPT:  # kvtide never writes so many
                    pages = heapq.nsmallest(2 * _KEPT, pages) + heapq.nlargest(2 * _KEPT, pages)
        pages = sorted(set(pages), reverse=True)
        total, old = 0, list[int]()
        for at, (number, nbytes, when) in enumerate(pages):
            total += nbytes
            aged = bool(when) and pages[0][2] - when > _KEPT_SECONDS
            if at and (at >= _KEPT or total > self._room or aged or old):
                old.append(number)
        for number in reversed(old):  # the oldest first: a node that finds a page has missed none that follow
            if keys := self._pages.get(number):
                self._stale(keys)
            self._blobs.delete([_page(number)], self._timeout)


class DropLogReader:
    """The thread that reads a drop log every ``period`` seconds."""

    def __init__(self, drops: DropLog, period: float) -> None:
        self._drops = drops
        self._period = period
        self._over = threading.Event()
        self._stepped = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="kvtide-drops", daemon=True)

    def start(self) -> None:
        """Start, and wait briefly for the first reading: blocks stored before it are dropped by it."""
        self._thread.start()
        self._stepped.wait(_MOMENT)

    def _run(self) -> None:
        while True:
            over = self._over.is_set()
            try:
                self._drops.step()
                self._failed = False
            except Exception as e:  # noqa: BLE001 - whatever storage or a callback raises: the thread must go on
                if not self._failed:
                    log.warning(
                        "%s: cannot read what others have dropped: %s. After a while nothing is written there, until "
                        "it can be read. Check that this node may list, read, write and remove there",
                        self._drops,
                        reason_of(e),
                    )
                self._failed = True
            self._stepped.set()
            if over:
                return
            self._over.wait(self._period)

    def close(self, timeout: float) -> None:
        """Read once more, and end; if storage hangs, the thread is left behind."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout)
