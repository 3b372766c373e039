"""What a node says of itself and of its clients."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvtide.block import Group
from kvtide.store.store import Statistics

__all__ = ["ClientStatistics", "ModelStatistics", "NodeStatistics", "Status", "least"]


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """What a session's blocks are of. Two share blocks if both parts are the same."""

    namespace: str
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class ClientStatistics:
    """One process, as long as it is connected or holds something."""

    pid: int
    connected: bool
    """Whether its socket is open. What a client holds that is not connected any more waits for its death."""
    seconds: float
    """Since it came."""
    sessions: int
    holdings: int
    """Rights to read."""
    reservations: int
    """Rights to write."""
    visits: int
    """What it uses as a worker of another process's session."""
    requests: int
    failures: int
    """Operations that could not be done."""
    bytes_unsent: int
    """That it has not read yet."""
    slots_quarantined: int = 0
    """That nobody may use until it is dead, because it may still read or write them."""
    models: list[ModelStatistics] = field(default_factory=list)
    """Of its sessions without a tenant: nothing is told of what tenants have."""


@dataclass(frozen=True, slots=True)
class NodeStatistics:
    pid: int = 0
    path: str = ""
    seconds: float = 0.0
    """Since it began to serve."""
    stopping: bool = False
    requests: int = 0
    """Of all clients, those that have gone too."""
    failures: int = 0
    clients: list[ClientStatistics] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """What whoever runs it should know of its configuration. For administrators."""


@dataclass(frozen=True, slots=True)
class Status:
    """A node and its store."""

    store: Statistics
    node: NodeStatistics


def least(status: Status) -> Status:
    """What somebody of whom nothing is known may be told: sums, and neither tenants, processes, models nor paths."""
    clients = [
        replace(c, pid=0, seconds=0.0, requests=0, failures=0, bytes_unsent=0, models=[]) for c in status.node.clients
    ]
    budgets = {n: replace(b, steward=replace(b.steward, who="")) for n, b in status.store.budgets.items()}
    return Status(
        replace(status.store, tenants={}, budgets=budgets),
        replace(status.node, pid=0, path="", clients=clients, warnings=[]),
    )
