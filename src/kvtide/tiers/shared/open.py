"""Opens the shared storages that the settings name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from kvtide import config as configuration
from kvtide.config import Config, Storage
from kvtide.errors import ConfigError
from kvtide.tiers.shared.blobs import ROOT, Blobs
from kvtide.tiers.shared.files import Files
from kvtide.tiers.shared.valkey import Valkey
from kvtide.tiers.syscalls import Disk

__all__ = ["open_objects", "storages"]


def storages(config: Config, disk: Disk | None) -> Iterator[tuple[str, Storage, Callable[[], Blobs]]]:
    """The configured storages, fastest first: name, settings, and a function that opens it."""
    valkey, files, objects, mooncake = config.valkey, config.files, config.objects, config.mooncake
    if mooncake.url:
        yield "mooncake", mooncake, lambda: _open_mooncake(mooncake)
    if valkey.url:
        yield "valkey", valkey, lambda: _open_valkey(valkey)
    if files.path:
        root = Path(files.path).expanduser() / ROOT
        yield "files", files, lambda: Files(root, direct=files.direct, disk=disk)
    if objects.url:
        yield "objects", objects, lambda: open_objects(objects)


def _open_valkey(settings: configuration.Valkey) -> Blobs:
    return Valkey(
        settings.url,
        folder=ROOT,
        user=settings.user,
        password_file=settings.password_file,
        certificate=settings.certificate,
        identity=settings.identity,
        ttl=settings.ttl,
    )


def _open_mooncake(settings: configuration.Mooncake) -> Blobs:
    from kvtide.tiers.shared.mooncake import Mooncake  # its client is loaded only where it is used

    if settings.budget:
        raise ConfigError(
            "mooncake.budget is set, but Mooncake itself evicts what does not fit into its segments: leave it 0, and "
            "limit the segments"
        )
    return Mooncake(settings.url, folder=ROOT, transfers=settings.threads)


def open_objects(settings: configuration.Objects) -> Blobs:
    """The object store that the settings name."""
    try:
        from kvtide.tiers.shared.objects import Objects
    except ImportError as e:
        raise ConfigError("objects.url is set, which needs obstore: pip install kvtide[objects]") from e
    return Objects(
        f"{settings.url.rstrip('/')}/{ROOT}",
        endpoint=settings.endpoint,
        region=settings.region,
        certificate=settings.certificate,
        requests=settings.requests,
    )
