"""Any number of models and tenants come and go; only those that are here cost anything."""

from __future__ import annotations

import pytest

from kvtide import Model, Store, Tenant
from kvtide import config as configuration
from kvtide.testing.interface import MODEL, PLAIN, check, data, length, prompt
from kvtide.transfer import residents


def open_store() -> Store:
    return Store(configuration.read(None, {}, dram={"budget": "4MiB", "segment": "1MiB"}))


def test_models_that_have_no_block_here_any_more_are_forgotten() -> None:
    with open_store() as store:
        for number in range(50):
            with store.session(Model(PLAIN, f"given:{number}")) as session:
                session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
                assert session.drop(prompt(1, 2)) == 2
        assert len(store.pipeline._residents._identities) == 1


def test_tenants_beyond_those_that_can_be_told_apart_are_served_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residents, "_TENANTS", 2)
    with open_store() as store:
        for name in ("one", "two", "three", "four"):
            with store.session(MODEL, Tenant(name, name.encode() * 16)) as session:
                session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
                with session.match(prompt(1, 2)) as match:
                    check(PLAIN, session.load(match).wait(), prompt(1, 2))
        assert store.index.tenants == 2


def test_tenants_that_have_gone_take_no_share_from_those_that_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tenant numbers are few and are reused: with one number for all, the tenant that stores most would have all."""
    monkeypatch.setattr(residents, "_TENANTS", 8)
    monkeypatch.setattr(residents, "_NEWCOMERS", 4)

    def tenant(name: str) -> Tenant:
        return Tenant(name, name.encode() * 32)

    with open_store() as store:
        for number in range(200):
            with store.session(MODEL, tenant(f"gone {number}")) as session:
                session.store(prompt(1), data(PLAIN, prompt(1)))
                assert session.drop(prompt(1)) == 1
        with store.session(MODEL, tenant("modest")) as modest, store.session(MODEL, tenant("greedy")) as greedy:
            some = prompt(*range(20))
            assert modest.store(some, data(PLAIN, some)).stored == 20
            for number in range(300):
                greedy.store(prompt(number), data(PLAIN, prompt(number)))
            assert store.statistics().counts["blocks evicted from dram"] > 100
            assert length(modest, some) == len(some)
