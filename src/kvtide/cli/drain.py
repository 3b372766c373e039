"""``kvtide drain``: prepares a node of a cluster for its end."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvtide.cli._options import socket_of

if TYPE_CHECKING:
    from kvtide.node.client.client import Client
    from kvtide.store.node_statistics import DrainStatistics

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode="rich")

_LOOKS = 0.2
"""Seconds between two looks at how far it is."""
_AGAIN = "kvtide drain tries again; kvtide drain --resume makes the node a member of its cluster again"


@app.command()
def drain(
    address: Annotated[
        str, typer.Argument(help="Where the node listens: its socket, with or without unix:.")
    ] = "kvtide.sock",
    resume: Annotated[
        bool, typer.Option("--resume", help="Undo it, also after its end: the node is a member of its cluster again.")
    ] = False,
) -> None:
    """Let a node leave its cluster, and write its blocks to shared storage, before it is stopped.

    It is withdrawn from the directory, so that other nodes do not find it any more. It goes on serving its clients,
    and what other nodes are reading. The blocks in its memory that are in no shared storage are written there, those
    most likely to be used again first. Ctrl-C ends that, and the node is a member again; after the end of this
    command, stop the node with kvtide stop. A node that was given more blocks since, or could not write all, may be
    drained again.
    """
    from kvtide.errors import ConfigError, TierError
    from kvtide.node.client.client import Client
    from kvtide.node.client.link import NodeUnavailable

    path = socket_of(address, "a node on another host is drained there: kvtide drain SOCKET")
    with Client(path) as client:
        try:
            try:
                if not client.drain(resume=resume):
                    raise ConfigError(
                        f"the node at {path} is in no cluster: it has no peers.directory, or does not serve other "
                        "nodes, or is of an older version"
                    )
                if resume:
                    typer.echo("the node is a member of its cluster again, as soon as the directory answers it")
                    return
                done = _watch(client)
            except KeyboardInterrupt:
                client.drain(resume=True)
                typer.echo("interrupted: the node is a member of its cluster again")
                raise typer.Exit(1) from None
        except NodeUnavailable:
            raise TierError(f"the node at {path} is gone") from None
    if done.failed:
        typer.echo(f"draining failed: {done.failed}")
        typer.echo(_AGAIN)
        raise typer.Exit(1)
    if done.listed:
        typer.echo(
            f"the node could not be withdrawn from the directory ({done.listed}): others may ask it until its lease "
            f"ends, in {math.ceil(done.lease)} s at most"
        )
    if not done.storages:
        left = "" if done.listed else "the directory does not list the node any more; "
        typer.echo(f"{left}it writes to no shared storage, so {done.blocks:,} blocks in its memory end with it")
    elif done.written < done.blocks:
        typer.echo(f"{done.blocks - done.written:,} blocks could not be written: see the node's log and kvtide status")
        typer.echo(_AGAIN)
        raise typer.Exit(1)
    else:
        typer.echo("drained: the node may be stopped")


def _watch(client: Client) -> DrainStatistics:
    """Wait until it is done, and say how far it is whenever that has changed."""
    from kvtide.errors import TierError

    said = ""
    while True:
        found = client.status().node
        if not found.seconds:
            raise TierError("the node is gone")
        cluster = found.cluster
        now = cluster.draining if cluster is not None else None
        if now is None:
            raise TierError("somebody else has ended this with kvtide drain --resume: the node is a member again")
        if not now.done and cluster is not None and cluster.epoch:
            text = "leaving the cluster"
        elif now.storages:
            text = f"{now.written:,} of {now.blocks:,} blocks are in {' and '.join(now.storages)}"
        else:
            text = ""
        if text and text != said:
            typer.echo(text)
            said = text
        if now.done:
            return now
        time.sleep(_LOOKS)
