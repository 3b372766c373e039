"""``kvtide doctor``: checks a deployment, and says what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvtide.cli._options import number, size, whole

if TYPE_CHECKING:
    from kvtide.doctor.finding import Finding

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich")

_COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


@app.callback()
def doctor() -> None:
    """Check a deployment, running or planned, and say what to change."""


@app.command()
def vllm(
    model: Annotated[str, typer.Option(help="What vLLM serves: a folder, or a name in the hub's cache.")],
    url: Annotated[str, typer.Option(help="A running engine, http://127.0.0.1:8000 say.")] = "",
    transfer: Annotated[
        str, typer.Option("--kv-transfer-config", help="As vLLM is given it: JSON, or @ and a file of it.")
    ] = "",
    ranks: Annotated[
        int, typer.Option("--tensor-parallel-size", metavar="N", parser=whole(1), help="As vLLM is given it.")
    ] = 1,
    dtype: Annotated[str, typer.Option(help="As vLLM is given it.")] = "auto",
    kv_dtype: Annotated[str, typer.Option("--kv-cache-dtype", help="As vLLM is given it.")] = "auto",
    prefill: Annotated[
        float | None,
        typer.Option(
            "--prefill-tokens-per-second",
            metavar="N",
            parser=number(1),
            help="How fast it computes prompts. Else: as --url says.",
        ),
    ] = None,
    disk_speed: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE", parser=size, help="Bytes a second that the disk is read at, 6GB say. Without it: measured."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Check vLLM with kvtide: version, flags, memory, disk, node, namespaces, and the expected gain.

    Nothing is changed or started; vLLM need not be installed here. The exit status is 1 if there is an error.

        [bold]kvtide doctor vllm --model /models/llama --url http://127.0.0.1:8000[/bold]
    """
    import msgspec

    from kvtide.doctor.examine import Deployment, examine
    from kvtide.doctor.finding import Level

    given = Deployment(
        model=model,
        url=url,
        transfer=transfer,
        ranks=ranks,
        dtype=dtype,
        kv_dtype=kv_dtype,
        prefill=prefill,
        disk_speed=disk_speed,
    )
    findings = []
    for finding in examine(given):
        findings.append(finding)
        if not as_json:
            _say(finding)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(findings), indent=2).decode())
    if any(finding.level is Level.ERROR for finding in findings):
        raise typer.Exit(1)


def _say(finding: Finding) -> None:
    from rich.console import Console
    from rich.text import Text

    level = finding.level.value
    line = Text.assemble((f"{level:8}", _COLOURS[level]), (f"{finding.about}: ", "bold"), finding.found)
    if finding.do:
        line.append(f". {finding.do[0].upper()}{finding.do[1:]}" if level != "ok" else f" ({finding.do})", "dim")
    Console(soft_wrap=True, highlight=False).print(line)
