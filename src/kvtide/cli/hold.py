"""``kvtide hold``: protects a tenant from ``kvtide forget``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtide.cli._options import ConfigFile
from kvtide.cli._tenant import TenantName, log_of, tag_of

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def hold(
    tenant: TenantName,
    why: Annotated[str, typer.Option(help="The reason, shown when the hold refuses something.")] = "",
    release: Annotated[bool, typer.Option("--release", help="End the hold.")] = False,
    file: ConfigFile = None,
) -> None:
    """Put a tenant under a legal hold: until it ends, [bold]kvtide forget[/bold] refuses.

    It protects keys from destruction, not blocks from expiry or eviction: this is a cache.
    """
    from kvtide import config as configuration
    from kvtide.errors import ConfigError
    from kvtide.security import key_admin
    from kvtide.security.key_file import KeyFile

    settings = configuration.read(file).security
    tag, log = tag_of(tenant), log_of(settings)
    if not settings.key_file:
        raise ConfigError("holds are kept in the key file: set security.key_file")
    keys = KeyFile(Path(settings.key_file).expanduser())
    what = "end hold" if release else "hold"
    log.record(what, "begun", tenant=tag.hex(), why=why)  # an action that cannot be logged is not done
    if not release:
        key_admin.hold(keys, tag, why)
        said = "held"
    else:
        said = "released" if key_admin.release(keys, tag) else "there was no hold"
    log.record(what, said, tenant=tag.hex(), why=why)
    typer.echo(f"{tag.hex()}: {said}")
