"""Who has mapped which memory: what the next node must know, should this one die.

A client's mappings outlive the node, so that what it was handed stays readable. Until it lets go, that memory is still
taken from the host, and a new node that took its whole budget beside it would exceed it. So a node writes down, beside
its socket and before it hands memory out, which process gets it. The next one sets as many bytes aside until the client
has come back and said that it has let go, or its process is dead.

All clients wait while that is written, so it must not wait for a disk: a file system writes a file down before it takes
the place of another, which takes 20 ms and at times half a second. So a file is made once, and then written over, by
turns in two places, each with a number and a digest: if a node dies while it writes to one, the other still counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from blake3 import blake3

from kvtide.tiers.dram.tier import Dram

__all__ = ["Ledger", "beside"]

log = logging.getLogger("kvtide.node")

_CLIENTS = 200
"""Of one process, those included that have left with memory mapped: each is a line in the book."""


_PLACES = 0, 64 << 20
"""Where in the file the two versions are. It is sparse."""
_HEAD = struct.Struct("<QQ16s")
"""Before a version: its number, its length and its digest."""


class _Entry(msgspec.Struct):
    """A client's process, and the memory that it has: bytes by name."""

    pid: int
    started: int
    """When, in the kernel's ticks: a number of a process is given again."""
    memory: dict[str, int]


def beside(socket: Path, kind: str) -> Path:
    """The file of that kind of the node at a socket. Sockets may differ after a dot alone, and have files of their own:
    only what is always the same is left out."""
    return socket.with_name(f"{socket.name.removesuffix('.sock')}.{kind}")


class Ledger:
    """Call everything in the node's loop once it is attached."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.life = secrets.token_hex(8)
        self._entries: dict[str, _Entry] = {}
        self._watched: dict[int, int] = {}
        """By process: its pidfd. One for all its clients, or many of them would take all descriptors."""
        self._dram: Dram | None = None
        self._file = -1
        self._version = 0
        with contextlib.suppress(OSError):  # one that an earlier version wrote for all to read
            path.chmod(0o600)
        try:
            entries = msgspec.json.decode(_read(path), type=dict[str, _Entry])
            self._entries = {c: e for c, e in entries.items() if e.memory and _started(e.pid) == e.started}
        except FileNotFoundError:
            pass
        except (msgspec.MsgspecError, OSError) as e:
            log.warning("%s is unreadable (%s): memory that clients still have is not counted", path, e)

    @property
    def elsewhere(self) -> int:
        """Bytes of earlier nodes that their clients still have."""
        found = {n: size for e in self._entries.values() for n, size in e.memory.items() if not self._ours(n)}
        return sum(found.values())

    @property
    def segments(self) -> int:
        """Segments of any node that clients have, those that several have once for each."""
        return sum(len(entry.memory) for entry in self._entries.values())

    def attach(self, loop: asyncio.AbstractEventLoop, drams: Sequence[Dram]) -> None:
        """Begin to watch the clients of earlier nodes, and to keep the account of ``drams``.

        What those still have is set aside in the first: a reserved share is not made smaller by what others did.
        """
        self._loop, self._dram = loop, drams[0]
        self._dram.set_aside(self.elsewhere)
        for dram in drams:
            dram.removed = self._given_up
        for entry in list(self._entries.values()):
            self._watch(entry.pid)

    def name(self, serial: int) -> str:
        """What the memory with that serial number is called in all nodes' lives."""
        return f"{self.life}-{serial}"

    def _ours(self, name: str) -> bool:
        return name.startswith(f"{self.life}-")

    # -- what clients do ----------------------------------------------------------------------------------

    def arrived(self, client: str, pid: int, mapped: Iterable[str]) -> str:
        """A client is here, and of what it had before it still has ``mapped``. Answers why it cannot be, if so."""
        known = self._entries.get(client)
        if known is None and sum(e.pid == pid for e in self._entries.values()) >= _CLIENTS:
            return f"this process has memory of {_CLIENTS} clients; let go of views that closed ones gave it"
        if known is not None and known.pid != pid:
            return "this client calls itself by another process's name"
        entry = self._entry(client, pid)
        self.unmapped(client, entry.memory.keys() - set(mapped))
        return ""

    def lent(self, client: str, pid: int, serials: Sequence[int], sizes: Sequence[int]) -> None:
        """A client is about to get memory of ours."""
        entry = self._entry(client, pid)
        entry.memory |= {self.name(s): size for s, size in zip(serials, sizes, strict=True)}
        self._watch(pid)
        self._write()

    def unmapped(self, client: str, names: Iterable[str]) -> None:
        """A client has let go of memory."""
        memory = self._entries[client].memory if client in self._entries else {}
        if gone := memory.keys() & set(names):
            for name in gone:
                del memory[name]
            self._settle()

    def left(self, client: str) -> None:
        """A client has hung up. What it has not let go of stays written down until its process is dead."""
        entry = self._entries.get(client)
        if entry is not None and not entry.memory:
            del self._entries[client]
            if all(e.pid != entry.pid for e in self._entries.values()):
                self._unwatch(entry.pid)

    def _entry(self, client: str, pid: int) -> _Entry:
        return self._entries.setdefault(client, _Entry(pid, _started(pid), {}))

    # -- the account --------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Memory was let go."""
        assert self._dram is not None
        self._dram.set_aside(self.elsewhere)
        self._write()

    def _given_up(self, serial: int) -> None:
        """Memory of ours has no pages any more, whoever has mapped it. Any thread says so."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._strike, self.name(serial))

    def _strike(self, name: str) -> None:
        for entry in self._entries.values():
            entry.memory.pop(name, None)
        self._write()

    def _write(self) -> None:
        text = msgspec.json.encode({c: e for c, e in self._entries.items() if e.memory})
        self._version += 1
        head = _HEAD.pack(self._version, len(text), blake3(text).digest(16))
        first = self._file < 0
        try:
            if first:
                self._file = self._make()
            if len(head + text) > _PLACES[1]:  # it would reach into the other version
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            if os.pwrite(self._file, head + text, _PLACES[self._version % 2]) < len(head + text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if first:
                self._fresh.replace(self._path)
        except OSError as e:
            self._let_go()  # the next time it is made anew
            log.warning(
                "cannot write %s (%s): should the node die, its successor may take too much memory", self._path, e
            )

    @property
    def _fresh(self) -> Path:
        return self._path.with_name(f"{self._path.name}-new")

    def _make(self) -> int:
        # Whose processes these are is for nobody else; what a crash left there may have another mode.
        self._fresh.unlink(missing_ok=True)
        return os.open(self._fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def _let_go(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _watch(self, pid: int) -> None:
        """Wait for the death of a process that has clients."""
        if pid in self._watched:
            return
        try:
            pidfd = self._watched[pid] = os.pidfd_open(pid)
        except ProcessLookupError:
            self._died(pid)
        else:
            self._loop.add_reader(pidfd, self._died, pid)

    def _unwatch(self, pid: int) -> None:
        pidfd = self._watched.pop(pid, None)
        if pidfd is not None:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)

    def _died(self, pid: int) -> None:
        self._unwatch(pid)
        self._entries = {client: e for client, e in self._entries.items() if e.pid != pid}
        self._settle()

    def close(self) -> None:
        """Stop watching. The book stays, while clients have memory of ours."""
        for pidfd in self._watched.values():
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        self._watched.clear()
        self._let_go()
        if not any(entry.memory for entry in self._entries.values()):
            self._path.unlink(missing_ok=True)


def _read(path: Path) -> bytes:
    """The newest version in a file that is whole, or all of it: an earlier kvtide wrote one version. Raises OSError."""
    found: list[tuple[int, bytes]] = []
    with path.open("rb") as file:
        for place in _PLACES:
            file.seek(place)
            head = file.read(_HEAD.size)
            if len(head) == _HEAD.size:
                version, length, digest = _HEAD.unpack(head)
                text = file.read(min(length, _PLACES[1]))
                if blake3(text).digest(16) == digest:
                    found.append((version, text))
        file.seek(0)
        return max(found)[1] if found else file.read(_PLACES[1])


def _started(pid: int) -> int:
    """When a process was started; -1 if it is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return -1
