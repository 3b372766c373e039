"""Whether the node has nothing of a prompt: what the answer says, and what it counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvtide.index.keys import Tenant
from kvtide.node.client.backend import RemoteBackend, absent_each
from kvtide.node.client.client import Client
from kvtide.store.session import Session
from kvtide.testing.interface import MODEL, PLAIN, data, prompt
from tests.node.serving import Served, Thread, eventually

DRAM = {"budget": "8MiB", "segment": "1MiB"}


def absent(session: Session, *tokens: list[int]) -> list[bool]:
    assert isinstance(session.backend, RemoteBackend)
    chains = [session.chain(some) for some in tokens]
    return absent_each([[(session.backend, chain.joined)] for chain in chains])


def test_only_what_nobody_has_or_writes_is_absent(tmp_path: Path) -> None:
    with Served(tmp_path / "node.sock", dram=DRAM) as client, client.session(MODEL) as session:
        stored, written, other = prompt(1, 2, 3), prompt(4, 5), prompt(6, 7)
        session.store(stored, data(PLAIN, stored))
        reservation = session.reserve(written)
        longer = [*stored, *prompt(9)]
        assert absent(session, stored, written, other, longer, stored[:5]) == [False, False, True, False, False]
        with client.session(MODEL, Tenant("another", bytes(32))) as foreign:
            assert absent(foreign, stored, written) == [True, True]
        reservation.abort()
        assert absent(session, written) == [True]
        session.drop(stored)
        assert absent(session, stored) == [True]


def test_a_block_without_those_before_it_is_not_absent(tmp_path: Path) -> None:
    """The engine may have the others itself."""
    with Served(tmp_path / "node.sock", dram=DRAM) as client, client.session(MODEL) as session:
        tokens = prompt(1, 2, 3)
        reservation = session.reserve(tokens, start=2)
        assert len(reservation.keys) == 1
        reservation.seal()
        assert session.find(tokens) == [False, False, True]
        assert absent(session, tokens) == [False]


def test_what_was_missed_is_counted_and_recorded_as_a_match_that_found_nothing(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with (
        Served(tmp_path / "node.sock", dram=DRAM, record={"path": str(trace)}) as client,
        client.session(MODEL) as session,
    ):
        assert isinstance(session.backend, RemoteBackend)
        assert absent(session, prompt(5), prompt(6)) == [True, True]
        assert client.statistics().planner.prompts == 0, "a search is not counted"
        for tokens in (prompt(2, 3)[:-1], prompt(4)):
            assert absent(session, tokens) == [True]
            chain = session.chain(tokens)
            session.backend.missed(chain.joined, chain.tokens)
        found = client.statistics().planner
        assert (found.prompts, found.blocks["missed"], found.blocks["dram"]) == (2, 2, 0)
    lines = list(map(json.loads, trace.read_text().splitlines()))[1:]
    assert [line["input_length"] for line in lines] == [len(prompt(2, 3)) - 1, len(prompt(4))]


def test_a_prompt_is_absent_if_it_is_in_no_session(tmp_path: Path) -> None:
    with (
        Served(tmp_path / "node.sock", dram=DRAM) as client,
        client.session(MODEL) as one,
        client.session(MODEL, Tenant("another", bytes(32))) as two,
    ):
        two.store(prompt(1), data(PLAIN, prompt(1)))
        names: list[list[Any]] = [[(s.backend, s.chain(prompt(i)).joined) for s in (one, two)] for i in (1, 2)]
        assert absent_each(names) == [False, True]
        assert absent_each([names[1], names[0], names[1]]) == [True, False, True]


def test_what_shared_storage_may_have_is_not_absent(tmp_path: Path) -> None:
    files = {"path": str(tmp_path / "shared")}
    nodes = [Thread(tmp_path / f"{name}.sock", dram=DRAM, files=files) for name in ("one", "other")]
    tokens = prompt(1, 2, 3)
    with Client(nodes[0].path) as client, client.session(MODEL) as session:
        session.store(tokens, data(PLAIN, tokens))
        assert client.flush(60)
    with Client(nodes[1].path) as client, client.session(MODEL) as session:
        assert absent(session, tokens, prompt(4)) == [False, False], "both are searched for"
        eventually(lambda: absent(session, prompt(4)) == [True])
        eventually(lambda: all(session.find(tokens)))
        assert absent(session, tokens) == [False]
    for node in nodes:
        node.close()


def test_without_a_node_nothing_is_known_to_be_absent(tmp_path: Path) -> None:
    node = Thread(tmp_path / "node.sock", dram=DRAM)
    with Client(node.path) as client, client.session(MODEL) as session:
        assert absent(session, prompt(1)) == [True]
        node.close()
        assert absent(session, prompt(1), prompt(2)) == [False, False]
    assert absent_each([]) == []
