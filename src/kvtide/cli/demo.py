"""``kvtide demo``: a real model answers questions about a long document, computed and from every tier."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from kvtide.cli._demo_ask import Way
    from kvtide.cli._demo_run import Result

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the plot and the page.")] = Path("demo-out"),
    path: Annotated[
        Path | None,
        typer.Option(help="Folder on the disk to use; a temporary one is made in it and deleted.", show_default=False),
    ] = None,
    least: Annotated[
        int, typer.Option("--tokens", help="How long the document is, at least.", min=300, max=7000)
    ] = 6144,
    new_tokens: Annotated[int, typer.Option(help="How long an answer may be.", min=1, max=200)] = 16,
) -> None:
    """Ask a real model about a long document: computed, from DRAM, from another process, from NVMe after a restart.

    A small model runs here on the CPU, no GPU needed. The time to its first token is measured, and the answers are
    compared token for token with those without kvtide.

        [bold]kvtide demo --path /mnt/nvme[/bold]

    The exit code is 1 if any answer differs.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from kvtide.cli._demo_page import write_page, write_plot
    from kvtide.cli._demo_run import WAYS, play, scratch_folder
    from kvtide.cli._demo_text import QUESTIONS
    from kvtide.errors import TierError

    console = Console(highlight=False)
    place = path or scratch_folder()
    if not place.is_dir():
        raise TierError(f"{place} is not a directory: give one on the disk to use")
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TextColumn("questions"))
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bars:
        totals = {way: 1 if way == "cold" else len(QUESTIONS) for way in WAYS}
        tasks = {way: bars.add_task(title, total=totals[way], start=False) for way, title in WAYS.items()}

        def progress(way: Way, done: int) -> None:
            bars.start_task(tasks[way])
            bars.update(tasks[way], completed=done)

        result = play(place, least, new_tokens, progress)

    console.print(_table(result))
    for line in result.findings():
        console.print(line)
    out.mkdir(parents=True, exist_ok=True)
    plot = write_plot(result, out / "demo.png")
    if plot is None:
        console.print("No plot: matplotlib is not here (pip install 'kvtide\\[plot]').", style="yellow")
    page = write_page(result, plot, out / "index.html")
    console.print(" and ".join(str(file.resolve()) for file in (plot, page) if file is not None), soft_wrap=True)
    if result.different:
        console.print(f"{result.different} answers were not those of the model without kvtide.", style="bold red")
        raise typer.Exit(1)


def _table(result: Result) -> Table:
    from rich.table import Table

    table = Table("", "Computed", "From the store", "First token after", "Speed-up", title="Until the first token")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in result.rows():
        table.add_row(row.title, f"{row.computed:,}", f"{row.cached:,}", row.seconds_text, row.speedup_text)
    return table
