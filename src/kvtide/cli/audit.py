"""``kvtide audit``: the log of administrative and security actions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtide.cli._options import ConfigFile
from kvtide.errors import AuditError, ConfigError

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode="rich", no_args_is_help=True)


@app.callback()
def audit() -> None:
    """The log of administrative and security actions."""


@app.command()
def verify(
    log: Annotated[Path | None, typer.Argument(help="The log; else that of the configuration.")] = None,
    file: ConfigFile = None,
) -> None:
    """Check that no line was changed, removed or inserted; also in rotated files.

    A truncated end cannot be detected: compare the last hash with one that you noted elsewhere. The exit code is 0 if
    all is well, and 1 if not.
    """
    from kvtide import config as configuration
    from kvtide.security.audit import audit_of
    from kvtide.security.audit import verify as check

    path = log
    if path is None:
        if (found_log := audit_of(configuration.read(file).security)) is None:
            raise ConfigError("no audit log is set: name its file, or give the node's settings with --config FILE")
        path = found_log.path
    try:
        found = check(path)
    except OSError as e:
        raise AuditError(f"{path} cannot be read as a log: {e.strerror}") from e
    typer.echo(f"{path}: {found.lines} lines, the last with hash {found.last}")
    if found.problem:
        typer.echo(found.problem)
        raise typer.Exit(1)
    typer.echo("all in order")
