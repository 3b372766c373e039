"""``kvtide evict``: enforces the byte budget of storage that many nodes share, in a process of its own."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import Annotated

import typer

from kvtide.cli._options import ConfigFile, seconds, size
from kvtide.errors import ConfigError

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def evict(
    budget: Annotated[
        int,
        typer.Option(
            metavar="SIZE",
            parser=size,
            help="Bytes that blocks may take there: 500GiB. The same as files.budget of every node.",
        ),
    ],
    folder: Annotated[
        str | None,
        typer.Option(
            "--path",
            metavar="PATH",
            help="The folder that files.path names. Default: the object store that objects.url names.",
        ),
    ] = None,
    lease: Annotated[
        float | None,
        typer.Option(
            metavar="TIME",
            parser=seconds,
            help="Silence after which another takes over; the same as files.lease of every node, whose default it has.",
        ),
    ] = None,
    file: ConfigFile = None,
) -> None:
    """Enforce the byte budget of shared storage, until SIGTERM or Ctrl-C.

    Nodes with files.budget do this among themselves: one of them is elected. With this process the budget is also
    enforced while no node runs, and no node has to do it:

        [bold]kvtide evict --path /mnt/shared --budget 10TiB[/bold]
        [bold]KVTIDE_OBJECTS_URL=s3://bucket kvtide evict --budget 10TiB[/bold]
    """
    from kvtide import config as configuration
    from kvtide.tiers.shared import blobs, files
    from kvtide.tiers.shared.budget import BudgetCoordinator, CoordinationBlobs
    from kvtide.tiers.shared.credits import BudgetThread
    from kvtide.tiers.shared.open import open_objects

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if not budget:
        raise ConfigError("--budget is 0: every block would be removed; give the bytes that they may take, 500GiB say")
    if lease is None:
        lease = configuration.Files().lease
    if not lease > 0:
        raise ConfigError(f"--lease is {lease:g}; it must be more than 0 seconds")
    if folder == "":
        raise ConfigError("--path is empty: give the folder that files.path of the nodes names")
    path = None if folder is None else Path(folder)
    objects = configuration.read(file).objects
    if path is None and not objects.url:
        raise ConfigError("there is no storage to keep a budget in: give --path, or set objects.url")
    if path is not None and not path.is_dir():
        raise ConfigError(
            f"--path is {str(path)!r}, which is {'no folder' if path.exists() else 'not there'}; give the folder that "
            "files.path of the nodes names, and mount it first if it is on another host"
        )
    storage = open_objects(objects) if path is None else files.Files(path / blobs.ROOT)
    coordination = CoordinationBlobs(storage, lease)
    budget_thread = BudgetThread(coordination, BudgetCoordinator(coordination, budget))
    ends = {signal.SIGTERM, signal.SIGINT}
    # in all threads: a handler could wait for a lock of the code it interrupted
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    budget_thread.start()
    signal.sigwait(ends)
    budget_thread.close()
    storage.close()
