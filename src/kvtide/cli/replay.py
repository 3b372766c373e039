"""``kvtide replay``: what a trace of requests would have done to the tiers, and how large they should be."""

from __future__ import annotations

import math
import re
import sys
import tempfile
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand

from kvtide.cli._options import ConfigFile, number, whole
from kvtide.errors import ConfigError, TraceError
from kvtide.formatting import gib, size

if TYPE_CHECKING:
    from rich.table import Table

    from kvtide.config import Config
    from kvtide.replay.run import ReplayReport
    from kvtide.replay.sweep import Sweep
    from kvtide.replay.trace import Trace

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode="rich")

_SIZES = "0.1%,1%,5%,10%,25%,50%"
_BLOCK = 2 << 20
_LIST = re.compile(r"[^,/]*(%|\d|\d ?[kmgtpe]?i?b)(,[^,/]*)*", re.IGNORECASE)


class _Command(TyperCommand):
    """Lets ``--sweep`` be given without a value. (Any: the types are typer's private ones, which have no such
    option.)"""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given: list[str] = []
        for argument, following in zip(args, [*args, ""][1:], strict=True):
            given.append(argument)
            if argument == "--sweep" and (not _LIST.fullmatch(following) or Path(following).is_file()):
                given.append(_SIZES)
        return super().parse_args(ctx, given)


def _room(option: str, tier: str, text: str, unique: int, slot: int) -> int:
    """Bytes of a tier, from a size or a percentage of the trace's different blocks."""
    from kvtide import config

    nbytes = _nbytes(option, text, unique, slot)
    if nbytes < slot:
        raise ConfigError(
            f"{option} {text} is less than one block, which takes {size(slot)}: "
            f"give {option} that much or more, or smaller blocks"
        )
    try:
        {"dram": config.Dram, "nvme": config.Nvme}[tier](budget=nbytes)
    except ConfigError as error:
        raise ConfigError(f"{option} {text} is {size(nbytes)}, for blocks of {size(slot)}: {error}") from error
    return nbytes


def _nbytes(option: str, text: str, unique: int, slot: int) -> int:
    from kvtide.units import parse_size

    if not text.endswith("%"):
        if (nbytes := parse_size(text)) > _MOST:
            raise ConfigError(f"{option} {text} is more than {size(_MOST)}: give a smaller size")
        return nbytes
    try:
        share = Decimal(text[:-1].strip())
    except InvalidOperation:
        share = Decimal(0)
    if not share.is_finite() or share <= 0:
        raise ConfigError(f"{text!r} is not a size such as 64GiB, or a share of the trace's blocks such as 5%")
    blocks = int(unique * share / 100)
    if blocks * slot > _MOST:
        raise ConfigError(f"{option} {text} of the trace's {unique:,} different blocks is more than {size(_MOST)}")
    if not blocks:
        raise ConfigError(
            f"{option} {text} of the trace's {unique:,} different blocks is less than one block: "
            f"give {option} {math.ceil(1e8 / unique) / 1e6:g}% or more, or a size of at least {size(slot)}"
        )
    return blocks * slot


_MOST = 1 << 53
"""Maximum bytes of a tier."""

_NOT_OURS = {"files.path": "", "objects.url": "", "valkey.url": "", "record.path": ""}
_NOT_OURS |= {"security.encrypt": "false", "security.key_source": "", "security.key_file": "", "security.audit": ""}
"""Settings that a replay with real bytes overrides: shared storage, keys, and logs."""


def _settings(trace: Trace, block: int, given: dict[str, Any], folder: str = "") -> Config:
    """The settings; with a ``folder`` those of a store created there, which uses nothing else."""
    from kvtide import config
    from kvtide.replay.run import slot_of

    wanted: dict[str, Any] = {}
    for tier in ("dram", "nvme"):
        if text := given[tier]:
            wanted[f"{tier}.budget"] = _room(f"--{tier}", tier, text, trace.unique, slot_of(block))
    if given["nvme"]:
        wanted["nvme.path"] = folder or "replayed"
    for name in ("dram.policy", "nvme.policy", "nvme.store"):
        if given[name]:
            wanted[name] = given[name]
    if folder:
        wanted |= _NOT_OURS
        if config.read(given["file"], overrides=wanted).nvme.path:
            wanted["nvme.path"] = folder
    return config.read(given["file"], overrides=wanted)


def _sweep_settings(trace: Trace, block: int, given: dict[str, Any]) -> tuple[list[tuple[str, Config]], list[str]]:
    """A configuration for each size, with DRAM only; and the usual sizes that were left out because they are too
    small."""
    from kvtide import config
    from kvtide.replay.run import slot_of

    sizes, policy = given["sweep"], given["policy"]
    found: dict[int, tuple[str, Config]] = {}
    left: list[str] = []
    for text in sizes.split(","):
        wanted: dict[str, Any] = {"nvme.path": ""}
        if policy:
            wanted["dram.policy"] = policy
        # so that other errors in these settings are not taken for a size that is too small
        config.read(given["file"], overrides=wanted)
        try:
            wanted["dram.budget"] = _room("--sweep", "dram", text.strip(), trace.unique, slot_of(block))
            settings = config.read(given["file"], overrides=wanted)
        except ConfigError as error:
            if sizes != _SIZES:
                raise
            left.append(f"{text} is left out: {error}")
            continue
        found.setdefault(settings.dram.budget // slot_of(block), (text.strip(), settings))
    if not found:
        raise ConfigError(f"every usual size is too small for this trace: give --sweep a list. {left[-1]}")
    return list(found.values()), left


def _block_bytes(trace: Trace, block: str | None, model: str | None, kv_dtype: str) -> int:
    """Bytes of a block: as given, of a model, as recorded in the trace, or the default."""
    if block is not None:
        from kvtide.replay.trace import LARGEST
        from kvtide.units import parse_size

        nbytes = parse_size(block)
        if not 0 < nbytes <= LARGEST:
            raise ConfigError(f"--block is {block!r}; it must be a size such as 2MiB, and at most {size(LARGEST)}")
        return nbytes
    if model is None:
        return trace.block_bytes or _BLOCK
    from kvtide.doctor.model import folder_of, layout_of

    tokens = trace.block_tokens
    if tokens is None:
        raise ConfigError("--model needs the tokens of a block, which this trace does not contain: give --block-tokens")
    path = Path(model).expanduser()
    if path.is_file() and path.name != "config.json":
        raise ConfigError(f"--model {model} is a file; give its folder, or a file config.json in Hugging Face's format")
    layout = layout_of(path.parent if path.is_file() else folder_of(model), kv_dtype=kv_dtype)
    return sum(group.geometry(tokens).nbytes for group in layout.groups)


def _check(given: dict[str, Any], trace: Path) -> None:
    """Refuse options that are contradictory or would have no effect, before the trace is read."""
    if given["block"] is not None and given["model"] is not None:
        raise ConfigError("--block and --model both say how many bytes a block has: give one of them")
    if given["kv_cache_dtype"] != "auto" and given["model"] is None:
        raise ConfigError("--kv-cache-dtype has no effect without --model")
    if given["sweep"] is not None:
        for name in ("dram", "nvme", "cold_policy", "store", "disk", "real"):
            if given[name]:
                raise ConfigError(
                    f"--{name.replace('_', '-')} has no effect with --sweep, which replays DRAM of each size alone: "
                    "leave one of them out"
                )
    json = given["json"]
    for file in (given["plot"], Path(json) if json not in ("", "-") else None):
        if file is None:
            continue
        if not file.parent.is_dir():
            raise ConfigError(f"there is no folder {file.parent} to write {file.name} to")
        if file.is_dir():
            raise ConfigError(f"{file} is a folder: name a file to write")
        if file.resolve() == trace.resolve():
            raise ConfigError(f"{file} is the trace itself: name another file to write")
    if given["disk"] is not None and not given["disk"].is_dir():
        raise ConfigError(f"there is no folder {given['disk']}")


def _check_tiers(settings: Config, given: dict[str, Any]) -> None:
    """Refuse options for a colder tier if there is none."""
    for name in ("cold_policy", "store", "disk"):
        if given[name] and not settings.nvme.path:
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect without a colder tier: give --nvme a size, "
                "or set nvme.path in kvtide.toml"
            )


def _table(report: ReplayReport, trace: Path) -> Table:
    from rich.table import Table

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
    every = f"{sum(t.blocks for t in report.tiers):,}"
    table.add_row("all", every, report.tiers[0].policy, f"[bold]{report.hit_rate:.2%}[/bold]")
    for other in report.compared:
        table.add_row("all", every, f"{other.policy} instead", f"{other.hit_rate:.2%}")
    if report.optimum is not None:
        table.add_row("all", every, "optimum", f"{report.optimum:.2%}")
    return table


def _blocks(report: ReplayReport | Sweep) -> str:
    tokens = f" and {report.block_tokens} tokens" if report.block_tokens else ""
    different = f"{report.unique:,} different ones in the whole trace"
    return f"{report.blocks:,} blocks of {size(report.block_bytes)}{tokens} asked for; {different}"


def _notes(report: ReplayReport) -> list[str]:
    from kvtide.replay.run import led

    notes = [_blocks(report), f"{report.hits:,} found, {report.misses:,} computed"]
    leaders = led(report)
    if any(name != report.tiers[0].policy for name in leaders):
        changes = sum(number > report.warming for number, _ in report.in_charge)
        counted = report.requests - report.warming
        leaders_text = ", ".join(
            f"{name} led for {100 * count / counted:.0f} % of the requests" for name, count in leaders.items()
        )
        notes.append(f"{leaders_text}; changed {changes} {'time' if changes == 1 else 'times'}")
    if len(report.tiers) > 1:
        notes.append(f"{report.write_amplification:.2f} bytes written to the colder tier for each byte computed")
    for name, seconds in report.seconds.items():
        notes.append(f"{seconds:,.1f} s {name}")
    bookkeeping, learning = f"{report.policy_us:.1f} us of bookkeeping", f"{report.learning_us:.1f} us of learning"
    notes.append(f"{bookkeeping} and {learning} for each block here")
    return notes


def _sweep_table(found: Sweep, trace: Path) -> Table:
    from rich.table import Table

    table = Table(title=f"{trace.name}: {found.requests:,} requests, the first {found.warming:,} to warm up")
    rates = list(found.rows[0].hit_rates)
    best = ["optimum"] if found.rows[0].optimum is not None else []
    for name in ("size", "blocks", "GiB", *rates, *best):
        table.add_column(name, justify="right")
    for row in found.rows:
        shown = [*row.hit_rates.values(), *([] if row.optimum is None else [row.optimum])]
        table.add_row(row.size, f"{row.blocks:,}", gib(row.bytes), *(f"{rate:.2%}" for rate in shown))
    return table


class _Result(NamedTuple):
    report: ReplayReport | Sweep
    table: Table
    notes: list[str]
    picture: str


def _show(result: _Result, json: str) -> None:
    import msgspec
    from rich.console import Console

    text = msgspec.json.format(msgspec.json.encode(result.report), indent=2)
    out = Console(stderr=json == "-")
    if json != "-":
        out.print(result.table)
    for note in result.notes:
        out.print(f"  {note}", highlight=False)
    if json == "-":
        sys.stdout.write(text.decode() + "\n")
    elif json:
        _write("--json", Path(json), text)


def _write(option: str, path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be written: {error.strerror}; give another file") from error


@app.command(cls=_Command)
def replay(
    ctx: typer.Context,
    trace: Annotated[
        Path,
        typer.Argument(help="A recording of kvtide, a trace of Mooncake or Bailian, or KV events; gzipped or not."),
    ],
    sweep: Annotated[
        str | None,
        typer.Option(metavar="[SIZES]", help=f"Try DRAM of these sizes: 8GiB,64GiB say. Without any: {_SIZES}."),
    ] = None,
    dram: Annotated[str | None, typer.Option(help="DRAM: 64GiB, or 5% of the different blocks.")] = None,
    nvme: Annotated[str | None, typer.Option(help="A colder tier: 1TiB, or 50%.")] = None,
    policy: Annotated[str | None, typer.Option(help="The eviction policy of DRAM: dram.policy.")] = None,
    cold_policy: Annotated[str | None, typer.Option(help="The same for the colder tier: nvme.policy.")] = None,
    store: Annotated[str | None, typer.Option(help="What is written to the colder tier, and when: nvme.store.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Bytes of a block are those of this model: a folder, a config.json or a name in the hub's cache."
        ),
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="With --model, as vLLM is given it.")] = "auto",
    block: Annotated[
        str | None, typer.Option(help="Bytes of a block. Without it: as recorded, or 2MiB.", show_default=False)
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", parser=whole(1), help="Tokens of a block of the trace. Without it: found from the trace."
        ),
    ] = None,
    disk: Annotated[Path | None, typer.Option(help="A folder on the disk to measure. Default: temporary.")] = None,
    warm: Annotated[
        float,
        typer.Option(metavar="N", parser=number(0, 100), help="Percent of the requests that only fill the tiers."),
    ] = 40.0,
    compare: Annotated[bool, typer.Option(help="Replay every other policy for DRAM too; with --sweep LRU.")] = True,
    optimum: Annotated[bool, typer.Option(help="Work out the optimum too.")] = True,
    real: Annotated[bool, typer.Option("--real", help="With real bytes, checked; give a small --block.")] = False,
    json: Annotated[str, typer.Option(help="Write the report as JSON to this file; -: standard output.")] = "",
    plot: Annotated[
        Path | None, typer.Option(help="Write the hit rate over time, or with --sweep over sizes, to this SVG file.")
    ] = None,
    file: ConfigFile = None,
) -> None:
    """Find out how much cache your requests need.

    A trace of requests is replayed through tiers and policies without its
    bytes. The store's own index, policies, admission and pipeline decide.
    Settings not given here are taken from kvtide.toml and the environment.

    How much DRAM is worth buying for this model, as a table and a picture:

        [bold]kvtide replay trace.jsonl.gz --sweep \\
          --model /models/llama --plot sizes.svg[/bold]

    The hit rates of these tiers, and of other policies:

        [bold]kvtide replay trace.jsonl.gz --model /models/llama \\
          --dram 64GiB --nvme 1TiB[/bold]

    Without a model, as a percentage of the trace's different blocks:

        [bold]kvtide replay trace.jsonl.gz --dram 1% --nvme 10% --store ghost[/bold]

    Sizes of your own, 128 KiB of KV for each token, blocks of 16 tokens:

        [bold]kvtide replay trace.jsonl.gz --sweep 8GiB,64GiB,512GiB \\
          --block-tokens 16 --block 2MiB[/bold]
    """
    from rich.console import Console
    from rich.progress import Progress

    given = ctx.params
    _check(given, trace)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        from kvtide.replay.trace import load

        try:
            total = trace.stat().st_size
        except OSError:
            total = None
        reading = progress.add_task("reading", total=total)
        found = load(trace, lambda done: progress.update(reading, completed=done), block_tokens)
        if not found.blocks:
            tokens = f" of {found.block_tokens} tokens" if found.block_tokens else ""
            raise TraceError(f"{trace} has no request with a full block{tokens}: nothing can hit")
        nbytes = _block_bytes(found, block, model, kv_cache_dtype)

        def started(name: str) -> Callable[[int], None]:
            task = progress.add_task(f"replaying {name}", total=len(found.blocks))
            return lambda number: progress.update(task, completed=number)

        result = (_one if sweep is None else _sweep)(found, nbytes, given, started)
    _show(result, json)
    if plot:
        _write("--plot", plot, result.picture.encode())


def _sweep(
    found: Trace, nbytes: int, given: dict[str, Any], started: Callable[[str], Callable[[int], None]]
) -> _Result:
    from kvtide.replay.plot import sweep_svg
    from kvtide.replay.sweep import sweep

    configs, left = _sweep_settings(found, nbytes, given)
    report = sweep(found, configs, nbytes, given["warm"] / 100, given["compare"], given["optimum"], started)
    notes = [_blocks(report), f"{report.unlimited:.2%} would be found if nothing ever left", *left]
    trace: Path = given["trace"]
    return _Result(report, _sweep_table(report, trace), notes, sweep_svg(report, trace.name))


def _one(found: Trace, nbytes: int, given: dict[str, Any], started: Callable[[str], Callable[[int], None]]) -> _Result:
    from msgspec import structs

    from kvtide.replay.compare import compare
    from kvtide.replay.plot import svg
    from kvtide.replay.run import replay as run
    from kvtide.replay.speeds import measure

    warm, disk = given["warm"] / 100, given["disk"]
    wanted = {name: given[name] for name in ("dram", "nvme", "file")}
    wanted |= {"dram.policy": given["policy"], "nvme.policy": given["cold_policy"], "nvme.store": given["store"]}
    settings = own = _settings(found, nbytes, wanted)
    _check_tiers(settings, given)
    speeds = measure(disk)
    with tempfile.TemporaryDirectory(prefix="kvtide-replay-", dir=disk) as folder:
        if given["real"]:
            own = _settings(found, nbytes, wanted, folder)
        advance = started(own.dram.policy)
        report = run(found, own, nbytes, warm, given["optimum"], speeds, advance, given["real"])
    if given["compare"]:
        report = structs.replace(report, compared=list(compare(found, settings, nbytes, warm, started)))
    trace: Path = given["trace"]
    return _Result(report, _table(report, trace), _notes(report), svg(report, trace.name))
