"""Probes of a node say whose prompts can be seen. Times are not asserted: the benchmark is there for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtide.benchmarks.probe import NOBODY, OTHER, OWN, probe, verdicts
from kvtide.benchmarks.settings import NoPeers, Settings


def test_probes_of_both_ways_to_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIDE_VALKEY_URL", "valkey://127.0.0.1:1")  # nothing of the caller's own settings is used
    said: list[str] = []
    records = {r.name: r for r in probe(Settings(True, tmp_path, "a test", said.append, NoPeers()))}
    assert list(records) == [f"probe-node-{where}-{kind}" for where in ("dram", "files") for kind in (OTHER, OWN)]
    assert {r.rounds for r in records.values()} == {500}
    assert not list(tmp_path.iterdir())


def test_a_tenant_who_can_be_seen_is_told() -> None:
    random = np.random.default_rng(0)
    times = {kind: random.lognormal(size=2000) for kind in (NOBODY, OTHER, OWN)}
    assert [r.met for r in verdicts("probe", "us", times, "a test")] == [True, False]
    times[OTHER] += 0.3
    times[OWN] += 1
    leak, clear = verdicts("probe", "us", times, "a test")
    assert (leak.met, clear.met) == (False, True)
    assert "by another tenant" in leak.note
