"""The contract of an eviction policy, as a suite. Derive from ``PolicyContract`` and define ``make``.

Whatever is used, requested, stored, expected back, evicted and learned: leaves are evicted first, lower priorities are
evicted first, and a use never lowers a block's score.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtide.index.index import DRAM, SEALED, Index, Rows, marks
from kvtide.plan.policy import Policy
from kvtide.plan.usage_tracker import Turn, UsageTracker
from kvtide.testing import blocks
from kvtide.testing.clock import FakeClock

__all__ = ["Forest", "PolicyContract"]

_PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple)
_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "ask", "touch", "expect", "evict", "learn"]), _PATHS, st.integers(0, 2)
    ),
    max_size=60,
)

_INHERITED = [HealthCheck.differing_executors]
"""The same test runs for every policy."""


class Forest:
    """Prompts by path: those with equal beginnings share blocks. A tier of ``room`` blocks that a policy ranks."""

    def __init__(self, make: Callable[[Index, Callable[[], int]], Policy], room: int = 40) -> None:
        self.index = Index(tiers=1)
        self.clock = FakeClock()
        self.uses = UsageTracker(self.index, self.clock)
        self.policy = make(self.index, lambda: room)
        self.uses.serve(self.policy)
        self._room = room
        self._names: dict[tuple[int, ...], int] = {}
        self.rows: dict[tuple[int, ...], int] = {}
        """The resident blocks, by path."""

    def chain(self, path: tuple[int, ...]) -> Rows:
        """The rows of a prompt's resident blocks."""
        found = []
        for end in range(1, len(path) + 1):
            if path[:end] not in self.rows:
                break
            found.append(self.rows[path[:end]])
        return np.array(found, np.int64)

    def ask(self, path: tuple[int, ...]) -> int:
        """Request a prompt; returns how many of its blocks are resident."""
        rows = self.chain(path)
        self.uses.asked(rows, len(path))
        return len(rows)

    def expect(self, path: tuple[int, ...], turn: Turn | None, returns_in: float | None) -> None:
        """Give hints about a prompt's next use."""
        self.uses.expect(self.chain(path), turn, returns_in, {DRAM: self._room})

    def hint(self, path: tuple[int, ...], number: int) -> None:
        """One of several hints, a second later."""
        self.clock.advance(1)
        turns: tuple[Turn | None, ...] = (None, "tool", "end")
        self.expect(path, turns[number], (1.0, None, 5.0)[number])

    def store(self, path: tuple[int, ...], priority: int = 0) -> None:
        """Store a whole prompt, and evict other blocks, lowest score first, to make space."""
        for end in range(1, len(path) + 1):
            part = path[:end]
            if part not in self.rows:
                number = self._names.setdefault(part, len(self._names))
                (key,) = blocks.keys(1, start=number)
                row = self.index.add(key, bytes(32), end - 1)
                self.index.mark[row] = marks([key])[0]
                self.index.put(row, DRAM, SEALED, number)
                self.rows[part] = row
        rows = self.chain(path)
        self.index.priority[rows] = np.maximum(self.index.priority[rows], priority)
        self.uses.stored(rows)
        while len(self.rows) > max(self._room, len(path)):
            self.evict(keep=path)

    def evict(self, keep: tuple[int, ...] = ()) -> None:
        """Evict the block with the lowest score that is not in ``keep``."""
        free = [p for p in self.rows if p != keep[: len(p)]]
        if not free:
            return
        scores = self.policy.score(np.array([self.rows[p] for p in free]))
        row = self.rows.pop(free[int(np.argmin(scores))])
        self.index.remove(row, DRAM)
        self.index.retire(row)

    def scores(self) -> dict[tuple[int, ...], int]:
        paths = list(self.rows)
        rows = np.array([self.rows[p] for p in paths], np.int64)
        return dict(zip(paths, self.policy.score(rows).tolist(), strict=True))


class PolicyContract:
    """See the module's docstring."""

    def make(self, index: Index, room: Callable[[], int]) -> Policy:
        """The policy under test, for tier 0 of ``index``, which holds ``room()`` blocks."""
        raise NotImplementedError

    def learned(self, forest: Forest) -> None:
        """Learn from everything that was recorded."""
        if forest.uses.learns:
            forest.uses.learn()

    @settings(max_examples=100, deadline=None, suppress_health_check=_INHERITED)
    @given(steps=_STEPS)
    def test_a_block_outlasts_its_descendants(self, steps: list[tuple[str, tuple[int, ...], int]]) -> None:
        forest = Forest(self.make)
        for verb, path, number in steps:
            if verb == "store":
                forest.store(path, number)
            elif verb == "ask":
                forest.ask(path)
            elif verb == "touch":
                forest.uses.touch(forest.chain(path))
            elif verb == "expect":
                forest.hint(path, number)
            elif verb == "evict":
                forest.evict()
            else:
                self.learned(forest)
            scores = forest.scores()
            for part, score in scores.items():
                if len(part) > 1:
                    assert part[:-1] in scores, f"{part} outlived its parent"
                    assert scores[part[:-1]] > score, f"{part} would outlive its parent after {verb} {path}"

    @settings(max_examples=50, deadline=None, suppress_health_check=_INHERITED)
    @given(steps=_STEPS)
    def test_a_higher_priority_outlasts_all_lower(self, steps: list[tuple[str, tuple[int, ...], int]]) -> None:
        forest = Forest(self.make, room=1000)
        for verb, path, number in steps:
            if verb == "ask":
                forest.ask(path)
            elif verb == "learn":
                self.learned(forest)
            elif verb == "expect":
                forest.hint(path, number)
            else:
                forest.store(path, number)
        ranked = sorted((score, int(forest.index.priority[forest.rows[p]])) for p, score in forest.scores().items())
        assert [p for _, p in ranked] == sorted(p for _, p in ranked)

    @settings(max_examples=50, deadline=None, suppress_health_check=_INHERITED)
    @given(steps=_STEPS, path=_PATHS)
    def test_a_use_never_makes_a_block_worth_less(
        self, steps: list[tuple[str, tuple[int, ...], int]], path: tuple[int, ...]
    ) -> None:
        forest = Forest(self.make)
        for verb, other, number in steps:
            if verb == "learn":
                self.learned(forest)
            elif verb == "ask":
                forest.ask(other)
            elif verb == "expect":
                forest.hint(other, number)
            else:
                forest.store(other, number)
        before = forest.scores()
        rows = forest.chain(path)
        forest.ask(path)
        after = forest.scores()
        for end in range(1, len(rows) + 1):
            assert after[path[:end]] >= before[path[:end]]

    def test_before_anything_is_learned_it_is_least_recently_used(self) -> None:
        forest = Forest(self.make, room=6)
        for number in range(6):
            forest.store((number,))
        forest.ask((0,))
        forest.store((6,))
        forest.store((7,))
        assert [number for number in range(8) if (number,) in forest.rows] == [0, 3, 4, 5, 6, 7]
