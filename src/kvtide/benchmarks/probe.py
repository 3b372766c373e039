"""Can a tenant tell by the time of a match that another tenant has cached a prompt?

One tenant has cached some prompts, through the node that both use. A second tenant looks up those, as many that nobody
has cached, and as many of its own, each prompt once, in random order. It measures as precisely as it can: the keys are
computed before, and it asks again without a pause until the node says that no more blocks will follow.

There must be no detectable difference between the first two. That the third is clearly detected shows that the test
would have found one; the interval shows how small a difference it can find.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from random import Random
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import kvtide
from kvtide import Chain, Client, Session, Store, Tenant
from kvtide.benchmarks.difference import difference
from kvtide.benchmarks.node import running
from kvtide.benchmarks.record import BenchRecord, machine
from kvtide.benchmarks.settings import MIB, TINY, Settings, own_store

__all__ = ["NOBODY", "OTHER", "OWN", "probe", "verdicts"]

NOBODY, OTHER, OWN = "nobody", "other", "own"
"""Who has cached a prompt: nobody, another tenant, or the tenant that asks."""
_WARM_UP = "warm-up"
_MODEL = kvtide.Model(TINY, "probe")
_BLOCKS = 2
"""Blocks of a prompt."""
_THEIRS, _OURS = (Tenant(name, name.encode().ljust(32)) for name in ("another", "who asks"))

Times = npt.NDArray[np.float64]

_VERDICTS: dict[str, tuple[str, float, Literal["higher", "lower"]]] = {
    OTHER: ("by another tenant", 0.01, "higher"),
    OWN: ("by who asks", 1e-6, "lower"),
}
"""For each kind who has cached it, and the minimum p for chance, or the maximum p for a real difference."""


def probe(settings: Settings) -> Iterator[BenchRecord]:
    """Matches of prompts that another tenant has cached, and of prompts that nobody has cached."""
    yield from _at_node(settings, "dram", {})
    with tempfile.TemporaryDirectory(dir=settings.folder, prefix="kvtide-bench-") as folder:
        yield from _at_node(settings, "files", {"path": folder})


def _at_node(settings: Settings, where: str, storage: dict[str, str]) -> Iterator[BenchRecord]:
    """With ``storage``, the asking tenant's own prompts were written there by others, so that the node has to look
    there."""
    count = settings.rounds(10_000, 500)
    budget = 4 * count * _BLOCKS * TINY.geometry["full"].footprint + 64 * MIB
    random = np.random.default_rng(0)
    prompts = {
        kind: random.integers(0, 1 << 31, (number, _BLOCKS * TINY.block_tokens), np.uint32)
        for kind, number in {NOBODY: count, OTHER: count, OWN: count, _WARM_UP: 200}.items()
    }
    with ExitStack() as stack:
        path, _ = stack.enter_context(running(budget, **{f"KVTIDE_FILES_{n.upper()}": v for n, v in storage.items()}))
        node = stack.enter_context(kvtide.connect(f"unix:{path}"))
        settings.progress(f"{where}: prompts are stored")
        _keep(node, _THEIRS, prompts[OTHER])
        if storage:
            elsewhere: Any = {"dram": {"budget": budget}, "files": storage}
            with own_store(**elsewhere) as store:
                _keep(store, _OURS, prompts[OWN])
        else:
            _keep(node, _OURS, prompts[OWN])
        session = stack.enter_context(node.session(_MODEL, _OURS))
        probes = [(kind, session.chain(tokens)) for kind, mine in prompts.items() for tokens in mine]
        _ask(session, [probe for probe in probes if probe[0] == _WARM_UP])
        probes = [probe for probe in probes if probe[0] != _WARM_UP]
        Random(0).shuffle(probes)
        settings.progress(f"{where}: {len(probes)} probes")
        times = _ask(session, probes)
    yield from verdicts(f"probe-node-{where}", "us", times, settings.command)


def _keep(home: Store | Client, tenant: Tenant, prompts: npt.NDArray[np.uint32]) -> None:
    """Store these prompts, and wait until the storage has them, if there is one."""
    blocks = [np.zeros(TINY.geometry["full"].nbytes, np.uint8)] * _BLOCKS
    with home.session(_MODEL, tenant) as session:
        for tokens in prompts:
            while session.store(tokens, blocks).dropped:  # on a busy machine a node may answer too late
                time.sleep(0.1)
    assert home.flush(600)


def _ask(session: Session, probes: Sequence[tuple[str, Chain]]) -> dict[str, Times]:
    """The microseconds until the length of each prompt's match is known, by kind."""
    found: dict[str, list[float]] = {}
    for kind, chain in probes:
        start, pending = time.perf_counter(), True
        while pending:
            with session.match(chain) as match:
                pending = match.pending
        found.setdefault(kind, []).append((time.perf_counter() - start) * 1e6)
        assert kind == OWN or not match.tokens
    return {kind: np.array(times) for kind, times in found.items()}


def verdicts(name: str, unit: str, times: Mapping[str, Times], command: str) -> Iterator[BenchRecord]:
    """The results: no difference for other tenants' prompts, and a clear one for the tenant's own."""
    for kind, (whose, bar, better) in _VERDICTS.items():
        found = difference(times[NOBODY], times[kind])
        lowest, highest = sorted(float(f"{p:.3g}") for p in (found.larger, found.other))
        yield BenchRecord(
            name=f"{name}-{kind}",
            unit="p",
            better=better,
            ours=min(1.0, 2 * lowest),
            spread=(lowest, highest),
            bar=bar,
            met=found.p >= bar if better == "higher" else found.p <= bar,
            rounds=len(times[kind]),
            command=command,
            machine=machine(),
            note=f"cached by nobody, and {whose}: {found.told(unit)}",
        )
