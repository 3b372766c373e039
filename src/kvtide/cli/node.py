"""``kvtide node``: one store for all processes of this host."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from kvtide import config as configuration

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def node(
    socket: Annotated[Path, typer.Option(help="Where clients find it: kvtide.connect('unix:SOCKET').")] = Path(
        "kvtide.sock"
    ),
    file: Annotated[
        Path | None,
        typer.Option("--config", help="Read this file instead of $KVTIDE_CONFIG or ./kvtide.toml."),
    ] = None,
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
        float, typer.Option(help="How long a stop may take to write the blocks that are worth keeping.")
    ] = 30.0,
    idle_seconds: Annotated[
        float | None, typer.Option(help="Stop after this long without a client. Without it: never.")
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

    To watch the node: [bold]kvtide status[/bold]
    """
    from kvtide.cpu_binding import bind
    from kvtide.node import run

    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    options = {"node.http": http, "record.path": record, "record.limit": record_limit}
    settings = configuration.read(file, overrides={name: v for name, v in options.items() if v is not None})
    bind(settings.node.cpus, unbind)
    if detach:
        run.detach(lambda ready: run.serve(settings, socket, stop_seconds, idle_seconds, ready))
    else:
        run.serve(settings, socket, stop_seconds, idle_seconds)
