"""A client of one's trust domain that knows another tenant's block names: all answers are those of an absent block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvtide import Session, Store, Tenant, config
from kvtide.errors import TierError
from kvtide.index.index import DRAM, SEALED
from kvtide.index.keys import Chain
from kvtide.node import protocol as p
from kvtide.store.backend import LocalBackend
from kvtide.testing import interface
from kvtide.testing.faults import Fault, FaultyDisk
from kvtide.testing.interface import until
from kvtide.tiers.nvme.journal import RECORD, Journal, replay
from tests.books import agree
from tests.node.serving import Served
from tests.plan.small import LAYOUT, MODEL, SLOTS, keep, length, open_store, prompt, right

VICTIM = Tenant("victim", b"the naming secret of the victim.")
OTHER = Tenant("other", b"the naming secret of the other..")
PATH = (1, 2, 3)


@dataclass
class World:
    store: Store
    victim: Session

    @property
    def chain(self) -> Chain:
        return self.victim.chain(prompt(*PATH))

    @property
    def other(self) -> LocalBackend:
        """What a node makes of a session of the other tenant."""
        return LocalBackend(self.store.main, LAYOUT, MODEL.namespace(OTHER), OTHER.tag)

    def column(self, name: str) -> list[Any]:
        """What the index says of the victim's blocks."""
        index = self.store.index
        column: Sequence[Any] = getattr(index, name)[index.rows(self.chain.keys(b"full"))].tolist()
        return list(column)


def without_journal(folder: Path) -> None:
    (journal,) = folder.glob("journal*")
    journal.unlink()


PLACES = ["dram", "nvme", "journal", "headers", "files"]


@contextlib.contextmanager
def kept_in(place: str, folder: Path) -> Iterator[World]:
    """The victim's three blocks, in that place alone."""
    nvme = folder / "nvme" if place in ("nvme", "journal", "headers") else None
    how: dict[str, Any] = {"files": {"path": str(folder / "files"), "threads": 2}} if place == "files" else {}
    if place not in ("dram", "nvme"):
        with open_store(nvme, **how) as store, store.session(MODEL, VICTIM) as session:
            keep(session, *PATH)
            assert store.flush(30)
    if place == "headers":
        without_journal(folder / "nvme")
    with open_store(nvme, **how) as store, store.session(MODEL, VICTIM) as session:
        if place in ("dram", "nvme"):
            keep(session, *PATH)
        if place == "nvme":
            for number in range(100, 100 + SLOTS):
                keep(session, number)
                assert store.flush(30)
        if place == "files":
            until(lambda: length(session, *PATH) == 3)
        world = World(store, session)
        with store.index.lock:
            here = store.index.state[DRAM][store.index.rows(world.chain.keys(b"full"))] == SEALED
        assert here.tolist() == [place == "dram"] * 3
        yield world
        assert right(session, *PATH) == 3, "the victim has all its blocks"
        if nvme is not None:
            agree(store)


@pytest.mark.parametrize("place", PLACES)
def test_nothing_is_found_and_nothing_is_changed(tmp_path: Path, place: str) -> None:
    with kept_in(place, tmp_path) as w:
        other, chain = w.other, w.chain
        facts = ("used", "priority", "expiry", "pins", "tenant", "returns", "identity")
        before = {name: w.column(name) for name in facts}
        reads = w.store.statistics().tiers
        assert other.find(chain) == [False] * 3
        holding = other.match(chain, 0, None)
        assert (holding.plan.blocks, holding.held, len(holding.part.all)) == (0, 0, 0)
        assert other.load(holding, None).wait(30)
        assert other.collect(holding).blocks == 0
        holding.release()
        assert other.pin(chain, None, 1) == 0
        assert other.expire(chain, 0, 1.0, 30) == 0
        persisting = other.persist(chain, {"full": range(3)})
        assert persisting.transfer.wait(30)
        assert persisting.result().durable == 0
        assert {name: w.column(name) for name in facts} == before
        after = w.store.statistics().tiers
        assert [t.bytes_read for t in after.values()] == [t.bytes_read for t in reads.values()], "nothing was read"
        assert length(w.victim, *PATH) == 3


@pytest.mark.parametrize("place", PLACES)
def test_what_another_drops_stays(tmp_path: Path, place: str) -> None:
    with kept_in(place, tmp_path) as w:
        assert w.other.drop(w.chain, 0, 30) == 0
        assert length(w.victim, *PATH) == 3


def test_what_another_drops_stays_in_storage_that_this_store_has_not_looked_at(tmp_path: Path) -> None:
    how: dict[str, Any] = {"files": {"path": str(tmp_path / "files"), "threads": 2}}
    disk = FaultyDisk()
    with open_store(None, **how) as first, first.session(MODEL, VICTIM) as session:
        keep(session, *PATH)
        assert first.flush(30)
        with open_store(None, **how) as store:
            other = LocalBackend(store.main, LAYOUT, MODEL.namespace(OTHER), OTHER.tag)
            chain = session.chain(prompt(*PATH))
            assert other.drop(chain, 0, 30) == 0
            ((_, tier),) = store.main.shared_tiers
            assert tier.drops.number == 0, "nobody is told"
            with store.session(MODEL, VICTIM) as again:
                until(lambda: length(again, *PATH) == 3)
        with (
            Store(config.read(env={}, dram={"budget": "1MiB", "segment": "1MiB"}, **how), disk=disk) as store,
            store.session(MODEL, VICTIM) as again,
        ):
            disk.arm(Fault("read", files="[0-9a-f]*", times=1 << 30))
            with pytest.raises(TierError):  # nobody can tell whose they are
                again.drop(prompt(*PATH))
            disk.disarm()
        with open_store(None, **how) as store, store.session(MODEL, VICTIM) as again:
            assert again.drop(prompt(*PATH)) == 0, "the index has not met them"
            ((_, tier),) = first.main.shared_tiers
            tier.drops.hear()
            assert length(session, *PATH) == 0, "whose they are can drop them unseen"


@pytest.mark.parametrize("place", PLACES)
def test_a_store_of_anothers_names_is_taken_as_if_they_were_free_and_changes_nothing(
    tmp_path: Path, place: str
) -> None:
    with kept_in(place, tmp_path) as w:
        facts = ("used", "priority", "expiry", "identity")
        before = {name: w.column(name) for name in facts}
        made = w.other.reserve(LAYOUT.groups, w.chain, 0, 3, 5.0, 50)
        assert (len(made.keys), made.refused, made.pending) == (3, 0, 0), "as for blocks that nobody has"
        for view in made.views:
            np.frombuffer(view, np.uint8)[:] = 7
        made.seal()
        assert w.other.find(w.chain) == [False] * 3
        assert {name: w.column(name) for name in facts} == before


def test_a_block_that_is_being_written_is_not_pending_for_another() -> None:
    with open_store() as store, store.session(MODEL, VICTIM) as victim:
        w = World(store, victim)
        with victim.reserve(prompt(*PATH)):
            holding = w.other.match(w.chain, 0, None)
            assert not holding.pending
            holding.release()


def test_a_journal_without_identities_opens_and_each_is_known_after_its_first_read(tmp_path: Path) -> None:
    folder = tmp_path / "nvme"
    with open_store(folder) as store, store.session(MODEL, VICTIM) as session:
        keep(session, *PATH)
        assert store.flush(30)
    (path,) = folder.glob("journal*")
    with open_store(folder) as store:
        disk, boot = store.main.colds[0].tier._volume._disk, store.main.colds[0].tier._volume._journal.boot  # type: ignore[attr-defined]
    records, doubt = replay(path, boot)
    assert not doubt
    assert len(records) == 3
    assert (records["identity"] != 0).all()
    old = records.copy()
    old["identity"] = 0
    assert old.dtype == RECORD
    journal = Journal(path, disk, boot)
    journal.rewrite(old)
    journal.close()
    with open_store(folder) as store, store.session(MODEL, VICTIM) as session:
        w = World(store, session)
        assert w.column("identity") == [0] * 3
        holding = w.other.match(w.chain, 0, None)
        w.other.load(holding, None).wait(30)
        assert w.other.collect(holding).blocks == 0, "the header says whose it is"
        holding.release()
        assert right(session, *PATH) == 3
        assert 0 not in w.column("identity")
        assert w.other.find(w.chain) == [False] * 3


@pytest.mark.parametrize("again", [False, True])
def test_a_node_answers_word_for_word_as_if_nobody_had_the_block(tmp_path: Path, again: bool) -> None:
    """In memory; or after a restart, on NVMe alone."""
    settings: dict[str, Any] = {
        "dram": {"budget": "16MiB", "segment": "2MiB"},
        "nvme": {"path": str(tmp_path / "nvme"), "budget": "64MiB", "segment": "2MiB", "threads": 2},
    }
    tokens, nobodys = interface.prompt(1, 2), interface.prompt(3, 4)
    model, layout = interface.MODEL, interface.PLAIN

    def ask(client: Served) -> None:
        opening = p.Open(p.describe(layout), layout.block_tokens, model.namespace(OTHER), OTHER.tag)
        number = client.link.ask_one(opening)
        assert isinstance(number, int)

        def answers(prompt: list[int]) -> list[Any]:
            digests = b"".join(model.namer(VICTIM).chain(prompt).digests)
            match, find, pin = client.link.ask(
                [p.Match(number, digests, 0), p.Find(number, digests), p.Pin(number, digests, None, 1)]
            )
            assert isinstance(match, p.Matched)
            return [msgspec.structs.replace(match, holding=0), find, pin]

        assert answers(tokens) == answers(nobodys)
        assert answers(tokens)[0].blocks == 0

    with Served(tmp_path / "node.sock", **settings) as client:
        with client.session(model, VICTIM) as session:
            session.store(tokens, interface.data(layout, tokens))
            if not again:
                ask(client)
                assert interface.length(session, tokens) == 32
        assert client.flush(30)
    if again:
        with Served(tmp_path / "node.sock", **settings) as client, client.session(model, VICTIM) as session:
            ask(client)
            assert interface.length(session, tokens) == 32
