"""``kvtide demo``: store, restart, reload and verify a realistic session, and show how fast each way is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvtide.cli._demo_session import Result, Shape

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode="rich")

_PREFILL = 32768 / 1.46
"""Tokens a second: this shape of model on one H200 was measured to prefill 32,768 tokens in 1.46 s."""


@app.command()
def demo(
    gib: Annotated[float, typer.Option(help="How much KV the session has, in GiB.", min=0.001)] = 3.0,
    out: Annotated[Path, typer.Option(help="Folder for the plot and the page.")] = Path("demo-out"),
    path: Annotated[
        Path | None,
        typer.Option(help="Folder on the disk to use; a temporary one is made in it and deleted.", show_default=False),
    ] = None,
    prefill: Annotated[
        float, typer.Option(help="Tokens per second that a GPU computes, for the arithmetic.", min=1)
    ] = round(_PREFILL),
    layers: Annotated[int, typer.Option(min=1, hidden=True)] = 32,
) -> None:
    """Store a session's KV, restart, reload it and verify every byte.

    Six users read one long document and talk about it for three turns, with blocks shaped like Llama-3-8B's: 256
    tokens, 32 MiB. Memory holds half of it, so the rest comes from disk; after a restart all of it does.

        [bold]kvtide demo --gib 8 --path /mnt/nvme[/bold]

    The exit code is 1 if a single byte that came back was not the one that was stored.
    """
    import tempfile

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from kvtide.block import Layout
    from kvtide.cli._demo_page import write_page, write_plot
    from kvtide.cli._demo_session import Shape, affordable, filesystem, play, scratch_folder
    from kvtide.errors import TierError

    console = Console(highlight=False)
    place = path or scratch_folder()
    if not place.is_dir():
        raise TierError(f"{place} is not a directory: give one on the disk to use")
    layout = Layout.attention(layers=layers, heads=8, head_dim=128, dtype="bfloat16", block_tokens=256)
    nbytes, why = affordable(layout, int(gib * 2**30), place)
    if why:
        console.print(f"Scaled down: {why}.", style="yellow")
    shape = Shape.of(layout, nbytes)
    _announce(console, shape, place, filesystem(place))

    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TextColumn("blocks"))
    with (
        tempfile.TemporaryDirectory(prefix="kvtide-demo-", dir=place) as folder,
        Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bars,
    ):
        tasks = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        result = play(shape, Path(folder) / "nvme", progress)

    console.print(_table(result))
    for line in _findings(result, prefill):
        console.print(line)
    out.mkdir(parents=True, exist_ok=True)
    plot = write_plot(result, out / "demo.png")
    if plot is None:
        console.print("No plot: matplotlib is not here (pip install 'kvtide\\[plot]').", style="yellow")
    page = write_page(result, _findings(result, prefill), plot, out / "index.html")
    console.print(" and ".join(str(file.resolve()) for file in (plot, page) if file is not None), soft_wrap=True)
    if result.wrong_bytes:
        console.print(f"{result.wrong_bytes} bytes that came back were wrong.", style="bold red")
        raise typer.Exit(1)


def _announce(console: Console, shape: Shape, place: Path, kind: str) -> None:
    from kvtide.cli._demo_session import TURNS, USERS
    from kvtide.cli._show import size

    per = shape.layout.block_tokens
    console.print(
        f"{USERS} users read a document of {shape.document * per:,} tokens and talk for {TURNS} turns of "
        f"{shape.turn * per:,}: {shape.blocks} blocks of {size(shape.block)}, {size(shape.blocks * shape.block)}. "
        f"DRAM may hold {size(shape.memory)} of it; the rest is on {place} ({kind})."
    )
    if kind == "tmpfs":
        console.print("This is a filesystem in memory: what is called NVMe below is not. Use --path.", style="yellow")


def _table(result: Result) -> Table:
    from rich.table import Table

    from kvtide.cli._demo_page import ways
    from kvtide.cli._show import size

    table = Table("Way", "Bytes", "Time", "GB/s", "of the limit", title="Where the bytes came from, and how fast")
    for column in table.columns[1:]:
        column.justify = "right"
    for way in ways(result):
        cells = (way.name, size(way.nbytes), way.seconds_text, way.speed_text, way.share_text)
        table.add_row(*cells, style="dim" if way.is_limit else "")
    return table


def _findings(result: Result, prefill: float) -> list[str]:
    from kvtide.cli._show import size

    shape = result.shape
    per_token = shape.block / shape.layout.block_tokens
    computing = result.reused_tokens / prefill
    quicker = "less" if result.reused_seconds < computing else "more"
    return [
        f"{result.verified_blocks} blocks, {result.verified_bytes:,} bytes verified, {result.wrong_bytes} wrong"
        + (f"; {result.missing} blocks were missing and would be computed." if result.missing else "."),
        f"{result.shared} blocks ({size(result.shared * shape.block)}) were shared by users and stored only once. "
        f"NVMe is written in the background, on the same cores: all of it was there {result.talk_seconds:.1f} s after "
        "the first block was made.",
        f"Restart: closed in {result.close_seconds:.2f} s, opened in {result.open_seconds:.2f} s. After it "
        f"{result.reused_tokens:,} tokens were back in memory within {result.reused_seconds:.2f} s: "
        f"{size(result.from_nvme)} from NVMe, {size(result.from_dram)} from DRAM.",
        f"Arithmetic, not measurement: at {prefill:,.0f} tokens/s a GPU computes those tokens in {computing:.2f} s, "
        f"loading took {quicker}. For this model a disk beats that GPU above "
        f"{per_token * prefill / 1e9:.1f} GB/s; with plan.prefill_tokens_per_second set, slower loads are not made. "
        "The way from DRAM to the GPU is not in these numbers.",
    ]
