"""``kvtide cluster``: the nodes of a cluster, as the directory and one node see them."""

from __future__ import annotations

import time
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtide.cli._options import ConfigFile, seconds

if TYPE_CHECKING:
    from kvtide.store.node_statistics import Status
    from kvtide.tiers.peers.directory import BlockDirectory

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def cluster(
    address: Annotated[
        str, typer.Argument(help="Where a node of the cluster listens: its socket, with or without unix:.")
    ] = "kvtide.sock",
    tokens: Annotated[
        Path | None,
        typer.Option(
            help="Also show who has this prompt: a file with its token ids, a JSON list or separated by spaces."
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="Words that only the prompt's model has in its identity.")] = "",
    secret: Annotated[
        Path | None,
        typer.Option(help="File with the naming secret of the prompt's tenant; without it: the default one."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")] = False,
    every: Annotated[
        float, typer.Option(metavar="TIME", parser=seconds, help="Time between frames, at least 100ms.")
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print it once as JSON, for programs.")] = False,
    file: ConfigFile = None,
) -> None:
    """Show the nodes of a cluster, and which of them have a prompt.

    Members and the directory's size come from the directory, which the settings name (peers.directory); bandwidth and
    round trip are those that the node at ADDRESS has measured.

        [bold]kvtide cluster /run/kvtide.sock --tokens prompt.json[/bold]
    """
    import msgspec

    from kvtide import config as configuration
    from kvtide.errors import ConfigError, TierError
    from kvtide.node.client.client import Client
    from kvtide.tiers.peers.cluster import EMBEDDED, directory_of, embedded_at, with_directory

    if every < 0.1:
        raise ConfigError(f"--every is {every:g} s; it must be at least 100ms")
    settings = configuration.read(file)
    if not settings.peers.directory:
        raise ConfigError("peers.directory is not set: there is no cluster. Give the node's settings with --config")
    if settings.peers.directory == EMBEDDED:
        settings = with_directory(settings, *embedded_at(settings.peers))
    path = Path(address.removeprefix("unix:"))
    directory = directory_of(settings.peers)
    try:
        with Client(path) as client:
            prompt = _prompt(client, tokens, model, secret) if tokens is not None else None
            while True:
                status = client.status()
                if not status.node.seconds:
                    raise TierError(f"the node at {path} is gone; start it again with: kvtide node --socket {path}")
                try:
                    found = _found(status, directory, prompt)
                except OSError as e:
                    raise TierError(f"the directory does not answer: {e.strerror or e}") from e
                if as_json:
                    typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
                    return
                _show(found, clear=watch)
                if not watch:
                    return
                time.sleep(every)
    except KeyboardInterrupt:
        pass
    finally:
        directory.close()


def _prompt(client: object, tokens: Path, words: str, secret: Path | None) -> dict[str, list[bytes]]:
    """The keys of a prompt's blocks, by group."""
    from kvtide.cli import explain
    from kvtide.errors import ConfigError
    from kvtide.node.client.client import Client

    assert isinstance(client, Client)
    tenant = explain._tenant(secret)
    models = explain._models(client, tenant, words)
    if len(models) > 1:
        raise ConfigError(explain._several(models))
    chain = models[0].namer(tenant).chain(explain._read(tokens))
    return {group.name: list(chain.keys(group.suffix)) for group in models[0].layout.groups}


def _found(status: Status, directory: BlockDirectory, prompt: dict[str, list[bytes]] | None) -> dict[str, object]:
    """What is shown."""
    from kvtide.block import BlockKey

    leases, counts = directory.leases(), directory.counts()
    own = status.node.cluster
    seen = {(m.number, m.epoch): m for m in (status.store.cluster.members if status.store.cluster is not None else ())}
    members: list[dict[str, object]] = []
    for member, left in sorted(leases.left.items()):
        here = own is not None and (own.number, own.epoch) == (member.number, member.epoch)
        measured = seen.get((member.number, member.epoch))
        members.append(
            {
                "number": member.number,
                "epoch": member.epoch,
                "address": member.address,
                "lease_left": round(left, 3),
                "this_node": here,
                "tier": measured.tier if measured is not None else "",
                "away": measured.away if measured is not None else False,
                "bytes_per_second": measured.bytes_per_second if measured is not None else 0.0,
                "round_trip": measured.round_trip if measured is not None else 0.0,
            }
        )
    found: dict[str, object] = {
        "members": members,
        "directory": {"entries": counts.entries, "bytes": counts.nbytes},
        "node": own,
        "lookups": status.store.cluster,
    }
    if prompt is not None:
        found["prompt"] = {
            name: [list(holders) for holders in directory.holders([BlockKey(key) for key in keys])]
            for name, keys in prompt.items()
        }
    return found


def _show(found: dict[str, object], *, clear: bool) -> None:
    from rich.console import Console, Group
    from rich.markup import escape
    from rich.table import Table

    from kvtide.formatting import size
    from kvtide.store.node_statistics import ClusterServing
    from kvtide.transfer.node_search import ClusterStatistics

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for number, column in enumerate(("address", "number", "epoch", "lease", "tier here", "reads at", "round trip")):
        table.add_column(column, justify="right" if number in (1, 2, 3, 5, 6) else "left")
    members, directory, own, lookups = (found[name] for name in ("members", "directory", "node", "lookups"))
    assert isinstance(members, list)
    assert isinstance(directory, dict)
    for member in members:
        rate, seconds = member["bytes_per_second"], member["round_trip"]
        where = "this node" if member["this_node"] else member["tier"] + (", away" if member["away"] else "")
        table.add_row(
            escape(member["address"]),
            str(member["number"]),
            str(member["epoch"]),
            f"{member['lease_left']:.1f} s",
            where or "-",
            f"{size(rate)}/s" if rate else "-",
            f"{1000 * seconds:.1f} ms" if seconds else "-",
        )
    notes = [f"{len(members)} members; directory: {directory['entries']:,} entries, {size(directory['bytes'])}"]
    if isinstance(own, ClusterServing):
        notes.append(
            f"this node: {own.announced:,} blocks announced, {own.withdrawn:,} withdrawn, {own.waiting:,} waiting"
            + (", draining" if own.draining is not None else "" if own.epoch else ", not a member now")
        )
    if isinstance(lookups, ClusterStatistics):
        notes.append(
            f"lookups by this node: {lookups.lookups:,}, {lookups.failures:,} not answered; {lookups.stale:,} blocks "
            f"were not where the directory said; {lookups.refused:,} restarted members refused"
        )
    prompt = found.get("prompt")
    if isinstance(prompt, dict):
        for group, holders in prompt.items():
            notes += [f"{group}: {line}" for line in _ranges(holders)]
    console = Console()
    if clear:
        console.clear()
    console.print(Group(table, "", *notes))


def _ranges(holders: list[list[int]]) -> list[str]:
    """Lines for blocks one after another that the same members hold."""
    lines = []
    for who, some in groupby(enumerate(holders), key=lambda pair: sorted(pair[1])):
        numbers = [number for number, _ in some]
        blocks = f"block {numbers[0]}" if len(numbers) == 1 else f"blocks {numbers[0]} to {numbers[-1]}"
        lines.append(f"{blocks}: " + (f"members {', '.join(map(str, who))}" if who else "nobody"))
    return lines or ["no full block"]
