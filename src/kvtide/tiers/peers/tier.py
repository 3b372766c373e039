"""Another node as a tier: its blocks are looked up and read, and nothing is written to it or removed from it.

A read asks for several blocks in one request, sends the next request before it reads the answer, and receives each
block directly into its slot. The other node sends records, and here key, owner, layout and every checksum are verified
before a block counts as read, exactly as from a disk.

The other node may drop, evict or lose any block at any time: then it is a miss. A node that does not answer costs those
who wait for it one deadline, a short one for lookups; after that it is left alone (``availability.py``), and everything
there is absent. That it is away is no failure of this node.

Blocks dropped here are not fetched again though the other node still has them, and none lives longer than its expiry
here, until the block is stored here again. That is remembered in memory only, and for the last 100,000 blocks: a drop,
and the forgetting of a tenant, must be requested at each node.

Threads: one for lookups, which must not wait behind blocks, and one for each further connection. The batches, threads
and deadlines are those of shared storage (``tiers/shared/io_jobs.py``). A connection that is interrupted at its
deadline uses its spans no more, so a read that is late gives its memory back."""

from __future__ import annotations

import errno
import functools
import itertools
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np
from xxhash import xxh3_128

from kvtide import forks
from kvtide.block import ALIGN, DIGEST, BlockKey, Span
from kvtide.clock import Clock, SystemClock
from kvtide.config import Peers
from kvtide.serial_executor import SerialExecutor
from kvtide.tiers.base import (
    FoundBlock,
    Identity,
    Read,
    ReadDone,
    TierStatistics,
    Wish,
)
from kvtide.tiers.counters import TierCounters, bytes_read, read_results, size_for
from kvtide.tiers.format.encryption import OPEN, Encryption
from kvtide.tiers.format.packer import Packer, usual_header
from kvtide.tiers.format.reason import Reason
from kvtide.tiers.format.record import FLAG_SEALED, Rejected, recognise, sound
from kvtide.tiers.format.scratch import Pool
from kvtide.tiers.peers.availability import Availability, OtherNode
from kvtide.tiers.peers.compression import CompressionChoice, ReadEnd
from kvtide.tiers.peers.endings import REMEMBERED, Endings
from kvtide.tiers.peers.link import LOOKUP, PeerLink, WantedBlock, many_processors
from kvtide.tiers.peers.protocol import SLOWEST, LocatedBlocks, Presence, as_sent
from kvtide.tiers.peers.read_only import ReadOnlyTier
from kvtide.tiers.peers.trust import PeerTrust
from kvtide.tiers.peers.watchdog import Watchdog
from kvtide.tiers.shared.io_jobs import Batch, Jobs

__all__ = ["PeerTier", "connections_of"]

_ABSENT = 2.0
"""Seconds for which a block is remembered as absent."""
_JOB, _BLOCKS = 64 << 20, 1024
"""Bytes and blocks that a connection reads for a batch at a time, in several requests."""
_MANY, _FEW = 4, 2
"""Connections for blocks, if the settings do not say how many: over TCP with many processors, and otherwise. While one
verifies what it received, others receive. With TLS each record of 16 KiB is a call that needs the interpreter, so more
than two connections only wait for each other."""
_GRACE = 1.5
"""Jobs may take that much longer than their connection's deadline, which ends them."""
_CODEC = slice(144, 146)
"""Where a record's header names its codec; 0: stored unchanged."""
_SCRATCH = 64 << 20
"""Bytes of memory for decompressing blocks, or what one block needs. It is freed when nothing is read."""


_BUSY = "the node is busy"
_HIT = int(Presence.HIT)
_FOUND: Callable[[tuple[object, ...]], FoundBlock] = functools.partial(tuple.__new__, FoundBlock)
"""Makes the entry of a block from its fields, without a call of Python code: a lookup makes hundreds."""


class _NotAsked(OSError):  # noqa: N818 - a finding
    """A block was not asked for, since the node is away. It says nothing new about the node."""


def connections_of(settings: Peers) -> int:
    """Over how many connections blocks are read from a node."""
    plain = settings.fabric == "tcp" and not settings.certificate
    return settings.connections or (_MANY if plain and many_processors() else _FEW)


class _Worker:
    """A connection, and what its thread needs to verify records."""

    def __init__(self, link: PeerLink, pool: Pool) -> None:
        self.link = link
        self.packer = Packer("raw", OPEN, pool)
        self.stopped: object = None
        """The items whose read shall end: what has not arrived by then is not received any more."""
        self.broken = False
        """Whether something was wrong with an answer."""


class PeerTier(ReadOnlyTier):
    """The node at ``address``. See the module's docstring.

    ``connections`` requests for blocks are under way at a time, each in at most ``timeout`` seconds. ``encryption``
    knows whose keys were destroyed; ``own`` is the name of the store that asks, and ``named`` the one that the other
    must have, if that is known: another store at the same address is not asked.
    """

    def __init__(
        self,
        address: str,
        trust: PeerTrust,
        *,
        connections: int = _FEW,
        timeout: float = 2.0,
        encryption: Encryption = OPEN,
        own: bytes = b"",
        named: bytes = b"",
        clock: Clock | None = None,
    ) -> None:
        self.address = address
        self._encryption = encryption
        self.late: Callable[[Sequence[BlockKey]], None] = lambda _: None
        """Called with the keys of blocks whose read has not ended by its deadline."""
        self.lost: Callable[[], None] = lambda: None
        """Called when the node is found to be away: then nothing that was found there can be read."""
        self._clock = clock or SystemClock()
        self._counters = TierCounters()
        self._absent: dict[BlockKey, float] = {}
        self.endings = Endings()
        """May be replaced by one that several tiers have in common, before anything else."""
        self.replaced = False
        """Whether another store was found at the address."""
        self.compression = CompressionChoice(self._clock)
        self._compressed = self._uncompressed = 0
        """Bytes of blocks that were compressed: as they came, and in memory. Changed with the lock of the counters."""
        self._scratch = Pool(_SCRATCH)
        self._availability = Availability(address, self._clock)
        self._calls = SerialExecutor("kvtide-peer-start")
        self.call_soon = self._calls.put
        """Run a function on a thread that no other node can block."""
        self._watchdog = Watchdog(min(timeout, LOOKUP))
        self._workers = [
            _Worker(PeerLink(address, trust, timeout, self._watchdog, own, named), self._scratch)
            for _ in range(connections + 1)
        ]
        self._jobs: list[Jobs[_Worker]] = []
        forks.tell(self)
        try:
            for name, workers in (("peer-find", self._workers[:1]), ("peer", self._workers[1:])):
                self._jobs.append(Jobs(name, workers, _GRACE * timeout, self._no_answer, self._clock))
        except BaseException:
            self.close()
            raise
        self._finding, self._reading = self._jobs

    def __repr__(self) -> str:
        return f"<PeerTier at {self.address}{', which is away' if self.away else ''}>"

    @property
    def away(self) -> bool:
        """Whether the node is not asked now: it does not answer, or the address is this process's own."""
        return self._availability.away

    # -- the contract of a tier ---------------------------------------------------------------------------

    def read(self, batch: Sequence[Read], done: ReadDone) -> None:
        def finish(sizes: list[int]) -> None:
            if total := bytes_read(sizes):
                self._counters.count_bytes(read=total)
            done(read_results(sizes))

        def late(items: Sequence[Read]) -> None:
            self.late([item.key for item in items])

        self.greet()
        sizes = [len(item.span) for item in batch]
        most = min(_BLOCKS, max(2, _JOB // max([1, *sizes])))
        read = functools.partial(self._read, sum(sizes))
        job = Batch("read", batch, read, size_for(OSError()), finish, late, sum(sizes) / SLOWEST)
        self._reading.submit(job, most)

    def cut(self, batch: Sequence[Read]) -> None:
        """See ``tiers.base.Cuttable``. The node is then asked something that it must answer at once: if it does not
        answer that either, it is away."""
        doubted = False

        def stop(worker: _Worker, items: Sequence[Read]) -> bool:
            nonlocal doubted
            doubted |= worker.stopped is not items
            worker.stopped = items
            return worker.link.stop()

        self._reading.cut(batch, stop)
        if doubted:
            self.find([(batch[0].key, batch[0].identity)], lambda _: None)

    def statistics(self) -> TierStatistics:
        # No errors in a row: a node that is away is no failed tier of this one.
        counters = self._counters
        with counters.lock:
            return TierStatistics(
                blocks=0,
                bytes_used=0,
                bytes_taken=0,
                budget=0,
                bytes_read=counters.read,
                failed_reads=counters.failures["read"],
                reasons=tuple(sorted(counters.reasons.items())),
                away=self.away and not self._availability.own,
                carrier=", ".join(sorted({worker.link.carrier for worker in self._workers[1:]} - {""})),
                bytes_compressed=self._compressed,
                bytes_uncompressed=self._uncompressed,
                compressed=self.compression.compressed,
            )

    def close(self) -> None:
        self._calls.close(1.0)
        for jobs in self._jobs:
            jobs.close()
        for worker in self._workers:
            worker.link.close()
        self._watchdog.close()

    def forked(self) -> None:
        for worker in self._workers:
            worker.link.forked()

    # -- finding blocks -----------------------------------------------------------------------------------

    def find(self, options: Sequence[Wish], done: Callable[[Sequence[FoundBlock | None]], None]) -> None:
        """See ``tiers.base.Searched``."""
        nothing: list[FoundBlock | None] = [None] * len(options)

        def finish(results: list[list[FoundBlock | None]]) -> None:
            done(results[0])

        if self.away:
            self.greet()
            done(nothing)
        else:  # all in one job: a lookup is one round trip
            self._finding.submit(Batch("find", [options], self._find, nothing, finish))

    def absent(self, key: BlockKey, who: Identity) -> bool:
        """See ``tiers.base.Searched``."""
        if self.away:
            self.greet()
            return True
        if self.endings.of(key) <= self._clock.time():
            return True
        return self._absent.get(key, 0.0) > self._clock.monotonic()

    def _miss(self, keys: Sequence[BlockKey]) -> None:
        if len(self._absent) + len(keys) >= REMEMBERED:
            self._absent.clear()
        self._absent.update(dict.fromkeys(keys, self._clock.monotonic() + _ABSENT))

    def greet(self) -> None:
        """See whether a node that is away answers again, if it is time for that. Does not wait."""

        def ended(failures: list[OSError | None]) -> None:
            if (e := failures[0]) is None:
                self._availability.greeted()
            else:
                self._counters.failed("greet", e)
                self.replaced |= isinstance(e, OtherNode)
                self._availability.failed(e, trial=True)

        if self._availability.try_again():
            silent: OSError | None = TimeoutError(errno.ETIMEDOUT, "the node does not answer")
            batch = Batch("greet", [None], self._try, silent, ended)
            self.call_soon(functools.partial(self._finding.submit, batch))

    @staticmethod
    def _try(_: Sequence[None], worker: _Worker) -> list[OSError | None]:
        try:
            worker.link.greet()
        except OSError as e:
            return [e]
        except Exception as e:  # noqa: BLE001 - it must not end the thread
            return [OSError(errno.EIO, f"{type(e).__name__}: {e}")]
        return [None]

    # -- the threads --------------------------------------------------------------------------------------

    def _find(self, run: Sequence[Sequence[Wish]], worker: _Worker) -> list[list[FoundBlock | None]]:
        (options,) = run
        found: list[FoundBlock | None] = [None] * len(options)
        start = 0
        # Blocks of one identity follow each other. A prompt that waited behind one whose lookup failed does not ask.
        every, whose = [key for key, _ in options], [who for _, who in options]
        # Each request has its own deadline; a node that answers each late, or takes few blocks at a time, must not make
        # a prompt wait for all of them.
        end = time.monotonic() + LOOKUP
        while start < len(options) and not self.away and time.monotonic() < end:
            who = whose[start]
            count = min(worker.link.credit.keys, len(options) - start)
            if whose.count(who) < len(options):
                count = sum(1 for _ in itertools.takewhile(who.__eq__, whose[start : start + count]))
            keys = every[start : start + count]
            try:
                self._check(who)
                located = worker.link.locate(who, keys)
                self._availability.answered()
                self._enter(found, start, keys, located)
            except Exception as e:  # noqa: BLE001 - see TierCounters
                self._failed("find", e, len(keys))
            start += len(keys)
        if not self.away and (missing := found.count(None)):
            some = missing < len(found)
            self._miss([key for key, one in zip(every, found, strict=True) if one is None] if some else every)
        return [found]

    def _enter(
        self, found: list[FoundBlock | None], start: int, keys: Sequence[BlockKey], located: LocatedBlocks
    ) -> None:
        """Enter what the node says of these blocks into the results, from ``start`` on."""
        hits = np.flatnonzero(located.presence == _HIT).tolist()
        if not hits:
            return
        mine = keys if len(hits) == len(keys) else [keys[i] for i in hits]
        now = self._clock.time()  # of this host: for a node whose clock is behind the blocks may be valid still
        columns = zip(
            _places(mine),
            struct.unpack(f"{DIGEST}s" * len(hits), located.parents),
            located.depths.tolist(),
            located.expiries.tolist(),
            located.priorities.tolist(),
            strict=True,
        )
        blocks: Iterator[FoundBlock] = map(_FOUND, columns)
        if not self.endings and len(hits) == len(keys) and (located.expiries > now).all():
            found[start : start + len(keys)] = blocks
            return
        for i, key, block in zip(hits, mine, blocks, strict=True):
            expiry = min(block.expiry, self.endings.of(key))
            if expiry > now:
                found[start + i] = block._replace(expiry=expiry)

    def _read(self, together: int, run: Sequence[Read], worker: _Worker) -> list[int]:
        """For each the bytes read and verified, or ``size_for`` what failed. The batch has so many bytes ``together``,
        and other connections read the rest of them."""
        sizes = [size_for(OSError())] * len(run)
        share = max(1.0, min(len(self._workers) - 1, together / max(1, sum(len(item.span) for item in run))))
        wanted: dict[Identity, list[int]] = {}
        for i, item in enumerate(run):
            wanted.setdefault(item.identity, []).append(i)
        for who, numbers in wanted.items():
            left = set(numbers)
            compressed = self.compression.begin()
            worker.broken = False
            try:
                if self.away:
                    raise _NotAsked(errno.EHOSTDOWN, "the node is away")
                self._check(who)
                for i, size in self._read_some(run, numbers, worker, compressed, share):
                    sizes[i] = size
                    left.remove(i)
            except Exception as e:  # noqa: BLE001 - see TierCounters
                if worker.stopped is not run:
                    self._failed("read", e, len(left))
                    worker.broken = True
                for i in left:
                    sizes[i] = size_for(e)
            finally:
                whole = ReadEnd.WHOLE if all(sizes[i] > 0 for i in numbers) else ReadEnd.PART
                how = ReadEnd.BROKEN if worker.broken else whole
                nbytes = sum(len(run[i].span) for i in numbers)
                self.compression.ended(nbytes, how, able=worker.link.compresses)
                if compressed:
                    self._scratch.empty()
        worker.stopped = None  # else the spans of a read that was cut would stay alive
        return sizes

    def _read_some(
        self, run: Sequence[Read], numbers: Sequence[int], worker: _Worker, compressed: bool, share: float
    ) -> Iterator[tuple[int, int]]:
        """Read those blocks of ``run``, all of one identity. Says of each, when that is known, what ``_read`` returns.
        ``share``: see ``PeerLink.read``. Raises OSError."""
        first = usual_header(run[numbers[0]])
        pages = worker.packer.header.get(first * len(numbers))
        wanted: list[tuple[int, WantedBlock]] = []
        now = self._clock.time()
        for n, i in enumerate(numbers):
            item = run[i]
            if self.endings.of(item.key) <= now or not item.wanted:
                self._counters.failed("read", Rejected(Reason.GONE))
                yield i, 0
                continue
            payload = item.span[: len(item.wanted) * item.identity.geometry.stride]
            start = pages[n * first : (n + 1) * first]
            wanted.append((i, WantedBlock(item.key, item.sections, start, payload)))
        if not wanted:
            return
        checksum, covered = xxh3_128(), 0
        """Of so many bytes of the block that is arriving, if it comes in several pieces."""
        busy, asked = False, 0
        requests = _within(worker.link, [block for _, block in wanted], lambda: busy)
        names = run[numbers[0]].identity
        reading = worker.link.read(names, requests, lambda: worker.stopped is run, compressed=compressed, share=share)
        with closing(reading) as arrivals:
            for number, presence, nbytes, complete in arrivals:
                self._availability.answered()
                i, block = wanted[number]
                asked = number + 1
                if not complete or covered:
                    checksum.update(block.payload[covered:nbytes])
                    covered = nbytes
                if not complete:
                    continue
                try:
                    if presence is Presence.BUSY:
                        busy = True
                        raise OSError(errno.EBUSY, _BUSY)
                    if presence is Presence.MISS:
                        raise Rejected(Reason.GONE)
                    if nbytes < len(block.payload):
                        size = _decompressed(run[i], block, worker.packer, nbytes)
                        with self._counters.lock:
                            self._compressed += nbytes
                            self._uncompressed += len(block.payload)
                    else:
                        size = _verified(run[i], block, worker.packer, [checksum.digest()] if covered else [])
                except Exception as e:  # noqa: BLE001 - see TierCounters
                    self._counters.failed("read", e)
                    if isinstance(e, Rejected):
                        self._miss([run[i].key])
                        worker.broken |= e.reason is not Reason.GONE
                    size = size_for(e)
                if covered:
                    checksum.reset()
                    covered = 0
                yield i, size
        if asked < len(wanted):
            refused = OSError(errno.EBUSY, _BUSY)
            self._counters.failed("read", refused, len(wanted) - asked)
            for i, _ in wanted[asked:]:
                yield i, size_for(refused)

    def _check(self, who: Identity) -> None:
        """Raises Rejected for a tenant whose key was destroyed."""
        self._encryption.new(who.tenant)

    def _failed(self, verb: str, e: Exception, count: int) -> None:
        self._counters.failed(verb, e, count)
        self.replaced |= isinstance(e, OtherNode)
        if isinstance(e, OSError) and not isinstance(e, _NotAsked) and self._availability.failed(e):
            self.call_soon(self.lost)

    def _no_answer(self, verb: str, count: int) -> None:
        self._counters.failed(verb, TimeoutError(errno.ETIMEDOUT, "the node does not answer"), count)


def _within(link: PeerLink, blocks: Sequence[WantedBlock], busy: Callable[[], bool]) -> Iterator[list[WantedBlock]]:
    """Divide blocks into requests, each within the credit that the other node grants when it is connected. No more when
    it is ``busy``: it says so only after it has waited, and would do that for each."""
    some: list[WantedBlock] = []
    nbytes = 0
    for block in blocks:
        size = len(block.payload)
        if some and (len(some) == link.credit.blocks or nbytes + size > link.credit.nbytes):
            yield some
            if busy():
                return
            some, nbytes = [], 0
        some.append(block)
        nbytes += size
    if some:
        yield some


def _check_start(start: Span, *, compressed: bool) -> None:
    """Raise Rejected for a record that no node sends: encrypted, compressed or not as it should be, or with a header of
    another length, for which memory would be taken."""
    sealed, raw = start[12] & FLAG_SEALED, bytes(start[_CODEC]) == b"\0\0"
    if sealed or raw is compressed or recognise(start) != len(start):
        raise Rejected(Reason.CORRUPT_HEADER)


def _verified(item: Read, block: WantedBlock, packer: Packer, known: Sequence[bytes]) -> int:
    """Check a record that is not compressed; returns its bytes. Raises Rejected. Its checksum may be ``known``."""
    start, payload, names = block.header[:ALIGN], block.payload, item.identity
    _check_start(start, compressed=False)
    shape = as_sent(len(payload))
    first = item.wanted.start
    if sound(start, payload, shape, (first, item.key, names.namespace, names.tenant, names.layout), known):
        return len(payload)
    sent = Read(item.key, replace(names, geometry=shape), item.place, payload)
    size = len(start) + len(payload)
    return packer.unpack(sent, first, start, size, size, lambda into, offset: 0)  # says what is wrong


def _decompressed(item: Read, block: WantedBlock, packer: Packer, nbytes: int) -> int:
    """Check a record whose sections are compressed, ``nbytes`` together, and lie where the block is to be; put the
    block there. Returns ``nbytes``. Raises Rejected."""
    start, payload = block.header, block.payload
    _check_start(start, compressed=True)
    room = len(start) + nbytes

    def fetch(into: Sequence[Span], offset: int) -> int:
        # What was received, into memory of the packer: from there it is decompressed to where it is now.
        if offset < len(start) or offset + len(into[0]) > room:
            return 0
        first = offset - len(start)
        np.copyto(np.frombuffer(into[0], np.uint8), np.frombuffer(payload[first : first + len(into[0])], np.uint8))
        return len(into[0])

    try:
        return packer.unpack(item, 0, start, room, room, fetch)
    finally:
        packer.workspace.end()


def _places(keys: Sequence[BlockKey]) -> list[int]:
    """The places of blocks: for a key the same number always, which means only that the block was found once."""
    whole = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)  # keys of one group are equally long
    starts = np.ascontiguousarray(whole[:, :8]).view("<i8").ravel()
    places: list[int] = (starts & np.iinfo(np.int64).max).tolist()
    return places
