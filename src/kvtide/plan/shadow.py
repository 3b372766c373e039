"""A cache of names without blocks, to see what a policy would have kept."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["Shadow"]


class Shadow:
    """Keeps the names with the highest scores. One thread."""

    def __init__(self) -> None:
        self._scores: dict[int, int] = {}
        self._since: dict[int, int] = {}
        """When each was last used."""
        self._heap: list[tuple[int, int]] = []
        """Scores and names; those that are no longer true are passed over when they come up."""

    def __contains__(self, name: int) -> bool:
        return name in self._scores

    def __len__(self) -> int:
        return len(self._scores)

    def use(
        self, names: Sequence[int], scores: Sequence[int], since: Sequence[int], counted: Sequence[bool], capacity: int
    ) -> int:
        """These names of one chain are used, and all are here afterwards, if they fit; answers how many were.

        ``since`` is the time of this use. Only those that are ``counted`` are in the answer. No use lowers a score.
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
        """No name scores more than ``longest`` after its last use from now on, if it was used before."""
        since = self._since
        self._scores = {name: min(score, since[name] + longest) for name, score in self._scores.items()}
        self._heap = [(score, name) for name, score in self._scores.items()]
        heapq.heapify(self._heap)

    def _shrink(self, own: set[int], capacity: int) -> None:
        """Let the lowest go; those of the chain itself only when nothing else is left."""
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
