"""The metrics of a store and its node, for Prometheus: the catalogue, and the text format.

``METRICS`` lists every metric once: its name, help and labels, and how its value is read from the statistics that the
components keep. There is no registry, and nothing is counted here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from kvtide.counts import Count, TierCount
from kvtide.histogram import HistogramStatistics
from kvtide.store.explanation import reasons
from kvtide.store.recorder import REASONS, RecorderStatistics
from kvtide.store.statistics import Statistics, TenantStatistics

if TYPE_CHECKING:
    from kvtide.store.node_statistics import KvEventStatistics, NodeStatistics, PeerServing
    from kvtide.tiers.shared.credits import BudgetStatistics
    from kvtide.transfer.node_search import ClusterStatistics

__all__ = ["CONTENT_TYPE", "METRICS", "Metric", "render"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_Samples = Iterable[tuple[tuple[str, ...], float | HistogramStatistics]]
"""For each sample, the values of the labels and the measured value."""
_Source = Callable[[Statistics, "NodeStatistics | None"], _Samples]


class Metric(NamedTuple):
    """A counter if its name ends in ``_total``, else a gauge, or a histogram."""

    name: str
    help: str
    samples: _Source
    labels: tuple[str, ...] = ()
    histogram: bool = False

    @property
    def kind(self) -> str:
        return "histogram" if self.histogram else "counter" if self.name.endswith("_total") else "gauge"


# -- sources of values -------------------------------------------------------------------------------------


def _store(value: Callable[[Statistics], float | HistogramStatistics]) -> _Source:
    return lambda store, _: [((), value(store))]


def _node(value: Callable[[NodeStatistics], float]) -> _Source:
    return lambda _, node: [] if node is None else [((), value(node))]


def _peers(value: Callable[[PeerServing], float]) -> _Source:
    """A value of a node that serves other nodes."""
    return lambda _, node: [] if node is None or node.peers is None else [((), value(node.peers))]


def _peer_blocks(_: Statistics, node: NodeStatistics | None) -> _Samples:
    if node is not None and (peers := node.peers) is not None:
        yield ("sent",), peers.blocks_sent
        yield ("missed",), peers.blocks_missed
        yield ("refused",), peers.blocks_refused


def _compressed(store: Statistics, node: NodeStatistics | None) -> _Samples:
    if node is not None and (peers := node.peers) is not None:
        yield ("sent", "compressed"), peers.bytes_compressed
        yield ("sent", "uncompressed"), peers.bytes_uncompressed
    if others := [tier for name, tier in store.tiers.items() if name.startswith("peer ")]:
        yield ("received", "compressed"), sum(tier.bytes_compressed for tier in others)
        yield ("received", "uncompressed"), sum(tier.bytes_uncompressed for tier in others)


def _nodes(value: Callable[[ClusterStatistics], float]) -> _Source:
    """A value of a store that finds other nodes in a directory."""
    return lambda store, _: [] if store.cluster is None else [((), value(store.cluster))]


def _members(store: Statistics, node: NodeStatistics | None) -> _Samples:
    if node is not None and (own := node.cluster) is not None and own.draining is None:
        yield (), own.members
    elif store.cluster is not None:
        yield (), len(store.cluster.members)


def _announced(_: Statistics, node: NodeStatistics | None) -> _Samples:
    if node is not None and (cluster := node.cluster) is not None:
        yield ("entered",), cluster.announced
        yield ("removed",), cluster.withdrawn


def _joined(_: Statistics, node: NodeStatistics | None) -> _Samples:
    if node is not None and (cluster := node.cluster) is not None and cluster.draining is None:
        yield (), bool(cluster.epoch)


def _kv_events(value: Callable[[KvEventStatistics], float]) -> _Source:
    """A value of a node that publishes KV events."""
    return lambda _, node: [] if node is None or node.events is None else [((), value(node.events))]


def _published(_: Statistics, node: NodeStatistics | None) -> _Samples:
    if node is not None and (events := node.events) is not None:
        yield ("stored",), events.stored
        yield ("removed",), events.removed


def _tier(field: str) -> _Source:
    return lambda store, _: [((name,), getattr(tier, field)) for name, tier in store.tiers.items()]


def _lane(read: str, write: str) -> _Source:
    """One field for each direction."""
    return lambda store, _: [
        ((name, direction), getattr(lane, field))
        for name, lane in store.lanes.items()
        for direction, field in (("read", read), ("write", write))
    ]


def _budget(value: Callable[[BudgetStatistics], float]) -> _Source:
    """A value for each shared storage that has a byte budget."""
    return lambda store, _: [((name,), value(budget)) for name, budget in store.budgets.items()]


def _recorder(value: Callable[[RecorderStatistics], float]) -> _Source:
    return lambda store, _: [] if store.recorder is None else [((), value(store.recorder))]


def _unrecorded(store: Statistics, _: NodeStatistics | None) -> _Samples:
    if store.recorder is not None:
        for reason in REASONS:
            yield (reason,), store.recorder.dropped.get(reason, 0)


def _missed(store: Statistics, _: NodeStatistics | None) -> _Samples:
    for reason in reasons(store.tiers):
        yield (reason,), store.recent.misses.get(reason, 0)


def _count(count: TierCount) -> _Source:
    """One of the store's counters for each colder tier."""
    return lambda store, _: [((name,), store.counts.get(count.of(name), 0)) for name in store.lanes]


def _speeds(store: Statistics, _: NodeStatistics | None) -> _Samples:
    for name, lane in store.lanes.items():
        yield (name, "read"), lane.read_speed.bytes_per_second
        yield (name, "write"), lane.write_speed.bytes_per_second


def _removed(store: Statistics, _: NodeStatistics | None) -> _Samples:
    for name in store.tiers:
        yield (name, "evicted"), store.counts.get(TierCount.BLOCKS_EVICTED.of(name), 0)
    for name in store.lanes:
        yield (name, "unreadable"), store.counts.get(TierCount.BLOCKS_UNREADABLE.of(name), 0)
    yield ("all", "dropped"), store.counts.get(Count.BLOCKS_DROPPED, 0)
    yield ("all", "expired"), store.counts.get(Count.BLOCKS_EXPIRED, 0)


def _refused(store: Statistics, _: NodeStatistics | None) -> _Samples:
    for what, reason, name in (
        ("store", "no room", Count.STORE_NO_ROOM),
        ("store", "quota", TierCount.STORE_QUOTA.of("dram")),
        ("load", "no room", Count.LOAD_NO_ROOM),
        ("load", "quota", TierCount.LOAD_QUOTA.of("dram")),
        ("store", "no memory yet", Count.STORE_NO_MEMORY_YET),
        ("store", "node late", Count.STORE_NODE_LATE),
        ("store", "engine pages", Count.STORE_ENGINE_PAGES),
    ):
        yield (what, "dram", reason), store.counts.get(name, 0)
    for tier in store.lanes:
        for reason, count in (
            ("quota", TierCount.STORE_QUOTA),
            ("queue full", TierCount.STORE_QUEUE_FULL),
            ("write budget", TierCount.STORE_WRITE_BUDGET),
            ("admission", TierCount.STORE_NOT_ADMITTED),
        ):
            yield ("store", tier, reason), store.counts.get(count.of(tier), 0)


def _tenant(values: Callable[[TenantStatistics], dict[str, int]]) -> _Source:
    """A value for each tier, or reason, of each tenant that has limits of its own."""
    return lambda store, _: (((tag, name), n) for tag, t in store.tenants.items() for name, n in values(t).items())


def _clients(_: Statistics, node: NodeStatistics | None) -> _Samples:
    if node is not None:
        connected = sum(c.connected for c in node.clients)
        yield ("connected",), connected
        yield ("gone",), len(node.clients) - connected


def _rights(_: Statistics, node: NodeStatistics | None) -> _Samples:
    found: Counter[tuple[str, ...]] = Counter()  # one process may have several clients
    for client in node.clients if node else ():
        found[str(client.pid), "read"] += client.holdings
        found[str(client.pid), "write"] += client.reservations
        found[str(client.pid), "visit"] += client.visits
    return found.items()


_HINTS = {"tool": Count.HINT_TOOL, "end": Count.HINT_END, "returns_in": Count.HINT_EXPECTED_BACK}
_BROUGHT = {"begun": Count.BROUGHT_BACK, "in time": Count.BROUGHT_BACK_IN_TIME}
_SECOND_READS = {
    "hedged": Count.READS_HEDGED,
    "hedged, supplied": Count.HEDGES_WON,
    "moved": Count.READS_MOVED,
    "moved, supplied": Count.READS_MOVED_WON,
}
_TIER, _WAY, _TENANT = ("tier",), ("tier", "direction"), ("tenant", "tier")

METRICS = (
    # requests
    Metric("kvtide_prompts_total", "Prompts matched.", _store(lambda s: s.planner.prompts)),
    Metric(
        "kvtide_prompt_blocks_total",
        "Blocks of matched prompts, by result: the tier that has them, slower (quicker to compute), missed.",
        lambda s, _: (((name,), n) for name, n in s.planner.blocks.items()),
        ("result",),
    ),
    Metric(
        "kvtide_prompt_tokens_total",
        "Tokens of matched prompts, by result as for blocks: the hit rate is the share of those in a tier.",
        lambda s, _: (((name,), n) for name, n in s.planner.tokens.items()),
        ("result",),
    ),
    Metric(
        "kvtide_load_seconds",
        "Duration of loads that had to wait for a colder tier.",
        _store(lambda s: s.pipeline.loads.seconds),
        histogram=True,
    ),
    Metric(
        "kvtide_loads_total",
        "Loads that waited for a colder tier, by outcome: whole, partial (blocks unreadable or no space), deadline, "
        "cancelled.",
        lambda s, _: (((name,), n) for name, n in s.pipeline.loads.outcomes.items()),
        ("outcome",),
    ),
    Metric("kvtide_loads_under_way", "Loads that are waiting now.", _store(lambda s: s.pipeline.loads.under_way)),
    # contents
    Metric("kvtide_blocks", "Blocks known to the index, in any tier.", _store(lambda s: s.blocks)),
    Metric(
        "kvtide_held_blocks",
        "Blocks protected from eviction by a lease, a reservation or a transfer.",
        _store(lambda s: s.held),
    ),
    Metric("kvtide_pinned_blocks", "Pinned blocks.", _store(lambda s: s.pinned)),
    Metric("kvtide_leases", "Prefix leases (rights to read) that are open.", _store(lambda s: s.pipeline.leases)),
    Metric(
        "kvtide_reservations",
        "Reservations (rights to write) that are open.",
        _store(lambda s: s.pipeline.reservations),
    ),
    Metric(
        "kvtide_tier_blocks",
        "Blocks in a tier, including those being written. For shared storage with a budget: as last reported by its "
        "budget coordinator.",
        _tier("blocks"),
        _TIER,
    ),
    Metric("kvtide_tier_budget_bytes", "Bytes that a tier may use.", _tier("budget"), _TIER),
    Metric("kvtide_tier_taken_bytes", "Bytes that a tier has taken from the host.", _tier("bytes_taken"), _TIER),
    Metric(
        "kvtide_tier_huge_bytes",
        "Bytes that a tier has taken and that are known to be in huge pages.",
        _tier("bytes_huge"),
        _TIER,
    ),
    Metric(
        "kvtide_scratch_bytes",
        "Memory for compressing, encrypting and decrypting blocks, not part of a tier.",
        _store(lambda s: s.scratch.taken),
    ),
    Metric("kvtide_tier_used_bytes", "Bytes of a tier occupied by blocks.", _tier("bytes_used"), _TIER),
    # transfers
    Metric(
        "kvtide_stored_blocks_total",
        "Blocks stored by callers.",
        _store(lambda s: s.counts.get(Count.BLOCKS_STORED, 0)),
    ),
    Metric("kvtide_tier_read_blocks_total", "Blocks read from a tier into DRAM.", _count(TierCount.BLOCKS_READ), _TIER),
    Metric("kvtide_tier_written_blocks_total", "Blocks written to a tier.", _count(TierCount.BLOCKS_WRITTEN), _TIER),
    Metric(
        "kvtide_tier_read_bytes_total",
        "Bytes read from a tier; for DRAM: handed out to callers.",
        _tier("bytes_read"),
        _TIER,
    ),
    Metric("kvtide_tier_written_bytes_total", "Bytes written to a tier.", _tier("bytes_written"), _TIER),
    Metric(
        "kvtide_tier_busy_seconds_total",
        "Time during which the tier was reading or writing.",
        _lane("read_seconds", "write_seconds"),
        _WAY,
    ),
    Metric("kvtide_tier_speed_bytes", "Recently measured bytes per second, which the planner uses.", _speeds, _WAY),
    Metric("kvtide_lane_jobs", "Jobs waiting for a tier.", _lane("reads_waiting", "writes_waiting"), _WAY),
    Metric(
        "kvtide_lane_bytes",
        "Bytes waiting for a tier or being transferred.",
        _lane("read_bytes_waiting", "write_bytes_waiting"),
        _WAY,
    ),
    # removals, refusals and failures
    Metric(
        "kvtide_removed_blocks_total", "Blocks removed from a tier, or from all tiers.", _removed, ("tier", "reason")
    ),
    Metric(
        "kvtide_eviction_age_seconds",
        "Time since the last use of evicted blocks.",
        lambda s, _: (((name,), e.ages) for name, e in s.pipeline.evictors.items()),
        _TIER,
        histogram=True,
    ),
    Metric(
        "kvtide_policy_in_charge",
        "1 for the eviction policy in use.",
        lambda s, _: (((name, e.policy), 1) for name, e in s.pipeline.evictors.items()),
        ("tier", "policy"),
    ),
    Metric(
        "kvtide_hints_total",
        "Callers' hints on a prompt's next use: its turn ended in a tool call, it ended, or when it is expected back.",
        lambda s, _: (((kind,), s.counts.get(count, 0)) for kind, count in _HINTS.items()),
        ("kind",),
    ),
    Metric(
        "kvtide_brought_back_total",
        "Prompts prefetched into DRAM because they were expected soon: all that were begun, and those used in time.",
        lambda s, _: (((kind,), s.counts.get(count, 0)) for kind, count in _BROUGHT.items()),
        ("kind",),
    ),
    Metric(
        "kvtide_refused_blocks_total",
        "Blocks that were not stored in a tier, or not loaded into it.",
        _refused,
        ("what", "tier", "reason"),
    ),
    Metric(
        "kvtide_write_budget_bytes",
        "Bytes that may be written to a tier now; below 0: overdrawn. Only if writes are limited.",
        lambda s, _: (((name,), b.bytes_left) for name, b in s.pipeline.write_budgets.items()),
        _TIER,
    ),
    Metric(
        "kvtide_tier_failures_total",
        "Failures of a tier to read or write blocks, by reason; docs/glossary.md explains the reasons.",
        lambda s, _: (((name, reason), n) for name, tier in s.tiers.items() for reason, n in tier.reasons),
        ("tier", "reason"),
    ),
    Metric("kvtide_tier_failed", "1 if the tier's disk returns only errors.", _tier("failed"), _TIER),
    Metric(
        "kvtide_tier_away",
        "1 if the tier is another node that does not answer and is left alone for now; it is tried when prompts come.",
        _tier("away"),
        _TIER,
    ),
    # the byte budgets of shared storage
    Metric(
        "kvtide_credit_bytes",
        "Bytes that this process may write to shared storage now.",
        _budget(lambda b: b.credit),
        _TIER,
    ),
    Metric("kvtide_steward_here", "1 if this process is the budget coordinator.", _budget(lambda b: b.here), _TIER),
    Metric(
        "kvtide_steward_term",
        "Term of the budget coordinator, incremented by every election; the label is its host and process id.",
        lambda s, _: (((name, b.steward.who), b.steward.term) for name, b in s.budgets.items()),
        ("tier", "steward"),
    ),
    Metric(
        "kvtide_steward_silence_seconds",
        "Time since the budget coordinator's last heartbeat; after files.lease or objects.lease another is elected.",
        _budget(lambda b: b.silence),
        _TIER,
    ),
    Metric(
        "kvtide_steward_granted_bytes",
        "Write credits that the budget coordinator has granted to all processes and that may still be used.",
        _budget(lambda b: b.steward.bytes_granted),
        _TIER,
    ),
    Metric(
        "kvtide_steward_unfinished_bytes",
        "Bytes of files that are being written, or were left unfinished by writers that died.",
        _budget(lambda b: b.steward.bytes_unfinished),
        _TIER,
    ),
    Metric(
        "kvtide_steward_removed_blocks_total",
        "Blocks that the budget coordinator removed to make space.",
        _budget(lambda b: b.steward.blocks_removed),
        _TIER,
    ),
    Metric(
        "kvtide_steward_removed_leftovers_total",
        "Unfinished files of dead writers that the budget coordinator removed.",
        _budget(lambda b: b.steward.leftovers_removed),
        _TIER,
    ),
    # other nodes, which this node serves
    Metric(
        "kvtide_peer_connections",
        "Connections of other nodes. Only if peers.listen is set, like the next four.",
        _peers(lambda p: p.connections),
    ),
    Metric(
        "kvtide_peer_blocks_total",
        "Blocks that other nodes wanted to read: sent, not there (missed), or not sent for lack of memory or time.",
        _peer_blocks,
        ("result",),
    ),
    Metric("kvtide_peer_sent_bytes_total", "Bytes of blocks sent to other nodes.", _peers(lambda p: p.bytes_sent)),
    Metric(
        "kvtide_peer_held_bytes",
        "Bytes held for answers to other nodes: blocks in memory that cannot be evicted, and copies read from disk.",
        _peers(lambda p: p.bytes_held),
    ),
    Metric(
        "kvtide_peer_compression_bytes_total",
        "Bytes of blocks that were compressed between nodes: as they travelled, and as they are in memory.",
        _compressed,
        ("direction", "form"),
    ),
    Metric(
        "kvtide_second_reads_total",
        "Reads continued at a second node: too slow at the first (hedged), or failed there (moved); all, and supplied.",
        lambda s, _: (((what,), s.counts.get(count, 0)) for what, count in _SECOND_READS.items()),
        ("what",),
    ),
    Metric(
        "kvtide_peer_closed_connections_total",
        "Connections that were closed because of what the other end did, by reason.",
        lambda _, n: [((reason,), count) for reason, count in n.peers.closed.items()] if n and n.peers else [],
        ("reason",),
    ),
    # the cluster: other nodes that a directory lists
    Metric(
        "kvtide_cluster_members",
        "Other members of the cluster that are known. Only if peers.directory is set, like all metrics of a cluster.",
        _members,
    ),
    Metric(
        "kvtide_cluster_directory_up",
        "1 if the directory is asked, 0 if it did not answer and is left alone for now.",
        _nodes(lambda c: not c.away),
    ),
    Metric(
        "kvtide_cluster_lookups_total",
        "Questions to the directory for the holders of blocks, that were answered.",
        _nodes(lambda c: c.lookups),
    ),
    Metric(
        "kvtide_cluster_failed_lookups_total",
        "Questions to the directory that were not answered in time, or refused.",
        _nodes(lambda c: c.failures),
    ),
    Metric(
        "kvtide_cluster_stale_blocks_total",
        "Blocks that a member did not have though the directory said so.",
        _nodes(lambda c: c.stale),
    ),
    Metric(
        "kvtide_cluster_refused_members_total",
        "Members at whose address another node was found, or the same one after a restart.",
        _nodes(lambda c: c.refused),
    ),
    Metric(
        "kvtide_cluster_bound_total",
        "How often a tier for other nodes was bound to a member.",
        _nodes(lambda c: c.bound),
    ),
    Metric(
        "kvtide_cluster_joined",
        "1 if the node is a member now, so that others find its blocks. Only if it serves, and not while it drains.",
        _joined,
    ),
    Metric(
        "kvtide_cluster_entries_total",
        "Blocks of this node that it entered into the directory, and removed from it. Only for a member.",
        _announced,
        ("change",),
    ),
    # KV events, for routers
    Metric(
        "kvtide_kv_event_subscriptions",
        "Topics that consumers of KV events have subscribed to. Only if events.endpoint is set, like all metrics of KV "
        "events.",
        _kv_events(lambda e: e.subscriptions),
    ),
    Metric(
        "kvtide_kv_event_blocks_total",
        "Blocks that were published as stored in a tier, or as removed from it.",
        _published,
        ("change",),
    ),
    Metric("kvtide_kv_event_batches_total", "Batches of KV events.", _kv_events(lambda e: e.batches)),
    Metric(
        "kvtide_kv_event_described_blocks",
        "Blocks whose tokens the node knows: only these can be published.",
        _kv_events(lambda e: e.described),
    ),
    Metric(
        "kvtide_kv_event_undescribed_blocks_total",
        "Blocks that are not published because their descriptions came too fast.",
        _kv_events(lambda e: e.undescribed),
    ),
    Metric(
        "kvtide_kv_event_ignored_sessions_total",
        "Sessions whose blocks are not published: of another model, or of a tenant that events.tenants does not name.",
        _kv_events(lambda e: e.ignored),
    ),
    Metric("kvtide_kv_event_replays_total", "Replays of KV events.", _kv_events(lambda e: e.replays)),
    Metric(
        "kvtide_kv_event_snapshots_total",
        "Replays that were answered with all that is stored, because the batches were not kept any more.",
        _kv_events(lambda e: e.snapshots),
    ),
    Metric(
        "kvtide_kv_event_cpu_seconds_total",
        "CPU time of the thread that publishes KV events.",
        _kv_events(lambda e: e.cpu_seconds),
    ),
    # tenants with limits of their own
    Metric("kvtide_tenant_blocks", "Blocks of a tenant, by its tag.", _tenant(lambda t: t.blocks), _TENANT),
    Metric("kvtide_tenant_used_bytes", "Bytes used by a tenant's blocks.", _tenant(lambda t: t.bytes_used), _TENANT),
    Metric("kvtide_tenant_limit_bytes", "Bytes that a tenant may use.", _tenant(lambda t: t.limits), _TENANT),
    Metric(
        "kvtide_tenant_refused_blocks_total",
        "Blocks of a tenant that were not stored, or not loaded; docs/glossary.md explains the reasons.",
        _tenant(lambda t: t.refused),
        ("tenant", "reason"),
    ),
    # recordings
    Metric(
        "kvtide_recording",
        "1 while requests are recorded, 0 after that has ended. Only if record.path is set, like the next three.",
        _recorder(lambda r: r.active),
    ),
    Metric("kvtide_recorded_requests_total", "Requests in the recording.", _recorder(lambda r: r.requests)),
    Metric("kvtide_recorded_bytes_total", "Bytes of the recording's file.", _recorder(lambda r: r.bytes_written)),
    Metric(
        "kvtide_unrecorded_requests_total",
        "Requests that are not in the recording: queue full, other block size, recording has ended.",
        _unrecorded,
        ("reason",),
    ),
    # why blocks were missing
    Metric(
        "kvtide_missed_blocks_total",
        "Blocks that requests did not take from the store, by reason (docs/explain.md); of unnamed requests a sample.",
        _missed,
        ("reason",),
    ),
    Metric(
        "kvtide_explain_bytes",
        "Memory for records of why blocks are absent (without reserved shares), recent requests, and models.",
        lambda s, _: [
            (("absences",), s.absences.bytes),
            (("requests",), s.recent.bytes),
            (("models",), s.known_models.bytes),
        ],
        ("records",),
    ),
    Metric(
        "kvtide_explain_records_total",
        "Records made of why blocks are absent (without reserved shares). Later ones overwrite earlier ones.",
        lambda s, _: [((), s.absences.records)],
    ),
    # sessions and clients
    Metric(
        "kvtide_sessions",
        "Open sessions.",
        lambda s, n: [((), s.sessions + sum(c.sessions for c in (n.clients if n else ())))],
    ),
    Metric("kvtide_followers", "Followers of events.", _store(lambda s: s.feed.followers)),
    Metric("kvtide_events_total", "Events sent to followers.", _store(lambda s: s.feed.events)),
    Metric(
        "kvtide_node_clients",
        "Clients: connected, or disconnected with rights that they have not given back.",
        _clients,
        ("state",),
    ),
    Metric("kvtide_node_requests_total", "Requests of all clients.", _node(lambda n: n.requests)),
    Metric("kvtide_node_failures_total", "Operations that failed.", _node(lambda n: n.failures)),
    Metric("kvtide_node_uptime_seconds", "Time since the node began to serve.", _node(lambda n: n.seconds)),
    Metric(
        "kvtide_node_quarantined_slots",
        "Slots that are unusable until the process of a disconnected client is known to have exited.",
        _node(lambda n: sum(c.slots_quarantined for c in n.clients)),
    ),
    Metric(
        "kvtide_client_rights",
        "Rights of a client's process: to read, to write, and a worker's uses of its scheduler's rights.",
        _rights,
        ("pid", "right"),
    ),
)


# -- text format --------------------------------------------------------------------------------------------


def render(store: Statistics, node: NodeStatistics | None = None) -> str:
    """All metrics in Prometheus' text format, version 0.0.4."""
    return "".join(line for metric in METRICS for line in _lines(metric, store, node))


def _lines(metric: Metric, store: Statistics, node: NodeStatistics | None) -> Iterator[str]:
    yield f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n"
    for values, value in metric.samples(store, node):
        labels = [f'{name}="{_escaped(text)}"' for name, text in zip(metric.labels, values, strict=True)]
        if not isinstance(value, HistogramStatistics):
            yield _line(metric.name, labels, value)
            continue
        for bound, count in zip((*map(_number, value.bounds), "+Inf"), accumulate(value.counts), strict=True):
            yield _line(f"{metric.name}_bucket", [*labels, f'le="{bound}"'], count)
        yield _line(f"{metric.name}_sum", labels, value.total)
        yield _line(f"{metric.name}_count", labels, value.count)


def _line(name: str, labels: list[str], value: float) -> str:
    return f"{name}{{{','.join(labels)}}} {_number(value)}\n" if labels else f"{name} {_number(value)}\n"


def _number(value: float) -> str:
    return repr(value) if isinstance(value, float) else str(int(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
