"""Would summaries of nodes (Bloom filters) replace the entries of the directory in a very large fleet?

::

    python -m bench.summaries [--blocks N] [--churn BLOCKS_PER_SECOND] [--prompts PER_SECOND] [NODES ...]

Every node has a filter of its blocks, of 10 bits for a block in buckets of 512 bits, and fetches those of all others.
Measured here are the time to make one, its false positives, and what a prompt of 512 blocks costs that is looked up in
the filters of all nodes: each of its blocks, or the first three, and the rest only of nodes that have these. Traffic
follows from sizes: each block that a node stores or removes is told to all others, in 8 bytes, or the filters are
fetched anew each minute. The directory has the bytes of ``python -m bench --no-peers directory``.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import numpy.typing as npt

_BITS, _PROBES = 10, 6
_WANTED, _FIRST = 512, 3
_NEWS = 8
"""Bytes that tell of a block."""
_LOOKUP = 33_000 + 9_000
"""Bytes of a lookup of 512 blocks in the directory, both ways."""
_ENTRY = 17
"""Bytes of the directory for a block that one node has, with ten million; see docs/benchmarks.md."""
_MINUTE = 60

Marks = npt.NDArray[np.uint64]
Filter = npt.NDArray[np.uint8]


def _places(marks: Marks, nbytes: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """The bytes of a filter, and the bit of each, that belong to blocks."""
    bucket = (marks >> np.uint64(54 - 22)) % np.uint64(nbytes // 64)
    bits = np.stack([(marks * np.uint64(2 * i + 0x9E3779B97F4A7C15)) >> np.uint64(55) for i in range(_PROBES)], 1)
    at = (bucket[:, None] << np.uint64(6)) + (bits >> np.uint64(3))
    return at.astype(np.int64), (1 << (bits & np.uint64(7))).astype(np.uint8)


def _filter(marks: Marks, nbytes: int) -> Filter:
    found = np.zeros(nbytes, np.uint8)
    at, bit = _places(marks, nbytes)
    np.bitwise_or.at(found, at.ravel(), bit.ravel())
    return found


def _has(filters: npt.NDArray[np.uint8], marks: Marks) -> npt.NDArray[np.bool_]:
    """Which nodes (rows) may have which blocks (columns)."""
    at, bit = _places(marks, filters.shape[1])
    found: npt.NDArray[np.bool_] = ((filters[:, at.ravel()] & bit.ravel()) != 0).reshape(len(filters), *at.shape).all(2)
    return found


def _prompt(filters: npt.NDArray[np.uint8], marks: Marks) -> tuple[int, int]:
    """Nodes that may have the first block, and those that may have the first few; the rest is looked up of these."""
    first = _has(filters, marks[:_FIRST])
    candidates = np.flatnonzero(first.all(1))
    _has(filters[candidates], marks)
    return int(first[:, 0].sum()), len(candidates)


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.summaries", description=__doc__.partition("\n")[0])
    parser.add_argument("nodes", nargs="*", type=int)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--churn", type=float, default=100.0, help="blocks that a node stores and removes in a second")
    parser.add_argument("--prompts", type=float, default=10.0, help="new prompts of a node in a second")
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    nbytes = given.blocks * _BITS // 8 // 64 * 64
    began = time.perf_counter()
    one = _filter(rng.integers(0, 2**64, given.blocks, np.uint64), nbytes)
    made = time.perf_counter() - began
    false = float(_has(one[None], rng.integers(0, 2**64, 100_000, np.uint64)).mean())
    print(f"a filter of {given.blocks:,} blocks: {nbytes / 2**20:.2f} MiB, {made:.2f} s, {false:.2%} false")
    print("nodes   memory  every block: ms  first three: ms  nodes asked in vain: first block  first three")
    for nodes in given.nodes or (64, 256, 1024):
        filters = np.empty((nodes, nbytes), np.uint8)
        for row in filters:  # rolled by whole buckets: as false as the first one, of other blocks
            row[:] = np.roll(one, 64 * int(rng.integers(0, nbytes // 64)))
        whole, few, vain = [], [], []
        for _ in range(12):
            marks = rng.integers(0, 2**64, _WANTED, np.uint64)
            began = time.perf_counter()
            _has(filters, marks)
            whole.append(1000 * (time.perf_counter() - began))
            began = time.perf_counter()
            vain.append(_prompt(filters, marks))
            few.append(1000 * (time.perf_counter() - began))
        vain += [_prompt(filters, rng.integers(0, 2**64, _FIRST, np.uint64)) for _ in range(100)]
        first, three = (statistics.mean(one) for one in zip(*vain, strict=True))
        print(
            f"{nodes:5}  {filters.nbytes / 2**20:5.0f} M  {statistics.median(whole):15.1f}  "
            f"{statistics.median(few):15.2f}  {first:32.2f}  {three:11.2f}",
            flush=True,
        )
        del filters
    print(
        f"\nMB/s, if each node stores {given.churn:g} blocks/s, removes as many and has {given.prompts:g} new prompts/s"
    )
    print("nodes  a node's: news  filters each minute  directory | Valkey's: news  filters  directory | GB of Valkey:")
    for nodes in given.nodes or (64, 256, 1024):
        news = (nodes - 1) * 2 * given.churn * _NEWS / 1e6
        anew = (nodes - 1) * nbytes / _MINUTE / 1e6
        asked = given.prompts * _LOOKUP / 1e6
        there = nodes * nbytes / 1e9, nodes * given.blocks * _ENTRY / 1e9
        print(
            f"{nodes:5}  {news:14.2f}  {anew:19.1f}  {asked:9.2f} | {nodes * news:14.0f}  {nodes * anew:7.0f}  "
            f"{nodes * asked:9.1f} | filters {there[0]:.2f}, entries {there[1]:.1f}"
        )


if __name__ == "__main__":
    main()
