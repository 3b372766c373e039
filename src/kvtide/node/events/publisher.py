"""Publishes which blocks a node has, as vLLM publishes those of an engine: over ZeroMQ, with a second socket for
replays.

**Nobody waits for it.** The node's loop and the threads that move blocks only add to a queue. One thread does the rest:
it looks up what was described and what happened (``described.py``), encodes it (``wire.py``) and sends it. Without a
consumer nothing is followed, looked up or encoded: descriptions are kept, and that is all. With the first subscription,
or the first replay, consumers are told to forget everything and are then told all that is stored. So are all of them
with a later subscription: the subscriber may be a new one, or one that was away and missed what was removed. To tell
blocks twice instead would mislead consumers that count how often they were told of a block. It is done so rarely that
subscribers who come and go cost others little: after the last one has left, events are followed until it may be done
again.

**Numbers.** Each batch has the next number, and a number is never used again, by no later process either: see
``numbers.py``. So a consumer that asks for what it missed before a restart asks for a number that this process knows to
be an older one.

**Replay.** A consumer asks for the batches from a number on. If all of them are in the buffer, it gets these. If not,
it gets a snapshot: a batch that clears everything, and all that is published at this moment. The snapshot is sent under
the last numbers before the next one, so that the batches that follow connect to it.

**A slow consumer** gets as many batches as its buffer has room for and misses the others, which it sees by their
numbers. A consumer of a replay that does not read is not sent more until it does, and is given up after a while.

**The node's loop needs the interpreter.** So blocks are published a few at a time, with a pause between.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import threading
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import zmq

from kvtide.block import Kind
from kvtide.config import Events
from kvtide.errors import ConfigError
from kvtide.events import BlockRemoved, BlockStored, Event, EventsLost
from kvtide.index.index import DRAM
from kvtide.index.keys import DEFAULT_TENANT, parse_tag
from kvtide.index.work_slices import rest
from kvtide.node.events import wire
from kvtide.node.events.described import BlockColumns, BlockSource, Change, DescribedBlocks
from kvtide.node.events.numbers import BatchNumbers
from kvtide.store.backend import LocalBackend
from kvtide.store.node_statistics import KvEventStatistics
from kvtide.store.partition import NVME
from kvtide.store.store import Store

__all__ = ["NodeEvents"]

log = logging.getLogger("kvtide.events")

_GATHER = 0.02
"""Seconds that events are gathered before they are published."""
_BETWEEN = 0.05
"""Seconds from one batch to the next, at least: to publish a few blocks costs half as much as to publish 50."""
_IDLE = 1.0
"""Seconds after which the thread looks at its queues, whatever happens."""
_ANEW = 5.0
"""Seconds after which consumers are told everything again, if there are new ones; and so many times as long as it took
to tell them."""
_LINGER = 30.0
"""Seconds that events are followed after the last replay without a subscriber."""
_WAITING = 250_000
"""Blocks of events of the store that may wait. If there are more, everything is looked at."""
_DESCRIPTIONS = 64 << 20
"""Bytes of descriptions that may wait. Blocks of those beyond are not published."""
_DESCRIPTION = 200
"""Bytes of a description, besides tokens and digests."""
_KEPT = 300
"""Bytes that a batch takes in the buffer besides its own."""
_REPLIES = 64
"""Replays at a time."""
_MESSAGES = 1024
"""Subscriptions that are read in one go."""
_SENDS = 16
"""Batches of one replay that are sent in one go."""
_UNSENT = 4
"""Batches of a replay that may wait for their consumer to read."""
_STALLED = 30.0
"""Seconds after which a replay is given up whose consumer does not read."""
_LARGER = 32
"""Of a batch's usual size, the most that one of a snapshot may have, so that it needs fewer numbers."""
_PADDING = 4096
"""Empty batches before a snapshot, at most, for consumers that require consecutive numbers from the first on."""
_FURTHEST = 1 << 48
"""A number that no earlier process can have reached: in milliseconds since 2026 it is 8,900 years. Numbers do not go on
from one that is larger, or an absurd request would use them up."""
_RETRY = 0.005
_END = b"\xff" * 8


@dataclass(slots=True)
class _Reply:
    """A replay that is being sent."""

    envelope: list[bytes]
    """The address of the consumer, and what it separates addresses from messages with."""
    batches: Iterator[tuple[int, bytes]]
    moved: float
    """When the consumer has read some of it last."""
    unsent: list[bytes] | None = None
    ended: bool = False


class NodeEvents:
    """Publishes the blocks of one model. ``describe`` is called by the node's loop."""

    def __init__(self, settings: Events, store: Store, numbers: Path | None = None) -> None:
        """``numbers``: a file that says which numbers earlier processes may have used. Raises ConfigError if it cannot
        listen."""
        self._settings = settings
        self._clock = store.clock
        self._feed = store.feed
        self._maps = settings.form == "map"
        self._topic = settings.topic.encode()
        self.wants = 2 if settings.token_ids else 1
        """What clients are asked to describe blocks with, as in ``Welcome``."""
        self._tenants = {_tag(name) for name in ["default", *settings.tenants.split()]}
        self._models: dict[bytes, tuple[bytes, bytes, bytes]] = {}
        """For each tenant, the layout, the namespace and the trust domain whose blocks are published."""
        self._sources: dict[bytes, BlockSource] = {}
        self._ignored = 0
        self._said: set[str] = set()
        """Reasons why blocks are not published that were logged."""
        self._described: deque[tuple[BlockSource, bytes, bytes, bytes]] = deque()
        self._described_bytes = self._taken_bytes = 0
        """Each is written by one thread only: the bytes that were put into the queue, and those taken from it."""
        self._undescribed = 0
        self._lock = threading.Lock()
        """For the four below, and for writing into ``_wake_fd``."""
        self._events: list[BlockStored | BlockRemoved] = []
        self._waiting = 0
        """Blocks in ``_events``."""
        self._missed = False
        """Whether events of the store did not fit."""
        self._gone = False
        """Whether ``_wake_fd`` is closed."""
        self._blocks = DescribedBlocks()
        self._encoder = wire.BatchEncoder(maps=self._maps)
        self._numbers = BatchNumbers(self._clock.time(), numbers)
        self._ring: OrderedDict[int, bytes] = OrderedDict()
        """The last batches by number, without gaps."""
        self._ring_bytes = 0
        self._topics: set[bytes] = set()
        """What consumers have subscribed to, of what is published here."""
        self._unfollow = self._no_follower
        self._active = self._fresh = self._filling = False
        """Whether events are followed; whether the next batch tells consumers to forget what they know; whether not
        all that was stored before is published yet, so that replays wait."""
        self._newcomer = False
        """Whether there is a subscriber who was not told what was published before."""
        self._anew = self._patience = 0.0
        """When it was begun last to tell everything, and how long it takes until that is done again."""
        self._replayed = -_LINGER
        self._due: float | None = None
        self._emitted = 0.0
        """When the last batch was published."""
        self._replies: dict[bytes, _Reply] = {}
        self._state: tuple[int, BlockColumns, array[int], bytes] | None = None
        """All that was published before a number, and where: for the snapshots of consumers that ask together."""
        self._batches = self._stored = self._removed = self._replays = self._snapshots = 0
        self._seconds = 0.0
        self._closed = False
        self._awake = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._zmq = zmq.Context()
        try:
            self._publish_socket = self._bound(zmq.XPUB, settings.endpoint, max(4, settings.buffer // wire.BATCH))
            self._replay_socket = self._bound(zmq.ROUTER, settings.replay, _UNSENT) if settings.replay else None
        except BaseException:
            self._zmq.destroy(0)
            os.close(self._wake_fd)
            raise
        self._publish_socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # later subscriptions to the same topic are told, too
        if self._replay_socket is not None:
            self._replay_socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._thread = threading.Thread(target=self._run, name="kvtide-kv-events", daemon=True)
        self._thread.start()

    def _bound(self, kind: int, endpoint: str, most: int) -> zmq.Socket[bytes]:
        scheme, _, where = endpoint.partition("://")
        if scheme not in ("tcp", "ipc") or not where:
            raise ConfigError(
                f"events: cannot listen at {endpoint!r}; give tcp://127.0.0.1:5557 or ipc:///run/kvtide.events"
            )
        if scheme == "tcp" and where.rpartition(":")[0].strip("[]") not in ("127.0.0.1", "localhost", "::1"):
            log.warning(
                "KV events are sent from %s to whoever connects, without encryption%s",
                endpoint,
                ", with the token ids of prompts" if self._settings.token_ids else "",
            )
        if scheme == "ipc" and not where.startswith("@"):
            _check_free(Path(where), endpoint)  # ZeroMQ would remove whatever is there
        made: zmq.Socket[bytes] = self._zmq.socket(kind)
        made.setsockopt(zmq.SNDHWM, most)
        made.setsockopt(zmq.LINGER, 200)
        made.setsockopt(zmq.MAXMSGSIZE, 4096)  # of what consumers send
        try:
            made.bind(endpoint)
            if scheme == "ipc" and not where.startswith("@"):
                Path(where).chmod(0o600)
        except (zmq.ZMQError, OSError) as e:
            raise ConfigError(f"events: cannot listen at {endpoint}: {e.strerror}; give another address") from e
        return made

    @property
    def address(self) -> str:
        """Where it publishes: with the port that was chosen, if the settings name none."""
        return bytes(self._publish_socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    @property
    def replay_address(self) -> str:
        """Where replays are asked for; empty: nowhere."""
        if self._replay_socket is None:
            return ""
        return bytes(self._replay_socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def statistics(self) -> KvEventStatistics:
        return KvEventStatistics(
            subscriptions=len(self._topics),
            described=len(self._blocks),
            undescribed=self._undescribed,
            ignored=self._ignored,
            batches=self._batches,
            stored=self._stored,
            removed=self._removed,
            next_number=self._numbers.next,
            buffered_bytes=self._ring_bytes,
            replays=self._replays,
            snapshots=self._snapshots,
            cpu_seconds=self._seconds,
        )

    # -- in the node's loop -------------------------------------------------------------------------------

    def source(self, backend: LocalBackend) -> BlockSource | None:
        """What the blocks of a session have in common; None if they are not published."""
        layout = backend.layout
        groups = [g for g in layout.groups if g.kind in (Kind.FULL, Kind.MLA)]
        groups = groups or [g for g in layout.groups if g.required]
        identities = [backend.identities[g.name] for g in groups]
        first = identities[0]
        model = first.layout, first.namespace, first.group[len(groups[0].suffix) :]
        page = self._settings.block_tokens or layout.block_tokens
        why = ""
        if first.tenant not in self._tenants:
            why = "its tenant is not named in events.tenants"
        elif layout.block_tokens % page:
            why = f"events.block_tokens is {page}, and its blocks of {layout.block_tokens} tokens are no multiple of it"
        elif any((known[0], known[2]) != (model[0], model[2]) for known in self._models.values()):
            why = "blocks of another model or trust domain are published"
        elif self._models.setdefault(first.tenant, model) != model:
            why = "blocks of another model are published"
        if why:
            self._ignored += 1
            if why not in self._said:
                self._said.add(why)
                log.warning("the blocks of a session are not published: %s", why)
            return None
        # An array has no field for the locality, so remote blocks cannot be told in arrays.
        remote = wire.REMOTE if self._maps else 0
        shared = {"local": wire.DISK, "remote": remote, "no": 0}[self._settings.shared]
        colds = backend.partition.colds
        places = [(cold.number, wire.DISK if cold.number == NVME and not cold.shared else shared) for cold in colds]
        made = BlockSource(
            backend.partition.index,
            tuple((one.group, one.fingerprint) for one in identities),
            layout.block_tokens,
            page,
            "" if first.tenant == DEFAULT_TENANT.tag else first.tenant.hex(),
            ((DRAM, wire.CPU), *((number, place) for number, place in places if place)),
        )
        return self._sources.setdefault(first.tenant, made)  # the same for all sessions: blocks are looked up by it

    def describe(self, source: BlockSource, parent: bytes, digests: bytes, tokens: bytes) -> None:
        """Consecutive blocks, the first of them after ``parent``, with their tokens. Does not wait."""
        if self.wants < 2:
            tokens = b""
        size = len(digests) + len(tokens) + _DESCRIPTION
        if self._described_bytes - self._taken_bytes + size > _DESCRIPTIONS:
            self._undescribed += len(digests) // 32
            return
        self._described_bytes += size
        self._described.append((source, parent, digests, tokens))
        if self._active:
            self._wake()

    # -- on any thread ------------------------------------------------------------------------------------

    def _happened(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, EventsLost) or self._waiting + len(event.keys) > _WAITING:
                self._missed = True
            else:
                self._waiting += len(event.keys)
                self._events.append(event)
        self._wake()

    def _wake(self) -> None:
        if not self._awake:
            with self._lock:
                if not self._gone:  # another file may have its number now
                    self._awake = True
                    os.eventfd_write(self._wake_fd, 1)

    # -- the thread ---------------------------------------------------------------------------------------

    @staticmethod
    def _no_follower() -> None:
        pass

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._publish_socket, zmq.POLLIN)
        if self._replay_socket is not None:
            poller.register(self._replay_socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        while not self._closed:
            try:
                self._step(poller)
            except Exception:
                log.exception("KV events could not be published; consumers are told all that is described again")
                self._active = False  # begins anew with the next step
                self._blocks, self._encoder = DescribedBlocks(), wire.BatchEncoder(maps=self._maps)
                self._replies.clear()
                time.sleep(_IDLE)
        self._unfollow()
        if self._active:  # nothing can be loaded from here any more
            self._emit(self._encoder.cleared(self._clock.time()))

    def _step(self, poller: zmq.Poller) -> None:
        behind = self._active and self._blocks.waiting
        if behind:
            rest()
        now = time.monotonic()
        due = self._anew + self._patience if self._newcomer and self._due is None else self._due
        wait = _RETRY if self._replies else _IDLE if due is None else min(_IDLE, max(0.0, due - now))
        ready = dict(poller.poll(0 if behind else int(wait * 1000) + 1))
        now = time.monotonic()
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
            self._due = max(now + _GATHER, self._emitted + _BETWEEN) if self._due is None else self._due
        if self._publish_socket in ready:
            self._subscriptions()
        if self._replay_socket in ready:
            self._requests(now)
        wanted = bool(self._topics) or bool(self._replies) or now < self._replayed + _LINGER
        if wanted != self._active and (wanted or now >= self._anew + self._patience):
            self._switch(wanted, now)
        if self._newcomer and not self._filling and now >= self._anew + self._patience:
            self._switch(True, now)
        if behind or not self._active or self._due is None or now >= self._due or not ready:
            self._due = None
            self._take(now)
            if self._active:
                self._publish()
            self._blocks.clean(self._clock.time(), now)
        self._send_replies(now)
        self._seconds = time.thread_time()

    def _switch(self, active: bool, now: float) -> None:
        """Begin to follow the store, or stop."""
        self._unfollow()
        self._unfollow = self._no_follower
        self._active, self._state = active, None
        self._newcomer, self._anew, self._patience = False, now, _ANEW
        self._blocks.unpublish()
        if active:
            self._blocks.look_at_all()
            self._unfollow = self._feed.follow(self._happened)
            self._fresh = self._filling = True
            self._due = None

    def _subscriptions(self) -> None:
        with contextlib.suppress(zmq.Again):
            for _ in range(_MESSAGES):  # not what comes meanwhile: it may never end
                message = self._publish_socket.recv(zmq.NOBLOCK)
                if message[:1] == b"\1" and self._topic.startswith(message[1:]):
                    self._topics.add(message[1:])
                    self._newcomer = self._active
                elif message[:1] == b"\0":
                    self._topics.discard(message[1:])

    def _take(self, now: float) -> None:
        """Take what has come in the queues."""
        self._awake = False  # first: what is added from now on wakes the thread
        for _ in range(len(self._described)):  # not what comes meanwhile: it may never end
            source, parent, digests, tokens = self._described.popleft()
            self._taken_bytes += len(digests) + len(tokens) + _DESCRIPTION
            some = [digests[i : i + 32] for i in range(0, len(digests), 32)]
            self._blocks.describe(source, parent, some, tokens, now)
        with self._lock:
            events, self._events, self._waiting = self._events, [], 0
            missed, self._missed = self._missed, False
        if self._active:
            for event in events:
                self._blocks.look_at(event.keys)
        if missed:
            self._blocks.look_at_all()

    def _publish(self) -> None:
        """Some of what has happened."""
        if not self._blocks.waiting and not self._fresh:
            return
        time_now = self._clock.time()
        fresh, self._fresh = self._fresh, False
        columns, changes, start = self._blocks.columns, self._blocks.changes(time_now), 0
        for end in wire.cuts(columns, changes) or ([0] if fresh else []):
            self._emit(self._encoder.payload(time_now, columns, changes[start:end], fresh=fresh))
            fresh, start = False, end
            self._stored += self._encoder.stored
            self._removed += self._encoder.removed

    def _emit(self, batch: bytes) -> None:
        number = self._numbers.take()
        self._ring[number] = batch
        self._ring_bytes += len(batch) + _KEPT
        while self._ring_bytes > self._settings.buffer and len(self._ring) > 1:
            self._ring_bytes -= len(self._ring.popitem(last=False)[1]) + _KEPT
        self._batches += 1
        self._emitted = time.monotonic()
        self._state = None
        self._publish_socket.send_multipart([self._topic, number.to_bytes(8, "big"), batch], zmq.NOBLOCK)

    # -- replays ------------------------------------------------------------------------------------------

    def _requests(self, now: float) -> None:
        assert self._replay_socket is not None
        with contextlib.suppress(zmq.Again):
            for _ in range(_REPLIES):  # not what comes meanwhile: it may never end
                *envelope, start = self._replay_socket.recv_multipart(zmq.NOBLOCK)
                if not envelope or len(start) != 8 or len(envelope) > 2:
                    continue
                if len(self._replies) >= _REPLIES and envelope[0] not in self._replies:
                    continue  # it will ask again
                self._replayed = now
                self._replays += 1
                batches = self._replay(int.from_bytes(start, "big"))
                self._replies[envelope[0]] = _Reply(envelope, batches, now)

    def _replay(self, start: int) -> Iterator[tuple[int, bytes]]:
        """The batches from a number on. Runs as far as the consumer reads."""
        stop = self._numbers.next
        if start in self._ring:
            for number in range(start, stop):
                batch = self._ring.get(number)
                if batch is None:  # the consumer is slower than the buffer is renewed
                    yield from self._snapshot(number)
                    return
                yield number, batch
        elif start != stop:
            yield from self._snapshot(start)

    def _snapshot(self, start: int) -> Iterator[tuple[int, bytes]]:
        """All that is published now, for a consumer that knows the batches before ``start``."""
        self._snapshots += 1
        if self._state is None or self._state[0] != self._numbers.next:
            blocks, places = self._blocks.published()
            self._state = self._numbers.next, self._blocks.columns, blocks, places
        _, columns, blocks, places = self._state
        state = _as_stored(blocks, places)
        start = 0 if start > self._numbers.next and start >= _FURTHEST else start
        room, size = max(1, self._numbers.next - start), 1
        ends = wire.cuts(columns, state) or [0]
        while len(ends) > room and size < _LARGER:
            size *= 2
            ends = wire.cuts(columns, state, size)
        if start > self._numbers.next or len(ends) > room:
            # The consumer is ahead, as when the clock was set back, or knows what is too new: go on from where it is.
            self._numbers.skip_to(start + len(ends))
            self._ring.clear()
            self._ring_bytes = 0
        del state  # a consumer may read slowly
        first = self._numbers.next - len(ends)
        if first - start <= _PADDING:
            for number in range(start, first):
                yield number, self._encoder.nothing(self._clock.time())
        at = 0
        for number, end in enumerate(ends, first):
            part = _as_stored(blocks[at:end], places[at:end])
            yield number, self._encoder.payload(self._clock.time(), columns, part, fresh=number == first)
            at = end

    def _send_replies(self, now: float) -> None:
        if self._filling:
            self._filling = self._blocks.waiting
            self._patience = _ANEW * max(1.0, now - self._anew)
            return
        if self._blocks.unsettled:  # a snapshot would lack blocks whose removal is told later
            return
        for address, reply in list(self._replies.items()):
            try:
                self._send_some(reply, now)
            except zmq.Again:  # the consumer has not read yet
                reply.ended = now > reply.moved + _STALLED
            except zmq.ZMQError:  # it is gone
                reply.ended = True
            if reply.ended:
                del self._replies[address]
        if not self._replies:
            self._state = None

    def _send_some(self, reply: _Reply, now: float) -> None:
        assert self._replay_socket is not None
        for _ in range(_SENDS):
            if reply.unsent is None:
                found = next(reply.batches, None)
                topic = [self._topic if found is not None else b""] if self._maps else []
                number, batch = (found[0].to_bytes(8, "big"), found[1]) if found is not None else (_END, b"")
                reply.unsent = [*reply.envelope, *topic, number, batch]
            self._replay_socket.send_multipart(reply.unsent, zmq.NOBLOCK)
            reply.ended = reply.unsent[-2] == _END
            reply.unsent, reply.moved = None, now
            if reply.ended:
                return

    def close(self) -> None:
        """Tell consumers that nothing is stored here any more, and stop. May be repeated."""
        if self._closed:
            return
        self._closed = True
        self._awake = False
        self._wake()
        self._thread.join()
        self._zmq.destroy(200)
        self._numbers.close()
        with self._lock:
            self._gone = True
            os.close(self._wake_fd)


def _tag(name: str) -> bytes:
    try:
        return parse_tag(name)
    except ValueError:
        raise ConfigError(f"events.tenants has {name!r}; it must be a tenant's tag, 32 hexadecimal digits") from None


def _as_stored(blocks: array[int], places: bytes) -> list[Change]:
    return [(block, 0, now) for block, now in zip(blocks, places, strict=True)]


def _check_free(path: Path, endpoint: str) -> None:
    """Raises ConfigError if something is at a path that is no socket, or another process listens there."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return
    why = "a file is there that is no socket"
    if stat.S_ISSOCK(mode):
        with socket.socket(socket.AF_UNIX) as there:
            there.setblocking(False)
            try:
                there.connect(str(path))
            except BlockingIOError:
                pass
            except OSError:
                return  # it was left behind
        why = "another process listens there"
    raise ConfigError(f"events: cannot listen at {endpoint}: {why}; give another address")
