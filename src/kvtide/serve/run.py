"""The process of ``kvtide serve``: from loading a model to an orderly shutdown.

On SIGTERM or SIGINT uvicorn accepts no new connections and waits for running requests; those that are not finished in
time are told to stop, which they do at their next token. Then the store writes the blocks that are worth keeping.
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
from kvtide.engines.transformers.attached import attach
from kvtide.engines.transformers.loading import LoadedModel
from kvtide.errors import ConfigError
from kvtide.serve.app import Service
from kvtide.serve.connections import Limits, configuration
from kvtide.serve.generation import GenerationEngine

__all__ = ["listen", "serve"]

log = logging.getLogger("kvtide.serve")


def listen(host: str, port: int, keyed: bool = False) -> socket.socket:
    """Bind an address; ``keyed``: clients need an API key. Raises ConfigError if the address cannot be bound, or if
    other hosts can reach it and no key is required."""
    try:
        at = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise ConfigError(f"cannot listen at {host}:{port}: {reason}; give another --host or --port") from error
    if not keyed and not ipaddress.ip_address(at.getsockname()[0].partition("%")[0]).is_loopback:
        at.close()
        raise ConfigError(
            f"everyone who can reach {host} could use this model, and learn from its speed what others asked: give "
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
    """Serve a model with a store at a socket, until SIGTERM or SIGINT. ``ready`` is called when clients can connect.

    Without an ``api_key`` the Host header must be a name of this host, the socket's address or one of ``hosts``.

    At the end running requests get ``stop_seconds``, and closing the store gets as long again: if that is not enough,
    the process exits at once, whatever hangs.
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
        # uvicorn installs its own handlers while it runs, and raises the signal again at its end
        signal.signal(number, lambda *_: None)
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
