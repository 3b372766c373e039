"""``kvtide forget``: destroys a tenant's keys and blocks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvtide.cli._options import ConfigFile
from kvtide.cli._tenant import TenantName, log_of, tag_of

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def forget(
    tenant: TenantName,
    sockets: Annotated[
        list[Path] | None, typer.Option("--socket", help="A node that may have the tenant's blocks; may be repeated.")
    ] = None,
    addresses: Annotated[
        list[str] | None,
        typer.Option("--node", help="A node on another host: https://host:9410, its node.http; may be repeated."),
    ] = None,
    file: ConfigFile = None,
) -> None:
    """Destroy a tenant's keys first, and then its blocks.

    Without --socket and --node the directory of nvme.path is opened here; no node may have it open. With them each node
    reports "done", or, if it cannot be reached or refuses, "ends by" the time at which its keys expire: until then it
    may serve blocks. Nodes on other hosts authenticate this command by node.certificate, or by a token in KVTIDE_TOKEN.

        [bold]kvtide forget --tenant default --socket /run/kvtide.sock[/bold]

    The guarantee: without its key no encrypted block can be read any more. Headers are overwritten and the
    rest is discarded on the disk; what a medium keeps of that, and backups, cannot be reached. The exit code is 0 if
    all is done, 1 if something ends later, 2 if it was refused, or if none of the nodes has a key or a block of such a
    tenant.
    """
    from kvtide import config as configuration
    from kvtide.errors import AccessError, ConfigError, KvtideError, TierError, UnknownTenantError
    from kvtide.node.client.admin import HttpAdminClient
    from kvtide.node.client.client import Client
    from kvtide.security.key_admin import destroy
    from kvtide.security.key_file import KeyFile
    from kvtide.store.forget import unknown
    from kvtide.store.store import Store

    # nothing is recorded: no prompts are looked up here
    settings = configuration.read(file, overrides={"record.path": ""})
    tag, log = tag_of(tenant), log_of(settings.security)
    nodes: list[tuple[str, Callable[[], Client | HttpAdminClient]]] = [
        (str(path), partial(Client, path)) for path in sockets or ()
    ]
    for address in addresses or ():  # report an invalid address before anything is destroyed
        HttpAdminClient(address, settings.node)
        nodes.append((address, partial(HttpAdminClient, address, settings.node)))
    if not nodes:
        if settings.nvme.path and not Path(settings.nvme.path).expanduser().is_dir():
            raise ConfigError(
                f"nvme.path is {settings.nvme.path!r}, which is no folder: nothing could be forgotten there; give the "
                "folder of the tenant's blocks, or set nvme.path to '' to forget only what is elsewhere"
            )
        with Store(settings) as store:
            typer.echo(f"{settings.nvme.path or 'here'}: done, {store.forget(tag)}")
        return
    known = False
    if settings.security.key_file:
        log.record("destroy keys", "begun", tenant=tag.hex())  # an action that cannot be logged is not done
        try:
            file_of_keys = KeyFile(Path(settings.security.key_file).expanduser())
            count = destroy(file_of_keys, tag, known=False)  # a node that has blocks of it records that itself
            known = file_of_keys.read().names(tag)
        except KvtideError as e:
            log.record("destroy keys", f"{type(e).__name__}: {e}", tenant=tag.hex())
            raise
        log.record("destroy keys", f"done: {count} keys", tenant=tag.hex())
    late = False
    for name, reach in nodes:
        try:
            with reach() as node:
                said = f"done, {node.forget(tag)}"
                known = True
        except UnknownTenantError:
            said = "has no such tenant"
        except (TierError, AccessError) as e:
            late = True
            if settings.security.key_file and not known:
                # the node learns of it through the key file, if it can read that
                destroy(KeyFile(Path(settings.security.key_file).expanduser()), tag)
                known = True
            end = datetime.now(UTC) + timedelta(seconds=settings.security.lease)
            said = f"ends by {end.isoformat(timespec='seconds')} ({e})" if settings.security.encrypt else f"failed: {e}"
        log.record("forget at a node", said, tenant=tag.hex(), node=name)
        typer.echo(f"{name}: {said}")
    if late:
        raise typer.Exit(1)
    if not known:
        raise UnknownTenantError(unknown(tag))
