"""``kvtide replay``: what a trace of requests would have done to the tiers."""

from __future__ import annotations

import math
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvtide.errors import ConfigError
from kvtide.show import size

if TYPE_CHECKING:
    from kvtide.config import Config
    from kvtide.replay.run import Report
    from kvtide.replay.trace import Trace

__all__ = ["app"]

app = typer.Typer()


def _room(text: str, unique: int, slot: int) -> int:
    """A size in bytes, or a percentage of the trace's different blocks."""
    from kvtide.units import parse_size

    if not text.endswith("%"):
        return parse_size(text)
    try:
        share = float(text[:-1]) / 100
    except ValueError:
        share = 0.0
    if not 0 < share < math.inf:
        raise ConfigError(f"{text!r} is not a size such as 64GiB, or a share of the trace's blocks such as 5%")
    return max(1, int(unique * share)) * slot


_NOT_OURS = {"files.path": "", "objects.url": "", "valkey.url": "", "record.path": ""}
_NOT_OURS |= {"security.encrypt": "false", "security.key_source": "", "security.key_file": "", "security.audit": ""}
"""What a replay with real bytes leaves alone: storage that others use, keys, and logs of what was done."""


def _settings(trace: Trace, block: int, given: dict[str, str | None], folder: str = "") -> Config:
    """With a ``folder`` the settings of a store that is made there, and touches nothing else."""
    from kvtide import config
    from kvtide.block import padded
    from kvtide.tiers.segments import ladder

    slot = ladder(padded(block))
    wanted: dict[str, Any] = {}
    if dram := given["dram"]:
        wanted["dram.budget"] = _room(dram, trace.unique, slot)
    if nvme := given["nvme"]:
        wanted["nvme.budget"] = _room(nvme, trace.unique, slot)
        wanted["nvme.path"] = folder or "replayed"
    for name in ("dram.policy", "nvme.policy", "nvme.store"):
        if given[name]:
            wanted[name] = given[name]
    if folder:
        wanted |= _NOT_OURS
        if config.read(overrides=wanted).nvme.path:
            wanted["nvme.path"] = folder
    return config.read(overrides=wanted)


def _table(report: Report, trace: Path) -> Table:
    table = Table(title=f"{trace.name}: {report.requests:,} requests, the first {report.warming:,} to warm up")
    for name in ("tier", "blocks", "policy", "hit rate", "read", "written", "evicted"):
        table.add_column(name, justify="left" if name in ("tier", "policy") else "right")
    for tier in report.tiers:
        table.add_row(
            tier.name,
            f"{tier.blocks:,}",
            tier.policy,
            f"{tier.hit_rate:.2%}",
            size(tier.bytes_read),
            size(tier.bytes_written),
            f"{tier.evicted:,}",
        )
    table.add_section()
    table.add_row("all", f"{sum(t.blocks for t in report.tiers):,}", "", f"[bold]{report.hit_rate:.2%}[/bold]")
    if report.optimum is not None:
        table.add_row("optimum", "", "knows the future", f"{report.optimum:.2%}")
    return table


def _notes(report: Report) -> list[str]:
    notes = [f"{report.blocks:,} blocks of {size(report.block_bytes)} asked for, {report.unique:,} different ones"]
    if len(report.tiers) > 1:
        notes.append(f"{report.write_amplification:.2f} bytes written to the colder tier for each byte computed")
    for name, seconds in report.seconds.items():
        notes.append(f"{seconds:,.1f} s {name}")
    notes.append(f"{report.policy_us:.1f} us of books and {report.learning_us:.1f} us of learning for each block here")
    return notes


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="Mooncake or agent JSON lines, or KV events; gzipped or not.")],
    dram: Annotated[str | None, typer.Option(help="DRAM: 64GiB, or 5% of the different blocks.")] = None,
    nvme: Annotated[str | None, typer.Option(help="A colder tier: 1TiB, or 50%.")] = None,
    policy: Annotated[str | None, typer.Option(help="What leaves DRAM first: auto, lru or reuse.")] = None,
    cold_policy: Annotated[str | None, typer.Option(help="The same for the colder tier.")] = None,
    store: Annotated[str | None, typer.Option(help="Written down: through, second-touch, ghost, eviction.")] = None,
    block: Annotated[str, typer.Option(help="Bytes of a block.")] = "2MiB",
    disk: Annotated[Path | None, typer.Option(help="A folder on the disk to measure. Default: temporary.")] = None,
    warm: Annotated[float, typer.Option(help="Percent of the requests that only fill the tiers.")] = 40.0,
    optimum: Annotated[bool, typer.Option(help="Work out the optimum too.")] = True,
    real: Annotated[bool, typer.Option("--real", help="With real bytes, checked; give a small --block.")] = False,
    json: Annotated[str, typer.Option(help="Write the report as JSON to this file; -: standard output.")] = "",
    plot: Annotated[Path | None, typer.Option(help="Write the hit rate over time to this SVG file.")] = None,
) -> None:
    """Run a trace through the configured tiers, policies and admission, without its bytes.

    The store's own index, policies, admission and pipeline decide, over tiers that keep only their books. Sizes and
    policies that are not given here are those of kvtide.toml and the environment.

    Example: kvtide replay conversation.jsonl.gz --dram 1% --nvme 10% --store ghost
    """
    import msgspec

    from kvtide.replay.plot import svg
    from kvtide.replay.run import replay as run
    from kvtide.replay.speeds import measure
    from kvtide.replay.trace import chains, read
    from kvtide.units import parse_size

    if not 0 <= warm < 100:
        raise ConfigError(f"--warm is {warm:g}; it must be at least 0 and below 100")
    nbytes = parse_size(block)
    if nbytes <= 0:
        raise ConfigError(f"--block is {block!r}; it must be a size such as 2MiB")
    for place in (disk, plot.parent if plot else None, Path(json).parent if json else None):
        if place is not None and not place.is_dir():
            raise ConfigError(f"there is no folder {place}")
    console = Console(stderr=True)
    with Progress(console=console, transient=True) as progress:
        try:
            total = trace.stat().st_size
        except OSError:
            total = None
        reading = progress.add_task("reading", total=total)
        found = chains(read(trace, lambda done: progress.update(reading, completed=done)))
        given = {"dram": dram, "nvme": nvme, "dram.policy": policy, "nvme.policy": cold_policy, "nvme.store": store}
        settings = _settings(found, nbytes, given)
        running = progress.add_task("replaying", total=len(found.blocks))
        speeds = measure(disk)
        with tempfile.TemporaryDirectory(prefix="kvtide-replay-", dir=disk) as folder:
            if real:
                settings = _settings(found, nbytes, given, folder)
            advance = partial(progress.update, running)
            report = run(found, settings, nbytes, warm / 100, optimum, speeds, lambda n: advance(completed=n), real)
    if plot:
        plot.write_text(svg(report, trace.name))
    text = msgspec.json.format(msgspec.json.encode(report), indent=2)
    if json == "-":
        sys.stdout.write(text.decode() + "\n")
        return
    if json:
        Path(json).write_bytes(text)
    out = Console()
    out.print(_table(report, trace))
    for note in _notes(report):
        out.print(f"  {note}", highlight=False)
