"""Measure the store beside its peers, and write records, plots and ``docs/benchmarks.md``.

``python -m bench [FIGURE ...] [--no-peers] [--report]``: the figures are those of ``kvtide bench store``. Records go
to ``bench/results``; a figure that is not measured this time keeps its last one. ``--report`` only writes the page.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.peers.client import Peer
from bench.report import RESULTS, write_report
from kvtide.benchmarks import FIGURES, run
from kvtide.benchmarks.record import Contestant, Sample
from kvtide.benchmarks.settings import NoPeers, Settings

LMCACHE_DISK = ("fs_native_odirect", "legacy_odirect")
"""Its best ways to a disk; those through the page cache end before the bytes are on it."""


def _samples(answer: Mapping[str, Any]) -> dict[str, Sample]:
    return {
        task: Sample(answer[task]["seconds"][0], answer[task]["cpu_seconds"][0], answer["bytes"])
        for task in ("store", "load")
    }


class RealPeers:
    """LMCache and vLLM's file tier, each in a process and an environment of its own."""

    def __init__(self, stack: ExitStack) -> None:
        self._lmcache = stack.enter_context(Peer("lmcache"))
        self._vllm = stack.enter_context(Peer("vllm"))

    def match(self) -> Mapping[str, Contestant]:
        def ask(mode: str) -> Contestant:
            def contestant() -> Mapping[str, Sample]:
                answer = self._lmcache.ask(op="match", tokens=131072, block_tokens=256, rounds=1)[mode]
                return {"match": Sample(answer["wall_ms"][0] / 1e3, answer["cpu_ms"][0] / 1e3)}

            return contestant

        return {"lmcache mp": ask("mp"), "lmcache legacy, pinned": ask("legacy_pinned")}

    def dram(self, block: int, count: int) -> Mapping[str, Contestant]:
        def ask(mode: str) -> Contestant:
            return lambda: _samples(self._lmcache.ask(op="dram", block_bytes=block, count=count, rounds=1)[mode])

        return {"lmcache mp": ask("mp"), "lmcache legacy": ask("legacy")}

    def disk(self, block: int, count: int, folder: Path) -> Mapping[str, Contestant]:
        def ask(peer: Peer, mode: str) -> Contestant:
            return lambda: _samples(
                peer.ask(op="disk", modes=[mode], block_bytes=block, count=count, rounds=1, dir=str(folder))["modes"][
                    mode
                ]
            )

        return {
            **{f"lmcache {mode}": ask(self._lmcache, mode) for mode in LMCACHE_DISK},
            "vllm fs": ask(self._vllm, "fs"),
        }


def main(arguments: list[str]) -> int:
    names = [a for a in arguments if not a.startswith("-")]
    if unknown := [n for n in names if n not in FIGURES]:
        print(f"there is no figure {unknown[0]!r}; choose of {', '.join(FIGURES)}", file=sys.stderr)
        return 2
    if "--report" not in arguments:
        missed = 0
        with ExitStack() as stack:
            peers = NoPeers() if "--no-peers" in arguments else RealPeers(stack)
            folder = Path(tempfile.gettempdir())
            settings = Settings(False, folder, "make bench", _progress, peers)
            for record in run(settings, names):
                record.write(RESULTS)
                told = "" if record.ratio is None else f", {record.ratio:.2f} x {record.against}"
                print(f"{record.name}: {record.ours:g} {record.unit}{told}{_verdict(record.met)}", flush=True)
                missed += record.met is False
        print(f"{missed} bars missed" if missed else "all bars met")
    write_report()
    return 0


def _verdict(met: bool | None) -> str:
    return {True: "  met", False: "  MISSED", None: ""}[met]


def _progress(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
