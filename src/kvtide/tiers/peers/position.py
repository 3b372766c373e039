"""A tier that is one node after another.

A store can read from dozens of nodes, but a tier costs memory for each block of the index, threads and connections. So
there are a few *positions*, and each is bound to the node that is needed: then it is a ``PeerTier`` for that node, made
when it is bound. A position that is bound to no node has nothing, and costs no thread.

A block that was found at the earlier node may still be read from a position: the other node is asked then, which has
the same block, verified like any, or not. So nothing can go wrong but a miss. An earlier tier is closed when what was
asked of it has ended, on a thread that nobody waits for."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvtide.block import BlockKey
from kvtide.tiers.base import (
    NOWHERE,
    DropDone,
    FoundBlock,
    Held,
    Identity,
    Read,
    ReadDone,
    ReadResult,
    Renewal,
    TierStatistics,
    Wish,
    Write,
    WriteDone,
)
from kvtide.tiers.peers.endings import Endings
from kvtide.tiers.peers.members import Member
from kvtide.tiers.peers.tier import PeerTier

__all__ = ["PeerPosition"]

_NOTHING = TierStatistics(blocks=0, bytes_used=0, bytes_taken=0, budget=0)


class PeerPosition:
    """See the module's docstring. ``make`` opens the tier of a node."""

    def __init__(self, make: Callable[[Member], PeerTier], endings: Endings) -> None:
        self._make = make
        self._endings = endings
        self._tier: PeerTier | None = None
        self._earlier = _NOTHING
        """What the tiers of earlier nodes have counted."""
        self._busy: Counter[PeerTier] = Counter()
        """Requests that have not ended."""
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
    def away(self) -> bool:
        """Whether no node is asked now."""
        tier = self._tier
        return tier is None or tier.away

    @property
    def used(self) -> bool:
        """Whether it was ever bound to a node."""
        return self._tier is not None or self._earlier is not _NOTHING

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
            new.endings, new.late = self._endings, self.late
            new.lost = lambda: self.lost() if self._tier is new else None
        with self._changed:
            if self._closed:
                old = new
            else:
                old, self._tier, self.member = self._tier, new, member
        if old is not None:
            thread = threading.Thread(target=self._end, args=(old,), name="kvtide-peer-end", daemon=True)
            self._closing = [*(t for t in self._closing if t.is_alive()), thread]
            thread.start()

    def _end(self, tier: PeerTier) -> None:
        """Close an earlier tier, when nobody waits for it any more: every request has a deadline."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy[tier])
            del self._busy[tier]
        tier.close()
        with self._changed:
            self._earlier = _sum(self._earlier, tier.statistics())

    def _begin(self) -> PeerTier | None:
        with self._changed:
            if (tier := self._tier) is not None:
                self._busy[tier] += 1
            return tier

    def _ended(self, tier: PeerTier) -> None:
        with self._changed:
            self._busy[tier] -= 1
            self._changed.notify_all()

    # -- the contract of a tier ---------------------------------------------------------------------------

    def read(self, batch: Sequence[Read], done: ReadDone) -> None:
        tier = self._begin()
        if tier is None:
            done([False] * len(batch))
            return

        def ended(results: Sequence[ReadResult]) -> None:
            try:
                done(results)
            finally:
                self._ended(tier)

        tier.read(batch, ended)

    def find(self, options: Sequence[Wish], done: Callable[[Sequence[FoundBlock | None]], None]) -> None:
        """See ``tiers.base.Searched``."""
        tier = self._begin()
        if tier is None:
            done([None] * len(options))
            return

        def ended(found: Sequence[FoundBlock | None]) -> None:
            try:
                done(found)
            finally:
                self._ended(tier)

        tier.find(options, ended)

    def absent(self, key: BlockKey, who: Identity) -> bool:
        """See ``tiers.base.Searched``."""
        tier = self._tier
        return tier is None or tier.absent(key, who)

    def write(self, batch: Sequence[Write], done: WriteDone) -> None:
        """Nothing is ever written."""
        done([NOWHERE] * len(batch))

    def drop(self, items: Sequence[tuple[BlockKey, int]], done: DropDone) -> None:
        """Do not fetch these blocks again, from whatever node."""
        self._endings.set((key, -np.inf) for key, _ in items)
        done([True] * len(items))

    def renew(self, items: Sequence[Renewal], done: DropDone) -> None:
        """Do not fetch these blocks later than their new expiry, from whatever node."""
        self._endings.set((key, when) for key, _, when in items)
        done([True] * len(items))

    def note(self, held: Held) -> None:
        """Does nothing: the expiry of blocks is the other node's."""

    def stored(self, keys: Sequence[BlockKey]) -> None:
        """See ``tiers.base.Refetching``."""
        self._endings.stored(keys)

    def evict(self, key: BlockKey, place: int) -> None:
        """Does nothing: the place is the other node's."""

    def scan(self) -> Iterator[Held]:
        """Nothing: blocks are found by looking them up."""
        return iter(())

    def own(self, places: npt.NDArray[np.int64], owners: npt.NDArray[np.int64]) -> None:
        """Does nothing: the other node's blocks have no owner here."""

    def statistics(self) -> TierStatistics:
        with self._changed:
            tier, earlier = self._tier, self._earlier
        return earlier if tier is None else _sum(earlier, tier.statistics())

    def close(self) -> None:
        with self._changed:
            self._closed = True
            tier, self._tier = self._tier, None
        if tier is not None:
            tier.close()  # waits for what was asked of it
        for thread in self._closing:
            thread.join()


def _sum(one: TierStatistics, other: TierStatistics) -> TierStatistics:
    reasons = Counter(dict(one.reasons)) + Counter(dict(other.reasons))
    return replace(
        other,
        bytes_read=one.bytes_read + other.bytes_read,
        failed_reads=one.failed_reads + other.failed_reads,
        reasons=tuple(sorted(reasons.items())),
    )
