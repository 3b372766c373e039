"""Starts a node on demand: ``kvtide.open(..., node="auto")``.

The first process starts the node, and all processes of the same user with the same configuration find it at the same
socket. The node is detached: it is not a child of any of them, so engines that kill their children do not kill it. Some
time after its last client has left, it writes what is worth keeping to colder tiers and exits.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import msgspec
from blake3 import blake3

from kvtide import config as configuration
from kvtide.config import Config, Engine
from kvtide.errors import ConfigError, TierError
from kvtide.forks import LockFile
from kvtide.node.client.client import Client
from kvtide.node.client.link import NodeLink, NodeRefused
from kvtide.node.client.mappings import Mappings
from kvtide.store.store import Store

__all__ = ["home", "open_anywhere", "open_node", "place"]

S = TypeVar("S", bound=msgspec.Struct)

_IDLE = 60.0
"""Seconds that a node without clients waits for another one."""


@overload
def open_anywhere(file: str | Path | None = None, /, *, node: Literal["auto"], **settings: Any) -> Client: ...


@overload
def open_anywhere(file: str | Path | None = None, /, **settings: Any) -> Store: ...


def open_anywhere(file: str | Path | None = None, /, *, node: Any = None, **settings: Any) -> Store | Client:
    """Open a store with the settings of ``file`` (``kvtide.toml``), the environment and the arguments.

    >>> store = kvtide.open(dram={"budget": "8GiB"}, nvme={"path": "/nvme/kv", "budget": "200GiB"})

    With ``node="auto"`` the store runs in a process of its own, which is started if necessary, outlives this one, and
    serves all processes that open it with the same settings.
    """
    config = configuration.read(file, **settings)
    if node is None:
        return Store(config)
    if node != "auto":
        raise ConfigError(f'node is {node!r}; it must be "auto". To a node that runs: kvtide.connect("unix:...")')
    return open_node(config)


def place(config: Config) -> Path:
    """The path of the socket of the node with that configuration."""
    runtime = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(runtime) / f"kvtide-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
    except OSError as e:
        raise ConfigError(f"{folder} cannot be made ({e}); set XDG_RUNTIME_DIR to a folder of your own") from e
    if about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise ConfigError(f"{folder} is not ours alone; remove it, or set XDG_RUNTIME_DIR to a folder of your own")
    return folder / f"{blake3(msgspec.json.encode(config)).hexdigest(8)}.sock"


def open_node(config: Config, idle: float = _IDLE) -> Client:
    """A client of the node with that configuration; the node is started whenever there is none."""
    config, path = home(config)
    return Client(path, functools.partial(_connector, config, path, idle))


def home(config: Config) -> tuple[Config, Path]:
    """The configuration that an automatically started node is given, and the path of its socket."""
    nvme = config.nvme
    if config.engine.store == "through":
        nvme = msgspec.structs.replace(nvme, store="through")
    # The node has another working directory, so relative paths are made absolute: another program's "kv" is a different
    # folder. Engine settings are left out, because a node has none.
    config = msgspec.structs.replace(
        config,
        nvme=_absolute(nvme, "path"),
        valkey=_absolute(config.valkey, "password_file", "certificate", "identity"),
        files=_absolute(config.files, "path"),
        objects=_absolute(config.objects, "certificate"),
        security=_absolute_source(_absolute(config.security, "key_file", "audit"), "key_source"),
        record=_absolute(config.record, "path"),
        node=_absolute_source(_absolute(config.node, "certificate", "authority"), "tokens"),
        engine=Engine(),
    )
    return config, place(config)


def _absolute(section: S, *names: str) -> S:
    given = {name: getattr(section, name) for name in names if getattr(section, name)}
    return msgspec.structs.replace(section, **{name: str(Path(path).absolute()) for name, path in given.items()})


def _absolute_source(section: S, name: str) -> S:
    kind, _, path = getattr(section, name).partition(":")
    if kind != "file" or not path:
        return section
    return msgspec.structs.replace(section, **{name: f"file:{Path(path).expanduser().absolute()}"})


def _connector(config: Config, path: Path, idle: float, name: str, mappings: Mappings) -> NodeLink:
    with LockFile(path.with_suffix(".lock")) as lock:
        lock.take(wait=True)  # otherwise two processes that come first would start two nodes
        try:
            return NodeLink(path, name, mappings)
        except NodeRefused:
            raise
        except (OSError, TierError):  # there is no node, or it is stopping
            _start(config, path, idle)
        return NodeLink(path, name, mappings)


def _start(config: Config, path: Path, idle: float) -> None:
    tree = msgspec.to_builtins(config)
    settings = {f"KVTIDE_{s.upper()}_{n.upper()}": str(value) for s, part in tree.items() for n, value in part.items()}
    sources = (config.security.key_source.partition(":"), config.node.tokens.partition(":"))
    kept = {secret for kind, _, secret in sources if kind == "env"}
    others = {name: value for name, value in os.environ.items() if name in kept or not name.startswith("KVTIDE_")}
    command = [sys.executable, "-m", "kvtide", "node", "--detach", "--unbind", "--socket", str(path)]
    command += ["--idle-seconds", str(idle)]
    log = path.with_suffix(".log")
    with log.open("ab") as output:
        # The folder has no kvtide.toml: all settings are in the environment.
        ended = subprocess.run(
            command, env=others | settings, cwd=path.parent, stdout=output, stderr=output, check=False
        )
    if ended.returncode:
        raise TierError(f"a node could not be started; {log} says why. Or start one yourself: kvtide node")
