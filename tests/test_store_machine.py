"""The whole store against a plain model, while its disk fails, lies, dies and loses power.

The content of a block follows from its key, so every byte that the store returns is checked. The model is a dict of the
blocks that may be returned: blocks that were never stored, were dropped, or have expired are not in it. It cannot say
which blocks *must* be returned, because a store may evict. That is asserted only where it is certain: after a restart,
a kill or, with ``durable``, a power loss, for blocks that were complete on the disk before; and for blocks pinned in
memory. A store that gets no slot must not have evicted any block.

Which rule runs and with what depends on the drawn values alone, never on the store's answers, so that a failure is
found again as far as the threads inside allow.
"""

from __future__ import annotations

import errno
import functools
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtide import Unwritten, config
from kvtide.block import BlockKey, Group, Kind, Layout, Span
from kvtide.errors import TierError
from kvtide.events import BlockStored, Event, EventsLost
from kvtide.index import work_slices
from kvtide.index.index import ABSENT, DRAM, SEALED, Rows
from kvtide.index.keys import Chain, Model, Tenant
from kvtide.store.backend import LocalBackend, LocalPrefixLease
from kvtide.store.match import Load, Loaded, Match, Stored
from kvtide.store.partition import NVME
from kvtide.store.store import Store
from kvtide.testing import blocks
from kvtide.testing.clock import FakeClock
from kvtide.testing.faults import Fault, FaultyDisk, Gate, How
from tests.books import agree, tier_bytes

MIB = 1 << 20
ONE = Layout.attention(layers=2, heads=4, head_dim=64, block_tokens=128)
TWO = Layout(
    (
        # Sections of 33,000 bytes: not a multiple of a page, so that padding is in play.
        Group("full", Kind.FULL, 2, 1, 1031, "bfloat16"),
        Group("window", Kind.WINDOW, 1, 2, 128, "float32", window=24),
    ),
    block_tokens=16,
)
USERS = [
    (Model(layout, "machine"), Tenant(name, name.encode() * 32)) for layout in (ONE, TWO) for name in ("ann", "bob")
]

LARGE = Model(Layout.attention(layers=3, heads=4, head_dim=256, block_tokens=128), "large")
"""A block of 1.5 MiB: more than a segment, so that several must be emptied for it."""
HUGE = Model(Layout.attention(layers=8, heads=4, head_dim=256, block_tokens=128), "huge")
"""A block of 4 MiB: more than there is memory."""

Path_ = tuple[int, ...]
"""A prompt: the number that all tokens of each of its blocks have. Prompts with one beginning share those blocks."""

users = st.integers(0, len(USERS) - 1)
paths = st.builds(lambda head, tail: (head, *tail), st.integers(0, 5), st.lists(st.integers(0, 1), max_size=5))
Prompt = tuple[int, Path_ | int]
prompts: st.SearchStrategy[Prompt] = st.tuples(users, paths) | st.tuples(
    st.integers(0, 15), st.sampled_from([0, 0, 0, 1, 2])
)
"""A user's prompt, stored or not; or the n-th newest that was stored, without so many blocks at its end."""

FAULTS = [
    *(("read", how, errno.EIO, "*.segment") for how in (How.FAIL, How.SHORT, How.TORN, How.FLIP)),
    *(("write", how, errno.EIO, "*.segment") for how in (How.FAIL, How.SHORT, How.TORN, How.FLIP)),
    *(("append", how, errno.ENOSPC, "journal*") for how in (How.FAIL, How.SHORT, How.TORN, How.FLIP)),
    ("write", How.FAIL, errno.ENOSPC, "*.segment"),
    ("resize", How.FAIL, errno.ENOSPC, "*.segment"),
    ("sync", How.FAIL, errno.EIO, "*"),
    ("rename", How.FAIL, errno.EIO, "*"),
    ("open", How.FAIL, errno.EMFILE, "*.segment"),
]
SILENT = (How.LIE, How.FLIP)
ENDS = st.sampled_from(["closed", "killed", "killed", "power lost", "power lost"])
JOURNALS = st.sampled_from(["kept", "kept", "kept", "lost", "torn", "cut"])
OPENING = [f for f in FAULTS if f[1] in (How.FAIL, How.SHORT) and f[0] != "write"]


@functools.lru_cache(512)
def content(key: BlockKey, nbytes: int) -> blocks.Bytes:
    """Every other block shrinks under a codec, so that slots of many sizes are in use."""
    return (blocks.floats if key[0] % 2 else blocks.content)(key, nbytes)


@dataclass
class Right:
    """A match that is kept over other rules, with the views that were loaded under it."""

    user: int
    path: Path_
    match: Match
    loaded: Loaded | None


def rows_of(match: Match) -> dict[str, Rows]:
    """What a match holds."""
    assert isinstance(match.holding, LocalPrefixLease)
    return match.holding.part.rows


class Machine(RuleBasedStateMachine):
    seen: ClassVar[Counter[str]] = Counter()
    """What came to pass in all runs together: a machine that never evicts proves little."""

    folder: Path
    store: Store
    alone = True
    """Whether nobody else stores just now."""

    # -- the beginning and the end ------------------------------------------------------------------------

    @initialize(
        when=st.sampled_from(["through", "second-touch", "eviction"]),
        codec=st.sampled_from(["raw", "zstd"]),
        durable=st.booleans(),
        memory=st.sampled_from([2, 3]),
        threads=st.sampled_from([1, 3]),
        token_ids=st.booleans(),
        liar=st.sampled_from([False, False, False, True]),
        full=st.booleans(),
        seed=st.integers(0, 1 << 16),
    )
    def begin(
        self,
        when: str,
        codec: str,
        durable: bool,
        memory: int,
        threads: int,
        token_ids: bool,
        liar: bool,
        full: bool,
        seed: int,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvtide-machine-"))
        self.durable = durable
        self.liar = liar
        self.config = config.read(
            env={},
            dram={"budget": memory * MIB, "segment": MIB, "checksum": True},
            nvme={
                "path": str(self.folder / "tier"),
                "budget": 16 * MIB,
                "segment": MIB,
                "threads": threads,
                "store": when,
                "codec": codec,
                "durable": durable,
                "token_ids": token_ids,
            },
        )
        self.clock = FakeClock()
        self.disk = FaultyDisk(seed)
        self.known: dict[BlockKey, float] = {}
        """Blocks that may be returned, and when they expire at the latest."""
        self.hidden: set[BlockKey] = set()
        """Blocks whose erasing the disk refused: not served, but perhaps found again at the next opening."""
        self.prompts: dict[tuple[int, Path_], None] = {}
        """Everything that was ever stored, the oldest first."""
        self.written: set[BlockKey] = set()
        """Blocks that the disk has, as far as events tell."""
        self.rights: list[Right] = []
        self.pins: list[tuple[int, Path_]] = []
        self.pinned: set[BlockKey] = set()
        """Blocks that were in memory when they were pinned: there they stay."""
        self.gates: list[Gate] = []
        self.corrupted = False
        self.open()
        if full:
            for user in range(len(USERS)):
                self.store_many(user, 8, 4)

    def open(self) -> None:
        self.store = Store(self.config, clock=self.clock, disk=self.disk)
        self.store.follow(self.happened)
        self.sessions = [self.store.session(model, tenant) for model, tenant in USERS]
        self.pins.clear()
        self.pinned.clear()
        self.hidden.clear()

    def happened(self, event: Event) -> None:
        if not isinstance(event, EventsLost) and event.tier == "nvme":
            change = self.written.update if isinstance(event, BlockStored) else self.written.difference_update
            change(event.keys)

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        try:
            self.calm()
            while self.rights:
                self.rights.pop().match.release()
            self.settled()
            self.audit()
            self.seen.update(self.store.statistics().counts)
            self.nothing_is_left_over()
            self.store.close()
            assert not any(t.name == "kvtide-housekeeping" for t in threading.enumerate())
            self.whole_files_only()
        finally:
            self.disk.die()
            self.store.close()
            shutil.rmtree(self.folder)

    # -- names --------------------------------------------------------------------------------------------

    def pick(self, prompt: Prompt) -> tuple[int, Path_]:
        user, path = prompt
        if isinstance(path, tuple):
            return user, path
        if not self.prompts:
            return 0, (0,)
        newest = list(self.prompts)[-1 - user % len(self.prompts)]
        return newest[0], newest[1][: max(1, len(newest[1]) - path)]

    def chain(self, user: int, path: Path_) -> Chain:
        session = self.sessions[user]
        return session.chain(np.repeat(np.array(path, np.uint32), session.layout.block_tokens))

    def prefixes(self) -> list[tuple[int, Path_]]:
        """Every block that was ever stored, by the prompt that it ends."""
        return sorted({(user, path[: i + 1]) for user, path in self.prompts for i in range(len(path))})

    def keys(self, user: int, path: Path_, start: int = 0) -> list[BlockKey]:
        chain = self.chain(user, path)
        return [k for g in self.sessions[user].layout.groups for k in chain.keys(g.suffix)[start:]]

    def allowed(self, key: BlockKey) -> bool:
        return self.known.get(key, -1.0) > self.clock.time() and key not in self.hidden

    @property
    def spoilt(self) -> bool:
        """Whether bytes were changed behind the tier's back: then nothing must be there any more."""
        return self.corrupted or any(call == "write" and how in SILENT for call, how, _ in self.disk.struck)

    # -- checks -------------------------------------------------------------------------------------------

    def check(self, right: Right) -> None:
        """What a load brought is right, allowed to be there, and enough for the prefix that it claims."""
        loaded = right.loaded
        if loaded is None:
            return
        session = self.sessions[right.user]
        layout = session.layout
        chain = self.chain(right.user, right.path)
        count = loaded.tokens // layout.block_tokens
        for group in layout.groups:
            keys, first, views = chain.keys(group.suffix), loaded.first[group.name], loaded.views[group.name]
            needed = range(max(group.needs(count, layout.block_tokens).start, right.match.have), count)
            assert not needed or (first <= needed.start and first + len(views) >= needed.stop), "a hole in a prefix"
            for i, view in enumerate(views, first):
                self.same(view, group.geometry(layout.block_tokens), keys[i])

    def same(self, view: Span, geometry: Any, key: BlockKey) -> None:
        assert blocks.holds(view, geometry, content(key, geometry.nbytes)), f"wrong bytes in {key.hex()}"

    def fetch(self, user: int, path: Path_, have: int, deadline: float | None = None) -> Right:
        """Match and load; every block that comes must be one that may."""
        session = self.sessions[user]
        match = session.match(self.chain(user, path), have=have * session.layout.block_tokens)
        try:
            right = Right(user, path, match, session.load(match, deadline=deadline).wait())
            self.arrived(right)
        except BaseException:
            match.release()  # else the end finds only that it is held
            raise
        return right

    def arrived(self, right: Right) -> None:
        assert right.loaded is not None
        chain = self.chain(right.user, right.path)
        for group, views in right.loaded.views.items():
            keys, first = chain.keys(self.sessions[right.user].layout.group(group).suffix), right.loaded.first[group]
            for i in range(first, first + len(views)):
                assert self.allowed(keys[i]), f"block {i} of {right.path} came back from the dead"
        self.check(right)

    def audit(self) -> None:
        """Ask for every block by itself, so that the loss of its parents hides nothing."""
        for user, path in self.prefixes():
            self.fetch(user, path, len(path) - 1).match.release()
        with self.store.index.lock:
            everything = [k for user, path in self.prompts for k in self.keys(user, path)]
            for key, found in zip(everything, self.present(everything), strict=True):
                assert not found or self.allowed(key), "the index has a block that was dropped"

    def present(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each of these blocks is complete in some tier, and not expired."""
        index = self.store.index
        found: list[bool] = index.usable(index.rows(keys), self.clock.time()).tolist()
        return found

    def calm(self) -> None:
        """No faults, no late answers."""
        self.disk.disarm()
        while self.gates:
            self.gates.pop().open()

    def settled(self) -> None:
        """When nothing moves, all books agree and nobody holds what nobody has."""
        agree(self.store, {int(row) for right in self.rights for rows in rows_of(right.match).values() for row in rows})

    def nothing_is_left_over(self) -> None:
        """When all sessions are closed, every right and every charge has ended."""
        for session in self.sessions:
            session.close()
        statistics = self.store.statistics()
        pipeline = statistics.pipeline
        assert (statistics.pinned, pipeline.leases, pipeline.reservations) == (0, 0, 0)
        for session in self.sessions:
            assert isinstance(session.backend, LocalBackend)
            assert (len(session.backend.pins), session.backend.pins.nbytes, session.backend.pins.charge.nbytes) == (
                0,
                0,
                0,
            )

    def whole_files_only(self) -> None:
        names = {p.name for p in (self.folder / "tier").iterdir()}
        odd = {n for n in names if not n.endswith(".segment")} - {"kvtide.json", "lock", "journal", "speeds"}
        assert not odd, f"left behind: {odd}"

    @invariant()
    def all_is_well(self) -> None:
        if not hasattr(self, "store"):
            return
        if self.gates:
            self.patience -= 1
            if self.patience < 0:
                self.gates.pop().open()
        for right in self.rights:
            self.check(right)
        assert self.store.pipeline.largest_slice <= work_slices.SLICE, "too much was removed in one hold of the lock"
        dram = self.store.dram.statistics()
        assert dram.bytes_taken <= dram.budget == self.config.dram.budget
        # What has expired is pinned no more, also if it is stored again: for that there may be no slot.
        self.pinned = {key for key in self.pinned if self.allowed(key)}
        found = self.present(sorted(self.pinned))
        assert all(found), "a pinned block has left memory"
        assert tier_bytes(self.folder / "tier") <= self.config.nvme.budget

    @contextmanager
    def for_use(self) -> Iterator[list[int]]:
        """Blocks leave memory meanwhile only if slots are taken: how many, the caller says in the list."""
        slots: list[int] = []
        before = self.store.pipeline.counts["blocks evicted from dram"]
        yield slots
        evicted = self.store.pipeline.counts["blocks evicted from dram"] - before
        assert sum(slots) or not evicted, f"{evicted} blocks left memory for nothing"
        self.seen["stores without room that cost nothing"] += not sum(slots)

    # -- storing ------------------------------------------------------------------------------------------

    @staticmethod
    def mortal(path: Path_, ttl: float | None) -> Path_:
        """What expires has prompts of its own: the model could not tell it from what was stored for ever."""
        return path if ttl is None else (path[0] + 10, *path[1:])

    def expect(self, user: int, path: Path_, start: int, ttl: float | None) -> None:
        """From now on these may be returned."""
        self.prompts.pop((user, path), None)
        self.prompts[user, path] = None
        until = float("inf") if ttl is None else self.clock.time() + ttl
        for key in self.keys(user, path, start):
            # Whether it is there already, with a lifetime of its own, only the store knows.
            self.known[key] = max(until, self.known.get(key, -1.0))
            self.hidden.discard(key)
        self.lives(user, path, until)

    def lives(self, user: int, path: Path_, until: float) -> None:
        """All of a prompt that may be returned may be so until then: its beginning lives as long as its end."""
        for key in self.keys(user, path):
            if key in self.known:
                self.known[key] = max(until, self.known[key])

    def put(self, user: int, path: Path_, start: int, ttl: float | None, priority: int) -> Stored:
        session = self.sessions[user]
        chain = self.chain(user, path)
        self.expect(user, path, start, ttl)
        given = {
            g.name: [content(k, session.layout.geometry[g.name].nbytes) for k in chain.keys(g.suffix)[start:]]
            for g in session.layout.groups
        }
        if self.alone:
            with self.for_use() as slots:
                answer = session.store(chain, given, start=start, ttl=ttl, priority=priority)
                slots.append(answer.stored)
        else:
            answer = session.store(chain, given, start=start, ttl=ttl, priority=priority)
        assert answer.stored + answer.present + answer.dropped == len(given) * (len(path) - start)
        return answer

    @rule(
        user=users,
        path=paths,
        start=st.integers(0, 2),
        ttl=st.sampled_from([None, None, None, 5.0, 50.0]),
        priority=st.sampled_from([0, 0, 0, -3, 7]),
    )
    def store_blocks(self, user: int, path: Path_, start: int, ttl: float | None, priority: int) -> None:
        self.put(user, self.mortal(path, ttl), min(start, len(path) - 1), ttl, priority)

    @rule(user=users, heads=st.integers(4, 8), length=st.integers(3, 6))
    def store_many(self, user: int, heads: int, length: int) -> None:
        """Pressure: both tiers overflow after a few of these."""
        for head in range(heads):
            self.put(user, (head, *[1] * (length - 1)), 0, None, 0)
            if not self.gates:
                self.store.flush()

    @precondition(lambda self: not self.gates)
    @rule(user=users, other=st.integers(1, 3), path=paths, prompts=st.lists(prompts, min_size=1, max_size=4))
    def many_things_at_once(self, user: int, other: int, path: Path_, prompts: list[Prompt]) -> None:
        """One stores while others load and drop; whose blocks they are is not the same, so the model stays simple."""
        errors: list[BaseException] = []

        def store() -> None:
            try:
                for head in range(6):
                    self.put((user + other) % len(USERS), (head, *path[1:]), 0, None, 0)
            except BaseException as e:  # noqa: BLE001 - raised below
                errors.append(e)

        self.alone = False
        thread = threading.Thread(target=store)
        chosen = [self.pick(prompt)[1] for prompt in prompts]
        thread.start()
        for i, mine in enumerate(chosen):
            self.fetch(user, mine, 0).match.release()
            self.erase(user, mine, 0)
            if i % 2:
                self.put(user, mine, 0, None, 0)
        thread.join()
        self.alone = True
        if errors:
            raise errors[0]

    @rule(number=st.integers(0, 3), huge=st.booleans(), into_slots=st.booleans())
    def store_large(self, number: int, huge: bool, into_slots: bool) -> None:
        """What needs several segments gets them or costs nothing; what is larger than memory always costs nothing."""
        session = self.store.session(HUGE if huge else LARGE)
        chain = session.chain([number] * session.layout.block_tokens)
        (key,), nbytes = chain.keys(b"full"), session.layout.geometry["full"].nbytes
        with self.for_use() as slots:
            if into_slots:
                with session.reserve(chain) as reservation:
                    slots.append(len(reservation.keys))
            else:
                slots.append(session.store(chain, [content(key, nbytes)]).stored)
        assert not huge or not any(slots)
        self.seen["large blocks stored"] += sum(slots)
        if not self.gates:
            with session.match(chain) as match:
                for view in session.load(match).wait().blocks:
                    self.same(view, session.layout.geometry["full"], key)
        session.close()

    @rule(user=st.sampled_from([0, 1]), path=paths)
    def store_one_and_read(self, user: int, path: Path_) -> None:
        """The block that was stored last is there, unless the disk was out of order.

        Where a prompt has blocks of two sizes, and DRAM so few segments, storing the one may cost the other.
        """
        depth = len(path) - 1
        if self.put(user, path, depth, None, 100).stored and not self.disk.struck:
            right = self.fetch(user, path, depth)
            assert right.loaded is not None
            assert right.loaded.tokens == (depth + 1) * ONE.block_tokens
            right.match.release()

    @rule(prompt=prompts, part=st.floats(0, 1), seal=st.booleans(), ttl=st.sampled_from([None, 5.0]))
    def reserve(self, prompt: Prompt, part: float, seal: bool, ttl: float | None) -> None:
        user, path = self.pick(prompt)
        path = self.mortal(path, ttl)
        session = self.sessions[user]
        chain = self.chain(user, path)
        with self.for_use() as slots:
            reservation = session.reserve(chain, ttl=ttl)
            slots.append(len(reservation.keys))
        with reservation:
            for key, view in zip(reservation.keys, reservation.views, strict=True):
                geometry = session.layout.geometry[key[32:].decode()]
                if seal:
                    blocks.fill(view, geometry, content(key, geometry.nbytes))
                else:
                    view[: int(part * len(view))] = bytes(int(part * len(view)))
            found = self.present(reservation.keys)
            assert not any(found), "a block can be read before it is sealed"
            if seal:
                self.expect(user, path, 0, ttl)
                reservation.seal()
            elif not reservation.keys:  # all of it was there, and lives longer now
                self.lives(user, path, float("inf") if ttl is None else self.clock.time() + ttl)

    # -- reading ------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.gates)
    @rule(prompt=prompts, have=st.integers(0, 3))
    def load_views(self, prompt: Prompt, have: int) -> None:
        user, path = self.pick(prompt)
        self.fetch(user, path, min(have, len(path) - 1)).match.release()

    @precondition(lambda self: not self.gates)
    @rule(prompt=prompts)
    def load_into_buffers(self, prompt: Prompt) -> None:
        user, path = self.pick(prompt)
        session = self.sessions[user]
        with session.match(self.chain(user, path)) as match:
            into = {
                name: [np.zeros(session.layout.geometry[name].nbytes, np.uint8) for _ in rows]
                for name, rows in rows_of(match).items()
            }
            loaded = session.load(match, into).wait()
            right = Right(user, path, match, loaded)
            self.arrived(right)
            chain = self.chain(user, path)
            for group in session.layout.groups:
                for i in range(len(loaded.views[group.name])):
                    key = chain.keys(group.suffix)[loaded.first[group.name] + i]
                    assert np.array_equal(into[group.name][i], content(key, len(into[group.name][i])))

    @precondition(lambda self: not self.gates and len(self.rights) < 3)
    @rule(prompt=prompts, have=st.integers(0, 2))
    def load_and_hold(self, prompt: Prompt, have: int) -> None:
        user, path = self.pick(prompt)
        self.rights.append(self.fetch(user, path, min(have, len(path) - 1)))

    @precondition(lambda self: len(self.rights) < 3)
    @rule(prompt=prompts)
    def match_and_hold(self, prompt: Prompt) -> None:
        user, path = self.pick(prompt)
        self.rights.append(Right(user, path, self.sessions[user].match(self.chain(user, path)), None))

    @precondition(lambda self: self.rights)
    @rule(which=st.integers(0, 2))
    def release(self, which: int) -> None:
        self.rights.pop(which % len(self.rights)).match.release()

    @precondition(lambda self: self.rights and not self.gates)
    @rule(which=st.integers(0, 2))
    def load_what_is_held(self, which: int) -> None:
        """Blocks may have been dropped since they were matched; their holder may still get them."""
        right = self.rights[which % len(self.rights)]
        right.loaded = self.sessions[right.user].load(right.match).wait()
        self.check(right)

    @rule(prompt=prompts)
    def prefetch(self, prompt: Prompt) -> None:
        user, path = self.pick(prompt)
        self.sessions[user].prefetch(self.chain(user, path))

    @rule(prompt=prompts)
    def load_in_no_time(self, prompt: Prompt) -> None:
        user, path = self.pick(prompt)
        self.fetch(user, path, 0, deadline=0).match.release()

    @rule(prompt=prompts, joined=st.booleans())
    def load_and_cancel(self, prompt: Prompt, joined: bool) -> None:
        user, path = self.pick(prompt)
        session = self.sessions[user]
        loads: list[tuple[Match, Load]] = []
        for _ in range(1 + joined):
            match = session.match(self.chain(user, path))
            loads.append((match, session.load(match)))
        loads[0][1].cancel()
        self.check(Right(user, path, loads[0][0], loads[0][1].wait(0)))
        if joined and not self.gates:
            self.check(Right(user, path, loads[1][0], loads[1][1].wait()))
        for match, _ in loads:
            match.release()

    @precondition(lambda self: not self.gates)
    @rule(prompt=prompts, tenant=st.booleans())
    def ask_for_anothers_blocks(self, prompt: Prompt, tenant: bool) -> None:
        """By their names, as a client of a node could: nothing is shown, and nothing is lost by it."""
        user, path = self.pick(prompt)
        (model, owner), chain = USERS[user], self.chain(user, path)
        namespace = model.namespace(owner) if tenant else b"another model of thirty-two bytes"[:32]
        backend = LocalBackend(self.store.main, model.layout, namespace, b"another tenant.." if tenant else owner.tag)
        index = self.store.index
        with index.lock:
            rows = index.rows(self.keys(user, path))
            if not tenant:  # as after an opening with an older journal: then the records' headers say whose they are
                index.identity[rows[index.state[DRAM][rows] == ABSENT]] = 0
        holding = backend.match(chain, 0, None)
        before = self.store.pipeline.counts["blocks unreadable in nvme"]
        backend.load(holding, None).wait(30)
        assert backend.collect(holding).blocks == 0, "a block was shown to another"
        holding.release()
        lost = self.store.pipeline.counts["blocks unreadable in nvme"] - before
        assert not lost or self.disk.struck or self.spoilt, "a mismatch was taken for damage"

    # -- keeping and removing -----------------------------------------------------------------------------

    @precondition(lambda self: len(self.pins) < 2)
    @rule(prompt=prompts)
    def pin(self, prompt: Prompt) -> None:
        user, path = self.pick(prompt)
        self.sessions[user].pin(self.chain(user, path))
        self.pins.append((user, path))
        keys = self.keys(user, path)
        with self.store.index.lock:
            here = self.store.index.state[DRAM][self.store.index.rows(keys)] == SEALED
        self.pinned.update(key for key, is_here in zip(keys, here.tolist(), strict=True) if is_here)

    @precondition(lambda self: self.pins)
    @rule(which=st.integers(0, 1))
    def unpin(self, which: int) -> None:
        user, path = self.pins.pop(which % len(self.pins))
        self.sessions[user].unpin(self.chain(user, path))
        self.pinned -= set(self.keys(user, path)) - {key for others in self.pins for key in self.keys(*others)}

    @precondition(lambda self: not self.gates)
    @rule(prompt=prompts, start=st.integers(0, 2))
    def drop(self, prompt: Prompt, start: int) -> None:
        user, path = self.pick(prompt)
        self.erase(user, path, min(start, len(path) - 1))

    def erase(self, user: int, path: Path_, start: int) -> None:
        keys = self.keys(user, path, start)
        self.pinned.difference_update(keys)
        try:
            self.sessions[user].drop(self.chain(user, path), start=start)
            sure = not self.disk.lied
            self.seen["drops"] += 1
        except TierError:
            sure = False
            self.seen["drops refused"] += 1
        for key in keys:
            if sure:
                self.known.pop(key, None)
            elif key in self.known:
                self.hidden.add(key)
        found = self.present(keys)
        assert not any(found), "a dropped block is still served"

    @precondition(lambda self: not self.gates)
    @rule(prompt=prompts, start=st.integers(0, 2), ttl=st.sampled_from([3.0, 30.0]))
    def expire(self, prompt: Prompt, start: int, ttl: float) -> None:
        """Blocks live no longer than that from now on, after a restart either, if the disk did not refuse it."""
        user, path = self.pick(prompt)
        start = min(start, len(path) - 1)
        until = self.clock.time() + ttl
        self.lives(user, path, until)
        try:
            self.sessions[user].expire(self.chain(user, path), ttl, start=start)
        except TierError:
            self.seen["expiries refused"] += 1
            return
        self.seen["expiries"] += 1
        if not self.disk.lied:
            for key in self.keys(user, path, start):
                if key in self.known:
                    self.known[key] = until

    @rule(seconds=st.sampled_from([1.0, 10.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    # -- trouble ------------------------------------------------------------------------------------------

    @rule(kind=st.sampled_from(FAULTS), after=st.integers(0, 5), times=st.integers(1, 4), lie=st.booleans())
    def break_disk(self, kind: tuple[str, How, int, str], after: int, times: int, lie: bool) -> None:
        call, how, code, files = kind
        if lie and self.liar and call == "write":
            how = How.LIE
        self.disk.arm(Fault(call, how, code, files, after, times))

    @rule()
    def mend_disk(self) -> None:
        self.calm()

    @precondition(lambda self: not self.gates)
    @rule(call=st.sampled_from(["read", "write", "sync"]), rules=st.integers(1, 4))
    def late_disk(self, call: str, rules: int) -> None:
        """From now on, for some rules."""
        self.gates.append(self.disk.gate(call))
        self.patience = rules

    @rule(file=st.integers(0, 20), where=st.floats(0, 1), count=st.integers(1, 5000), value=st.integers(0, 255))
    def corrupt(self, file: int, where: float, count: int, value: int) -> None:
        files = sorted(self.folder.glob("tier/*.segment"))
        self.corrupted = True
        if files:
            path = files[file % len(files)]
            offset = int(where * path.stat().st_size)
            count = min(count, path.stat().st_size - offset)
            with path.open("r+b") as f:
                f.seek(offset)
                f.write(bytes([value]) * count)

    @precondition(lambda self: not self.gates)
    @rule()
    def settle(self) -> None:
        self.disk.disarm()
        self.settled()

    # -- restarts -----------------------------------------------------------------------------------------

    @rule(how=ENDS, journal=JOURNALS, fault=st.none() | st.sampled_from(OPENING), after=st.integers(0, 3))
    def restart(self, how: str, journal: str, fault: tuple[str, How, int, str] | None, after: int) -> None:
        """At any moment, with whatever is under way, on a disk that may fail during the opening too."""
        if how == "closed":
            self.calm()
        self.end(how, journal)
        if fault is not None:
            self.disk.arm(Fault(fault[0], fault[1], fault[2], fault[3], after))
        try:
            self.open()
        except TierError:
            self.seen["openings refused"] += 1
            self.disk.disarm()
            self.open()
        self.disk.disarm()

    @rule(how=ENDS, journal=JOURNALS)
    def restart_from_rest(self, how: str, journal: str) -> None:
        """Everything was written by then: it is there afterwards."""
        self.calm()
        self.settled()
        self.audit()
        self.settled()  # again: what the audit brought to DRAM may have sent others to the disk, over others there
        certain = self.on_disk()
        self.end(how, journal)
        if how == "closed":
            # What only DRAM had was written at last, perhaps over others.
            certain &= self.written
        self.open()
        if not self.spoilt and (how != "power lost" or self.durable):
            self.still_there(certain)

    @precondition(lambda self: not self.gates)
    @rule(prompt=prompts, how=ENDS, journal=JOURNALS)
    def store_drop_and_end(self, prompt: Prompt, how: str, journal: str) -> None:
        """A drop that was acknowledged holds, though its blocks were still on their way to the disk."""
        user, path = self.pick(prompt)
        self.put(user, path, 0, None, 0)
        self.erase(user, path, 0)
        self.end(how, journal)
        self.open()

    @precondition(lambda self: not self.gates)
    @rule(user=users, path=paths, how=st.sampled_from(["killed", "power lost"]), journal=JOURNALS)
    def store_durable_and_end(self, user: int, path: Path_, how: str, journal: str) -> None:
        """What was said to be durable is there, however the disk behaved and whatever else was under way."""
        session, chain = self.sessions[user], self.chain(user, path)
        self.expect(user, path, 0, None)
        given = {
            g.name: [content(k, session.layout.geometry[g.name].nbytes) for k in chain.keys(g.suffix)]
            for g in session.layout.groups
        }
        persist = session.store(chain, given, durable=True)
        session.pin(chain)  # what comes behind it may need room, and would be right to take it
        persisted = persist.wait(30)
        assert not persisted.reasons.get(Unwritten.TIMEOUT), "nothing hangs"
        failed = {
            chain.keys(session.layout.group(name).suffix)[i] for name, some in persisted.failed.items() for i in some
        }
        certain = set(self.keys(user, path)) - failed
        assert len(certain) == persisted.durable
        self.seen["blocks that were durable"] += len(certain)
        self.end(how, journal)
        self.open()
        if not self.spoilt:
            found = self.present(sorted(certain))
            assert all(found), f"{found.count(False)} of {len(certain)} blocks are lost"

    def end(self, how: str, journal: str) -> None:
        """The end of a life, and what becomes of the disk before the next."""
        self.seen[how] += 1
        self.seen["journals spoilt"] += journal != "kept"
        self.seen.update(self.store.statistics().counts)
        if how != "closed":
            self.disk.die()
        self.gates.clear()
        self.rights.clear()
        self.store.close()
        if how == "power lost":
            self.disk.power_loss()
            if not self.durable:
                # Headers may be left whose payload is not; an audit finds no room to read them while much is held.
                self.written.clear()
        self.disk.revive()
        self.treat_journal(journal)

    def treat_journal(self, journal: str) -> None:
        path = self.folder / "tier" / "journal"
        if not path.exists():
            return
        match journal:
            case "lost":
                path.unlink()
            case "torn":
                data = bytearray(path.read_bytes())
                data[len(data) // 2] ^= 0x10
                path.write_bytes(data)
            case "cut":
                path.write_bytes(path.read_bytes()[:-7])

    def on_disk(self) -> set[BlockKey]:
        index = self.store.index
        with index.lock:
            rows = np.flatnonzero(index.state[NVME][: index.size] == SEALED)
            here = {index.key(int(row)) for row in rows if index.expiry[row] > self.clock.time()}
        # What was found at an opening need not have been acknowledged ever.
        self.written &= here
        return set(self.written)

    def still_there(self, keys: set[BlockKey]) -> None:
        """Every one of these blocks is found and can be read."""
        self.seen["blocks that had to be there"] += len(keys)
        found = self.present(sorted(keys))
        assert all(found), f"{found.count(False)} of {len(keys)} blocks are lost"
        for user, path in self.prefixes():
            depth = len(path) - 1
            if keys.issuperset(self.keys(user, path, depth)):
                right = self.fetch(user, path, depth)
                right.match.release()
                assert right.loaded is not None
                assert right.loaded.tokens == len(path) * self.sessions[user].layout.block_tokens, "unreadable"


PROFILE: dict[str, Any] = {
    "deadline": None,
    "print_blob": True,
    # A failure is printed as it was met: with threads in play, making it smaller may take for ever.
    "phases": [Phase.explicit, Phase.reuse, Phase.generate],
    "report_multiple_bugs": False,
    "suppress_health_check": list(HealthCheck),
}


@pytest.fixture
def quiet_log(caplog: pytest.LogCaptureFixture) -> None:
    """Each fault is a warning; thousands of them slow the run and hide its failure."""
    caplog.set_level("CRITICAL", "kvtide")


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that a prompt of the machine has several."""
    monkeypatch.setattr(work_slices, "SLICE", 3)


@pytest.mark.usefixtures("small_slices")
@pytest.mark.timeout(1800)  # minutes on a quiet machine, and more beside an engine that starts
def test_store_against_a_model(quiet_log: None) -> None:
    Machine.seen.clear()
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=80, stateful_step_count=50, derandomize=True, **PROFILE)
    )
    for what in (
        "blocks evicted from dram",
        "blocks evicted from nvme",
        "blocks read from nvme",
        "blocks unreadable in nvme",
        "blocks expired",
        "expiries",
        "drops",
        "power lost",
        "killed",
        "journals spoilt",
        "blocks that had to be there",
        "stores without room that cost nothing",
        "large blocks stored",
        "blocks moved in dram",
        "loads dropped: the block in nvme is not the asker's",
        "blocks that were durable",
    ):
        assert Machine.seen[what], f"the run never came to {what!r}: {Machine.seen}"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("small_slices")
def test_store_against_a_model_for_long(quiet_log: None) -> None:
    run_state_machine_as_test(Machine, settings=settings(max_examples=600, stateful_step_count=60, **PROFILE))
