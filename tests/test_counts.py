"""The names of what a store counts, and which of them report that something was not done."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from kvtide.counts import Count, CountKind, TierCount, count_names

TIERS = ("dram", "nvme", "files")
ALL = tuple(CountKind)


def test_a_counter_is_of_the_kind_that_its_name_says() -> None:
    """Users read the name, code the kind: both must say the same."""
    for count in (*Count, *TierCount):
        assert (count.kind is CountKind.DROP) == (" dropped: " in count.value), count
        assert (count.kind is CountKind.DAMAGE) == ("unreadable" in count.value or "changed" in count.value), count


def test_counters_of_different_tiers_and_meanings_have_different_names() -> None:
    names = [*map(str, Count), *(count.of(tier) for count in TierCount for tier in TIERS)]
    assert sorted(count_names(TIERS, *ALL)) == sorted(names), "each exactly once"
    assert all("{" not in name for name in names)


@pytest.mark.parametrize("kind", CountKind)
def test_each_counter_has_one_kind(kind: CountKind) -> None:
    others = [other for other in CountKind if other is not kind]
    assert count_names(TIERS, kind) == count_names(TIERS, *ALL) - count_names(TIERS, *others)


def test_a_counter_is_its_name_to_whoever_reads_the_counts() -> None:
    counts: Counter[str] = Counter()
    counts[Count.BLOCKS_STORED] += 1
    counts["blocks stored"] += 1
    assert msgspec.json.decode(msgspec.json.encode(counts)) == {"blocks stored": 2}
