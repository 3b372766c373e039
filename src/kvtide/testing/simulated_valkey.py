"""A simulated Valkey for the directory of a cluster, with a network that loses, delays and doubles messages.

``SimulatedValkey`` runs the scripts of ``kvtide.tiers.peers.directory_scripts`` in Python; ``DirectoryContract`` holds
for it and for a real server, so that what is proved with the one is true of the other. Nothing here has threads: time
is a clock that the test advances.
"""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvtide.clock import Clock
from kvtide.tiers.peers.directory_scripts import BASE, BUCKETS, EPOCH, HOLDERS, ITEM, PARTITIONS
from kvtide.tiers.shared.valkey_client import SLOTS, slot_of
from kvtide.tiers.shared.valkey_scripts import ScriptCall

__all__ = ["Fate", "SimulatedLink", "SimulatedValkey"]


@dataclass
class _Place:
    """What a server has under one hash tag."""

    leases: dict[int, int] = field(default_factory=dict)
    members: dict[int, bytes] = field(default_factory=dict)
    measured: dict[int, bytes] = field(default_factory=dict)
    epoch: int = 0
    version: int = 0
    cursor: int = 0
    roster: dict[int, int] = field(default_factory=dict)
    entries: int = 0
    buckets: dict[bytes, dict[bytes, bytes]] = field(default_factory=dict)


class SimulatedValkey:
    """A cluster of ``servers`` masters. ``watch`` is called with every script that is run, and its reply."""

    def __init__(
        self, clock: Clock, servers: int = 3, watch: Callable[[ScriptCall, Any], None] = lambda call, reply: None
    ) -> None:
        self._clock = clock
        self._watch = watch
        self._servers: list[dict[bytes, _Place]] = [{} for _ in range(servers)]
        self._saved = copy.deepcopy(self._servers)

    def server_of(self, key: bytes) -> int:
        """The server that has a key."""
        return slot_of(key) * len(self._servers) // SLOTS

    def run(self, call: ScriptCall) -> Any:
        """Run a script, and return its reply."""
        place = self._servers[self.server_of(call.key)].setdefault(call.key, _Place())
        reply = getattr(self, f"_{call.script.name}")(place, *call.arguments)
        self._watch(call, reply)
        return reply

    # -- what goes wrong ----------------------------------------------------------------------------------

    def lose(self, server: int) -> None:
        """A server is restarted, and has lost everything."""
        self._servers[server] = {}

    def save(self) -> None:
        """Keep what all servers have, for ``roll_back``."""
        self._saved = copy.deepcopy(self._servers)

    def roll_back(self, server: int) -> None:
        """A server is replaced by a replica that has not heard of anything since ``save``."""
        self._servers[server] = copy.deepcopy(self._saved[server])

    # -- what there is ------------------------------------------------------------------------------------

    @property
    def epochs(self) -> set[int]:
        """All epochs in entries."""
        places = [place for server in self._servers for place in server.values()]
        values = [value for place in places for bucket in place.buckets.values() for value in bucket.values()]
        return {number for value in values for number in _epochs(value)}

    # -- the scripts --------------------------------------------------------------------------------------

    def _now(self, place: _Place) -> int:
        now = int(self._clock.time() * 1000)
        ended = [epoch for epoch, end in place.leases.items() if end <= now]
        for epoch in ended:
            self._remove(place, epoch)
        if ended:
            self._changed(place, now)
        return now

    @staticmethod
    def _remove(place: _Place, epoch: int) -> None:
        place.leases.pop(epoch, None)
        place.members.pop(epoch, None)
        place.measured.pop(epoch, None)

    @staticmethod
    def _changed(place: _Place, now: int) -> None:
        place.version = max(place.version + 1, now)

    def _join(
        self, place: _Place, name: bytes, address: bytes, lease: bytes, least: bytes, again: bytes
    ) -> list[int | bytes]:
        now, mine, taken, other = self._now(place), None, set(), b""
        for epoch, about in list(place.members.items()):
            number, who = int.from_bytes(about[:2], "big"), about[2:18]
            if who != name and about[18:] == address:
                if again == b"1":
                    if mine is not None:
                        self._changed(place, now)
                    return [0, epoch, who]
                other = who
            if who in (name, other):
                mine = min(number, mine or number)
                self._remove(place, epoch)
            else:
                taken.add(number)
        number = mine or 1
        while number in taken:
            number += 1
        epoch = place.epoch = max(place.epoch + 1, now - BASE, int(least))
        place.members[epoch] = number.to_bytes(2, "big") + name + address
        place.leases[epoch] = now + int(lease)
        self._changed(place, now)
        return [number, epoch, other]

    def _renew(self, place: _Place, epoch: bytes, lease: bytes) -> int:
        now = self._now(place)
        if int(epoch) not in place.leases:
            return 0
        place.leases[int(epoch)] = now + int(lease)
        return 1

    def _check(self, place: _Place, epoch: bytes) -> int:
        self._now(place)
        return int(int(epoch) in place.leases)

    def _leave(self, place: _Place, epoch: bytes) -> int:
        now = self._now(place)
        self._remove(place, int(epoch))
        self._changed(place, now)
        return 1

    def _report(self, place: _Place, epoch: bytes, row: bytes) -> int:
        self._now(place)
        if int(epoch) not in place.leases:
            return 0
        place.measured[int(epoch)] = row
        return 1

    def _measured(self, place: _Place) -> list[bytes]:
        self._now(place)
        return [one for epoch, row in place.measured.items() for one in (b"%d" % epoch, row)]

    def _list(self, place: _Place, version: bytes) -> list[bytes]:
        now = self._now(place)
        found = [b"%d" % place.version]
        if found[0] == version:
            return found
        found.append(b"%d" % place.epoch)
        for epoch, end in place.leases.items():
            found += [b"%d" % epoch, b"%d" % (end - now), place.members[epoch]]
        return found

    def _turn(self, place: _Place, count: bytes) -> int:
        first = place.cursor
        place.cursor += int(count)
        return first % (PARTITIONS * BUCKETS)

    def _enrol(self, place: _Place, epoch: bytes, *before: bytes) -> int:
        new = int(epoch) not in place.roster
        place.roster.setdefault(int(epoch), 0)
        for one in before:
            place.roster.pop(int(one), None)
        return int(new)

    def _known(self, place: _Place, epoch: bytes) -> int:
        return place.roster.get(int(epoch), -1)

    def _lookup(self, place: _Place, items: bytes) -> bytes:
        values = [place.buckets.get(bucket, {}).get(name, b"") for bucket, name in _named(items)]
        return bytes(len(value) // EPOCH for value in values) + b"".join(values)

    def _publish(
        self, place: _Place, epoch: bytes, number: bytes, me: bytes, least: bytes, stored: bytes, removed: bytes
    ) -> int:
        last = place.roster.get(int(epoch), -1)
        if last < int(least):
            return -1
        if int(number) <= last:
            return int(int(number) == last)
        mine = int(epoch)
        for name, entry in _named(stored):
            bucket = place.buckets.setdefault(name, {})
            epochs = _epochs(bucket.get(entry, b""))
            place.entries += not epochs
            if mine not in epochs:
                if len(epochs) >= HOLDERS:
                    epochs.remove(next((one for one in epochs if one not in place.roster), epochs[0]))
                bucket[entry] = _packed([*epochs, mine])
        for name, entry in _named(removed):
            bucket = place.buckets.get(name, {})
            epochs = _epochs(bucket.get(entry, b""))
            self._set(place, bucket, entry, [one for one in epochs if one != mine])
        place.roster[mine] = int(number)
        assert me == mine.to_bytes(EPOCH, "big")
        return 1

    _withdraw = _publish

    @staticmethod
    def _set(place: _Place, bucket: dict[bytes, bytes], entry: bytes, epochs: list[int]) -> None:
        if epochs:
            bucket[entry] = _packed(epochs)
        elif bucket.pop(entry, None) is not None:
            place.entries -= 1

    def _scrub(self, place: _Place, live: bytes, newest: bytes, first: bytes, last: bytes) -> int:
        alive, removed = set(_epochs(live)), 0

        def dead(epoch: int) -> bool:
            return epoch <= int(newest) and epoch not in alive

        for bucket in self._between(place, first, last):
            for entry, value in list(bucket.items()):
                epochs = _epochs(value)
                kept = [epoch for epoch in epochs if not dead(epoch)]
                removed += len(epochs) - len(kept)
                self._set(place, bucket, entry, kept)
        place.roster = {epoch: number for epoch, number in place.roster.items() if not dead(epoch)}
        return removed

    def _sample(self, place: _Place, first: bytes, last: bytes) -> list[int]:
        buckets = self._between(place, first, last)
        return [place.entries, sum(len(k) + len(v) for bucket in buckets for k, v in bucket.items())]

    @staticmethod
    def _between(place: _Place, first: bytes, last: bytes) -> list[dict[bytes, bytes]]:
        """The buckets from the first to the last."""
        numbers = range(int(first), int(last) + 1)
        return [bucket for name, bucket in place.buckets.items() if int.from_bytes(name, "big") in numbers]


def _named(items: bytes) -> list[tuple[bytes, bytes]]:
    return [(items[i : i + 2], items[i + 2 : i + ITEM]) for i in range(0, len(items), ITEM)]


def _epochs(value: bytes) -> list[int]:
    return [int.from_bytes(value[i : i + EPOCH], "big") for i in range(0, len(value), EPOCH)]


def _packed(epochs: Sequence[int]) -> bytes:
    return b"".join(epoch.to_bytes(EPOCH, "big") for epoch in epochs)


class Fate(Enum):
    """What happens to the messages of one call, at one server."""

    GOOD = "good"
    LOST = "lost"
    """They do not arrive."""
    UNHEARD = "unheard"
    """They are run, and the reply is lost."""
    LATE = "late"
    """They are run later, when the caller has given up."""
    TWICE = "twice"
    """They are run now, and once more later."""


class SimulatedLink:
    """One node's way to a simulated Valkey: a runner of scripts. What is late is in ``late``, until it is delivered."""

    def __init__(self, valkey: SimulatedValkey, late: list[ScriptCall]) -> None:
        self._valkey = valkey
        self._late = late
        self.cut = False
        """Whether no message arrives."""
        self.fates: list[Fate] = []
        """Of the next messages, one for each server of each call; after these all is good."""
        self.messages = 0
        """Messages that were sent: one for each server of each call."""
        self.nbytes = 0
        """Bytes of the arguments."""

    def run(self, calls: Sequence[ScriptCall], timeout: float) -> list[Any]:
        groups: dict[int, list[int]] = {}
        for i, call in enumerate(calls):
            groups.setdefault(self._valkey.server_of(call.key), []).append(i)
        replies: list[Any] = [None] * len(calls)
        good = True
        for places in groups.values():
            fate = Fate.LOST if self.cut else self.fates.pop(0) if self.fates else Fate.GOOD
            self.messages += 1
            self.nbytes += sum(len(argument) for i in places for argument in calls[i].arguments)
            for i in places:
                if fate in (Fate.GOOD, Fate.UNHEARD, Fate.TWICE):
                    replies[i] = self._valkey.run(calls[i])
                if fate in (Fate.LATE, Fate.TWICE):
                    self._late.append(calls[i])
            good = good and fate in (Fate.GOOD, Fate.TWICE)
        if not good:
            raise TimeoutError(errno.ETIMEDOUT, "Valkey did not answer in time")
        return replies

    def close(self) -> None:
        self.cut = True
