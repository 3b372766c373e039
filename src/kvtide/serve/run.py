"""The process of ``kvtide serve``: from a model's name to a server that answers, and its end in good order.

On SIGTERM or SIGINT uvicorn takes no new connections and waits for the requests that it has; what is not answered in
time is told to stop, which it does at its next token. Then the store writes down what is worth keeping.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable

import uvicorn

import kvtide
from kvtide.engines.transformers.attach import attach
from kvtide.engines.transformers.loading import LoadedModel
from kvtide.errors import ConfigError
from kvtide.serve.app import Service
from kvtide.serve.connections import Limits, configuration
from kvtide.serve.generation import GenerationEngine

__all__ = ["listen", "serve"]

log = logging.getLogger("kvtide.serve")


def listen(host: str, port: int, keyed: bool = False) -> socket.socket:
    """Take an address; ``keyed``: whoever asks there must have a key. Raises ConfigError if it cannot be had, or if
    other hosts reach it and none is asked for."""
    try:
        at = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen at {host}:{port}: {error}; give another --host or --port") from error
    if not keyed and not ipaddress.ip_address(at.getsockname()[0].partition("%")[0]).is_loopback:
        at.close()
        raise ConfigError(
            f"anybody who reaches {host} could use this model, and tell by its speed what others asked: give "
            "--api-key, or KVTIDE_API_KEY in the environment; or listen at 127.0.0.1"
        )
    return at


def serve(
    loaded: LoadedModel,
    store: kvtide.Store | kvtide.Client,
    at: socket.socket,
    *,
    waiting: int = 16,
    limit: int | None = None,
    api_key: str | None = None,
    hosts: Iterable[str] = (),
    stop_seconds: int = 30,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve a model with a store at a socket, until SIGTERM or SIGINT. ``ready`` is called when clients may come.

    Without an ``api_key`` they must ask for a name of this host, for the socket's address or one of ``hosts``.
    Then finish what runs, for ``stop_seconds`` at most, and take as long again to close the store: if that is not
    enough the process ends at once, whatever hangs.
    """
    attached = attach(loaded.model, store)
    limits = Limits.for_queue(waiting)
    service = Service(
        GenerationEngine(loaded, attached),
        store,
        waiting=waiting,
        limit=limit,
        api_key=api_key,
        hosts=[str(at.getsockname()[0]), *hosts],
        body_seconds=limits.body_seconds,
    )
    server = uvicorn.Server(configuration(service.app, limits, stop_seconds))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn has its own while it runs, and raises it again at its end
    ready()
    server.run(sockets=[at])

    def close() -> None:
        service.close()
        attached.detach()
        store.close()

    closing = threading.Thread(target=close, name="kvtide-close", daemon=True)
    closing.start()
    closing.join(stop_seconds)
    if closing.is_alive():
        log.warning("not all was stored within %d seconds; the rest is lost", stop_seconds)
        logging.shutdown()
        os._exit(1)
