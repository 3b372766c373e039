"""The tier that measures everything but a tier. The contract is in test_contract."""

from __future__ import annotations

from bench.noop import Noop
from kvtide.testing.blocks import aligned, keys
from kvtide.testing.tier import Caller, shaped
from kvtide.tiers.base import Read


def test_it_moves_no_bytes_and_answers_before_the_call_returns() -> None:
    who, (key,) = shaped(4, 4096), keys(1)
    tier = Noop()
    caller = Caller(tier, exact=False)
    places: list[int] = []
    tier.write([caller.block(key, who)], places.extend)
    assert len(places) == 1
    span = aligned(who.geometry.footprint)
    span[:] = b"7" * len(span)
    answers: list[object] = []
    tier.read([Read(key, who, places[0], span)], answers.extend)
    assert answers == [True]
    assert bytes(span) == b"7" * len(span)


def test_it_holds_more_than_there_is() -> None:
    """Blocks of a terabyte in all: only their places are kept."""
    tier = Noop()
    who = shaped(64, 1 << 20)
    caller = Caller(tier, exact=False)
    item = caller.block(keys(1)[0], who)
    for _ in range(100):
        tier.write([item] * 200, lambda places: None)
    assert tier.statistics().blocks == 20_000
    assert tier.statistics().bytes_used == 20_000 * (64 << 20) > 1 << 40
    tier.close()
    assert tier.statistics().blocks == 0
