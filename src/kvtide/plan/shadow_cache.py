"""A simulated cache of names without blocks, which shows what a policy would have kept.

The names of one chain are used together, and their scores usually fall along the chain. So the heap has one entry for
each use of a chain, not for each name: a *run*, a list of the names whose scores this use has raised, highest first.
A name whose score a later use raises is in the run of that use too. Its older entry no longer has the name's score,
and is skipped when its turn comes: exactly one entry of each name is valid.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["Shadow"]

_Entry = tuple[int, int]
"""A score and a name."""


class Shadow:
    """Keeps the names with the highest scores. For one thread."""

    def __init__(self) -> None:
        self._scores: dict[int, int] = {}
        self._since: dict[int, int] = {}
        """When each was last used."""
        self._heap: list[tuple[_Entry, list[_Entry]]] = []
        """Runs, each with its last entry, which is its lowest."""
        self._entries = 0
        """Number of entries in all runs, outdated ones included."""

    def __contains__(self, name: int) -> bool:
        return name in self._scores

    def __len__(self) -> int:
        return len(self._scores)

    def use(
        self, names: Sequence[int], scores: Sequence[int], since: Sequence[int], counted: Sequence[bool], capacity: int
    ) -> int:
        """Record a use of these names of one chain. All are present afterwards, if they fit; returns how many were
        before.

        ``since`` is the time of this use. The result includes only names that are ``counted``. A use never lowers a
        score.
        """
        held = self._scores
        old = list(map(held.get, names))
        hits = sum(asked for score, asked in zip(old, counted, strict=True) if score is not None)
        raised = {
            name: score for name, score, was in zip(names, scores, old, strict=True) if was is None or score > was
        }
        self._since.update(zip(names, since, strict=True))
        held.update(raised)
        if raised:
            # Sorted, for scores need not fall: a chain may have kept higher ones of an earlier use in the middle.
            self._add(sorted(zip(raised.values(), raised, strict=True), reverse=True))
        if len(held) > capacity:
            self._shrink(set(names), capacity)
        if self._entries > 4 * len(held) + 64:
            self._tidy()
        return hits

    def bound(self, longest: int) -> None:
        """Limit the score of every name to its last use plus ``longest``."""
        since = self._since
        self._scores = {name: min(score, since[name] + longest) for name, score in self._scores.items()}
        self._tidy()

    def _add(self, run: list[_Entry]) -> None:
        heapq.heappush(self._heap, (run[-1], run))
        self._entries += len(run)

    def _tidy(self) -> None:
        """Forget what is outdated."""
        self._heap, self._entries = [], 0
        if self._scores:
            self._add(sorted(zip(self._scores.values(), self._scores, strict=True), reverse=True))

    def _shrink(self, own: set[int], capacity: int) -> None:
        """Remove the names with the lowest scores; those of the chain itself only if no others are left."""
        held, heap, spared = self._scores, self._heap, list[_Entry]()
        excess = len(held) - capacity
        while excess > 0 and heap:
            run = heap[0][1]
            limit = min(heap[1:3])[0] if len(heap) > 1 else run[0]
            while excess > 0 and run and run[-1] <= limit:
                score, name = entry = run.pop()
                self._entries -= 1
                if held.get(name) != score:
                    continue
                if name in own:
                    spared.append(entry)
                else:
                    del held[name], self._since[name]
                    excess -= 1
            if run:
                heapq.heapreplace(heap, (run[-1], run))
            else:
                heapq.heappop(heap)
        for _, name in spared[:excess]:
            del held[name], self._since[name]
        if kept := spared[max(excess, 0) :]:
            self._add(kept[::-1])
