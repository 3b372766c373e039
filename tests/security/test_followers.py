"""Who follows a node's events hears of the blocks that it has sessions for, and of nobody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvtide
from kvtide import Tenant
from kvtide.events import BlockRemoved, BlockStored, Event
from kvtide.node import protocol as p
from kvtide.node.client.client import Client
from kvtide.node.roles import Role
from kvtide.node.server.access import Access, AccessList
from kvtide.testing.interface import MODEL, PLAIN, data, prompt
from kvtide.tiers.nvme.journal import Journal, replay
from tests.node.serving import Served, eventually

VICTIM = Tenant("victim", b"the naming secret of the victim.")
OTHER = Tenant("other", b"the naming secret of the other..")
DRAM = {"budget": "16MiB", "segment": "2MiB"}


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a node listens at which everybody is a user of one trust domain, and no administrator."""
    monkeypatch.setattr(AccessList, "of", lambda *_: Access(Role.WRITE, 1, b"\0blue"))
    return tmp_path / "node.sock"


def keys(events: list[Event]) -> list[bytes]:
    return [key for e in events if isinstance(e, BlockStored | BlockRemoved) for key in e.keys]


def test_events_of_other_tenants_are_not_heard(node: Path) -> None:
    heard: list[Event] = []
    with Served(node, dram=DRAM) as victim, Client(node) as other:
        other.follow(heard.append)
        with victim.session(MODEL, VICTIM) as theirs, other.session(MODEL, OTHER) as mine:
            for tokens in (prompt(1), prompt(2)):
                theirs.store(tokens, data(PLAIN, tokens))
            assert theirs.drop(prompt(2)) == 1
            mine.store(prompt(3), data(PLAIN, prompt(3)))
            own = mine.chain(prompt(3)).keys(b"full")
            eventually(lambda: set(own) <= set(keys(heard)))  # and so whatever came before
            assert mine.drop(prompt(3)) == 1
            eventually(lambda: any(isinstance(e, BlockRemoved) for e in heard))
            assert len([key for key in keys(heard) if key not in own]) == 0


def test_a_tag_alone_is_no_secret(node: Path) -> None:
    """Who knows a tenant's tag, which metrics show, and not its secret, hears nothing of it."""
    heard: list[Event] = []
    with Served(node, dram=DRAM) as victim, Client(node) as other:
        other.follow(heard.append)
        other.link.ask_one(p.Open(p.describe(PLAIN), PLAIN.block_tokens, b"guess".ljust(32), VICTIM.tag))
        with victim.session(MODEL, VICTIM) as theirs, other.session(MODEL, OTHER) as mine:
            theirs.store(prompt(1), data(PLAIN, prompt(1)))
            mine.store(prompt(3), data(PLAIN, prompt(3)))
            own = mine.chain(prompt(3)).keys(b"full")
            eventually(lambda: set(own) <= set(keys(heard)))
            assert set(keys(heard)) == set(own)


def test_a_follower_hears_of_what_others_store_for_its_own_tenant_before_it_uses_its_session(node: Path) -> None:
    heard: list[Event] = []
    with (
        Served(node, dram=DRAM) as engine,
        Client(node) as router,
        engine.session(MODEL, VICTIM) as session,
        router.session(MODEL, VICTIM),
    ):
        router.follow(heard.append)
        session.store(prompt(1), data(PLAIN, prompt(1)))
        stored = BlockStored("dram", tuple(session.chain(prompt(1)).keys(b"full")))
        eventually(lambda: stored in heard)


def test_a_follower_hears_no_more_when_its_sessions_are_closed(node: Path) -> None:
    heard: list[Event] = []
    with Served(node, dram=DRAM) as victim, Client(node) as other:
        other.follow(heard.append)
        with victim.session(MODEL, VICTIM) as theirs, other.session(MODEL, OTHER) as mine:
            other.session(MODEL, VICTIM).close()
            theirs.store(prompt(1), data(PLAIN, prompt(1)))
            mine.store(prompt(3), data(PLAIN, prompt(3)))
            own = mine.chain(prompt(3)).keys(b"full")
            eventually(lambda: set(own) <= set(keys(heard)))
            assert set(keys(heard)) == set(own)


def test_an_administrator_hears_of_all(tmp_path: Path) -> None:
    heard: list[Event] = []
    with Served(tmp_path / "node.sock", dram=DRAM) as victim, Client(victim.path) as admin:
        admin.follow(heard.append)
        with victim.session(MODEL, VICTIM) as theirs:
            theirs.store(prompt(1), data(PLAIN, prompt(1)))
            stored = BlockStored("dram", tuple(theirs.chain(prompt(1)).keys(b"full")))
            eventually(lambda: stored in heard)


@pytest.mark.parametrize("role", [Role.WRITE, Role.ADMIN])
def test_of_blocks_of_which_nobody_knows_whose_they_are_administrators_alone_hear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: Role
) -> None:
    """A journal of an older version does not say it, and they leave before anybody has read them."""
    monkeypatch.setattr(AccessList, "of", lambda *_: Access(role))
    disk = {"path": str(tmp_path / "tier"), "budget": "64MiB", "segment": "2MiB", "store": "through"}
    how = {"dram": DRAM, "nvme": disk}
    with Served(tmp_path / "node.sock", **how) as victim, victim.session(MODEL, VICTIM) as theirs:
        theirs.store(prompt(1), data(PLAIN, prompt(1)))
        assert victim.flush(60)
        gone = theirs.chain(prompt(1)).keys(b"full")
    with kvtide.open(None, **how) as home:
        volume = home.main.colds[0].tier._volume  # type: ignore[attr-defined]
        real, boot = volume._disk, volume._journal.boot
    (path,) = (tmp_path / "tier").glob("journal*")
    records, doubt = replay(path, boot)
    assert (doubt, len(records)) == ("", 1)
    old = records.copy()
    old["identity"] = 0
    journal = Journal(path, real, boot)
    journal.rewrite(old)
    journal.close()
    heard: list[Event] = []
    with Served(tmp_path / "node.sock", **how) as victim, Client(victim.path) as other:
        other.follow(heard.append)
        with other.session(MODEL, VICTIM) as theirs, other.session(MODEL, OTHER) as mine:
            assert theirs.find(prompt(1)) == [True]
            home = victim._thread.store
            with home.index.lock:
                assert home.index.identities(home.index.rows(gone)) == (0,)
            assert home.forget(VICTIM.tag).blocks == 1
            mine.store(prompt(3), data(PLAIN, prompt(3)))
            own = mine.chain(prompt(3)).keys(b"full")
            eventually(lambda: set(own) <= set(keys(heard)))
            removed = {key for e in heard if isinstance(e, BlockRemoved) for key in e.keys}
            assert removed == (set(gone) if role is Role.ADMIN else set())
