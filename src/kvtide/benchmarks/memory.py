"""The store in memory: matching a prompt, and blocks to and from DRAM."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np

import kvtide
from kvtide.benchmarks.record import Record, Rounds, Sample, compare, figure, timed
from kvtide.benchmarks.settings import BLOCK_TOKENS, MIB, TOKENS, Settings, block_sources, into, layout_of, size_name

__all__ = ["dram", "match"]


def match(settings: Settings) -> Iterator[Record]:
    """A prompt of 131,072 tokens whose 512 blocks are all in DRAM: name, find and lease them."""
    tokens = np.random.default_rng(0).integers(0, 128_256, TOKENS, np.uint32)
    as_list = tokens.tolist()
    tiny = kvtide.Layout.attention(layers=1, heads=1, head_dim=8)
    block = np.zeros(tiny.geometry["full"].nbytes, np.uint8)
    with kvtide.open(dram={"budget": "64MiB", "segment": "8MiB"}) as store:
        session = store.session(kvtide.Model(tiny, "bench"))
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


def dram(settings: Settings) -> Iterator[Record]:
    """Store from and load into callers' buffers, and load as views."""
    for nbytes in (32 * MIB, 2 * MIB):
        count = (settings.rounds(1024, 512) * MIB) // nbytes
        rounds = _dram_rounds(settings, nbytes, count)
        yield from _dram_records(settings, nbytes, rounds)


def _dram_rounds(settings: Settings, nbytes: int, count: int) -> Rounds:
    sources = block_sources(nbytes)
    target = np.zeros((count, nbytes), np.uint8)
    scratch = np.zeros((count, nbytes), np.uint8)

    def memcpy() -> Mapping[str, Sample]:
        def copy() -> None:
            for i in range(count):
                np.copyto(scratch[i], sources[i % 4])

        sample = timed(copy, nbytes=count * nbytes)
        return {"store": sample, "load": sample}

    with ExitStack() as stack:
        store = stack.enter_context(
            kvtide.open(dram={"budget": count * nbytes + 256 * MIB, "prefault": True}, nvme={"path": ""})
        )
        store.dram.wait_prefault()
        session = store.session(kvtide.Model(layout_of(nbytes), "bench"))
        chain = session.chain(np.arange(count * BLOCK_TOKENS, dtype=np.uint32))
        blocks = [sources[i % 4] for i in range(count)]

        def ours() -> Mapping[str, Sample]:
            samples = {"store": timed(session.store, chain, blocks, nbytes=count * nbytes)}
            with session.match(chain) as found:
                samples["load"] = timed(lambda: session.load(found, list(target)).wait(), nbytes=count * nbytes)
                samples["view"] = timed(lambda: session.load(found).wait(), nbytes=count * nbytes)
            assert (target[-1] == blocks[-1]).all(), "a wrong byte"
            session.drop(chain)
            return samples

        contestants = {"kvtide": ours, "memcpy": memcpy, **settings.peers.dram(nbytes, count)}
        return compare(contestants, settings.rounds(11, 5), settings.progress)


def _dram_records(settings: Settings, nbytes: int, rounds: Rounds) -> Iterator[Record]:
    size = size_name(nbytes)
    peers = {n: t for n, t in rounds.items() if n not in ("kvtide", "memcpy")}
    for task in ("store", "load"):
        limit = [s.speed for s in rounds["memcpy"][task]]
        ours = [s.speed for s in rounds["kvtide"][task]]
        yield figure(
            f"dram-{task}-{size}",
            "GB/s",
            ours,
            better="higher",
            peers={n: [s.speed for s in t[task]] for n, t in peers.items()},
            limit=limit,
            against="memcpy on one core",
            reference=limit,
            bar=0.95,
            command=settings.command,
        )
        if peers:
            best = max(peers, key=lambda n: statistics.median(s.speed for s in peers[n][task]))
            yield figure(
                f"dram-{task}-{size}-against-peer",
                "GB/s",
                ours,
                better="higher",
                against=best,
                reference=[s.speed for s in peers[best][task]],
                bar=1.0,
                command=settings.command,
                note="copies of both use all cores",
            )
    count = settings.rounds(1024, 512) * MIB // nbytes
    yield figure(
        f"dram-view-{size}",
        "us/block",
        [s.seconds / count * 1e6 for s in rounds["kvtide"]["view"]],
        better="lower",
        bar=20,
        command=settings.command,
        note="load as views, no copy",
    )
