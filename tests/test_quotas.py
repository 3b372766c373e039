"""Quotas: what a tenant may have of a tier holds at every moment, and costs nobody else anything."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtide
from kvtide import BlockRemoved, Session, Store, Tenant, Unwritten
from kvtide import config as configuration
from kvtide.errors import ConfigError
from kvtide.events import Event
from kvtide.index.index import ABSENT
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.store.reserved_shares import divide
from kvtide.store.statistics import TenantStatistics
from kvtide.testing.interface import MODEL, PLAIN, data, length, prompt, until
from kvtide.testing.keys import WRAPPING

SLOT = PLAIN.geometry["full"].footprint
RECORD = SLOT + 4096
GREEDY = Tenant("greedy", b"the naming secret of the greedy one")
TAG = GREEDY.tag.hex()


def where(folder: Path, dram: str = "", nvme: str = "", **more: Any) -> dict[str, Any]:
    """Room for 64 blocks in memory, and for more on disk."""
    return {
        "dram": {"budget": 64 * SLOT, "segment": "1MiB", "quotas": dram and f"{TAG}:{dram}"},
        "nvme": {
            "path": str(folder / "kv"),
            "budget": "32MiB",
            "segment": "1MiB",
            "store": "through",
            "threads": 2,
            "quotas": nvme and f"{TAG}:{nvme}",
            **more,
        },
    }


def put(session: Session, *path: int) -> kvtide.Stored:
    return session.store(prompt(*path), data(PLAIN, prompt(*path)))


def usage(store: Store) -> TenantStatistics:
    return store.statistics().tenants[TAG]


def check_books(store: Store) -> None:
    """What is charged is what the tenant's blocks take."""
    index = store.index
    with index.lock:
        mine = index.tenant[: index.size] == store.main._quotas.tenants[GREEDY.tag]
        for number, tier in enumerate((store.dram, store.main.colds[0].tier)):
            rows = np.flatnonzero(mine & (index.state[number][: index.size] != ABSENT))
            sizes = [tier.segments.size(place) for place in index.place[number][rows].tolist()]  # type: ignore[attr-defined]
            account = index.accounts[number]
            assert (account.nbytes[1], account.blocks[1]) == (sum(sizes), len(rows))


# -- it holds -----------------------------------------------------------------------------------------------

Acts = st.lists(
    st.tuples(
        st.sampled_from(["greedy", "greedy", "other"]),
        st.sampled_from(["store", "store", "find", "drop"]),
        st.lists(st.integers(0, 5), min_size=1, max_size=9),
    ),
    max_size=25,
)


@settings(max_examples=15, deadline=None)
@given(acts=Acts, dram=st.integers(0, 12), nvme=st.integers(0, 12), codec=st.sampled_from(["raw", "zstd"]))
def test_whatever_is_stored_found_and_dropped_a_quota_holds(
    acts: list[tuple[str, str, list[int]]], dram: int, nvme: int, codec: str
) -> None:
    limits = {"dram": dram * SLOT, "nvme": nvme * RECORD}
    over: list[TenantStatistics] = []
    with tempfile.TemporaryDirectory() as folder:
        sections = where(Path(folder), str(limits["dram"]), str(limits["nvme"]), codec=codec)
        with kvtide.open(None, **sections) as store:

            def look(_: Event) -> None:
                if any(nbytes > limits[tier] for tier, nbytes in usage(store).bytes_used.items()):
                    over.append(usage(store))

            store.follow(look)
            with store.session(MODEL, GREEDY) as greedy, store.session(MODEL) as other:
                for who, verb, path in acts:
                    session = greedy if who == "greedy" else other
                    match verb:
                        case "store":
                            put(session, *path)
                        case "find":
                            length(session, prompt(*path))
                        case _:
                            session.drop(prompt(*path), start=len(path) // 2)
                    assert store.flush(60).complete
                    check_books(store)
    assert not over


def test_a_tenant_beyond_its_quota_loses_its_own_coldest_and_nobody_else_anything(tmp_path: Path) -> None:
    gone: list[bytes] = []
    with (
        kvtide.open(None, **where(tmp_path, f"{8 * SLOT}", f"{16 * RECORD}")) as store,
        store.session(MODEL, GREEDY) as greedy,
        store.session(MODEL) as other,
    ):
        put(other, *range(20))
        assert store.flush(60)
        names = set(other.chain(prompt(*range(20))).keys(PLAIN.groups[0].suffix))
        store.follow(lambda e: gone.extend(e.keys) if isinstance(e, BlockRemoved) else None)
        for number in range(40):
            put(greedy, number)
            assert store.flush(60)
        assert len(gone) == 40 - 8 + 40 - 16
        assert not names.intersection(gone)
        assert (usage(store).blocks, length(other, prompt(*range(20)))) == (
            {"dram": 8, "nvme": 16},
            len(prompt(*range(20))),
        )
        assert [number for number in range(40) if any(greedy.find(prompt(number)))] == list(range(24, 40))


def test_what_finds_no_room_among_its_own_is_not_stored_and_counted(tmp_path: Path) -> None:
    with (
        kvtide.open(None, **where(tmp_path, f"{4 * SLOT}", f"{2 * RECORD}")) as store,
        store.session(MODEL, GREEDY) as greedy,
    ):
        assert put(greedy, 1, 2).stored == 2
        assert store.flush(60)
        greedy.pin(prompt(1, 2))
        stored = put(greedy, 5, 6, 7, 8)
        assert (stored.stored, stored.dropped) == (2, 2)
        flushed = store.flush(60)
        assert (bool(flushed), flushed.unwritten) == (False, {Unwritten.QUOTA: 2})
        counts = store.statistics().counts
        reasons = {f"stores dropped: a tenant's quota of {tier} is used up" for tier in ("dram", "nvme")}
        assert {why: counts[why] for why in reasons} == dict.fromkeys(reasons, 2) == usage(store).refused


def test_of_a_prompt_larger_than_the_quota_the_beginning_is_loaded(tmp_path: Path) -> None:
    with kvtide.open(None, **where(tmp_path)) as store, store.session(MODEL, GREEDY) as greedy:
        put(greedy, *range(20))
    with kvtide.open(None, **where(tmp_path, f"{5 * SLOT}")) as store, store.session(MODEL, GREEDY) as greedy:
        assert length(greedy, prompt(*range(20))) == len(prompt(*range(5)))
        assert usage(store).blocks == {"dram": 5}


def test_blocks_that_must_be_written_before_they_leave_make_room_in_time(tmp_path: Path) -> None:
    with (
        kvtide.open(None, **where(tmp_path, f"{4 * SLOT}", store="eviction")) as store,
        store.session(MODEL, GREEDY) as greedy,
    ):
        for number in range(12):
            until(lambda number=number: put(greedy, number).dropped == 0)  # type: ignore[misc]
            assert usage(store).blocks["dram"] <= 4
        for number in range(12):
            until(lambda number=number: length(greedy, prompt(number)) == len(prompt(number)))  # type: ignore[misc]


# -- after a restart ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("encrypt", [False, True], ids=["open", "sealed"])
def test_a_lowered_quota_brings_its_tenant_down_at_the_next_start(tmp_path: Path, encrypt: bool) -> None:
    (tmp_path / "kek").touch(0o600)
    (tmp_path / "kek").write_bytes(WRAPPING)
    keys = {"key_source": f"file:{tmp_path / 'kek'}", "key_file": str(tmp_path / "keys.json")}
    security = {"encrypt": encrypt, **keys}
    with kvtide.open(None, **where(tmp_path), security=security) as store:
        for tenant in (GREEDY, DEFAULT_TENANT):
            with store.session(MODEL, tenant) as session:
                for number in range(30):
                    put(session, number)
    lowered = where(tmp_path, nvme=f"{10 * RECORD}")
    with kvtide.open(None, **lowered, security=security) as store:
        assert usage(store).blocks == {"nvme": 10}
        assert usage(store).bytes_used == {"nvme": 10 * RECORD}
        with store.session(MODEL, GREEDY) as greedy, store.session(MODEL) as other:
            assert [n for n in range(30) if any(greedy.find(prompt(n)))] == list(range(20, 30))
            assert all(other.find(prompt(n)) == [True] for n in range(30))
            put(greedy, 77)
            assert store.flush(60)
        assert usage(store).blocks == {"nvme": 10}


# -- shared storage -----------------------------------------------------------------------------------------


def test_a_node_keeps_what_it_writes_to_shared_storage_within_the_quota(tmp_path: Path) -> None:
    files = {"path": str(tmp_path / "everybody"), "quotas": f"{TAG}:{4 * RECORD}", "threads": 2}
    memory = {"budget": "4MiB", "segment": "1MiB"}
    with kvtide.open(None, dram=memory, files={**files, "quotas": ""}) as store:
        for tenant in (GREEDY, DEFAULT_TENANT):
            with store.session(MODEL, tenant) as session:
                put(session, 100)
    with kvtide.open(None, dram=memory, files=files) as store, store.session(MODEL, GREEDY) as greedy:
        assert length(greedy, prompt(100)) == len(prompt(100)), "what was there before is found, and not charged"
        for number in range(10):
            put(greedy, number)
            assert store.flush(60)
            assert usage(store).blocks["files"] <= 4
    blobs = [f for f in (tmp_path / "everybody").rglob("*") if f.is_file() and len(f.name) >= 60]
    assert len(blobs) == 2 + 4


# -- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"dram": {"budget": "1GiB", "quotas": "default:100MiB", "reserved": "default:25%"}},
            "sets 256 MiB aside for tenant default, and dram.quotas allows it 100 MiB",
        ),
        ({"files": {"path": "/x", "quotas": "default:10%"}}, "no files.budget for percentages: give sizes"),
        ({"nvme": {"quotas": "nobody:10%"}}, "'nobody:10%'; it must be tenants"),
        ({"tenants": {"default": "10%"}}, r"no section \[tenants\]"),
    ],
)
def test_what_cannot_be_is_refused_with_its_values(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        divide(configuration.read(None, {}, **sections))
