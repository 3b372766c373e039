"""``kvtide config``: the settings in force, and where each comes from."""

from __future__ import annotations

import json
import textwrap
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from kvtide.cli._options import ConfigFile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.text import Text

    from kvtide.config import Setting

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode="rich")

_MINIMAL = ("dram.budget", "nvme.path", "nvme.budget")
"""What everyone has to decide; all else has defaults that are meant to be kept."""
_WIDTH = 79


@app.command()
def config(
    why: Annotated[
        bool,
        typer.Option("--explain", help="Show where each value comes from, what it does and which values are allowed."),
    ] = False,
    minimal: Annotated[
        bool,
        typer.Option(
            "--minimal",
            help="Print only the settings that everyone has to decide, and those that are not at their defaults.",
        ),
    ] = False,
    file: ConfigFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show the settings in force: defaults, overridden by the file, overridden by the environment.

    Without options it prints a complete, commented TOML file to start from; with --minimal the shortest useful one:

        [bold]kvtide config > kvtide.toml[/bold]

        [bold]kvtide config --minimal > kvtide.toml[/bold]

    Every setting is also an environment variable, which overrides the file:

        [bold]KVTIDE_NVME_PATH=/mnt/nvme/kvtide kvtide config --explain[/bold]
    """
    import msgspec

    from kvtide.config import explain
    from kvtide.errors import ConfigError

    if minimal and (why or as_json):
        raise ConfigError("--minimal prints TOML: leave out --explain and --json, or leave out --minimal")
    settings = explain(file)
    if as_json and why:
        typer.echo(json.dumps(msgspec.to_builtins(settings), indent=2))
    elif as_json:
        tree = {section: {name: s.value for name, s in part} for section, part in _parts(settings)}
        typer.echo(json.dumps(tree, indent=2))
    elif why:
        from rich.console import Console

        console = Console(highlight=False)
        for line in _explained(settings, console.width):
            console.print(line)
    elif minimal:
        typer.echo(_toml([s for s in settings if s.name in _MINIMAL or s.source != "default"]), nl=False)
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


def _explained(settings: list[Setting], width: int) -> Iterator[Text]:
    """Each setting with its value and source, and below what it does: readable in 80 columns, unlike a table."""
    from rich.text import Text

    for section, part in _parts(settings):
        yield Text(f"[{section}]", style="bold")
        for name, setting in part:
            style = "dim" if setting.source == "default" else ""
            yield Text(f"{name} = {setting.text}  ({setting.source})", style=style or "cyan")
            yield Text(_wrapped(_help(setting), min(width, 100), "    "), style=style)
        yield Text()


def _toml(settings: list[Setting]) -> str:
    parts = []
    for section, part in _parts(settings):
        lines = [f"[{section}]"]
        for name, setting in part:
            lines += [_wrapped(_help(setting), _WIDTH, "# "), f"{name} = {_toml_value(setting)}"]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _wrapped(text: str, width: int, before: str) -> str:
    """In lines of ``width``, each with ``before`` at its start; addresses and names are not cut."""
    return textwrap.fill(
        text, width, initial_indent=before, subsequent_indent=before, break_on_hyphens=False, break_long_words=False
    )


def _help(setting: Setting) -> str:
    """What it does, and the values that it may have."""
    if setting.accepts in ("text", "a path"):  # says nothing
        return setting.help
    return f"{setting.help} Allowed: {setting.accepts}."


def _toml_value(setting: Setting) -> str:
    if isinstance(setting.value, str):
        # A JSON string is a TOML string, except for the one control character that JSON does not escape.
        return json.dumps(setting.value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return f'"{setting.text}"' if " " in setting.text else setting.text
