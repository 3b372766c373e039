"""Stores that serve and read each other's blocks, and a proxy between them that does harm."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvtide import config as configuration
from kvtide.peers.server import PeerServer
from kvtide.store.store import Store

__all__ = ["Proxy", "Stores", "black_hole", "silent", "token"]


def token(folder: Path, name: str = "token", text: str = "a secret that all the nodes know: 0123456789") -> str:
    """A file with a secret."""
    file = folder / name
    file.write_text(text)
    file.chmod(0o600)
    return str(file)


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """The address of a node that hangs: it can be connected to, and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def black_hole() -> Iterator[str]:
    """An address where packets vanish: nobody accepts a connection there, or refuses it."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(8):  # the kernel drops requests for connections beyond the backlog
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


class Stores:
    """Opens stores, and closes them at the end of its ``with``."""

    def __init__(self, folder: Path, **peers: Any) -> None:
        self._folder = folder
        self.peers = {"token_file": token(folder), "timeout": 5.0, **peers}
        self._stack = ExitStack()

    def __enter__(self) -> Stores:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def store(self, *addresses: str, listen: bool = False, clock: Any = None, **settings: Any) -> Store:
        """A store that reads from these addresses."""
        settings.setdefault("dram", {"budget": "16MiB", "segment": "1MiB"})
        peers = {**self.peers, "addresses": " ".join(addresses), "listen": "127.0.0.1:0" if listen else ""}
        peers |= settings.pop("peers", {})
        store = Store(configuration.read(None, env={}, peers=peers, **settings), clock=clock)
        self._stack.callback(store.close)
        return store

    def serving(self, *addresses: str, **settings: Any) -> tuple[Store, PeerServer]:
        """A store that also serves its blocks."""
        store = self.store(*addresses, listen=True, **settings)
        server = PeerServer(store)
        self._stack.callback(server.close)
        return store, server

    def proxy(self, server: PeerServer) -> Proxy:
        return self._stack.enter_context(contextlib.closing(Proxy(server.address)))


class _Way:
    """The bytes in one direction, on all connections together, and what happens to them. Thread-safe."""

    def __init__(self) -> None:
        self.passed = 0
        self.allowed = 1 << 60
        self.then = "pass"
        self.lock = threading.Lock()

    def harmed(self, data: bytes) -> tuple[bytes, str]:
        """What is sent on instead, and what happens then to the connection: "pass", "cut" or "freeze"."""
        with self.lock:
            left = self.allowed - self.passed
            self.passed += len(data)
            if left >= len(data) or self.then == "pass":
                return data, "pass"
            good, bad = data[: max(0, left)], data[max(0, left) :]
            if self.then in ("cut", "freeze", "hold"):
                return good, self.then
            self.allowed = 1 << 60
            if self.then == "flip":
                return good + bytes([bad[0] ^ 16]) + bad[1:], "pass"
            half = len(bad) // 2
            some = {
                "reorder": bad[half:] + bad[:half],
                "lose": bad[: half // 2] + bad[half:],
                "repeat": bad[:half] + bad,
            }
            return good + some[self.then], "pass"


class Proxy:
    """Passes bytes between askers and one server, and changes what the server says, or what the askers say.

    Some bytes pass, on all connections together; then something happens, see ``harm``.
    """

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._answers, self._requests = _Way(), _Way()
        self._lock = threading.Lock()
        self._chunk = 1 << 16
        self._pause = 0.0
        self._stop, self._released = threading.Event(), threading.Event()
        self._sockets: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def passed(self) -> int:
        """Bytes of the server that have passed."""
        return self._answers.passed

    @property
    def asked(self) -> int:
        """Bytes of the askers that have passed."""
        return self._requests.passed

    def harm(self, allowed: int, then: str, *, of: str = "server") -> None:
        """After ``allowed`` more bytes of the server, or of the "asker": "pass" on, "cut" the connection, "freeze"
        (nothing more comes, and the connection stays), "hold" the rest until ``release``, "flip" one bit, or, of those
        that follow and are there at that moment, "reorder" both halves, "lose" some or "repeat" some."""
        way = self._answers if of == "server" else self._requests
        with way.lock:
            way.allowed, way.then = way.passed + allowed, then

    def release(self) -> None:
        """Pass on what was held, and everything from now on."""
        for way in (self._answers, self._requests):
            with way.lock:
                way.allowed, way.then = 1 << 60, "pass"
        self._released.set()

    def redirect(self, address: str) -> None:
        """Connect to another server from now on."""
        host, port = address.rsplit(":", 1)
        self._target = host, int(port)

    def slow(self, chunk: int, pause: float) -> None:
        """Pass on so many bytes at a time in both directions, with a pause before each."""
        self._chunk, self._pause = chunk, pause

    def cut(self) -> None:
        """End all connections."""
        with self._lock:
            sockets = list(self._sockets)
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                asker, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                asker.close()
                continue
            with self._lock:
                self._sockets |= {asker, server}
            for way, ends in ((self._requests, (asker, server)), (self._answers, (server, asker))):
                thread = threading.Thread(target=self._pass_on, args=(way, *ends), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, way: _Way, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(self._chunk):
                some, then = way.harmed(data)
                self._stop.wait(self._pause) if self._pause else None
                target.sendall(some)
                if then == "freeze":
                    self._stop.wait()
                if then == "hold":
                    self._released.wait()
                    target.sendall(data[len(some) :])
                    then = "pass"
                if then != "pass":
                    break
        self._end(source, target)

    def _end(self, *sockets: socket.socket) -> None:
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._stop.set()
        self._released.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in list(self._threads):
            thread.join()
        for sock in self._sockets:
            sock.close()
