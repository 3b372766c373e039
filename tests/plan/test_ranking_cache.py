"""A ranking that is kept stays true: whatever is learned, used or stored after it, leaf first holds."""

from __future__ import annotations

import numpy as np

from kvtide.index.index import DRAM
from kvtide.plan.policy import Reuse, Terms
from kvtide.plan.ranking_cache import Queue, RankingCache
from kvtide.testing.policy import Forest


class Ranked:
    """A tier whose blocks stay for as long as ``stay`` says, all of them alike."""

    def __init__(self) -> None:
        self.forest = Forest(lambda index, room: Reuse(index, DRAM, room), room=1000)
        self.coldest = RankingCache(self.forest.index, DRAM, self.forest.policy, self.forest.uses)

    def stay(self, ticks: int, longest: int | None = None) -> None:
        assert isinstance(self.forest.policy, Reuse)
        terms = Terms(stay=np.full(2000, ticks))
        if longest is not None:
            terms.longest = longest
        self.forest.policy.terms = terms

    def rank(self, selection: int) -> Queue:
        return self.coldest.queue(np.array(list(self.forest.rows.values())), 64)

    def first(self) -> tuple[int, ...]:
        """The path of the block that leaves next."""
        rows, _ = self.coldest.next(0, 1, self.rank)
        return next(path for path, row in self.forest.rows.items() if row == rows[0])


def test_shorter_terms_rank_anew() -> None:
    ranked = Ranked()
    ranked.stay(2000)
    ranked.forest.store((0, 0))
    ranked.stay(600, longest=2000)
    for number in range(1, 51):
        ranked.forest.store((number,) * 10)
    ranked.forest.ask((0,))
    ranked.coldest._queues[0] = ranked.coldest.queue(ranked.forest.chain((0, 0)), 64)
    assert ranked.first() == (0, 0)
    ranked.stay(1800)
    scores = ranked.forest.scores()
    assert ranked.first() == min(scores, key=lambda path: scores[path])


def test_a_block_that_got_a_child_after_the_ranking_does_not_leave_before_it() -> None:
    ranked = Ranked()
    ranked.stay(1000)
    ranked.forest.store((0,))
    ranked.forest.store((1,))
    ranked.stay(0, longest=1000)
    assert ranked.first() == (0,)
    ranked.forest.ask((0,))
    ranked.forest.store((0, 5))
    assert ranked.first() != (0,)
