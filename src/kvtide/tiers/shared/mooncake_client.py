"""The client library of a Mooncake Store, inside this process: opened in the background, asked again when it fails.

The library is C++ with about twenty threads of its own. What it does not do well in a process that must go on is done
here:

- *Opening and closing hold the GIL*, while the master is asked. So the master is asked over HTTP first, with a
  deadline. That its HTTP server answers does not mean that its RPC port does: it may be another port, or behind a
  firewall. So another process opens a client next, and ``setup`` is called here only when that could. The library's
  own deadline for a request is set to some seconds, unless the environment has one: its default is 30 s.
- *A master that does not answer.* Each call would wait for that deadline. So after a call that could not reach the
  master, no other is made until the master's HTTP server answers; it is asked with growing pauses. The library itself
  recovers from a restarted master. A client that fails again and again although the master answers is opened anew.
- *A transfer that hangs.* One that makes no progress is ended by the library, with its socket; its deadline for that is
  set to some seconds too. It has none for connecting: see mooncake_connects.py. A call for a whole object, which is
  made for objects on disks, is given up after 60 s, and its socket stays open: bytes may still arrive in the caller's
  memory later. The client is closed then, which ends its sockets, and only after that the call ends.
- *Forks.* In a child the library's threads are missing, and its clean-up at exit would crash. A child ends without it.
- *Its log* goes to stderr, with a line for every block that is not there. It is switched off, unless MC_LOG_LEVEL or
  MC_LOG_DIR is set.

A client listens on all interfaces of the host, without authentication or encryption, also if it holds no segment: so
does the library, whatever it is told.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import http.client
import importlib
import logging
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from kvtide import forks
from kvtide.errors import ConfigError
from kvtide.tiers.shared.blobs import reason_of
from kvtide.tiers.shared.mooncake_connects import ConnectWatch
from kvtide.units import parse_size

__all__ = [
    "ABSENT",
    "EXISTS",
    "LEASE_ENDED",
    "STALLED",
    "MooncakeAddress",
    "MooncakeClient",
    "OpenedStore",
    "load_library",
    "parse_address",
]

log = logging.getLogger("kvtide.mooncake")

ABSENT = frozenset({-704, -703})
"""Answers of the library: there is no such object, or it is not complete yet."""
EXISTS, LEASE_ENDED = -705, -707
STALLED = 5.0
"""Seconds after which a transfer that makes no progress is ended."""
_UNREACHABLE, _TIMED_OUT = -900, -901
_CODES = {
    -200: (errno.ENOSPC, "Mooncake has no space: no segment is mounted, or nothing in it can be evicted"),
    LEASE_ENDED: (
        errno.ESTALE,
        "Mooncake's lease ended before the bytes were read: its default_kv_lease_ttl is too short",
    ),
    -800: (errno.EIO, "a transfer failed: the Mooncake client that has the bytes is gone, or hangs"),
    -1700: (errno.EDQUOT, "the quota of this tenant in Mooncake is used up"),
    _UNREACHABLE: (errno.EHOSTUNREACH, "the Mooncake master cannot be reached"),
    _TIMED_OUT: (errno.ETIMEDOUT, "the Mooncake master did not answer in time"),
}
_MASTER, _ADMIN = 50051, 9003
"""Default ports of a master."""
_DEFAULTS = {
    "MC_RPC_TIMEOUT_MS": "5000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "2000",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": f"{STALLED:.0f}",
    "MC_TCP_STATUS_TIMEOUT_SEC": f"{STALLED:.0f}",
    "MC_TCP_LANES_PER_PEER": "2",  # a host that does not answer is given up after so many connections
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",  # opening is repeated here, without holding the GIL
}
"""Settings of the library, which are environment variables, where the environment does not have them."""
_GIVEN_UP = 50.0
"""Seconds after which a failed transfer may be one that the library gave up (after 60 s) but did not end."""
_PROBE = 2.0
"""Seconds for a question to the master's HTTP server."""
_OPENING = 30.0
"""Seconds for another process to open a client."""
_OPEN = """
import os, sys
from mooncake.store import MooncakeDistributedStore
own, metadata, master = sys.argv[1:]
os._exit(1 if MooncakeDistributedStore().setup(own, metadata, 0, 0, "tcp", "", master) else 0)
"""
_PAUSES = 0.25, 10.0
"""The first and the longest pause between attempts to reach the master."""
_FAILURES = 3
"""A client that failed so often in a row, although the master answers, is opened anew."""
_PATIENCE = 5.0
"""Seconds that ``close`` waits for calls under way."""
_PART = 1 << 20
"""Bytes of an answer over HTTP that are read at a time."""
_NAME = b"kvtide"
_HOSTS = 4096
"""Hosts of the pool that are remembered."""


class MooncakeAddress(NamedTuple):
    """See ``parse_address``."""

    host: str
    port: int
    admin_host: str
    admin_port: int
    own: str
    """Name or address of this host for other clients; empty: the one from which it reaches the master."""
    metadata: str
    segment: int
    local_buffer: int


class OpenedStore:
    """An opened client of the library, and how many calls use it."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.users = 0
        self.closing = False
        self.closed = threading.Event()


def parse_address(url: str) -> MooncakeAddress:
    """Read ``mooncake://master:50051?metadata=P2PHANDSHAKE&segment=4GiB``. Raises ConfigError."""
    wrong = f"mooncake.url is {url!r}"
    try:
        parts = urlsplit(url)
        given = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        port = _MASTER if parts.port is None else parts.port
        host = parts.hostname or ""
        admin_host, _, admin_port = given.pop("admin", str(_ADMIN)).rpartition(":")
        address = MooncakeAddress(
            host,
            port,
            admin_host or host,
            int(admin_port),
            given.pop("host", ""),
            given.pop("metadata", "P2PHANDSHAKE"),
            parse_size(given.pop("segment", "0")),
            parse_size(given.pop("local_buffer", "64MiB")),
        )
    except ConfigError as e:  # of a size
        raise ConfigError(f"{wrong}, which cannot be used: {e}") from e
    except ValueError as e:
        raise ConfigError(
            f"{wrong}; it must be mooncake://HOST:PORT?NAME=VALUE&NAME=VALUE, where PORT is the rpc_port of the "
            "master, and admin=PORT or admin=HOST:PORT its HTTP server"
        ) from e
    if parts.scheme != "mooncake" or not host or parts.path.strip("/") or "@" in parts.netloc or parts.fragment:
        raise ConfigError(f"{wrong}; it must be mooncake://HOST:PORT, where PORT is the rpc_port of the master")
    if (protocol := given.pop("protocol", "tcp")) != "tcp":
        raise ConfigError(f"{wrong}: protocol is {protocol!r}, but kvtide reads and writes Mooncake over tcp alone")
    if given:
        raise ConfigError(
            f"{wrong}: {next(iter(given))!r} is not known; known are protocol, metadata, segment, local_buffer, admin "
            "and host"
        )
    return address


class MooncakeClient:
    """A client of the master at ``address``. Thread-safe. Raises ConfigError if the library cannot be loaded."""

    def __init__(self, address: MooncakeAddress) -> None:
        self.address = address
        self._library = load_library()
        self._origin = forks.here
        forks.tell(self)
        self._changed = threading.Condition()
        self._opened: OpenedStore | None = None
        self._why: OSError | None = None
        """Why the last attempt to reach the master failed; None: it did not."""
        self._tried = self._doubted = self._closed = self._exits = self._told = False
        self._failures = 0
        """Calls in a row that could not reach the master."""
        self._trial: subprocess.Popen[bytes] | None = None
        """The process that opens a client, to see whether that can be done."""
        self._hosts: set[str] = set()
        """Hosts that have or had memory of the pool."""
        self._connects = ConnectWatch(self._known_hosts)
        self._thread = threading.Thread(target=self._run, name="kvtide-mooncake", daemon=True)
        atexit.register(self._exit)
        try:
            self._thread.start()
        except BaseException:
            atexit.unregister(self._exit)
            self._connects.close()
            raise

    def __repr__(self) -> str:
        return f"<Mooncake {self.address.host}:{self.address.port}>"

    def __str__(self) -> str:
        return f"Mooncake at {self.address.host}:{self.address.port}"

    # -- calls --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def use(self, timeout: float) -> Iterator[OpenedStore]:
        """The opened client, for one call. Raises OSError at once if the master was not reached last time."""
        forks.check(self._origin)
        with self._changed:
            ready = self._changed.wait_for(lambda: self._closed or self._opened is not None or self._tried, timeout)
            opened = self._opened
            if self._exits:  # nobody needs to be told of an error now
                self._changed.wait(_PATIENCE)
            if self._closed:
                raise OSError(errno.ECANCELED, "the Mooncake client was closed")
            if not ready:
                raise TimeoutError(errno.ETIMEDOUT, _CODES[_TIMED_OUT][1])
            if opened is None or self._doubted:
                why = self._why
                raise type(why)(*why.args) if why is not None else OSError(*_CODES[_UNREACHABLE])
            opened.users += 1
        try:
            with self._connects.call():
                yield opened
        finally:
            with self._changed:
                opened.users -= 1
                self._changed.notify_all()

    def met(self, endpoints: Iterable[str]) -> None:
        """These addresses (HOST:PORT) have memory of the pool."""
        if len(self._hosts) > _HOSTS:
            self._hosts = set()
        self._hosts.update(endpoint.rpartition(":")[0].strip("[]") for endpoint in endpoints)

    def _known_hosts(self) -> Collection[str]:
        with contextlib.suppress(OSError):
            self.met(self.fetch("/get_all_segments", _PROBE).decode(errors="replace").split())
        return list(self._hosts)

    def replication(self) -> Any:
        """How an object is to be kept, to be filled in."""
        return self._library.ReplicateConfig()

    def judge(self, opened: OpenedStore, codes: Sequence[int], seconds: float) -> None:
        """A call answered ``codes``, after so many seconds: decide whether this client is used again.

        Returns when nothing of the call is under way any more.
        """
        lost = any(code in (_UNREACHABLE, _TIMED_OUT) for code in codes)
        with self._changed:
            self._failures = self._failures + 1 if lost else 0
            if lost:
                self._doubted = True
                self._why = None
                self._changed.notify_all()
        given_up = seconds > _GIVEN_UP and any(code < 0 and code not in ABSENT for code in codes)
        if given_up or self._failures >= _FAILURES:
            self._retire(opened)

    def check(self, code: int) -> None:
        """Raise the error that a negative answer of the library means."""
        if code == _TIMED_OUT:
            raise TimeoutError(*_CODES[code])
        if code < 0:
            raise OSError(*_CODES.get(code, (errno.EIO, f"Mooncake answered {code}")))

    def _retire(self, opened: OpenedStore) -> None:
        """Close a client that is not used any more once all its calls have ended, and let another be opened."""
        with self._changed:
            if self._opened is opened:
                self._opened, self._failures = None, 0
                self._changed.notify_all()
            # Each call ends: the library gives up after 60 s.
            self._changed.wait_for(lambda: not opened.users)
        self._shut(opened)

    def _shut(self, opened: OpenedStore) -> None:
        with self._changed:
            mine, opened.closing = not opened.closing, True
        if mine:
            try:
                opened.store.close()
            finally:
                opened.closed.set()
        opened.closed.wait()

    def fetch(self, path: str, timeout: float) -> bytes:
        """What the master's HTTP server answers. Raises OSError."""
        return b"".join(self._parts(path, timeout))

    def lines(self, path: str, timeout: float) -> Iterator[bytes]:
        """The lines of what the master's HTTP server answers, which may be more than this process has memory for.
        Raises OSError."""
        rest = b""
        for part in self._parts(path, timeout):
            *whole, rest = (rest + part).split(b"\n")
            yield from whole
            if len(rest) > _PART:
                raise OSError(errno.EIO, "the HTTP server of the Mooncake master does not answer as expected")
        yield rest

    def _parts(self, path: str, timeout: float) -> Iterator[bytes]:
        end = time.monotonic() + timeout
        connection = http.client.HTTPConnection(self.address.admin_host, self.address.admin_port, timeout=timeout)
        try:
            connection.request("GET", path)
            with connection.getresponse() as answer:
                if answer.status != 200:
                    raise OSError(errno.EIO, f"the HTTP server of the Mooncake master answered {answer.status}")
                while part := answer.read1(_PART):  # ``read`` would wait for all of them, and ``timeout`` for each
                    yield part
                    if time.monotonic() > end:
                        raise TimeoutError(*_CODES[_TIMED_OUT])
        except TimeoutError:
            raise TimeoutError(*_CODES[_TIMED_OUT]) from None
        except (http.client.HTTPException, ConnectionError) as e:
            raise OSError(errno.EHOSTUNREACH, "the HTTP server of the Mooncake master cannot be reached") from e
        finally:
            connection.close()

    # -- opening ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Open the client when there is none, and ask the master whether it is back when a call did not reach it."""
        pause = _PAUSES[0]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._opened is None or self._doubted)
                if self._closed:
                    return
                opened = self._opened
            try:
                self.fetch("/health", _PROBE)
                new = self._open() if opened is None else None
            except Exception as e:  # noqa: BLE001 - whatever the library raises: the thread must go on
                self._report(e)
                with self._changed:
                    self._why = e if isinstance(e, OSError) else OSError(errno.EIO, f"Mooncake: {e}")
                    self._tried = True
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._closed, pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _PAUSES[1])
                continue
            pause, self._told = _PAUSES[0], False
            if (unwanted := self._reached(new)) is not None:
                self._shut(unwanted)
            else:
                self._known_hosts()  # now: the master forgets those that vanish

    def _reached(self, new: OpenedStore | None) -> OpenedStore | None:
        """The master answers, and ``new`` was opened if there was none. Returns it if ``close`` did not wait for it."""
        with self._changed:
            self._why, self._doubted, self._tried = None, False, True
            if new is not None and not self._closed:
                self._opened, new = new, None
            self._changed.notify_all()
        return new

    def _report(self, e: Exception) -> None:
        if not self._told and not self._closed:  # ``close`` ends the trial
            self._told = True
            log.warning("%s cannot be used: %s; all its blocks are misses until it can", self, reason_of(e))

    def _open(self) -> OpenedStore:
        address = self.address
        own = address.own or _own_address(address.host, address.port)
        master = f"{address.host}:{address.port}"
        failure = OSError(
            errno.EIO,
            f"Mooncake's client cannot be opened: is {master} the rpc_port of a master of the same version, and is "
            "there memory for the segment? MC_LOG_LEVEL=INFO shows what it does",
        )
        if not self._opens_elsewhere(own, master):
            raise failure
        store = self._library.MooncakeDistributedStore()
        # Never deleted: a forked child would run its destructor, which waits for threads that the child does not have.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
        if store.setup(own, address.metadata, address.segment, address.local_buffer, "tcp", "", master):
            store.close()
            raise failure
        return OpenedStore(store)

    def _opens_elsewhere(self, own: str, master: str) -> bool:
        """Whether another process can open a client."""
        command = [sys.executable, "-P", "-c", _OPEN, own, self.address.metadata, master]
        said = None if _logs() else subprocess.DEVNULL
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said) as trial:
            self._trial = trial
            try:
                return not self._closed and trial.wait(_OPENING) == 0
            except subprocess.TimeoutExpired:
                return False
            finally:
                trial.kill()

    def close(self) -> None:
        """Refuse further calls, and close the client when those under way have ended; hanging ones are left behind."""
        atexit.unregister(self._exit)
        if self._origin is not forks.here:
            return  # it belongs to the parent process
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if (trial := self._trial) is not None:
            trial.kill()
        self._thread.join(_PATIENCE)  # it may be opening one
        with self._changed:
            opened, self._opened = self._opened, None
            hanging = opened is not None and not self._changed.wait_for(lambda: not opened.users, _PATIENCE)
        if opened is not None and not hanging:
            self._shut(opened)
        if not hanging:  # else it helps those calls to end
            self._connects.close()
        if hanging or self._thread.is_alive():
            _leave_at_once()

    def _exit(self) -> None:
        self._exits = True
        self.close()

    def forked(self) -> None:
        _leave_at_once()


def _leave_at_once() -> None:
    """Skip the library's clean-up when this process exits: threads that it waits for are missing, or use its memory.

    Functions for the exit run in reverse order, and this one is registered after the library's.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)


def load_library() -> Any:
    """The module of the library. Raises ConfigError if it is not installed, or cannot be loaded."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        library = importlib.import_module("mooncake.store")
    except ModuleNotFoundError as e:
        raise ConfigError("mooncake.url is set, which needs Mooncake's client: pip install kvtide[mooncake]") from e
    except ImportError as e:
        raise ConfigError(
            f"mooncake.url is set, and Mooncake's client cannot be loaded: {e}. It needs libraries of RDMA, for TCP "
            "too: apt install libibverbs1 libnl-3-200 libnl-route-3-200"
        ) from e
    if not _logs():
        _silence()
    return library


def _logs() -> bool:
    """Whether the user asked for the library's log."""
    return bool({"MC_LOG_LEVEL", "MC_LOG_DIR"} & os.environ.keys())


def _silence() -> None:
    """Switch off the library's log. It is glog, which is in a file of its own."""
    mapped = Path("/proc/self/maps").read_text().splitlines()
    found = {line.split()[-1] for line in mapped if "/libglog" in line and "mooncake" in line}
    with contextlib.suppress(OSError, AttributeError, ValueError):  # it is not there, or another version
        for path in found:
            glog = ctypes.CDLL(path)
            if glog._ZN6google24glog_internal_namespace_26IsGoogleLoggingInitializedEv() & 0xFF:
                continue
            fatal = 3
            ctypes.c_int.in_dll(glog, "_ZN3fLI21FLAGS_stderrthresholdE").value = fatal
            glog._ZN6google17InitGoogleLoggingEPKc(_NAME)  # keeps the address of the name
            for severity in range(fatal + 1):
                glog._ZN6google17SetLogDestinationEiPKc(severity, b"")


def _own_address(host: str, port: int) -> str:
    """The address of this host from which it reaches the master. Raises OSError."""
    kind, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as sock:
        sock.connect(where)  # sends nothing
        return str(sock.getsockname()[0])
