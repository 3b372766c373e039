"""The contract of a tier (``kvtide.tiers.base``) as tests. Needs pytest.

Subclass it, define how a tier is made and what it can do, and run pytest::

    class TestMine(TierContract):
        persistent = True

        def make(self, where: Path, budget: int) -> Tier:
            return Mine(where, budget)

The tests here are for a tier with exclusive storage: its budget, its statistics, and its blocks when it is opened
again. A tier that shares its storage with others runs ``AnyTierContract`` alone (any_tier.py).
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
from msgspec import structs

from kvtide.block import BlockKey
from kvtide.testing.any_tier import AnyTierContract
from kvtide.testing.blocks import keys
from kvtide.testing.caller import GEOMETRIES, Caller, shaped
from kvtide.testing.caller import CallerAnswer as Answer
from kvtide.tiers.base import NOWHERE, Held

__all__ = ["GEOMETRIES", "Answer", "Caller", "TierContract", "shaped"]


class TierContract(AnyTierContract):
    """See the module's docstring."""

    # -- the budget ---------------------------------------------------------------------------------------

    def test_a_full_tier_refuses_and_keeps_what_it_has(self, caller: Caller) -> None:
        who = GEOMETRIES["pages without padding"]
        held = caller.fill(who)
        names, places = list(held), list(held.values())
        # Most of the budget can really be used for blocks.
        assert len(held) * who.geometry.nbytes > 0.7 * self.budget
        assert caller.write(keys(3, start=10_000), who) == [NOWHERE] * 3
        assert caller.finds(names, who, places) == [True] * len(held)
        now = caller.statistics()
        assert (now.blocks, now.failed_writes) == (len(held), 4)

    def test_evicted_room_is_used_again(self, caller: Caller) -> None:
        who = GEOMETRIES["pages without padding"]
        held = caller.fill(who)
        count = len(held)
        random = Random(1)
        for turn in range(4):
            out = random.sample(sorted(held), count // 3)
            if turn % 2:
                caller.evict(out, [held.pop(k) for k in out])
            else:
                assert all(caller.drop(*[(k, held.pop(k)) for k in out]))
            held |= caller.fill(who, start=1000 * (turn + 1))
            assert len(held) == count
            assert caller.finds(list(held), who, list(held.values())) == [True] * count
            assert caller.statistics().blocks == count

    def test_two_shapes_take_turns(self, caller: Caller) -> None:
        """Each shape finds as much space as the first time, however often they alternate."""
        shapes = [GEOMETRIES["pages without padding"], shaped(2, 9000)]
        room: dict[int, int] = {}
        for turn in range(6):
            who = shapes[turn % 2]
            held = caller.fill(who, start=1000 * turn)
            assert len(held) >= 0.9 * room.setdefault(turn % 2, len(held))
            assert caller.finds(list(held), who, list(held.values())) == [True] * len(held)
            caller.evict(list(held), list(held.values()))
        assert caller.statistics().blocks == 0

    def test_statistics_add_up(self, caller: Caller) -> None:
        who, names = GEOMETRIES["pages without padding"], keys(6)
        start = caller.statistics()
        assert (start.blocks, start.bytes_used, start.bytes_read, start.bytes_written) == (0, 0, 0, 0)
        assert start.budget <= self.budget
        places = caller.write(names, who)
        written = caller.statistics()
        assert written.blocks == 6
        assert written.bytes_written > 0
        assert 0 < written.bytes_used <= written.bytes_taken
        caller.finds(names, who, places)
        whole = caller.statistics().bytes_read
        assert whole > 0
        caller.read([caller.read_item(names[0], who, places[0], range(2))])
        part = caller.statistics().bytes_read - whole
        assert 0 < part < whole / 6
        caller.evict(names[:2], places[:2])
        caller.finds(names[:2], who, places[:2])
        assert caller.statistics().failed_reads == 2
        caller.drop(*zip(names[2:], places[2:], strict=True))
        end = caller.statistics()
        assert (end.blocks, end.bytes_used) == (0, 0)
        assert (end.bytes_read, end.bytes_written) == (whole + part, written.bytes_written)

    # -- closing and opening again ------------------------------------------------------------------------

    def test_what_outlives_closing(self, where: Path) -> None:
        caller = self.open(where)
        assert list(caller.tier.scan()) in ([], [_EMPTY])
        who, names = GEOMETRIES["padded sections"], keys(8)
        batch = [
            structs.replace(
                caller.block(k, who),
                parent=names[i - 1][:32] if i else bytes(32),
                depth=i,
                expiry=float("inf") if i % 2 else 2e9 + i,
                priority=i - 4,
                tokens=bytes(range(i)),
            )
            for i, k in enumerate(names)
        ]
        places = [caller.start_write([item]).wait()[0] for item in batch]
        assert caller.finds(names, who, places) == [True] * 8
        assert caller.drop((names[7], places[7])) == [True]
        caller.tier.evict(names[6], places[6])
        assert caller.drop((names[6], NOWHERE)) == [True]
        caller.close()

        again = self.open(where)
        held = list(again.tier.scan())
        if not self.persistent:
            assert held in ([], [_EMPTY])
            assert again.statistics().blocks == 0
            assert again.finds(names, who, places) == [False] * 8
            again.close()
            return
        assert {k: p for h in held for k, p in _places(h)} == dict(zip(names[:6], places[:6], strict=True))
        rows = sorted(
            (s, k, bytes(p), d, e, y)
            for h in held
            for s, k, p, d, e, y in zip(
                h.sequences.tolist(),
                h.keys,
                h.parents.tolist(),
                h.depths.tolist(),
                h.expiries.tolist(),
                h.priorities.tolist(),
                strict=True,
            )
        )
        assert [row[1:] for row in rows] == [(w.key, w.parent, w.depth, w.expiry, w.priority) for w in batch[:6]]
        for h in held:
            again.tier.own(h.places, np.arange(1, len(h.places) + 1))
        assert again.finds(names, who, places) == [True] * 6 + [False] * 2
        assert again.statistics().blocks == 6
        # It works on as if it had never been closed.
        more = keys(4, start=100)
        more_places = again.write(more, who)
        assert again.drop((names[0], places[0])) == [True]
        again.close()
        third = self.open(where)
        assert sorted(k for h in third.tier.scan() for k in h.keys) == sorted(names[1:6] + more)
        assert third.finds(names[1:6] + more, who, places[1:6] + more_places) == [True] * 9
        third.close()

    def test_the_budget_holds_across_openings(self, where: Path) -> None:
        caller = self.open(where)
        who = GEOMETRIES["pages without padding"]
        held = caller.fill(who)
        caller.close()
        less = self.open(where, self.budget // 2)
        kept = {k: p for h in less.tier.scan() for k, p in _places(h)}
        now = less.statistics()
        assert now.budget <= self.budget // 2
        assert now.blocks == len(kept) <= len(held) // 2
        assert all(held[k] == p for k, p in kept.items())
        assert less.finds(list(kept), who, list(kept.values())) == [True] * len(kept)
        less.fill(who, start=5000)
        assert less.finds(list(kept), who, list(kept.values())) == [True] * len(kept)
        less.close()


def _places(held: Held) -> list[tuple[BlockKey, int]]:
    return list(zip(held.keys, held.places.tolist(), strict=True))


class _Nothing:
    """Equal to any Held without blocks."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and not other.keys

    __hash__ = None  # type: ignore[assignment]


_EMPTY = _Nothing()
