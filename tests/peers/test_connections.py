"""How many connections a node reads over, and with how many requests."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvtide import config
from kvtide.block import BlockKey
from kvtide.config import Peers
from kvtide.testing.blocks import content
from kvtide.tiers.peers.tier import connections_of
from tests.peers.nodes import Stores
from tests.peers.test_records import GEOMETRY, LAYOUT, MODEL, WHO, read


def processors(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))


def peers(**settings: Any) -> Peers:
    return config.read(None, env={}, peers=settings).peers


@pytest.mark.parametrize(
    ("count", "settings", "expected"),
    [
        (1, {}, 2),
        (3, {}, 2),
        (4, {}, 4),
        (64, {}, 4),
        (64, {"certificate": "host.pem"}, 2),
        (64, {"fabric": "auto"}, 2),
        (2, {"connections": 7}, 7),
        (64, {"connections": 1, "certificate": "host.pem"}, 1),
    ],
)
def test_connections_follow_from_settings_and_processors(
    monkeypatch: pytest.MonkeyPatch, count: int, settings: dict[str, Any], expected: int
) -> None:
    processors(monkeypatch, count)
    assert connections_of(peers(**settings)) == expected


def test_many_small_blocks_take_few_requests(tmp_path: Path) -> None:
    """Each request has 64 of them, as many as a node grants."""
    tokens = list(range(130 * LAYOUT.block_tokens))
    with Stores(tmp_path, timeout=30.0) as stores:
        store, server = stores.serving()
        with store.session(MODEL) as session:
            session.store(tokens, [content(b"%d" % n, GEOMETRY.nbytes) for n in range(130)])
            keys = [BlockKey(bytes(digest) + WHO.group) for digest in session.chain(tokens).digests]
        with closing(server):
            results, *_ = read(store, server.address, keys)
            assert results == [True] * 130
            assert server.statistics().requests == 3
