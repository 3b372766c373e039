"""Two stores over one folder against a plain model, while files vanish, break and are written by both at once.

Each store knows only what it wrote or found itself, so the other's acts reach it late or never; whatever it believes,
no byte may be wrong. Every load checks its bytes. The model has what may be returned at all, and, where that is
certain, what must be: what lies whole in storage is a hit for a store that comes new.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvtide import Session, Store, config
from kvtide.testing.clock import FakeClock
from kvtide.testing.interface import MODEL, PLAIN, SIZE, data, length, prompt
from kvtide.tiers.format.encryption import OPEN

Numbers = tuple[int, ...]
"""A prompt: those with one beginning share blocks."""

writers = st.integers(0, 1)
numbers = st.builds(lambda head, tail: (head, *tail), st.integers(0, 3), st.lists(st.integers(10, 11), max_size=4))


class TwoWriters(RuleBasedStateMachine):
    seen: ClassVar[Counter[str]] = Counter()
    """What came to pass in all runs together."""

    @initialize(codec=st.sampled_from(["raw", "zstd"]))
    def begin(self, codec: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvtide-two-"))
        self.clock = FakeClock()
        self.codec = codec
        self.stores = [self.open(), self.open()]
        self.sessions = [store.session(MODEL) for store in self.stores]
        self.stored: dict[Numbers, float] = {}
        """Every block that was ever stored, by the prompt that ends with it, and when the last of it expires."""
        self.lying: set[str] = set()
        """Names of files that were there after the last rule."""
        self.mortal: set[str] = set()
        """Those that may expire."""
        self.spoilt: set[str] = set()
        """Blocks that were damaged: a node that finds one removes it."""
        self.asked: set[str] = set()
        """Those that the last rule has dropped."""

    def open(self) -> Store:
        tree: dict[str, Any] = {
            "dram": {"budget": "1MiB", "segment": "1MiB"},
            # They hear of drops when a rule lets them, and not by the way, which no replay would do at the same moment.
            # Nor does a machine that is starved make the storage one that does not answer.
            "files": {
                "path": str(self.folder),
                "threads": 2,
                "codec": self.codec,
                "lease": "60min",
                "timeout": "10min",
            },
        }
        return Store(config.read(env={}, **tree), clock=self.clock)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            for store in self.stores:
                store.close()
            shutil.rmtree(self.folder)

    # -- what there is ------------------------------------------------------------------------------------

    def files(self) -> list[Path]:
        """But for the log of drops."""
        found = sorted(file for file in self.folder.rglob("*") if file.is_file())
        return [file for file in found if not file.name.startswith("dropped.")]

    def hear(self) -> None:
        """Let both know what was dropped: until then what they store is taken for that, and removed."""
        for store in self.stores:
            for _, tier in store.main.shared_tiers:
                tier.drops.hear()

    def names(self, path: Numbers) -> list[str]:
        """The names of a prompt's blocks in storage."""
        return [OPEN.name(key) for key in self.sessions[0].chain(prompt(*path)).keys(PLAIN.groups[0].suffix)]

    def check(self, session: Session, path: Numbers) -> int:
        """The blocks of a prompt that can be had; all bytes are right, and none is of what may not be returned."""
        blocks = length(session, prompt(*path)) // SIZE
        now = self.clock.time()
        for end in range(1, blocks + 1):
            assert self.stored.get(path[:end], 0.0) > now, f"{path[:end]} was never stored, or has expired"
        self.seen["found"] += blocks
        return blocks

    def settle(self) -> None:
        for store in self.stores:
            assert store.flush(60), store.statistics().tiers["files"].reasons

    @invariant()
    def nothing_unfinished_is_left(self) -> None:
        if hasattr(self, "folder"):
            self.settle()
            assert [file.name for file in self.files() if file.suffix == ".new"] == []

    @invariant()
    def what_left_was_dropped_or_broken_or_has_expired(self) -> None:
        if hasattr(self, "folder"):
            now = {file.name for file in self.files()}
            gone = self.lying - now
            assert gone <= self.asked | self.spoilt | self.mortal, "a block left though nobody asked for that"
            self.spoilt -= gone
            self.lying, self.asked = now, set()

    # -- rules --------------------------------------------------------------------------------------------

    @rule(who=writers, path=numbers, ttl=st.sampled_from([None, None, 10.0]))
    def store(self, who: int, path: Numbers, ttl: float | None) -> None:
        self.put(who, path, ttl)

    def put(self, who: int, path: Numbers, ttl: float | None = None) -> None:
        self.sessions[who].store(prompt(*path), data(PLAIN, prompt(*path)), ttl=ttl)
        until = float("inf") if ttl is None else self.clock.time() + ttl
        if ttl is not None:
            self.mortal.update(self.names(path))
        for end in range(1, len(path) + 1):
            self.stored[path[:end]] = max(until, self.stored.get(path[:end], 0.0))

    @rule(path=numbers)
    def both_store_the_same_at_once(self, path: Numbers) -> None:
        """The writes are in the background, and meet there."""
        self.put(0, path)
        self.put(1, path)

    @rule(who=writers, path=numbers)
    def load(self, who: int, path: Numbers) -> None:
        self.check(self.sessions[who], path)

    @rule(who=writers, path=numbers)
    def drop(self, who: int, path: Numbers) -> None:
        """What one drops is gone from storage, and from the memory of both when the other has heard of it."""
        self.settle()
        self.sessions[who].drop(prompt(*path))
        self.hear()
        self.asked.update(self.names(path))
        gone = set(self.names(path))
        assert not gone & {file.name for file in self.files()}
        assert length(self.sessions[who], prompt(*path)) == 0

    @rule(seconds=st.sampled_from([3.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(which=st.integers(0, 30))
    def a_file_vanishes(self, which: int) -> None:
        """As if a coordinator had removed it, and no node had read that."""
        if files := self.files():
            files[which % len(files)].unlink()
            self.asked.add(files[which % len(files)].name)
            self.seen["vanished"] += 1

    @rule(which=st.integers(0, 30), how=st.sampled_from(["cut", "flip", "other", "rubbish"]), where=st.floats(0, 0.999))
    def a_file_breaks(self, which: int, how: str, where: float) -> None:
        if files := self.files():
            file = files[which % len(files)]
            whole = file.read_bytes()
            at = int(where * len(whole))
            spoilt = {
                "cut": whole[:at],
                "flip": whole[:at] + bytes(byte ^ 8 for byte in whole[at : at + 1]) + whole[at + 1 :],
                "other": files[(which + 1) % len(files)].read_bytes(),
                "rubbish": os.urandom(len(whole)),
            }[how]
            file.write_bytes(spoilt)
            self.spoilt.add(file.name)
            self.seen["broken"] += 1

    @rule(who=writers)
    def restart(self, who: int) -> None:
        self.stores[who].close()
        self.stores[who] = self.open()
        self.sessions[who] = self.stores[who].session(MODEL)

    @rule(path=numbers)
    def a_newcomer_finds_what_one_of_them_has_stored(self, path: Numbers) -> None:
        """Whatever was there before, broken or expired: after a load has shown so, it can be stored anew."""
        self.clock.advance(3.0)  # that a block was not there is remembered for a moment
        for session in self.sessions:
            self.check(session, path)
            session.drop(prompt(*path))
        self.hear()
        self.asked.update(self.names(path))
        self.put(0, path)
        self.settle()
        assert set(self.names(path)) <= {file.name for file in self.files()}
        with self.open() as store, store.session(MODEL) as session:
            assert self.check(session, path) == len(path)


def test_two_writers_against_a_model() -> None:
    TwoWriters.seen.clear()
    run_state_machine_as_test(
        TwoWriters,
        settings=settings(
            max_examples=40,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
    for what in ("found", "vanished", "broken"):
        assert TwoWriters.seen[what], f"the run never came to {what!r}: {TwoWriters.seen}"
