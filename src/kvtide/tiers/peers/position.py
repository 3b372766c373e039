"""A tier that is one node after another.

A store can read from dozens of nodes, but a tier costs memory for each block of the index, threads and connections. So
there are a few *positions*, and each is bound to the node that is needed: then it is a ``PeerTier`` for that node, made
when it is bound. A position that is bound to no node has nothing, and costs no thread.

A block that was found at the earlier node may still be read from a position: the other node is asked then, which has
the same block, verified like any, or not. So nothing can go wrong but a miss. An earlier tier is closed when what was
asked of it has ended, on a thread that nobody waits for. What it has counted is part of the statistics all the time.

A caller may be interrupted anywhere. So every wait for requests ends some time, also for one that never ends."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvtide.block import BlockKey
from kvtide.tiers.base import (
    FoundBlock,
    Identity,
    Read,
    ReadDone,
    ReadResult,
    TierStatistics,
    Wish,
)
from kvtide.tiers.peers.endings import Endings
from kvtide.tiers.peers.members import Member
from kvtide.tiers.peers.read_only import ReadOnlyTier
from kvtide.tiers.peers.tier import PeerTier

__all__ = ["PeerPosition"]

_LONGEST = 300.0
"""Seconds that an earlier tier is kept for its requests. All have shorter deadlines: this is in case that one never
ends."""
_NOTHING = TierStatistics(blocks=0, bytes_used=0, bytes_taken=0, budget=0)


class PeerPosition(ReadOnlyTier):
    """See the module's docstring. ``make`` opens the tier of a node."""

    def __init__(self, make: Callable[[Member], PeerTier], endings: Endings) -> None:
        self._make = make
        self.endings = endings
        self._tier: PeerTier | None = None
        self._earlier = _NOTHING
        """What the tiers of earlier nodes have counted that are closed."""
        self._ending: list[PeerTier] = []
        """Tiers of earlier nodes that are not closed yet."""
        self._busy: dict[object, PeerTier] = {}
        """Requests that have not ended, and whom they were sent to."""
        self._changed = threading.Condition()
        self._closing: list[threading.Thread] = []
        self._closed = False
        self.member: Member | None = None
        """The node that it is bound to."""
        self.lost: Callable[[], None] = lambda: None
        """Called when the node is found to be away."""
        self.late: Callable[[Sequence[BlockKey]], None] = lambda _: None
        """See ``PeerTier.late``."""

    def __repr__(self) -> str:
        return f"<PeerPosition {self._tier or 'without a node'}>"

    @property
    def busy(self) -> bool:
        """Whether a request to the node has not ended."""
        tier = self._tier
        with self._changed:
            return tier is not None and tier in self._busy.values()

    @property
    def away(self) -> bool:
        """Whether no node is asked now."""
        tier = self._tier
        return tier is None or tier.away

    @property
    def used(self) -> bool:
        """Whether it was ever bound to a node."""
        with self._changed:
            return self._tier is not None or bool(self._ending) or self._earlier is not _NOTHING

    @property
    def replaced(self) -> bool:
        """Whether another node was found at the address of the one that it is bound to."""
        tier = self._tier
        return tier is not None and tier.replaced

    def greet(self) -> None:
        """See ``PeerTier.greet``."""
        if (tier := self._tier) is not None and tier.away:
            tier.greet()

    def bind(self, member: Member | None) -> None:
        """Be the tier of that node from now on; None: of none. Does not wait. Only one thread may call it, and not
        after ``close`` has begun."""
        new = None if member is None else self._make(member)
        if new is not None:
            new.endings, new.late = self.endings, self.late
            new.lost = lambda: self.lost() if self._tier is new else None
        with self._changed:
            if self._closed:
                old = new
            else:
                old, self._tier, self.member = self._tier, new, member
            if old is not None:
                self._end_later(old)

    def rename(self, member: Member) -> None:
        """The node that it is bound to has joined again: it is another member now, and the same store."""
        with self._changed:
            if self._tier is not None:
                self.member = member

    def _end_later(self, tier: PeerTier) -> None:
        """Close an earlier tier in the background. Call with the lock held."""
        self._ending.append(tier)
        thread = threading.Thread(target=self._end, args=(tier,), name="kvtide-peer-end", daemon=True)
        thread.start()
        self._closing = [*(t for t in self._closing if t.is_alive()), thread]

    def _end(self, tier: PeerTier) -> None:
        """Close an earlier tier, when nobody waits for it any more, or nobody may."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or tier not in self._busy.values(), _LONGEST)
        tier.close()  # waits for what was asked of it, as long as its deadlines last
        with self._changed:
            self._ending.remove(tier)
            self._earlier = _sum(self._earlier, tier.statistics())

    def _begin(self, request: object) -> PeerTier | None:
        with self._changed:
            if (tier := self._tier) is not None:
                self._busy[request] = tier
            return tier

    def _ended(self, request: object) -> None:
        with self._changed:
            self._busy.pop(request, None)
            self._changed.notify_all()

    # -- the contract of a tier ---------------------------------------------------------------------------

    def read(self, batch: Sequence[Read], done: ReadDone) -> None:
        request = object()

        def ended(results: Sequence[ReadResult]) -> None:
            try:
                done(results)
            finally:
                self._ended(request)

        try:
            if (tier := self._begin(request)) is not None:
                tier.read(batch, ended)
                return
        except BaseException:
            self._ended(request)
            raise
        done([False] * len(batch))

    def cut(self, batch: Sequence[Read]) -> None:
        """See ``tiers.base.Cuttable``."""
        with self._changed:
            asked = {*self._busy.values()}
        for tier in asked:
            tier.cut(batch)

    def find(self, options: Sequence[Wish], done: Callable[[Sequence[FoundBlock | None]], None]) -> None:
        """See ``tiers.base.Searched``."""
        request = object()

        def ended(found: Sequence[FoundBlock | None]) -> None:
            try:
                done(found)
            finally:
                self._ended(request)

        try:
            if (tier := self._begin(request)) is not None:
                tier.find(options, ended)
                return
        except BaseException:
            self._ended(request)
            raise
        done([None] * len(options))

    def absent(self, key: BlockKey, who: Identity) -> bool:
        """See ``tiers.base.Searched``."""
        tier = self._tier
        return tier is None or tier.absent(key, who)

    def statistics(self) -> TierStatistics:
        with self._changed:
            total = self._earlier
            for tier in (*self._ending, *([] if self._tier is None else [self._tier])):
                total = _sum(total, tier.statistics())
            return total if self._tier is not None else replace(total, away=False)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            tier, self._tier = self._tier, None
            if tier is not None:
                self._end_later(tier)
            self._changed.notify_all()
        for thread in self._closing:
            thread.join()


def _sum(one: TierStatistics, other: TierStatistics) -> TierStatistics:
    reasons = Counter(dict(one.reasons)) + Counter(dict(other.reasons))
    return replace(
        other,
        bytes_read=one.bytes_read + other.bytes_read,
        failed_reads=one.failed_reads + other.failed_reads,
        bytes_compressed=one.bytes_compressed + other.bytes_compressed,
        bytes_uncompressed=one.bytes_uncompressed + other.bytes_uncompressed,
        reasons=tuple(sorted(reasons.items())),
    )
