"""The store in memory: matching a prompt, and blocks to and from DRAM."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

import kvtide
from kvtide.benchmarks.copies import Copies, memcpy, records, through
from kvtide.benchmarks.record import BenchRecord, Rounds, Sample, compare, figure, timed
from kvtide.benchmarks.settings import MIB, SMALL, TOKENS, Settings, into, own_store, size_name
from kvtide.block import BLOCK_TOKENS

__all__ = ["dram", "match"]


def match(settings: Settings) -> Iterator[BenchRecord]:
    """A prompt of 131,072 tokens whose 512 blocks are all in DRAM: hash, find and lease them."""
    tokens = np.random.default_rng(0).integers(0, 128_256, TOKENS, np.uint32)
    as_list = tokens.tolist()
    block = np.zeros(SMALL.geometry["full"].nbytes, np.uint8)
    with own_store(dram={"budget": "64MiB", "segment": "8MiB"}) as store:
        session = store.session(kvtide.Model(SMALL, "bench"))
        session.store(tokens, [block] * (TOKENS // BLOCK_TOKENS))

        def once(given: Any) -> Sample:
            found: list[kvtide.Match] = []
            sample = timed(into(found, session.match), given)
            assert found[0].tokens == TOKENS
            found[0].release()
            return sample

        def ours() -> Mapping[str, Sample]:
            return {"list": once(as_list), "buffer": once(tokens)}

        gc.collect()
        gc.freeze()
        rounds = compare(
            {"kvtide": ours, **settings.peers.match()}, settings.rounds(31, 15), settings.progress, warm_up=2
        )
        gc.unfreeze()
    for task, bar in (("list", 2.2), ("buffer", 4.0)):
        peers = {n: [s.cpu_seconds * 1e3 for s in t["match"]] for n, t in rounds.items() if n != "kvtide"}
        best = "lmcache mp" if peers else ""
        yield figure(
            f"match-{task}",
            "CPU ms",
            [s.cpu_seconds * 1e3 for s in rounds["kvtide"][task]],
            better="lower",
            peers=peers,
            against=best,
            reference=peers.get(best),
            bar=bar if best else None,
            command=settings.command,
            note=f"131,072 tokens given as a {task}, 512 blocks, all present, named, found and leased",
        )


def dram(settings: Settings) -> Iterator[BenchRecord]:
    """Store from and load into callers' buffers, and load as views."""
    for nbytes in (32 * MIB, 2 * MIB):
        count = (settings.rounds(1024, 512) * MIB) // nbytes
        size = size_name(nbytes)
        rounds = _dram_rounds(settings, nbytes, count)
        yield from records(
            settings, f"dram-{{task}}-{size}", rounds, "memcpy on one core", 0.95, 1.0, "copies of both use all cores"
        )
        yield figure(
            f"dram-view-{size}",
            "us/block",
            [s.seconds / count * 1e6 for s in rounds["kvtide"]["view"]],
            better="lower",
            bar=20,
            command=settings.command,
            note="load as views, no copy",
        )


def _dram_rounds(settings: Settings, nbytes: int, count: int) -> Rounds:
    budget = count * nbytes + 256 * MIB
    with own_store(dram={"budget": budget, "prefault": True}) as store:
        store.dram.wait_prefault()
        ours = through(Copies(store, nbytes, count), count * nbytes)
        contestants = {"kvtide": ours, "memcpy": memcpy(nbytes, count), **settings.peers.dram(nbytes, count)}
        return compare(contestants, settings.rounds(11, 5), settings.progress)
