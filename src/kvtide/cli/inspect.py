"""``kvtide inspect``: shows the contents of an NVMe tier's directory."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtide.cli._options import whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kvtide.tiers.nvme.inspect import InspectionReport

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode="rich")

_SHOWN = 20
"""Damaged blocks that are listed; all of them are in the JSON."""


@app.command()
def inspect(
    directory: Annotated[Path, typer.Argument(help="The directory that nvme.path names.", show_default=False)],
    verify: Annotated[bool, typer.Option("--verify", help="Read every block and check every section.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    blocks: Annotated[
        int, typer.Option("--blocks", metavar="N", parser=whole(0), help="List this many of the newest blocks.")
    ] = 0,
    file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="The configuration with the keys of encrypted records; else $KVTIDE_CONFIG or ./kvtide.toml.",
        ),
    ] = None,
) -> None:
    """Show the contents of a tier's directory, offline: nothing is changed, and nothing is locked.

    To verify that every byte on disk is what was written, and see what recovery will do with damaged blocks:

        [bold]kvtide inspect /mnt/nvme/kvtide --verify[/bold]

    The exit code is 0 if all is well, 1 if --verify found damage, 2 if this is not a directory of kvtide.
    """
    import msgspec
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from kvtide import config as configuration
    from kvtide.security.key_ring import open_ring
    from kvtide.tiers.format.encryption import Encryption
    from kvtide.tiers.nvme.inspect import advice, look

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    errors = Console(stderr=True)
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bars:
        tasks = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what)
            bars.update(tasks[what], completed=done, total=total)

        encryption = Encryption(open_ring(configuration.read(file).security))
        report = look(directory, verify=verify, newest=blocks, progress=progress, encryption=encryption)
    if as_json:
        typer.echo(json.dumps({**msgspec.to_builtins(report), "advice": advice(report)}, indent=2))
    else:
        _show(Console(highlight=False), report, advice(report))
    if verify and _damage(report):
        raise typer.Exit(1)


def _damage(report: InspectionReport) -> bool:
    return bool(report.damaged or any(s.problem not in ("", "emptied") for s in report.segments))


def _show(console: Console, report: InspectionReport, said: list[str]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    console.print(_facts(report))
    parts = (_sizes(report), *_kinds(report), _depths(report), *_newest(report), _damaged(report))
    for part in parts:
        if part is not None:
            console.print(part)
    for line in said:
        console.print(Padding(Text(line), (0, 2)))


def _facts(report: InspectionReport) -> Table:
    from rich.table import Table
    from rich.text import Text

    from kvtide.formatting import moment, size

    table = Table(show_header=False, box=None, title=Text(report.path, style="bold"), title_justify="left")
    table.add_column(style="dim")
    table.add_column()
    journal = report.journal
    if journal.trusted:
        trust = f"trusted; {journal.records} records, {size(journal.nbytes)}"
    else:
        trust = f"not trusted: {journal.doubt}; {size(journal.nbytes)}"
    facts = {
        "format": f"kvtide nvme, version {report.version}",
        "open in": "no process that can be seen" if report.holder is None else f"process {report.holder}",
        "journal": trust,
        "blocks": f"{report.blocks}, and {report.stale} stale headers of evicted ones",
        "payload": f"{size(report.raw)}, stored as {size(report.stored)}{_ratio(report.raw, report.stored)}",
        "on disk": f"{size(report.on_disk)} in {len(report.segments)} segments",
        "written": f"{moment(report.oldest)} to {moment(report.newest)}" if report.blocks else "-",
        "expired": str(report.expired),
    }
    if report.verified_blocks is not None:
        bad = len(report.damaged)
        facts["verified"] = f"{report.verified_blocks} blocks, {size(report.verified_bytes or 0)}: {bad} damaged"
    for name, value in facts.items():
        style = "red" if name == "verified" and report.damaged else ""
        table.add_row(name, Text(value, style=style))
    return table


def _ratio(raw: int, stored: int) -> str:
    return f" (1 : {raw / stored:.2f})" if stored else ""


def _sizes(report: InspectionReport) -> Table | None:
    """Segments grouped by slot size: a terabyte has thousands of segments."""
    from rich.table import Table
    from rich.text import Text

    from kvtide.formatting import share, size

    if not report.segments:
        return None
    table = Table("Slot", "Segments", "Slots", "Used", "Free", "", "Bytes", "State", title="Segments")
    for column in table.columns[:7]:
        column.justify = "right"
    for slot, problem in sorted({(s.slot, s.problem) for s in report.segments}):
        mine = [s for s in report.segments if (s.slot, s.problem) == (slot, problem)]
        slots, used = sum(s.slots for s in mine), sum(s.blocks for s in mine)
        state = f"{', '.join(f'{s.number:05}' for s in mine[:4])}{' ...' if len(mine) > 4 else ''}: {problem}"
        cells = [size(slot) if slot else "-", len(mine), slots, used, slots - used, share(used, slots)]
        cells += [size(sum(s.nbytes for s in mine)), Text(state, style="red") if problem else "good"]
        table.add_row(*(c if isinstance(c, Text) else str(c) for c in cells))
    return table


def _kinds(report: InspectionReport) -> Iterator[Text | Table]:
    """For each model, tenant and layout a line, with the whole tag of the tenant, and a table of its groups."""
    from rich.table import Table
    from rich.text import Text

    from kvtide.formatting import size

    names = ("Group", "Tokens", "Blocks", "Payload", "Codec", "Stored", "Ratio")
    for (namespace, tenant, layout), kinds in groupby(report.kinds, key=lambda k: (k.namespace, k.tenant, k.layout)):
        yield Text(f"\nmodel {namespace[:12]}, tenant {tenant}, layout {layout[:8]}", style="italic")
        table = Table(*names)
        for column in (1, 2, 3, 5, 6):
            table.columns[column].justify = "right"
        for kind in kinds:
            ratio = f"{kind.raw / kind.stored:.2f}" if kind.stored else "-"
            cells = [kind.group, kind.block_tokens, f"{kind.blocks:,}", size(kind.raw), kind.codec]
            table.add_row(*(Text(str(c)) for c in [*cells, size(kind.stored), ratio]))
        yield table


def _depths(report: InspectionReport) -> Table | None:
    from rich.table import Table

    if not report.depths:
        return None
    table = Table("Depth", "Blocks", "", title="How deep in their prompts")
    table.columns[0].justify = table.columns[1].justify = "right"
    most = max(d.blocks for d in report.depths)
    for d in report.depths:
        name = str(d.first) if d.first == d.last else f"{d.first} to {d.last}"
        table.add_row(name, str(d.blocks), "█" * round(32 * d.blocks / most))
    return table


def _newest(report: InspectionReport) -> Iterator[Text]:
    """Two lines for each of the newest blocks."""
    from rich.text import Text

    from kvtide.formatting import moment, size

    if report.newest_blocks:
        yield Text("\nNewest blocks", style="italic")
    for b in report.newest_blocks or ():
        yield Text(
            f"{b.key[:16]}  {b.group}, depth {b.depth}, in slot {b.segment:05}:{b.slot}, {size(b.raw)} stored as "
            f"{size(b.stored)}"
        )
        expires = f"expires {moment(b.expiry)}" if b.expiry is not None else "never expires"
        yield Text(f"{'':18}written {moment(b.created)}, {expires}, priority {b.priority}", style="dim")


def _damaged(report: InspectionReport) -> Table | None:
    from rich.table import Table
    from rich.text import Text

    if not report.damaged:
        return None
    more = len(report.damaged) - _SHOWN
    table = Table("Segment", "Slot", "Key", "Reason", title="Damaged", caption=f"and {more} more" if more > 0 else None)
    for d in report.damaged[:_SHOWN]:
        table.add_row(f"{d.segment:05}", str(d.slot), d.key[:16] or "unknown", Text(d.reason, style="red"))
    return table
