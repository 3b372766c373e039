"""``kvtide doctor``: checks a deployment, and says what to change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtide.cli._options import ConfigFile, number, seconds, size, whole

if TYPE_CHECKING:
    from kvtide.doctor.finding import Finding
    from kvtide.store.node_statistics import Status

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich")

_Record = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A recording of the node. Without it: the one that the node writes now."),
]
_Time = Annotated[
    float,
    typer.Option(
        "--time",
        metavar="TIME",
        parser=seconds,
        show_default="1min",
        help="How long the replays of recorded requests may take together, about.",
    ),
]
_Prefill = Annotated[
    float | None,
    typer.Option(
        "--prefill-tokens-per-second",
        metavar="N",
        parser=number(1),
        help="How fast the engine computes prompts. Without it: as engines have told the node.",
    ),
]

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
    record: _Record = None,
    time: _Time = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Check vLLM with kvtide: version, flags, memory, disk, node, namespaces, and the expected gain.

    If the node of that engine records requests, it ends with the changes that would bring most, as kvtide doctor node.

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
        record=record,
        seconds=time,
    )
    findings = []
    progress = _Progress()
    try:
        for finding in examine(given, progress):
            progress.stop()
            findings.append(finding)
            if not as_json:
                _say(finding)
    finally:
        progress.stop()
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


@app.command()
def node(
    address: Annotated[
        str, typer.Argument(help="Where the node listens: its socket, with or without unix:, or https://host:9410.")
    ] = "kvtide.sock",
    record: _Record = None,
    disk: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="On the disk for a tier that the node does not have yet.")
    ] = None,
    prefill: _Prefill = None,
    time: _Time = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    file: ConfigFile = None,
) -> None:
    """Find the three changes that would bring most, from the node's own recorded traffic.

    The recording is replayed with the settings in force and with changed ones: larger tiers, a first disk, other
    policies, no limits. Each gain is in seconds of prefill and in points of the hit rate. Nothing is changed at the
    node. It must record: kvtide node --record FILE.

        [bold]kvtide doctor node /run/kvtide/kvtide.sock[/bold]

    A node on another host: copy its recording, and give it with --record.
    """
    import msgspec

    from kvtide.doctor.advice import AdviceRequest, advise
    from kvtide.doctor.advice_findings import findings
    from kvtide.doctor.finding import Level
    from kvtide.doctor.node import check
    from kvtide.errors import ConfigError

    if disk is not None and not disk.is_dir():
        raise ConfigError(f"there is no folder {disk}")
    here = "://" not in address
    status = _status(address, file)
    how = f"kvtide node --socket {status.node.path} --record FILE" if status.node.path else "kvtide node --record FILE"
    wanted = AdviceRequest(record=record, here=here, prefill=prefill or 0.0, disk=disk, seconds=time, how=how)
    found = list(check(None, status))
    progress = _Progress()
    try:
        advice = advise(status, wanted, progress)
    finally:
        progress.stop()
    if as_json:
        both = {"findings": found, "advice": advice}
        typer.echo(msgspec.json.format(msgspec.json.encode(both), indent=2).decode())
    else:
        for finding in [*found, *findings(advice)]:
            _say(finding)
    if any(finding.level is Level.ERROR for finding in found):
        raise typer.Exit(1)


def _status(address: str, file: Path | None) -> Status:
    from kvtide import config as configuration
    from kvtide.errors import TierError
    from kvtide.node.client.admin import HttpAdminClient
    from kvtide.node.client.client import Client

    remote = "://" in address
    path = Path(address.removeprefix("unix:"))
    with HttpAdminClient(address, configuration.read(file).node) if remote else Client(path) as client:
        found = client.status()
    if not found.node.seconds:
        raise TierError(f"the node at {path} is gone; start it again with: kvtide node --socket {path}")
    return found


class _Progress:
    """Progress of replays on standard error, if that is a terminal. It is shown from the first replay until ``stop``,
    so that findings can be printed before and after."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        self._shown = Progress(console=console, transient=True, disable=not console.is_terminal)
        self._started = False

    def __call__(self, name: str) -> Callable[[int], None]:
        self._shown.start()
        self._started = True
        for known in self._shown.task_ids:
            self._shown.remove_task(known)
        task = self._shown.add_task(f"replaying: {name}", total=None)
        return lambda number: self._shown.update(task, completed=number)

    def stop(self) -> None:
        if self._started:
            self._shown.stop()
            self._started = False
