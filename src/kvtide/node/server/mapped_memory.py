"""Records which process has mapped which memory, for the node's successor in case this node dies.

A client's mappings outlive the node, so that blocks handed out stay readable. Until the client unmaps them, that memory
is still in use on the host, and a new node that took its whole budget in addition would exceed it. So before a node
hands out memory, it records in a file beside its socket which process gets it. The next node sets that many bytes aside
until the client has reconnected and reported that it unmapped them, or its process has exited.

All clients wait while the file is written, so the write must not wait for a disk. Writing a new file and renaming it
would: a file system flushes a file before it replaces another one, which takes 20 ms and at times half a second. So the
file is created once and then overwritten, alternately at two places, each version with a number and a digest: if a node
dies while it writes one, the other is still valid.
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

__all__ = ["MappedMemory", "beside"]

log = logging.getLogger("kvtide.node")

_CLIENTS = 200
"""Maximum number of clients of one process, including those that left with memory mapped: each is an entry in the
file."""


_PLACES = 0, 64 << 20
"""Offsets of the two versions in the file. It is sparse."""
_HEAD = struct.Struct("<QQ16s")
"""Header of a version: its number, its length and its digest."""


class _Entry(msgspec.Struct):
    """A client's process, and the memory that it has mapped: bytes by name."""

    pid: int
    started: int
    """When the process was started, in the kernel's ticks: the kernel reuses process ids."""
    memory: dict[str, int]


def beside(socket: Path, kind: str) -> Path:
    """The file with extension ``kind`` that belongs to the node at a socket. Only the usual ``.sock`` is removed from
    the name: sockets whose names differ only after a dot must have different files."""
    return socket.with_name(f"{socket.name.removesuffix('.sock')}.{kind}")


class MappedMemory:
    """The record of lent memory. Once it is attached, call its methods only in the node's loop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.life = secrets.token_hex(8)
        self._entries: dict[str, _Entry] = {}
        self._watched: dict[int, int] = {}
        """By process: its pidfd. One for all clients of a process: many clients could otherwise use up the
        descriptors."""
        self._dram: Dram | None = None
        self._file = -1
        self._version = 0
        with contextlib.suppress(OSError):  # an earlier version made it readable for everyone
            path.chmod(0o600)
        try:
            entries = msgspec.json.decode(_read(path), type=dict[str, _Entry])
            self._entries = {c: e for c, e in entries.items() if e.memory and _started(e.pid) == e.started}
        except FileNotFoundError:
            pass
        except (msgspec.MsgspecError, OSError) as e:
            log.warning("%s is unreadable (%s): memory that clients still have mapped is not counted", path, e)

    @property
    def elsewhere(self) -> int:
        """Bytes of earlier nodes' memory that clients still have mapped."""
        found = {n: size for e in self._entries.values() for n, size in e.memory.items() if not self._ours(n)}
        return sum(found.values())

    @property
    def segments(self) -> int:
        """Number of segments, of any node, that clients have mapped; a segment counts once for each client."""
        return sum(len(entry.memory) for entry in self._entries.values())

    def attach(self, loop: asyncio.AbstractEventLoop, drams: Sequence[Dram]) -> None:
        """Begin to watch the clients of earlier nodes, and to follow the segments that ``drams`` remove.

        The bytes that those clients still have are set aside in the first: a share reserved for a tenant is not made
        smaller by what others did.
        """
        self._loop, self._dram = loop, drams[0]
        self._dram.set_aside(self.elsewhere)
        for dram in drams:
            dram.removed = self._given_up
        for entry in list(self._entries.values()):
            self._watch(entry.pid)

    def name(self, serial: int) -> str:
        """The name of the memory with that serial number, unique across restarts of the node."""
        return f"{self.life}-{serial}"

    def _ours(self, name: str) -> bool:
        return name.startswith(f"{self.life}-")

    # -- calls for what clients do ------------------------------------------------------------------------

    def arrived(self, client: str, pid: int, mapped: Iterable[str]) -> str:
        """A client has connected, and still has ``mapped`` of its earlier memory. Returns why it must be refused, or
        ""."""
        known = self._entries.get(client)
        if known is None and sum(e.pid == pid for e in self._entries.values()) >= _CLIENTS:
            return f"this process has memory of {_CLIENTS} clients; release views that closed clients gave it"
        if known is not None and known.pid != pid:
            return "this client uses the name of another process's client"
        entry = self._entry(client, pid)
        self.unmapped(client, entry.memory.keys() - set(mapped))
        return ""

    def lent(self, client: str, pid: int, serials: Sequence[int], sizes: Sequence[int]) -> None:
        """A client is about to get memory of this node."""
        entry = self._entry(client, pid)
        entry.memory |= {self.name(s): size for s, size in zip(serials, sizes, strict=True)}
        self._watch(pid)
        self._write()

    def unmapped(self, client: str, names: Iterable[str]) -> None:
        """A client has unmapped memory."""
        memory = self._entries[client].memory if client in self._entries else {}
        if gone := memory.keys() & set(names):
            for name in gone:
                del memory[name]
            self._settle()

    def left(self, client: str) -> None:
        """A client has disconnected. Memory that it has not unmapped stays recorded until its process has exited."""
        entry = self._entries.get(client)
        if entry is not None and not entry.memory:
            del self._entries[client]
            if all(e.pid != entry.pid for e in self._entries.values()):
                self._unwatch(entry.pid)

    def _entry(self, client: str, pid: int) -> _Entry:
        return self._entries.setdefault(client, _Entry(pid, _started(pid), {}))

    # -- the file -----------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Clients have unmapped memory: update what is set aside, and the file."""
        assert self._dram is not None
        self._dram.set_aside(self.elsewhere)
        self._write()

    def _given_up(self, serial: int) -> None:
        """A segment of this node has no pages any more, even where it is mapped. Called from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits any more
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
            if len(head + text) > _PLACES[1]:  # it would overlap the other version
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            if os.pwrite(self._file, head + text, _PLACES[self._version % 2]) < len(head + text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if first:
                self._fresh.replace(self._path)
        except OSError as e:
            self._let_go()  # the next write creates it again
            log.warning(
                "cannot write %s (%s): should the node die, its successor may take too much memory", self._path, e
            )

    @property
    def _fresh(self) -> Path:
        return self._path.with_name(f"{self._path.name}-new")

    def _make(self) -> int:
        # Process ids of clients are not for other users; a file left by a crash may have another mode.
        self._fresh.unlink(missing_ok=True)
        return os.open(self._fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def _let_go(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _watch(self, pid: int) -> None:
        """Watch for the exit of a process that has clients."""
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
        """Stop watching. The file is kept while clients have memory of this node mapped."""
        for pidfd in self._watched.values():
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        self._watched.clear()
        self._let_go()
        if not any(entry.memory for entry in self._entries.values()):
            self._path.unlink(missing_ok=True)


def _read(path: Path) -> bytes:
    """The newest intact version in a file, or the whole file: an earlier kvtide wrote one version only. Raises
    OSError."""
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
    """When a process was started; -1 if there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return -1
