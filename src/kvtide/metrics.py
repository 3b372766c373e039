"""The metrics of a store and its node, for Prometheus: the catalogue, and the text.

``METRICS`` has every metric once: its name, help and labels, and where its value is found in the statistics that the
parts keep of themselves. There is no registry, and nothing is counted here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from kvtide.histogram import HistogramStatistics
from kvtide.store.recorder import REASONS, RecorderStatistics
from kvtide.store.statistics import Statistics, TenantStatistics

if TYPE_CHECKING:
    from kvtide.store.node_statistics import NodeStatistics
    from kvtide.tiers.shared.credits import BudgetStatistics

__all__ = ["CONTENT_TYPE", "METRICS", "Metric", "render"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_Samples = Iterable[tuple[tuple[str, ...], float | HistogramStatistics]]
"""The values of the labels, and what is measured."""
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


# -- where values are found ---------------------------------------------------------------------------------


def _store(value: Callable[[Statistics], float | HistogramStatistics]) -> _Source:
    return lambda store, _: [((), value(store))]


def _node(value: Callable[[NodeStatistics], float]) -> _Source:
    return lambda _, node: [] if node is None else [((), value(node))]


def _tier(field: str) -> _Source:
    return lambda store, _: [((name,), getattr(tier, field)) for name, tier in store.tiers.items()]


def _lane(read: str, write: str) -> _Source:
    """A field for each direction."""
    return lambda store, _: [
        ((name, direction), getattr(lane, field))
        for name, lane in store.lanes.items()
        for direction, field in (("read", read), ("write", write))
    ]


def _budget(value: Callable[[BudgetStatistics], float]) -> _Source:
    """Of every shared storage that has a byte budget."""
    return lambda store, _: [((name,), value(budget)) for name, budget in store.budgets.items()]


def _recorder(value: Callable[[RecorderStatistics], float]) -> _Source:
    return lambda store, _: [] if store.recorder is None else [((), value(store.recorder))]


def _unrecorded(store: Statistics, _: NodeStatistics | None) -> _Samples:
    if store.recorder is not None:
        for reason in REASONS:
            yield (reason,), store.recorder.dropped.get(reason, 0)


def _count(text: str) -> _Source:
    """One of the store's counts for each colder tier."""
    return lambda store, _: [((name,), store.counts.get(text.format(name), 0)) for name in store.lanes]


def _speeds(store: Statistics, _: NodeStatistics | None) -> _Samples:
    for name, lane in store.lanes.items():
        yield (name, "read"), lane.read_speed.bytes_per_second
        yield (name, "write"), lane.write_speed.bytes_per_second


def _removed(store: Statistics, _: NodeStatistics | None) -> _Samples:
    for name in store.tiers:
        yield (name, "evicted"), store.counts.get(f"blocks evicted from {name}", 0)
    for name in store.lanes:
        yield (name, "unreadable"), store.counts.get(f"blocks unreadable in {name}", 0)
    for reason in ("dropped", "expired"):
        yield ("all", reason), store.counts.get(f"blocks {reason}", 0)


def _refused(store: Statistics, _: NodeStatistics | None) -> _Samples:
    for what in ("store", "load"):
        yield (what, "dram", "no room"), store.counts.get(f"{what}s dropped: no room in DRAM", 0)
        yield (what, "dram", "quota"), store.counts.get(f"{what}s dropped: a tenant's quota of dram is used up", 0)
    for reason, text in (
        ("no memory yet", "memory was not taken in time"),
        ("node late", "the node answered an engine too late"),
        ("engine pages", "too many pages of an engine waited"),
    ):
        yield ("store", "dram", reason), store.counts.get(f"stores dropped: {text}", 0)
    for name in store.lanes:
        for reason, text in (
            ("quota", f"a tenant's quota of {name} is used up"),
            ("queue full", f"the queue of {name} is full"),
            ("write budget", f"the write budget of {name} is used up"),
            ("admission", f"the admission to {name} refused"),
        ):
            yield ("store", name, reason), store.counts.get(f"stores dropped: {text}", 0)


def _tenant(values: Callable[[TenantStatistics], dict[str, int]]) -> _Source:
    """A value for each tier, or reason, of those tenants that have limits of their own."""
    return lambda store, _: (((tag, name), n) for tag, t in store.tenants.items() for name, n in values(t).items())


def _clients(_: Statistics, node: NodeStatistics | None) -> _Samples:
    if node is not None:
        connected = sum(c.connected for c in node.clients)
        yield ("connected",), connected
        yield ("gone",), len(node.clients) - connected


def _rights(_: Statistics, node: NodeStatistics | None) -> _Samples:
    found: Counter[tuple[str, ...]] = Counter()  # a process may be several clients
    for client in node.clients if node else ():
        found[str(client.pid), "read"] += client.holdings
        found[str(client.pid), "write"] += client.reservations
        found[str(client.pid), "visit"] += client.visits
    return found.items()


_HINTS = {
    "tool": "hints: the turn ended in a tool",
    "end": "hints: the turn ended",
    "returns_in": "hints: expected back",
}
_BROUGHT = {"begun": "prompts brought back", "in time": "prompts brought back in time"}
_TIER, _WAY, _TENANT = ("tier",), ("tier", "direction"), ("tenant", "tier")

METRICS = (
    # what was asked for
    Metric("kvtide_prompts_total", "Prompts that were matched.", _store(lambda s: s.planner.prompts)),
    Metric(
        "kvtide_prompt_blocks_total",
        "Blocks of prompts that were matched, by result: the tier that has them, slower (quicker to compute), missed.",
        lambda s, _: (((name,), n) for name, n in s.planner.blocks.items()),
        ("result",),
    ),
    Metric(
        "kvtide_prompt_tokens_total",
        "The same, in tokens: the hit rate is the share of those in a tier.",
        lambda s, _: (((name,), n) for name, n in s.planner.tokens.items()),
        ("result",),
    ),
    Metric(
        "kvtide_load_seconds",
        "How long loads took that had to wait for a colder tier.",
        _store(lambda s: s.pipeline.loads.seconds),
        histogram=True,
    ),
    Metric(
        "kvtide_loads_total",
        "How these loads ended: whole, partial (blocks unreadable or without room), deadline, cancelled.",
        lambda s, _: (((name,), n) for name, n in s.pipeline.loads.outcomes.items()),
        ("outcome",),
    ),
    Metric("kvtide_loads_under_way", "Loads that wait now.", _store(lambda s: s.pipeline.loads.under_way)),
    # what is there
    Metric("kvtide_blocks", "Blocks that are known, in whatever tier.", _store(lambda s: s.blocks)),
    Metric("kvtide_held_blocks", "Blocks that a right or a move keeps from eviction.", _store(lambda s: s.held)),
    Metric("kvtide_pinned_blocks", "Blocks that are pinned.", _store(lambda s: s.pinned)),
    Metric("kvtide_leases", "Rights to read that are open.", _store(lambda s: s.pipeline.leases)),
    Metric("kvtide_reservations", "Rights to write that are open.", _store(lambda s: s.pipeline.reservations)),
    Metric(
        "kvtide_tier_blocks",
        "Blocks in a tier, those being written included. Of shared storage with a budget: as its steward last said.",
        _tier("blocks"),
        _TIER,
    ),
    Metric("kvtide_tier_budget_bytes", "What a tier may take.", _tier("budget"), _TIER),
    Metric("kvtide_tier_taken_bytes", "What it has taken from the host.", _tier("bytes_taken"), _TIER),
    Metric("kvtide_tier_huge_bytes", "Of that, memory known to be in huge pages.", _tier("bytes_huge"), _TIER),
    Metric(
        "kvtide_scratch_bytes",
        "Memory beside that of blocks, in which they are compressed, sealed and opened.",
        _store(lambda s: s.scratch.taken),
    ),
    Metric("kvtide_tier_used_bytes", "What of that blocks use.", _tier("bytes_used"), _TIER),
    # what moves
    Metric(
        "kvtide_stored_blocks_total", "Blocks that callers stored.", _store(lambda s: s.counts.get("blocks stored", 0))
    ),
    Metric("kvtide_tier_read_blocks_total", "Blocks brought to DRAM.", _count("blocks read from {}"), _TIER),
    Metric("kvtide_tier_written_blocks_total", "Blocks written down.", _count("blocks written to {}"), _TIER),
    Metric("kvtide_tier_read_bytes_total", "Bytes read from a tier; of DRAM: handed out.", _tier("bytes_read"), _TIER),
    Metric("kvtide_tier_written_bytes_total", "Bytes written to a tier.", _tier("bytes_written"), _TIER),
    Metric(
        "kvtide_tier_busy_seconds_total",
        "Time in which something was read or written.",
        _lane("read_seconds", "write_seconds"),
        _WAY,
    ),
    Metric(
        "kvtide_tier_speed_bytes", "Bytes a second, as measured lately; what the planner reckons with.", _speeds, _WAY
    ),
    Metric("kvtide_lane_jobs", "Jobs that wait for a tier.", _lane("reads_waiting", "writes_waiting"), _WAY),
    Metric(
        "kvtide_lane_bytes",
        "Bytes that wait for a tier or are under way.",
        _lane("read_bytes_waiting", "write_bytes_waiting"),
        _WAY,
    ),
    # what leaves, and what is not done
    Metric("kvtide_removed_blocks_total", "Blocks that left a tier, or all.", _removed, ("tier", "reason")),
    Metric(
        "kvtide_eviction_age_seconds",
        "For how long nobody had used what was evicted.",
        lambda s, _: (((name,), e.ages) for name, e in s.pipeline.evictors.items()),
        _TIER,
        histogram=True,
    ),
    Metric(
        "kvtide_policy_in_charge",
        "1 for the policy that decides now what leaves.",
        lambda s, _: (((name, e.policy), 1) for name, e in s.pipeline.evictors.items()),
        ("tier", "policy"),
    ),
    Metric(
        "kvtide_hints_total",
        "What callers said of prompts' next use: the turn ended in a tool, it ended, when they are expected back.",
        lambda s, _: (((kind,), s.counts.get(text, 0)) for kind, text in _HINTS.items()),
        ("kind",),
    ),
    Metric(
        "kvtide_brought_back_total",
        "Prompts expected soon that were brought to DRAM: all that were begun, and those used in time.",
        lambda s, _: (((kind,), s.counts.get(text, 0)) for kind, text in _BROUGHT.items()),
        ("kind",),
    ),
    Metric(
        "kvtide_refused_blocks_total",
        "Blocks that were not stored in a tier, or not loaded to it.",
        _refused,
        ("what", "tier", "reason"),
    ),
    Metric(
        "kvtide_write_budget_bytes",
        "What may be written to a tier at once; below 0: owed. Only with a limit of writes.",
        lambda s, _: (((name,), b.bytes_left) for name, b in s.pipeline.write_budgets.items()),
        _TIER,
    ),
    Metric(
        "kvtide_tier_failures_total",
        "Why a tier could not read or write blocks; see the reasons in docs/glossary.md.",
        lambda s, _: (((name, reason), n) for name, tier in s.tiers.items() for reason, n in tier.reasons),
        ("tier", "reason"),
    ),
    Metric("kvtide_tier_failed", "1 when a tier's disk only answers with errors.", _tier("failed"), _TIER),
    # the byte budgets of shared storage
    Metric("kvtide_credit_bytes", "What this process may write now.", _budget(lambda b: b.credit), _TIER),
    Metric("kvtide_steward_here", "1 if this process keeps the byte budget.", _budget(lambda b: b.here), _TIER),
    Metric(
        "kvtide_steward_term",
        "Grows with every election; who was elected is a label: host and process id.",
        lambda s, _: (((name, b.steward.who), b.steward.term) for name, b in s.budgets.items()),
        ("tier", "steward"),
    ),
    Metric(
        "kvtide_steward_silence_seconds",
        "Since its last sign of life was seen; after files.lease or objects.lease another is elected.",
        _budget(lambda b: b.silence),
        _TIER,
    ),
    Metric(
        "kvtide_steward_granted_bytes",
        "Credit that it has given to all, and that may still be used.",
        _budget(lambda b: b.steward.bytes_granted),
        _TIER,
    ),
    Metric(
        "kvtide_steward_unfinished_bytes",
        "Files that are being written, or were left so by writers that died.",
        _budget(lambda b: b.steward.bytes_unfinished),
        _TIER,
    ),
    Metric(
        "kvtide_steward_removed_blocks_total",
        "Blocks that it removed to make room.",
        _budget(lambda b: b.steward.blocks_removed),
        _TIER,
    ),
    Metric(
        "kvtide_steward_removed_leftovers_total",
        "Unfinished files of dead writers that it removed.",
        _budget(lambda b: b.steward.leftovers_removed),
        _TIER,
    ),
    # who has what, of tenants with limits of their own
    Metric("kvtide_tenant_blocks", "Blocks of a tenant, by its tag.", _tenant(lambda t: t.blocks), _TENANT),
    Metric("kvtide_tenant_used_bytes", "What they use.", _tenant(lambda t: t.bytes_used), _TENANT),
    Metric("kvtide_tenant_limit_bytes", "What it may use.", _tenant(lambda t: t.limits), _TENANT),
    Metric(
        "kvtide_tenant_refused_blocks_total",
        "Blocks that were not stored for it, or not loaded; see the reasons in docs/glossary.md.",
        _tenant(lambda t: t.refused),
        ("tenant", "reason"),
    ),
    # recordings
    Metric(
        "kvtide_recording",
        "1 while requests are recorded, 0 when that has ended. Only where record.path is set, as the next three.",
        _recorder(lambda r: r.active),
    ),
    Metric("kvtide_recorded_requests_total", "Requests in the recording.", _recorder(lambda r: r.requests)),
    Metric("kvtide_recorded_bytes_total", "Bytes of its file.", _recorder(lambda r: r.bytes_written)),
    Metric(
        "kvtide_unrecorded_requests_total",
        "Requests that are not in it: queue full, other block size, recording has ended.",
        _unrecorded,
        ("reason",),
    ),
    # who is there
    Metric(
        "kvtide_sessions",
        "Sessions that are open.",
        lambda s, n: [((), s.sessions + sum(c.sessions for c in (n.clients if n else ())))],
    ),
    Metric("kvtide_followers", "Who follows events.", _store(lambda s: s.feed.followers)),
    Metric("kvtide_events_total", "Events that followers were told.", _store(lambda s: s.feed.events)),
    Metric("kvtide_node_clients", "Processes: connected, or gone without giving all back.", _clients, ("state",)),
    Metric("kvtide_node_requests_total", "Requests of all clients.", _node(lambda n: n.requests)),
    Metric("kvtide_node_failures_total", "Operations that could not be done.", _node(lambda n: n.failures)),
    Metric("kvtide_node_uptime_seconds", "Since the node began to serve.", _node(lambda n: n.seconds)),
    Metric(
        "kvtide_node_quarantined_slots",
        "Slots that nobody may use until a client that is gone is known to be dead.",
        _node(lambda n: sum(c.slots_quarantined for c in n.clients)),
    ),
    Metric(
        "kvtide_client_rights",
        "Rights of a client's process: to read, to write, and a worker's to use its scheduler's.",
        _rights,
        ("pid", "right"),
    ),
)


# -- the text -----------------------------------------------------------------------------------------------


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
