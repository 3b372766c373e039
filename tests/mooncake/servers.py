"""A Mooncake master, and clients that hold a segment of its pool. They listen on all interfaces, whatever they are
told: so they are started only where there is no other than loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from kvtide.testing.servers import Server, free_ports

__all__ = ["Holder", "MooncakeMaster", "alone", "libraries", "missing"]

_UNPACKED = Path(__file__).parents[2] / ".peers" / "mooncake" / "debian"
"""Where ``bench/peers/environments.py`` unpacks what Mooncake needs of Debian."""
_HOLD = """
import os, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup(sys.argv[3], "P2PHANDSHAKE", int(sys.argv[2]), 0, "tcp", "", sys.argv[1])
print(code, flush=True)
sys.stdin.read()
os._exit(0)
"""


def libraries() -> dict[str, str]:
    """Environment variables by which Mooncake finds its libraries."""
    folders = sorted({str(file.parent) for file in _UNPACKED.rglob("*.so*")})
    return {"LD_LIBRARY_PATH": ":".join([*folders, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])}


def missing() -> str:
    """Why Mooncake cannot run here; empty if it can."""
    if find_spec("mooncake") is None:
        return "mooncake-transfer-engine-non-cuda is not installed"
    command = [sys.executable, "-c", "import mooncake.store"]
    tried = subprocess.run(command, capture_output=True, text=True, env=os.environ | libraries(), check=False)
    if tried.returncode:
        return (
            f"{tried.stderr.strip().splitlines()[-1]} (python bench/peers/environments.py mooncake unpacks libraries)"
        )
    return ""


def alone() -> bool:
    """Whether this process is in a network namespace that has nothing but loopback."""
    return {name for _, name in socket.if_nameindex()} == {"lo"}


class MooncakeMaster(Server):
    """``mooncake_master``. What it knows is gone when it is killed."""

    def __init__(self, folder: Path, *options: str) -> None:
        assert alone()
        super().__init__(folder)
        self.port, self._http = free_ports(2)
        self._options = options

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"mooncake://{self.address}?admin={self._http}"

    def _command(self) -> list[str]:
        found = find_spec("mooncake")
        assert found is not None
        assert found.origin is not None
        # Leases are short, so that what was read just now can be evicted; a client that died is noticed soon.
        return [
            str(Path(found.origin).with_name("mooncake_master")),
            f"--rpc_port={self.port}",
            f"--metrics_port={self._http}",
            "--default_kv_lease_ttl=1000",
            "--client_ttl=3",
            *self._options,
        ]

    def _answers(self) -> bool:
        try:
            for port in (self.port, self._http):
                socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            return False
        return True


class Holder:
    """A process that puts ``nbytes`` of memory into the pool, at the address ``host``."""

    def __init__(self, master: MooncakeMaster, nbytes: int, host: str = "127.0.0.1") -> None:
        command = [sys.executable, "-c", _HOLD, master.address, str(nbytes), host]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        if (said := self._process.stdout.readline().strip()) != "0":
            self.kill()
            raise RuntimeError(f"the holder's setup answered {said!r}")

    def hold(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
