"""The ``kvtide`` command.

Each sibling module is a command of the same name and defines ``app``, a ``typer.Typer``. It is imported only when it is
run, and imports what only it needs (NumPy, rich, benchmarks) inside its functions, so that ``kvtide --help``, a shell's
completion and errors in what was typed are fast.
"""

from __future__ import annotations

import re
import resource
import sys
from difflib import get_close_matches
from importlib import import_module
from inspect import cleandoc
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from kvtide.errors import KvtideError
from kvtide.version import __version__

__all__ = ["COMMANDS", "app", "main"]

COMMANDS = {
    "node": "Serve one store to every process of this host, until SIGTERM or Ctrl-C.",
    "stop": "Stop the node at a socket, and wait until it has ended.",
    "status": "Watch a node: its tiers, hits, queues, evictions and clients, until Ctrl-C.",
    "cluster": "Show the nodes of a cluster, how fast they read from each other, and which of them have a prompt.",
    "drain": "Let a node leave its cluster, and write its blocks to shared storage, before it is stopped.",
    "explain": "Say why each block of a prompt is a hit or a miss at a node, and what to do about the first miss.",
    "config": "Show the settings in force: defaults, overridden by the file, overridden by the environment.",
    "doctor": "Check a deployment, running or planned, and say what to change.",
    "demo": "Ask a real model about a long document: computed, from DRAM, and from NVMe after a restart.",
    "serve": "Serve a Hugging Face model with OpenAI's interface; a known beginning of a prompt is not computed again.",
    "plan": "Estimate what a KV cache outside GPU memory gains, and what it needs.",
    "replay": "Find out how much cache your requests need.",
    "bench": "Measure kvtide on this machine, compared with the hardware's own limits.",
    "inspect": "Show the contents of a tier's directory, offline: nothing is changed, and nothing is locked.",
    "evict": "Enforce the byte budget of shared storage, until SIGTERM or Ctrl-C.",
    "keys": "Make, list and rotate the keys that encrypt blocks outside memory.",
    "hold": "Put a tenant under a legal hold: until it ends, kvtide forget refuses.",
    "forget": "Destroy a tenant's keys first, and then its blocks.",
    "audit": "The log of administrative and security actions.",
}
"""Every command, with the first sentence of its help: to list them, no command is imported."""


class _Commands(TyperGroup):
    """Finds commands among the sibling modules. (Any: the types are typer's private ones.)"""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        command = typer.main.get_command(import_module(f"{__name__}.{cmd_name}").app)
        command.name = cmd_name  # a command with subcommands has no name of its own, and help would omit it
        _prepare_help(ctx, command)
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            near = get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "kvtide --help lists all commands"
            ctx.fail(f"there is no command {name!r}; {hint}")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            _suggest_option(error)
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:  # of a command's arguments too: they are parsed in here
            _suggest_option(error)
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _prepare_help(ctx: Any, command: Any) -> None:
    """Make each paragraph of a command's help one line, to be broken at the terminal's width. Otherwise the help would
    have the line breaks of the source too. Examples, which are indented, stay as they are.

    What follows an option is TEXT, or PATH, and nothing follows one without a value: typer would show Python's types,
    and ``<bool>`` as if ``--once`` had a value.
    """
    paragraphs = cleandoc(command.help or "").split("\n\n")
    # typer removes the indentation that all lines but the first have: that of examples which no text follows
    whole = [
        re.sub(r"^( +)\[bold\]", r"[bold]\1", text, flags=re.MULTILINE)
        if text.startswith(" ")
        else text.replace("\n", " ")
        for text in paragraphs
    ]
    command.help = "\n\n".join(whole)
    for option in command.get_params(ctx):
        if option.param_type_name == "option" and option.metavar is None:
            path = getattr(getattr(option, "type_descriptor", None), "is_path", False)
            option.metavar = "" if option.is_flag else "PATH" if path else "TEXT"
    for subcommand in getattr(command, "commands", {}).values():
        _prepare_help(ctx, subcommand)


def _suggest_option(error: Any) -> None:
    """Say in the error of an unknown option which one may be meant. (Its class is private to typer.)"""
    if (unknown := getattr(error, "option_name", None)) and hasattr(error, "possibilities"):
        near, error.possibilities = error.possibilities, None
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        error.message = f"there is no option {unknown}{hint}"


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # rich's traceback may show locals, which may hold a tenant's tokens
    rich_markup_mode=None,  # rich takes longer to import than everything else that this help needs
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

    What it would gain with a model and a GPU, before anything is installed there:

        kvtide plan llama-3.1-8b --gpu h100

    The settings in force here, and where each comes from:

        kvtide config --explain

    What a command does, and its options:

        kvtide COMMAND --help
    """


def main() -> None:
    """Run the command line. A KvtideError, or an error of the system, is printed as one red message; exit code 2."""
    # Raise the limit of open files: a tier has a file open for each segment, a node a socket for each client.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        app(prog_name="kvtide")
    except KvtideError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror or str(error))


def _fail(text: str) -> NoReturn:
    typer.secho(f"kvtide: {text}", fg="red", err=True)
    sys.exit(2)
