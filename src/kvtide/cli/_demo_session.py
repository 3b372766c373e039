"""The session that ``kvtide demo`` plays, and the measuring of it.

One document is read by several users, each of whom then talks about it for a few turns: the document's blocks are
stored once and reused by all. An engine would compute the KV of new tokens; here a block's bytes follow from its key,
by a random pattern that is the same in every run, so that whatever comes back can be checked byte by byte.

The limits, a plain memcpy and plain direct reads, are measured in turns with ours: machines are shared and noisy.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtide.block import Layout, Span
from kvtide.config import Config, Dram, Nvme
from kvtide.errors import ConfigError
from kvtide.index.keys import Model
from kvtide.session import Session
from kvtide.store import Store
from kvtide.tiers.codec import Scratch

__all__ = ["Checker", "Measure", "Result", "Shape", "affordable", "filesystem", "play", "scratch_folder"]

USERS, TURNS = 6, 3
_LEAST = 24
"""Blocks without which there is no session worth the name."""
_RING = 4
"""Blocks that are made, copied and read at a time."""
_WORDS = 1 << 15
"""Words that are compared at a time: few enough to stay in the processor's cache."""

Words = npt.NDArray[np.uint64]
Progress = Callable[[str, int, int], None]
"""Called with a phase, the blocks done in it, and the blocks of it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How many blocks the document and each turn have."""

    layout: Layout
    document: int
    turn: int

    @classmethod
    def of(cls, layout: Layout, nbytes: int) -> Shape:
        """A session of about ``nbytes``: a quarter of it is the document."""
        blocks = nbytes // layout.geometry["full"].nbytes
        if blocks < _LEAST:
            least = _LEAST * layout.geometry["full"].nbytes / 2**30
            raise ConfigError(f"{nbytes / 2**30:.3g} GiB are too few for this session; give --gib {least:.3g} or more")
        turn = max(1, round(blocks * 0.75 / (USERS * TURNS)))
        return cls(layout, blocks - USERS * TURNS * turn, turn)

    @property
    def prompt(self) -> int:
        """Blocks of one user's whole conversation."""
        return self.document + TURNS * self.turn

    @property
    def blocks(self) -> int:
        return self.document + USERS * TURNS * self.turn

    @property
    def block(self) -> int:
        """Bytes of a block."""
        return self.layout.geometry["full"].nbytes

    @property
    def memory(self) -> int:
        """The budget of DRAM: half of the session, or a little more, so that two conversations fit."""
        return max(self.blocks // 2, self.document + 2 * TURNS * self.turn) * self.block

    def tokens(self, user: int) -> npt.NDArray[np.uint32]:
        """What one user's conversation consists of; all start with the document."""
        size = self.layout.block_tokens
        document = np.random.default_rng(1).integers(0, 128_256, self.document * size, np.uint32)
        turns = np.random.default_rng([2, user]).integers(0, 128_256, TURNS * self.turn * size, np.uint32)
        return np.concatenate([document, turns])


class Checker:
    """Makes blocks from their keys, and tells whether bytes are those of a key."""

    def __init__(self, nbytes: int) -> None:
        self._pattern: Words = np.random.default_rng(0).integers(0, 2**64, nbytes // 8, np.uint64)
        self._part = np.empty(min(_WORDS, len(self._pattern)), np.uint64)
        self.blocks = 0
        self.nbytes = 0
        self.wrong = 0
        """Bytes that were not what was stored."""

    @staticmethod
    def _word(key: bytes) -> np.uint64:
        return np.uint64(int.from_bytes(key[:8], "little"))

    def fill(self, out: Words, key: bytes) -> None:
        np.bitwise_xor(self._pattern, self._word(key), out=out)

    def check(self, block: Any, key: bytes) -> None:
        found: Words = np.frombuffer(block, np.uint64)
        word = self._word(key)
        self.blocks += 1
        self.nbytes += len(found) * 8
        if len(found) != len(self._pattern):
            self.wrong += len(self._pattern) * 8
            return
        for at in range(0, len(found), len(self._part)):
            wanted = self._pattern[at : at + len(self._part)]
            part = self._part[: len(wanted)]
            np.bitwise_xor(found[at : at + len(part)], word, out=part)
            if not np.array_equal(part, wanted):
                self.wrong += int(np.count_nonzero(part.view(np.uint8) != wanted.view(np.uint8)))


@dataclass(slots=True)
class Measure:
    """Bytes moved one way, and the seconds that it took."""

    nbytes: int = 0
    seconds: float = 0.0

    @property
    def speed(self) -> float:
        """GB/s."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0

    @contextlib.contextmanager
    def timing(self, nbytes: int = 0) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start
        self.nbytes += nbytes


@dataclass(slots=True)
class Result:
    """What a session showed."""

    shape: Shape
    memcpy: Measure = field(default_factory=Measure)
    raw_read: Measure = field(default_factory=Measure)
    stored: Measure = field(default_factory=Measure)
    views: Measure = field(default_factory=Measure)
    copies: Measure = field(default_factory=Measure)
    nvme: Measure = field(default_factory=Measure)
    shared: int = 0
    """Blocks that a user's prompt had in common with another's and that were not stored again."""
    talk_seconds: float = 0.0
    """From the first block until all were on NVMe, the making of blocks included."""
    close_seconds: float = 0.0
    open_seconds: float = 0.0
    reused_tokens: int = 0
    """Tokens that need not be computed after the restart."""
    reused_seconds: float = 0.0
    """What it took to have them in DRAM."""
    from_nvme: int = 0
    from_dram: int = 0
    """Bytes after the restart, by where they were."""
    missing: int = 0
    """Blocks that should have been there and were not."""
    verified_blocks: int = 0
    verified_bytes: int = 0
    wrong_bytes: int = 0


def play(shape: Shape, folder: Path, progress: Progress) -> Result:
    """Play the session with a tier of its own in ``folder``."""
    result = Result(shape)
    checker = Checker(shape.block)
    model = Model(shape.layout, weights="given:demo")
    made, engine = ([_buffer(shape.block) for _ in range(_RING)] for _ in range(2))

    with _open(shape, folder) as store:
        store.dram.wait_prefault()
        start = time.perf_counter()
        _talk(store.session(model), store, shape, checker, made, result, progress)
        result.talk_seconds = time.perf_counter() - start
        _reload_from_dram(store.session(model), shape, checker, made, engine, result, progress)
        start = time.perf_counter()
    result.close_seconds = time.perf_counter() - start

    start = time.perf_counter()
    with _open(shape, folder) as store:
        result.open_seconds = time.perf_counter() - start
        store.dram.wait_prefault()
        with _RawReader(folder, shape.block) as raw:
            _reload_from_nvme(store, store.session(model), shape, checker, raw, result, progress)
    result.verified_blocks, result.verified_bytes = checker.blocks, checker.nbytes
    result.wrong_bytes = checker.wrong
    return result


def _open(shape: Shape, folder: Path) -> Store:
    # Straight from a Config: a kvtide.toml or an environment that is about something else changes nothing here.
    segment = min(256 << 20, 8 * shape.block)
    return Store(
        Config(
            dram=Dram(budget=shape.memory, segment=segment, prefault=True),
            nvme=Nvme(path=str(folder), budget=max(64 << 20, 2 * shape.blocks * shape.block), segment=segment),
        )
    )


def _talk(
    session: Session,
    store: Store,
    shape: Shape,
    checker: Checker,
    made: list[Words],
    result: Result,
    progress: Progress,
) -> None:
    """Every user reads the document and talks; what is not in the store yet is "computed" and stored."""
    size = shape.layout.block_tokens
    waiting = done = 0
    for user in range(USERS):
        tokens = shape.tokens(user)
        chain = session.chain()
        borders = [0, *(shape.document + turn * shape.turn for turn in range(TURNS + 1))]
        for first, last in pairwise(borders):
            chain.extend(tokens[first * size : last * size])
            with session.match(chain) as match:
                have = match.blocks
            result.shared += max(0, have - first)
            for start in range(have, chain.blocks, _RING):
                blocks = made[: min(_RING, chain.blocks - start)]
                for i, buffer in enumerate(blocks, start):
                    checker.fill(buffer, chain.digests[i])
                nbytes = len(blocks) * shape.block
                with result.stored.timing(nbytes):
                    session.store(chain, blocks, start=start)
                # An engine's prefill gives the disk time to keep up. We have none, so we wait instead.
                waiting += nbytes
                if waiting >= shape.memory // 4:
                    store.flush()
                    waiting = 0
                done += len(blocks)
                progress("store", done, shape.blocks)
    store.flush()


def _reload_from_dram(
    session: Session,
    shape: Shape,
    checker: Checker,
    made: list[Words],
    engine: list[Words],
    result: Result,
    progress: Progress,
) -> None:
    """The latest conversations, which are still in memory: as views, then as copies into an engine's own."""
    size = shape.layout.block_tokens
    total = 2 * shape.prompt
    for number, user in enumerate((USERS - 1, USERS - 2)):
        chain = session.chain(shape.tokens(user))
        with session.match(chain) as match:
            if not match.ready:
                result.missing += shape.prompt - match.blocks
            with result.views.timing(match.blocks * shape.block):
                views = session.load(match).wait().blocks
            result.missing += match.blocks - len(views)
            for i, view in enumerate(views):
                checker.check(view, chain.digests[i])
            progress("reload from DRAM, as views", (number + 1) * shape.prompt, total)
    for number, user in enumerate((USERS - 1, USERS - 2)):
        tokens = shape.tokens(user)
        for start in range(0, shape.prompt, _RING):
            stop = min(start + _RING, shape.prompt)
            for source, target in zip(made, engine[: stop - start], strict=False):
                with result.memcpy.timing(target.nbytes):
                    np.copyto(target, source)
            chain = session.chain(tokens[: stop * size])
            with session.match(chain, have=start * size) as match:
                wanted = match.blocks - start
                result.missing += stop - start - wanted
                with result.copies.timing(wanted * shape.block):
                    session.load(match, into=engine[:wanted]).wait()
            for i in range(wanted):
                checker.check(engine[i], chain.digests[start + i])
            progress("reload from DRAM, as copies", number * shape.prompt + stop, total)


def _reload_from_nvme(
    store: Store,
    session: Session,
    shape: Shape,
    checker: Checker,
    raw: _RawReader,
    result: Result,
    progress: Progress,
) -> None:
    """After the restart memory is empty: every conversation again, the document from disk only once."""
    for user in range(USERS):
        chain = session.chain(shape.tokens(user))
        before = _read_blocks(store)
        # Into memory of the same arena: the limit of the disk depends on where it writes to.
        other = session.chain(np.full(TURNS * shape.turn * shape.layout.block_tokens, user, np.uint32))
        with session.reserve(other) as reservation:
            raw.read(reservation.views, result.raw_read)
        with session.match(chain) as match:
            once = Measure()
            with once.timing():
                loaded = session.load(match).wait()
            views = loaded.blocks
            cold = (_read_blocks(store) - before) * shape.block
            result.nvme.nbytes += cold
            result.nvme.seconds += once.seconds
            result.from_nvme += cold
            result.from_dram += len(views) * shape.block - cold
            result.reused_tokens += loaded.tokens
            result.reused_seconds += once.seconds
            result.missing += shape.prompt - len(views)
            for i, view in enumerate(views):
                checker.check(view, chain.digests[i])
            progress("reload from NVMe", (user + 1) * shape.prompt, USERS * shape.prompt)


def _read_blocks(store: Store) -> int:
    return store.statistics().counts.get("blocks read from nvme", 0)


# -- the limits -------------------------------------------------------------------------------------------


def _buffer(nbytes: int) -> Words:
    """A block of an engine's: page-aligned, its pages taken."""
    found: Words = np.frombuffer(Scratch().get(nbytes), np.uint64)
    found.fill(0)
    return found


class _RawReader:
    """The disk alone: the very files that the store wrote, as many reads at a time as it makes, and no checks."""

    def __init__(self, folder: Path, piece: int) -> None:
        self._files = contextlib.ExitStack()
        self._places: list[tuple[int, int]] = []
        # From the end, while the store reads from the start: neither finds what the other has just read.
        for path in sorted(folder.glob("*.segment"), reverse=True):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            except OSError:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._files.callback(os.close, fd)
            self._places += [(fd, at) for at in range(0, path.stat().st_size - piece, piece)]
        self._threads = Nvme().threads
        self._pool = self._files.enter_context(ThreadPoolExecutor(self._threads))
        self._at = 0

    def __enter__(self) -> _RawReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def read(self, targets: Sequence[Span], into: Measure) -> None:
        """Fill ``targets``."""
        places = [self._places[(self._at + i) % len(self._places)] for i in range(len(targets))]
        self._at += len(targets)

        def work(worker: int) -> int:
            mine = list(zip(targets, places, strict=True))[worker :: self._threads]
            return sum([os.preadv(fd, [target], at) for target, (fd, at) in mine])

        with into.timing():
            into.nbytes += sum(self._pool.map(work, range(self._threads)))


# -- what this machine can afford -------------------------------------------------------------------------


def affordable(layout: Layout, nbytes: int, folder: Path) -> tuple[int, str]:
    """How many bytes of ``nbytes`` there is room for, and why not all ("" if all)."""
    block = layout.geometry["full"].nbytes
    disk = int(shutil.disk_usage(folder).free * 0.8 / 1.1)
    memory = int((_memory_free() * 0.8 - (4 * _RING + 2) * block) * 2)
    room = min(disk, memory)
    if room >= nbytes:
        return nbytes, ""
    free = (f"the disk of {folder} has", disk / 2**30) if disk < memory else ("the memory has", memory / 2**30)
    return (
        room // block * block,
        f"{free[0]} room for a session of {max(0.0, free[1]):.3g} GiB, not {nbytes / 2**30:.3g}",
    )


def _memory_free() -> int:
    """Bytes that this process may still take: of the machine, and of its control group."""
    free = 1 << 62
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free


def filesystem(folder: Path) -> str:
    """The kind of filesystem that ``folder`` is on."""
    found = ("", "unknown")
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mount, kind, *_ = line.split()
            if folder.resolve().is_relative_to(mount) and len(mount) >= len(found[0]):
                found = mount, kind
    return found[1]


def scratch_folder() -> Path:
    """A folder for temporary files that is on a disk, if there is one: on tmpfs "NVMe" would be memory."""
    import tempfile

    usual = [Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()]
    there = [folder for folder in usual if folder.is_dir() and os.access(folder, os.W_OK)]
    return next((folder for folder in there if filesystem(folder) != "tmpfs"), there[0])
