"""The process that has a node's NIXL agent: ``python -m kvtide.tiers.peers.nixl_helper CONTROL MEMORY CHUNKS CHUNK``.

It is a process of its own because whoever can reach a UCX endpoint may read and write all memory of the process that
has it: UCX without RDMA does not check what a remote key allows, and with RDMA a key allows writing. Here that is the
memory of this process, with the chunks through which bytes pass, and neither a slot nor a key. And NIXL 1.5 cannot
cancel a transfer: memory is written after the handle was released. Only the end of this process surely ends all.

It has one thread, one *control* socket to the node, and one *channel* for each connection of the node that receives.
Both are sequenced packets:

- control, helper: ``R``, the address of the memory, and the agent's metadata; or ``E`` and why NIXL cannot be used.
- control, node: the other end's base address, bytes and metadata, with the channel's descriptor.
- channel, node: an offset in the other end's memory and a number of bytes: read them; or ``FREE``: the chunk that was
  answered is not used any more.
- channel, helper: the offset of the chunk with these bytes. If they cannot be read the channel is closed.

The memory is shared with the node. Its first half is the node's, for others to read; the other half is cut into the
chunks of this process. A chunk is given out again only when its transfer was completed. One whose transfer failed is
not used again, because an error may be reported while parts of it are still under way. When half of them are lost this
process ends, and the node may start another. It also ends when a call of the library does not return: else it would
answer nobody, and outlive its node."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import mmap
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections import deque
from typing import Any

import numpy as np

__all__ = ["ANSWER", "FREE", "LARGEST_METADATA", "OTHER", "PACKAGES", "READ", "READY"]

PACKAGES = "nixl_cu12", "nixl_cu13"
READY = struct.Struct("<cQ")
OTHER = struct.Struct("<QQ")
READ = struct.Struct("<QQ")
ANSWER = struct.Struct("<Q")
FREE = READ.pack(0, 0)
LARGEST_METADATA = 16 << 10
"""Bytes. It has an address for each of a host's network devices."""

_FIRST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3
_GIVEN_UP = 2.0
"""Seconds after which a transfer whose channel was closed counts as lost."""
_HANGS = 10
"""Seconds after which a call of the library counts as one that does not return."""
_LOOK = 1.0
"""Seconds after which it looks whether its parent is still there."""


class _Channel:
    """A connection of the node."""

    def __init__(self, sock: socket.socket, remote: _Remote, base: int, nbytes: int) -> None:
        self.sock = sock
        self.remote = remote
        self.base = base
        self.nbytes = nbytes
        self.held: int | None = None
        """The chunk that the node reads now."""
        self.closed = math.inf
        """When it was closed."""


class _Remote:
    """Another agent."""

    def __init__(self, name: str, metadata: bytes) -> None:
        self.name = name
        self.metadata = metadata
        self.users = 0
        """Channels and transfers."""


class _Transfer:
    def __init__(self, handle: Any, chunk: int, channel: _Channel) -> None:
        self.handle = handle
        self.chunk = chunk
        self.channel = channel


class _Helper:
    def __init__(self, control: socket.socket, descriptor: int, count: int, chunk: int) -> None:
        self._control = control
        self._chunk = chunk
        half = count * chunk
        self._memory = np.frombuffer(mmap.mmap(descriptor, 2 * half), np.uint8)
        self._base: int = self._memory.ctypes.data
        self._free = list(range(half, 2 * half, chunk))
        self._count = count
        self._lost = 0
        """Chunks that are never given out again."""
        self._kept: list[Any] = []
        """Handles of failed transfers, which are not released: that would end nothing."""
        self._waiting: deque[tuple[_Channel, int, int]] = deque()
        self._transfers: list[_Transfer] = []
        self._remotes: dict[str, _Remote] = {}
        self._selector = selectors.DefaultSelector()
        self._name = os.urandom(16).hex()
        self._agent = _agent(self._name)
        # Each half by itself: others read the first one only.
        self._agent.register_memory([(self._base, half, 0, "")], "DRAM")
        self._metadata: bytes = self._agent.get_agent_metadata()
        self._agent.register_memory([(self._base + half, half, 0, "")], "DRAM")
        if len(self._metadata) > LARGEST_METADATA:
            raise OSError(f"its metadata has {len(self._metadata)} bytes")

    def run(self) -> None:
        self._selector.register(self._control, selectors.EVENT_READ)
        self._control.send(READY.pack(b"R", self._base) + self._metadata)
        parent, pause = os.getppid(), _FIRST_PAUSE
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, also while the library holds the GIL
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
        while os.getppid() == parent:
            signal.alarm(_HANGS)
            for key, _ in self._selector.select(0 if self._transfers else _LOOK):
                if key.data is None:
                    self._accept()
                else:
                    self._heard(key.data)
            if self._transfers:
                pause = _FIRST_PAUSE if self._poll() else min(2 * pause, _LONGEST_PAUSE)
                time.sleep(pause)

    def _accept(self) -> None:
        data, descriptors, *_ = socket.recv_fds(self._control, OTHER.size + LARGEST_METADATA, 1)
        if not data:
            os._exit(0)  # the node is gone
        if not descriptors:  # this process has too many
            return
        sock = socket.socket(fileno=descriptors[0])
        base, nbytes = OTHER.unpack_from(data)
        try:
            remote = self._remote(data[OTHER.size :])
        except Exception:  # noqa: BLE001 - whatever is wrong with the metadata of another node
            sock.close()
            return
        remote.users += 1
        self._selector.register(sock, selectors.EVENT_READ, _Channel(sock, remote, base, nbytes))

    def _remote(self, metadata: bytes) -> _Remote:
        for remote in self._remotes.values():
            if remote.metadata == metadata:
                return remote
            if remote.name.encode() in metadata:
                raise ValueError("another agent has this name")
        if metadata == self._metadata:
            name = self._name
        elif self._name.encode() in metadata:
            raise ValueError("it has this agent's name")
        else:
            name = self._agent.add_remote_agent(metadata)
            name = name if isinstance(name, str) else name.decode()
        self._remotes[name] = remote = _Remote(name, metadata)
        return remote

    def _heard(self, channel: _Channel) -> None:
        try:
            data = channel.sock.recv(READ.size)
        except OSError:
            data = b""
        if not data:
            self._close(channel)
        elif data == FREE:
            self._freed(channel)
        else:
            self._waiting.append((channel, *READ.unpack(data)))
            self._start()

    def _freed(self, channel: _Channel) -> None:
        if channel.held is not None:
            self._free.append(channel.held)
            channel.held = None
            self._start()

    def _start(self) -> None:
        while self._waiting and self._free:
            channel, offset, nbytes = self._waiting.popleft()
            if channel.sock.fileno() < 0:
                continue
            if not 0 < nbytes <= self._chunk or offset + nbytes > channel.nbytes:
                self._close(channel)
                continue
            chunk = self._free.pop()
            try:
                mine = self._agent.get_xfer_descs([(self._base + chunk, nbytes, 0)], "DRAM")
                theirs = self._agent.get_xfer_descs([(channel.base + offset, nbytes, 0)], "DRAM")
                handle = self._agent.initialize_xfer("READ", mine, theirs, channel.remote.name)
            except Exception:  # noqa: BLE001 - nothing was started
                self._free.append(chunk)
                self._close(channel)
                continue
            channel.remote.users += 1
            transfer = _Transfer(handle, chunk, channel)
            try:
                self._look(transfer, self._agent.transfer(handle))
            except Exception:  # noqa: BLE001 - nobody knows what was started
                self._failed(transfer)

    def _poll(self) -> bool:
        """Whether a transfer has ended."""
        transfers, self._transfers = self._transfers, []
        before = len(transfers)
        for transfer in transfers:
            try:
                self._look(transfer, self._agent.check_xfer_state(transfer.handle))
            except Exception:  # noqa: BLE001 - of NIXL
                self._failed(transfer)
        self._start()
        return len(self._transfers) < before

    def _look(self, transfer: _Transfer, state: str) -> None:
        if state == "PROC":
            self._transfers.append(transfer)
            late = time.monotonic() - _GIVEN_UP
            self._check_lost(sum(one.channel.closed <= late for one in self._transfers))
            return
        if state != "DONE":
            self._failed(transfer)
            return
        transfer.handle.release()
        channel = transfer.channel
        try:
            channel.sock.send(ANSWER.pack(transfer.chunk))
            channel.held = transfer.chunk
        except OSError:  # closed meanwhile
            self._free.append(transfer.chunk)
            self._close(channel)
        self._leave(channel.remote)

    def _failed(self, transfer: _Transfer) -> None:
        self._lost += 1
        self._kept.append(transfer.handle)
        self._check_lost(0)
        self._close(transfer.channel)
        self._leave(transfer.channel.remote)

    def _check_lost(self, more: int) -> None:
        if 2 * (self._lost + more) >= self._count:
            os._exit(3)

    def _close(self, channel: _Channel) -> None:
        if channel.sock.fileno() < 0:
            return
        channel.closed = time.monotonic()
        self._selector.unregister(channel.sock)
        channel.sock.close()
        self._freed(channel)
        self._leave(channel.remote)

    def _leave(self, remote: _Remote) -> None:
        remote.users -= 1
        if not remote.users:
            del self._remotes[remote.name]
            if remote.name != self._name:
                with contextlib.suppress(Exception):  # it is gone already
                    self._agent.remove_remote_agent(remote.name)


def _agent(name: str) -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    package = next(name for name in PACKAGES if importlib.util.find_spec(name) is not None)
    api = importlib.import_module(f"{package}._api")
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
    if "UCX" not in agent.backends:
        raise OSError("it has no plugin for UCX")
    return agent


def _main(control: str, memory: str, count: str, chunk: str) -> None:
    sock = socket.socket(fileno=int(control))
    try:
        helper = _Helper(sock, int(memory), int(count), int(chunk))
    except Exception as e:  # noqa: BLE001 - the node says it
        sock.send(READY.pack(b"E", 0) + f"{type(e).__name__}: {e}".encode()[:1000])
        os._exit(1)
    try:
        helper.run()
    finally:
        os._exit(2)  # without the destructors of NIXL, which wait for others


if __name__ == "__main__":
    _main(*sys.argv[1:])
