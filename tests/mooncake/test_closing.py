"""Closing a client of Mooncake while it is opened, with a library in its place that does what a test needs."""

from __future__ import annotations

import threading

import pytest

from kvtide.testing.interface import until
from kvtide.tiers.shared import mooncake_client
from kvtide.tiers.shared.mooncake_client import MooncakeClient, OpenedStore, parse_address


class _Store:
    """A client of the library, with memory that it gives to the pool."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_a_client_that_was_opened_too_late_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    store, opens, goes_on, left = _Store(), threading.Event(), threading.Event(), list[None]()

    def opening(_: MooncakeClient) -> OpenedStore:
        opens.set()
        goes_on.wait(60)
        return OpenedStore(store)

    monkeypatch.setattr(mooncake_client, "load_library", object)
    monkeypatch.setattr(mooncake_client, "_PATIENCE", 0.01)
    monkeypatch.setattr(mooncake_client, "_leave_at_once", lambda: left.append(None))
    monkeypatch.setattr(MooncakeClient, "fetch", lambda *_: b"")
    monkeypatch.setattr(MooncakeClient, "_open", opening)
    client = MooncakeClient(parse_address("mooncake://127.0.0.1:9"))
    assert opens.wait(60)
    client.close()
    assert left, "the library would wait for that thread when the process exits"
    goes_on.set()
    until(lambda: store.closed)
