"""``kvtide status``: a live view of one node."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtide.cli._options import ConfigFile, seconds
from kvtide.counts import CountKind, count_names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from kvtide.plan.tier_speed import SpeedStatistics
    from kvtide.store.node_statistics import Status

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode="rich")

_REASONS = 5
"""Reasons for misses that are shown: the most frequent ones."""


@app.command()
def status(
    address: Annotated[
        str, typer.Argument(help="Where the node listens: its socket, with or without unix:, or https://host:9410.")
    ] = "kvtide.sock",
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the statistics once as JSON, for programs.")] = False,
    every: Annotated[
        float,
        typer.Option(metavar="TIME", parser=seconds, show_default="1s", help="Time between frames, at least 100ms."),
    ] = 1.0,
    file: ConfigFile = None,
) -> None:
    """Watch a node: its tiers, hits, queues, evictions and clients, until Ctrl-C.

    Rates are those since the last frame; hit rates also those since the node started.

        [bold]kvtide status /run/kvtide.sock --once[/bold]

    A node on another host authenticates this command by node.certificate, or by a token in KVTIDE_TOKEN.
    """
    import msgspec
    from rich.console import Console
    from rich.live import Live

    from kvtide import config as configuration
    from kvtide.errors import ConfigError, TierError
    from kvtide.node.client.admin import HttpAdminClient
    from kvtide.node.client.client import Client

    if every < 0.1:
        raise ConfigError(f"--every is {every:g} s; it must be at least 100ms")
    path = Path(address.removeprefix("unix:"))
    with HttpAdminClient(address, configuration.read(file).node) if "://" in address else Client(path) as client:

        def now() -> Status:
            found = client.status()
            if not found.node.seconds:
                raise TierError(f"the node at {path} is gone; start it again with: kvtide node --socket {path}")
            return found

        if as_json:
            typer.echo(msgspec.json.format(msgspec.json.encode(now()), indent=2).decode())
            return
        last, console = now(), Console()
        if once:
            console.print(frame(last))
            return
        try:
            with Live(frame(last), console=console, auto_refresh=False, screen=console.is_terminal) as live:
                while True:
                    time.sleep(every)
                    latest = now()
                    live.update(frame(latest, last), refresh=True)
                    last = latest
        except KeyboardInterrupt:
            pass


def frame(now: Status, last: Status | None = None) -> RenderableType:
    """The status of a node; with rates since ``last``, if the node was not restarted since."""
    from rich.console import Group
    from rich.markup import escape
    from rich.text import Text

    from kvtide.formatting import share, size

    if last is not None and (last.node.pid != now.node.pid or last.node.seconds >= now.node.seconds):
        last = None
    store, node = now.store, now.node
    loads = store.pipeline.loads
    odd = count_names(store.tiers, CountKind.DROP, CountKind.DAMAGE)
    ended = ", ".join(f"{n:,} {how}" for how, n in loads.outcomes.items() if n)
    notes = [
        f"{store.blocks:,} blocks, {store.held:,} held, {store.pinned:,} pinned; rights to read "
        f"{store.pipeline.leases:,}, to write {store.pipeline.reservations:,}",
        f"loads from colder tiers: {loads.under_way:,} under way" + (f", {ended}" if ended else ""),
        *(f"{n:,} {name}" for name, n in store.counts.items() if name in odd),
    ]
    if lately := sorted(store.recent.lately.items(), key=lambda reason: -reason[1])[:_REASONS]:
        said = ", ".join(f"{n:,} {reason}" for reason, n in lately)
        notes.append(f"blocks missed in the last 10 min: {said} (kvtide explain says more)")
    if (recorder := store.recorder) is not None:
        state = "requests are recorded" if recorder.active else "recording of requests has ended"
        lost = "".join(f", {n:,} left out: {reason}" for reason, n in recorder.dropped.items())
        notes.append(f"{state}: {recorder.requests:,} requests, {size(recorder.bytes_written)}{lost}")
    if (peers := node.peers) is not None:
        closed = sum(peers.closed.values())
        notes.append(
            f"other nodes: {peers.connections:,} connections, {peers.blocks_sent:,} blocks sent "
            f"({size(peers.bytes_sent)}), {size(peers.bytes_held)} held for them"
            + (
                f"; {size(peers.bytes_uncompressed)} of blocks, compressed to {size(peers.bytes_compressed)}"
                if peers.bytes_compressed
                else ""
            )
            + (f"; {closed:,} connections closed as faulty" if closed else "")
        )
    if came := sum(tier.bytes_compressed for tier in store.tiers.values()):
        whole = sum(tier.bytes_uncompressed for tier in store.tiers.values())
        notes.append(f"read from other nodes: {size(whole)} of blocks, compressed to {size(came)}")
    notes += _cluster(now)
    # Over HTTP, a node does not name its processes to clients without a token or certificate.
    title = f"node {node.pid} at {node.path}, " if node.pid else "node, "
    title += f"{_span(node.seconds)}, {node.requests:,} requests"
    parts: list[RenderableType] = [Text(title + (", stopping" if node.stopping else ""), style="bold")]
    parts += [Text(f"warning: {warning}", style="yellow") for warning in node.warnings]
    tables = (_tiers(now), _traffic(now, last), _hits(now, last), _lanes(now), _speeds(now), _clients(now))
    for table in tables:
        if table.row_count:
            parts += ["", table]
    parts += [Text(line, style="red") for line in _gone(now)]
    if now.store.budgets:
        parts += ["", *_budgets(now)]
    if (dram := now.store.tiers.get("dram")) is not None and dram.bytes_taken:
        taken, huge = size(dram.bytes_taken), share(dram.bytes_huge, dram.bytes_taken)
        parts += ["", f"{taken} of memory are taken, {huge} of it in huge pages"]
    return Group(*parts, "", *map(escape, notes))


def _cluster(now: Status) -> list[str]:
    """Lines about the cluster that the node is in, or reads from."""
    nodes, own = now.store.cluster, now.node.cluster
    if nodes is None:
        return []
    member = own is not None and own.epoch
    state = (
        "draining" if own is not None and own.draining is not None else "" if member or own is None else "not joined"
    )
    others = own.members if own is not None and own.draining is None else len(nodes.members)
    notes = [
        f"cluster: {others + bool(member):,} members"
        + (f", this node is {state}" if state else "")
        + ("; the directory does not answer" if nodes.away else f", {nodes.lookups:,} lookups in the directory")
    ]
    if own is not None and own.problem:
        notes.append(f"this node could not renew its membership, or join: {own.problem}")
    bound = [f"{m.tier} is {m.address or f'member {m.number}'}" for m in nodes.members if m.tier]
    return [*notes, ", ".join(sorted(bound))] if bound else notes


def _span(seconds: float) -> str:
    """A duration in its two largest units."""
    left = int(seconds)
    said: list[str] = []
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if left >= length or (unit == "s" and not said):
            said.append(f"{left // length} {unit}")
            left %= length
    return " ".join(said[:2])


def _table(*columns: str) -> Table:
    from rich.table import Table

    # one space between columns: with large numbers too, all of them fit into a terminal of 80 columns
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _tiers(now: Status) -> Table:
    from rich.markup import escape
    from rich.progress_bar import ProgressBar

    from kvtide.formatting import share, size

    table = _table("tier", "used", "", "of", "blocks", "policy")
    for name, tier in now.store.tiers.items():
        evictor = now.store.pipeline.evictors.get(name)
        table.add_row(
            f"[red]{escape(name)}: failed[/red]"
            if tier.failed
            else f"[yellow]{escape(name)}: away[/yellow]"
            if tier.away
            else escape(f"{name} {tier.carrier}".strip()),
            ProgressBar(total=tier.budget, completed=tier.bytes_used, width=20),
            share(tier.bytes_used, tier.budget),
            size(tier.budget),
            f"{tier.blocks:,}",
            evictor.policy if evictor else "",
        )
    return table


def _traffic(now: Status, last: Status | None) -> Table:
    from rich.markup import escape

    from kvtide.formatting import size

    table = _table("tier", "read/s", "written/s", "evicted", "which were unused for")
    seconds = now.node.seconds - last.node.seconds if last else 0.0
    for name, tier in now.store.tiers.items():
        before = last.store.tiers.get(name) if last else None
        rates = ["-", "-"]
        if before is not None:
            moved = tier.bytes_read - before.bytes_read, tier.bytes_written - before.bytes_written
            rates = [size(n / seconds) for n in moved]
        evictor = now.store.pipeline.evictors.get(name)
        gone = (f"{evictor.ages.count:,}", _age(evictor.ages.total, evictor.ages.count)) if evictor else ()
        table.add_row(escape(name), *rates, *gone)
    return table


def _budgets(now: Status) -> Iterator[Text]:
    """Two lines for the byte budget of each shared storage."""
    from rich.text import Text

    from kvtide.formatting import size

    for name, budget in now.store.budgets.items():
        steward = budget.steward
        yield Text.assemble(
            f"{name}: its budget is kept by ",
            steward.who or ("nobody", "red"),
            f"{' (this node)' if budget.here else ''}, last seen {_span(budget.silence)} ago",
        )
        yield Text(
            f"    granted: {size(steward.bytes_granted)} to all, {size(budget.credit)} to this node; removed: "
            f"{steward.blocks_removed:,} blocks; unfinished: {size(steward.bytes_unfinished)}; cleared: "
            f"{steward.leftovers_removed:,}"
        )


def _age(total: float, count: int) -> str:
    return _span(total / count) if count else "-"


def _hits(now: Status, last: Status | None) -> Table:
    from rich.markup import escape

    from kvtide.formatting import share

    table = _table("tokens asked for", "since the start", "", "lately", "")
    tokens = now.store.planner.tokens
    before = last.store.planner.tokens if last else {}
    recent = {name: n - before.get(name, 0) for name, n in tokens.items()} if last else {}
    names = {"slower": "there, but quicker to compute", "missed": "missed"}
    for name, count in tokens.items():
        lately = (f"{recent[name]:,}", share(recent[name], sum(recent.values()))) if recent else ("-", "-")
        what = names.get(name, f"found in {escape(name)}")
        table.add_row(what, f"{count:,}", share(count, sum(tokens.values())), *lately)
    return table


def _lanes(now: Status) -> Table:
    from rich.markup import escape

    from kvtide.formatting import size

    table = _table("lane", "waiting to read", "", "to write", "", "under way")
    for name, lane in now.store.lanes.items():
        table.add_row(
            escape(name),
            f"{lane.reads_waiting:,}",
            size(lane.read_bytes_waiting),
            f"{lane.writes_waiting:,}",
            size(lane.write_bytes_waiting),
            f"{lane.blocks_under_way:,}",
        )
    return table


def _speeds(now: Status) -> Table:
    from rich.markup import escape

    from kvtide.formatting import size

    table = _table("lane", "reads at", "writes at", "may write")
    for name, lane in now.store.lanes.items():
        budget = now.store.pipeline.write_budgets.get(name)
        table.add_row(
            escape(name),
            _speed(lane.read_speed),
            _speed(lane.write_speed),
            "all" if budget is None else size(max(0.0, budget.bytes_left)),
        )
    return table


def _speed(speed: SpeedStatistics) -> str:
    from kvtide.formatting import size

    how = "" if speed.measured else ", remembered" if speed.remembered else ", a guess"
    return f"{size(speed.bytes_per_second)}/s{how}"


def _clients(now: Status) -> Table:
    from kvtide.formatting import size

    table = _table("client", "since", "sessions", "to read", "to write", "visits", "requests", "failed", "unread")
    for client in sorted(now.node.clients, key=lambda c: -c.seconds):
        if client.pid == os.getpid():
            continue
        table.add_row(
            str(client.pid or "-"),
            _span(client.seconds),
            f"{client.sessions:,}",
            f"{client.holdings:,}",
            f"{client.reservations:,}",
            f"{client.visits:,}",
            f"{client.requests:,}",
            f"{client.failures:,}",
            size(client.bytes_unsent),
        )
    return table


def _gone(now: Status) -> list[str]:
    return [
        f"client {client.pid or '-'} is gone; {client.slots_quarantined:,} slots wait for its death"
        for client in now.node.clients
        if not client.connected
    ]
