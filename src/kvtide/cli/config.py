"""``kvtide config``: the settings in force, and where each comes from."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtide.config import Setting, explain

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def config(
    why: Annotated[bool, typer.Option("--explain", help="Show where each value comes from and what it does.")] = False,
    file: Annotated[
        Path | None,
        typer.Option(help="Read this file instead of $KVTIDE_CONFIG or ./kvtide.toml."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show the settings in force: defaults, overridden by the file, overridden by the environment.

    Without options it prints a complete, commented TOML file to start from:

        [bold]kvtide config > kvtide.toml[/bold]

    Every setting is also an environment variable, which overrides the file:

        [bold]KVTIDE_NVME_PATH=/mnt/nvme/kvtide kvtide config --explain[/bold]
    """
    settings = explain(file)
    if as_json and why:
        typer.echo(json.dumps(msgspec.to_builtins(settings), indent=2))
    elif as_json:
        tree = {section: {name: s.value for name, s in part} for section, part in _parts(settings)}
        typer.echo(json.dumps(tree, indent=2))
    elif why:
        Console().print(_table(settings))
    else:
        typer.echo(_toml(settings), nl=False)


def _parts(settings: list[Setting]) -> list[tuple[str, list[tuple[str, Setting]]]]:
    """The settings by section, each with its name inside it."""

    def section(setting: Setting) -> str:
        return setting.name.partition(".")[0]

    return [
        (name, [(setting.name.removeprefix(f"{name}."), setting) for setting in part])
        for name, part in groupby(settings, key=section)
    ]


def _table(settings: list[Setting]) -> Table:
    table = Table("Setting", "Value", "From", "What it does", title="Settings in force")
    for section, part in _parts(settings):
        table.add_row(Text(f"[{section}]", style="bold"))
        for name, setting in part:
            cells = (Text(text) for text in (name, setting.text, setting.source, setting.help))
            table.add_row(*cells, style="dim" if setting.source == "default" else "")
        table.add_section()
    return table


def _toml(settings: list[Setting]) -> str:
    parts = []
    for section, part in _parts(settings):
        lines = [f"[{section}]"]
        for name, setting in part:
            lines += [f"# {setting.help}", f"{name} = {_toml_value(setting)}"]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _toml_value(setting: Setting) -> str:
    if isinstance(setting.value, str):
        # A JSON string is a TOML string, except for the one control character that JSON does not escape.
        return json.dumps(setting.value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return f'"{setting.text}"' if " " in setting.text else setting.text
