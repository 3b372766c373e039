"""The storages that engines share in these tests: a folder, SeaweedFS and Valkey. All keep what they have if killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from kvtide.testing.keys import WRAPPING
from kvtide.testing.servers import S3Server, Server, ValkeyServer

__all__ = ["STORAGES", "Storage", "opened"]

_SOON = {("files", True), ("objects", False), ("valkey", True)}
STORAGES = [
    pytest.param(
        kind,
        sealed,
        id=f"{kind}-{'sealed' if sealed else 'open'}",
        marks=() if (kind, sealed) in _SOON else pytest.mark.long,
    )
    for kind in ("files", "objects", "valkey")
    for sealed in (False, True)
]
"""Each of them, unencrypted and encrypted. By default each runs once, and both ways are among them; the rest are long:
records are encrypted before any storage gets them, and each of these takes four processes of PyTorch, half a minute of
CPU."""

Settings = dict[str, dict[str, str]]


class Storage(NamedTuple):
    name: str
    settings: Settings
    """What those who share it have in common: the storage, and the key file where it is sealed."""
    server: Server | None

    def restart(self) -> None:
        """Kill its server, if it has one, and start another."""
        if self.server is not None:
            self.server.kill()
            self.server.start()


@contextmanager
def opened(kind: str, sealed: bool, folder: Path, request: pytest.FixtureRequest) -> Iterator[Storage]:
    """A storage in which nothing is yet."""
    shared: Settings = {}
    if sealed:
        (folder / "kek").touch(0o600)
        (folder / "kek").write_bytes(WRAPPING)
        keys = {"key_source": f"file:{folder / 'kek'}", "key_file": str(folder / "keys.json")}
        shared["security"] = {"encrypt": "true", **keys}
    match kind:
        case "files":
            yield Storage(kind, shared | {kind: {"path": str(folder / "shared")}}, None)
        case "objects":
            s3: S3Server = request.getfixturevalue("s3")
            where = {"url": f"s3://engines{folder}", "endpoint": s3.endpoint}
            yield Storage(kind, shared | {kind: where}, s3)
        case _:
            with ValkeyServer(folder / "valkey", appendonly="yes", appendfsync="always") as server:
                yield Storage(kind, shared | {kind: {"url": server.url}}, server)
