"""Statistics of a node and its clients."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from msgspec import structs

from kvtide.block import Group
from kvtide.config import Config, Value
from kvtide.store.store import Statistics

__all__ = [
    "ClientStatistics",
    "ClusterServing",
    "DrainStatistics",
    "KvEventStatistics",
    "ModelStatistics",
    "NodeStatistics",
    "PeerServing",
    "Status",
    "least",
    "reported_settings",
    "without_recording",
]

_REPORTED = ("dram", "nvme", "plan", "record")
"""Sections of which all settings are reported: none of them is a secret."""
_STORAGES = (("files", "path"), ("objects", "url"), ("valkey", "url"), ("mooncake", "url"))


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """The model of a session. Two sessions share blocks if both fields are equal."""

    namespace: str
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class ClientStatistics:
    """One client process, while it is connected or holds memory."""

    pid: int
    connected: bool
    """Whether its socket is open. Memory held by a disconnected client is released when its process has died."""
    seconds: float
    """Seconds since it connected."""
    sessions: int
    holdings: int
    """Open prefix leases (rights to read)."""
    reservations: int
    """Open reservations (rights to write)."""
    visits: int
    """Sessions of other processes that it uses as a worker."""
    requests: int
    failures: int
    """Operations that failed."""
    bytes_unsent: int
    """Bytes sent to it that it has not read yet."""
    slots_quarantined: int = 0
    """Slots that cannot be reused until the process is dead, because it may still read or write them."""
    models: list[ModelStatistics] = field(default_factory=list)
    """Models of its sessions without a tenant; nothing is reported about tenants."""


@dataclass(frozen=True, slots=True)
class PeerServing:
    """What a node has given to other nodes since it started."""

    address: str = ""
    connections: int = 0
    requests: int = 0
    blocks_located: int = 0
    """Blocks that others looked up and that were there."""
    blocks_sent: int = 0
    blocks_missed: int = 0
    """Blocks that others wanted to read and that were not there."""
    blocks_refused: int = 0
    """Blocks that could not be sent at that moment, for lack of memory or time."""
    bytes_sent: int = 0
    bytes_held: int = 0
    """Bytes of the answers that are being prepared or sent."""
    closed: dict[str, int] = field(default_factory=dict)
    """Connections that were closed because of what the other end did, by reason."""
    bytes_compressed: int = 0
    """Bytes sent of blocks that were compressed for that, and"""
    bytes_uncompressed: int = 0
    """those of the same blocks in memory."""


@dataclass(frozen=True, slots=True)
class DrainStatistics:
    """How far a drain is."""

    blocks: int = 0
    """Blocks in memory that were in no shared storage when it began, or have come since."""
    written: int = 0
    """Those of them that were written there."""
    done: bool = False
    storages: list[str] = field(default_factory=list)
    """Where they are written; empty: there is no shared storage."""
    failed: str = ""
    """Why it ended before all was tried; empty: it did not."""
    listed: str = ""
    """Why the node could not be withdrawn from the directory, which may list it until its lease ends; empty: it does
    not."""
    lease: float = 0.0
    """Seconds until that, at most."""


@dataclass(frozen=True, slots=True)
class ClusterServing:
    """A node's own part in a cluster."""

    address: str = ""
    """What other nodes are told."""
    number: int = 0
    epoch: int = 0
    """0: it is not a member now."""
    announced: int = 0
    """Blocks that were entered into the directory since the node started, and"""
    withdrawn: int = 0
    """those that were removed from it."""
    waiting: int = 0
    """Blocks of the index that are still to be looked at for the directory, after the node joined."""
    rebuilds: int = 0
    """How often all blocks were entered anew."""
    failures: int = 0
    draining: DrainStatistics | None = None
    """None if it does not drain."""
    problem: str = ""
    """Why it could not renew its membership, or join; empty: it could."""
    members: int = 0
    """Other live members, as of its last renewal, or attempt to join; 0 while it drains. Those of ``ClusterStatistics``
    are as of the last prompt."""


@dataclass(frozen=True, slots=True)
class KvEventStatistics:
    """What a node has published about its blocks."""

    subscriptions: int = 0
    """Different topics that consumers have subscribed to; 0: there is no consumer, and nothing is sent."""
    described: int = 0
    """Blocks whose tokens are known. Only these can be published."""
    undescribed: int = 0
    """Blocks whose descriptions came too fast, so that they are not published."""
    ignored: int = 0
    """Sessions whose blocks are not published: of another model, or of a tenant for which it is not allowed."""
    batches: int = 0
    stored: int = 0
    """Blocks that were published as stored, for each tier."""
    removed: int = 0
    next_number: int = 0
    """The number of the next batch."""
    buffered_bytes: int = 0
    """Bytes of the batches that are kept for replays."""
    replays: int = 0
    snapshots: int = 0
    """Replays, or parts of them, that were answered with all that is stored, because the batches were not kept."""
    cpu_seconds: float = 0.0
    """CPU time of the thread that publishes."""


@dataclass(frozen=True, slots=True)
class NodeStatistics:
    pid: int = 0
    path: str = ""
    seconds: float = 0.0
    """Seconds since it began to serve."""
    stopping: bool = False
    requests: int = 0
    """Requests of all clients, including disconnected ones."""
    failures: int = 0
    clients: list[ClientStatistics] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """What the operator should know about the configuration. For administrators."""
    settings: dict[str, Value] = field(default_factory=dict)
    """The settings in force that decide what is kept, by dotted name; of shared storage only whether there is any. For
    administrators, and over HTTP for authenticated callers."""
    peers: PeerServing | None = None
    """None if other nodes are not served."""
    cluster: ClusterServing | None = None
    """None if it is in no cluster, or only reads."""
    events: KvEventStatistics | None = None
    """None if it publishes no KV events."""


@dataclass(frozen=True, slots=True)
class Status:
    """Statistics of a node and its store."""

    store: Statistics
    node: NodeStatistics


def reported_settings(config: Config) -> dict[str, Value]:
    """The settings that ``NodeStatistics`` reports."""
    whole = {
        f"{section}.{name}": value
        for section in _REPORTED
        for name, value in structs.asdict(getattr(config, section)).items()
    }
    return whole | {f"{section}.{name}": bool(getattr(getattr(config, section), name)) for section, name in _STORAGES}


def without_recording(store: Statistics) -> Statistics:
    """Statistics without tenants, and without the place of the recording."""
    recorder = None if store.recorder is None else replace(store.recorder, path="")
    return replace(store, tenants={}, recorder=recorder)


def least(status: Status) -> Status:
    """Reduce a status to what an unauthenticated caller may see: totals, but no tenants, processes, models or paths."""
    clients = [
        replace(c, pid=0, seconds=0.0, requests=0, failures=0, bytes_unsent=0, models=[]) for c in status.node.clients
    ]
    budgets = {n: replace(b, steward=replace(b.steward, who="")) for n, b in status.store.budgets.items()}
    node, nodes = status.node, status.store.cluster
    peers = replace(node.peers, address="") if node.peers is not None else None
    cluster = replace(node.cluster, address="", problem="") if node.cluster is not None else None
    if nodes is not None:
        nodes = replace(nodes, members=tuple(replace(member, address="") for member in nodes.members))
    return Status(
        replace(without_recording(status.store), budgets=budgets, cluster=nodes),
        replace(node, pid=0, path="", clients=clients, warnings=[], settings={}, peers=peers, cluster=cluster),
    )
