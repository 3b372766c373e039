"""Disks and tiers that fail on command.

``FaultyDisk`` is a real disk between a tier and the kernel. It fails the calls that it is told to fail, as disks do:
with an error, short, torn, with a bit flipped, late, or by reporting a write that it did not make. It can die, as for a
killed process: no later call has an effect. It can be full: with ``capacity`` set, the files of a folder take no more
than that many bytes together, however large the real disk is.

It also simulates a power loss. For every unit of a file that was written since the file's last sync it keeps all
earlier contents; ``power_loss`` restores a random choice of them, so that unflushed writes are lost and reordered
arbitrarily. What counts as durable is what the kernel guarantees: the contents of a file that was synced, the name of a
new or renamed file once its folder was synced, and removals, because ``Disk`` syncs the folder.

``FaultyTier`` does the same one level higher: it wraps any tier and loses, delays or fails single items.

Everything is determined by the script of faults and a seed; nothing here sleeps or reads the time.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fnmatch
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtide.block import BlockKey, Span
from kvtide.testing.gate import Gate
from kvtide.tiers.base import (
    NOWHERE,
    DropDone,
    Held,
    Read,
    ReadDone,
    ReadResult,
    Tier,
    TierStatistics,
    Write,
    WriteDone,
)
from kvtide.tiers.syscalls import AnyPath, Disk

__all__ = ["Fault", "FaultyDisk", "FaultyTier", "Gate", "How"]


class How(enum.Enum):
    """How a call fails."""

    FAIL = "fails"
    """Nothing is done; an error is raised."""
    SHORT = "short"
    """Part is done, and the result says how much."""
    TORN = "torn"
    """Part is done, then an error is raised."""
    LIE = "lies"
    """Part is done, and the result says that all was. Only for writes; dropped blocks may then reappear."""
    FLIP = "flips"
    """One bit is wrong: in the bytes of a read, or in those that a write leaves."""


@dataclass(slots=True)
class Fault:
    """``times`` calls of ``call`` fail, after ``after`` that succeed.

    ``call`` is the name of a method of ``Disk``; ``files`` a pattern for the file's name. A ``resize`` fails only if it
    makes a file longer: freeing space needs none.
    """

    call: str
    how: How = How.FAIL
    code: int = errno.EIO
    files: str = "*"
    after: int = 0
    times: int = 1


@dataclass(slots=True)
class _Unsynced:
    """The unsynced state of one file, which a power loss may change."""

    path: Path
    size: int
    """The file's length at its last sync."""
    older: list[tuple[int, bytes]]
    """For each write since the last sync, the oldest first: the offset and old contents of the units that it
    touched."""
    named: bool = True
    """Whether the folder was synced since the file was created."""


class FaultyDisk(Disk):
    """A disk that fails on command, dies, and loses unsynced writes. See the module's docstring.

    Calls are serialised, so that a death or a power loss falls between calls; torn calls are faults of their own.
    ``unit`` is what the device writes atomically. With ``sparse``, space is not allocated when a file is made longer,
    but when a part of it is written for the first time: a full disk then refuses the write.
    """

    def __init__(self, seed: int = 0, unit: int = 512, capacity: int | None = None, sparse: bool = False) -> None:
        self.capacity = capacity
        """Maximum bytes of all files of a folder; None: the real disk's capacity. May be set at any time."""
        self._sparse = sparse
        self._random = random.Random(seed)
        self._unit = unit
        self._lock = threading.RLock()
        self._faults: list[Fault] = []
        self._gates: list[Gate] = []
        self._files: dict[tuple[int, int], _Unsynced] = {}
        self._replaced: dict[Path, bytes] = {}  # old contents of files that a rename may not have replaced durably yet
        self._dead = False
        self._boots = 0
        self.struck: list[tuple[str, How, str]] = []
        """The faults that occurred: call, how, file."""

    def __repr__(self) -> str:
        return f"<FaultyDisk {'dead' if self._dead else 'alive'}, {len(self._faults)} faults armed>"

    # -- for tests ----------------------------------------------------------------------------------------

    def arm(self, *faults: Fault) -> None:
        """Arm these faults, each independent of the others."""
        with self._lock:
            self._faults += faults

    def disarm(self) -> None:
        """Remove all faults. Gates are not opened."""
        with self._lock:
            self._faults.clear()

    def gate(self, call: str, files: str = "*.segment") -> Gate:
        """Delay all calls of ``call`` from now on, until the gate is opened."""
        gate = Gate(call, files)
        with self._lock:
            self._gates.append(gate)
        return gate

    @property
    def lied(self) -> bool:
        """Whether it ever reported a write that it did not make."""
        return any(how is How.LIE for _, how, _ in self.struck)

    def die(self) -> None:
        """Refuse everything from now on, except closing files: as if the process had been killed here."""
        with self._lock:
            self._dead = True
            gates, self._gates = self._gates, []
        for gate in gates:
            gate.open()

    def revive(self) -> None:
        """Work again, as after a restart of the process."""
        with self._lock:
            self._dead = False
            self._faults.clear()

    def power_loss(self) -> None:
        """Keep a random part of the writes since the last syncs, and reboot. The disk must not be in use."""
        with self._lock:
            extent = self._random.choice(["none", "some", "some", "files"])
            for file in self._files.values():
                if file.path.exists():
                    keep = self._random.choice(["none", "all"]) if extent == "files" else extent
                    if file.named or keep == "all":
                        self._lose(file, keep)
                    else:
                        file.path.unlink()
            for path, old in self._replaced.items():
                if self._random.random() < 0.5:
                    path.write_bytes(old)
            self._files.clear()
            self._replaced.clear()
            self._boots += 1
            self.revive()

    def _lose(self, file: _Unsynced, keep: str) -> None:
        if keep == "all":
            return
        now = file.path.stat().st_size
        size = file.size
        if keep == "some" and now != size:
            appended = file.path.suffix != ".segment"
            size = self._random.randint(*sorted((now, size))) if appended else self._random.choice([now, size])
        versions: dict[int, list[bytes]] = {}
        for offset, old in file.older:
            for i in range(0, len(old), self._unit):
                versions.setdefault(offset + i, []).append(old[i : i + self._unit])
        data = bytearray(file.path.read_bytes()[:size])
        data += bytes(size - len(data))
        for offset, older in versions.items():
            back = 0 if keep == "none" else self._random.randint(0, len(older))
            if back < len(older) and offset < size:
                data[offset : offset + self._unit] = older[back]
        with file.path.open("r+b") as f:
            f.write(data[:size])
            f.truncate(size)

    # -- calls of a disk ----------------------------------------------------------------------------------

    def boot_id(self) -> bytes:
        return super().boot_id() + b"/%d" % self._boots

    def open(self, path: AnyPath, *, direct: bool, create: bool = False) -> int:
        path = Path(path)
        with self._call("open", path):
            new = create and not path.exists()
            fd = super().open(path, direct=direct, create=create)
            if new:
                self._file(fd, path).named = False
            return fd

    def open_to_read(self, path: AnyPath, *, direct: bool) -> int:
        path = Path(path)
        with self._call("open", path):
            return super().open_to_read(path, direct=direct)

    def close(self, fd: int) -> None:
        super().close(fd)

    def resize(self, fd: int, nbytes: int) -> None:
        path = _path(fd)
        with self._call("resize" if nbytes > os.fstat(fd).st_size else "shrink", path):
            file = self._file(fd, path)
            size = os.fstat(fd).st_size
            if nbytes < size:
                self._remember(file, nbytes, size - nbytes)
            if self._sparse:
                os.ftruncate(fd, nbytes)
                return
            self._charge(path, nbytes - size)
            super().resize(fd, nbytes)

    def read(self, fd: int, into: Sequence[Span], offset: int) -> int:
        path = _path(fd)
        with self._call("read", path) as fault:
            count = super().read(fd, into, offset)
            if fault is None or not count:
                return count
            if fault.how is How.FLIP:
                _flip(into, self._random.randrange(count * 8))
                return count
            return self._part(count, fault)

    def write(self, fd: int, data: Sequence[Span | bytes], offset: int) -> int:
        path = _path(fd)
        total = sum(len(d) for d in data)
        with self._call("write", path) as fault:
            if self._sparse:
                self._charge(path, _holes(path, offset, total))
            self._remember(self._file(fd, path), offset, total)
            if fault is None:
                return super().write(fd, data, offset)
            return self._badly(path, b"".join(data), offset, fault)

    def append(self, fd: int, data: bytes) -> int:
        path = _path(fd)
        with self._call("append", path) as fault:
            offset = os.fstat(fd).st_size
            self._charge(path, len(data))
            self._remember(self._file(fd, path), offset, len(data))
            if fault is None:
                return super().append(fd, data)
            return self._badly(path, data, offset, fault)

    def sync(self, fd: int) -> None:
        path = _path(fd)
        with self._call("sync", path):
            file = self._file(fd, path)
            super().sync(fd)
            file.older.clear()
            file.size = os.fstat(fd).st_size

    def sync_folder(self, path: Path) -> None:
        with self._call("sync", path):
            super().sync_folder(path)
            self._replaced = {p: old for p, old in self._replaced.items() if p.parent != path}
            for file in self._files.values():
                if file.path.parent == path:
                    file.named = True

    def rename(self, old: AnyPath, new: AnyPath, *, durable: bool = True) -> None:
        old, new = Path(old), Path(new)
        with self._call("rename", old):
            self._forget(new)
            if not durable and new.exists():
                self._replaced.setdefault(new, new.read_bytes())
            super().rename(old, new, durable=durable)
            for file in self._files.values():
                if file.path == old:
                    file.path = new

    def unlink(self, path: Path) -> None:
        with self._call("unlink", path):
            self._forget(path)
            super().unlink(path)

    def exists(self, path: AnyPath) -> bool:
        with self._call("exists", Path(path)):
            return super().exists(path)

    def delete(self, path: AnyPath) -> bool:
        path = Path(path)
        with self._call("unlink", path):
            self._forget(path)
            return super().delete(path)

    # -- how they fail ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _call(self, call: str, path: Path) -> Iterator[Fault | None]:
        """Serialises one call. Yields the fault that the call itself must simulate; raises for those that fail at
        once."""
        with self._lock:
            gates = [g for g in self._gates if g.call == call and fnmatch.fnmatch(path.name, g.files)]
        for gate in gates:
            gate.pass_through()
        with self._lock:
            if self._dead:
                raise OSError(errno.EIO, "the disk is dead")
            fault = self._due(call, path.name)
            if fault is not None:
                self.struck.append((call, fault.how, path.name))
                if fault.how is How.FAIL:
                    raise OSError(fault.code, os.strerror(fault.code), str(path))
            yield fault

    def _charge(self, path: Path, more: int) -> None:
        """Raises if the disk has no space for that many more bytes."""
        if self.capacity is None or more <= 0:
            return
        with os.scandir(path.parent) as files:
            abouts = [file.stat() for file in files]
        used = sum(about.st_blocks * 512 if self._sparse else about.st_size for about in abouts)
        if used + more > self.capacity:
            self.struck.append(("full", How.FAIL, path.name))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def _due(self, call: str, name: str) -> Fault | None:
        for fault in self._faults:
            if fault.call != call or not fnmatch.fnmatch(name, fault.files):
                continue
            if fault.after:
                fault.after -= 1
                continue
            fault.times -= 1
            if not fault.times:
                self._faults.remove(fault)
            return fault
        return None

    def _part(self, total: int, fault: Fault) -> int:
        count = self._random.randrange(total)
        if fault.how is How.TORN:
            raise OSError(fault.code, os.strerror(fault.code))
        return count

    def _badly(self, path: Path, data: bytes, offset: int, fault: Fault) -> int:
        """Write as the fault demands. Through the page cache, because parts of a unit cannot be written directly."""
        count = len(data)
        if fault.how is How.FLIP:
            _flip([memoryview(flipped := bytearray(data))], self._random.randrange(count * 8))
            data = bytes(flipped)
        else:
            # Often at a page boundary: a tear between header and payload is the most likely to be missed.
            count = self._random.choice([self._random.randrange(count), self._random.randrange(count) & -4096])
        with path.open("r+b", buffering=0) as f:
            os.pwrite(f.fileno(), data[:count], offset)
        if fault.how is How.TORN:
            raise OSError(fault.code, os.strerror(fault.code))
        return count if fault.how is How.SHORT else len(data)

    # -- unsynced writes ----------------------------------------------------------------------------------

    def _file(self, fd: int, path: Path) -> _Unsynced:
        about = os.fstat(fd)
        file = self._files.get((about.st_dev, about.st_ino))
        if file is None or file.path != path:  # the inode of a removed file may be reused
            # The state before is unknown: the contents of a file when it is first used count as durable.
            file = self._files[about.st_dev, about.st_ino] = _Unsynced(path, about.st_size, [])
        return file

    def _remember(self, file: _Unsynced, offset: int, nbytes: int) -> None:
        first, stop = offset // self._unit, -(-(offset + nbytes) // self._unit)
        with file.path.open("rb", buffering=0) as f:
            old = os.pread(f.fileno(), (stop - first) * self._unit, first * self._unit)
        old += bytes((stop - first) * self._unit - len(old))
        file.older.append((first * self._unit, old))

    def _forget(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            about = path.stat()
            self._files.pop((about.st_dev, about.st_ino), None)


def _path(fd: int) -> Path:
    return Path(f"/proc/self/fd/{fd}").readlink()


def _holes(path: Path, offset: int, nbytes: int) -> int:
    """How many bytes of a part of a file were never written."""
    with path.open("rb", buffering=0) as f:
        holes, at, stop = 0, offset, offset + nbytes
        while at < stop:
            try:
                data = min(stop, os.lseek(f.fileno(), at, os.SEEK_DATA))
            except OSError:  # only a hole follows
                data = stop
            holes += data - at
            at = min(stop, os.lseek(f.fileno(), data, os.SEEK_HOLE)) if data < stop else stop
        return holes


def _flip(into: Sequence[Span], bit: int) -> None:
    """Flip one bit of the buffers, counted from the first."""
    for span in into:
        if bit < len(span) * 8:
            span[bit // 8] ^= 1 << bit % 8
            return
        bit -= len(span) * 8


class FaultyTier:
    """Wraps a tier and fails single items of its batches; without an armed fault it behaves like the tier.

    Counts are of items: ``fail_reads = 2`` fails the next two, wherever they are in a batch. A *lost* write is
    acknowledged, but its block cannot be read. While ``late`` is set, batches are kept back until ``open``.
    """

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.fail_reads = 0
        self.fail_writes = 0
        self.fail_drops = 0
        self.lose_writes = 0
        self.late = False
        self._lost: set[tuple[BlockKey, int]] = set()
        self._kept: list[Callable[[], None]] = []
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"<FaultyTier {self.inner!r}>"

    # -- for tests ----------------------------------------------------------------------------------------

    def wait_for(self, batches: int, timeout: float = 30.0) -> bool:
        """Wait until that many batches are late."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._kept) >= batches, timeout)

    def open(self) -> None:
        """Submit the late batches, in their order, and delay no more."""
        with self._changed:
            self.late = False
            kept, self._kept = self._kept, []
        for go in kept:
            go()

    # -- the contract -------------------------------------------------------------------------------------

    def read(self, batch: Sequence[Read], done: ReadDone) -> None:
        with self._changed:
            bad, self.fail_reads = self._spoil(len(batch), self.fail_reads)
            bad |= {i for i, item in enumerate(batch) if (item.key, item.place) in self._lost}
        good = [i for i in range(len(batch)) if i not in bad]

        def finish(results: Sequence[ReadResult]) -> None:
            answers: list[ReadResult] = [False] * len(batch)
            for i, result in zip(good, results, strict=True):
                answers[i] = result
            done(answers)

        self._go(lambda: self.inner.read([batch[i] for i in good], finish))

    def write(self, batch: Sequence[Write], done: WriteDone) -> None:
        with self._changed:
            bad, self.fail_writes = self._spoil(len(batch), self.fail_writes)
            good = [i for i in range(len(batch)) if i not in bad]
            lost, self.lose_writes = self._spoil(len(good), self.lose_writes)

        def finish(places: Sequence[int]) -> None:
            answers = [NOWHERE] * len(batch)
            with self._changed:
                for n, (i, place) in enumerate(zip(good, places, strict=True)):
                    answers[i] = place
                    if n in lost:
                        self._lost.add((batch[i].key, place))
                    else:
                        self._lost.discard((batch[i].key, place))
            done(answers)

        self._go(lambda: self.inner.write([batch[i] for i in good], finish))

    def drop(self, items: Sequence[tuple[BlockKey, int]], done: DropDone) -> None:
        with self._changed:
            bad, self.fail_drops = self._spoil(len(items), self.fail_drops)
        # The medium refused, but the space is freed: that is what the contract says.
        self._go(lambda: self.inner.drop(items, lambda r: done([ok and i not in bad for i, ok in enumerate(r)])))

    def evict(self, key: BlockKey, place: int) -> None:
        self.inner.evict(key, place)

    def scan(self) -> Iterator[Held]:
        return self.inner.scan()

    def own(self, places: npt.NDArray[np.int64], owners: npt.NDArray[np.int64]) -> None:
        self.inner.own(places, owners)

    def statistics(self) -> TierStatistics:
        return self.inner.statistics()

    def close(self) -> None:
        self.open()
        self.inner.close()

    @staticmethod
    def _spoil(items: int, count: int) -> tuple[set[int], int]:
        """The items of a batch that fail, and how many failures remain."""
        struck = min(items, count)
        return set(range(struck)), count - struck

    def _go(self, batch: Callable[[], None]) -> None:
        with self._changed:
            if self.late:
                self._kept.append(batch)
                self._changed.notify_all()
                return
        batch()
