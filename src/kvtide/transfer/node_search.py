"""Searches for blocks in the nodes of a cluster, whose members and blocks a directory in Valkey lists.

With a few members, all of them are asked, in one round trip to each in parallel: that is quicker than asking a
directory first, and needs nothing but the list of members, which is fetched now and then. With more, the directory is
asked once for all blocks of a search, and then only nodes that are said to have them. So the messages for a prompt do
not become more with the number of nodes.

The directory is a hint: a block counts as found when a node says itself that it has it. A directory that lies costs a
round trip. One that does not answer costs one deadline of ``DEADLINE`` seconds, and is then left alone for 1 s, 2 s,
4 s and so on (``Availability``); the nodes that are known and bound are asked meanwhile, all of them.

A member is asked through a *position* (``tiers/peers/position.py``), of which there are fewer than there may be
members. One thread (``_calls``) binds positions: first those that are bound to nobody, then the one that was not used
for the longest time and has nothing to read. Before a position is bound to another node, the index forgets what was
found at the earlier one. The speed that was measured for a node is kept for when it is bound again.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvtide.block import BlockKey
from kvtide.clock import Clock
from kvtide.plan.assign_blocks import assign_blocks
from kvtide.plan.tier_speed import SpeedState
from kvtide.serial_executor import SerialExecutor
from kvtide.tiers.base import FoundBlock, Identity, Wish
from kvtide.tiers.peers.availability import Availability
from kvtide.tiers.peers.directory import BlockDirectory
from kvtide.tiers.peers.endings import REMEMBERED, Endings
from kvtide.tiers.peers.members import Member
from kvtide.tiers.peers.position import PeerPosition
from kvtide.tiers.shared.io_jobs import Batch, Jobs
from kvtide.transfer.cold_tier import ColdTier
from kvtide.transfer.search import FoundIn

__all__ = ["DEADLINE", "ClusterStatistics", "MemberStatistics", "NodeSearch"]

log = logging.getLogger("kvtide.peers")

DEADLINE = 0.5
"""Seconds that a prompt waits for the directory at most."""
_FEW = 4
"""Up to so many members, all are asked. Measured: see docs/peers.md."""
_FRESHEST, _OLDEST = 0.25, 2.0
"""The list of members is fetched again after a quarter of the lease, but within these limits, in seconds."""
_ABSENT = 2.0
"""Seconds for which a block is remembered as absent."""
_ROUNDS = 2
"""How often other holders are asked, if those that were chosen do not have the blocks."""
_ROUND_TRIP, _CONNECTING = 0.001, 0.004
"""Seconds expected for a request to a node that was not measured yet, and for binding a position to it."""
_SETTLED = 0.05
"""Seconds for which a position stays with its node at least after it was used: who found a block there begins to read
it."""
_WEIGHT = 0.2
_DOUBT, _LEAST = 0.5, 0.01
"""The weight of the last answer of a member for whether it is believed to have what it is said to have; and the least
belief: it is asked if no other is said to have a block."""
_SPREAD = 0.1
"""Nodes differ by up to this part in how much each asker prefers them, so that not all ask the same of equal ones."""
_KNOWN = 4096
"""Nodes whose speed is remembered."""


@dataclass(frozen=True, slots=True)
class MemberStatistics:
    """Another node, as this one sees it."""

    number: int
    epoch: int
    address: str
    tier: str = ""
    """The tier that it is bound to; empty: none now."""
    away: bool = False
    bytes_per_second: float = 0.0
    """Of reads from it; 0: not measured."""
    round_trip: float = 0.0
    """Seconds that a lookup takes; 0: not measured."""


@dataclass(frozen=True, slots=True)
class ClusterStatistics:
    """What a node knows of the others through the directory, and has asked it."""

    members: tuple[MemberStatistics, ...] = ()
    """Without this node."""
    away: bool = False
    """Whether the directory is not asked now, because it did not answer."""
    lookups: int = 0
    """Questions to the directory for the holders of blocks."""
    failures: int = 0
    """Questions that were not answered in time."""
    refused: int = 0
    """Members at whose address another node was found, or the same one after a restart."""
    stale: int = 0
    """Blocks that a node did not have though the directory said so."""
    bound: int = 0
    """How often a position was bound to a node."""


class _Place:
    """A position, as its tier."""

    def __init__(self, cold: ColdTier, position: PeerPosition) -> None:
        self.cold = cold
        self.position = position
        self.used = -math.inf
        """When something was last asked of it."""


class _Question:
    """A search under way."""

    def __init__(self, wanted: Sequence[Wish], found: FoundIn, ended: Callable[[], None]) -> None:
        self.left = dict(enumerate(wanted))
        self.found = found
        self.ended = ended
        self.holders: list[list[int]] = []
        """For each block the members that may be asked for it, by number. Empty: all members are asked."""
        self.nbytes = sum(who.geometry.footprint for _, who in wanted) / max(1, len(wanted))
        self.rounds = 0
        self.unanswered = 0
        self.lock = threading.Lock()


class NodeSearch:
    """See the module's docstring. ``own`` is the name of this store."""

    def __init__(
        self,
        positions: Sequence[tuple[ColdTier, PeerPosition]],
        directory: BlockDirectory,
        endings: Endings,
        own: bytes,
        lease: float,
        where: str,
        clock: Clock,
    ) -> None:
        """``where`` the directory is, for messages."""
        self.forget: Callable[[str], None] = lambda _: None
        """Called when nothing that was found in a tier of that name is there any more."""
        self._places = [_Place(cold, position) for cold, position in positions]
        self._few = min(_FEW, len(positions))
        self._directory = directory
        self._endings = endings
        self._own = own
        self._clock = clock
        self._interval = min(_OLDEST, max(_FRESHEST, lease / 4))
        self._availability = Availability(where, clock, "directory of nodes")
        self._members: Mapping[int, Member] | None = None
        """Other nodes, by number; None: not known yet."""
        self._due = -math.inf
        """When the list of members is to be fetched again."""
        self._fetching = False
        self._refused: set[int] = set()
        """Epochs of members that were replaced."""
        self._absent: dict[BlockKey, float] = {}
        self._truth: dict[str, float] = {}
        """By address: the part of the blocks that a member lately had, of those that the directory said it has."""
        self._speeds: dict[str, SpeedState] = {}
        self._round_trips: dict[str, float] = {}
        self._lock = threading.Lock()
        self._lookups = self._failures = self._replaced = self._stale = self._bound = 0
        self._calls = SerialExecutor("kvtide-peer-bind")
        try:
            self._jobs = Jobs("peer-directory", [directory], DEADLINE, self._late, clock)
        except BaseException:
            self._calls.close(0.0)
            raise

    def __repr__(self) -> str:
        return f"<NodeSearch {len(self._members or ())} other members>"

    # -- the contract of a search -------------------------------------------------------------------------

    def find(self, wanted: Sequence[Wish], found: FoundIn, ended: Callable[[], None]) -> None:
        """See ``BlockSearch``."""
        question = _Question(wanted, found, ended)
        self._keep_fresh()
        self._greet_away()
        if self._needs_directory:
            batch = Batch("holders", [question], self._look_up, None, functools.partial(self._looked_up, question))
            self._jobs.submit(batch)
        else:
            self._ask_all(question)

    @property
    def _needs_directory(self) -> bool:
        if self._availability.away:
            return False
        members = self._members
        return members is None or len(members) > self._few

    def absent(self, key: BlockKey, who: Identity) -> bool:
        """See ``BlockSearch``."""
        if self._endings.of(key) <= self._clock.time() or self._absent.get(key, 0.0) > self._clock.monotonic():
            return True
        self._keep_fresh()
        if self._needs_directory:
            return False
        self._greet_away()
        return all(place.position.away for place in self._places)

    def _greet_away(self) -> None:
        for place in self._places:
            place.position.greet()

    # -- the list of members ------------------------------------------------------------------------------

    def _keep_fresh(self) -> None:
        """Fetch the list of members if that is due. Does not wait."""
        if self._clock.monotonic() < self._due:
            return
        with self._lock:
            mine, self._fetching = not self._fetching, True
        if not mine:
            return
        if self._availability.away and not self._availability.try_again():
            self._fetching = False
            return
        self._jobs.submit(Batch("members", [None], self._fetch, False, self._fetched))

    def _fetch(self, _: Sequence[None], directory: BlockDirectory) -> list[bool]:
        try:
            self._fetch_members(directory)
        except Exception as e:  # noqa: BLE001 - whatever it is, it must not end the thread
            self._failed(e, trial=True)
            return [False]
        return [True]

    def _fetched(self, results: Sequence[bool]) -> None:
        if results[0]:
            self._availability.greeted()
            self._availability.answered()
            self._calls.put(self._rebind)
        self._due = self._clock.monotonic() + self._interval
        self._fetching = False

    def _fetch_members(self, directory: BlockDirectory) -> None:
        found = directory.members()
        epochs = {member.epoch for member in found.values()}
        self._refused &= epochs
        self._members = {
            number: member
            for number, member in found.items()
            if member.name != self._own and member.epoch not in self._refused
        }

    def _failed(self, e: Exception, *, trial: bool = False) -> None:
        if not isinstance(e, OSError):
            log.error("the directory of nodes failed", exc_info=e)
            e = OSError(f"{type(e).__name__}: {e}")
        with self._lock:
            self._failures += 1
        self._availability.failed(e, trial=trial)

    def _late(self, verb: str, count: int) -> None:
        """A question to the directory was not answered in time."""
        self._failed(TimeoutError("it does not answer"), trial=verb == "members")

    # -- asking -------------------------------------------------------------------------------------------

    def _look_up(self, questions: Sequence[_Question], directory: BlockDirectory) -> list[list[tuple[int, ...]] | None]:
        """The holders of a question's blocks; none at all if there are so few members that all are asked."""
        (question,) = questions
        try:
            if self._members is None:
                self._fetch_members(directory)
            if len(self._members or ()) <= self._few:
                return [[]]
            holders = directory.holders([key for key, _ in question.left.values()])
        except Exception as e:  # noqa: BLE001 - whatever it is, it must not end the thread
            self._failed(e)
            return [None]
        self._availability.answered()
        with self._lock:
            self._lookups += 1
        return [holders]

    def _looked_up(self, question: _Question, results: Sequence[list[tuple[int, ...]] | None]) -> None:
        holders = results[0]
        if holders:
            members = self._members or {}
            question.holders = [[number for number in one if number in members] for one in holders]
            self._ask_holders(question)
        elif holders is None:
            self._ask_all(question)
        else:  # a few members: all of them are bound first
            self._put(question, self._bind_all_and_ask)

    def _put(self, question: _Question, call: Callable[[_Question], None]) -> None:
        """Go on with a question on the thread that binds positions."""

        def run() -> None:
            try:
                call(question)
            except BaseException:
                question.ended()  # else others would wait for this search for ever
                raise

        self._calls.put(run)

    def _bind_all_and_ask(self, question: _Question) -> None:
        self._rebind()
        self._ask_all(question)

    def _ask_all(self, question: _Question) -> None:
        places = [place for place in self._places if not place.position.away]
        self._ask(question, [(place, list(question.left.values())) for place in places])

    def _ask_holders(self, question: _Question) -> None:
        """Choose among the holders of the blocks that are left, and ask them."""
        question.rounds += 1
        numbers = list(question.left)
        seconds = functools.partial(self._seconds, question.nbytes, self._by_number())
        found = assign_blocks([question.holders[number] for number in numbers], seconds, len(self._places))
        chosen = {member: [numbers[i] for i in some] for member, some in found.items()}
        if all(self._place_of(number) is not None for number in chosen):
            self._ask_chosen(question, chosen)
        else:
            self._put(question, functools.partial(self._bind_and_ask, chosen))

    def _bind_and_ask(self, chosen: Mapping[int, Sequence[int]], question: _Question) -> None:
        for number in chosen:
            if (member := (self._members or {}).get(number)) is not None and self._place_of(number) is None:
                self._bind_one(member, chosen)
        self._ask_chosen(question, chosen)

    def _ask_chosen(self, question: _Question, chosen: Mapping[int, Sequence[int]]) -> None:
        asked: list[tuple[_Place, list[Wish]]] = []
        for number, blocks in chosen.items():
            for block in blocks:
                question.holders[block].remove(number)  # they are asked once
            if (place := self._place_of(number)) is not None:
                asked.append((place, [question.left[block] for block in blocks]))
        self._ask(question, asked)

    def _ask(self, question: _Question, asked: Sequence[tuple[_Place, list[Wish]]]) -> None:
        if not asked:
            self._answered(question)
            return
        question.unanswered = len(asked)
        began = self._clock.monotonic()
        for place, wishes in asked:
            place.used = began
            done = functools.partial(self._answer, question, place, place.position.member, wishes, began)
            place.position.find(wishes, done)

    def _answer(
        self,
        question: _Question,
        place: _Place,
        member: Member | None,
        wishes: Sequence[Wish],
        began: float,
        entries: Sequence[FoundBlock | None],
    ) -> None:
        """A node has answered, or has not in time."""
        here = {wish: entry for wish, entry in zip(wishes, entries, strict=True) if entry is not None}
        if member is not None and here:
            seconds = self._clock.monotonic() - began
            before = self._round_trips.get(member.address, seconds)
            self._round_trips[member.address] = before + _WEIGHT * (seconds - before)
        if here and place.position.member == member:
            question.found(place.cold, here)
        if place.position.replaced:
            self._calls.put(self._rebind)
        if member is not None and question.holders and not place.position.away:
            before = self._truth.get(member.address, 1.0)
            self._truth[member.address] = before + _DOUBT * (len(here) / len(wishes) - before)
            with self._lock:
                self._stale += len(wishes) - len(here)
        with question.lock:
            question.left = {i: wish for i, wish in question.left.items() if wish not in here}
            question.unanswered -= 1
            if question.unanswered:
                return
        self._answered(question)

    def _answered(self, question: _Question) -> None:
        """All that were asked have answered: ask further holders, or end."""
        more = question.holders and any(question.holders[i] for i in question.left)
        if more and question.rounds < _ROUNDS:
            self._ask_holders(question)
            return
        if len(self._absent) + len(question.left) >= REMEMBERED:
            self._absent.clear()
        until = self._clock.monotonic() + _ABSENT
        self._absent.update({key: until for key, _ in question.left.values()})
        question.ended()

    # -- positions ----------------------------------------------------------------------------------------

    def _by_number(self) -> dict[int, _Place]:
        bound = [(place, place.position.member) for place in self._places]
        return {member.number: place for place, member in bound if member is not None}

    def _place_of(self, number: int) -> _Place | None:
        """The position that is bound to a member."""
        place, member = self._by_number().get(number), (self._members or {}).get(number)
        return place if place is not None and place.position.member == member else None

    def _seconds(self, nbytes: float, bound: Mapping[int, _Place], number: int, blocks: int) -> float:
        """Expected seconds to find and read so many blocks, of ``nbytes`` each, from a member; more if it lately had
        less than it is said to have."""
        member = (self._members or {}).get(number)
        if member is None:
            return math.inf
        fixed = self._round_trips.get(member.address, _ROUND_TRIP)
        if (place := bound.get(number)) is not None:
            if place.position.away:
                return math.inf
            lane = place.cold.lane
            seconds = fixed + lane.read_speed.seconds(lane.read_bytes + blocks * nbytes)
        else:
            seconds = fixed + _CONNECTING + blocks * nbytes / self._speeds.get(member.address, SpeedState()).rate
        taste = zlib.crc32(self._own + number.to_bytes(8, "little")) / (1 << 32)
        return seconds * (1 + _SPREAD * taste) / max(_LEAST, self._truth.get(member.address, 1.0))

    def _rebind(self) -> None:
        """Unbind positions whose node is no member any more; and with a few members, bind all."""
        members = self._members or {}
        for place in self._places:
            member = place.position.member
            if member is None:
                continue
            if place.position.replaced:
                self._refused.add(member.epoch)
                self._members = members = {n: m for n, m in members.items() if m.epoch != member.epoch}
                with self._lock:
                    self._replaced += 1
            if members.get(member.number) != member:
                self._bind(place, None)
        if len(members) <= self._few:
            for member in members.values():
                if self._place_of(member.number) is None:
                    self._bind_one(member, members)

    def _bind_one(self, member: Member, needed: Iterable[int]) -> None:
        """Bind a position to a member, unless all are bound to ``needed`` members, or in use."""
        if (place := self._free_place({*needed})) is not None:
            self._bind(place, member)

    def _free_place(self, needed: set[int]) -> _Place | None:
        """A position that is bound to no member, or to one that is not needed. May wait a moment."""
        bound = [(place, place.position.member) for place in self._places]
        for place, member in bound:
            if member is None:
                return place
        others = [place for place, member in bound if member is not None and member.number not in needed]
        for place in sorted(others, key=lambda place: place.used):
            left = place.used + _SETTLED - self._clock.monotonic()
            if left > 0:
                time.sleep(min(_SETTLED, left))
            if not place.cold.lane.read_bytes:
                return place
        return None

    def _bind(self, place: _Place, member: Member | None) -> None:
        """Only on the thread that binds."""
        before, speed = place.position.member, place.cold.lane.read_speed
        if before is not None:
            place.position.bind(None)
            self.forget(place.cold.name)
        after = SpeedState() if member is None else self._speeds.get(member.address, SpeedState())
        measured = speed.replace(after)
        if before is not None:
            if len(self._speeds) >= _KNOWN:
                self._speeds.clear()
                self._round_trips.clear()
                self._truth.clear()
            self._speeds[before.address] = measured
        place.used = -math.inf
        if member is not None:
            place.position.bind(member)
            with self._lock:
                self._bound += 1

    # -- statistics, closing ------------------------------------------------------------------------------

    def statistics(self) -> ClusterStatistics:
        bound = self._by_number()
        members = self._members or {}
        with self._lock:
            counts = self._lookups, self._failures, self._replaced, self._stale, self._bound
        return ClusterStatistics(
            tuple(self._member(member, bound.get(number)) for number, member in sorted(members.items())),
            self._availability.away,
            *counts,
        )

    def _member(self, member: Member, place: _Place | None) -> MemberStatistics:
        if place is None or place.position.member != member:
            tier, away, state = "", False, self._speeds.get(member.address, SpeedState())
            rate = state.rate if state.measured else 0.0
        else:
            tier, away, speed = place.cold.name, place.position.away, place.cold.lane.read_speed.statistics()
            rate = speed.bytes_per_second if speed.measured else 0.0
        seconds = self._round_trips.get(member.address, 0.0)
        return MemberStatistics(member.number, member.epoch, member.address, tier, away, rate, seconds)

    def close(self) -> None:
        """End its threads. Searches under way may end never: there is no caller any more."""
        self._jobs.close()
        self._calls.close(DEADLINE)
        self._directory.close()
