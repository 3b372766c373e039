"""``explain`` names the cause, also the rare ones: each is brought about by what really causes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvtide import Why
from kvtide.clock import SystemClock
from kvtide.index.absence_log import AbsenceCause, EvictedFor
from kvtide.plan.policy import Duel
from kvtide.store.explanation import ExplainedBlocks
from kvtide.store.session import Session
from kvtide.testing.faults import FaultyDisk
from kvtide.testing.interface import until
from tests.plan.small import MODEL, SLOTS, keep, prompt
from tests.test_explain import OTHER, World, nvme, opened
from tests.test_other_identity import blocks_got, stranger, unknown

__all__ = ["opened"]

Opener = Callable[..., World]


def explained(session: Session, *path: int) -> ExplainedBlocks:
    (some,) = session.explain(prompt(*path)).blocks
    return some


def said(session: Session, *path: int) -> str:
    return " ".join(str(session.explain(prompt(*path))).split())


def test_late_the_storage_did_not_answer_in_time(opened: Opener, tmp_path: Path) -> None:
    shared = {"path": str(tmp_path / "shared"), "threads": 2}
    writer = World("embedded", tmp_path, files=shared)
    with writer.host.session(MODEL) as session:
        keep(session, 1)
        assert writer.store.flush(30).complete
    writer.close()
    disk = FaultyDisk()
    world = opened(files={**shared, "timeout": 0.2}, disk=disk, real=SystemClock())
    with world.host.session(MODEL) as session:
        with session.match(prompt(1), wait=30, request="late") as match:
            assert match.blocks == 1
            gate = disk.gate("read", "*")
            assert session.load(match).wait(30).tokens == 0
            assert gate.wait_for(1)
        some = explained(session, 1)
        assert (some.why, some.tier, some.cause) == (Why.LOAD_FAILED, "files", AbsenceCause.LATE)
        assert "a load from files failed" in said(session, 1)
        assert "the storage did not answer in time" in said(session, 1)
        gate.open()


def test_others_block_whoever_names_a_record_of_another_is_told_no_more(tmp_path: Path) -> None:
    """Whose a record of an older journal is shows when it is read. Only the names of the owner find it."""
    world = World("embedded", tmp_path, nvme=nvme(tmp_path))
    with world.store.session(MODEL) as owner:
        keep(owner, 1)
        world.push_out(owner)
        unknown(world.store)
        asker = stranger(world.store)
        assert blocks_got(asker, owner, 1) == 0
        (some,) = asker.explain(owner.chain(prompt(1)), None).blocks
        assert (some.tier, some.cause) == ("nvme", AbsenceCause.OTHERS_BLOCK)
        mine = explained(owner, 1)
        assert (mine.why, mine.tier, mine.cause) == (Why.HIT, "nvme", AbsenceCause.NONE), "not the owner's concern"
    world.close()


def test_budget_all_users_of_a_storage_together_have_used_it_up(opened: Opener, tmp_path: Path) -> None:
    shared = {"path": str(tmp_path / "shared"), "budget": "8MiB", "lease": "0.3s", "store": "through"}
    world = opened(files=shared, real=SystemClock())
    with world.host.session(MODEL) as session:
        until(lambda: world.store.statistics().budgets["files"].steward.term > 0)
        numbers = iter(range(1, 10_000))
        known: list[int] = []

        def removed() -> list[int]:
            return [number for number in known if explained(session, number).cause is AbsenceCause.BUDGET]

        def stored_until_some_are_removed() -> bool:
            known.append(next(numbers))
            keep(session, known[-1])
            world.store.flush(30)  # without write credit it is stored when there is some
            return len(known) % 20 == 0 and bool(removed())

        until(stored_until_some_are_removed)
        some = explained(session, removed()[0])
        assert (some.why, some.tier, some.for_whom) == (Why.EVICTED, "files", EvictedFor.UNKNOWN)
        assert "all users of that storage together had used up its budget" in said(session, removed()[0])


def test_forgetting_a_tenant_keeps_nothing_of_it_meanwhile(opened: Opener) -> None:
    world = opened()
    with world.host.session(MODEL, OTHER) as session, world.host.session(MODEL) as another:
        with world.store.main.pipeline.forgetting(OTHER.tag):
            keep(session, 1)
            keep(another, 1)
        some = explained(session, 1)
        assert (some.why, some.cause) == (Why.STORE_DROPPED, AbsenceCause.FORGETTING)
        assert "its tenant was being forgotten" in said(session, 1)
        assert explained(another, 1).why is Why.HIT


def test_reuse_the_policy_that_keeps_what_will_come_back(opened: Opener) -> None:
    world = opened(dram={"policy": "reuse"})
    with world.host.session(MODEL) as session:
        keep(session, 1)
        world.push_out(session, 2 * SLOTS)
        some = explained(session, 1)
        assert (some.why, some.tier, some.cause) == (Why.EVICTED, "dram", AbsenceCause.REUSE)
        assert "evicted from DRAM" in said(session, 1)
        assert "by reuse" in said(session, 1)


def test_bounded_while_it_leads_in_the_automatic_policy(opened: Opener) -> None:
    """That it can come to lead is a test of policies (``tests/plan``)."""
    world = opened(dram={"policy": "auto"})
    with world.host.session(MODEL) as session:
        policy = world.store.pipeline._space._evictor.policy
        assert isinstance(policy, Duel)
        policy.leader = "bounded"
        keep(session, 1)
        world.push_out(session, 2 * SLOTS)
        some = explained(session, 1)
        assert (some.why, some.tier, some.cause) == (Why.EVICTED, "dram", AbsenceCause.BOUNDED)
        assert "by bounded" in said(session, 1)
