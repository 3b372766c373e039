"""Tenants that share a store: reserved shares, in which nothing that others do can be felt."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtide
from kvtide import BlockRemoved, BlockStored, Layout, Model, Session, Store, Tenant
from kvtide import config as configuration
from kvtide.block import BlockKey
from kvtide.counts import Count
from kvtide.errors import ConfigError, LayoutError, TierError
from kvtide.events import Event
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.metrics import render
from kvtide.store.partition import Partition
from kvtide.store.reserved_shares import divide
from kvtide.testing.interface import SIZE, check, data, length, prompt
from tests.node.serving import Served

LAYOUT = Layout.attention(layers=4, heads=4, head_dim=256, dtype="float32", block_tokens=SIZE)
"""Half a megabyte a block, so that few of them fill a tier."""
MODEL = Model(LAYOUT, "given:shares")
QUIET = Tenant("quiet", b"the naming secret of the quiet one")
LOUD = Tenant("loud", b"the naming secret of the loud one.")
OTHERS = (DEFAULT_TENANT, LOUD)


def layout(folder: Path, **nvme: Any) -> dict[str, Any]:
    return {
        "dram": {"budget": "8MiB", "segment": "1MiB", "reserved": f"{QUIET.tag.hex()}:2MiB"},
        "nvme": {
            "path": str(folder / "kv"),
            "budget": "48MiB",
            "segment": "4MiB",
            "store": "through",
            "threads": 2,
            "reserved": f"{QUIET.tag.hex()}:16MiB",
            **nvme,
        },
    }


def put(session: Session, tokens: Sequence[int]) -> kvtide.Stored:
    return session.store(tokens, data(LAYOUT, tokens))


# -- nothing is felt ----------------------------------------------------------------------------------------

Paths = st.lists(st.integers(0, 4), min_size=1, max_size=4)
"""At most what the share's memory holds: what would be left of a longer prompt depends on when the disk is done."""
Acts = st.lists(st.tuples(st.sampled_from(["store", "store", "find", "drop"]), Paths), max_size=12)


def act(session: Session, verb: str, path: Sequence[int]) -> object:
    tokens = prompt(*path)
    match verb:
        case "store":
            return put(session, tokens)
        case "find":
            return session.find(tokens), length(session, tokens)
        case _:
            return session.drop(tokens, start=len(path) // 2)


def lived(quiet: Sequence[tuple[str, list[int]]], loud: Sequence[Sequence[tuple[str, list[int]]]]) -> list[object]:
    """What a tenant with a reserved share is answered, and what becomes of its blocks, while others act in between."""
    told: list[object] = []
    names: set[bytes] = set()
    happened: list[tuple[str, str, bytes]] = []
    """Since the last act: the disk's threads tell in any order."""

    def follow(event: Event) -> None:
        if isinstance(event, BlockStored | BlockRemoved):
            happened.extend((type(event).__name__, event.tier, key) for key in event.keys if key in names)

    with tempfile.TemporaryDirectory() as folder, kvtide.open(None, **layout(Path(folder))) as store:
        store.follow(follow)
        with store.session(MODEL, QUIET) as mine, store.session(MODEL) as one, store.session(MODEL, LOUD) as two:
            for number, (verb, path) in enumerate(quiet):
                for i, (other, where) in enumerate(loud[number] if number < len(loud) else ()):
                    act((one, two)[i % 2], other, where)
                assert store.flush(60)
                names.update(mine.chain(prompt(*path)).keys(LAYOUT.groups[0].suffix))
                told.append(act(mine, verb, path))
                assert store.flush(60)
                told.append(sorted(happened))
                happened.clear()
        share = store.partition_of(QUIET.tag).statistics()
        told.append((share.counts, {name: tier.blocks for name, tier in share.tiers.items()}))
    return told


@settings(max_examples=25, deadline=None)
@given(quiet=Acts, loud=st.lists(Acts, max_size=8))
def test_whatever_others_do_a_reserved_share_lives_the_same_life(
    quiet: list[tuple[str, list[int]]], loud: list[list[tuple[str, list[int]]]]
) -> None:
    assert lived(quiet, loud) == lived(quiet, [])


def test_a_flood_of_others_takes_nothing_and_adds_nothing() -> None:
    """The same, where it is certain that both sides evict from both tiers."""
    quiet = [("store", [n, 1, 2, 3]) for n in range(12)] + [("find", [n, 1, 2, 3]) for n in range(12)]
    flood = [[("store", [n, m, 5, 6, 7, 8]) for m in range(4)] for n in range(24)]
    alone = lived(quiet, [])
    assert {"dram", "nvme"} <= {e[1] for events in alone if isinstance(events, list) for e in events if "Rem" in e[0]}
    assert lived(quiet, flood) == alone


# -- whose room it is ---------------------------------------------------------------------------------------


def test_a_share_holds_its_tenant_and_the_rest_the_others(tmp_path: Path) -> None:
    with kvtide.open(None, **layout(tmp_path)) as store:
        for tenant in (QUIET, *OTHERS):
            with store.session(MODEL, tenant) as session:
                for n in range(20):
                    put(session, prompt(n, n + 1, n + 2))
        assert store.flush(60)
        about = store.statistics()
        share = about.tenants[QUIET.tag.hex()]
        assert (about.tiers["dram"].budget, about.tiers["nvme"].budget) == (6 << 20, 32 << 20)
        assert share.limits == {"dram": 2 << 20, "nvme": 16 << 20}
        assert 0 < share.bytes_used["dram"] <= 2 << 20
        assert 0 < share.bytes_used["nvme"] <= 16 << 20
        assert sum(f.stat().st_size for f in (tmp_path / "kv").rglob("*") if f.is_file()) <= 48 << 20


def test_a_share_is_there_again_and_its_room_returns_when_it_is_given_up(tmp_path: Path) -> None:
    where = layout(tmp_path)
    with kvtide.open(None, **where) as store, store.session(MODEL, QUIET) as session:
        put(session, prompt(1, 2, 3))
    with kvtide.open(None, **where) as store, store.session(MODEL, QUIET) as session:
        assert length(session, prompt(1, 2, 3)) == 3 * SIZE
    for tier in ("dram", "nvme"):
        where[tier]["reserved"] = ""
    with kvtide.open(None, **where) as store, store.session(MODEL, QUIET) as session:
        assert length(session, prompt(1, 2, 3)) == 0
        assert not list((tmp_path / "kv" / "reserved").iterdir())
        assert store.statistics().tiers["nvme"].budget == 48 << 20


def test_forgetting_a_tenant_empties_its_share_and_what_it_had_before(tmp_path: Path) -> None:
    before = layout(tmp_path)
    before["dram"]["reserved"] = before["nvme"]["reserved"] = ""
    with kvtide.open(None, **before) as store, store.session(MODEL, QUIET) as session:
        put(session, prompt(1, 2))
    with kvtide.open(None, **layout(tmp_path)) as store, store.session(MODEL, QUIET) as session:
        put(session, prompt(3, 4, 5))
        assert store.flush(60)
        assert store.forget(QUIET.tag).blocks == 5
        assert length(session, prompt(3, 4, 5)) == 0
    assert not any(b"KVTIDE\r\n" in file.read_bytes() for file in (tmp_path / "kv").rglob("*.segment"))


def test_a_part_that_cannot_forget_keeps_no_other_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kvtide.open(None, **layout(tmp_path)) as store, store.session(MODEL, QUIET) as session:
        put(session, prompt(3, 4, 5))
        assert store.flush(60)
        drop = Partition.drop

        def dropped(partition: Partition, keys: Sequence[BlockKey], timeout: float | None = None, **how: Any) -> int:
            if partition is store.main:
                raise TierError("storage does not answer")
            return drop(partition, keys, timeout, **how)

        monkeypatch.setattr(Partition, "drop", dropped)
        with pytest.raises(TierError, match="does not answer"):
            store.forget(QUIET.tag)
        assert length(session, prompt(3, 4, 5)) == 0


def test_the_stores_own_key_is_no_tenants(tmp_path: Path) -> None:
    with kvtide.open(None, **layout(tmp_path)) as store, pytest.raises(LayoutError, match="not all zero"):
        store.forget(bytes(16))


def test_a_tenant_with_a_share_uses_no_shared_storage(tmp_path: Path) -> None:
    where = {**layout(tmp_path), "files": {"path": str(tmp_path / "everybody")}}
    with kvtide.open(None, **where) as store:
        for tenant in (QUIET, LOUD):
            with store.session(MODEL, tenant) as session:
                put(session, prompt(1, 2))
        assert store.flush(60)
        assert store.statistics().counts["blocks written to files"] == 2
        assert list(store.partition_of(QUIET.tag).statistics().tiers) == ["dram", "nvme"]


# -- behind a node ------------------------------------------------------------------------------------------


def test_a_node_serves_shares_and_tells_nobody_of_them_but_administrators(tmp_path: Path) -> None:
    with Served(tmp_path / "node.sock", **layout(tmp_path)) as client:
        with client.session(MODEL, QUIET) as mine, client.session(MODEL) as other:
            for session in (mine, other):
                put(session, prompt(1, 2, 3))
                with session.match(prompt(1, 2, 3)) as match:
                    check(LAYOUT, session.load(match).wait(60), prompt(1, 2, 3))
            for n in range(20):
                put(other, prompt(7, n))
            assert client.flush(60)
            assert length(mine, prompt(1, 2, 3)) == 3 * SIZE
            assert mine.drop(prompt(1, 2, 3), start=1) == 2
            assert length(mine, prompt(1, 2, 3)) == SIZE
        assert set(client.statistics().tenants) == {QUIET.tag.hex()}  # our own user is one
        assert client._thread.node.status(domain=1).store.tenants == {}
        assert f'kvtide_tenant_blocks{{tenant="{QUIET.tag.hex()}",tier="dram"}} 1' in render(
            client._thread.store.statistics()
        )


def test_what_a_share_could_not_take_in_time_is_told_of_its_tenant_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtide.node.server.client_handler._GROWING", 0.05)
    with Served(tmp_path / "node.sock", **layout(tmp_path)) as client, client.session(MODEL, QUIET) as mine:
        share = client._thread.node.store.partition_of(QUIET.tag).dram
        with monkeypatch.context() as scarce:
            scarce.setattr(share, "take_many", lambda *_: [])
            scarce.setattr(share, "growable", lambda *_: True)
            scarce.setattr(share, "grow", lambda *_, wait: None)
            scarce.setattr(share, "in_hand", lambda nbytes: False)  # that the others have memory does not help it
            assert put(mine, prompt(1, 2)).dropped == 2
        about = client.statistics()
        assert about.tenants[QUIET.tag.hex()].refused == {Count.STORE_NO_MEMORY_YET: 2}
        assert Count.STORE_NO_MEMORY_YET not in about.counts
        assert put(mine, prompt(1, 2)).stored == 2


# -- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"dram": {"budget": "8MiB", "reserved": "default:5MiB " + "0" * 32 + ":3MiB"}}, "sets 8 MiB aside for 2"),
        ({"dram": {"budget": "8MiB", "reserved": "default:95%"}}, "1 MiB or more must be left"),
        ({"dram": {"budget": "8MiB", "reserved": "default:5%"}}, "it must be 1 MiB or more"),
        ({"dram": {"reserved": "default:1GiB"}, "nvme": {"reserved": "default:1GiB"}}, "set nvme.path"),
        ({"nvme": {"path": "/x", "reserved": "default:1GiB"}}, "dram.reserved has none"),
        ({"dram": {"reserved": "somebody:1GiB"}}, "'somebody:1GiB'; it must be tenants"),
        ({"dram": {"reserved": "default:1GiB default:2GiB"}}, "each once"),
        ({"dram": {"reserved": "default:101%"}}, "it must be tenants"),
        ({"dram": {"reserved": "default:much"}}, "it must be tenants"),
        ({"files": {"reserved": "default:1GiB"}}, "has no setting 'reserved'"),
    ],
)
def test_what_cannot_be_is_refused_with_its_values(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        divide(configuration.read(None, {}, **sections))


def test_parts_of_a_budget_are_of_what_is_configured() -> None:
    config = configuration.read(
        None,
        {"KVTIDE_DRAM_RESERVED": f"default:25%, {QUIET.tag.hex()}:1GiB"},
        dram={"budget": "8GiB"},
    )
    shares = divide(config)
    assert {tag: share.dram.budget >> 30 for tag, share in shares.reserved.items()} == {
        DEFAULT_TENANT.tag: 2,
        QUIET.tag: 1,
    }
    assert shares.rest.dram.budget == 5 << 30


def test_a_share_that_cannot_be_opened_leaves_nothing_open(tmp_path: Path) -> None:
    with kvtide.open(None, **layout(tmp_path)):
        pass
    (folder,) = (tmp_path / "kv" / "reserved").iterdir()
    (folder / "kvtide.json").write_text("not ours")
    with pytest.raises(kvtide.errors.TierError, match="damaged or not kvtide's"):
        Store(configuration.read(None, {}, **layout(tmp_path)))
    (folder / "kvtide.json").write_text('{"format": "kvtide nvme", "version": 1}')
    with kvtide.open(None, **layout(tmp_path)):
        pass  # no lock was left behind
