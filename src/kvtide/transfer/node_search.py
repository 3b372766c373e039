"""Searches for blocks in the nodes of a cluster, whose members and blocks a directory in Valkey lists.

With a few members, all of them are asked, in one round trip to each in parallel: that is quicker than asking a
directory first, and needs nothing but the list of members, which is fetched now and then. With more, the directory is
asked once for all blocks of a search, and then only nodes that are said to have them. So the messages for a prompt do
not become more with the number of nodes.

The directory is a hint: a block counts as found when a node says itself that it has it. A directory that lies costs a
round trip. One that does not answer costs one deadline of ``DEADLINE`` seconds, and is then left alone for 1 s, 2 s,
4 s and so on (``Availability``); the nodes that are known and bound are asked meanwhile, all of them.

A member is asked through a *position* (``tiers/peers/position.py``), of which there are fewer than there may be
members. One thread (``_calls``) binds positions: first those that are bound to nobody, then the one at which nothing
was found for the longest time. Before a position is bound to another node, the index forgets what was found at the
earlier one. So a position is not taken while a request to its node is under way, or while a caller holds a match of
blocks that have yet to be read from it; nor within ``_SETTLED`` seconds after such blocks were found, for whoever waits
for them begins to hold them then. If no position can be taken, a block that only an unbound node has is not found, at
once. The speed that was measured for a node is kept for when it is bound again.

The list of members may be wrong too: a Valkey that was restarted has an empty one until all nodes have joined again. So
a bound node that answers is asked for one lease more after it was last listed.

Locks: that of a place is taken before the index lock, never the other way round. A search may begin with the index lock
held; nothing is found before that call returns.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
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
_OTHERS, _OTHERS_OF = 1 << 15, 3
"""Blocks of which further holders are remembered, the last ones; and how many of each."""
_ROUND_TRIP, _CONNECTING = 0.001, 0.004
"""Seconds expected for a request to a node that was not measured yet, and for binding a position to it."""
_SETTLED = 1.0
"""Seconds for which a position stays with its node after blocks were found there, unless they were all read before."""
_JOINED = 4096
"""Blocks that the directory is asked for at a time, if several searches wait for it."""
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
        """When something was last found there."""
        self.lock = threading.Lock()
        """Held while something that was found there is entered, and while the node is replaced."""


class _Question:
    """A search under way."""

    def __init__(self, wanted: Sequence[Wish], found: FoundIn, ended: Callable[[], None]) -> None:
        self.left = dict(enumerate(wanted))
        self.found = found
        self.ended = ended
        self.holders: list[list[int]] = []
        """For each block the members that may be asked for it, by number. Empty: all members are asked."""
        self.nbytes = sum(who.geometry.footprint for _, who in wanted) / max(1, len(wanted))
        self.answer: list[tuple[int, ...]] | None = None
        """The directory's, if it was ``asked``. None: it did not answer. Empty: all members are to be asked."""
        self.asked = False
        self.due = math.inf
        """When it has waited long enough for positions to be bound."""
        self.guessed = False
        """Whether members were asked that the directory did not name, because it has lost something."""
        self.again = False
        """Whether the blocks are known to be at another node, so that not to find them here says nothing."""
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
        self.release: Callable[[str, bool], bool] = lambda *_: True
        """The same, unless a caller was promised some of that. See ``PendingBlocks.release``."""
        self._places = [_Place(cold, position) for cold, position in positions]
        self._few = min(_FEW, len(positions))
        self._directory = directory
        self._endings = endings
        self._own = own
        self._clock = clock
        self._lease = lease
        self._interval = min(_OLDEST, max(_FRESHEST, lease / 4))
        self._availability = Availability(where, clock, "directory of nodes")
        self._members: Mapping[int, Member] | None = None
        """Other nodes, by number; None: not known yet."""
        self._due = -math.inf
        """When the list of members is to be fetched again."""
        self._fetching = False
        """Only used by the thread that binds, and when that has begun to fetch the list, until it has ended."""
        self._listed: dict[int, float] = {}
        """By epoch: when a member was last listed."""
        self._unlisted: set[int] = set()
        """Numbers of members that are not listed, and are asked still."""
        self._waiting: dict[_Question, None] = {}
        """Questions that wait for the directory."""
        self._refused: set[int] = set()
        """Epochs of members that were replaced."""
        self._absent: dict[BlockKey, float] = {}
        self._others: dict[BlockKey, tuple[int, ...]] = {}
        """Members that the directory named for a block, besides the one where it was found, by number."""
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
            with self._lock:
                self._waiting[question] = None
            batch = Batch("holders", [question], self._look_up, None, functools.partial(self._looked_up, question))
            self._jobs.submit(batch)
        else:
            self._ask_all(question)

    def find_other(self, wanted: Sequence[Wish], first: ColdTier, found: FoundIn, ended: Callable[[], None]) -> bool:
        """As ``find``, but only at one node that the directory has named for all of these blocks, besides that of the
        tier in which they were found ``first``. False if there is none: then nothing is called."""
        members = self._members or {}
        named = [{n for n in self._others.get(key, ()) if n in members} for key, _ in wanted]
        bound = next((p.position.member for p in self._places if p.cold is first), None)
        both = {n for n in set.intersection(*named) if members[n] != bound} if named else set()
        if not both:
            return False
        question = _Question(wanted, found, ended)
        question.holders = [[*both] for _ in wanted]
        question.rounds, question.again = _ROUNDS - 1, True
        self._ask_holders(question)
        return True

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
        """Fetch the list of members if that is due. Does not wait, and may be interrupted anywhere."""
        now = self._clock.monotonic()
        if now >= self._due:
            self._due = now + _FRESHEST  # whatever becomes of this call, there is another one then
            self._calls.put(self._fetch_soon)

    def _fetch_soon(self) -> None:
        """Only on the thread that binds: no caller interrupts it."""
        if self._fetching or (self._availability.away and not self._availability.try_again()):
            return
        self._fetching = True
        try:
            self._jobs.submit(Batch("members", [None], self._fetch, False, self._fetched))
        except BaseException:
            self._fetching = False
            raise

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
        now = self._clock.monotonic()
        unlisted = self._still_asked(found, now)
        self._listed = {member.epoch: self._listed[member.epoch] for member in unlisted.values()}
        self._listed |= dict.fromkeys([member.epoch for member in found.values()], now)
        self._refused &= self._listed.keys()
        self._unlisted = {*unlisted}
        self._members = unlisted | {
            number: member
            for number, member in found.items()
            if member.name != self._own and member.epoch not in self._refused
        }

    def _still_asked(self, found: Mapping[int, Member], now: float) -> dict[int, Member]:
        """Members that are missing from a list, and are believed to live all the same: see the module's docstring.
        One whose number was given to another gets its epoch for a number, which is greater than any number."""
        bound = {
            p.member.epoch for p in (place.position for place in self._places) if p.member is not None and not p.away
        }
        names, addresses = {m.name for m in found.values()}, {m.address for m in found.values()}
        return {
            member.epoch if member.number in found else member.number: member
            for member in (self._members or {}).values()
            if member.epoch in bound
            and member.name not in names
            and member.address not in addresses
            and now < self._listed.get(member.epoch, -math.inf) + self._lease
        }

    def _failed(self, e: Exception, *, trial: bool = False) -> None:
        if not isinstance(e, OSError):
            log.error("the directory of nodes failed", exc_info=e)
            e = OSError(f"{type(e).__name__}: {e}")
        with self._lock:
            self._failures += 1
        self._availability.failed(e, trial=trial)

    def _late(self, verb: str, count: int) -> None:
        """A question to the directory was not answered in time. One that was not even asked says nothing about it."""
        if self._jobs.hangs or (verb == "members" and self._availability.away):
            self._failed(TimeoutError("it does not answer"), trial=verb == "members")

    # -- asking -------------------------------------------------------------------------------------------

    def _look_up(self, questions: Sequence[_Question], directory: BlockDirectory) -> list[list[tuple[int, ...]] | None]:
        """The holders of a question's blocks; none at all if there are so few members that all are asked.

        What waits meanwhile is asked together with it, and has its answer when its turn comes."""
        (question,) = questions
        if not question.asked:
            try:
                self._look_up_all(self._with_waiting(question), directory)
            except Exception as e:  # noqa: BLE001 - whatever it is, it must not end the thread
                self._failed(e)
        return [question.answer]

    def _with_waiting(self, question: _Question) -> list[_Question]:
        together, count = [question], len(question.left)
        with self._lock:
            self._waiting.pop(question, None)
            for other in [*self._waiting]:
                count += len(other.left)
                if count > _JOINED:
                    break
                together.append(other)
                del self._waiting[other]
        for one in together:
            one.asked = True
        return together

    def _look_up_all(self, together: Sequence[_Question], directory: BlockDirectory) -> None:
        if self._members is None:
            self._fetch_members(directory)
        if len(self._members or ()) <= self._few:
            for question in together:
                question.answer = []
            return
        holders = iter(directory.holders([key for question in together for key, _ in question.left.values()]))
        for question in together:
            question.answer = [next(holders) for _ in question.left]
        self._availability.answered()
        with self._lock:
            self._lookups += 1

    def _looked_up(self, question: _Question, results: Sequence[list[tuple[int, ...]] | None]) -> None:
        with self._lock:
            self._waiting.pop(question, None)
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
        """Go on with a question on the thread that binds positions; if that takes too long, nothing more is found."""
        question.due = min(question.due, self._clock.monotonic() + DEADLINE)

        def run() -> None:
            try:
                if self._clock.monotonic() < question.due:
                    call(question)
                else:
                    self._over(question)
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
        if here and question.holders:
            self._remember_others(question, here)
        if here:
            with place.lock:
                if _same(place.position.member, member):
                    place.used = self._clock.monotonic()
                    question.found(place.cold, here)
        if place.position.replaced:
            self._calls.put(self._rebind)
        if member is not None and question.holders and not question.guessed and not place.position.away:
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

    def _remember_others(self, question: _Question, here: Mapping[Wish, FoundBlock]) -> None:
        """Remember who else is said to have blocks that were found, in case that their node is slow."""
        left, holders = question.left, question.holders
        new = {wish[0]: tuple(holders[i][:_OTHERS_OF]) for i, wish in left.items() if wish in here and holders[i]}
        with self._lock:
            self._others |= new
            while len(self._others) > _OTHERS:
                del self._others[next(iter(self._others))]

    def _answered(self, question: _Question) -> None:
        """All that were asked have answered: ask further holders, or end."""
        more = question.holders and any(question.holders[i] for i in question.left)
        if more and question.rounds < _ROUNDS:
            self._ask_holders(question)
        elif question.holders and question.left and not question.guessed and (unlisted := self._unlisted_places()):
            question.guessed = True
            self._ask(question, [(place, list(question.left.values())) for place in unlisted])
        else:
            self._over(question)

    def _unlisted_places(self) -> list[_Place]:
        if not self._unlisted:
            return []
        bound = self._by_number()
        return [bound[n] for n in self._unlisted if n in bound and not bound[n].position.away]

    def _over(self, question: _Question) -> None:
        """What is left was not found."""
        if question.again:
            question.ended()
            return
        if len(self._absent) + len(question.left) >= REMEMBERED:
            self._absent.clear()
        until = self._clock.monotonic() + _ABSENT
        self._absent.update({key: until for key, _ in question.left.values()})
        question.ended()

    # -- positions ----------------------------------------------------------------------------------------

    def _by_number(self) -> dict[int, _Place]:
        """The positions that are bound to members, by the members' numbers."""
        by_epoch = {member.epoch: place for place in self._places if (member := place.position.member) is not None}
        members = (self._members or {}).items()
        return {number: by_epoch[member.epoch] for number, member in members if member.epoch in by_epoch}

    def _place_of(self, number: int) -> _Place | None:
        """The position that is bound to a member."""
        if (member := (self._members or {}).get(number)) is None:
            return None
        return next((place for place in self._places if place.position.member == member), None)

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
            again = next((m for m in members.values() if m != member and _same(m, member)), None)
            if again is not None and not place.position.replaced:
                place.position.rename(again)  # it has joined again
                continue
            if place.position.replaced:
                self._refused.add(member.epoch)
                self._members = members = {n: m for n, m in members.items() if m.epoch != member.epoch}
                with self._lock:
                    self._replaced += 1
            if member not in members.values():
                self._unbind(place)
        if len(members) <= self._few:
            for number, member in members.items():
                if self._place_of(number) is None:
                    self._bind_one(member, members)

    def _bind_one(self, member: Member, needed: Iterable[int]) -> None:
        """Bind a position to a member, unless all are bound to ``needed`` members, or in use."""
        if (place := self._free_place({*needed})) is not None:
            self._bind(place, member)

    def _free_place(self, needed: set[int]) -> _Place | None:
        """A position that is bound to no member now, though it may have been until then. Does not wait."""
        keep = {number: place for number, place in self._by_number().items() if number in needed}.values()
        for place in self._places:
            if place.position.member is None:
                return place
        others = [place for place in self._places if place not in keep]
        return next((place for place in sorted(others, key=lambda place: place.used) if self._taken(place)), None)

    def _taken(self, place: _Place) -> bool:
        """Unbind a position, unless that would take away what a caller was promised."""
        with place.lock:
            if place.cold.lane.read_bytes or place.position.busy:
                return False
            if not self.release(place.cold.name, self._clock.monotonic() < place.used + _SETTLED):
                return False
            self._unbound(place)
        return True

    def _unbind(self, place: _Place) -> None:
        """Take a position from a node that is gone."""
        with place.lock:
            self._unbound(place)
            self.forget(place.cold.name)

    def _unbound(self, place: _Place) -> None:
        """Only on the thread that binds, with the lock of the place."""
        before = place.position.member
        place.position.bind(None)
        measured = place.cold.lane.read_speed.replace(SpeedState())
        place.used = -math.inf
        if before is None:
            return
        if len(self._speeds) >= _KNOWN:
            self._speeds.clear()
            self._round_trips.clear()
            self._truth.clear()
        self._speeds[before.address] = measured

    def _bind(self, place: _Place, member: Member) -> None:
        """Bind a position that is bound to none. Only on the thread that binds."""
        place.cold.lane.read_speed.replace(self._speeds.get(member.address, SpeedState()))
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


def _same(one: Member | None, other: Member | None) -> bool:
    """Whether two members are the same opened store, which may have joined again between."""
    return one is not None and other is not None and (one.name, one.address) == (other.name, other.address)
