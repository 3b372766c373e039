"""What both drivers share: the line protocol, the clocks, the data and the cold page cache.

A driver answers JSON requests on stdin with JSON lines on stdout, but the peers print banners and
logs to stdout, some of them from C++ and some while they are being imported. So importing this
module, which a driver does before anything else, keeps the real stdout for the answers and points
file descriptor 1 at stderr.
"""

import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

import torch  # noqa: E402  (after stdout has been moved)

DISTINCT = 4
"""How many different source and destination buffers the blocks take in turn."""
ALIGNMENT = 4096
DEADLINE_S = 300.0
"""A peer that has not finished one batch by then is reported as failed."""

Operation = Callable[..., dict[str, Any]]


class Series:
    """Wall seconds and CPU seconds (user and system, all threads) of one step, a value a round."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []

    @contextmanager
    def timed(self) -> Iterator[None]:
        cpu, wall = time.process_time(), time.perf_counter()
        yield
        self.seconds.append(time.perf_counter() - wall)
        self.cpu_seconds.append(time.process_time() - cpu)

    def less(self, other: "Series") -> "Series":
        """What is left of this step without a part of it that ``other`` timed."""
        rest = Series()
        rest.seconds = [a - b for a, b in zip(self.seconds, other.seconds, strict=True)]
        rest.cpu_seconds = [a - b for a, b in zip(self.cpu_seconds, other.cpu_seconds, strict=True)]
        return rest

    def answer(self) -> dict[str, list[float]]:
        """The measured rounds; the first one was the warm-up."""
        return {"seconds": self.seconds[1:], "cpu_seconds": self.cpu_seconds[1:]}

    def answer_ms(self) -> dict[str, list[float]]:
        return {
            "cpu_ms": [1e3 * value for value in self.cpu_seconds[1:]],
            "wall_ms": [1e3 * value for value in self.seconds[1:]],
        }


class DiskSeries:
    """The timings of one disk mode. ``copy`` is the part of ``store`` that only fills DRAM."""

    def __init__(self) -> None:
        self.store, self.copy, self.load = Series(), Series(), Series()

    def answer(self, size: int) -> dict[str, Any]:
        rest = self.store.less(self.copy).answer()
        return {
            "store": self.store.answer(),
            "store_seconds_without_copy": rest["seconds"],
            "store_cpu_without_copy": rest["cpu_seconds"],
            "load": self.load.answer(),
            "bytes": size,
        }


def buffers(block_bytes: int) -> list[torch.Tensor]:
    """The source blocks: touched, and of random bytes that are the same in every run."""
    if block_bytes <= 0 or block_bytes % ALIGNMENT:
        raise ValueError(f"block_bytes must be a positive multiple of {ALIGNMENT}")
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(-(2**63), 2**63 - 1, (block_bytes // 8,), generator=generator).view(torch.uint8)
        for _ in range(DISTINCT)
    ]


def require_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare bit by bit, whatever element type the peer gave its memory."""
    if not torch.equal(found.contiguous().view(torch.uint8).reshape(-1), expected):
        raise RuntimeError("the peer returned other bytes than were stored")


def require_files(folder: Path, suffix: str, count: int, size: int) -> list[Path]:
    """The files of a finished store, which must all have their final name and size."""
    files = sorted(folder.rglob(f"*{suffix}"))
    if len(files) != count or any(file.stat().st_size != size for file in files):
        raise RuntimeError(f"expected {count} files of {size} bytes, found {len(files)}")
    return files


@contextmanager
def work_folder(parent: str, mode: str) -> Iterator[Path]:
    """A new folder under ``parent``, removed at the end. A driver that is killed leaves its own
    behind, and a peer would take the files in it for stored blocks; hence a new one each time."""
    Path(parent).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{mode}-", dir=parent) as folder:
        yield Path(folder)


def make_cold(files: Iterable[Path]) -> None:
    """Write the files back and drop them from the page cache."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def serve(version: str, operations: dict[str, Operation]) -> None:
    """Answer requests until stdin ends or a ``quit`` comes; a failed request is answered too."""
    # Importing a peer leaves millions of objects; a full collection in a timed part would take
    # 0.15 s to look at them. Engines freeze them too.
    gc.collect()
    gc.freeze()
    _answer({"ready": True, "version": version})
    default_threads = torch.get_num_threads()
    for line in sys.stdin:
        try:
            request = json.loads(line)
            name = request.pop("op")
            if name == "quit":
                break
            if name not in operations:
                raise ValueError(f"unknown op {name!r}; this peer knows {sorted(operations)}")
            torch.set_num_threads(request.pop("threads", default_threads))
            _answer(operations[name](**request))
        except Exception as error:  # noqa: BLE001  (it becomes the answer)
            traceback.print_exc()
            _answer({"error": f"{type(error).__name__}: {error}"})
    # The peers leave threads behind that a regular exit would wait for.
    os._exit(0)


def _answer(answer: dict[str, Any]) -> None:
    _answers.write(json.dumps(answer) + "\n")
