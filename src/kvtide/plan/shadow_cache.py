"""A simulated cache of names without blocks, which shows what a policy would have kept."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["Shadow"]


class Shadow:
    """Keeps the names with the highest scores. For one thread."""

    def __init__(self) -> None:
        self._scores: dict[int, int] = {}
        self._since: dict[int, int] = {}
        """When each was last used."""
        self._heap: list[tuple[int, int]] = []
        """Scores and names; outdated entries are skipped."""

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
        held, hits = self._scores, 0
        self._since.update(zip(names, since, strict=True))
        for name, score, asked in zip(names, scores, counted, strict=True):
            old = held.get(name)
            if old is not None:
                hits += asked
                score = max(score, old)
            if score != old:
                held[name] = score
                heapq.heappush(self._heap, (score, name))
        if len(held) > capacity:
            self._shrink(set(names), capacity)
        if len(self._heap) > 4 * len(held) + 64:
            self._heap = [(score, name) for name, score in held.items()]
            heapq.heapify(self._heap)
        return hits

    def bound(self, longest: int) -> None:
        """Limit the score of every name to its last use plus ``longest``."""
        since = self._since
        self._scores = {name: min(score, since[name] + longest) for name, score in self._scores.items()}
        self._heap = [(score, name) for name, score in self._scores.items()]
        heapq.heapify(self._heap)

    def _shrink(self, own: set[int], capacity: int) -> None:
        """Remove the names with the lowest scores; those of the chain itself only if no others are left."""
        held, spared = self._scores, []
        while len(held) > capacity and self._heap:
            score, name = heapq.heappop(self._heap)
            if held.get(name) != score:
                continue
            if name in own:
                spared.append((score, name))
            else:
                del held[name], self._since[name]
        for score, name in spared:
            if len(held) > capacity:
                del held[name], self._since[name]
            else:
                heapq.heappush(self._heap, (score, name))
