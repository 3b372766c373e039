"""The records behind ``explain``: what they tell, to whom, and what is not known."""

from __future__ import annotations

import threading
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from kvtide import Group, Kind, Layout, Model, Session, Unwritten, Why
from kvtide.formatting import moment
from kvtide.index.absence_log import Absence, AbsenceCause, AbsenceLog, EvictedFor
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.node.client.client import Client
from kvtide.store.explanation import ExplainedBlocks
from kvtide.store.known_models import _Description, _seal, describe, read
from kvtide.testing.clock import FakeClock
from kvtide.testing.faults import Fault, FaultyDisk, How
from tests.plan.small import LAYOUT, MODEL, SLOTS, keep, prompt
from tests.test_explain import OTHER, World, nvme

GROUPS = LAYOUT.groups

Numbers = npt.NDArray[np.uint64]
MINE, OTHERS = -0x7654321076543210, 0x1234567812345678


class Columns:
    """Of an index with a thousand rows."""

    mark = np.arange(1, 1001, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    identity = np.full(1000, MINE, np.int64)
    tenant = np.full(1000, 1, np.uint16)


def marks(count: int, seed: int) -> Numbers:
    found: Numbers = np.random.default_rng(seed).integers(1 << 62, 1 << 63, count, dtype=np.uint64)
    return found


def test_the_places_of_ones_own_blocks_tell_nothing_of_others_blocks() -> None:
    """Somebody fills the table with blocks of his own and sees which of their records were overwritten: from that he
    cannot tell which prompt another trust domain had, even if he can name the blocks of that prompt."""
    log = AbsenceLog(Columns(), 1 << 16)
    size = np.uint64(len(log._table))
    mine, had = marks(1 << 17, 1), marks(50, 2)
    log.note_blocks(mine, MINE, Absence.STORE_DROPPED)

    def lost() -> Numbers:
        found: Numbers = mine[log.find(mine, MINE).codes == 0]
        return found

    before = lost()
    log.note_blocks(had, OTHERS, Absence.EVICTED)
    new = np.setdiff1d(lost(), before) % size
    assert len(new) > 40

    def score(prompt: Numbers) -> int:
        """The most places that one difference between places and marks explains."""
        return int(np.unique((new[:, None] - prompt[None, :]) % size, return_counts=True)[1].max())

    assert score(had) <= max(score(marks(50, seed)) for seed in range(10, 40)) + 2 < 20


def test_a_block_that_leaves_again_casts_no_doubt_on_others() -> None:
    log = AbsenceLog(Columns(), 1 << 12)
    some = marks(20, 1)
    for _ in range(5):
        log.note_blocks(some, MINE, Absence.EVICTED)
        log.find(some, MINE)
    first = log.find(marks(500, 2), MINE).doubtful.sum()
    for _ in range(5):
        log.note_blocks(some, MINE, Absence.EVICTED)
        log.find(some, MINE)
    assert log.find(marks(500, 2), MINE).doubtful.sum() == first
    assert first < 20


def test_of_an_overwritten_record_it_is_known_since_when_there_was_none() -> None:
    clock = FakeClock()
    log = AbsenceLog(Columns(), 16, clock)  # one place
    log.note_blocks(marks(1, 1), MINE, Absence.EVICTED)
    clock.advance(100)
    log.note_blocks(marks(1, 2), MINE, Absence.EVICTED)
    clock.advance(100)
    found = log.find(marks(1, 1), MINE)
    assert (found.codes[0], found.doubtful[0], round(found.times[0] - log.since)) == (0, True, 100)
    # something that happened earlier and is recorded later does not take the place of the later record
    log.note(np.array([0]), Absence.EXPIRED, times=np.array([log.since + 50]))
    assert log.find(marks(1, 2), MINE).codes[0] == Absence.EVICTED.code
    assert log.find(Columns.mark[:1], MINE).doubtful[0]


def test_records_are_the_same_one_by_one_and_together() -> None:
    rows = np.arange(100)
    one, together = AbsenceLog(Columns(), 1 << 20), AbsenceLog(Columns(), 1 << 20)
    together._factor, together._secrets = one._factor, one._secrets  # two blocks may have one place
    for row in rows:
        one.note(rows[row : row + 1], Absence.EVICTED, 2, tenant=1, unwritten=np.array([row % 32], np.uint8))
        if row % 7 == 0:
            one.find(Columns.mark, MINE)
    together.note(rows, Absence.EVICTED, 2, tenant=1, unwritten=(rows % 32).astype(np.uint8))
    singly, at_once = one.find(Columns.mark[:100], MINE), together.find(Columns.mark[:100], MINE)
    for name in ("codes", "tiers", "causes", "for_whom", "unwritten"):
        assert (getattr(singly, name) == getattr(at_once, name)).all(), name
    assert singly.codes.sum() > 80
    assert (singly.for_whom[singly.codes > 0] == 1).all()


def test_an_interrupted_writing_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    log = AbsenceLog(Columns(), 1 << 20)
    some = marks(50, 1)
    log.note_blocks(some, MINE, Absence.EVICTED)
    whole = AbsenceLog._write

    def interrupted(self: AbsenceLog, *arguments: object) -> None:
        whole(self, *arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(AbsenceLog, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        log.write()
    monkeypatch.undo()
    found = log.find(some, MINE)
    assert ((found.codes > 0) | found.doubtful).all()


def test_all_records_together_take_the_memory_that_is_set() -> None:
    some = [marks(100, seed) for seed in range(400)]
    for nbytes in (1 << 12, 200_000, 4 << 20):
        tracemalloc.start()
        try:
            log = AbsenceLog(Columns(), nbytes)
            log.on_full = lambda: None
            assert 0.99 * nbytes < log.statistics().bytes <= nbytes
            for number, blocks in enumerate(some):
                log.note(np.arange(number % 5), Absence.DROPPED, times=np.full(number % 5, log.since))
                log.note_blocks(blocks, MINE, Absence.DROPPED)
            taken = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert taken < nbytes + 20_000, "besides, Python's own objects"


def test_more_records_of_one_call_than_a_batch_holds() -> None:
    log, some = AbsenceLog(Columns(), 200_000), marks(5000, 1)
    log.on_full = lambda: None
    log.note_blocks(marks(100, 2), MINE, Absence.EVICTED)
    log.note_blocks(some, MINE, Absence.DROPPED)
    log.note_blocks(some[:10], MINE, Absence.EXPIRED)
    found = log.find(some, MINE)
    assert (found.codes[:10] == Absence.EXPIRED.code).sum() >= 8
    assert (found.codes[10:] == Absence.DROPPED.code).sum() > 3000
    assert ((found.codes > 0) | found.doubtful).all()


def test_a_record_is_found_at_once_wherever_it_is() -> None:
    """Collected, handed over, or being written by the thread at that moment."""
    log, stop = AbsenceLog(Columns(), 1 << 20), threading.Event()
    woken = threading.Event()
    log.on_full = woken.set

    def write() -> None:
        while not stop.is_set():
            woken.wait(0.001)
            woken.clear()
            log.write_full()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for number in range(2000):
            some = marks(40, number)
            log.note_blocks(some, MINE, Absence.EVICTED if number % 2 else Absence.DROPPED)
            if number % 10 == 0:
                found = log.find(some, MINE)
                assert ((found.codes > 0) | found.doubtful).all()
                assert (found.codes > 0).sum() >= 38
    finally:
        stop.set()
        thread.join()


def test_without_a_thread_the_records_are_written_all_the_same() -> None:
    log = AbsenceLog(Columns(), 1 << 20)
    log.on_full = lambda: None  # it does not come
    for number in range(400):
        log.note_blocks(marks(100, number), MINE, Absence.EVICTED)
    found = log.find(marks(100, 399), MINE)
    assert (found.codes > 0).sum() > 90
    early = log.find(marks(100, 0), MINE)
    assert ((early.codes > 0) | early.doubtful).all()


def test_a_handing_over_that_is_interrupted_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    log, whole = AbsenceLog(Columns(), 1 << 20), AbsenceLog._enter
    log.on_full = lambda: None
    armed = [False]

    def interrupted(self: AbsenceLog, notes: Any) -> None:
        whole(self, notes)
        if armed[0]:
            armed[0] = False
            raise KeyboardInterrupt

    monkeypatch.setattr(AbsenceLog, "_enter", interrupted)
    stopped, noted = 0, list[Numbers]()
    for number in range(200):
        armed[0] = number % 3 == 0
        try:
            log.note_blocks(some := marks(450, number), MINE, Absence.EVICTED)
            noted.append(some)
        except KeyboardInterrupt:
            stopped += 1  # then the caller removes no block either
        armed[0] = False
        if number % 17 == 0:
            for some in noted[-5:]:
                found = log.find(some, MINE)
                assert ((found.codes > 0) | found.doubtful).all()
    assert stopped


# -- of a store -------------------------------------------------------------------------------------------------


def explained(session: Session, *path: int) -> ExplainedBlocks:
    (some,) = session.explain(prompt(*path)).blocks
    return some


def test_a_load_that_failed_is_told_of_a_block_that_is_still_there(tmp_path: Path) -> None:
    disk = FaultyDisk()
    world = World("embedded", tmp_path, nvme=nvme(tmp_path), disk=disk)
    with world.host.session(MODEL) as session:
        keep(session, 1)
        world.push_out(session)
        disk.arm(Fault("read", How.FAIL, files="*.segment", times=1000))
        with session.match(prompt(1), request="one") as match:
            assert session.load(match).wait(30).tokens == 0
        disk.disarm()
        world.clock.advance(3)
        some = explained(session, 1)
        assert (some.why, some.tier, some.cause, some.ago) == (Why.HIT, "nvme", AbsenceCause.READ_FAILED, (3.0, 3.0))
        assert "in nvme, but a load 3 s ago failed: the read failed" in str(session.explain(prompt(1)))
        past = session.explain_request("one")
        assert past is not None
        assert past.blocks[0].cause is AbsenceCause.READ_FAILED
    world.close()


def test_a_load_without_room_names_the_tier_of_the_block(tmp_path: Path) -> None:
    world = World("embedded", tmp_path, nvme=nvme(tmp_path))
    with world.host.session(MODEL) as session:
        keep(session, 1)
        world.push_out(session)
        held = range(100, 100 + SLOTS)
        keep(session, *held)
        assert world.store.flush(30)
        with session.match(prompt(1)) as match, session.match(prompt(*held)) as all_of_dram:
            assert session.load(all_of_dram).wait(30).tokens == len(prompt(*held))
            assert session.load(match).wait(30).tokens == 0
        some = explained(session, 1)
        assert (some.why, some.tier, some.cause) == (Why.HIT, "nvme", AbsenceCause.NO_ROOM)
    world.close()


def test_a_drop_while_another_tenant_is_forgotten_is_a_drop(tmp_path: Path) -> None:
    world = World("embedded", tmp_path)
    with world.host.session(MODEL) as session:
        keys = keep(session, 1)
        with world.store.main.pipeline.forgetting(OTHER.tag):
            world.store.main.drop_here(keys)  # as because of another host
        assert explained(session, 1).why is Why.DROPPED
    world.close()


def test_a_block_that_the_disk_had_and_evicted_was_admitted(tmp_path: Path) -> None:
    world = World("embedded", tmp_path, nvme=nvme(tmp_path), dram={"policy": "lru"})
    with world.host.session(MODEL) as session:
        keys = keep(session, 1)
        assert world.store.flush(30)
        pipeline = world.store.main.pipeline
        with world.store.index.lock:
            row = world.store.index.rows(keys).tolist()
            pipeline._demotion.evict(pipeline.colds[0], row, [], AbsenceCause.LRU)
        assert explained(session, 1).why is Why.HIT
        world.push_out(session)
        some = explained(session, 1)
        assert (some.why, some.tier, some.unwritten) == (Why.EVICTED, "dram", None)
    world.close()


@pytest.mark.parametrize("config", [{"a": {1: 2}}, {"a": msgspec.msgpack.Ext(5, b"x")}, {"a": datetime.now(UTC)}])
def test_a_strangers_description_of_a_model_breaks_nothing(tmp_path: Path, config: dict[str, Any]) -> None:
    groups = [(g.name, g.kind.value, g.layers, g.heads, g.head_dim, g.dtype, g.window, 1, g.packing) for g in GROUPS]
    world = World("embedded", tmp_path)
    near = Model(LAYOUT, "given:finetuned")
    with world.host.session(MODEL) as session, world.host.session(near) as writer:
        keep(writer, 1)
        for number in range(16):
            about = _Description(1, groups, f"given:{number}", config if number % 2 else {}, b"", "", "exact")
            bad = _seal(msgspec.msgpack.encode(about), DEFAULT_TENANT)
            world.store.known_models.note(DEFAULT_TENANT.tag, b"", bytes([number]) * 32, bad)
            assert number % 2 == 0 or read(bad) is None
        assert explained(session, 1).why is Why.OTHER_NAMESPACE
        assert session.explain(np.ones(144_000, np.uint32)).unexplained
    world.close()


def test_reasons_of_a_newer_node_are_read() -> None:
    newer = {"first": 0, "stop": 1, "why": "evicted", "for_whom": "the world", "unwritten": "to come", "cause": "new"}
    some = msgspec.convert(newer, ExplainedBlocks)
    assert (some.for_whom, some.unwritten, some.cause) == (EvictedFor.UNKNOWN, Unwritten.UNKNOWN, AbsenceCause.NONE)


def test_of_an_overwritten_record_the_text_says_since_when_there_was_none(tmp_path: Path) -> None:
    world = World("embedded", tmp_path, explain={"memory": 16})
    with world.host.session(MODEL) as session:
        for number in (1, 2):
            world.clock.advance(3600)
            keep(session, number)
            session.drop(prompt(number))
        world.clock.advance(60)
        some = explained(session, 1)
        assert (some.why, some.ago) == (Why.RECORD_OVERWRITTEN, (60.0, 60.0))
        since = moment(world.clock.time() - 60)
        assert f"nothing has happened to it since {since}" in " ".join(str(session.explain(prompt(1))).split())
    world.close()


def test_descriptions_of_models_are_read_only_with_the_tenants_secret(tmp_path: Path) -> None:
    secret = Model(LAYOUT, "given:secret-project", {"a": 1})
    sealed = describe(secret, OTHER)
    assert read(sealed, OTHER) == secret
    assert read(sealed) is None
    assert b"secret-project" not in sealed
    world = World("node", tmp_path)
    assert isinstance(world.host, Client)
    with world.host.session(secret, OTHER) as session:
        keep(session, 1)
        found = world.host.models(OTHER.tag)  # anybody who knows the tag can ask
        assert [read(about) for about in found] == [None]
        assert [read(about, OTHER) for about in found] == [secret]
    world.close()


def test_what_left_the_store_may_be_in_shared_storage_again(tmp_path: Path) -> None:
    world = World("embedded", tmp_path, files={"path": str(tmp_path / "shared")})
    other = World("embedded", tmp_path, files={"path": str(tmp_path / "shared")})
    with world.host.session(MODEL) as session, other.host.session(MODEL) as elsewhere:
        keep(session, 1)
        assert world.store.flush(30)
        session.drop(prompt(1))
        keep(elsewhere, 1)
        assert other.store.flush(30)
        found = session.explain(prompt(1))
        assert found.blocks[0].why is Why.DROPPED
        assert found.shared
        assert "whether shared storage has it again is not known" in " ".join(str(found).split())
    world.close()
    other.close()


def test_of_a_window_only_what_the_prompt_needs_is_told_of(tmp_path: Path) -> None:
    window = Group("win", Kind.WINDOW, 1, 1, 64, "int8", window=32)
    layout = Layout((Group("full", Kind.FULL, 1, 1, 64, "int8"), window), 16)
    world = World("embedded", tmp_path)
    with world.host.session(Model(layout, "given:window")) as session:
        tokens = prompt(*range(1, 7))
        session.store(tokens, {"full": [bytes(layout.geometry["full"].nbytes)] * 6})
        found = session.explain(tokens)
        missing = [some for some in found.blocks if not some.why.stored]
        needed = window.needs(6, 16)
        assert [(some.first, some.stop, some.group) for some in missing] == [(needed.start, needed.stop, "win")]
    world.close()
