"""``kvtide cluster``: the nodes of a cluster, as the directory and one node see them."""

from __future__ import annotations

import contextlib
import time
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtide.cli._cluster_matrix import MatrixCell, matrix_lines
from kvtide.cli._options import ConfigFile, seconds, socket_of

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from kvtide.config import Config
    from kvtide.store.node_statistics import Status
    from kvtide.tiers.peers.directory import BlockDirectory
    from kvtide.tiers.peers.measurements import Measurement

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
        float,
        typer.Option(metavar="TIME", parser=seconds, show_default="1s", help="Time between frames, at least 100ms."),
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print it once as JSON, for programs.")] = False,
    file: ConfigFile = None,
) -> None:
    """Show the nodes of a cluster, how fast they read from each other, and which of them have a prompt.

    Members, what each has measured of the others, and the directory's size come from the directory, which the settings
    name (peers.directory). With a list instead (peers.addresses) it is what the node at ADDRESS has measured.

        [bold]kvtide cluster /run/kvtide.sock --tokens prompt.json[/bold]
    """
    import logging

    import msgspec

    from kvtide import config as configuration
    from kvtide.errors import ConfigError, TierError
    from kvtide.node.client.client import Client

    if every < 0.1:
        raise ConfigError(f"--every is {every:g} s; it must be at least 100ms")
    path = socket_of(address, "run kvtide cluster on a host of the cluster, with the socket of the node there")
    logging.getLogger("kvtide.valkey").setLevel(logging.ERROR)  # that there is no server is said below
    with (
        contextlib.suppress(KeyboardInterrupt),
        closing(_Directory(configuration.read(file))) as directory,
        Client(path) as client,
    ):
        prompt = None
        while True:
            status = client.status()
            if not status.node.seconds:
                raise TierError(f"the node at {path} is gone; start it again with: kvtide node --socket {path}")
            _check(status, path, in_settings=directory.named, with_prompt=tokens is not None)
            if tokens is not None and prompt is None:
                prompt = _prompt(client, tokens, model, secret)
            try:
                found = directory.found(status, prompt) if directory.named else _listed(status)
            except TierError as e:
                if as_json or not watch:
                    raise
                found = {"problem": str(e)}  # who watches wants to see when it is over
            if as_json:
                typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
                return
            _show(found, clear=watch)
            if not watch:
                return
            time.sleep(every)


def _check(status: Status, path: Path, *, in_settings: bool, with_prompt: bool) -> None:
    """Raise ConfigError if nothing can be shown."""
    from kvtide.errors import ConfigError

    if in_settings:
        return
    if status.store.cluster is not None:
        raise ConfigError(
            f"the node at {path} is in a cluster, and peers.directory is not set in the settings of this command: give "
            "it the node's settings with --config FILE"
        )
    if not _nodes_of_a_list(status):
        raise ConfigError(
            f"the node at {path} reads from no other node: neither peers.directory nor peers.addresses is set in its "
            "settings (docs/peers.md)"
        )
    if with_prompt:
        raise ConfigError(
            "--tokens needs a directory: the nodes of a list (peers.addresses) do not say what they have. kvtide "
            "explain says which blocks of a prompt this node has"
        )


class _Directory:
    """The directory that the settings name, if they name one. It is opened when it is asked."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._opened: BlockDirectory | None = None

    @property
    def named(self) -> bool:
        return bool(self._config.peers.directory)

    def found(self, status: Status, prompt: dict[str, list[bytes]] | None) -> dict[str, object]:
        """What is shown. Raises ConfigError and TierError."""
        from kvtide.errors import TierError
        from kvtide.tiers.peers.cluster import EMBEDDED, directory_of, embedded_reached_at, with_directory
        from kvtide.tiers.shared.valkey_client import UnfitServer

        settings = self._config
        if settings.peers.directory == EMBEDDED:
            settings = with_directory(settings, *embedded_reached_at(settings.peers))
        about = f"the directory at {settings.peers.directory} (peers.directory)"
        try:
            if self._opened is None:
                self._opened = directory_of(settings.peers)
            found = _found(status, self._opened, prompt)
            found["where"] = settings.peers.directory
            return found
        except (TierError, UnfitServer) as e:
            raise TierError(f"{about} cannot be used: {getattr(e, 'strerror', None) or e}") from e
        except OSError as e:
            raise TierError(
                f"{about} does not answer: {e.strerror or e}. Nodes that know each other go on without it; "
                "kvtide status shows what this one knows"
            ) from e

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()


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

    leases, counts, rows = directory.leases(), directory.counts(), _rows(directory)
    own = status.node.cluster
    seen = {(m.number, m.epoch): m for m in (status.store.cluster.members if status.store.cluster is not None else ())}
    members: list[dict[str, object]] = []
    for member, left in sorted(leases.left.items()):
        here = own is not None and (own.number, own.epoch) == (member.number, member.epoch)
        measured = seen.get((member.number, member.epoch))
        tier = status.store.tiers.get(measured.tier) if measured is not None else None
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
                "carrier": tier.carrier if tier is not None else "",
                "compressed": tier is not None and tier.compressed,
            }
        )
    numbers = {member.epoch: member.number for member in leases.left}
    mine = own.epoch if own is not None else 0  # what it has measured is newer in its statistics than in the directory
    cells = [
        MatrixCell(numbers[reader], numbers[source], *one)
        for reader, row in rows.items()
        for source, one in row.items()
        if reader in numbers and source in numbers and reader not in (source, mine)
    ]
    cells += [
        MatrixCell(numbers.get(mine, 0), one.number, one.bytes_per_second, one.round_trip)
        for one in seen.values()
        if numbers.get(one.epoch) == one.number and (one.bytes_per_second or one.round_trip)
    ]
    found: dict[str, object] = {
        "members": members,
        "matrix": [cell._asdict() for cell in sorted(cells)],
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


def _rows(directory: BlockDirectory) -> dict[int, dict[int, Measurement]]:
    """What the members have measured; nothing if that cannot be read: the rest is shown without it."""
    try:
        return directory.measurements()
    except OSError:
        return {}


def _nodes_of_a_list(status: Status) -> list[str]:
    """The tiers of the nodes that peers.addresses names."""
    return [name for name in status.store.tiers if name.startswith("peer ")] if status.store.cluster is None else []


def _listed(status: Status) -> dict[str, object]:
    """What is shown of nodes in a list."""
    nodes: list[dict[str, object]] = []
    for name in _nodes_of_a_list(status):
        tier, speed = status.store.tiers[name], status.store.lanes[name].read_speed
        nodes.append(
            {
                "address": name.removeprefix("peer "),
                "tier": name,
                "away": tier.away,
                "bytes_per_second": speed.bytes_per_second if speed.measured else 0.0,
                "bytes_read": tier.bytes_read,
                "failed_reads": tier.failed_reads,
                "carrier": tier.carrier,
                "compressed": tier.compressed,
            }
        )
    return {"nodes": nodes}


def _show_list(nodes: list[dict[str, object]]) -> RenderableType:
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    from kvtide.formatting import size

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for number, column in enumerate(("address", "", "reads at", "read", "failed reads", "by")):
        table.add_column(column, justify="right" if 1 < number < 5 else "left")
    for node in nodes:
        rate, read = node["bytes_per_second"], node["bytes_read"]
        assert isinstance(rate, float)
        assert isinstance(read, int)
        speed = f"{size(rate)}/s" if rate else "-"
        away = "away" if node["away"] else ""
        table.add_row(escape(str(node["address"])), away, speed, size(read), str(node["failed_reads"]), _by(node))
    note = f"{len(nodes)} nodes in the list (peers.addresses); what they have measured is shown at each of them"
    return Group(table, "", note)


def _show(found: dict[str, object], *, clear: bool) -> None:
    from rich.console import Console, Group
    from rich.markup import escape
    from rich.text import Text

    console = Console()
    shown: RenderableType
    if isinstance(problem := found.get("problem"), str):
        shown = Text(problem, style="red")
    elif isinstance(nodes := found.get("nodes"), list):
        shown = _show_list(nodes)
    else:
        members, matrix = found["members"], found["matrix"]
        assert isinstance(members, list)
        assert isinstance(matrix, list)
        numbers = sorted(member["number"] for member in members)
        lines = (
            matrix_lines(numbers, [MatrixCell(**cell) for cell in matrix], console.width) if len(numbers) > 1 else []
        )
        text = Text("\n".join([*lines, ""] if lines else lines), no_wrap=True)
        shown = Group(_members(members), "", *([text] if lines else []), *map(escape, _notes(found, len(members))))
    if clear:
        console.clear()
    console.print(shown)


def _by(node: dict[str, Any]) -> str:
    """What moves a node's blocks."""
    return (node["carrier"] + (", compressed" if node["compressed"] else "")) if node["carrier"] else "-"


def _members(members: list[dict[str, Any]]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    from kvtide.formatting import size

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for number, column in enumerate(("member", "address", "lease", "tier here", "reads at", "round trip", "by")):
        table.add_column(column, justify="left" if number in (1, 3, 6) else "right")
    for member in members:
        rate, seconds = member["bytes_per_second"], member["round_trip"]
        where = "this node" if member["this_node"] else member["tier"] + (", away" if member["away"] else "")
        table.add_row(
            str(member["number"]),
            escape(member["address"]),
            f"{member['lease_left']:.1f} s",
            where or "-",
            f"{size(rate)}/s" if rate else "-",
            f"{1000 * seconds:.1f} ms" if seconds else "-",
            _by(member),
        )
    return table


def _notes(found: dict[str, object], count: int) -> list[str]:
    """Lines about a cluster of so many members."""
    from kvtide.formatting import size
    from kvtide.store.node_statistics import ClusterServing
    from kvtide.transfer.node_search import ClusterStatistics

    directory, own, lookups = (found[name] for name in ("directory", "node", "lookups"))
    assert isinstance(directory, dict)
    notes = [f"{count} members; directory: {directory['entries']:,} entries, {size(directory['bytes'])}"]
    if count == 1:  # as on each host, if all of them start a directory of their own
        notes.append(
            f'there is one member; other nodes join it with peers.directory = "{found["where"]}", the same '
            "peers.cluster and the same secret (peers.token_file)"
        )
    if isinstance(own, ClusterServing):
        notes.append(
            f"this node: {own.announced:,} blocks announced, {own.withdrawn:,} withdrawn, {own.waiting:,} waiting"
            + (", draining" if own.draining is not None else "" if own.epoch else ", not a member now")
        )
        if own.problem:
            notes.append(f"this node could not renew its membership, or join: {own.problem}")
    if isinstance(lookups, ClusterStatistics):
        notes.append(
            f"lookups by this node: {lookups.lookups:,}, {lookups.failures:,} not answered; {lookups.stale:,} blocks "
            f"were not where the directory said; {lookups.refused:,} restarted members refused"
        )
    prompt = found.get("prompt")
    if isinstance(prompt, dict):
        for group, holders in prompt.items():
            notes += [f"{group}: {line}" for line in _ranges(holders)]
    return notes


def _ranges(holders: list[list[int]]) -> list[str]:
    """Lines for blocks one after another that the same members hold."""
    lines = []
    for who, some in groupby(enumerate(holders), key=lambda pair: sorted(pair[1])):
        numbers = [number for number, _ in some]
        blocks = f"block {numbers[0]}" if len(numbers) == 1 else f"blocks {numbers[0]} to {numbers[-1]}"
        lines.append(f"{blocks}: " + (f"members {', '.join(map(str, who))}" if who else "nobody"))
    return lines or ["no full block"]
