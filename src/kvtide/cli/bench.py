"""``kvtide bench``: measures the store on this machine."""

from __future__ import annotations

import os
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtide.cli._options import number, whole
from kvtide.errors import ConfigError

if TYPE_CHECKING:
    from rich.text import Text

    from kvtide.benchmarks.record import BenchRecord
    from kvtide.benchmarks.settings import Settings

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Measure kvtide on this machine, compared with the hardware's own limits.",
)


def _lines(records: list[BenchRecord], width: int) -> Iterator[Text]:
    """A few lines for each figure: a table of all that a record has would not fit into 80 columns."""
    from rich.text import Text

    for r in records:
        mark = {True: ("  met", "green"), False: ("  missed", "red"), None: ("", "")}[r.met]
        yield Text.assemble((r.name, "bold"), mark)
        facts = f"{r.ours:g} {r.unit}, {r.spread[0]:g} to {r.spread[1]:g} in {r.rounds} rounds"
        facts += "" if r.limit is None else f"; limit {r.limit:g}"
        facts += "" if r.ratio is None else f"; ratio {r.ratio:.2f}"
        if r.bar is not None:
            least = r.ratio is not None or r.better == "higher"
            facts += f"; asked for {'at least' if least else 'at most'} {r.bar:g}"
        for text, style in ((facts, ""), (r.note or r.against, "dim")):
            if text:
                yield Text(textwrap.fill(text, width, initial_indent="  ", subsequent_indent="  "), style=style)


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

        [bold]kvtide bench store --quick --path /nvme[/bold]
    """
    from kvtide.benchmarks import run

    _measure("store", only or [], quick, json, path, lambda settings: run(settings, only or ()))


@app.command()
def gpu(
    only: Annotated[list[str] | None, typer.Argument(help="pages, decode, first-token, first-token-nvme.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds: under a minute.")] = False,
    json: Annotated[str, typer.Option(help="Write the records as JSON to this file; -: standard output.")] = "",
) -> None:
    """The GPU: its copies, decoding while blocks are stored, and the first token.

    Scattered pages are copied to the arena and back, compared with the bus itself. The first token is that of a long
    prompt that was seen before.

        [bold]kvtide bench gpu --quick[/bold]
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

    In under two minutes:

        [bold]kvtide bench codec --quick[/bold]
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
        int | None,
        typer.Option(metavar="N", parser=whole(512), help="Tokens of the prompt. Default: 131072 on a GPU, else 1024."),
    ] = None,
    disk: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            parser=number(0.1),
            help="Limit the disk to this many MB/s, which moves the point where the two meet.",
        ),
    ] = None,
) -> None:
    """A prompt whose front is computed while its tail is loaded from NVMe.

    It is compared with computing and loading it alone, and with the time at which the curves of the two meet. On a GPU
    with the shape of Llama-3-8B, else a small model.

        [bold]kvtide bench overlap --path /nvme --json overlap.json[/bold]
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
    from rich.console import Console

    from kvtide.benchmarks.settings import NoPeers, Settings

    folder = path or Path(tempfile.gettempdir())
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise ConfigError(f"{folder} is not a folder that can be written to: give --path on the disk to measure")
    if json not in ("", "-") and not Path(json).parent.is_dir():  # before minutes of measuring, not after
        raise ConfigError(f"--json is {json}, and there is no folder {Path(json).parent}")
    if json not in ("", "-") and Path(json).is_dir():
        raise ConfigError(f"--json is {json}, which is a folder: name a file to write")
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
    out = Console(highlight=False)
    for line in _lines(records, min(out.width, 120)):
        out.print(line)
