"""Blocks to and from a shared filesystem, verified, compared with plain file I/O with a new file for every block."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from kvtide.benchmarks.disk import THREADS, Below, filled, rehearsed
from kvtide.benchmarks.record import BenchRecord, Sample, compare, figure, timed
from kvtide.benchmarks.settings import MIB, Settings, size_name
from kvtide.block import Span

__all__ = ["files"]


class RawFiles:
    """The limit: whole blocks by direct I/O with the tier's number of threads, each into a file of its own that is
    renamed when written."""

    def __init__(self, folder: Path, nbytes: int, count: int) -> None:
        self._folder, self._nbytes, self._count = folder, nbytes, count
        folder.mkdir()
        self._view = filled(nbytes, count)
        self._writers, self._readers = ThreadPoolExecutor(THREADS), ThreadPoolExecutor(2 * THREADS)

    def __call__(self) -> Mapping[str, Sample]:
        total = self._nbytes * self._count
        for file in self._folder.iterdir():
            file.unlink()
        return {
            "store": timed(self._all, self._write, self._writers, nbytes=total),
            "load": timed(self._all, self._read, self._readers, nbytes=total),
        }

    def _all(self, one: Callable[[Path, Span], int], pool: ThreadPoolExecutor) -> None:
        def whole(i: int) -> None:
            span = self._view[i * self._nbytes : (i + 1) * self._nbytes]
            assert one(self._folder / str(i), span) == self._nbytes

        list(pool.map(whole, range(self._count)))

    @staticmethod
    def _write(file: Path, span: Span) -> int:
        new = file.with_suffix(".new")
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        count = os.pwritev(fd, [span], 0)
        os.close(fd)
        new.replace(file)
        return count

    @staticmethod
    def _read(file: Path, span: Span) -> int:
        fd = os.open(file, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        count = os.preadv(fd, [span], 0)
        os.close(fd)
        return count

    def close(self) -> None:
        self._writers.shutdown()
        self._readers.shutdown()


def files(settings: Settings) -> Iterator[BenchRecord]:
    """Store to and load from a shared filesystem, verified, compared with plain file I/O with as many threads."""
    for nbytes in (32 * MIB, 2 * MIB):
        count = settings.rounds(1024, 256) * MIB // nbytes
        with tempfile.TemporaryDirectory(dir=settings.folder, prefix="kvtide-bench-") as name, ExitStack() as stack:
            folder = Path(name)
            ours: dict[str, Below | RawFiles] = {
                "kvtide": Below(nbytes, count, "files", {"path": str(folder / "ours"), "threads": THREADS}),
                "raw": RawFiles(folder / "raw", nbytes, count),
            }
            for one in ours.values():
                stack.callback(one.close)
            contestants = {n: rehearsed(one) for n, one in ours.items()} | dict(
                settings.peers.disk(nbytes, count, folder)
            )
            # A machine's disk may be at half its speed for a second, every few seconds: more rounds than elsewhere.
            rounds = compare(contestants, settings.rounds(13, 3), settings.progress)
        # Writing into the page cache is not writing to the disk.
        direct = {n: t for n, t in rounds.items() if n not in ours and "buffered" not in n}
        for task in ("store", "load"):
            speeds = {n: [s.speed for s in t[task]] for n, t in rounds.items()}
            yield figure(
                f"files-{task}-{size_name(nbytes)}",
                "GB/s",
                speeds["kvtide"],
                better="higher",
                peers={n: speeds[n] for n in direct},
                limit=speeds["raw"],
                against="a new file for every block, by O_DIRECT at the same depth",
                reference=speeds["raw"],
                bar=0.85,
                command=settings.command,
            )
            for name, which, bar in _peers({n: speeds[n] for n in direct}):
                yield figure(
                    f"files-{task}-{size_name(nbytes)}-against-{name}",
                    "GB/s",
                    speeds["kvtide"],
                    better="higher",
                    against=which,
                    reference=speeds[which],
                    bar=bar,
                    command=settings.command,
                )


def _peers(speeds: Mapping[str, Sequence[float]]) -> Iterator[tuple[str, str, float | None]]:
    """The systems to compare with, and the target: vLLM's own tier, which does not verify, and the fastest."""
    if "vllm fs" in speeds:
        yield "vllm", "vllm fs", 1.0
    if speeds:
        yield "peer", max(speeds, key=lambda n: statistics.median(speeds[n])), None
