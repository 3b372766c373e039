"""``kvtide keys``: the keys that encrypt blocks outside memory."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtide.cli._options import ConfigFile
from kvtide.cli._tenant import log_of
from kvtide.errors import ConfigError, KvtideError

if TYPE_CHECKING:
    from kvtide.config import Security

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode="rich", no_args_is_help=True)


@app.callback()
def keys() -> None:
    """Make, list and rotate the keys that encrypt blocks outside memory."""


def _settings(file: Path | None) -> Security:
    from kvtide import config as configuration

    settings = configuration.read(file).security
    if not settings.key_file:
        raise ConfigError("there are no keys: set security.key_file and security.key_source")
    return settings


@app.command()
def make() -> None:
    """Print a new key for security.key_source: 64 hexadecimal digits. It is not saved anywhere.

    To keep it in a file that no other user can read:

        [bold](umask 077; kvtide keys make > /etc/kvtide/key)[/bold]
    """
    typer.echo(secrets.token_hex(32))


@app.command(name="list")
def show(file: ConfigFile = None) -> None:
    """List keys, by tenant, with their state, and the tenants that are under a legal hold."""
    from kvtide.formatting import moment
    from kvtide.security.key_file import KeyFile

    found = KeyFile(Path(_settings(file).key_file).expanduser()).read()
    for entry in found.keys:
        state = "in use" if entry.destroyed is None else f"destroyed {moment(entry.destroyed)}"
        typer.echo(f"key {entry.id}  tenant {entry.tenant}  made {moment(entry.created)}  {state}")
    for held in found.holds:
        typer.echo(f"hold            tenant {held.tenant}  since {moment(held.since)}  {held.why}")


@app.command()
def rotate(
    to: Annotated[
        str, typer.Option(help="Wrap with this from now on, and set security.key_source to it; empty: a newer version.")
    ] = "",
    file: ConfigFile = None,
) -> None:
    """Wrap all keys anew, with another key or with the newest version of the key service's.

    The data that they encrypt is unchanged. Nodes that still have the old security.key_source lose their keys within a
    lease.
    """
    from kvtide.security.key_admin import rotate as rewrap
    from kvtide.security.key_file import KeyFile
    from kvtide.security.wrapping import Unavailable, wrapper

    settings = _settings(file)
    log = log_of(settings)
    log.record("rotate", "begun")  # an action that cannot be logged is not done
    try:
        old, new = wrapper(settings.key_source), wrapper(to) if to else None
        count = rewrap(KeyFile(Path(settings.key_file).expanduser()), old, new)
    except (Unavailable, KvtideError) as e:
        log.record("rotate", f"failed: {e}")
        raise ConfigError(f"nothing was rotated: {e}") from e
    log.record("rotate", f"done: {count} keys")
    typer.echo(f"{count} keys are wrapped anew" + (f"; set security.key_source to {to}" if to else ""))
