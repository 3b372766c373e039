"""A node's side of the process that has its NIXL agent: starts it, and shares memory with it. See nixl_helper.py."""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import importlib.util
import logging
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from kvtide import forks
from kvtide.block import Span
from kvtide.errors import ConfigError
from kvtide.tiers.peers.nixl_helper import LARGEST_METADATA, OTHER, PACKAGES, READY

__all__ = ["CHUNK", "NixlOffer", "NixlProcess", "nixl_for"]

log = logging.getLogger("kvtide.peers")

CHUNK = 4 << 20
"""Bytes that are moved at a time."""
_COUNT = 8
"""Chunks for what is sent, and as many for what is received."""
_SOON = 30.0
"""Seconds that the process may take to start, and after which one that has ended is replaced."""
_VARIABLES = (
    *("UCX_", "NIXL_", "CUDA_", "NVIDIA_", "MLX", "IBV_", "RDMAV_", "LD_", "GLIBC_", "PYTHON"),
    *("PATH", "HOME", "TMPDIR", "LANG", "LC_"),
)
"""How the environment variables begin that the process gets. Not all: others may read its memory, and there may be
secrets among them."""
_DEVICES = Path("/sys/class/infiniband")
_ONLY_RDMA = "ib,sm,self"
"""The transports of UCX that are used if nothing else is asked for. Not TCP: it would listen on all networks."""


class NixlOffer:
    """What the other end needs to read this end's chunks."""

    def __init__(self, base: int, nbytes: int, metadata: bytes) -> None:
        self.base = base
        self.nbytes = nbytes
        self.metadata = metadata


class NixlProcess:
    """One process for all connections. Thread-safe."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """``environment``: variables for the process alone."""
        self._environment = dict(environment or {})
        self._origin = forks.here
        self._lock = threading.Lock()
        self._offer: NixlOffer | None = None
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = threading.Lock()
        """Held while the process is started or ended, which may take long."""
        self._tried = -_SOON
        self._closed = False
        self._descriptor = -1
        self._memory: Span = memoryview(b"")
        """Empty until the process is started for the first time."""
        self._free = list(range(0, _COUNT * CHUNK, CHUNK))
        forks.tell(self)

    def __repr__(self) -> str:
        return f"<NixlProcess, {'running' if self.offer() is not None else 'not running'}>"

    @property
    def pid(self) -> int:
        """Of the process with NIXL; 0: there is none."""
        process = self._process
        return process.pid if process is not None else 0

    def offer(self) -> NixlOffer | None:
        """None: NIXL cannot be used now."""
        process = self._process
        return self._offer if process is not None and process.poll() is None else None

    def start(self) -> None:
        """Start the process, unless it runs, and wait until it is ready. Raises OSError."""
        with self._starts:
            if self._closed or self.offer() is not None:
                return
            self._tried = time.monotonic()
            self._end()
            self._open_memory()
            try:
                self._start()
            except BaseException:
                self._end()
                raise

    def start_soon(self) -> None:
        """Start the process in the background, unless that was tried lately."""
        if self._closed or self.offer() is not None or time.monotonic() < self._tried + _SOON:
            return
        self._tried = time.monotonic()

        def start() -> None:
            try:
                self.start()
            except OSError as e:
                log.warning("blocks of other nodes are read over TCP: %s", e.strerror or e)

        try:
            threading.Thread(target=start, name="kvtide-nixl-start", daemon=True).start()
        except RuntimeError:  # the system cannot start more threads: later, perhaps
            log.warning("blocks of other nodes are read over TCP: there can be no more threads")

    def _open_memory(self) -> None:
        if self._descriptor >= 0:
            return
        descriptor = os.memfd_create("kvtide-nixl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, 2 * _COUNT * CHUNK)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._memory = memoryview(mmap.mmap(descriptor, 2 * _COUNT * CHUNK))
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def _start(self) -> None:
        control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = control
        with other:
            passed = other.fileno(), self._descriptor
            command = [sys.executable, "-P", "-m", "kvtide.tiers.peers.nixl_helper"]
            self._process = subprocess.Popen(
                [*command, *map(str, passed), str(_COUNT), str(CHUNK)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # NIXL and UCX write there
                stderr=subprocess.DEVNULL,
                pass_fds=passed,
                env={k: v for k, v in os.environ.items() if k.startswith(_VARIABLES)} | self._environment,
            )
        if self._closed:  # ``close`` may have seen no process to kill, and waits for this one
            raise OSError(errno.ECANCELED, "the node ends")
        control.settimeout(_SOON)
        try:
            answer = control.recv(READY.size + LARGEST_METADATA)
        except TimeoutError:
            raise TimeoutError(errno.ETIMEDOUT, "NIXL does not start") from None
        if len(answer) < READY.size:
            raise OSError(errno.EIO, "the process with NIXL ended while it started")
        kind, base = READY.unpack_from(answer)
        rest = answer[READY.size :]
        if kind != b"R":
            raise OSError(errno.EIO, f"NIXL cannot be used: {rest.decode(errors='replace')}")
        control.settimeout(1.0)
        self._offer = NixlOffer(base, _COUNT * CHUNK, rest)

    def _end(self) -> None:
        """End the process; when that has returned, it writes to no memory."""
        self._offer = None
        with self._lock:
            control, self._control = self._control, None
        if control is not None:
            control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def channel(self, theirs: NixlOffer) -> socket.socket:
        """A channel for reads from another end. Raises OSError."""
        mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            try:
                with self._lock:
                    if self._control is None or self.offer() is None:
                        raise ConnectionResetError(errno.ECONNRESET, "the process with NIXL has ended")
                    message = OTHER.pack(theirs.base, theirs.nbytes) + theirs.metadata
                    socket.send_fds(self._control, [message], [other.fileno()])
            except BaseException:
                mine.close()
                raise
        return mine

    def at(self, offset: int, nbytes: int) -> Span:
        """A part of the memory that is shared with the process."""
        return self._memory[offset : offset + nbytes]

    def take(self) -> int | None:
        """The offset of a chunk to send; None: all are in use."""
        with self._lock:
            return self._free.pop() if self._free else None

    def give(self, offset: int) -> None:
        with self._lock:
            self._free.append(offset)

    def close(self) -> None:
        """May be repeated."""
        if self._origin is not forks.here:
            return  # it belongs to the parent process
        self._closed = True
        if (process := self._process) is not None:
            process.kill()  # one that starts ends the wait for it
        with self._starts:
            self._end()
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def forked(self) -> None:
        with contextlib.suppress(OSError):
            if self._control is not None:
                os.close(self._control.detach())
        self._closed = True
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1


_only: dict[int, NixlProcess] = {}
_making = threading.Lock()


def nixl_for(setting: str) -> NixlProcess | None:
    """This process's one, for a value of ``peers.fabric``; None: NIXL is not to be used. Raises ConfigError."""
    if setting == "tcp":
        return None
    there = any(importlib.util.find_spec(name) is not None for name in PACKAGES)
    if setting == "auto" and not (there and _DEVICES.is_dir() and any(_DEVICES.iterdir())):
        return None
    if not there:
        raise ConfigError(
            'peers.fabric is "nixl", and the package is not installed: pip install --no-deps nixl-cu12; or set it to '
            '"auto" or "tcp"'
        )
    environment = {}
    if setting == "auto":
        environment["UCX_TLS"] = os.environ.get("UCX_TLS", _ONLY_RDMA)
    with _making:
        found = _only.get(os.getpid())
        if found is None:
            _only[os.getpid()] = found = NixlProcess(environment)
            atexit.register(found.close)
    return found
