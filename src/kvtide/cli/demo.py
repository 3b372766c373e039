"""``kvtide demo``: a real model answers questions about a long document, computed and from every tier."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtide.cli._options import choice, number, whole

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvtide.cli._demo_result import Result

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


class DemoEngine(StrEnum):
    """What runs the model."""

    TRANSFORMERS = "transformers"
    VLLM = "vllm"


@app.command()
def demo(
    engine: Annotated[
        DemoEngine,
        typer.Option(
            metavar="ENGINE",
            parser=choice(DemoEngine),
            help="What runs the model: transformers in processes of its own, or a real vLLM server with the connector, "
            "if vLLM is installed in this environment.",
        ),
    ] = DemoEngine.TRANSFORMERS,
    out: Annotated[Path, typer.Option(help="Folder for the plot and the page.")] = Path("demo-out"),
    path: Annotated[
        Path | None,
        typer.Option(help="Folder on the disk to use; a temporary one is made in it and deleted.", show_default=False),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            parser=number(1, 1e6),
            help="How long all of it may take, about: the document's length is chosen for that.",
        ),
    ] = 200,
    least: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            metavar="TOKENS",
            parser=whole(300, 7000),
            help="How long the document is, at least. Without it, a short prompt is computed first, and the length is "
            "chosen by the time that took.",
            show_default=False,
        ),
    ] = None,
    new_tokens: Annotated[
        int, typer.Option(metavar="TOKENS", parser=whole(1, 200), help="How long an answer may be.")
    ] = 16,
) -> None:
    """Ask a real model about a long document: computed, from DRAM, and from NVMe after a restart.

    A small model runs here, on the CPU if there is no GPU. The time to its first token is measured, and the answers
    are compared token for token with those without kvtide. With transformers another process asks too, which shares
    the DRAM.

        [bold]kvtide demo --path /mnt/nvme[/bold]

    The exit code is 1 if any answer differs, or if the store did not have the document.
    """
    from rich.console import Console

    from kvtide.cli import _demo_run, _demo_vllm
    from kvtide.cli._demo_page import write_page, write_plot
    from kvtide.cli._demo_processes import SignalGuard, scratch_folder
    from kvtide.cli._demo_progress import DemoProgress
    from kvtide.errors import TierError

    console = Console(highlight=False)
    place = (path or scratch_folder()).resolve()
    if not place.is_dir():
        raise TierError(f"{place} is not a directory: give one on the disk to use")
    with _writing_to(out):  # before anything is measured, not after
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    wish = _demo_run.Wish(place, seconds, least or 0, new_tokens)
    play = _demo_vllm.play if engine == DemoEngine.VLLM else _demo_run.play
    try:
        with SignalGuard() as guard:
            with DemoProgress(console) as progress:
                result = play(wish, progress, guard)
            _print(console, result)
            plot, page = None, out / "index.html"
            with _writing_to(out):
                plot = write_plot(result, out / "demo.png")
                write_page(result, plot, page)
    except KeyboardInterrupt:
        console.print(
            "Interrupted: all processes have ended, and what was stored is deleted. To try again in less time: "
            "kvtide demo --seconds 60",
            style="yellow",
            soft_wrap=True,
        )
        raise typer.Exit(130) from None
    _finish(console, result, plot, page)


@contextlib.contextmanager
def _writing_to(out: Path) -> Iterator[None]:
    from kvtide.errors import TierError

    try:
        yield
    except OSError as error:
        raise TierError(f"cannot write to {out} ({error.strerror}): name another folder with --out") from error


def _finish(console: Console, result: Result, plot: Path | None, page: Path) -> None:
    """Name the files, and end with exit code 1 if anything is wrong."""
    if plot is None:
        console.print("No plot: matplotlib is not here (pip install 'kvtide\\[plot]').", style="yellow")
    console.print(" and ".join(str(file.resolve()) for file in (plot, page) if file is not None), soft_wrap=True)
    if result.different:
        console.print(f"{result.different} answers were not those of the model without kvtide.", style="bold red")
    if result.not_found:
        console.print(f"The store did not have the document: {', '.join(result.not_found)}.", style="bold red")
    if result.different or result.not_found:
        raise typer.Exit(1)


def _print(console: Console, result: Result) -> None:
    console.print(_table(result))
    for line in result.findings():
        console.print(line)


def _table(result: Result) -> Table:
    from rich.table import Table

    table = Table("", "Computed", "From the cache", "First token after", "Speed-up", title="Until the first token")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in result.rows():
        table.add_row(row.title, f"{row.computed:,}", f"{row.cached:,}", row.seconds_text, row.speedup_text)
    return table
