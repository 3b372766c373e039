"""Which node has which block, in Valkey, for a cluster of many nodes.

Every node publishes what it has, and a lookup asks the directory instead of all nodes: one message to each server of
Valkey, however many nodes there are. Everything said here is a *hint*. Only the node that is then asked knows whether
it has the block, and every byte that it sends is verified. So the directory may be wrong for a while, or lose
everything, and that costs time, never a wrong byte.

**Who is believed.** A node is a member with a lease and an *epoch*, which no other member ever had. Entries consist of
epochs. A lookup returns the epochs, and whether the list of live members has changed since the last lookup; epochs that
are not live are ignored. So all entries of a node vanish at the moment that its lease ends, and those of a node that
was restarted, or had lost its lease, never come back.

**Memory.** What the dead have published is removed by ``scrub``, in slices. The live nodes run them in turn, all the
time (``kvtide.peers.membership``). Expiry by Valkey itself would not do, since a bucket has the entries of many nodes,
and the busiest of them would keep it. It is only for the case that no node is left: then all keys vanish after a day.

**Names.** A block is known by 58 bits of its key: 4 for the partition, 14 for the bucket, 40 for the field. The key is
a keyed hash, under the naming secret of its tenant, so nobody who reads the directory learns what a block is, nor
whether a prompt that they guess is there, without that secret. Who may read the directory can see how many blocks each
node has, and which nodes have the same one. Two blocks with the same bits are taken for one: with ten million entries,
one in 30 billion blocks that are looked up gets a wrong hint. The keys in Valkey begin with ``kvtide:`` and the name
of the cluster.

**Order of messages.** See directory_scripts.py. One object publishes for a member, with one call after the other.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvtide.block import DIGEST, BlockKey
from kvtide.errors import ConfigError
from kvtide.tiers.peers import directory_scripts as scripts
from kvtide.tiers.peers.directory_scripts import ABOUT, BASE, BUCKETS, EPOCH, ITEM, PARTITIONS
from kvtide.tiers.peers.measurements import Measurement, pack_measurements, unpack_measurements
from kvtide.tiers.peers.members import Member
from kvtide.tiers.shared.valkey_client import SLOTS, Login, UnfitServer, ValkeyClient, slot_of
from kvtide.tiers.shared.valkey_scripts import Script, ScriptCall, ScriptRunner, ValkeyScripts

__all__ = ["AddressTaken", "BlockDirectory", "DirectoryStatistics", "Leases", "marks_of", "open_directory"]

log = logging.getLogger("kvtide.peers")

_SAMPLES, _SAMPLE = 4, 16
"""How many stretches of buckets of a partition are measured, and how many buckets each has."""

_VERSION = 7
"""Of the server, at least: PEXPIRE with NX, and flags of scripts."""
_PATIENCE = 2
"""How many times the usual time a join or renewal may take: a server that is too busy for the publishes of all nodes
must not end their leases too, or all publish everything again."""
_PART = 3
"""But a renewal takes no more than this part of the lease: else one that is late would be the last."""
_JOINS = 5
"""How often an epoch is asked for, if it turns out to have been given before."""
_AHEAD = 60_000
"""The next one is up to so much higher: the time in milliseconds that a clock may be behind."""

_SHOWN, _FEW = 40, 5
"""Bytes of an entry that makes no sense, and how many such entries, that a message shows."""

_EPOCHS = 1 << 8 * EPOCH
"""Epochs are less than this."""

Marks = npt.NDArray[np.uint64]


class AddressTaken(OSError):  # noqa: N818 - a finding
    """Another node, which is a member now, announces the same address."""


@dataclass(frozen=True, slots=True)
class DirectoryStatistics:
    """What a directory has."""

    entries: int
    """Blocks that some node was said to hold, including those of dead nodes that were not removed yet. It may be wrong
    after the server has evicted or lost some."""
    nbytes: int
    """Bytes of the server's memory for them, estimated from a sample."""
    members: int


class Leases(NamedTuple):
    """The live members at one moment."""

    newest: int
    """The last epoch that was given."""
    left: Mapping[Member, float]
    """Seconds until the lease of each ends, unless it is renewed."""


class _Known(NamedTuple):
    """The members as a directory knows them."""

    asked: int
    """The number of the question: the answer to a later one is newer, except for a moment when they overtake."""
    version: bytes
    members: Mapping[int, Member]
    epochs: npt.NDArray[np.uint64]
    """Sorted."""
    numbers: npt.NDArray[np.int64]
    """In the order of ``epochs``."""


_UNKNOWN = _Known(0, b"", MappingProxyType({}), np.zeros(0, np.uint64), np.zeros(0, np.int64))


def _tags() -> list[bytes]:
    """Hash tags of the partitions, so that each server of a cluster has as many as its share of the slots."""
    found: dict[int, bytes] = {}
    number = 0
    while len(found) < PARTITIONS:
        tag = b"%d" % number
        found.setdefault(slot_of(tag) * PARTITIONS // SLOTS, tag)
        number += 1
    return [found[i] for i in range(PARTITIONS)]


class BlockDirectory:
    """The directory of one cluster. Thread-safe, but one thread at a time should publish for a member.

    Every question to Valkey, one or two for a call, takes ``timeout`` seconds at most; those that a membership depends
    on, ``_PATIENCE`` times as many. A call raises OSError if Valkey does not answer, refuses, or answers what makes no
    sense.
    """

    def __init__(
        self, runner: ScriptRunner, *, cluster: str = "default", timeout: float = 1.0, where: str = "Valkey"
    ) -> None:
        """``where`` it is, for messages."""
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", cluster):
            raise ConfigError(f"the cluster's name is {cluster!r}; use up to 64 letters, digits, dots, _ and -")
        self._runner = runner
        self._timeout = timeout
        self._cluster = cluster
        self.where = where
        self._place = f"kvtide:{cluster}:{{members}}".encode()
        self._partitions = [b"kvtide:%b:{%b}" % (cluster.encode(), tag) for tag in _tags()]
        self._known = _UNKNOWN
        self._asked = itertools.count(1)
        self._learning = threading.Lock()
        self._masks: dict[bytes, int] = {}
        self._publishing = threading.Lock()
        self._before: dict[bytes, int] = {}
        """The last epoch of each name that joined here."""
        self._number = 0
        """Of the last publish."""
        self._acknowledged: dict[int, list[int]] = {}
        """By epoch, for members that joined here: the last publish that each partition is known to have run."""
        self._strange: Sequence[bytes] = ()
        """The last entries in the list of members that made no sense: they are logged once."""

    def __repr__(self) -> str:
        return f"<BlockDirectory {self._cluster}: {len(self._known.members)} members>"

    # -- members ------------------------------------------------------------------------------------------

    def join(self, name: bytes, address: str, lease: float, *, again: bool = False) -> Member:
        """Become a member for ``lease`` seconds. A member with the same name or address is one no more: it was an
        earlier incarnation of this node. Not so if this one has joined ``again``, without a restart between: then it
        can only be another node with the same address, and AddressTaken is raised."""
        if len(name) != 16:
            raise ValueError(f"the name has {len(name)} bytes, not 16")
        least = 0
        for _ in range(_JOINS):
            about = (name, address.encode(), _milliseconds(lease), b"%d" % least, b"%d" % again)
            (reply,) = self._run([self._about(scripts.JOIN, *about)], _PATIENCE)
            *numbers, other = _items(reply, 3)
            number, epoch = map(_whole, numbers)
            if not 0 <= number < 1 << 16 or not 0 < epoch < _EPOCHS or not isinstance(other, bytes):
                raise _nonsense()
            if not number:
                raise _taken(address, name, other, epoch)
            if other:
                log.info(
                    "this node, store %s, is the member at %s now; before, it was store %s: an earlier process of this "
                    "node, unless another node announces the same address",
                    name.hex(),
                    address,
                    other.hex(),
                )
            epochs = (b"%d" % epoch, *([b"%d" % self._before[name]] if name in self._before else []))
            enrolling = [ScriptCall(scripts.ENROL, key, epochs) for key in self._partitions]
            enrolled = self._run(enrolling, _PATIENCE)
            if all(_whole(new) for new in enrolled):
                self._acknowledged = {epoch: [0] * PARTITIONS}
                self._before[name] = epoch
                return Member(number, epoch, name, address)
            least = epoch + secrets.randbelow(_AHEAD) + 1
        raise OSError(errno.EAGAIN, "Valkey gives epochs that it gave before: is its clock right?")

    def renew(self, member: Member, lease: float) -> bool:
        """Extend the lease to ``lease`` seconds from now. False if it has ended, or if Valkey has lost something that
        the member published: then it must join again, and publish everything again. If some servers do not answer, but
        the one with the members does, the lease is extended, and what the others have is not known: this is True."""
        epoch, most = b"%d" % member.epoch, lease / _PART / self._timeout
        renewing = [self._about(scripts.RENEW, epoch, _milliseconds(lease))]
        (alive,) = self._run(renewing, min(_PATIENCE, most))
        if _whole(alive) != 1:
            return False
        expected = list(self._acknowledged.get(member.epoch, [0] * PARTITIONS))
        try:
            asking = [ScriptCall(scripts.KNOWN, key, (epoch,)) for key in self._partitions]
            known = self._run(asking, min(1.0, most / 2))
            return all(_whole(number) >= least for number, least in zip(known, expected, strict=True))
        except OSError:
            return True

    def leave(self, member: Member) -> None:
        """End the lease now."""
        self._call(scripts.LEAVE, b"%d" % member.epoch)

    def members(self) -> Mapping[int, Member]:
        """The live members, by number."""
        known, _ = self._ask([])
        return known.members

    def leases(self) -> Leases:
        """The live members, with the time that each has left. Removes entries that no node has written."""
        leases, strange = _parsed(self._call(scripts.LIST, b""))
        if strange and strange != self._strange:
            log.warning(
                "the directory has %d entries in its list of members that no node has written (%s): does another "
                "program use it? They are removed",
                len(strange),
                ", ".join(repr(one[:_SHOWN]) for one in strange[:_FEW]),
            )
        self._strange = strange
        if strange:
            with contextlib.suppress(OSError):
                self._run([self._about(scripts.LEAVE, one) for one in strange])
        return leases

    def report(self, member: Member, measured: Mapping[int, Measurement]) -> bool:
        """Say what a member has measured of others, by their epochs, until it reports again or is no member any more.
        False if its lease has ended."""
        return _whole(self._call(scripts.REPORT, b"%d" % member.epoch, pack_measurements(measured))) == 1

    def measurements(self) -> dict[int, dict[int, Measurement]]:
        """By epoch, what each live member has measured of others, by their epochs. Members of an older version, and
        those whose row makes no sense, are not there."""
        reply = self._call(scripts.MEASURED)
        if not isinstance(reply, list) or len(reply) % 2:
            raise _nonsense()
        rows = {
            _whole(epoch): row for epoch, row in zip(reply[::2], reply[1::2], strict=True) if isinstance(row, bytes)
        }
        return {epoch: found for epoch, row in rows.items() if (found := unpack_measurements(row))}

    # -- blocks -------------------------------------------------------------------------------------------

    def holders(self, keys: Sequence[BlockKey]) -> list[tuple[int, ...]]:
        """For each block the numbers of the live members that are said to hold it; at most 12 of them."""
        if not keys:
            return []
        parts = self._divided(marks_of(keys, self._masks))
        calls = [ScriptCall(scripts.LOOKUP, self._partitions[one], (items,)) for one, items, _ in parts]
        known, replies = self._ask(calls)
        answers = [_answer(reply, len(places)) for reply, (_, _, places) in zip(replies, parts, strict=True)]
        places = np.concatenate([places for _, _, places in parts])
        counts = np.frombuffer(b"".join([count for count, _ in answers]), np.uint8)
        return _numbers(known, places, counts, b"".join([epochs for _, epochs in answers]))

    def publish(self, member: Member, stored: Sequence[BlockKey], removed: Sequence[BlockKey]) -> bool:
        """Say that a member holds the blocks ``stored``, and not those ``removed``; no block may be in both. False if
        its lease has ended, or if Valkey has lost what it published: then it must join again, and publish everything
        again. After an OSError nobody knows what was published: publish the same again, or what is true by then."""
        if removed and not self._say(member, scripts.WITHDRAW, (), removed):
            return False
        return self._say(member, scripts.PUBLISH, stored, ()) if stored or not removed else True

    def _say(self, member: Member, script: Script, stored: Sequence[BlockKey], removed: Sequence[BlockKey]) -> bool:
        """One publish. A script of its own withdraws, in a call of its own: a server that is full refuses to store."""
        epoch, me = b"%d" % member.epoch, member.epoch.to_bytes(EPOCH, "big")
        with self._publishing:
            self._number = number = self._number + 1
            acknowledged = self._acknowledged.setdefault(member.epoch, [0] * PARTITIONS)
            parts, calls = [], [self._about(scripts.CHECK, epoch)]
            for one, items, _ in self._divided(marks_of(stored or removed, self._masks)):
                both = (items, b"") if stored else (b"", items)
                about = (epoch, b"%d" % number, me, b"%d" % acknowledged[one], *both)
                parts.append(one)
                calls.append(ScriptCall(script, self._partitions[one], about))
            alive, *replies = self._run(calls)
            results = [_whole(reply) for reply in replies]
            for one, result in zip(parts, results, strict=True):
                if result == 1:
                    acknowledged[one] = number
        if 0 in results:
            raise OSError(errno.EBUSY, "another object publishes for this member at the same time")
        return _whole(alive) == 1 and -1 not in results

    def _divided(self, marks: Marks) -> list[tuple[int, bytes, npt.NDArray[np.int64]]]:
        """The partitions that marks fall into: its number, the items for its scripts, and which of the marks these
        are."""
        if not len(marks):
            return []
        partition = (marks >> np.uint64(60)).astype(np.int64)
        order = np.argsort(partition, kind="stable")
        low = marks[order]
        bucket = (low >> np.uint64(46)) & np.uint64(BUCKETS - 1)
        items = (bucket << np.uint64(40)) | (low & np.uint64((1 << 40) - 1))
        data = items.astype(">u8").view(np.uint8).reshape(-1, 8)[:, 8 - ITEM :].tobytes()
        edges = np.searchsorted(partition[order], np.arange(PARTITIONS + 1)).tolist()
        return [
            (one, data[start * ITEM : stop * ITEM], order[start:stop])
            for one, (start, stop) in enumerate(itertools.pairwise(edges))
            if stop > start
        ]

    # -- memory -------------------------------------------------------------------------------------------

    def scrub(self, buckets: int, leases: Leases | None = None) -> int:
        """Remove what the dead have published from the next ``buckets`` buckets, of ``PARTITIONS * BUCKETS``, whoever
        scrubbed those before; returns the number of entries removed. Do it in small slices: the server does nothing
        else meanwhile. ``leases``: if they were just fetched; members that joined since are safe."""
        leases = leases or self.leases()
        live = b"".join(sorted(member.epoch.to_bytes(EPOCH, "big") for member in leases.left))
        first = _whole(self._call(scripts.TURN, b"%d" % buckets))
        calls, stop = [], first + min(buckets, PARTITIONS * BUCKETS)
        while first < stop:
            partition, bucket = divmod(first, BUCKETS)
            last = min(BUCKETS, bucket + stop - first) - 1
            arguments = (live, b"%d" % leases.newest, b"%d" % bucket, b"%d" % last)
            calls.append(ScriptCall(scripts.SCRUB, self._partitions[partition % PARTITIONS], arguments))
            first += last + 1 - bucket
        return sum(_whole(reply) for reply in self._run(calls))

    def counts(self) -> DirectoryStatistics:
        """What the directory has. Bytes are estimated from a thousand buckets."""
        calls = []
        for key in self._partitions:
            for _ in range(_SAMPLES):
                first = secrets.randbelow(BUCKETS - _SAMPLE)
                calls.append(ScriptCall(scripts.SAMPLE, key, (b"%d" % first, b"%d" % (first + _SAMPLE - 1))))
        known, replies = self._ask(calls)
        found = [[_whole(one) for one in _items(reply, 2)] for reply in replies]
        entries = sum(max(0, entries) for entries, _ in found[::_SAMPLES])
        nbytes = sum(nbytes for _, nbytes in found) * PARTITIONS * BUCKETS // (len(calls) * _SAMPLE)
        return DirectoryStatistics(entries, nbytes, len(known.members))

    def close(self) -> None:
        """Close its connections."""
        self._runner.close()

    # -- calls --------------------------------------------------------------------------------------------

    def _about(self, script: Script, *arguments: bytes) -> ScriptCall:
        """A call about the members."""
        return ScriptCall(script, self._place, arguments)

    def _call(self, script: Script, *arguments: bytes) -> Any:
        return self._run([self._about(script, *arguments)])[0]

    def _run(self, calls: Sequence[ScriptCall], patience: float = 1.0) -> list[Any]:
        return self._runner.run(calls, patience * self._timeout)

    def _ask(self, calls: Sequence[ScriptCall]) -> tuple[_Known, list[Any]]:
        """The replies to calls, and the members, asked for in the same message. Other threads ask too, so both the
        version that was sent and the members that go with these replies are this call's own."""
        known, number = self._known, next(self._asked)
        reply, *replies = self._run([self._about(scripts.LIST, known.version), *calls])
        if not isinstance(reply, list) or reply != [known.version]:
            members = sorted(_parsed(reply)[0].left, key=lambda member: member.epoch)
            known = _Known(
                number,
                reply[0],
                MappingProxyType({member.number: member for member in members}),
                np.array([member.epoch for member in members], np.uint64),
                np.array([member.number for member in members], np.int64),
            )
            with self._learning:
                if number > self._known.asked:
                    self._known = known
        return known, replies


def open_directory(
    url: str,
    *,
    cluster: str = "default",
    timeout: float = 1.0,
    where: str = "",
    login: Login = Login(prefix="peers.directory_", url="peers.directory"),  # noqa: B008
) -> BlockDirectory:
    """The directory of a cluster in the Valkey at ``url`` (``valkey://host:6379/0``, ``valkeys://`` for TLS), which may
    be a cluster itself. Raises ConfigError, or TierError if the server was reached and cannot be used. It need not be
    there yet. ``where`` is shown in messages instead of ``url``."""
    login = login._replace(harm="say which node has which block")
    client = ValkeyClient(url, login, _check_version, lost="what other nodes have is not known")
    return BlockDirectory(ValkeyScripts(client), cluster=cluster, timeout=timeout, where=where or url)


def _check_version(about: Mapping[str, str]) -> None:
    """Raise unless the server has what the scripts use. Valkey says which version of Redis it is compatible with."""
    version = about.get("redis_version", "")
    major = version.partition(".")[0]
    if major.isdecimal() and int(major) < _VERSION:
        raise UnfitServer(errno.EINVAL, f"its version is {version}; the directory of a cluster needs {_VERSION}.0")


def marks_of(keys: Sequence[BlockKey], masks: dict[bytes, int] | None = None) -> Marks:
    """The bits by which the directory knows blocks: the beginning of the digest, changed by the group, since the blocks
    of all groups have the same digest. ``masks`` is a cache."""
    if not keys:
        return np.zeros(0, np.uint64)
    masks = {} if masks is None else masks
    size = len(keys[0])
    data = b"".join(keys)
    if len(data) == size * len(keys) and set(map(len, keys)) == {size}:
        whole = np.frombuffer(data, np.uint8).reshape(-1, size)
        if (whole[:, DIGEST:] == whole[0, DIGEST:]).all():  # blocks of one group, as in nearly every call
            marks: Marks = np.ascontiguousarray(whole[:, :8]).view(">u8").ravel().astype(np.uint64)
            marks ^= np.uint64(_mask(keys[0][DIGEST:], masks))
            return marks
    marks = np.frombuffer(b"".join([key[:8] for key in keys]), ">u8").astype(np.uint64)
    marks ^= np.array([_mask(key[DIGEST:], masks) for key in keys], np.uint64)
    return marks


def _mask(group: bytes, masks: dict[bytes, int]) -> int:
    if group not in masks:
        masks[group] = int.from_bytes(blake3(group, derive_key_context="kvtide 1 directory").digest(8), "big")
    return masks[group]


def _milliseconds(seconds: float) -> bytes:
    return b"%d" % max(1, round(1000 * seconds))


def _nonsense() -> OSError:
    return OSError(errno.EPROTO, "what Valkey has there is not a directory of kvtide")


def _whole(reply: Any) -> int:
    """A whole number."""
    if isinstance(reply, bytes) and reply.isdigit() and len(reply) < 20:
        return int(reply)
    if not isinstance(reply, int) or not -(1 << 63) <= reply < 1 << 63:
        raise _nonsense()
    return reply


def _items(reply: Any, count: int) -> list[Any]:
    if not isinstance(reply, list) or len(reply) != count:
        raise _nonsense()
    return reply


def _parsed(reply: Any) -> tuple[Leases, list[bytes]]:
    """The members of a list, and the epochs of entries in it that no node has written."""
    if not isinstance(reply, list) or len(reply) < 2 or len(reply) % 3 != 2 or not isinstance(reply[0], bytes):
        raise _nonsense()
    left, strange = dict[Member, float](), list[bytes]()
    for i in range(2, len(reply), 3):
        epoch, rest, about = reply[i : i + 3]
        try:
            member, seconds = _member(epoch, about), _whole(rest) / 1000
        except (OSError, ValueError):
            strange += [epoch] if isinstance(epoch, bytes) else []
        else:
            left[member] = seconds
    return Leases(_whole(reply[1]), left), strange


def _member(epoch: Any, about: Any) -> Member:
    """Raises OSError or ValueError."""
    if not isinstance(about, bytes) or len(about) < ABOUT:
        raise _nonsense()
    address = about[ABOUT:].decode()
    member = Member(int.from_bytes(about[:2], "big"), _whole(epoch), about[2:ABOUT], address)
    if not 0 < member.epoch < _EPOCHS or not address.isprintable():  # it is logged and shown
        raise _nonsense()
    return member


def _taken(address: str, mine: bytes, other: bytes, epoch: int) -> AddressTaken:
    since = datetime.fromtimestamp((epoch + BASE) // 1000, UTC)
    return AddressTaken(
        errno.EADDRINUSE,
        f"two nodes announce the address {address}: this one, store {mine.hex()}, and store {other.hex()}, which "
        f"joined at {since:%Y-%m-%d %H:%M:%S} UTC and remains the member. Give each node an address of its own: "
        "peers.announce, or peers.listen",
    )


def _answer(reply: Any, count: int) -> tuple[bytes, bytes]:
    """The number of holders of each of ``count`` blocks, a byte each, and the epochs of all."""
    if not isinstance(reply, bytes) or len(reply) < count or len(reply) != count + EPOCH * sum(reply[:count]):
        raise _nonsense()
    return reply[:count], reply[count:]


def _numbers(
    known: _Known, places: npt.NDArray[np.int64], counts: npt.NDArray[np.uint8], packed: bytes
) -> list[tuple[int, ...]]:
    """The members that hold each block. ``counts`` and the epochs ``packed`` are of the blocks at ``places``."""
    found: list[tuple[int, ...]] = [()] * len(places)
    total = len(packed) // EPOCH
    if not total or not len(known.epochs):
        return found
    wide = np.zeros((total, 8), np.uint8)
    wide[:, 8 - EPOCH :] = np.frombuffer(packed, np.uint8).reshape(total, EPOCH)
    epochs = wide.view(">u8").reshape(total).astype(np.uint64)
    at = np.minimum(np.searchsorted(known.epochs, epochs), len(known.epochs) - 1)
    live = known.epochs[at] == epochs
    dead = not live.all()
    if not dead and counts.max() == 1:  # a holder each, as for most prompts
        ones = [(number,) for number in known.numbers.tolist()]
        for place, i in zip(places[counts == 1].tolist(), at.tolist(), strict=True):
            found[place] = ones[i]
        return found
    numbers, flags = known.numbers[at].tolist(), live.tolist()
    start = 0
    for place, count in zip(places.tolist(), counts.tolist(), strict=True):
        if count:
            stop = start + count
            if dead:
                found[place] = tuple(
                    [n for n, good in zip(numbers[start:stop], flags[start:stop], strict=True) if good]
                )
            else:
                found[place] = tuple(numbers[start:stop])
            start = stop
    return found
