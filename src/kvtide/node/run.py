"""Runs a node, its server and its administration over HTTP, until it is stopped by a signal or has been idle."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from kvtide.config import Config
from kvtide.errors import ConfigError, KvtideError
from kvtide.forks import LockFile
from kvtide.node.admin.auth import HttpAuth
from kvtide.node.admin.http import Http
from kvtide.node.events.open import publish_events
from kvtide.node.server.loop import run_in_loop
from kvtide.node.server.mapped_memory import MappedMemory, beside
from kvtide.node.server.server import Node
from kvtide.peers.cluster_node import ClusterNode
from kvtide.peers.embedded_directory import EmbeddedDirectory
from kvtide.peers.server import PeerServer
from kvtide.store.store import Store
from kvtide.tiers.peers.cluster import EMBEDDED, check_cluster, with_directory
from kvtide.version import __version__

__all__ = ["detach", "serve"]

log = logging.getLogger("kvtide.node")

_PATIENCE = 60.0
"""Seconds to wait for a predecessor that is still writing its blocks to colder tiers."""


def serve(
    config: Config,
    path: Path,
    stop_seconds: float = 30.0,
    idle_seconds: float | None = None,
    ready: Callable[[str], None] = lambda http: None,
) -> None:
    """Serve a store at ``path`` until SIGTERM or SIGINT, or until there was no client for ``idle_seconds``.

    Then write what is worth keeping to colder tiers, for ``stop_seconds`` at most: after that the process exits at
    once, whatever hangs. ``ready`` is called when the node accepts clients, with the address of its HTTP server or "".
    """
    if not run_in_loop(_serve(config, path, stop_seconds, idle_seconds, ready)):
        log.warning("not all blocks were written to colder tiers within %g seconds; the rest is lost", stop_seconds)
        logging.shutdown()
        os._exit(1)


async def _serve(
    config: Config, path: Path, stop_seconds: float, idle_seconds: float | None, ready: Callable[[str], None]
) -> bool:
    """Returns whether the store was closed in time."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with _alone(path, stop) as alone:
        if not alone:
            return True
        passes = HttpAuth(config.node)
        check_cluster(config.peers)
        directory = None
        if config.peers.directory == EMBEDDED:
            directory = EmbeddedDirectory(config.peers)
            config = with_directory(config, directory.host, directory.port)
        mapped_memory = MappedMemory(beside(path, "lent"))
        node = peers = cluster = events = store = None

        def close() -> None:
            """In this order: nobody finds this node any more, it serves nobody any more, it writes what it keeps."""
            for part in (cluster, events, peers, store, directory):
                if part is not None:
                    part.close()

        try:
            store = Store(config, mapped=True, already_mapped=mapped_memory.elsewhere)
            node = Node(store, path, mapped_memory)
            if config.events.endpoint:
                events = node.events = publish_events(store, beside(path, "events"))
            http = Http(node, passes)
            if config.node.http:
                await http.listen(config.node.http)
            if config.peers.listen:
                peers = node.peers = PeerServer(store)
                if config.peers.directory:
                    cluster = node.cluster = ClusterNode(store, peers)
        except BaseException:
            if node is not None:
                node.close()
            close()
            raise
        log.info("kvtide %s serves at %s", __version__, path)
        _notify("READY=1")
        ready(http.address)
        gc.collect()
        gc.freeze()  # these objects stay alive: scanning them in every collection would make clients wait
        if idle_seconds is not None:
            node.when_idle(idle_seconds, stop.set)
        await stop.wait()
        _notify("STOPPING=1")
        node.close()
        closing = threading.Thread(target=close, name="kvtide-close", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, stop_seconds)
        http.close()
        return not closing.is_alive()


@contextlib.asynccontextmanager
async def _alone(path: Path, stop: asyncio.Event) -> AsyncIterator[bool]:
    """Make sure that this is the only node of a socket. Waits for a node that is stopping, but not for one that serves.

    Yields False if this process was told to stop while it waited.
    """
    end = time.monotonic() + _PATIENCE
    if not path.name:
        raise ConfigError(f"a node cannot be at {str(path)!r}: name a file for its socket, kvtide.sock say")
    file = beside(path, "alive")
    try:
        alive = LockFile(file)
    except OSError as e:
        raise ConfigError(
            f"a node cannot be at {path}: {e.strerror}; give a --socket in a folder that it may write to"
        ) from e
    with alive:
        while not stop.is_set():
            try:
                alive.take(wait=False)
                break
            except BlockingIOError:
                if path.exists() or time.monotonic() > end:
                    raise ConfigError(f"another node serves {path}; stop it, or give another socket") from None
                await asyncio.sleep(0.02)
        if not stop.is_set() and path.is_socket():
            path.unlink()  # left behind by a node that was killed
        yield not stop.is_set()


def detach(run: Callable[[Callable[[], None]], None]) -> None:
    """Run ``run`` in a detached child process; returns when ``run`` has called its argument.

    Call it before there are other threads. Raises KvtideError if the child process ends before.
    """
    ours, theirs = os.pipe()
    if os.fork():
        os.close(theirs)
        with os.fdopen(ours, "rb") as answer:
            text = answer.read().decode()
        if text != "ready":
            raise KvtideError(text or "the node ended before it was ready")
        return
    os.close(ours)
    os.setsid()
    listening = True

    def say(text: str) -> None:
        nonlocal listening
        if listening:
            listening = False
            os.write(theirs, text.encode())
            os.close(theirs)

    try:
        run(lambda: say("ready"))
    except KvtideError as e:
        if not listening:
            raise
        say(str(e))  # the parent raises it
    except BaseException as e:
        say(str(e))
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def _notify(state: str) -> None:
    """Notify systemd, if it started this process."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)
