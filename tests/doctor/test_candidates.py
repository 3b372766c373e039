"""Each kind of change: it is tried where it may help, and what is predicted comes true in a real store."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.counts import TierCount
from kvtide.doctor import advice as advising
from kvtide.doctor import host
from kvtide.doctor.advice import Advice, AdviceRequest, Change, advise
from kvtide.doctor.candidates import Candidate, ChangeKind, HostSpace, candidates, today_of
from kvtide.plan import usage_tracker
from kvtide.replay.lru_curve import LruCurve, lru_curve
from kvtide.replay.trace import TraceRequest, chains
from kvtide.store.statistics import Statistics
from kvtide.testing.interface import OTHER_TENANT
from tests.doctor.recorded import BLOCK, Asked, Recorded, changed, replayed, settings, users

MIB, GIB = 1 << 20, 1 << 30
TOLERANCE = 0.01


def only(monkeypatch: pytest.MonkeyPatch, kind: ChangeKind) -> None:
    """Let the doctor try changes of one kind alone: the others take time."""
    every = candidates

    def some(*given: Any) -> list[Candidate]:
        return [one for one in every(*given) if one.kind is kind]

    monkeypatch.setattr(advising, "candidates", some)


def comes_true(run: Recorded, advice: Advice, change: Change, folder: Path) -> None:
    assert advice.hit_rate == pytest.approx(run.hit_rate(), abs=TOLERANCE), "what is replayed as today's"
    assert advice.hit_rate is not None
    expected = advice.hit_rate + change.points / 100
    assert replayed(changed(run, change, folder)) == pytest.approx(expected, abs=TOLERANCE)


def best(advice: Advice, kind: ChangeKind, value: str = "") -> Change:
    found = [one for one in advice.tried if one.kind is kind and value in one.settings[0][2]]
    return max(found, key=lambda change: change.points)


def disk(folder: Path, **more: Any) -> dict[str, Any]:
    return {"path": str(folder / "kv"), "budget": "16MiB", "segment": "1MiB", "policy": "lru", **more}


def run_of(folder: Path, given: dict[str, Any], asked: Sequence[Asked], **more: Any) -> Recorded:
    return Recorded(given, asked, folder / "trace.jsonl", **more)


def test_a_larger_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, ChangeKind.NVME_SIZE)
    run = run_of(tmp_path, settings(nvme=disk(tmp_path, store="through")), users(120, 700))
    advice = run.advice()
    change = best(advice, ChangeKind.NVME_SIZE)
    assert change.matters
    assert change.points > 1
    assert change.disk >= 16 * MIB
    comes_true(run, advice, change, tmp_path / "larger")


def test_another_rule_of_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, ChangeKind.NVME_STORE)
    run = run_of(tmp_path, settings(nvme=disk(tmp_path, store="second-touch")), users(30, 400))
    advice = run.advice()
    change = best(advice, ChangeKind.NVME_STORE, "through")
    assert change.matters
    assert change.settings == [("nvme.store", "second-touch", "through")]
    assert change.written_per_day > 0
    comes_true(run, advice, change, tmp_path / "through")


def test_another_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten documents asked for in turn, and between them prompts that nobody asks for again."""
    only(monkeypatch, ChangeKind.DRAM_POLICY)
    monkeypatch.setattr(usage_tracker, "_BATCH", 500)
    asked = [p for n in range(200) for p in (Asked([1, 10 + n % 10, *range(4)]), Asked([2, 1000 + n, *range(18)]))]
    run = run_of(tmp_path, settings(dram="3MiB"), asked)
    advice = run.advice()
    change = best(advice, ChangeKind.DRAM_POLICY, "reuse")
    assert change.settings == [("dram.policy", "lru", "reuse")]
    assert change.matters
    assert {one.settings[0][2] for one in advice.tried} == {"reuse", "auto"}


def test_a_write_budget_that_is_lifted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, ChangeKind.WRITE_BUDGET)
    limit = BLOCK // 8
    given = settings(nvme=disk(tmp_path, store="through", write_limit=limit))
    run = run_of(tmp_path, given, users(30, 400))
    advice = run.advice()
    (change,) = advice.tried
    assert change.settings[0][0] == "nvme.write_limit"
    assert change.settings[0][2] in ("0", "0 B")
    assert change.matters
    assert change.written_per_day > 0
    comes_true(run, advice, change, tmp_path / "unlimited")


def test_a_queue_that_loses_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, ChangeKind.QUEUE)
    run = run_of(tmp_path, settings(nvme=disk(tmp_path, store="through")), users(30, 400))
    with run.open() as store:
        run.drive(store)
        status = run.status(store)
        counts = dict(status.store.counts)
        counts[TierCount.STORE_QUEUE_FULL.of("nvme")] = counts[TierCount.BLOCKS_WRITTEN.of("nvme")]
        losing = replace(status, store=replace(status.store, counts=counts))
        advice = advise(losing, AdviceRequest(seconds=1000.0))
        (change,) = advice.tried
        assert advise(status, AdviceRequest(seconds=1000.0)).tried == [], "a queue that loses nothing is large enough"
    assert change.settings == [("nvme.queue", "1 GiB", "4 GiB")]
    assert change.matters
    assert "50.0% of the writes were lost" in change.note
    assert advice.hit_rate is not None
    assert advice.hit_rate < run.hit_rate() - 0.05, "the replay of today's settings loses them too"
    assert advice.hit_rate + change.points / 100 == pytest.approx(run.hit_rate(), abs=TOLERANCE)


def test_engines_that_store_only_what_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, ChangeKind.ENGINE_STORE)
    asked = [Asked([10 * n + i for i in range(6)]) for n in range(150) for _ in range(2)]
    run = run_of(tmp_path, settings(dram="4MiB"), asked, second_touch=True)
    advice = run.advice()
    (change,) = advice.tried
    assert change.settings == [("engine.store", "second-touch", "through")]
    assert change.matters
    comes_true(run, advice, change, tmp_path)


def test_blocks_that_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, ChangeKind.EXPIRY)
    run = run_of(tmp_path, settings(dram="16MiB"), users(20, 400), ttl=10.0)
    advice = run.advice()
    assert [one.settings for one in advice.tried] == [[("ttl", "10s", "40s")], [("ttl", "10s", "none")]]
    for number, change in enumerate(advice.tried):
        assert change.matters
        comes_true(run, advice, change, tmp_path / str(number))


@pytest.mark.parametrize(("kind", "setting"), [(ChangeKind.QUOTA, "quotas"), (ChangeKind.RESERVED, "reserved")])
def test_a_tenant_that_starves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: ChangeKind, setting: str) -> None:
    only(monkeypatch, kind)
    tag = OTHER_TENANT.tag.hex()
    given = settings(dram="16MiB", memory={setting: f"{tag}:1MiB"})
    run = run_of(tmp_path, given, users(20, 400, tenants=[None, OTHER_TENANT]))
    advice = run.advice()
    (change,) = advice.tried
    assert change.kind is kind
    assert change.settings == [(f"dram.{setting}", f"{tag}:1MiB", f"{tag}:2MiB")]
    assert change.matters
    assert tag in change.note
    comes_true(run, advice, change, tmp_path)


# -- which changes are tried, and how large -----------------------------------------------------------------------


def tried(curve: LruCurve, space: HostSpace, **given: str) -> list[Candidate]:
    today = today_of({name.replace("_", ".", 1): value for name, value in given.items()}, _NOTHING, MIB)
    return list(candidates(today, curve, space, _NOTHING))


_NOTHING = Statistics(0, 0, 0, {}, {}, {})


@pytest.fixture
def curve() -> LruCurve:
    """A hundred prompts of a hundred blocks, in turn: a cache of all of them finds all, a smaller one nothing."""
    return lru_curve(chains(TraceRequest(float(n), (n % 100, *range(99))) for n in range(200)))


def test_sizes_are_twice_todays_and_where_the_curve_bends(curve: LruCurve) -> None:
    found = {
        one.settings["dram.budget"]: one
        for one in tried(curve, HostSpace(1 << 50, 1 << 50), dram_budget="1GiB")
        if one.kind is ChangeKind.DRAM_SIZE
    }
    assert list(found) == [2 * GIB, 10 * GIB], "9,901 blocks of a MiB, rounded up"
    assert found[10 * GIB].memory == 9 * GIB


def test_sizes_stay_within_what_the_host_has(curve: LruCurve) -> None:
    def sizes(memory: int) -> list[tuple[Any, str]]:
        every = tried(curve, HostSpace(memory, 0), dram_budget="1GiB")
        return [(one.settings["dram.budget"], one.note) for one in every if one.kind is ChangeKind.DRAM_SIZE]

    ((twice, said),) = sizes(4 * GIB)
    assert twice == 2 * GIB
    assert "the curve becomes flat at 10 GiB, and this host has 4.6 GiB for it" in said
    ((little, said),) = sizes(512 * MIB)
    assert GIB < little < 1.5 * GIB
    assert "all that this host has left" in said
    assert sizes(0) == []


def test_a_disk_is_tried_where_there_is_none_and_space_for_one(curve: LruCurve) -> None:
    def disks(free: int | None, **given: str) -> list[Any]:
        every = tried(curve, HostSpace(0, free), **given)
        return [one.settings.get("nvme.budget") for one in every if one.kind is ChangeKind.NVME_SIZE]

    assert disks(None, dram_budget="1GiB") == [10 * GIB]
    assert disks(5 * GIB, dram_budget="1GiB") == [int(4.5 * GIB)]
    assert disks(0, dram_budget="1GiB") == []
    assert disks(0, dram_budget="1GiB", nvme_path="/mnt", nvme_budget="1GiB") == []
    assert disks(None, dram_budget="1GiB", nvme_path="/mnt", nvme_budget="1GiB") == [2 * GIB, 10 * GIB]


def test_what_is_set_already_is_not_tried(curve: LruCurve) -> None:
    given = {"dram_policy": "lru", "nvme_path": "/mnt", "nvme_store": "through", "nvme_policy": "auto"}
    every = tried(curve, HostSpace(0, 0), **given)
    assert {one.settings["dram.policy"] for one in every if one.kind is ChangeKind.DRAM_POLICY} == {"auto", "reuse"}
    assert {one.settings["nvme.policy"] for one in every if one.kind is ChangeKind.NVME_POLICY} == {"lru", "reuse"}
    assert "through" not in {one.settings["nvme.store"] for one in every if one.kind is ChangeKind.NVME_STORE}
    assert not {ChangeKind.WRITE_BUDGET, ChangeKind.QUEUE, ChangeKind.EXPIRY, ChangeKind.QUOTA} & {
        one.kind for one in every
    }


def test_memory_that_the_node_may_still_take_is_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available", lambda: (20 * MIB, "free"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=GIB))
    run = run_of(tmp_path, settings(dram="16MiB", nvme=disk(tmp_path)), users(3, 3))
    with run.open() as store:
        run.drive(store)
        space = advising._space(run.status(store), AdviceRequest())
    assert space.memory is not None
    assert space.memory <= 5 * MIB
    assert space.disk is not None
    assert GIB - 16 * MIB <= space.disk < GIB
