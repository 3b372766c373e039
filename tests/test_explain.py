"""``explain`` says why a block is a hit or a miss: every reason is caused on purpose, in this process and by a node."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvtide
from kvtide import Explanation, Extra, Model, Session, Store, Tenant, Unwritten, Why, config
from kvtide.clock import Clock
from kvtide.errors import LayoutError
from kvtide.formatting import moment
from kvtide.index.absence_log import AbsenceCause, AbsenceLog, EvictedFor
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.node import protocol as p
from kvtide.node.client.backend import RemoteBackend
from kvtide.node.client.client import Client
from kvtide.store.backend import LocalBackend
from kvtide.store.recent_requests import RecentStatistics
from kvtide.store.session import SessionHost
from kvtide.testing.clock import FakeClock
from kvtide.testing.faults import Fault, FaultyDisk, How
from tests.node.serving import Thread, eventually
from tests.plan.small import LAYOUT, MODEL, NBYTES, SLOTS, content, keep, length, prompt
from tests.test_interrupts import Interrupted, Points

OTHER = Tenant("other", b"the naming secret of the other tenant")
NUMBERS = itertools.count(500_000)


class World:
    """A store with a clock that stands still, in this process or in a node, and a host of sessions in front of it."""

    def __init__(
        self,
        kind: str,
        folder: Path,
        disk: FaultyDisk | None = None,
        real: Clock | None = None,
        **settings: dict[str, Any],
    ) -> None:
        """``real``: a clock that does not stand still."""
        self.clock = FakeClock()
        clock: Clock = real or self.clock
        self._node: Thread | None = None
        tree: dict[str, Any] = {"dram": {"budget": "1MiB", "segment": "1MiB"}}
        for section, values in settings.items():
            tree.setdefault(section, {}).update(values)
        self.store: Store
        self.host: SessionHost
        if kind == "node":
            self._node = Thread(folder / "node.sock", disk, clock, **tree)
            self.store, self.host = self._node.store, Client(folder / "node.sock")
        else:
            self.host = self.store = Store(config.read(None, **tree), clock=clock, disk=disk)

    def close(self) -> None:
        self.host.close()
        if self._node is not None and not self.store.closed:
            self._node.close()

    def push_out(self, session: Session, blocks: int = SLOTS) -> None:
        """Store other prompts of one block each."""
        for _ in range(blocks):
            keep(session, next(NUMBERS))
            assert self.store.flush(30)


Opener = Callable[..., World]


@pytest.fixture(params=["embedded", "node"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    worlds: list[World] = []

    def opener(**settings: Any) -> World:
        worlds.append(World(request.param, tmp_path, **settings))
        return worlds[-1]

    yield opener
    for world in worlds:
        world.close()


def nvme(folder: Path, **more: Any) -> dict[str, Any]:
    tier = {"path": str(folder / "tier"), "budget": "16MiB", "segment": "1MiB", "threads": 2, "store": "through"}
    return {**tier, **more}


def told(session: Session, *path: int, **options: Any) -> Explanation:
    found = session.explain(prompt(*path), **options)
    numbers = [number for some in found.blocks for number in range(some.first, some.stop)]
    assert numbers == list(range(len(path))), "each block is explained once"
    assert all(len(line) <= 80 for line in found.lines()), str(found)
    return found


def why(session: Session, *path: int, **options: Any) -> list[Why]:
    return [some.why for some in told(session, *path, **options).blocks for _ in range(len(some))]


# -- every reason ---------------------------------------------------------------------------------------------


def test_hits_and_blocks_that_were_never_seen(opened: Opener) -> None:
    world = opened()
    with world.host.session(MODEL) as session:
        keep(session, 1, 2, 3)
        found = told(session, 1, 2, 3, 4, 5)
        assert [(some.first, some.stop, some.why, some.tier) for some in found.blocks] == [
            (0, 3, Why.HIT, "dram"),
            (3, 5, Why.NEVER_SEEN, ""),
        ]
        assert found.tokens == 5 * LAYOUT.block_tokens
        assert found.by_tier() == {"dram": 3}
        assert found.by_reason() == {"never seen": 2}
        assert "blocks 0-2 (tokens 0-47): in DRAM" in str(found)
        assert "never seen since the store was opened, empty, at" in str(found)
        assert session.explain(session.chain([*prompt(1, 2), 9])).tokens == 2 * LAYOUT.block_tokens + 1
        assert session.explain([]).blocks == ()


def test_of_a_prompt_without_a_whole_block_it_says_that_nothing_is_stored(opened: Opener) -> None:
    with opened().host.session(MODEL) as session:
        found = session.explain(prompt(1)[:3])
    assert (found.blocks, found.advice()) == ((), "Only whole blocks of 16 tokens are stored: nothing of this prompt.")


def test_evicted_from_dram_for_a_block_of_the_same_tenant(opened: Opener) -> None:
    world = opened(dram={"policy": "lru"})
    with world.host.session(MODEL) as session:
        keep(session, 1, 2)
        world.push_out(session)
        world.clock.advance(180)
        (some,) = told(session, 1, 2).blocks
        assert (some.why, some.tier, some.cause) == (Why.EVICTED, "dram", AbsenceCause.LRU)
        assert (some.for_whom, some.unwritten, some.ago) == (EvictedFor.SAME, None, (180.0, 180.0))
        assert "evicted from DRAM 3 min ago by lru, to make space for this tenant" in " ".join(
            str(told(session, 1, 2)).split()
        )
        keep(session, 1, 2)
        assert why(session, 1, 2) == [Why.HIT] * 2, "it was stored again since"


def test_evicted_for_another_tenant(opened: Opener) -> None:
    world = opened()
    with world.host.session(MODEL) as session, world.host.session(MODEL, OTHER) as other:
        keep(session, *range(SLOTS))
        world.push_out(other, SLOTS // 2)
        gone = [some for some in told(session, *range(SLOTS)).blocks if some.why is Why.EVICTED]
        assert {some.for_whom for some in gone} == {EvictedFor.OTHER}
        assert sum(map(len, gone)) == SLOTS // 2
        assert set(why(other, *range(SLOTS))) == {Why.NEVER_SEEN}, "the other learns nothing of these"


def test_evicted_from_memory_and_why_the_disk_did_not_have_it(opened: Opener, tmp_path: Path) -> None:
    world = opened(nvme=nvme(tmp_path, store="second-touch"))
    with world.host.session(MODEL) as session:
        keep(session, 1)
        world.push_out(session)
        (some,) = told(session, 1).blocks
        assert (some.why, some.tier, some.unwritten) == (Why.EVICTED, "dram", Unwritten.NOT_ADMITTED)


def test_in_nvme_and_evicted_from_there(opened: Opener, tmp_path: Path) -> None:
    world = opened(nvme=nvme(tmp_path))
    with world.host.session(MODEL) as session:
        keep(session, 1)
        world.push_out(session)
        (some,) = told(session, 1).blocks
        assert (some.why, some.tier) == (Why.HIT, "nvme")
        while length(session, 1):
            world.push_out(session, 16)
            assert len(world.store.index) < 1000
        (some,) = told(session, 1).blocks
        assert (some.why, some.tier, some.cause) == (Why.EVICTED, "nvme", AbsenceCause.LRU)
        assert some.for_whom is EvictedFor.SAME


def test_expired_removed_or_not(opened: Opener) -> None:
    world = opened()
    with world.host.session(MODEL) as session:
        keep(session, 1, ttl=10)
        world.clock.advance(70)
        (some,) = told(session, 1).blocks
        assert (some.why, some.ago) == (Why.EXPIRED, (60.0, 60.0))
        assert length(session, 1) == 0  # this removes it
        assert why(session, 1) == [Why.EXPIRED]


def test_dropped(opened: Opener) -> None:
    with (world := opened()).host.session(MODEL) as session:
        keep(session, 1, 2, 3)
        session.drop(prompt(1, 2, 3), start=1)
        assert why(session, 1, 2, 3) == [Why.HIT, Why.DROPPED, Why.DROPPED]
        assert world.store.statistics().absences.records == 2


def test_forgotten(opened: Opener) -> None:
    world = opened()
    with world.host.session(MODEL, OTHER) as session:
        keep(session, 1, 2)
        world.store.forget(OTHER.tag)
        assert why(session, 1, 2) == [Why.FORGOTTEN] * 2


def test_a_load_that_failed(opened: Opener, tmp_path: Path) -> None:
    disk = FaultyDisk()
    world = opened(nvme=nvme(tmp_path), disk=disk)
    with world.host.session(MODEL) as session:
        keep(session, 1)
        world.push_out(session)
        disk.arm(Fault("read", How.FLIP, files="*.segment", times=1000))
        with session.match(prompt(1)) as match:
            assert session.load(match).wait(30).tokens == 0
        disk.disarm()
        (some,) = told(session, 1).blocks
        assert (some.why, some.tier, some.cause) == (Why.LOAD_FAILED, "nvme", AbsenceCause.DAMAGED)


def test_a_store_that_was_dropped(opened: Opener) -> None:
    world = opened()
    with world.host.session(MODEL) as session:
        keep(session, *range(SLOTS))
        with session.match(prompt(*range(SLOTS))) as match:
            assert match.blocks > SLOTS // 2
            keep(session, *range(100, 100 + SLOTS))
            last = told(session, *range(100, 100 + SLOTS)).blocks[-1]
        assert last.why is Why.STORE_DROPPED
        embedded = world.host is world.store  # a node limits each client before its memory is full
        assert last.cause is (AbsenceCause.NO_ROOM if embedded else AbsenceCause.CLIENT_SHARE)


def test_a_store_beyond_the_quota_and_an_eviction_for_it(opened: Opener) -> None:
    quota = f"{OTHER.tag.hex()}:{4 * NBYTES}"
    world = opened(dram={"quotas": quota})
    with world.host.session(MODEL, OTHER) as session:
        keep(session, 1)
        for number in range(2, 6):
            keep(session, number)
        (some,) = told(session, 1).blocks
        assert (some.why, some.cause, some.for_whom) == (Why.EVICTED, AbsenceCause.QUOTA, EvictedFor.SAME)
        keep(session, *range(20, 28))
        last = told(session, *range(20, 28)).blocks[-1]
        assert (last.why, last.cause) == (Why.STORE_DROPPED, AbsenceCause.QUOTA)


def test_a_writer_that_gives_up_and_one_that_writes(opened: Opener) -> None:
    with opened().host.session(MODEL) as session:
        reservation = session.reserve(prompt(1))
        assert why(session, 1) == [Why.BEING_WRITTEN]
        reservation.abort()
        (some,) = told(session, 1).blocks
        assert (some.why, some.cause) == (Why.STORE_DROPPED, AbsenceCause.GIVEN_UP)


def test_quicker_to_compute_with_both_estimates(opened: Opener, tmp_path: Path) -> None:
    world = opened(nvme=nvme(tmp_path))
    with world.host.session(MODEL) as session:
        keep(session, 1, 2)
        world.push_out(session)
        assert why(session, 1, 2) == [Why.HIT] * 2
        found = told(session, 1, 2, prefill=1e12)
        (some,) = found.blocks
        assert (some.why, some.tier) == (Why.QUICKER_TO_COMPUTE, "nvme")
        assert found.slower_load > found.slower_compute > 0
        assert "quicker to compute (" in str(found)
        with pytest.raises(LayoutError, match="prefill is -1"):
            session.explain(prompt(1), prefill=-1)


def test_stored_but_of_no_use_after_a_miss(opened: Opener) -> None:
    with opened().host.session(MODEL) as session:
        tokens = prompt(1, 2, 3)
        session.store(tokens, content(session, tokens)[1:], start=1)
        assert why(session, 1, 2, 3) == [Why.NEVER_SEEN, Why.AFTER_A_MISS, Why.AFTER_A_MISS]


def test_more_than_dram_holds(opened: Opener, tmp_path: Path) -> None:
    world = opened(nvme=nvme(tmp_path))
    path = range(100, 100 + SLOTS + 4)
    with world.host.session(MODEL) as session:
        for stop in range(1, len(path) + 1):
            keep(session, *path[:stop])
            assert world.store.flush(30)
        assert why(session, *path) == [Why.HIT] * SLOTS + [Why.NO_ROOM] * 4


def test_several_groups_name_the_one_that_lacks_it(opened: Opener) -> None:
    layout = kvtide.Layout((kvtide.Group("one", kvtide.Kind.FULL, 1, 1, 64, "int8"), _TWO), 16)
    with opened().host.session(Model(layout, "given:two")) as session:
        session.store(prompt(1), {"one": [bytes(layout.geometry["one"].nbytes)]})
        (some,) = told(session, 1).blocks
        assert (some.why, some.group) == (Why.NEVER_SEEN, "two")


_TWO = kvtide.Group("two", kvtide.Kind.FULL, 1, 2, 64, "int8")


# -- what is not known is not guessed ---------------------------------------------------------------------------


def test_after_a_restart_what_was_before_is_unknown(opened: Opener, tmp_path: Path) -> None:
    world = opened(nvme=nvme(tmp_path))
    with world.host.session(MODEL) as session:
        keep(session, 1)
        assert world.store.flush(30)
        session.drop(prompt(1, 2), start=1)
        assert why(session, 1, 2) == [Why.HIT, Why.NEVER_SEEN]
    world.close()
    world = opened(nvme=nvme(tmp_path))
    with world.host.session(MODEL) as session:
        assert why(session, 1, 2) == [Why.HIT, Why.UNKNOWN_SINCE_RESTART]
        assert "unknown since restart: not seen since" in str(told(session, 1, 2))
        keep(session, 1, 2)
        session.drop(prompt(1, 2), start=1)
        assert why(session, 1, 2) == [Why.HIT, Why.DROPPED], "what happened since is known"


def test_after_a_restart_what_a_reserved_share_had_is_unknown(opened: Opener, tmp_path: Path) -> None:
    """A share without a disk, and one that is new: the blocks of its tenant were among those of all others before."""
    tag = OTHER.tag.hex()
    shares: list[dict[str, Any]] = [
        {"dram": {"budget": "4MiB", "reserved": f"{tag}:1MiB"}},
        {"dram": {"budget": "4MiB", "reserved": f"{tag}:1MiB"}, "nvme": {"reserved": f"{tag}:16MiB"}},
    ]
    for number, share in enumerate(shares):
        disk = nvme(tmp_path, budget="48MiB", **share.get("nvme", {}))
        world = opened(dram=share["dram"], nvme=disk)
        with world.host.session(MODEL, OTHER) as session:
            assert why(session, 1) == [Why.UNKNOWN_SINCE_RESTART if number else Why.NEVER_SEEN]
            keep(session, 1)
            session.drop(prompt(1))
            assert why(session, 1) == [Why.DROPPED]
        world.close()


def test_a_store_without_a_disk_says_that_it_began_empty(opened: Opener) -> None:
    """It cannot know whether it was restarted, so it claims nothing of before."""
    world = opened()
    with world.host.session(MODEL) as session:
        keep(session, 1)
    world.close()
    world = opened()
    with world.host.session(MODEL) as session:
        said = " ".join(str(told(session, 1)).split())
        assert f"never seen since the store was opened, empty, at {moment(world.clock.time())}" in said
    world.close()


def test_an_engine_that_saw_its_node_restart_is_told_so(tmp_path: Path) -> None:
    world = World("node", tmp_path)
    with world.host.session(MODEL) as session:
        keep(session, 1)
        assert why(session, 1, 2) == [Why.HIT, Why.NEVER_SEEN]
        session.match(prompt(1, 2), request="one").release()
        assert world._node is not None
        world._node.close()
        again = World("node", tmp_path)
        eventually(lambda: why(session, 1) != [Why.NO_NODE])
        assert why(session, 1, 2) == [Why.UNKNOWN_SINCE_RESTART] * 2
        session.match(prompt(1, 2), request="two").release()
        past = session.explain_request("two")
        assert past is not None
        assert past.by_reason() == {"unknown since restart": 2}
        again.close()
    world.close()


def test_an_overwritten_record_is_no_proof_that_nothing_happened(opened: Opener) -> None:
    world = opened(explain={"memory": 64})
    with world.host.session(MODEL) as session:
        assert why(session, *range(50)) == [Why.NEVER_SEEN] * 50
        for number in range(100, 140):
            keep(session, number)
            session.drop(prompt(number))
        found = [why(session, number)[0] for number in range(100, 140)]
        assert found.count(Why.DROPPED) == 4
        assert found.count(Why.RECORD_OVERWRITTEN) == 36, "and never 'never seen'"
        assert why(session, *range(50)) == [Why.RECORD_OVERWRITTEN] * 50
        statistics = world.store.statistics().absences
        assert (statistics.bytes, statistics.records) == (64, 40)


def test_records_can_be_switched_off(opened: Opener) -> None:
    world = opened(explain={"memory": 0})
    with world.host.session(MODEL) as session:
        keep(session, 1)
        session.drop(prompt(1))
        assert why(session, 1) == [Why.NOT_RECORDED]
        assert world.store.statistics().absences.bytes == 0


def test_of_shared_storage_it_is_not_known_what_others_did(opened: Opener, tmp_path: Path) -> None:
    with opened(files={"path": str(tmp_path / "shared")}).host.session(MODEL) as session:
        assert why(session, 1) == [Why.NOT_SEEN_HERE]


# -- it changes nothing, and tells nobody of others ---------------------------------------------------------------


def test_it_changes_nothing(opened: Opener, tmp_path: Path) -> None:
    world = opened(nvme=nvme(tmp_path), files={"path": str(tmp_path / "shared")})
    with world.host.session(MODEL) as session:
        keep(session, 1, 2)
        world.push_out(session)
        before, used = world.store.statistics(), world.store.index.used.copy()
        for _ in range(3):
            told(session, 1, 2, 3, prefill=1e12)
        after = world.store.statistics()
        assert (after.planner, after.counts, after.held, after.blocks, after.lanes) == (
            before.planner,
            before.counts,
            before.held,
            before.blocks,
            before.lanes,
        )
        assert (world.store.index.used == used).all()


@pytest.mark.parametrize("asker", [(b"\7" * 32, DEFAULT_TENANT.tag), (MODEL.namespace(DEFAULT_TENANT), OTHER.tag)])
def test_who_knows_the_names_of_anothers_blocks_sees_what_nobody_ever_stored(
    tmp_path: Path, asker: tuple[bytes, bytes]
) -> None:
    world = World("embedded", tmp_path, nvme=nvme(tmp_path))
    with world.store.session(MODEL) as owner:
        stranger = LocalBackend(world.store.main, LAYOUT, *asker)
        nothing = stranger.explain(owner.chain(prompt(1)), None).blocks
        keep(owner, 1)
        assert stranger.explain(owner.chain(prompt(1)), None).blocks == nothing, "stored"
        world.push_out(owner)
        assert stranger.explain(owner.chain(prompt(1)), None).blocks == nothing, "in nvme"
        with stranger.match(owner.chain(prompt(1)), 0, None).lease or world.store.index.lock:
            owner.drop(prompt(1))
        assert why(owner, 1) == [Why.DROPPED]
        assert stranger.explain(owner.chain(prompt(1)), None).blocks == nothing, "dropped"
    world.close()


def test_who_knows_a_tenants_tag_and_its_model_learns_nothing_of_its_requests(tmp_path: Path) -> None:
    world = World("node", tmp_path)
    thief = Tenant("thief", b"a secret that is not the one of the other tenant")
    with world.host.session(MODEL, OTHER) as owner, world.host.session(MODEL, thief) as stranger:
        owner.match(prompt(1, 2), request="private").release()
        assert isinstance(stranger.backend, RemoteBackend)
        mine, theirs = stranger.backend._opening, MODEL.namespace(OTHER)
        for proof in (b"", thief.proof, OTHER.tag):
            forged = msgspec.structs.replace(mine, tenant=OTHER.tag, namespace=theirs, proof=proof)
            stranger.backend._opening, stranger.backend._link = forged, None
            for name in ("private", ""):
                assert stranger.explain_request(name) is None
        stranger.backend._opening, stranger.backend._link = msgspec.structs.replace(forged, proof=OTHER.proof), None
        assert stranger.explain_request("private") == owner.explain_request("private") is not None
    local = LocalBackend(world.store.main, LAYOUT, MODEL.namespace(OTHER), OTHER.tag)
    assert local.explain_request("") is None
    world.close()


def test_another_adapter_is_another_block(opened: Opener) -> None:
    with opened().host.session(MODEL) as session:
        keep(session, 1)
        assert session.explain(prompt(1), [Extra("lora", "sql")]).blocks[0].why is Why.NEVER_SEEN


# -- under stress -------------------------------------------------------------------------------------------------


def test_while_others_store_and_drop(opened: Opener) -> None:
    world = opened()
    stop, failed = threading.Event(), list[BaseException]()

    def work(session: Session, number: int) -> None:
        try:
            while not stop.is_set():
                keep(session, number, 7)
                session.drop(prompt(number, 7), start=1)
        except BaseException as e:  # noqa: BLE001 - the test reports it
            failed.append(e)

    with world.host.session(MODEL) as session:
        threads = [threading.Thread(target=work, args=(session, n)) for n in (1, 2, 3)]
        for thread in threads:
            thread.start()
        seen = {why(session, n, 7)[1] for _ in range(100) for n in (1, 2, 3)}
        stop.set()
        for thread in threads:
            thread.join()
    assert not failed
    assert seen <= {Why.HIT, Why.DROPPED, Why.NEVER_SEEN, Why.BEING_WRITTEN}


def test_an_interrupted_call_leaves_nothing_and_later_ones_are_right(tmp_path: Path) -> None:
    world = World("embedded", tmp_path)
    with world.store.session(MODEL) as session:
        keep(session, 1)
        session.drop(prompt(1))
        told(session, 1, 2)  # the first one writes the collected records
        counted = Points()
        counted.run(lambda: told(session, 1, 2))
        for at in range(1, counted.count, 7):
            with pytest.raises(Interrupted):
                Points(at).run(lambda: told(session, 1, 2))
            assert not world.store.index.lock_is_mine()
        assert why(session, 1, 2) == [Why.DROPPED, Why.NEVER_SEEN]
        assert world.store.statistics().held == 0
    world.close()


def test_a_drop_interrupted_anywhere_is_never_told_as_never_seen(tmp_path: Path) -> None:
    world = World("embedded", tmp_path)
    with world.store.session(MODEL) as session:
        keep(session, 0)
        counted = Points()
        counted.run(lambda: session.drop(prompt(0)))
        for at in range(1, counted.count - 5, 5):  # a later drop may have a few points less
            keep(session, at)
            with pytest.raises(Interrupted):
                Points(at).run(lambda at=at: session.drop(prompt(at)))  # type: ignore[misc]
            assert why(session, at)[0] in (Why.HIT, Why.DROPPED)
    world.close()


def test_records_handed_to_the_thread_survive_an_interrupt_anywhere(tmp_path: Path) -> None:
    """With so little memory that they are handed over after every few prompts."""
    world = World("embedded", tmp_path, explain={"memory": 128 << 10})
    log = world.store.index.absence_log
    log._batch.capacity = log._other.capacity = 7
    with world.store.session(MODEL) as session:

        def dropped(first: int) -> None:
            for number in range(first, first + 5):
                session.drop(prompt(number))

        for number in range(5):
            keep(session, number)
        counted = Points()
        counted.run(lambda: dropped(0))
        for turn, at in enumerate(range(11, counted.count - 40, counted.count // 60)):
            first = 100 + 5 * turn
            for number in range(first, first + 5):
                keep(session, number)
            with pytest.raises(Interrupted):
                Points(at).run(lambda first=first: dropped(first))  # type: ignore[misc]
            dropped(first)
            found = [why(session, number)[0] for number in range(first, first + 5)] if turn % 6 == 5 else []
            assert set(found) <= {Why.DROPPED, Why.RECORD_OVERWRITTEN}
            assert found.count(Why.RECORD_OVERWRITTEN) <= 1
        assert world.store.statistics().held == 0
    world.close()


def test_a_node_that_does_not_know_the_operation_and_one_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr(p, "FEATURES", (p.EXPECT,))
        world = World("node", tmp_path)
        with world.host.session(MODEL) as session:
            assert why(session, 1) == [Why.NOT_RECORDED]
    with world.host.session(MODEL) as session:
        assert world._node is not None
        world._node.close()
        assert why(session, 1, 2) == [Why.NO_NODE] * 2
    world.close()


def test_a_reason_of_a_newer_node_is_read() -> None:
    assert Why("a reason to come") is Why.UNKNOWN
    assert AbsenceCause("a cause to come") is AbsenceCause.NONE


def test_the_table_tells_what_it_was_told() -> None:
    import numpy as np

    class Columns:
        mark = np.arange(1000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        identity = np.full(1000, -5, np.int64)
        tenant = np.zeros(1000, np.uint16)

    from kvtide.index.absence_log import Absence

    log = AbsenceLog(Columns(), 1 << 12)
    rows = np.arange(1000)
    log.note(rows, Absence.EVICTED, 3, AbsenceCause.LATE, unwritten=np.full(1000, 31, np.uint8))
    found = log.find(Columns.mark, -5)
    known = found.codes > 0
    assert 0 < known.sum() <= 256
    assert (known | found.doubtful).all(), "of two blocks of one batch with one place, one is doubtful"
    one = int(np.flatnonzero(known)[0])
    assert found.of(one) == (Absence.EVICTED, AbsenceCause.LATE, EvictedFor.UNKNOWN)
    assert (found.tiers[one], found.unwritten[one]) == (3, 31)
    other = log.find(Columns.mark, -6)
    assert not other.codes.any(), "another identity finds nothing"


# -- past requests, and counts ----------------------------------------------------------------------------------


def test_a_past_request_is_explained_as_it_was(opened: Opener, tmp_path: Path) -> None:
    world = opened(nvme=nvme(tmp_path))
    with world.host.session(MODEL) as session:
        keep(session, 1, 2)
        session.drop(prompt(1, 2, 3, 4), start=1)
        session.match(prompt(1, 2, 3), request="first").release()
        world.clock.advance(60)
        keep(session, 1, 2, 3)
        session.match(prompt(1, 2, 3), request="second").release()
        found = session.explain_request("first")
        assert found is not None
        assert [(some.why, some.tier) for some in found.blocks] == [
            (Why.HIT, "dram"),
            (Why.DROPPED, ""),
            (Why.NEVER_SEEN, ""),
        ]
        assert (found.request, found.tokens) == ("first", 3 * LAYOUT.block_tokens)
        assert "request first: 48 tokens: 3 blocks of 16, 1 from the store" in str(found)
        second = session.explain_request("second")
        assert second is not None
        assert second.by_tier() == {"dram": 3}
        assert second.by_reason() == {}
        assert session.explain_request("third") is None
        assert session.explain_request("") == second, "the last one"
        assert second.summary()["hits"] == {"dram": 3}
    with world.host.session(MODEL, OTHER) as other:
        assert other.explain_request("first") is None
        assert other.explain_request("") is None


def test_what_happened_after_a_request_is_not_its_reason(opened: Opener) -> None:
    world = opened()
    with world.host.session(MODEL) as session:
        session.match(prompt(1), request="early").release()
        world.clock.advance(10)
        keep(session, 1)
        session.drop(prompt(1))
        found = session.explain_request("early")
        assert found is not None
        assert found.blocks[0].why in (Why.NEVER_SEEN, Why.RECORD_OVERWRITTEN), "and not dropped"


def counted(world: World) -> RecentStatistics:
    """The statistics when the reasons of all requests so far are known."""
    world.clock.advance(1)
    eventually(lambda: not world.store.statistics().recent.waiting)
    return world.store.statistics().recent


def test_misses_are_counted_by_reason(opened: Opener) -> None:
    world = opened()
    with world.host.session(MODEL) as session:
        keep(session, 1)
        session.drop(prompt(1))
        for _ in range(2):
            session.match(prompt(1, 2)).release()
        session.match(prompt(1, 2), again=True).release()
        session.match(prompt(1, 2), record=False).release()
        told(session, 1, 2)
        recent = counted(world)
        assert recent.misses == recent.lately == {"dropped": 2, "never seen": 2}
        world.clock.advance(3600)
        recent = world.store.statistics().recent
        assert (recent.misses, recent.lately) == ({"dropped": 2, "never seen": 2}, {})


def test_requests_take_bounded_memory(opened: Opener) -> None:
    world = opened(explain={"memory": 20_000})
    with world.host.session(MODEL) as session:
        for number in range(100):
            session.match(prompt(number), request=str(number)).release()
            if number % 5 == 0:
                counted(world)
        recent = world.store.statistics().recent
        assert 0 < recent.bytes <= recent.limit == 10_000
        assert recent.requests < 100
        assert session.explain_request("99") is not None
        assert session.explain_request("0") is None


def test_the_thread_finds_out_the_reasons_by_itself(opened: Opener) -> None:
    world = opened()
    with world.host.session(MODEL) as session:
        session.match(prompt(1), request="one").release()
        assert counted(world).misses == {"never seen": 1}


def test_forgetting_a_tenant_forgets_its_requests(opened: Opener) -> None:
    world = opened()
    with world.host.session(MODEL, OTHER) as session:
        keep(session, 1)
        session.match(prompt(1), request="one").release()
        assert session.explain_request("one") is not None
        world.store.forget(OTHER.tag)
        assert session.explain_request("one") is None
        assert world.store.known_models.of(OTHER.tag, b"") == []


# -- another namespace ------------------------------------------------------------------------------------------


NEAR: dict[str, tuple[Model, str]] = {
    "weights": (Model(LAYOUT, "given:finetuned"), "weights: given:finetuned, here given:small"),
    "adapter": (Model(LAYOUT, MODEL.weights, adapter="sql"), "adapter: sql, here none"),
    "fidelity": (Model(LAYOUT, MODEL.weights, fidelity="half"), "fidelity: half, here exact"),
    "scales": (Model(LAYOUT, MODEL.weights, scales=b"1"), "scales of the KV dtype"),
    "configuration": (Model(LAYOUT, MODEL.weights, {"rope": {"theta": 1}}), "configuration: rope"),
    "dtype": (
        Model(
            kvtide.Layout.attention(layers=8, heads=1, head_dim=256, dtype="bfloat16", block_tokens=16), "given:small"
        ),
        "dtype: bfloat16, here int8",
    ),
    "layout": (
        Model(kvtide.Layout.attention(layers=8, heads=2, head_dim=128, dtype="int8", block_tokens=16), "given:small"),
        "layout, heads: 2, here 1",
    ),
}


@pytest.mark.parametrize("what", NEAR)
def test_another_namespace_and_what_differs(opened: Opener, what: str) -> None:
    other, text = NEAR[what]
    nbytes = other.layout.geometry["full"].nbytes
    world = opened()
    with world.host.session(MODEL) as session:
        with world.host.session(other) as writer:
            writer.store(prompt(1, 2), [bytes(nbytes)] * 2)
        found = told(session, 1, 2, 3)
        assert [some.why for some in found.blocks] == [Why.OTHER_NAMESPACE, Why.NEVER_SEEN]
        assert text in found.blocks[0].differs
        assert f"stored under another namespace: {text[:20]}" in " ".join(str(found).split())
    with world.host.session(MODEL, OTHER) as stranger:
        assert set(why(stranger, 1, 2, 3)) == {Why.NEVER_SEEN}, "of another tenant's models nothing is told"


def test_another_block_size(opened: Opener) -> None:
    larger = Model(
        kvtide.Layout.attention(layers=8, heads=1, head_dim=256, dtype="int8", block_tokens=32), "given:small"
    )
    with opened().host.session(MODEL) as session, session._session_host.session(larger) as writer:
        writer.store(prompt(1, 2, 3, 4), [bytes(larger.layout.geometry["full"].nbytes)])
        found = told(session, 1, 2, 3, 4)
        assert [(some.stop, some.why) for some in found.blocks] == [(2, Why.OTHER_NAMESPACE), (4, Why.NEVER_SEEN)]
        assert found.blocks[0].differs[0] == "block size: 32, here 16"


def test_few_and_short_descriptions_of_models_are_kept(opened: Opener) -> None:
    from kvtide.store.known_models import KnownModels, KnownModelsStatistics, describe, read

    assert read(describe(MODEL)) == MODEL
    assert describe(Model(LAYOUT, "long", {"text": "x" * 20_000})) == b""
    assert read(b"\xc1") is None
    assert read(b"") is None
    known = KnownModels(100_000)
    for number in range(1000):
        known.note(b"%d" % (number % 10), b"", b"%d" % number, b"about %d" % number)
    known.note(b"0", b"blue", b"1", b"in another domain")
    assert len(known.of(b"0", b"")) <= 32
    assert known.statistics().models == len(known._known) > 100
    assert known.of(b"0", b"blue") == [b"in another domain"]
    for number in range(1000):
        known.note(b"%d" % number, b"", b"%d" % number, bytes(16_000))
        assert known.statistics().bytes <= known.statistics().limit == 100_000
    assert known.of(b"999", b"") == [bytes(16_000)], "the last ones are kept"
    assert known.of(b"0", b"blue") == []
    none = KnownModels(0)
    none.note(b"0", b"", b"1", b"about")
    assert none.statistics() == KnownModelsStatistics()
