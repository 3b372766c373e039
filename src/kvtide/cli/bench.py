"""``kvtide bench``: measures the store on this machine."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvtide.errors import ConfigError

if TYPE_CHECKING:
    from kvtide.benchmarks.record import BenchRecord
    from kvtide.benchmarks.settings import Settings

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Measure kvtide on this machine, compared with the hardware's own limits.")


def _table(title: str, records: list[BenchRecord]) -> Table:
    table = Table(title=title)
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
    """Measure kvtide on this machine, compared with the hardware's own limits."""


@app.command()
def store(
    only: Annotated[
        list[str] | None,
        typer.Argument(help="match, dram, nvme, files, sealed (encrypted blocks), node, probe, objects, valkey."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less data and fewer rounds: under a minute.")] = False,
    json: Annotated[str, typer.Option(help="Write the records as JSON to this file; -: standard output.")] = "",
    path: Annotated[Path | None, typer.Option(help="A folder on the disk to measure. Default: temporary.")] = None,
) -> None:
    """The store: match, DRAM, NVMe, shared files, encrypted blocks, the node, what tenants can learn, and storage.

    The variants take turns; figures are medians, with the lowest and highest round. Speeds are compared with a plain
    memcpy, raw direct I/O and plain clients in the same run. Separate temporary stores are used: the store that you
    have configured is not opened. An object store or Valkey is measured only if you name it as an argument, and then in
    a folder of its own: KVTIDE_OBJECTS_URL=s3://bucket/folder, KVTIDE_VALKEY_URL=valkey://host.

    Example: kvtide bench store --quick --path /nvme
    """
    from kvtide.benchmarks import run

    _measure("store", only or [], quick, json, path, lambda settings: run(settings, only or ()))


@app.command()
def gpu(
    only: Annotated[list[str] | None, typer.Argument(help="pages, decode, first-token, first-token-nvme.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds: under a minute.")] = False,
    json: Annotated[str, typer.Option(help="Write the records as JSON to this file; -: standard output.")] = "",
) -> None:
    """The GPU: scattered pages to the arena and back, compared with the bus itself; decoding while blocks are stored;
    and the time to the first token of a long prompt that was seen before.

    Example: kvtide bench gpu --quick
    """
    try:
        from kvtide.benchmarks.gpu import gpu as measure
    except ImportError as e:
        raise ConfigError("this needs torch and transformers: pip install kvtide[transformers]") from e
    _measure("gpu", only or [], quick, json, None, lambda settings: measure(settings, only or ()))


@app.command()
def codec(
    quick: Annotated[bool, typer.Option("--quick", help="Shorter texts, fewer rounds: under two minutes.")] = False,
    json: Annotated[str, typer.Option(help="Write the records as JSON to this file; -: standard output.")] = "",
) -> None:
    """Smaller KV: bytes, speed and error of every lossy form, and of the lossless codec, on a real model's KV.

    Example: kvtide bench codec --quick
    """
    try:
        from kvtide.benchmarks.codec import codec as measure
    except ImportError as e:
        raise ConfigError("this runs a real model: pip install kvtide[demo,zstd]") from e
    _measure("codec", [], quick, json, None, measure)


@app.command()
def overlap(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds.")] = False,
    json: Annotated[str, typer.Option(help="Write the records as JSON to this file; -: standard output.")] = "",
    path: Annotated[Path | None, typer.Option(help="A folder on the disk to measure. Default: temporary.")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of the prompt. Default: 131072 on a GPU, else 1024.", min=512)
    ] = None,
    disk: Annotated[
        float | None,
        typer.Option(help="Limit the disk to this many MB/s, which moves the point where the two meet.", min=0.1),
    ] = None,
) -> None:
    """A prompt whose front is computed while its tail is loaded from NVMe, compared with computing and loading it
    alone, and with the time at which the curves of the two meet. On a GPU with the shape of Llama-3-8B, else a small
    model.

    Example: kvtide bench overlap --path /nvme --json overlap.json
    """
    try:
        from kvtide.benchmarks.overlap import overlap as measure
    except ImportError as e:
        raise ConfigError("this needs torch and transformers: pip install kvtide[transformers]") from e
    options = [f"--tokens {tokens}"] if tokens else []
    options += [f"--disk {disk:g}"] if disk else []
    speed = disk * 1e6 if disk else None
    _measure("overlap", options, quick, json, path, lambda settings: measure(settings, tokens, speed))


def _measure(
    what: str,
    only: Sequence[str],
    quick: bool,
    json: str,
    path: Path | None,
    measure: Callable[[Settings], Iterable[BenchRecord]],
) -> None:
    """Measure, and show or write the records."""
    import msgspec

    from kvtide.benchmarks.settings import NoPeers, Settings

    folder = path or Path(tempfile.gettempdir())
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise ConfigError(f"{folder} is not a folder that can be written to: give --path on the disk to measure")
    if json not in ("", "-") and not Path(json).parent.is_dir():  # before minutes of measuring, not after
        raise ConfigError(f"--json is {json}, and there is no folder {Path(json).parent}")
    console = Console(stderr=True)
    command = " ".join(["kvtide bench", what, *only, *(["--quick"] if quick else ())])
    with console.status("measuring") as status:
        settings = Settings(quick, folder, command, status.update, NoPeers())
        records = list(measure(settings))
    if json == "-":
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(records), indent=2).decode() + "\n")
        return
    if json:
        Path(json).write_bytes(msgspec.json.format(msgspec.json.encode(records), indent=2))
    Console().print(_table(command, records))
