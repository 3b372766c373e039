"""Can a tenant tell by the time of a match that another has a prompt?

One tenant has cached some prompts, through the node that both use. A second asks for those, for as many that nobody
has, and for as many of its own, each prompt once, in an order that was drawn. It measures as well as it can: the names
are made before, and it asks again without a pause until the node says that no more is to come.

No difference is to be found between the first two. That the third is found easily says that the test would have seen
one; the interval says how small a one.
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
"""Who has cached a prompt: nobody, another tenant, or the one who asks."""
_WARM_UP = "warm-up"
_MODEL = kvtide.Model(TINY, "probe")
_BLOCKS = 2
"""Of a prompt."""
_THEIRS, _OURS = (Tenant(name, name.encode().ljust(32)) for name in ("another", "who asks"))

Times = npt.NDArray[np.float64]

_VERDICTS: dict[str, tuple[str, float, Literal["higher", "lower"]]] = {
    OTHER: ("by another tenant", 0.01, "higher"),
    OWN: ("by who asks", 1e-6, "lower"),
}
"""Who has cached it, and what p must be at least, to be chance, or at most, to be none."""


def probe(settings: Settings) -> Iterator[BenchRecord]:
    """Matches of prompts that another tenant has cached, and that nobody has."""
    yield from _at_node(settings, "dram", {})
    with tempfile.TemporaryDirectory(dir=settings.folder, prefix="kvtide-bench-") as folder:
        yield from _at_node(settings, "files", {"path": folder})


def _at_node(settings: Settings, where: str, storage: dict[str, str]) -> Iterator[BenchRecord]:
    """With ``storage``, what who asks has itself was written by others there, so that the node has to look for it."""
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
    """Store these prompts, and wait until storage has them, if there is one."""
    blocks = [np.zeros(TINY.geometry["full"].nbytes, np.uint8)] * _BLOCKS
    with home.session(_MODEL, tenant) as session:
        for tokens in prompts:
            while session.store(tokens, blocks).dropped:  # on a busy machine a node may answer too late
                time.sleep(0.1)
    assert home.flush(600)


def _ask(session: Session, probes: Sequence[tuple[str, Chain]]) -> dict[str, Times]:
    """The microseconds until it is known how much there is of each prompt, by kind."""
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
    """What the times of probes tell: nothing of others, and very well what is one's own."""
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
