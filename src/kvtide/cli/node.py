"""``kvtide node``: one store for all processes of this host."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtide.cli._options import ConfigFile, seconds, socket_of
from kvtide.version import __version__

if TYPE_CHECKING:
    from kvtide.config import Config

__all__ = ["app"]

FIRST_CLIENT = 30.0
"""Seconds that a node waits for its first client, as in the node's server."""

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def node(
    address: Annotated[
        str, typer.Option("--socket", metavar="SOCKET", help="Where clients find it: kvtide.connect('unix:SOCKET').")
    ] = "kvtide.sock",
    file: ConfigFile = None,
    http: Annotated[
        str | None,
        typer.Option(help="Serve /healthz, /metrics and /status there, 127.0.0.1:9410 say, instead of node.http."),
    ] = None,
    record: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Record which blocks all prompts have, without their content, for kvtide replay FILE; instead of "
            "record.path. The file must be new. A folder: each start gets a file of its own there. .gz: compressed.",
        ),
    ] = None,
    record_limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes of that file at which recording ends, instead of record.limit."),
    ] = None,
    stop_seconds: Annotated[
        float,
        typer.Option(
            metavar="TIME",
            parser=seconds,
            show_default="30s",
            help="How long a stop may take to write the blocks that are worth keeping.",
        ),
    ] = 30.0,
    idle_seconds: Annotated[
        float | None,
        typer.Option(
            metavar="TIME",
            parser=seconds,
            help="Stop when there was no client for this long; 0: when the last one leaves. After its start the node "
            f"waits for the first one for at least {FIRST_CLIENT:g} seconds. kvtide status is a client while it runs. "
            "Without it: never.",
        ),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Go on in the background; returns when it serves.")] = False,
    unbind: Annotated[
        bool,
        typer.Option("--unbind", help="Use all CPUs, whatever the process that starts it is bound to; see node.cpus."),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log what clients do.")] = False,
) -> None:
    """Serve one store to every process of this host, until SIGTERM or Ctrl-C.

    Engines may start and stop; the blocks stay, and all engines share them. In a program:

        [bold]store = kvtide.connect("unix:kvtide.sock")[/bold]

    To watch the node: [bold]kvtide status[/bold]. To stop it: [bold]kvtide stop[/bold]
    """
    from kvtide import config as configuration
    from kvtide.cpu_binding import bind
    from kvtide.node import run

    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    socket = socket_of(address, "a node serves its own host at a socket, and others with --http")
    options = {"node.http": http, "record.path": record, "record.limit": record_limit}
    settings = configuration.read(file, overrides={name: v for name, v in options.items() if v is not None})
    bind(settings.node.cpus, unbind)

    def serve(then: Callable[[], None] = lambda: None) -> None:
        def ready(http: str) -> None:
            with contextlib.suppress(OSError, ValueError):  # nobody can read it: no reason not to serve
                typer.echo(_started(settings, socket, http, idle_seconds), err=True)
            then()

        run.serve(settings, socket, stop_seconds, idle_seconds, ready)

    run.detach(serve) if detach else serve()


def _started(settings: Config, socket: Path, http: str, idle_seconds: float | None) -> str:
    """The line that a node prints when it serves."""
    from kvtide.units import format_size

    used = {
        "dram": True,
        "nvme": settings.nvme.path,
        "files": settings.files.path,
        "objects": settings.objects.url,
        "valkey": settings.valkey.url,
        "mooncake": settings.mooncake.url,
    }
    tiers = []
    for name in (name for name, on in used.items() if on):
        budget = getattr(settings, name).budget
        tiers.append(f"{name} {format_size(budget) if budget else 'without a budget'}")
    parts = [f"kvtide {__version__} serves at {socket.absolute()}", f"process {os.getpid()}", ", ".join(tiers)]
    if http:
        parts.append(f"{'https' if settings.node.certificate else 'http'}://{http}")
    if idle_seconds is not None:
        parts.append(f"ends after {idle_seconds:g} s without a client")
    return "; ".join(parts)
