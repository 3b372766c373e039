"""``kvtide bench``: what the store costs on this machine."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvtide.errors import ConfigError

if TYPE_CHECKING:
    from kvtide.benchmarks.record import Record

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Measure this machine: ours beside the hardware's own limits.")


def _table(records: list[Record]) -> Table:
    table = Table(title="kvtide bench store")
    for name in ("figure", "ours", "lowest to highest", "limit", "ratio", "asked for"):
        table.add_column(name, justify="left" if name == "figure" else "right")
    for r in records:
        bar = "" if r.bar is None else f"{'>=' if r.ratio is not None or r.better == 'higher' else '<='} {r.bar:g}"
        mark = {True: " [green]met[/green]", False: " [red]missed[/red]", None: ""}[r.met]
        table.add_row(
            f"{r.name}\n[dim]{r.note or r.against}[/dim]",
            f"{r.ours:g} {r.unit}",
            f"{r.spread[0]:g} to {r.spread[1]:g}",
            "" if r.limit is None else f"{r.limit:g}",
            "" if r.ratio is None else f"{r.ratio:.2f}",
            bar + mark,
        )
    return table


@app.callback()
def bench() -> None:
    """Measure this machine: ours beside the hardware's own limits."""


@app.command()
def store(
    only: Annotated[list[str] | None, typer.Argument(help="match, dram, nvme, scale, opening, pipeline, node.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less data and fewer rounds: under a minute.")] = False,
    json: Annotated[str, typer.Option(help="Write the records as JSON to this file; -: standard output.")] = "",
    path: Annotated[Path | None, typer.Option(help="A folder on the disk to measure. Default: temporary.")] = None,
) -> None:
    """The store: match, DRAM, NVMe, the index at scale, opening, the pipeline's own cost, and the node.

    Contestants take turns; figures are medians, with the lowest and highest round. Speeds are beside a plain memcpy
    and raw direct I/O in the same run.

    Example: kvtide bench store --quick --path /nvme
    """
    import msgspec

    from kvtide.benchmarks import FIGURES, run
    from kvtide.benchmarks.settings import NoPeers, Settings

    for name in only or ():
        if name not in FIGURES:
            raise ConfigError(f"there is no figure {name!r}; choose of {', '.join(FIGURES)}")
    console = Console(stderr=True)
    command = " ".join(["kvtide bench store", *(only or ()), *(["--quick"] if quick else ())])
    with console.status("measuring") as status:
        settings = Settings(quick, path or Path(tempfile.gettempdir()), command, status.update, NoPeers())
        records = list(run(settings, only or ()))
    if json == "-":
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(records), indent=2).decode() + "\n")
        return
    if json:
        Path(json).write_bytes(msgspec.json.format(msgspec.json.encode(records), indent=2))
    Console().print(_table(records))
