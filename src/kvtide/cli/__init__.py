"""The ``kvtide`` command.

Each sibling module is a command of the same name and defines ``app``, a ``typer.Typer``. It is imported only when it is
run or listed, and keeps imports that only it needs (benchmarks, plots) inside its functions, so that ``kvtide --help``
is fast.
"""

from __future__ import annotations

import pkgutil
import resource
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from kvtide import __version__
from kvtide.errors import KvtideError

__all__ = ["app", "main"]


class _Commands(TyperGroup):
    """Finds commands among the sibling modules. (Any: the types are typer's private ones.)"""

    def list_commands(self, ctx: Any) -> list[str]:
        names = (module.name for module in pkgutil.iter_modules(__path__))
        return sorted(name for name in names if not name.startswith("_"))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        command = typer.main.get_command(import_module(f"{__name__}.{cmd_name}").app)
        command.name = cmd_name  # a command with subcommands has no name of its own, and help would omit it
        return command


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,  # locals may hold a tenant's tokens
    rich_markup_mode="rich",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvtide {__version__}")
        raise typer.Exit


@app.callback()
def kvtide(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Keep the KV cache instead of recomputing it.

    Start with the settings in force here, and where each comes from:

        [bold]kvtide config --explain[/bold]
    """


def main() -> None:
    """Run the command line. A KvtideError is printed as one red message, with exit code 2."""
    # Raise the limit of open files: a tier has a file open for each segment, a node a socket for each client.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        app()
    except KvtideError as error:
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        console.print(f"kvtide: {error}", style="red", markup=False)
        sys.exit(2)
