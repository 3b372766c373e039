"""Checks of the node that engines will use: whether it answers, its tiers, and which engines share blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvtide.block import Group, Layout
from kvtide.config import Config
from kvtide.doctor.finding import Finding, error, ok, warning
from kvtide.errors import ConfigError, KvtideError, TierError
from kvtide.node.client.client import Client, connect
from kvtide.node.client.launch import home
from kvtide.node.server.access import AccessList
from kvtide.store.node_statistics import Status

__all__ = ["ask", "check", "domains", "dtype_in_use", "sharing"]

_DTYPE = "engines with another --dtype or --kv-cache-dtype share nothing with these: choose one for all"
_NAMES = "if they serve one model, give all the same weights (or engine.weights_id), configuration and quantization"


def ask(config: Config) -> tuple[Status | None, Finding]:
    """Query the node of that configuration, if it runs."""
    address = config.engine.address
    try:
        path = Path() if address else home(config)[1]
    except ConfigError as e:
        return None, error("node", str(e), "without it no engine can start one")
    try:
        if address:
            client = connect(address)
        elif path.is_socket():
            client = Client(path)
        else:
            return None, ok("node", "the first engine starts one; all of this user with the same settings share it")
        with client:
            status = client.status()
        if not status.node.pid:
            raise TierError(f"the node at {client.path} does not answer")
    except KvtideError as e:
        if not address:
            return None, warning("node", str(e), "the next engine starts another")
        if not isinstance(e.__cause__, OSError):  # the node is running, and refuses this client
            return None, error("node", str(e), "change that, and look again")
        command = f"kvtide node --socket {address.removeprefix('unix:')}"
        return None, error("node", str(e), f"start it with: {command}; see that this user may reach the socket")
    node = status.node
    return status, ok("node", f"process {node.pid} answers at {node.path}, {len(node.clients) - 1} other clients")


def check(config: Config | None, status: Status) -> Iterator[Finding]:
    """Check a running node; ``config`` is that of an engine that uses it."""
    for name, tier in status.store.tiers.items():
        if tier.failed:
            yield error(
                name, "the tier answers only with errors", "see the node's log; free space, or replace the disk"
            )
    if config is not None and config.engine.address and config.engine.store == "through":
        yield warning(
            "store",
            "engine.store is through, and whether blocks go to the disk at once is the node's own setting",
            'set nvme.store = "through" there',
        )


def domains(config: Config, status: Status | None) -> Iterator[Finding]:
    """Which users share a trust domain, at the running node or at one with this configuration."""
    try:
        said = AccessList(config.node.users).warnings if status is None else status.node.warnings
    except ConfigError as e:
        yield error("trust domains", str(e), "no node starts with that")
        return
    for what, _, todo in (text.partition(". ") for text in said):
        yield warning("trust domains", what, todo)


def dtype_in_use(status: Status, layout: Layout) -> str | None:
    """The dtype of the KV of all engines at the node with this model's shape; None if there is none, or several."""
    groups = [g for c in status.node.clients for m in c.models if _alike(m.groups, layout.groups) for g in m.groups]
    found = {g.dtype for g in groups}
    return found.pop() if len(found) == 1 else None


def sharing(status: Status, layout: Layout) -> Iterator[Finding]:
    """Whether engines at the node with this model's shape can read each other's blocks."""
    seen = [(c.pid, m) for c in status.node.clients for m in c.models if _alike(m.groups, layout.groups)]
    if not seen:
        yield ok("namespaces", "no other engine at this node has had a request for a model of this shape")
        return
    wanted = {g.dtype for g in layout.groups}
    names: dict[tuple[Group, ...], set[str]] = {}
    others: dict[str, set[int]] = {}
    for pid, model in seen:
        names.setdefault(model.groups, set()).add(model.namespace)
        for dtype in {g.dtype for g in model.groups} - wanted:
            others.setdefault(dtype, set()).add(pid)
    for dtype, pids in others.items():
        yield warning("namespaces", f"{_who(pids)} KV of this shape in {dtype}, this engine {'/'.join(wanted)}", _DTYPE)
    for groups, several in names.items():
        if len(several) > 1:
            pids = {pid for pid, model in seen if model.groups == groups}
            yield warning("namespaces", f"{_who(pids)} models of one shape under {len(several)} names", _NAMES)
    if not others and all(len(several) == 1 for several in names.values()):
        yield ok("namespaces", f"{_who({pid for pid, _ in seen})} blocks of this shape, under one name")


def _who(pids: set[int]) -> str:
    many = "es" if len(pids) > 1 else ""
    return f"process{many} {', '.join(map(str, sorted(pids)))} {'have' if many else 'has'}"


def _alike(some: tuple[Group, ...], others: tuple[Group, ...]) -> bool:
    """Whether two layouts may belong to one model: equal layers and heads, in whatever groups, dtypes and packings."""

    def shape(groups: tuple[Group, ...]) -> tuple[int, set[tuple[int, int]]]:
        return sum(g.layers for g in groups), {(g.heads, g.head_dim) for g in groups}

    return shape(some) == shape(others)
