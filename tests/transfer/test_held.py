"""``Match.held_tokens``: what of a prompt is in DRAM, verified and leased, at every moment between disk and DRAM."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

import kvtide
from kvtide import Model
from kvtide.testing.interface import HYBRID, SIZE, everything
from kvtide.testing.interface import prompt as long_prompt
from tests.plan.small import LAYOUT, NBYTES, prompt
from tests.transfer.test_pipeline import one_by_one, world

__all__ = ["one_by_one"]

TOKENS = LAYOUT.block_tokens


def test_blocks_on_disk_are_matched_but_not_held_until_a_load_has_brought_them() -> None:
    with world() as w:
        w.chill(1, 2, 3)
        with w.session.match(prompt(1, 2, 3)) as match:
            assert (match.tokens, match.held_tokens, match.ready) == (3 * TOKENS, 0, False)
            load = w.session.load(match)
            assert (match.held_tokens, match.ready) == (0, False), "it is only on its way"
            w.tier.let_read()
            assert load.wait(0).tokens == match.held_tokens == match.tokens
            assert match.ready
        assert (match.tokens, match.held_tokens, match.ready) == (3 * TOKENS, 0, False), "nothing is leased any more"


def test_a_prefix_that_is_in_memory_is_held_before_the_rest_comes() -> None:
    with world() as w:
        w.chill(1, 2, 3)
        with w.session.match(prompt(1)) as first:
            load = w.session.load(first)
            w.tier.let_read()
            assert load.wait(0).tokens == TOKENS
        with w.session.match(prompt(1, 2, 3)) as match:
            assert (match.tokens, match.held_tokens, match.ready) == (3 * TOKENS, TOKENS, False)


def test_blocks_behind_a_hole_do_not_count_unless_the_caller_has_what_is_missing() -> None:
    with world() as w:
        w.chill(1, 2, 3)
        with w.session.match(prompt(1, 2, 3), have=TOKENS) as rest:
            assert (rest.tokens, rest.held_tokens) == (3 * TOKENS, TOKENS), "what the caller has counts as in tokens"
            load = w.session.load(rest)
            w.tier.let_read()
            load.wait(0)
            assert (rest.held_tokens, rest.ready) == (3 * TOKENS, True)
        with w.session.match(prompt(1, 2, 3)) as match:
            assert (match.tokens, match.held_tokens) == (3 * TOKENS, 0)


def test_a_read_that_fails_leaves_what_is_held_as_it_is() -> None:
    with world() as w:
        w.chill(1, 2)
        with w.session.match(prompt(1, 2)) as match:
            load = w.session.load(match)
            w.tier.let_read(good=False)
            assert load.wait(0).tokens == 0
            assert (match.tokens, match.held_tokens, match.ready) == (2 * TOKENS, 0, False)


@pytest.mark.usefixtures("one_by_one")
def test_when_the_time_is_over_what_has_come_is_held_and_more_may_come_later() -> None:
    with world() as w:
        w.chill(1, 2)
        with w.session.match(prompt(1, 2)) as match:
            load = w.session.load(match, deadline=1)
            w.tier.let_read()
            w.clock.now += 2
            assert load.wait().tokens == match.held_tokens == TOKENS
            assert not match.ready
            w.tier.let_read()
            assert match.held_tokens == 2 * TOKENS


def test_a_drop_takes_nothing_from_what_is_held() -> None:
    with world() as w:
        w.session.store(prompt(1), [bytes(NBYTES)])
        w.tier.let_all()
        with w.session.match(prompt(1)) as match:
            w.session.drop(prompt(1))
            assert (match.held_tokens, match.ready) == (TOKENS, True)


def test_every_group_that_is_required_must_be_held(tmp_path: Path) -> None:
    tokens = long_prompt(1, 2, 3)
    nvme = {"path": str(tmp_path / "kv"), "budget": "32MiB", "segment": "1MiB", "store": "through"}
    settings = {"dram": {"budget": "8MiB", "segment": "1MiB"}, "nvme": nvme}
    model = Model(HYBRID, "given:hybrid")
    with kvtide.open(**settings) as store, store.session(model) as session:
        session.store(tokens, everything(HYBRID, tokens))
    with kvtide.open(**settings) as store, store.session(model) as session, ExitStack() as kept:
        match = kept.enter_context(session.match(tokens))
        assert (match.tokens, match.held_tokens, match.ready) == (3 * SIZE, 0, False)
        short = kept.enter_context(session.match(tokens[: 2 * SIZE]))
        assert session.load(short).wait(60).tokens == short.held_tokens == 2 * SIZE
        assert match.held_tokens == 0, "the state at its end is not here"
        assert session.load(match).wait(60).tokens == match.held_tokens == 3 * SIZE
        assert match.ready
