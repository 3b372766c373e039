"""What the metrics say is what was done, to the block; and Prometheus can read it."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtide import Model, Store, config
from kvtide.histogram import Histogram
from kvtide.metrics import METRICS, render
from kvtide.store.node_statistics import (
    ClientStatistics,
    ClusterServing,
    DrainStatistics,
    KvEventStatistics,
    NodeStatistics,
    PeerServing,
)
from kvtide.testing.faults import Fault, FaultyDisk
from kvtide.testing.interface import HYBRID, everything, until
from kvtide.testing.interface import prompt as tokens_of
from tests.peers.nodes import token
from tests.plan.small import LAYOUT, MODEL, NBYTES, SLOTS, Clock, content, keep, length, open_store, prompt, right

DOCS = Path(__file__).parent.parent / "docs"
TOKENS = LAYOUT.block_tokens


class Seen:
    """The metrics of a store at one moment, as Prometheus reads them."""

    def __init__(self, store: Store, node: NodeStatistics | None = None) -> None:
        self.text = render(store.statistics(), node)
        self.families = {f.name: f for f in text_string_to_metric_families(self.text)}
        self.samples = {
            (s.name, *sorted(s.labels.values())): s.value for f in self.families.values() for s in f.samples
        }

    def __call__(self, name: str, *labels: str) -> float:
        return self.samples[f"kvtide_{name}", *sorted(labels)]


def test_every_metric_is_there_as_the_catalogue_says(tmp_path: Path) -> None:
    client = ClientStatistics(1, True, 1.0, 1, 2, 3, 4, 5, 6, 7)
    files = {"path": str(tmp_path / "shared"), "budget": "1GiB"}
    share = {"budget": "4MiB", "reserved": f"{'0' * 32}:1MiB"}
    record = {"path": str(tmp_path / "trace.jsonl")}
    cluster = {"directory": "valkey://127.0.0.1:1", "token_file": token(tmp_path)}
    with open_store(
        tmp_path / "tier", nvme={"write_limit": "1MiB"}, files=files, dram=share, record=record, peers=cluster
    ) as store:
        peers, events = PeerServing(closed={"too slow": 1}), KvEventStatistics()
        seen = Seen(
            store, NodeStatistics(clients=[client, client], peers=peers, cluster=ClusterServing(), events=events)
        )
    for metric in METRICS:
        family = seen.families[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels), sample
        bad = ("kvtide_tier_failures_total", "kvtide_tenant_refused_blocks_total")
        assert family.samples or metric.name in bad, "nothing has failed, all else is there"
    assert len(seen.families) == len(METRICS) == len({m.name for m in METRICS})
    assert seen("client_rights", "1", "read") == 4, "a process may be several clients"
    assert seen("sessions") == 2
    lines = [line.rpartition(" ")[0] for line in seen.text.splitlines() if not line.startswith("#")]
    assert len(set(lines)) == len(lines), "nothing is told twice"


def test_a_node_that_drains_is_no_member_that_is_missed(tmp_path: Path) -> None:
    with open_store(tmp_path / "tier") as store:
        for cluster, joined in (
            (ClusterServing(epoch=7), [1]),
            (ClusterServing(), [0]),
            (ClusterServing(draining=DrainStatistics()), []),
            (None, []),
        ):
            family = Seen(store, NodeStatistics(cluster=cluster)).families["kvtide_cluster_joined"]
            assert [sample.value for sample in family.samples] == joined


def test_hits_are_counted_by_tier(tmp_path: Path) -> None:
    settings = {"store": "through"}
    with open_store(tmp_path / "tier", nvme=settings) as store, store.session(MODEL) as mine:
        keep(mine, 1, 2, 3)
        assert length(mine, 1, 2, 9, 10) == 2
        with mine.match(prompt(1, 2, 3), have=TOKENS) as match:
            assert match.blocks == 3
        seen = Seen(store)
        assert [seen("prompt_blocks_total", r) for r in ("dram", "nvme", "slower", "missed")] == [4, 0, 0, 2]
        assert seen("prompt_tokens_total", "dram") == 4 * TOKENS
        assert (seen("prompts_total"), seen("stored_blocks_total")) == (2, 3)
        assert store.flush(60).complete
    with open_store(tmp_path / "tier", nvme=settings) as store, store.session(MODEL) as mine:
        with mine.match(prompt(1, 2), prefill=1e12):
            seen = Seen(store)
            assert [seen("prompt_blocks_total", r) for r in ("dram", "nvme", "slower", "missed")] == [0, 0, 2, 0]
        assert right(mine, 1, 2) == 2
        seen = Seen(store)
        assert [seen("prompt_blocks_total", r) for r in ("dram", "nvme", "slower", "missed")] == [0, 2, 2, 0]
        assert length(mine, 1, 2, 3) == 3
        seen = Seen(store)
        assert [seen("prompt_blocks_total", r) for r in ("dram", "nvme", "slower", "missed")] == [2, 3, 2, 0]
        assert seen("prompt_tokens_total", "nvme") == 3 * TOKENS


def test_a_block_of_several_groups_counts_once() -> None:
    settings = config.read(env={}, dram={"budget": "8MiB", "segment": "1MiB"})
    model = Model(HYBRID, "given:hybrid")
    with Store(settings) as store, store.session(model) as mine:
        tokens = tokens_of(1, 2, 3, 4)
        mine.store(tokens, everything(HYBRID, tokens))
        with mine.match(tokens) as match:
            assert match.tokens == 64
        assert Seen(store)("prompt_tokens_total", "dram") == 64


def test_the_budget_of_shared_storage_is_seen_by_all_who_use_it(tmp_path: Path) -> None:
    files = {"path": str(tmp_path), "budget": "1GiB", "lease": "2s"}

    def granted(store: Store) -> bool:
        return Seen(store)("steward_granted_bytes", "files") > 0

    with open_store(files=files) as one, open_store(files=files) as two:
        with one.session(MODEL) as mine:
            keep(mine, 1, 2, 3)
            until(lambda: one.statistics().counts.get("blocks written to files") == 3)
        until(lambda: granted(one) and granted(two))
        until(lambda: Seen(one)("credit_bytes", "files") == 0)  # what is not used is given back
        seen = [Seen(store) for store in (one, two)]
        assert sorted(of("steward_here", "files") for of in seen) == [0, 1]
        for of in seen:
            assert of("steward_term", "files", f"{socket.gethostname()} {os.getpid()}") >= 1
            assert of("steward_silence_seconds", "files") < 60
            assert of("tier_budget_bytes", "files") == 1 << 30
    with open_store(files=files) as store:  # who comes later learns what is there
        until(lambda: Seen(store)("tier_blocks", "files") == 3)
        assert Seen(store)("tier_used_bytes", "files") > 3 * NBYTES


def test_bytes_seconds_and_loads(tmp_path: Path) -> None:
    settings = {"store": "through"}
    with open_store(tmp_path / "tier", nvme=settings) as store, store.session(MODEL) as mine:
        keep(mine, 1, 2, 3)
        assert store.flush(60).complete
        seen = Seen(store)
        assert seen("tier_written_bytes_total", "dram") == 3 * NBYTES
        assert seen("tier_written_bytes_total", "nvme") > 3 * NBYTES
        assert seen("tier_written_blocks_total", "nvme") == 3
        assert seen("tier_busy_seconds_total", "nvme", "write") > 0
        assert right(mine, 1, 2) == 2
        seen = Seen(store)
        assert seen("tier_read_bytes_total", "dram") == 2 * NBYTES
        assert seen("load_seconds_count") == 0, "nothing was waited for"
    with open_store(tmp_path / "tier", nvme=settings) as store, store.session(MODEL) as mine:
        assert right(mine, 1, 2, 3) == 3
        with mine.match(prompt(1)) as match:
            mine.load(match, deadline=0).wait()
        until(lambda: Seen(store)("load_seconds_count") == 1)  # those who wait are told first
        seen = Seen(store)
        assert seen("tier_read_bytes_total", "nvme") == 3 * NBYTES
        assert seen("tier_written_bytes_total", "dram") == 3 * NBYTES
        assert seen("tier_read_blocks_total", "nvme") == 3
        assert seen("tier_busy_seconds_total", "nvme", "read") > 0
        assert seen("load_seconds_bucket", "+Inf") == 1
        assert seen("load_seconds_sum") > 0
        until(lambda: (Seen(store)("loads_total", "whole"), Seen(store)("loads_under_way")) == (1, 0))


def test_loads_that_do_not_come_whole(tmp_path: Path) -> None:
    disk, clock = FaultyDisk(), Clock()
    settings = config.read(
        env={},
        dram={"budget": "1MiB", "segment": "1MiB"},
        nvme={"path": str(tmp_path / "tier"), "budget": "16MiB", "segment": "1MiB", "threads": 1, "store": "through"},
    )
    with Store(settings) as store, store.session(MODEL) as mine:
        for number in range(4):
            keep(mine, number)
    with Store(settings, disk=disk, clock=clock) as store, store.session(MODEL) as mine:
        with disk.gate("read") as gate:
            with mine.match(prompt(0)) as match:
                first = mine.load(match)
                assert gate.wait_for(1)
                first.cancel()
            with mine.match(prompt(1)) as match:
                second = mine.load(match, deadline=1000)
                assert Seen(store)("loads_under_way") == 1
                clock.now += 1001
                second.cancel()
        assert store.flush(60).complete
        disk.arm(Fault("read", files="*.segment", times=1000))
        assert length(mine, 2) == 1
        for _ in range(3):  # a record is given up at the third failure in a row
            assert Seen(store)("removed_blocks_total", "nvme", "unreadable") == 0
            with mine.match(prompt(2)) as match:
                assert mine.load(match).wait(30).tokens == 0
        until(lambda: Seen(store)("loads_under_way") == 0)
        seen = Seen(store)
        assert [seen("loads_total", o) for o in ("whole", "partial", "deadline", "cancelled")] == [0, 3, 1, 1]
        assert seen("removed_blocks_total", "nvme", "unreadable") == 1
        assert seen("tier_failures_total", "nvme", "read: Input/output error") == 3
        assert seen("tier_failed", "nvme") == 0
        disk.disarm()


def test_a_disk_that_only_errs_is_failed_until_it_works_again(tmp_path: Path) -> None:
    disk = FaultyDisk()
    settings = config.read(
        env={},
        dram={"budget": "4MiB", "segment": "1MiB"},
        nvme={"path": str(tmp_path / "tier"), "budget": "16MiB", "segment": "1MiB", "store": "through"},
    )
    with Store(settings, disk=disk) as store, store.session(MODEL) as mine:
        keep(mine, 99)
        assert store.flush(60).complete
        disk.arm(Fault("write", files="*.segment", times=1000))
        for number in range(12):
            keep(mine, number)
        assert store.flush(60).complete
        assert Seen(store)("tier_failed", "nvme") == 1
        disk.disarm()
        keep(mine, 100)
        assert store.flush(60).complete
        assert Seen(store)("tier_failed", "nvme") == 0


def test_rights_pins_and_sessions() -> None:
    with open_store() as store, store.session(MODEL) as mine:
        keep(mine, 1, 2)
        mine.pin(prompt(1))
        with mine.match(prompt(1, 2)), mine.reserve(prompt(1, 2, 3)):
            seen = Seen(store)
            assert (seen("leases"), seen("reservations")) == (2, 1), "a reservation keeps the prompt before it"
            assert (seen("held_blocks"), seen("pinned_blocks"), seen("blocks"), seen("sessions")) == (3, 1, 3, 1)
        seen = Seen(store)
        assert (seen("leases"), seen("reservations"), seen("held_blocks")) == (0, 0, 0)


def test_what_left_and_how_old_it_was() -> None:
    clock = Clock()
    with open_store(clock=clock) as store, store.session(MODEL) as mine:
        keep(mine, 0)
        clock.now += 300
        for number in range(1, SLOTS):
            keep(mine, number)
        clock.now += 20
        keep(mine, 100, 101)
        seen = Seen(store)
        assert seen("removed_blocks_total", "dram", "evicted") == seen("eviction_age_seconds_count", "dram") == 2
        assert seen("eviction_age_seconds_bucket", "dram", "10.0") == 0
        assert seen("eviction_age_seconds_bucket", "dram", "60.0") == 1
        assert seen("eviction_age_seconds_bucket", "dram", "600.0") == 2
        assert seen("eviction_age_seconds_sum", "dram") == 320 + 20
        assert seen("policy_in_charge", "dram", "lru") == 1
        mine.drop(prompt(100, 101))
        keep(mine, 200, ttl=5)
        clock.now += 6
        assert length(mine, 200) == 0
        seen = Seen(store)
        assert (seen("removed_blocks_total", "all", "dropped"), seen("removed_blocks_total", "all", "expired")) == (
            2,
            1,
        )


def test_what_was_refused(tmp_path: Path) -> None:
    with (
        open_store(tmp_path / "tier", nvme={"store": "through", "write_limit": 1000}) as store,
        store.session(MODEL) as mine,
    ):
        assert Seen(store)("write_budget_bytes", "nvme") == pytest.approx(60_000, abs=1)
        keep(mine, 1, 2, 3)
        seen = Seen(store)
        assert seen("refused_blocks_total", "store", "nvme", "write budget") == 2
        assert seen("write_budget_bytes", "nvme") < 0
        with mine.reserve(prompt(*range(10, 10 + SLOTS - 3))):
            tokens = prompt(50)
            assert mine.store(tokens, content(mine, tokens)).dropped == 0, "1 to 3 may leave"
        assert store.flush(60).complete
        with mine.reserve(prompt(*range(100, 100 + SLOTS))):
            tokens = prompt(51)
            assert mine.store(tokens, content(mine, tokens)).dropped == 1
        assert Seen(store)("refused_blocks_total", "store", "dram", "no room") == 1


def test_queues_and_followers(tmp_path: Path) -> None:
    disk = FaultyDisk()
    settings = config.read(
        env={},
        dram={"budget": "1MiB", "segment": "1MiB"},
        nvme={
            "path": str(tmp_path / "tier"),
            "budget": "16MiB",
            "segment": "1MiB",
            "threads": 1,
            "store": "through",
            "queue": 8 * NBYTES,
        },
    )
    with Store(settings, disk=disk) as store, store.session(MODEL) as mine:
        stop = store.follow(lambda event: None)
        with disk.gate("write") as gate:
            for number in range(10):
                keep(mine, number)
            assert gate.wait_for(1)
            seen = Seen(store)
            assert seen("lane_bytes", "nvme", "write") == 8 * NBYTES
            assert seen("lane_jobs", "nvme", "write") > 0
            assert seen("refused_blocks_total", "store", "nvme", "queue full") == 2
            assert (seen("followers"), seen("events_total")) == (1, 10)
        assert store.flush(60).complete
        stop()
        seen = Seen(store)
        assert (seen("lane_bytes", "nvme", "write"), seen("followers")) == (0, 0)


def test_what_labels_say_is_escaped() -> None:
    from kvtide.metrics import _escaped

    assert _escaped('a"b\\c\nd') == 'a\\"b\\\\c\\nd'


# -- the pages ----------------------------------------------------------------------------------------------


def named(text: str) -> set[str]:
    """The metrics that a text names."""
    return {re.sub("_(bucket|sum|count)$", "", name) for name in re.findall(r"\bkvtide_[a-z_]+\b", text)}


def test_the_dashboard_and_the_queries_name_metrics_that_there_are() -> None:
    known = {m.name for m in METRICS}
    board = json.loads((DOCS / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    assert len(queries) > 8
    assert all(named(query) and named(query) <= known for query in queries)
    page = (DOCS / "metrics.md").read_text()
    assert named(page) == known


def test_values_are_counted_alike_one_by_one_and_together() -> None:
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 7.0]
    alone, together = Histogram((1.0, 2.0)), Histogram((1.0, 2.0))
    for value in values:
        alone.add_one(value)
    together.add(np.array(values))
    assert alone.statistics() == together.statistics()
    assert alone.statistics().counts == (3, 2, 1)
