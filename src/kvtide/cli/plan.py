"""``kvtide plan``: will a KV cache outside GPU memory help, and what does it need?"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtide.cli._options import number, whole
from kvtide.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from kvtide.plan.prefill import Prefill
    from kvtide.sizing.arithmetic import Assumptions
    from kvtide.sizing.plan import SizingPlan
    from kvtide.sizing.trace import NeededCapacity

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode="rich")

_LENGTHS = 64
"""Number of lengths in a plot."""
_WIDEST = 100
_WORDS = ("on the Hugging Face hub", "kind", "source")
"""Columns without numbers."""


@app.command()
def plan(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="A name in the table (--models), a config.json, its folder, or a name in the Hugging Face cache."
        ),
    ] = "",
    models: Annotated[bool, typer.Option("--models", help="List the models and the hardware in the table.")] = False,
    gpu: Annotated[str, typer.Option(help="A GPU in the table (--models).")] = "h200",
    gpus: Annotated[
        int | None,
        typer.Option(
            metavar="N", parser=whole(1, 1024), help="GPUs with tensor parallelism. Without it: enough for the weights."
        ),
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="As vLLM is given it: auto, bfloat16, fp8.")] = "auto",
    context: Annotated[str, typer.Option(help="Lengths of prompts in tokens; k means 1,024.")] = "8k,32k,128k",
    bus: Annotated[str | None, typer.Option(help="Link to each GPU: a name, or bytes a second, 50GB say.")] = None,
    dram: Annotated[str, typer.Option(help="Host memory for KV.")] = "512GiB",
    dram_speed: Annotated[str, typer.Option(help="A name, or bytes a second.")] = "ddr5-12",
    nvme: Annotated[str, typer.Option(help="Disk space for KV.")] = "4TB",
    nvme_speed: Annotated[str, typer.Option(help="Of one drive: a name, or bytes a second.")] = "nvme-gen4",
    drives: Annotated[
        int, typer.Option(metavar="N", parser=whole(1, 1024), help="NVMe drives that are read in parallel.")
    ] = 1,
    network: Annotated[str, typer.Option(help="Link to shared storage: a name, or bytes a second; none.")] = "100gbe",
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure memory and disk of this host for a moment, instead of the table.")
    ] = False,
    disk: Annotated[
        Path | None,
        typer.Option(help="With --measure: a folder on the disk to measure. Default: the temporary folder."),
    ] = None,
    prefill: Annotated[
        float | None,
        typer.Option(
            "--prefill-tokens-per-second",
            metavar="N",
            parser=number(1, 1e12),
            help="Measured speed of computing prompts.",
        ),
    ] = None,
    prefill_cost: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Measured: seconds for a token, and for a token and each token before it."),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="vllm or transformers: which part of the GPU's speed is reached when prompts are computed, and "
            "whether one part of a prompt can be computed while the other is loaded."
        ),
    ] = "vllm",
    matmul: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            parser=number(0),
            help="Share of the GPU's FLOP/s that matrix products reach. Default: the engine's.",
        ),
    ] = None,
    attention: Annotated[
        float | None, typer.Option(metavar="X", parser=number(0), help="The same for attention.")
    ] = None,
    users: Annotated[
        int | None,
        typer.Option(metavar="N", parser=whole(1), help="Contexts of the longest length that should be kept."),
    ] = None,
    hit_rate: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            parser=number(0),
            help="Share of the prompts' tokens that were seen before, from 0 to 1; with --trace the wanted one.",
        ),
    ] = None,
    target: Annotated[str | None, typer.Option(help="Longest time to the first token: 300ms, 2s.")] = None,
    at_once: Annotated[
        int, typer.Option(metavar="N", parser=whole(1), help="Prompts that arrive together, for --target.")
    ] = 1,
    requests_per_hour: Annotated[
        float | None, typer.Option(metavar="N", parser=number(0), help="Prompts an hour, for savings.")
    ] = None,
    gpu_price: Annotated[
        float | None, typer.Option(metavar="X", parser=number(0), help="Your price of a GPU for an hour.")
    ] = None,
    dram_price: Annotated[
        float | None, typer.Option(metavar="X", parser=number(0), help="Your price of a GiB of DRAM for an hour.")
    ] = None,
    nvme_price: Annotated[
        float | None, typer.Option(metavar="X", parser=number(0), help="Your price of a GiB of NVMe for an hour.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="A trace as kvtide replay reads it: how many bytes give --hit-rate?")
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", parser=whole(1), help="With --trace: tokens of a block, if the trace does not say it."
        ),
    ] = None,
    policy: Annotated[str, typer.Option(help="With --trace: the eviction policy of DRAM.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw times over lengths, with break-evens, to this SVG file.")
    ] = None,
) -> None:
    """Estimate what a KV cache outside GPU memory gains, and what it needs.

    Bytes of KV, what fits where, time to the first token from each tier, the
    length from which loading is quicker than computing, and whether it helps.
    The figures are arithmetic from data sheets, not measurements.

        [bold]kvtide plan llama-3.1-70b --gpu h200 --users 8[/bold]

    How much DRAM gives a hit rate of 60 % for recorded requests:

        [bold]kvtide plan qwen3-8b --trace trace.jsonl.gz --hit-rate 0.6[/bold]
    """
    from rich.console import Console

    out = Console(stderr=as_json, highlight=False)
    out.width = min(out.width, _WIDEST)
    given = ctx.params
    if models:
        _list(out)
        return
    _check(given)
    found = _planned(given, _lengths(context))
    capacity = None if trace is None else _needed(given, found)
    if plot is not None:
        from kvtide.sizing.plot import draw

        block, longest = found.block_tokens, max(_lengths(context))
        steps = {max(1, round((longest / block) ** (i / (_LENGTHS - 1)))) * block for i in range(_LENGTHS)}
        draw(_planned(given, sorted(steps)), plot)
    if as_json:
        import msgspec

        both = {"plan": found, "trace": capacity}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(both), indent=2).decode() + "\n")
        return
    _show(out, found)
    if capacity is not None:
        _show_capacity(out, capacity)


def _check(given: dict[str, Any]) -> None:
    """Refuse options that contradict each other, or would have no effect."""
    if not given["model"]:
        raise ConfigError("name a model: kvtide plan llama-3.1-8b, say; kvtide plan --models lists those in the table")
    if given["trace"] is not None and given["hit_rate"] is None:
        raise ConfigError("--trace needs the hit rate that you want: --hit-rate 0.6, say")
    if given["disk"] is not None and not given["measure"]:
        raise ConfigError("--disk has no effect without --measure")
    if given["disk"] is not None and not given["disk"].is_dir():
        raise ConfigError(f"there is no folder {given['disk']}")
    prices = [name for name in ("gpu_price", "dram_price", "nvme_price") if given[name] is not None]
    if prices and given["requests_per_hour"] is None:
        raise ConfigError(f"--{prices[0].replace('_', '-')} has no effect without --requests-per-hour")
    if given["prefill"] is not None and given["prefill_cost"] is not None:
        raise ConfigError("--prefill-tokens-per-second and --prefill-cost both say how fast computing is: give one")
    if (plot := given["plot"]) is not None and not plot.parent.is_dir():
        raise ConfigError(f"there is no folder {plot.parent} to write {plot.name} to")


def _lengths(text: str) -> list[int]:
    found = []
    for word in text.split(","):
        digits = word.strip().lower().removesuffix("k")
        if not digits.isdecimal():
            raise ConfigError(f"--context {text!r}: {word.strip()!r} is no number of tokens; give 8192 or 8k")
        found.append(int(digits) * (1024 if word.strip().lower().endswith("k") else 1))
    return found


def _cost(given: dict[str, Any]) -> Prefill | None:
    from kvtide.plan.prefill import PrefillCost

    if (speed := given["prefill"]) is not None:
        return float(speed)
    if (text := given["prefill_cost"]) is None:
        return None
    try:
        a, b = (float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--prefill-cost is {text!r}; give two numbers of seconds: 28e-6,9.6e-10, say") from None
    if not a > 0:
        raise ConfigError(f"--prefill-cost is {text!r}; the first number, seconds a token, must be above 0")
    if not 0 <= b < math.inf:
        raise ConfigError(f"--prefill-cost is {text!r}; the second number must be 0 or more")
    return PrefillCost(a, b)


def _assumptions(given: dict[str, Any]) -> Assumptions:
    import msgspec

    from kvtide.sizing.arithmetic import ENGINES

    if (engine := given["engine"]) not in ENGINES:
        raise ConfigError(f"--engine is {engine!r}; choose {' or '.join(ENGINES)}")
    told = {name: given[name] for name in ("matmul", "attention") if given[name] is not None}
    return msgspec.structs.replace(ENGINES[engine], **told)


def _planned(given: dict[str, Any], lengths: list[int]) -> SizingPlan:
    from kvtide.sizing.hardware import measured
    from kvtide.sizing.plan import Demand, plan
    from kvtide.units import parse_duration

    here = measured(given["disk"]) if given["measure"] else {}
    return plan(
        given["model"],
        given["gpu"],
        gpus=given["gpus"],
        kv_dtype=given["kv_cache_dtype"],
        contexts=lengths,
        bus=given["bus"],
        dram=here.get("dram", given["dram_speed"]),
        dram_capacity=given["dram"],
        nvme=here.get("nvme", given["nvme_speed"]),
        drives=given["drives"],
        nvme_capacity=given["nvme"],
        network=None if given["network"] in ("", "none") else given["network"],
        prefill=_cost(given),
        assume=_assumptions(given),
        demand=Demand(
            users=given["users"],
            hit_rate=given["hit_rate"],
            target=None if given["target"] is None else parse_duration(given["target"]),
            at_once=given["at_once"],
            requests_per_hour=given["requests_per_hour"],
            gpu_price=given["gpu_price"],
            dram_price=given["dram_price"],
            nvme_price=given["nvme_price"],
        ),
    )


def _needed(given: dict[str, Any], found: SizingPlan) -> NeededCapacity:
    from rich.console import Console
    from rich.progress import Progress

    from kvtide.sizing.models import shape_of
    from kvtide.sizing.trace import needed

    shape = shape_of(given["model"], given["kv_cache_dtype"])
    with Progress(console=Console(stderr=True), transient=True) as progress:

        def started(name: str) -> Callable[[int], None]:
            task = progress.add_task(f"replaying {name}", total=None)
            return lambda number: progress.update(task, completed=number)

        return needed(
            given["trace"], shape, given["hit_rate"], given["policy"], given["block_tokens"], progress=started
        )


def _table(title: str, *columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position and column not in _WORDS else "left")
    return table


def _speed(speed: float) -> str:
    return f"{speed / 1e12:.3g} TB/s" if speed >= 1e12 else f"{speed / 1e9:.3g} GB/s"


def _show(out: Console, found: SizingPlan) -> None:
    from rich.markup import escape

    from kvtide.formatting import size
    from kvtide.sizing.verdict import seconds

    chosen = ", as many as the weights need" if found.gpus_chosen and found.gpus > 1 else ""
    out.print(
        f"[bold]{escape(found.model)}[/bold] on {found.gpus} x {found.gpu}{chosen}: {found.parameters / 1e9:.3g} "
        f"billion parameters, {size(found.weights)} of weights, "
        + (
            f"{size(found.kv_memory)} left for KV"
            if found.kv_memory > 0
            else "[red]which do not fit: give --gpus[/red]"
        )
    )
    out.print(
        f"KV in {found.kv_dtype}: {size(found.token_bytes)} a token ({size(found.token_bytes_fp8)} in fp8), "
        f"{size(found.block_bytes)} a block of {found.block_tokens} tokens"
        + ("" if found.token_bytes else "; every layer has a window, so long contexts do not grow")
    )
    names = [tier.name for tier in found.tiers]
    times = _table("Time to the first token", "tokens", "KV", "computed", "GPU memory", *names)
    fits = _table("Contexts that fit", "tokens", "GPU memory", *names)
    for at in found.contexts:
        tiers = [at.tiers[name] for name in names]
        firsts = (at.first_token_computed, at.first_token_gpu, *(tier.first_token for tier in tiers))
        times.add_row(f"{at.tokens:,}", size(at.kv_bytes), *map(seconds, firsts))
        counts = (at.fit_in_gpu, *(tier.fit for tier in tiers))
        fits.add_row(f"{at.tokens:,}", *("-" if count is None else f"{count:,}" for count in counts))
    longest = found.contexts[-1]
    each = _table(
        f"Each tier, and with {longest.tokens:,} tokens",
        "tier",
        "loads at",
        "quicker at",
        *(["both at once"] if found.assumptions.overlaps else []),
        "prompts/s",
        "decode tok/s",
    )
    each.add_row("GPU memory", *[""] * (len(each.columns) - 2), f"{longest.decode_tokens_per_second:.3g}")
    for tier in found.tiers:
        at_longest = longest.tiers[tier.name]
        each.add_row(
            tier.name,
            _speed(longest.kv_bytes / at_longest.load),
            _from(tier.break_even, found.block_tokens),
            *([seconds(at_longest.both)] if found.assumptions.overlaps else []),
            f"{at_longest.loads_per_second:.3g}",
            f"{at_longest.decode_tokens_per_second:.3g}",
        )
    for table in (times, fits, each):
        out.print(table)
    out.print(f"The bus of each GPU, {found.bus}, carries {_speed(found.bus_speed)}; {_break_even(found)}.")
    for verdict in found.verdicts:
        word, colour = ("helps", "green") if verdict.helps else ("does not help", "yellow")
        out.print(f"[bold]{verdict.tier}[/bold] [{colour}]{word}[/{colour}]: {verdict.reason}.")
    for saving in found.savings:
        worth = "" if saving.worth is None else f", worth {saving.worth:,.2f}"
        cost = "" if saving.cost is None else f"; its capacity costs {saving.cost:,.2f}"
        out.print(f"[bold]{saving.tier}[/bold] saves {saving.gpu_hours:.3g} hours of GPUs an hour{worth}{cost}.")
    basis = "as given" if found.cost_given else "from data sheets and assumed utilisation"
    out.print(f"[dim]Estimates, not measurements; cost of computing {basis}. See docs/planning.md.[/dim]")


def _from(tokens: int | None, block: int) -> str:
    if tokens is None:
        return "never"
    return "any length" if tokens <= block else f"{tokens:,} on"


def _break_even(found: SizingPlan) -> str:
    at = found.contexts[-1]
    return f"loading {at.tokens:,} tokens is quicker than computing them from {_speed(at.break_even_speed)} on"


def _show_capacity(out: Console, found: NeededCapacity) -> None:
    from rich.markup import escape

    from kvtide.formatting import size

    out.print(
        f"[bold]{escape(found.trace)}[/bold]: {size(found.bytes)} find {found.reached:.1%} of the blocks, of "
        f"{found.hit_rate:.1%} wanted and {found.unlimited:.1%} with unlimited memory; policy {found.policy}, "
        f"blocks of {found.block_tokens} tokens and {size(found.block_bytes)}."
    )


def _list(out: Console) -> None:
    from kvtide.sizing.hardware import GPUS, LINKS
    from kvtide.sizing.models import MODELS

    models = _table("Models", "name", "on the Hugging Face hub")
    for name, (hub, _) in MODELS.items():
        models.add_row(name, hub)
    cards = _table("GPUs", "name", "memory", "bandwidth", "bfloat16", "source")
    for gpu in GPUS.values():
        numbers = (f"{gpu.memory / 1e9:g} GB", _speed(gpu.bandwidth), f"{gpu.flops / 1e12:g} TFLOP/s")
        cards.add_row(gpu.name, *numbers, gpu.source)
    links = _table("Links", "name", "kind", "one way", "reached", "source")
    for link in LINKS.values():
        links.add_row(link.name, link.kind, _speed(link.bandwidth), _speed(link.speed), link.source)
    for table in (models, cards, links):
        out.print(table)
